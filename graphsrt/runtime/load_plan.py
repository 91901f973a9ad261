"""What the ranks of one machine read from a checkpoint, and in which order: computed alike by all of them.

Each rank says which *boxes* (one range for each dimension) of which stored tensors it keeps. What any rank of the
machine keeps is read once, in contiguous *pieces*; pieces are packed into *chunks* that fit one slot of the memory that
the ranks share; and of each chunk every rank reads one *span*. A box that is a few columns of a matrix thus costs the
machine the matrix once, not once for each rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphsrt.models.checkpoint import SafetensorsCheckpoint

Box = tuple[tuple[int, int], ...]
"""(start, stop) for each dimension; none for a scalar."""

SLOT_BYTES = 32 << 20  # large enough for a disk to be read at full speed, small beside a rank's weights
SPAN_BYTES = 1 << 20  # less than this is not worth a thread, or another rank's time
ALIGNMENT_BYTES = 64  # of pieces in a slot, so that they are viewed as any dtype


@dataclass(frozen=True)
class Piece:
    """Contiguous bytes of a tensor: all of ``box``, which is whole in every dimension behind the one that is cut."""

    name: str
    box: Box
    file_offset: int
    num_bytes: int
    slot_offset: int


@dataclass(frozen=True)
class LoadReport:
    """What loading took on one rank.

    bytes_read: read from files by this rank, headers included; node_bytes_read: by all ranks of its machine;
    checkpoint_bytes: size of the files; weight_bytes: what the rank keeps. All are zero but the last where the weights
    come from memory.
    """

    rank: int
    node_ranks: tuple[int, ...]
    bytes_read: int
    node_bytes_read: int
    checkpoint_bytes: int
    weight_bytes: int
    seconds: float

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> LoadReport:
        return cls(**{**fields, "node_ranks": tuple(fields["node_ranks"])})


def plan(checkpoint: SafetensorsCheckpoint, wanted: Iterable[Mapping[str, Sequence[Box]]]) -> list[list[Piece]]:
    """Chunks of pieces that hold every box of ``wanted`` (one mapping of stored names to boxes for each rank)."""
    boxes: dict[str, list[Box]] = {}
    for of_rank in wanted:
        for name, own in of_rank.items():
            boxes.setdefault(name, []).extend(own)
    chunks: list[list[Piece]] = []
    at = SLOT_BYTES
    for name, own in boxes.items():
        file_start, itemsize = checkpoint.stored(name)[1].start, checkpoint.dtype(name).itemsize
        for box, start, num_bytes in _contiguous(checkpoint.shape(name), itemsize, own):
            if at + num_bytes > SLOT_BYTES:
                chunks.append([])
                at = 0
            chunks[-1].append(Piece(name, box, file_start + start, num_bytes, at))
            at += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return chunks


def spans(chunk: Sequence[Piece], readers: int, reader: int) -> Iterator[tuple[Piece, int, int]]:
    """One reader's share of a chunk: byte ranges ``(start, stop)`` of pieces."""
    total = chunk[-1].slot_offset + chunk[-1].num_bytes
    share = max(-(-total // readers), SPAN_BYTES)
    low, high = reader * share, (reader + 1) * share
    for piece in chunk:
        start = max(low - piece.slot_offset, 0)
        stop = min(high - piece.slot_offset, piece.num_bytes)
        if start < stop:
            yield piece, start, stop


def common(a: Box, b: Box) -> Box | None:
    """What two boxes share, or None."""
    shared = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b))
    return shared if all(start < stop for start, stop in shared) else None


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """``box`` as slices of a tensor that holds ``outer``."""
    return tuple(slice(start - base, stop - base) for (start, stop), (base, _) in zip(box, outer))


def size(box: Box) -> int:
    """Number of elements."""
    return math.prod(stop - start for start, stop in box)


def _contiguous(shape: Sequence[int], itemsize: int, boxes: Sequence[Box]) -> Iterator[tuple[Box, int, int]]:
    """Boxes of contiguous memory, none larger than a slot, that cover ``boxes``; with offset and size in bytes."""
    boxes = [box for box in boxes if size(box)]
    if not shape:
        if boxes:
            yield (), 0, itemsize
        return
    # The outermost dimension of which one entry fits a slot is cut; the ones before it are taken entry by entry.
    cut = next(d for d in range(len(shape)) if math.prod(shape[d + 1 :]) * itemsize <= SLOT_BYTES)
    entry_bytes = math.prod(shape[cut + 1 :]) * itemsize
    step = SLOT_BYTES // entry_bytes
    tail = tuple((0, length) for length in shape[cut + 1 :])
    for prefix in itertools.product(*(range(length) for length in shape[:cut])):
        here = [box for box in boxes if all(start <= i < stop for i, (start, stop) in zip(prefix, box))]
        flat = 0
        for index, length in zip(prefix, shape):
            flat = flat * length + index
        for low, high in _union(box[cut] for box in here):
            for start in range(low, high, step):
                stop = min(start + step, high)
                box = (*((i, i + 1) for i in prefix), (start, stop), *tail)
                yield box, (flat * shape[cut] + start) * entry_bytes, (stop - start) * entry_bytes


def _union(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged
