"""The prefix tree against a dict from prefixes to pages, and the whole cache against what its pages hold."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmserve.runtime.cache.kv_cache import KVCache, Lease
from llmserve.runtime.cache.pages import IntegrityError, Pages
from llmserve.runtime.cache.radix import Node, RadixTree
from llmserve.runtime.engine.batch import int32_bytes

PAGE = 2
Block = tuple[int, int]
Prefix = tuple[Block, ...]

# Few different blocks, so that runs share, split and meet again.
BLOCKS = st.lists(st.sampled_from([(1, 1), (1, 2), (2, 1)]), max_size=6).map(tuple)
NAMESPACES = st.sampled_from(["", "other"])


def key_of(blocks: Prefix) -> bytes:
    return int32_bytes([token for block in blocks for token in block])


@dataclass
class Entry:
    page: int
    locks: int
    stamp: int


class TreeMachine(RuleBasedStateMachine):
    """The model keeps an entry for every prefix in the tree and evicts page by page the oldest that nothing extends."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree(PAGE)
        self.entries: dict[tuple[str, Prefix], Entry] = {}
        self.handles: list[tuple[str, Prefix, Node]] = []
        self.clock = 0
        self.next_page = 0

    def path(self, namespace: str, blocks: Prefix) -> list[Entry]:
        """The entries that the blocks begin with."""
        path = []
        for length in range(1, len(blocks) + 1):
            entry = self.entries.get((namespace, blocks[:length]))
            if entry is None:
                break
            path.append(entry)
        return path

    def touch(self, path: list[Entry], locks: int) -> None:
        self.clock += 1
        for entry in path:
            entry.locks += locks
            entry.stamp = self.clock

    @rule(namespace=NAMESPACES, blocks=BLOCKS)
    def match(self, namespace: str, blocks: Prefix) -> None:
        path = self.path(namespace, blocks)
        for limit in range(len(blocks) + 2):
            locked = sum(entry.locks > 0 for entry in path[:limit])
            assert self.tree.match(namespace, key_of(blocks), limit) == (min(limit, len(path)), locked)

    @rule(namespace=NAMESPACES, blocks=BLOCKS)
    def lock(self, namespace: str, blocks: Prefix) -> None:
        path = self.path(namespace, blocks)
        node, pages = self.tree.lock_prefix(namespace, key_of(blocks))
        assert pages.tolist() == [entry.page for entry in path]
        self.touch(path, +1)
        self.handles.append((namespace, blocks[: len(path)], node))

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), run=BLOCKS.filter(bool))
    def extend(self, data: st.DataObject, run: Prefix) -> None:
        index = data.draw(st.integers(0, len(self.handles) - 1))
        namespace, start, node = self.handles[index]
        offered = list(range(self.next_page, self.next_page + len(run)))
        self.next_page += len(run)
        end, pages, present = self.tree.extend(node, key_of(run), np.array(offered, dtype=np.int32))
        assert present == len(self.path(namespace, start + run)) - len(start)
        for i in range(present, len(run)):
            self.entries[namespace, start + run[: i + 1]] = Entry(offered[i], 0, 0)
        whole = self.path(namespace, start + run)
        assert pages.tolist() == [entry.page for entry in whole[len(start) :]]
        self.touch(whole, +1)
        self.touch(self.path(namespace, start), -1)
        self.handles[index] = namespace, start + run, end

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        namespace, blocks, node = self.handles.pop(data.draw(st.integers(0, len(self.handles) - 1)))
        self.tree.unlock(node)
        self.touch(self.path(namespace, blocks), -1)

    @rule(count=st.integers(1, 5))
    def evict(self, count: int) -> None:
        expected = []
        for _ in range(count):
            inner = {(namespace, prefix[:-1]) for namespace, prefix in self.entries}
            leaves = [key for key, entry in self.entries.items() if not entry.locks and key not in inner]
            if not leaves:
                break
            oldest = min(leaves, key=lambda key: self.entries[key].stamp)
            expected.append(self.entries.pop(oldest).page)
        assert sorted(self.tree.evict(count).tolist()) == sorted(expected)

    @invariant()
    def in_order(self) -> None:
        self.tree.check_integrity([node for _, _, node in self.handles])
        assert sorted(self.tree.all_pages().tolist()) == sorted(entry.page for entry in self.entries.values())
        assert self.tree.num_evictable == sum(entry.locks == 0 for entry in self.entries.values())


TreeMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40)
TestTree = TreeMachine.TestCase


class CacheMachine(RuleBasedStateMachine):
    """Requests lease, compute, commit and release. A page holds what was computed into it, and a shared one must hold
    the prefix of whoever gets it."""

    NUM_PAGES = 10

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVCache(self.NUM_PAGES, PAGE)
        self.running: list[tuple[Lease, list[int], int]] = []
        self.content: dict[int, tuple[int, ...]] = {}

    @rule(tokens=st.lists(st.integers(1, 2), min_size=1, max_size=12), limit=st.integers(0, 12))
    def start(self, tokens: list[int], limit: int) -> None:
        matched, _ = self.kv.match("", int32_bytes(tokens), limit)
        lease = self.kv.lease("", int32_bytes(tokens), limit)
        assert lease.num_pages * PAGE == matched <= min(limit, len(tokens))
        pages = np.frombuffer(bytes(lease.table), dtype=np.int32).tolist()
        for i, page in enumerate(pages):
            assert self.content[page] == tuple(tokens[: (i + 1) * PAGE])
        self.running.append((lease, tokens, matched))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 6))
    def compute(self, data: st.DataObject, count: int) -> None:
        index = data.draw(st.integers(0, len(self.running) - 1))
        lease, tokens, computed = self.running[index]
        end = min(computed + count, len(tokens))
        available, needed = self.kv.available, self.kv.pages_for(end) - lease.num_pages
        assert self.kv.grow(lease, end) == (needed <= available)
        assert self.kv.available == available - (max(0, needed) if needed <= available else 0)
        if needed > available:
            return
        pages = np.frombuffer(bytes(lease.table), dtype=np.int32).tolist()
        for page_index in range(computed // PAGE, self.kv.pages_for(end)):
            self.content[pages[page_index]] = tuple(tokens[: min(end, (page_index + 1) * PAGE)])
        if data.draw(st.booleans()):
            self.kv.commit(lease, int32_bytes(tokens), end)
        self.running[index] = lease, tokens, end

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease, tokens, computed = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.kv.release(lease, int32_bytes(tokens), computed)
        assert self.kv.match("", int32_bytes(tokens), computed)[0] == computed // PAGE * PAGE

    @rule()
    def flush(self) -> None:
        cached = self.kv.cached
        assert self.kv.flush() == cached
        assert self.kv.cached == 0

    @invariant()
    def in_order(self) -> None:
        leases = [lease for lease, _, _ in self.running]
        self.kv.check_integrity(leases)
        held = {page for lease in leases for page in np.frombuffer(bytes(lease.table), dtype=np.int32).tolist()}
        assert self.kv.used == len(held)
        for lease, tokens, computed in self.running:
            pages = np.frombuffer(bytes(lease.table), dtype=np.int32).tolist()
            for i in range(computed // PAGE):
                assert self.content[pages[i]] == tuple(tokens[: (i + 1) * PAGE])


CacheMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40)
TestCache = CacheMachine.TestCase


def test_the_least_recently_used_run_goes_first_and_from_its_end() -> None:
    kv = KVCache(6, PAGE)
    for tokens in ([1, 1, 1, 1], [2, 2, 2, 2], [3, 3]):
        lease = kv.lease("", int32_bytes(tokens), 0)
        assert kv.grow(lease, len(tokens))
        kv.release(lease, int32_bytes(tokens), len(tokens))
    used_again = kv.lease("", int32_bytes([1, 1, 1, 1]), 4)
    kv.release(used_again, int32_bytes([1, 1, 1, 1]), 4)
    big = kv.lease("", int32_bytes([9] * 4), 0)
    assert kv.grow(big, 4)  # one page is free, one must go
    assert [kv.match("", int32_bytes([n] * 4), 4)[0] for n in (1, 2, 3)] == [4, 2, 2]


def test_namespaces_share_nothing() -> None:
    kv = KVCache(4, PAGE)
    lease = kv.lease("a", int32_bytes([1, 1]), 0)
    assert kv.grow(lease, 2)
    kv.release(lease, int32_bytes([1, 1]), 2)
    assert kv.match("a", int32_bytes([1, 1]), 2) == (2, 0)
    assert kv.match("b", int32_bytes([1, 1]), 2) == (0, 0)


def test_without_a_prefix_cache_nothing_stays() -> None:
    kv = KVCache(4, PAGE, prefix_cache=False)
    lease = kv.lease("", int32_bytes([1, 1]), 2)
    assert kv.grow(lease, 2)
    kv.release(lease, int32_bytes([1, 1]), 2)
    assert kv.match("", int32_bytes([1, 1]), 2) == (0, 0)
    assert kv.cached == 0
    assert kv.available == 4


def test_two_that_computed_the_same_end_up_with_the_same_pages() -> None:
    kv = KVCache(8, PAGE)
    tokens = int32_bytes([1, 2, 3, 4])
    first, second = kv.lease("", tokens, 3), kv.lease("", tokens, 3)
    for lease in (first, second):
        assert kv.grow(lease, 4)
    assert kv.used == 4
    kv.commit(first, tokens, 4)
    kv.commit(second, tokens, 4)
    assert first.table == second.table
    assert kv.used == 2
    kv.check_integrity([first, second])


def test_the_check_finds_a_lease_that_was_forgotten() -> None:
    kv = KVCache(4, PAGE)
    lease = kv.lease("", int32_bytes([1, 1, 1]), 0)
    assert kv.grow(lease, 3)
    kv.commit(lease, int32_bytes([1, 1, 1]), 3)
    with pytest.raises(IntegrityError, match="lost or misplaced"):
        kv.check_integrity([])


def pages_of(*numbers: int) -> Pages:
    return np.array(numbers, dtype=np.int32)


def test_a_run_that_is_added_page_by_page_is_one_node() -> None:
    tree = RadixTree(PAGE)
    end, _ = tree.lock_prefix("", b"")
    for page, token in enumerate([5, 6, 7]):
        end, _, _ = tree.extend(end, int32_bytes([token] * PAGE), pages_of(page))
    assert [node.pages.tolist() for node in tree.nodes()] == [[0, 1, 2]]
    tree.check_integrity([end])
    tree.unlock(end)
    assert tree.evict(2).tolist() == [1, 2]


def test_a_run_does_not_grow_into_the_lock_of_another() -> None:
    tree = RadixTree(PAGE)
    root, _ = tree.lock_prefix("", b"")
    mine, _, _ = tree.extend(root, int32_bytes([5] * PAGE), pages_of(0))
    theirs, _ = tree.lock_prefix("", int32_bytes([5] * PAGE))
    mine, _, _ = tree.extend(mine, int32_bytes([6] * PAGE), pages_of(1))
    tree.unlock(mine)
    assert tree.evict(2).tolist() == [1]  # the first page is still theirs
    tree.check_integrity([theirs])


def test_thousands_of_runs_do_not_grow_the_eviction_heap() -> None:
    tree = RadixTree(1)
    for i in range(300):
        node, _ = tree.lock_prefix("", b"")
        end, _, _ = tree.extend(node, int32_bytes([i]), np.array([i], dtype=np.int32))
        tree.unlock(end)
    for i in range(3000):
        node, pages = tree.lock_prefix("", int32_bytes([i % 300]))
        assert pages.tolist() == [i % 300]
        tree.unlock(node)
    assert len(tree._heap) <= 2 * 300 + 64 + 1
    assert sorted(tree.evict(1000).tolist()) == list(range(300))
