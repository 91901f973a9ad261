"""One safetensors file: its header, checked whole before anything believes it, and its bytes, read where asked for.

The format is 8 bytes of header length, a JSON header, and data (https://github.com/huggingface/safetensors). A header
is an outsider's word on where to read and how much, so every entry is held against its dtype, shape and neighbours, and
the size of the file. The data is read with ``pread`` and counted, never mapped: what a rank touched is known exactly.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from typing import Any

import torch

from graphsrt.errors import CheckpointError, explain

MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
_MAX_READ_BYTES = 1 << 30  # one pread() takes 2 GiB at most

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: ``start`` is the offset of its first byte in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry of the first dimension; of the whole tensor where it has none."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsFile:
    """A file, open while it is read. ``size`` is in bytes; ``digest``, a hash of header and size, is equal wherever
    the same file is seen.

    ``CheckpointError`` that names the file, and the tensor where it is one's fault, if anything is wrong with it.
    """

    def __init__(self, path: str):
        self.path = path
        self.tensors: dict[str, StoredTensor] = {}
        self.metadata: dict[str, str] = {}
        self._fd: int | None = None
        self._identity: tuple[int, int, int] | None = None
        try:
            self._read_header()
        finally:
            # Let go again: hundreds of shards must not cost each rank hundreds of descriptors.
            self.close()

    def read_into(self, start: int, out: memoryview) -> int:
        """Fill ``out`` with the bytes from offset ``start`` on; returns how many were read. From any thread."""
        fd, filled = self._descriptor(), 0
        while filled < out.nbytes:
            part = out[filled : filled + _MAX_READ_BYTES]
            try:
                count = os.preadv(fd, [part], start + filled)
            except OSError as error:
                raise CheckpointError(
                    explain("a checkpoint file cannot be read", where=self.path, got=str(error))
                ) from error
            if not count:
                raise self._damaged(f"the file ended at byte {start + filled} while it was read", "it was cut short")
            filled += count
        return filled

    def open(self) -> None:
        """Open the file for reading, unless it is: before several threads read from it."""
        self._descriptor()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _descriptor(self) -> int:
        if self._fd is None:
            try:
                fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError as error:
                raise CheckpointError(explain(f"no such checkpoint file: {self.path}")) from error
            except OSError as error:
                raise CheckpointError(
                    explain("a checkpoint file cannot be opened", where=self.path, got=str(error))
                ) from error
            about = os.fstat(fd)
            identity = (about.st_ino, about.st_size, about.st_mtime_ns)
            if self._identity not in (None, identity):
                os.close(fd)
                raise self._damaged("it has changed since its header was read", "another process writes to it")
            self._fd, self._identity = fd, identity
        return self._fd

    def _read_header(self) -> None:
        self._descriptor()
        assert self._identity is not None
        self.size = size = self._identity[1]
        if size < 8:
            raise self._damaged(f"{size} bytes, and not even a header length", "the file is truncated")
        length = int.from_bytes(self._pread(8, 0), "little")
        if length > MAX_HEADER_BYTES:
            raise self._damaged(f"a header of {length} bytes", "this is no safetensors file, or its start is damaged")
        if 8 + length > size:
            raise self._damaged(f"a header of {length} bytes in a file of {size}", "the file is truncated")
        text = self._pread(length, 8)
        self.header_bytes = 8 + length
        self.digest = hashlib.sha256(text + b"%d" % size).hexdigest()
        try:
            header = json.loads(text, object_pairs_hook=self._no_duplicates)
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
            raise self._damaged(f"a header that is not JSON: {error}", "the header is damaged") from error
        if not isinstance(header, dict):
            raise self._damaged("a header that is no JSON object", "the header is damaged")
        metadata = header.pop("__metadata__", None) or {}
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise self._damaged("__metadata__ that is no map of strings", "the header is damaged")
        self.metadata = metadata
        spans = {name: self._check_entry(name, entry, size - 8 - length) for name, entry in header.items()}
        self._check_spans(spans, size - 8 - length)

    def _check_entry(self, name: str, entry: Any, data_bytes: int) -> tuple[int, int]:
        """Check one entry by itself, and keep it; returns its offsets."""
        if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
            raise self._damaged(f"tensor {name} without dtype, shape and data_offsets", "the header is damaged")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise CheckpointError(
                explain(f"tensor {name} has a dtype that torch does not know", where=self.path, got=str(dtype))
            )
        if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise self._damaged(f"tensor {name} with shape {shape} and offsets {offsets}", "the header is damaged")
        start, stop = offsets
        needed = math.prod(shape) * DTYPES[dtype].itemsize
        if stop - start != needed:
            raise self._damaged(
                f"tensor {name}, {dtype} {shape}, in {stop - start} bytes", f"that dtype and shape take {needed} bytes"
            )
        if stop > data_bytes:
            raise self._damaged(
                f"tensor {name} up to byte {stop} of {data_bytes} bytes of data", "the file is truncated"
            )
        self.tensors[name] = StoredTensor(DTYPES[dtype], tuple(shape), self.header_bytes + start)
        return start, stop

    def _check_spans(self, spans: dict[str, tuple[int, int]], data_bytes: int) -> None:
        """Tensors lie side by side: an overlap hands one tensor's values to another, a hole hides something."""
        at, before = 0, "the header"
        for name, (start, stop) in sorted(spans.items(), key=lambda item: item[1]):
            if start < at:
                raise self._damaged(f"tensor {name} from byte {start}, but {before} lies up to {at}", "they overlap")
            if start > at:
                raise self._damaged(f"{start - at} bytes between {before} and tensor {name}", "no tensor owns them")
            at, before = stop, f"tensor {name}"
        if at != data_bytes:
            raise self._damaged(f"{data_bytes - at} bytes after {before}, the last one", "no tensor owns them")

    def _no_duplicates(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise self._damaged(f"the name {name} twice in the header", "every name stands for one tensor")
            found[name] = value
        return found

    def _pread(self, count: int, offset: int) -> bytearray:
        out = bytearray(count)
        self.read_into(offset, memoryview(out))
        return out

    def _damaged(self, got: str, reason: str) -> CheckpointError:
        return CheckpointError(
            explain(f"{self.path} is not a sound safetensors file", got=f"{got}: {reason}",
                    hint="the file is truncated or damaged: fetch or write it again")
        )  # fmt: skip


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
