"""What the machine can do at best: bytes that are read in a second, and the rate of the model's own matrix products."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from graphsrt import huge_pages


class Ceilings:
    """Of one machine, and of programs with so many bytes of weights and products of these shapes.

    Machines that others use as well change from one minute to the next, so a ceiling is measured beside what is
    compared with it. shapes: (out, in) of every product, as often as it occurs. dtypes: of their numbers, of which the
    fastest counts: some processors multiply numbers of 16 bits only by detours. threads: as many as the engine has.
    """

    def __init__(
        self, weight_bytes: int, shapes: Iterable[tuple[int, int]], dtypes: Collection[torch.dtype], threads: int
    ):
        self.weight_bytes = weight_bytes
        self._counts = Counter(shapes)
        self._dtypes, self._threads = dtypes, threads
        self._buffer: Tensor | None = None

    def read_bandwidth(self, seconds: float = 0.1) -> float:
        """Bytes a second, of all threads, in one pass over a buffer as large as the weights."""
        if self._buffer is None:
            self._buffer = huge_pages.empty([max(self.weight_bytes, 1 << 20) // 4], torch.float32).fill_(1.0)
        buffer = self._buffer
        with _threads(self._threads):
            return buffer.nbytes / _best(lambda: buffer.sum(), seconds)

    def product_rate(self, tokens: int, seconds: float = 0.3) -> float:
        """FLOPs a second of ``[tokens, in] · [in, out]``, one after the other, over all shapes.

        Each distinct shape is timed by itself, for its share of the time; a product is what ``torch`` (oneDNN) makes of
        it.
        """
        with _threads(self._threads):
            return max(self._product_rate(tokens, dtype, seconds / len(self._dtypes)) for dtype in self._dtypes)

    def _product_rate(self, tokens: int, dtype: torch.dtype, seconds: float) -> float:
        flops = spent = 0.0
        for (out, width), count in self._counts.items():
            x, weight = torch.randn(tokens, width).to(dtype), torch.randn(out, width).to(dtype)
            best = _best(lambda x=x, w=weight: F.linear(x, w), seconds / len(self._counts))  # type: ignore[misc]
            spent += count * best
            flops += count * 2.0 * tokens * out * width
        return flops / spent


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _best(call: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest call, of at least three and as many as fit into the time."""
    call()
    best, until, calls = float("inf"), time.perf_counter() + seconds, 0
    while calls < 3 or time.perf_counter() < until:
        start = time.perf_counter()
        call()
        best, calls = min(best, time.perf_counter() - start), calls + 1
    return best
