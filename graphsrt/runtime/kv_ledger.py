"""Whose page is it: what requests hold of the KV memory, and what the tree of prefixes holds.

A page is free, or a request's own, or the tree's. A request is *seated*: it gets a row of ``req_to_token``, the pages
of its longest cached prefix, which it locks in the tree, and pages of its own for the rest. After a chunk of its prompt
is computed, and when it leaves, its full pages become the tree's (``share``), so that whoever comes with the same
beginning reads them. Of two requests that have computed the same page, the later one gives its own up and reads the
other's from then on. Only tokens that are known and computed get into the tree: never a rejected draft, whose slot the
next token overwrites.

At any time ``free + cached + own pages of requests = all``; and when no request is left, nothing is locked.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from graphsrt.runtime.counters import Counters
from graphsrt.runtime.kv_pool import ReqToTokenPool, TokenToKVPool
from graphsrt.runtime.radix_cache import Ints, RadixCache
from graphsrt.runtime.request import Request

Moved = tuple[Request, int, int, int]
"""A request, its row, and the first and one past the last column of the table that have new slots."""


class KVLedger:
    """The pools and the tree, and every move of a page between them.

    prefix_cache: whether computed pages go to the tree; if not, it stays empty.
    moved: columns of the table that changed otherwise than by a step's own tokens, for the next step to tell the ranks.
    """

    def __init__(self, rows: ReqToTokenPool, pool: TokenToKVPool, counters: Counters, *, prefix_cache: bool):
        self.rows = rows
        self.pool = pool
        self.cache = RadixCache(pool.page_size)
        self.prefix_cache = prefix_cache
        self.moved: list[Moved] = []
        self._counters = counters

    @property
    def available_pages(self) -> int:
        """Pages that can be had without taking any from a request: free ones, and cached ones that nobody uses."""
        return self.pool.available_pages + self.cache.evictable_pages

    def seat(self, request: Request, num_spare_pages: int) -> bool:
        """Give a request a row and pages for all its tokens; what is cached of it counts as computed.

        False, and nothing is changed, if there is no row, or if not ``num_spare_pages`` pages would be left, beside
        room for the token that it is to generate where that is not its last.
        """
        pages_for = self.pool.pages_for
        node = self.cache.match(request.tokens[: request.num_cacheable_tokens])
        self.cache.lock(node)  # its pages are no longer available, so the count below is right
        cached = self.cache.pages_to(node)
        needed = pages_for(min(request.num_tokens + 1, request.max_kv_tokens)) - len(cached)
        row = self.rows.alloc() if self.available_pages >= needed + num_spare_pages else None
        if row is None:
            self.cache.unlock(node)
            return False
        request.row, request.node = row, node
        request.num_shared_pages = len(cached)
        request.num_computed = len(cached) * self.pool.page_size
        if len(cached):
            self._put(request, cached)
            self.moved.append((request, row, 0, request.num_computed))
        given = self.give(request, pages_for(request.num_tokens) - len(cached))
        assert given
        return True

    def give(self, request: Request, num_pages: int) -> bool:
        """Add pages to a request, for which cached ones are given up; False and nothing given if there are too few."""
        missing = num_pages - self.pool.available_pages
        if missing > self.cache.evictable_pages:
            return False
        if missing > 0:
            self.pool.free(self.cache.evict(missing))
            self._counters.evicted_pages += missing
        pages = self.pool.alloc(num_pages)
        assert pages is not None
        self._put(request, pages)
        return True

    def share(self, request: Request) -> None:
        """Give a request's full computed pages to the tree, and take the tree's own for those that it has already."""
        page_size = self.pool.page_size
        shared, full = request.num_shared_pages, request.num_computed // page_size
        if not self.prefix_cache or full <= shared or request.embeds is not None:
            return
        assert request.node is not None and request.row is not None
        own = np.array(request.pages[shared:full], dtype=np.int64)
        node, present = self.cache.extend(request.node, request.tokens[shared * page_size : full * page_size], own)
        self.cache.lock(node)
        self.cache.unlock(request.node)
        request.node, request.num_shared_pages = node, full
        if len(present):
            self.pool.free(own[: len(present)])
            request.pages[shared : shared + len(present)] = present.tolist()
            start, stop = shared * page_size, (shared + len(present)) * page_size
            self.rows.table[request.row, start:stop] = self.pool.slots(present)
            self.moved.append((request, request.row, start, stop))

    def release(self, request: Request, *, share: bool) -> None:
        """Take back all that a request holds; ``share``: what it has computed is kept in the tree."""
        assert request.row is not None and request.node is not None
        if share:
            self.share(request)
        self.rows.free(request.row)
        self.pool.free(request.pages[request.num_shared_pages :])
        self.cache.unlock(request.node)
        request.row, request.pages, request.num_shared_pages, request.node = None, [], 0, None

    def flush(self) -> int:
        """Give up all cached pages that no request uses; how many they were."""
        pages = self.cache.evict(self.cache.evictable_pages)
        self.pool.free(pages)
        return len(pages)

    def reset(self, requests: Iterable[Request]) -> None:
        """Make everything free without trusting what the books say; these are the requests that may hold something."""
        self.moved.clear()
        self.rows.reset()
        self.pool.reset()
        self.cache.reset()
        for request in requests:
            request.row, request.pages, request.num_shared_pages, request.node = None, [], 0, None

    def _put(self, request: Request, pages: Ints) -> None:
        start = len(request.pages) * self.pool.page_size
        table_row = self.rows.table[request.row]
        slots = self.pool.slots(pages)[: len(table_row) - start]  # the last page may reach past the context
        table_row[start : start + len(slots)] = slots
        request.pages.extend(pages.tolist())
