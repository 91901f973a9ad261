"""Memory of a CPU that lies in huge pages, for what every step reads: weights, keys and values.

A processor keeps the addresses of some thousand pages. With pages of 4 KiB that is a few MiB, and a step that reads
gigabytes waits for addresses as well as for data: most on virtual machines, where looking one up takes twice the steps.
Linux gives pages of 2 MiB to memory that asks for them, as far as it has any; where it has none, this is memory as any
other.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from collections.abc import Sequence

import torch

PAGE = 2 << 20
LARGE = 2 * PAGE
"""From so many bytes on a tensor has a mapping of its own."""
_CHUNK = 32 * PAGE
_LINE = 64  # tensors begin with a cache line

_mappings: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()  # by where the tensor begins


def empty(shape: Sequence[int], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """``torch.empty``; on the CPU in huge pages if it is large. Memory that is not whole pages is ordinary."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < LARGE or device != "cpu":
        return torch.empty(list(shape), dtype=dtype, device=device)
    memory, start = _map(num_bytes, num_bytes // PAGE * PAGE)
    tensor = _tensor(memory, start, shape, dtype)
    _mappings[tensor.data_ptr()] = memory
    return tensor


class HugePages:
    """Small tensors one behind the other, so that they share pages, and large ones as ``empty`` has them.

    Each keeps the chunk that it lies in; a chunk goes when all of its tensors have gone.
    """

    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._next = self._end = 0

    def take(self, value: torch.Tensor, *, copy: bool = False) -> torch.Tensor:
        """``value`` in huge pages: itself if it is all of a mapping already and need not be a ``copy``."""
        if not copy and value.is_contiguous() and _is_whole(value):
            return value
        return self.empty(value.shape, value.dtype).copy_(value)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor whose elements are not set, with a storage of its own size."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0 or num_bytes >= LARGE:
            return empty(shape, dtype)
        if self._chunk is None or self._next + num_bytes > self._end:
            self._chunk, self._next = _map(_CHUNK, _CHUNK)
            self._end = self._next + _CHUNK
        tensor = _tensor(self._chunk, self._next, shape, dtype)
        self._next += -(-num_bytes // _LINE) * _LINE
        return tensor


def _is_whole(value: torch.Tensor) -> bool:
    storage = value.untyped_storage()
    return storage.data_ptr() in _mappings and storage.nbytes() == value.numel() * value.element_size()


def _map(num_bytes: int, in_pages: int) -> tuple[mmap.mmap, int]:
    """New memory, and the offset in it where a page begins: from there on it has ``num_bytes``."""
    # Private: whether shared memory gets huge pages is another setting, which is off on most systems.
    memory = mmap.mmap(-1, num_bytes + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE, start, in_pages)
    return memory, start


def _tensor(memory: mmap.mmap, start: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=start).view(list(shape))
