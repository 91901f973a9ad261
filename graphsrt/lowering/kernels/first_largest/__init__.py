"""The first of the largest numbers of each row, on the CPU: what greedy decoding takes of its logits."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from graphsrt.lowering.kernels.build import build_library

SOURCE = Path(__file__).with_name("first_largest.cpp")
_INFINITE = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}  # its bits


@cache
def load() -> ctypes.CDLL:
    """The library, compiled once a machine. Raises ``CompileError``."""
    library = ctypes.CDLL(str(build_library("first_largest", SOURCE)))
    size, address = ctypes.c_int64, ctypes.c_void_p
    library.graphsrt_first_largest.argtypes = [size, address, size, size, size, address]
    library.graphsrt_first_largest.restype = None
    return library


def first_largest(x: Tensor) -> Tensor:
    """int64[R]: ``x.argmax(-1)`` of CPU rows ``x``, [R, n] with n > 0, of any float dtype.

    Of equal numbers it is the first; NaN counts as the largest. ``torch.max`` is many times slower: its loop keeps two
    results. Raises ``CompileError``.
    """
    infinite = _INFINITE.get(x.dtype)
    if infinite is None:
        return torch.from_numpy(x.numpy().argmax(axis=-1))
    if x.stride(1) != 1:
        x = x.contiguous()
    found = torch.empty(x.shape[0], dtype=torch.int64)
    load().graphsrt_first_largest(infinite, x.data_ptr(), *x.shape, x.stride(0), found.data_ptr())
    return found
