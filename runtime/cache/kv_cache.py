"""KVCache: the pages of running requests and of the prefix cache, in one pool.

It owns the page pool and the prefix tree and moves pages between them. The scheduler decides who gets pages and when
they are released.
"""

from collections.abc import Iterable

import numpy as np

from llmserve.runtime.cache.pages import PagePool, Pages
from llmserve.runtime.cache.radix import ELEMENT_BYTES, Node, RadixTree


class Lease:
    """The pages of one running request, its block table:

    [0, shared)    the tree's, locked up to `node`, read only: other requests may read them too
    [shared, end)  the request's own

    `table` is int32 bytes.
    """

    __slots__ = ("node", "shared", "table")

    def __init__(self, node: Node, pages: Pages) -> None:
        self.node = node
        self.shared = len(pages)
        self.table = bytearray(pages.tobytes())

    @property
    def num_pages(self) -> int:
        return len(self.table) // 4

    def own_pages(self) -> Pages:
        return np.frombuffer(bytes(self.table[self.shared * 4 :]), dtype=np.int32)


class KVCache:
    """Tokens are given as int32 bytes; lengths are in tokens. With `prefix_cache` off, nothing is ever shared or
    kept.
    """

    def __init__(self, num_pages: int, page_size: int, prefix_cache: bool = True) -> None:
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.evicted_pages = 0
        self.flushes = 0
        """How many times the prefix cache was emptied."""
        self._pool = PagePool(num_pages)
        self._tree = RadixTree(page_size)

    @property
    def total(self) -> int:
        """All pages."""
        return self._pool.num_pages

    @property
    def cached(self) -> int:
        """Pages that only the prefix cache holds, and that can be evicted."""
        return self._tree.num_evictable

    @property
    def available(self) -> int:
        """Pages that a request could get now."""
        return self._pool.num_free + self._tree.num_evictable

    @property
    def used(self) -> int:
        """Pages that running requests hold."""
        return self.total - self.available

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def match(self, namespace: str, tokens: bytes | bytearray, limit: int) -> tuple[int, int]:
        """How many of the first `limit` tokens are cached, and how many of their pages running requests hold."""
        if not self.prefix_cache:
            return 0, 0
        pages, locked = self._tree.match(namespace, tokens, limit // self.page_size)
        return pages * self.page_size, locked

    def lease(self, namespace: str, tokens: bytes | bytearray, limit: int) -> Lease:
        """A lease that begins with the cached pages of at most the first `limit` tokens."""
        return Lease(*self._tree.lock_prefix(namespace, self._key(tokens, limit if self.prefix_cache else 0)))

    def grow(self, lease: Lease, num_tokens: int) -> bool:
        """Extends the lease to `num_tokens`, evicting if necessary. False, with nothing changed, when there is no
        room.
        """
        count = self.pages_for(num_tokens) - lease.num_pages
        if count <= 0:
            return True
        if count > self.available:
            return False
        if count > self._pool.num_free:
            pages = self._tree.evict(count - self._pool.num_free)
            self._pool.evict(pages)
            self.evicted_pages += len(pages)
        lease.table += self._pool.allocate(count).tobytes()
        return True

    def commit(self, lease: Lease, tokens: bytes | bytearray, computed: int) -> None:
        """Gives the full pages of the first `computed` tokens to the tree, so that others can share them.

        The KV of these tokens must have been written. Pages with content that the tree already has are replaced by the
        tree's.
        """
        full = computed // self.page_size
        if full <= lease.shared or not self.prefix_cache:
            return
        shared = lease.shared
        own = np.frombuffer(bytes(lease.table[shared * 4 : full * 4]), dtype=np.int32)
        run = bytes(tokens[shared * self.page_size * ELEMENT_BYTES : full * self.page_size * ELEMENT_BYTES])
        lease.node, pages, present = self._tree.extend(lease.node, run, own)
        self._pool.adopt(own[present:])
        if present:
            self._pool.release(own[:present])
            lease.table[shared * 4 : full * 4] = pages.tobytes()
        lease.shared = full

    def release(self, lease: Lease, tokens: bytes | bytearray, computed: int) -> None:
        """Ends the lease. The full pages of the first `computed` tokens stay in the prefix cache."""
        self.commit(lease, tokens, computed)
        self._pool.release(lease.own_pages())
        self._tree.unlock(lease.node)
        del lease.table[:]
        lease.shared = 0

    def flush(self) -> int:
        """Empties the prefix cache but for what running requests hold. Returns the number of pages freed."""
        self.flushes += 1
        pages = self._tree.evict(self._tree.num_evictable)
        self._pool.evict(pages)
        return len(pages)

    def reset(self) -> None:
        """Frees all pages and empties the prefix cache. No lease may be in use."""
        self.flushes += 1
        self._pool = PagePool(self.total)
        self._tree = RadixTree(self.page_size)

    def check_integrity(self, leases: Iterable[Lease]) -> None:
        """Checks that free + tree + requests = all pages, given all leases in use. Raises IntegrityError."""
        own = [lease.own_pages() for lease in leases]
        self._pool.check_integrity(self._tree.all_pages(), np.concatenate([np.zeros(0, dtype=np.int32), *own]))
        self._tree.check_integrity([lease.node for lease in leases])

    def _key(self, tokens: bytes | bytearray, limit: int) -> bytes:
        return bytes(tokens[: limit // self.page_size * self.page_size * ELEMENT_BYTES])
