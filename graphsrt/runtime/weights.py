"""Load one rank's weights: evaluate every recipe, reading only the bytes that the rank keeps.

The ranks of a machine read together. Each first evaluates its recipes without data, which tells what they read; then
the stored tensors stream through memory that the ranks share, each read once for all of them, and a weight is made as
soon as its parts are there. Beside the weights, a rank holds the parts of one weight, and two slots.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from graphsrt import huge_pages
from graphsrt.errors import CheckpointError, explain
from graphsrt.huge_pages import HugePages
from graphsrt.lowering.shared_memory import node_name
from graphsrt.models.checkpoint import Checkpoint, SafetensorsCheckpoint, Slices, as_bytes, bounds
from graphsrt.program import Program
from graphsrt.recipes import TensorSource, evaluate, leaves
from graphsrt.runtime.load_plan import SLOT_BYTES, Box, LoadReport, Piece, common, plan, size, spans, within
from graphsrt.runtime.shared_slots import shared_slots

if TYPE_CHECKING:
    from graphsrt.lowering.collectives import ProcessCollectives

READ_THREADS = 4  # of one rank: what a local disk needs to be busy

Progress = Callable[[int, int, str], None]
Own = Callable[[torch.Tensor, bool], torch.Tensor]


def load_weights(
    program: Program,
    rank: int,
    source: TensorSource,
    *,
    device: str = "cpu",
    progress: Progress | None = None,
    collectives: ProcessCollectives | None = None,
) -> tuple[dict[str, torch.Tensor], LoadReport]:
    """The program's weights on ``rank``, by name: local shape, contiguous, owned by the caller; and what it took.

    ``collectives``: of all ranks, which then load together; None loads this rank alone. ``progress(done, total,
    label)`` counts weights. CheckpointError if a file is damaged, if ranks see different checkpoints, or if a recipe
    gives another shape than declared; RankError if the ranks of a machine cannot share memory.
    """
    started = time.perf_counter()
    bottom = source.bottom() if isinstance(source, Checkpoint) else None
    nodes: tuple[int, ...] = (rank,)
    read = in_node = total = 0
    own = _owner(device)
    if isinstance(source, Checkpoint) and isinstance(bottom, SafetensorsCheckpoint):
        weights, nodes, read, in_node = _stream(program, rank, source, bottom, own, progress, collectives)
        total = sum(file.size for file in bottom.files)
    else:
        weights = {}
        for name in program.weights:
            weights[name] = own(_make(program, rank, name, source), True)
            if progress is not None:
                progress(len(weights), len(program.weights), name)
    kept = sum(weight.numel() * weight.element_size() for weight in weights.values())
    return weights, LoadReport(rank, nodes, read, in_node, total, kept, time.perf_counter() - started)


def _owner(device: str) -> Own:
    """Puts a value where a rank has its weights: own(value, whether it may not be the very same). What was read may be
    the caller's, or part of a larger one; a rank owns its weights, and only them."""
    if torch.device(device).type == "cpu":
        pages = HugePages()
        return lambda value, copy: pages.take(value, copy=copy)
    return lambda value, copy: value.to(device, copy=copy)  # to another device is a copy of just this


def _make(program: Program, rank: int, name: str, source: TensorSource) -> torch.Tensor:
    weight = program.weights[name]
    value = evaluate(weight.recipe, rank, source, weight.dtype)
    if tuple(value.shape) != tuple(weight.shape):
        raise CheckpointError(
            explain(f"weight {name} has another shape than its recipe promises", where=f"rank {rank}",
                    expected=str(list(weight.shape)), got=str(list(value.shape)))
        )  # fmt: skip
    return value


# -- a checkpoint in files ---------------------------------------------------------------------------------------------


@dataclass
class _Block:
    """One read of recipes: a box of a stored tensor, filled piece by piece."""

    name: str
    box: Box
    weights: set[str] = field(default_factory=set)  # that are still to be made of it
    missing: int = field(init=False)
    data: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.missing = size(self.box)

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        if self.data is None:
            self.data = huge_pages.empty([stop - start for start, stop in self.box], dtype)
        return self.data


class _Without(Checkpoint):
    """``bottom`` with something else for its data."""

    def __init__(self, bottom: SafetensorsCheckpoint):
        super().__init__()
        self._bottom = bottom

    def names(self) -> list[str]:
        return self._bottom.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._bottom.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._bottom.dtype(name)

    def where(self, name: str) -> str:
        return self._bottom.where(name)

    def spec(self) -> dict[str, Any]:
        return self._bottom.spec()


class _Asked(_Without):
    """Notes what is read, and gives tensors without data."""

    def __init__(self, bottom: SafetensorsCheckpoint):
        super().__init__(bottom)
        self.reads: list[tuple[str, Box]] = []

    def _read(self, name: str, slices: Slices | None) -> torch.Tensor:
        box = tuple(bounds(slices, self.shape(name)))
        self.reads.append((name, box))
        return torch.empty([stop - start for start, stop in box], dtype=self.dtype(name), device="meta")


class _Arrived(_Without):
    """Gives what has been read, in the order in which it was asked for."""

    def __init__(self, bottom: SafetensorsCheckpoint, blocks: list[_Block]):
        super().__init__(bottom)
        self._blocks = iter(blocks)

    def _read(self, name: str, slices: Slices | None) -> torch.Tensor:
        block = next(self._blocks)
        assert (name, tuple(bounds(slices, self.shape(name)))) == (block.name, block.box) and not block.missing
        return block.tensor(self.dtype(name))


