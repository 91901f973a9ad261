"""The largest number of each row, and where it is first, on the CPU: what greedy decoding takes of its logits."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from graphsrt.lowering.kernels.build import load_extension

SOURCE = Path(__file__).with_name("first_largest.cpp")
_INFINITE = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}  # its bits


@cache
def load() -> ModuleType:
    """The extension, compiled once a machine. Raises ``CompileError``."""
    return load_extension("first_largest", SOURCE)


def first_largest(x: Tensor) -> tuple[Tensor, Tensor, bool]:
    """float64[R] and int64[R]: ``x.max(-1)`` of CPU rows ``x``, [R, n] with n > 0, of any float dtype. Then whether all
    of these numbers are finite.

    Of equal numbers it is the first; NaN counts as the largest. ``torch.max`` is many times slower: its loop keeps two
    results. Raises ``CompileError``.
    """
    infinite = _INFINITE.get(x.dtype)
    if infinite is None:
        places = torch.from_numpy(x.numpy().argmax(axis=-1))
        numbers = x.gather(-1, places[:, None])[:, 0].double()
        return numbers, places, bool(numbers.isfinite().all())
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, count = x.shape
    numbers, places = torch.empty(rows, dtype=torch.float64), torch.empty(rows, dtype=torch.int64)
    find = load().first_largest
    finite = find(infinite, x.data_ptr(), rows, count, x.stride(0), places.data_ptr(), numbers.data_ptr())
    return numbers, places, finite
