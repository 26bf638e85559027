"""The page pool against a plain list of owners."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmserve.runtime.cache.pages import IntegrityError, PagePool, Pages

NUM_PAGES = 12


def pages_of(*pages: int) -> Pages:
    return np.array(pages, dtype=np.int32)


class PoolMachine(RuleBasedStateMachine):
    """Pages go from hand to hand as the pool allows; the model is one owner a page."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.owner = ["free"] * NUM_PAGES

    def held(self, owner: str) -> Pages:
        return pages_of(*(page for page in range(NUM_PAGES) if self.owner[page] == owner))

    def pick(self, data: st.DataObject, owner: str) -> Pages:
        held = self.held(owner).tolist()
        return pages_of(*data.draw(st.lists(st.sampled_from(held), unique=True) if held else st.just([])))

    def give(self, pages: Pages, owner: str) -> None:
        for page in pages:
            self.owner[page] = owner

    @rule(count=st.integers(0, NUM_PAGES))
    def allocate(self, count: int) -> None:
        if count > len(self.held("free")):
            with pytest.raises(IntegrityError, match="are free"):
                self.pool.allocate(count)
            return
        pages = self.pool.allocate(count)
        assert len(set(pages.tolist())) == count
        assert all(self.owner[page] == "free" for page in pages)
        self.give(pages, "request")

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = self.pick(data, "request")
        self.pool.release(pages)
        self.give(pages, "free")

    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        pages = self.pick(data, "request")
        self.pool.adopt(pages)
        self.give(pages, "tree")

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        pages = self.pick(data, "tree")
        self.pool.evict(pages)
        self.give(pages, "free")

    @precondition(lambda self: len(self.held("free")) > 0)
    @rule(data=st.data())
    def release_of_a_free_page_is_refused(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.held("free").tolist()))
        with pytest.raises(IntegrityError):
            self.pool.release(pages_of(page))

    @invariant()
    def in_order(self) -> None:
        assert self.pool.num_free == len(self.held("free"))
        self.pool.check_integrity(self.held("tree"), self.held("request"))


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestPool = PoolMachine.TestCase


def test_the_check_finds_a_lost_page() -> None:
    pool = PagePool(4)
    pool.allocate(2)
    with pytest.raises(IntegrityError, match="1 of 4 pages"):
        pool.check_integrity(tree=pages_of(), requests=pages_of(0))


def test_the_check_finds_a_page_with_two_owners() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.adopt(pages[:1])
    with pytest.raises(IntegrityError, match="owned twice"):
        pool.check_integrity(tree=pages[:1], requests=pages)


def test_the_check_finds_a_page_listed_twice() -> None:
    pool = PagePool(4)
    pages = pool.allocate(1)
    with pytest.raises(IntegrityError, match="owned twice"):
        pool.check_integrity(tree=pages_of(), requests=np.concatenate([pages, pages]))


def test_a_page_cannot_be_released_twice() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(IntegrityError):
        pool.release(pages)
    assert pool.num_free == 2