def _stream(
    program: Program, rank: int, source: Checkpoint, bottom: SafetensorsCheckpoint,
    own: Own, progress: Progress | None, collectives: ProcessCollectives | None,
) -> tuple[dict[str, torch.Tensor], tuple[int, ...], int, int]:  # fmt: skip
    """The weights, the ranks of this machine, and bytes read by this rank and by all of the machine."""
    known: dict[tuple[str, Box], _Block] = {}  # integers and their scales read one matrix
    blocks = {name: _reads(program, rank, name, source, bottom, known) for name in program.weights}
    waiting: dict[str, list[_Block]] = {}
    for block in known.values():
        waiting.setdefault(block.name, []).append(block)
    wanted = {name: [block.box for block in own] for name, own in waiting.items()}
    node, nodes, all_wanted = _neighbours(rank, bottom, wanted, collectives)
    made: dict[str, torch.Tensor] = {}

    def make_if_ready(name: str) -> None:
        if name not in made and not any(block.missing for block in blocks[name]):
            shared = any(len(block.weights) > 1 for block in blocks[name])
            arrived = source.over(_Arrived(bottom, blocks[name]))
            made[name] = own(_make(program, rank, name, arrived), shared)
            for block in blocks[name]:
                block.weights.discard(name)
                if not block.weights:
                    block.data = None
            if progress is not None:
                progress(len(made), len(program.weights), name)

    for name in program.weights:
        make_if_ready(name)
    chunks = plan(bottom, all_wanted)
    read = sum(file.header_bytes for file in bottom.files)
    slots = shared_slots(node, SLOT_BYTES) if chunks else []
    place, width = (0, 1) if node is None else (node.rank, node.size)
    with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="graphsrt-load") as pool:

        def begin(number: int) -> list[Future[int]]:
            """Start to read this rank's share of a chunk. Its slot is free: all have left the chunk before the last."""
            jobs = []
            for thread in range(READ_THREADS if number < len(chunks) else 0):
                for piece, start, stop in spans(chunks[number], width * READ_THREADS, place * READ_THREADS + thread):
                    file = bottom.stored(piece.name)[0]
                    file.open()
                    out = as_bytes(slots[number % 2][piece.slot_offset + start : piece.slot_offset + stop])
                    jobs.append(pool.submit(file.read_into, piece.file_offset + start, out))
            return jobs

        jobs = begin(0)
        for number, chunk in enumerate(chunks):
            read += sum(job.result() for job in jobs)
            if node is not None:
                node.barrier()  # every rank's share is there, and nobody is still in the chunk before
            jobs = begin(number + 1)
            for piece in chunk:
                for block in _fill(piece, slots[number % 2], waiting.get(piece.name, ()), bottom.dtype(piece.name)):
                    for name in sorted(block.weights):
                        make_if_ready(name)
    bottom.bytes_read += read
    bottom.close()
    in_node = read if node is None else sum(node.gather_objects(read))
    return {name: made[name] for name in program.weights}, nodes, read, in_node


def _reads(
    program: Program, rank: int, name: str, source: Checkpoint, bottom: SafetensorsCheckpoint,
    known: dict[tuple[str, Box], _Block],
) -> list[_Block]:  # fmt: skip
    """What a weight is made of, in the order in which it asks; two weights that read the same share it."""
    recipe = program.weights[name].recipe
    asked = _Asked(bottom)
    if any(True for _ in leaves(recipe)):
        with torch.device("meta"):
            evaluate(recipe, rank, source.over(asked), program.weights[name].dtype)
    own = [known.setdefault(read, _Block(*read)) for read in asked.reads]
    for block in own:
        block.weights.add(name)
    return own


def _fill(piece: Piece, slot: torch.Tensor, blocks: list[_Block] | tuple[()], dtype: torch.dtype) -> list[_Block]:
    """Copy what a piece has of each block; returns the blocks that are whole by it."""
    data = slot[piece.slot_offset : piece.slot_offset + piece.num_bytes].view(dtype)
    data = data.view([stop - start for start, stop in piece.box])
    complete = []
    for block in blocks:
        shared = common(block.box, piece.box)
        if shared is not None and block.missing:
            block.tensor(dtype)[within(shared, block.box)] = data[within(shared, piece.box)]
            block.missing -= size(shared)
            if not block.missing:
                complete.append(block)
    return complete


def _neighbours(
    rank: int, bottom: SafetensorsCheckpoint, wanted: Mapping[str, list[Box]], collectives: ProcessCollectives | None
) -> tuple[ProcessCollectives | None, tuple[int, ...], list[Mapping[str, list[Box]]]]:
    """The ranks of this machine as a group, their numbers, and what each of them wants."""
    if collectives is None or collectives.size == 1:
        return None, (rank,), [wanted]
    told = collectives.gather_objects((node_name(), bottom.digest, wanted))
    digests = [digest for _, digest, _ in told]
    usual = max(digests, key=digests.count)
    if odd := [str(r) for r, digest in enumerate(digests) if digest != usual]:
        raise CheckpointError(
            explain("the ranks see different checkpoints", where=f"rank {', '.join(odd)}",
                    got="other headers or file sizes than on the other ranks", hint="make the copies the same")
        )  # fmt: skip
    nodes = tuple(r for r, (name, *_) in enumerate(told) if name == told[rank][0])
    return collectives.subgroup(nodes), nodes, [told[r][2] for r in nodes]
