"""The pool of KV pages: which are free, and what kind of owner each of the others has.

It knows neither tokens nor requests; the content of a page is known to its owner (radix.py, kv_cache.py).
"""

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.int32]

FREE, REQUEST, TREE = 0, 1, 2
_NAMES = ("free", "request", "tree")


class IntegrityError(Exception):
    """A page is lost, has two owners, or was about to change owners in an impossible way."""


class PagePool:
    """Pages 0 … num_pages - 1. At any time each of them has exactly one owner:

    free       listed once in _free[:num_free]
    request    in the block table of one running request, after its shared part
    tree       in one node of the prefix tree

    and it changes hands only along these arrows, each checked:

    free --allocate--> request --adopt--> tree --evict--> free
                       request --release--------------->  free
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        # A stack with the lowest page on top, so that the same requests get the same pages in every run.
        self._free: Pages = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._owner = np.full(num_pages, FREE, dtype=np.uint8)

    def allocate(self, count: int) -> Pages:
        """Free pages for a request, [count]. The caller has checked that there are enough."""
        if count > self.num_free:
            raise IntegrityError(f"{count} pages wanted, {self.num_free} are free")
        pages = self._free[self.num_free - count : self.num_free][::-1].copy()
        self._move(pages, FREE, REQUEST)
        self.num_free -= count
        return pages

    def release(self, pages: Pages) -> None:
        """A request gives pages back."""
        self._move(pages, REQUEST, FREE)
        self._push(pages)

    def adopt(self, pages: Pages) -> None:
        """The tree takes pages over from a request."""
        self._move(pages, REQUEST, TREE)

    def evict(self, pages: Pages) -> None:
        """The tree gives pages back."""
        self._move(pages, TREE, FREE)
        self._push(pages)

    def check_integrity(self, tree: Pages, requests: Pages) -> None:
        """Checks that free + tree + requests = all pages, none of them twice. Raises IntegrityError."""
        owners = np.full(self.num_pages, 255, dtype=np.uint8)
        for pages, owner in ((self._free[: self.num_free], FREE), (requests, REQUEST), (tree, TREE)):
            if len(np.unique(pages)) != len(pages) or np.any(owners[pages] != 255):
                raise IntegrityError(f"a page of the owner {_NAMES[owner]!r} is owned twice")
            owners[pages] = owner
        wrong = np.flatnonzero(owners != self._owner)
        if len(wrong):
            raise IntegrityError(
                f"{len(wrong)} of {self.num_pages} pages are lost or misplaced (the first: {wrong[0]}); "
                f"free={self.num_free} tree={len(tree)} requests={len(requests)}"
            )

    def _move(self, pages: Pages, source: int, target: int) -> None:
        if np.any(self._owner[pages] != source):
            raise IntegrityError(f"a page that moves from {_NAMES[source]} to {_NAMES[target]} has another owner")
        self._owner[pages] = target

    def _push(self, pages: Pages) -> None:
        self._free[self.num_free : self.num_free + len(pages)] = pages[::-1]
        self.num_free += len(pages)
