"""What the machine can do at best: bytes that are read in a second, and the rate of the model's own matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F

from graphsrt import huge_pages


def read_bandwidth(num_bytes: int, seconds: float = 1.0) -> float:
    """Bytes a second, of all threads, in one pass over a buffer as large as the model's weights."""
    buffer = huge_pages.empty([max(num_bytes, 1 << 20) // 4], torch.float32).fill_(1.0)
    return buffer.nbytes / _best(lambda: buffer.sum(), seconds)


def product_rate(shapes: Iterable[tuple[int, int]], tokens: int, dtype: torch.dtype, seconds: float = 1.0) -> float:
    """FLOPs a second of ``[tokens, in] · [in, out]``, one after the other, over all ``(out, in)``.

    Each distinct shape is timed by itself, for its share of the time; a product is what ``torch`` (oneDNN) makes of it.
    """
    counts: dict[tuple[int, int], int] = {}
    for shape in shapes:
        counts[shape] = counts.get(shape, 0) + 1
    flops = spent = 0.0
    for (out, width), count in counts.items():
        x, weight = torch.randn(tokens, width).to(dtype), torch.randn(out, width).to(dtype)
        spent += count * _best(lambda x=x, w=weight: F.linear(x, w), seconds / len(counts))  # type: ignore[misc]
        flops += count * 2.0 * tokens * out * width
    return flops / spent


def _best(call: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest call, of at least three and as many as fit into the time."""
    call()
    best, until, calls = float("inf"), time.perf_counter() + seconds, 0
    while calls < 3 or time.perf_counter() < until:
        start = time.perf_counter()
        call()
        best, calls = min(best, time.perf_counter() - start), calls + 1
    return best
