"""Who owns which part of the KV cache. Bookkeeping only: the memory itself is the workers'."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class ReqToTokenPool:
    """Rows of ``req_to_token``: the KV slot of each position of each request that is being computed.

    ``table`` is int32[max_requests, max_context], written by the scheduler as pages are given out. Entries past what
    a request has been given are stale, never read.
    """

    def __init__(self, max_requests: int, max_context: int):
        if max_requests < 1 or max_context < 1:
            raise ValueError(f"max_requests ({max_requests}) and max_context ({max_context}) must be at least 1")
        self.max_requests = max_requests
        self.max_context = max_context
        self.table: NDArray[np.int32] = np.zeros((max_requests, max_context), dtype=np.int32)
        self.reset()

    @property
    def available(self) -> int:
        """Rows that are free."""
        return len(self._free)

    def alloc(self) -> int | None:
        """A row, now the caller's, or None if all are taken."""
        if not self._free:
            return None
        row = self._free.pop()
        self._used[row] = True
        return row

    def free(self, row: int) -> None:
        """Give a row back."""
        assert self._used[row], f"row {row} is free already"
        self._used[row] = False
        self._free.append(row)

    def reset(self) -> None:
        """Make every row free, whoever holds it."""
        self._free = list(range(self.max_requests - 1, -1, -1))
        self._used = np.zeros(self.max_requests, dtype=bool)


class TokenToKVPool:
    """Pages of KV slots. Slot ``page * page_size + offset``; a request owns whole pages.

    ``num_pages`` counts page 0, which is reserved and never handed out: a stray slot 0 then spoils nobody's KV.
    """

    def __init__(self, num_pages: int, page_size: int):
        if num_pages < 2 or page_size < 1:
            raise ValueError(
                f"num_pages must be at least 2, as page 0 is reserved (got {num_pages}), and page_size at least 1 "
                f"(got {page_size})"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self.reset()

    @property
    def total_pages(self) -> int:
        """Pages that can be handed out: all but page 0."""
        return self.num_pages - 1

    @property
    def available_pages(self) -> int:
        """Pages that are free now."""
        return self._num_free

    def pages_for(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` tokens of one request take."""
        return -(-num_tokens // self.page_size)

    def alloc(self, num_pages: int) -> NDArray[np.int64] | None:
        """``num_pages`` page numbers, int64[num_pages], now the caller's; None and nothing taken if fewer are free."""
        assert num_pages >= 0
        if num_pages > self._num_free:
            return None
        self._num_free -= num_pages
        pages = self._free[self._num_free : self._num_free + num_pages][::-1].copy()
        self._used[pages] = True
        return pages

    def free(self, pages: Sequence[int] | NDArray[np.int64]) -> None:
        """Give pages back. A page that is free already, or named twice, is a bug of ours and an assertion."""
        pages = np.asarray(pages, dtype=np.int64)
        assert self._used[pages].all(), f"freed twice: {pages[~self._used[pages]].tolist()}"
        self._used[pages] = False
        assert len(np.unique(pages)) == len(pages), f"named twice: {pages.tolist()}"
        self._free[self._num_free : self._num_free + len(pages)] = pages
        self._num_free += len(pages)

    def slots(self, pages: NDArray[np.int64]) -> NDArray[np.int64]:
        """The slots of these pages in order, int64[len(pages) * page_size]."""
        return (pages[:, None] * self.page_size + np.arange(self.page_size, dtype=np.int64)).reshape(-1)

    def reset(self) -> None:
        """Make every page but page 0 free, whoever holds it."""
        self._free: NDArray[np.int64] = np.arange(self.num_pages - 1, 0, -1, dtype=np.int64)
        self._num_free = self.num_pages - 1
        self._used = np.zeros(self.num_pages, dtype=bool)
