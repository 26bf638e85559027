"""The prefix tree: which runs of tokens have their KV in which pages, and which of these may be evicted.

It does not move pages between owners (kv_cache.py does), and knows requests only as locks.
"""

import heapq
from collections.abc import Iterable, Iterator

import numpy as np

from llmserve.runtime.cache.pages import IntegrityError, Pages

ELEMENT_BYTES = 4
"""A key is the bytes of int32 elements, which are token ids."""

NO_PAGES: Pages = np.zeros(0, dtype=np.int32)


class Node:
    """A run of full pages. `locks` counts the locks on it and on its descendants, so all below an unlocked node are
    unlocked.
    """

    __slots__ = ("children", "key", "locks", "pages", "parent", "stamp")

    def __init__(self, parent: "Node | None", key: bytes, pages: Pages) -> None:
        self.parent = parent
        self.key = key
        self.pages = pages
        self.children: dict[bytes, Node] = {}  # by the bytes of the child's first page; in order of insertion
        self.locks = 0
        self.stamp = 0


class RadixTree:
    """Keys are (namespace, elements); all runs are page-aligned. Evicts the least recently used unlocked leaves first.

    A Node stands for the run from the root to its end. A split keeps the node as the lower half, so that references to
    it keep their meaning.
    """

    def __init__(self, page_size: int) -> None:
        self.num_pages = 0
        self.num_locked = 0
        """Pages of locked nodes; all others can be evicted."""
        self._page_bytes = page_size * ELEMENT_BYTES
        self._roots: dict[str, Node] = {}
        self._clock = 0
        self._num_nodes = 0
        # (stamp, tiebreaker, node): every unlocked leaf has an entry with its present stamp; other entries are stale.
        self._heap: list[tuple[int, int, Node]] = []
        self._pushed = 0

    @property
    def num_evictable(self) -> int:
        return self.num_pages - self.num_locked

    def match(self, namespace: str, key: bytes | bytearray, limit: int) -> tuple[int, int]:
        """How many of the key's first `limit` pages are in the tree, and how many of those are locked. Changes
        nothing.
        """
        node = self._roots.get(namespace)
        matched = locked = position = 0
        while node is not None and matched < limit:
            node = node.children.get(bytes(key[position : position + self._page_bytes]))
            if node is None:
                break
            count = min(self._common_pages(node.key, key, position), limit - matched)
            matched += count
            locked += count if node.locks else 0
            if count < len(node.pages):
                break
            position += len(node.key)
        return matched, locked

    def lock_prefix(self, namespace: str, key: bytes | bytearray) -> tuple[Node, Pages]:
        """Locks the longest run that is a prefix of the key; returns its last node, and its pages [matched]."""
        node = self._roots.get(namespace)
        if node is None:
            node = self._roots[namespace] = Node(None, b"", NO_PAGES)
        end, pages = self._descend(node, key)
        self._lock(end)
        return end, pages

    def extend(self, node: Node, key: bytes, pages: Pages) -> tuple[Node, Pages, int]:
        """Adds the run `key` with its `pages` below a locked node, and moves the lock to the end of the run.

        Returns the run's last node, its pages in the tree [len(pages)], and how many of these were there before. Of
        `pages` the tree takes over all but that many first ones.
        """
        end, held = self._descend(node, key)
        present = len(held)
        if present < len(pages):
            end = self._append(end, key[present * self._page_bytes :], pages[present:], held_by_caller=end is node)
        self._lock(end)
        self.unlock(node)
        return end, np.concatenate((held, pages[present:])), present

    def unlock(self, node: Node) -> None:
        """Releases one lock on a node."""
        self._clock += 1
        step: Node | None = node
        while step is not None and step.parent is not None:
            step.locks -= 1
            step.stamp = self._clock
            if step.locks == 0:
                self.num_locked -= len(step.pages)
                self._offer(step)
            step = step.parent

    def evict(self, count: int) -> Pages:
        """Removes and returns up to `count` unlocked pages, from the ends of leaves, the least recently used first."""
        taken: list[Pages] = []
        wanted = count
        while wanted > 0 and self._heap:
            stamp, _, leaf = self._heap[0]
            if not self._evictable(leaf, stamp):
                heapq.heappop(self._heap)
                continue
            keep = max(0, len(leaf.pages) - wanted)
            taken.append(leaf.pages[keep:])
            wanted -= len(leaf.pages) - keep
            if keep:
                leaf.key, leaf.pages = leaf.key[: keep * self._page_bytes], leaf.pages[:keep]
            else:
                heapq.heappop(self._heap)
                self._remove(leaf)
        self.num_pages -= count - wanted
        return np.concatenate(taken) if taken else NO_PAGES

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents first."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def all_pages(self) -> Pages:
        return np.concatenate([NO_PAGES, *(node.pages for node in self.nodes())])

    def check_integrity(self, locked: Iterable[Node]) -> None:
        """Checks keys, counts and locks, given the nodes of all locks held. Raises IntegrityError."""
        locks: dict[int, int] = {}
        for handle in locked:
            step: Node | None = handle
            while step is not None:
                locks[id(step)] = locks.get(id(step), 0) + 1
                step = step.parent
        nodes = list(self.nodes())
        for node in nodes:
            parent = node.parent
            if parent is None or parent.children.get(node.key[: self._page_bytes]) is not node:
                raise IntegrityError("a node is not where its key says")
            if len(node.key) != len(node.pages) * self._page_bytes or not node.key:
                raise IntegrityError(f"a node has {len(node.pages)} pages for a key of {len(node.key)} bytes")
            if node.locks != locks.get(id(node), 0):
                raise IntegrityError(f"a node counts {node.locks} locks, {locks.get(id(node), 0)} are out")
        waiting = {id(node) for stamp, _, node in self._heap if self._evictable(node, stamp)}
        if any(self._evictable(node, node.stamp) and id(node) not in waiting for node in nodes):
            raise IntegrityError("an unlocked leaf is not up for eviction")
        counts = (self._num_nodes, self.num_pages, self.num_locked)
        real = (len(nodes), sum(len(n.pages) for n in nodes), sum(len(n.pages) for n in nodes if n.locks))
        if counts != real:
            raise IntegrityError(f"nodes, pages, locked pages are counted as {counts}, they are {real}")

    def _descend(self, node: Node, key: bytes | bytearray) -> tuple[Node, Pages]:
        """The last node of the longest run below `node` that is a prefix of the key, and its pages. Splits a node where
        the run ends within it.
        """
        position = 0
        held: list[Pages] = []
        while position < len(key):
            child = node.children.get(bytes(key[position : position + self._page_bytes]))
            if child is None:
                break
            count = self._common_pages(child.key, key, position)
            if count < len(child.pages):
                child = self._split(child, count)
            held.append(child.pages)
            position += len(child.key)
            node = child
        return node, np.concatenate(held) if held else NO_PAGES

    def _append(self, end: Node, run: bytes, pages: Pages, held_by_caller: bool) -> Node:
        """Adds a run after `end`; returns the node that it ends in.

        A leaf that nobody else has locked is made longer. Otherwise a prompt added page by page would become a chain
        of nodes, one a page, and every lookup would walk it.
        """
        self.num_pages += len(pages)
        if end.parent is not None and not end.children and end.locks == int(held_by_caller):
            end.key, end.pages = end.key + run, np.concatenate((end.pages, pages))
            self.num_locked += len(pages) if held_by_caller else 0
            return end
        child = end.children[run[: self._page_bytes]] = Node(end, run, pages)
        self._num_nodes += 1
        return child

    def _common_pages(self, run: bytes, key: bytes | bytearray, position: int) -> int:
        """The length of the common prefix of `run` and key[position:], in full pages."""
        if key.startswith(run, position):
            return len(run) // self._page_bytes
        count = min(len(run), len(key) - position) // ELEMENT_BYTES
        ours = np.frombuffer(run, dtype=np.int32, count=count)
        theirs = np.frombuffer(key, dtype=np.int32, count=count, offset=position)
        different = np.flatnonzero(ours != theirs)
        return int(different[0] if len(different) else count) * ELEMENT_BYTES // self._page_bytes

    def _split(self, node: Node, count: int) -> Node:
        """Moves the first `count` pages of a node into a new parent, which is returned."""
        parent = node.parent
        assert parent is not None
        cut = count * self._page_bytes
        upper = Node(parent, node.key[:cut], node.pages[:count])
        upper.locks, upper.stamp = node.locks, node.stamp
        parent.children[upper.key[: self._page_bytes]] = upper
        node.parent, node.key, node.pages = upper, node.key[cut:], node.pages[count:]
        upper.children[node.key[: self._page_bytes]] = node
        self._num_nodes += 1
        return upper

    def _lock(self, node: Node) -> None:
        self._clock += 1
        step: Node | None = node
        while step is not None and step.parent is not None:
            if step.locks == 0:
                self.num_locked += len(step.pages)
            step.locks += 1
            step.stamp = self._clock
            step = step.parent

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.key[: self._page_bytes]]
        leaf.parent = None
        self._num_nodes -= 1
        self._offer(parent)

    def _evictable(self, node: Node, stamp: int) -> bool:
        return node.locks == 0 and not node.children and node.parent is not None and node.stamp == stamp

    def _offer(self, node: Node) -> None:
        """Adds the node to the eviction heap if it is an unlocked leaf."""
        if not self._evictable(node, node.stamp):
            return
        self._pushed += 1
        heapq.heappush(self._heap, (node.stamp, self._pushed, node))
        if len(self._heap) > 2 * self._num_nodes + 64:
            leaves = {id(entry[2]): entry for entry in self._heap if self._evictable(entry[2], entry[0])}
            self._heap = list(leaves.values())
            heapq.heapify(self._heap)
