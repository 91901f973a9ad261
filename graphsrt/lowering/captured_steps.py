"""Decode steps of a few fixed sizes, each captured once and then replayed over buffers that stay where they are.

A step that decodes n sequences (n tokens, n rows of logits) runs as one of ``size_for(n)`` rows: its inputs are copied
into the buffers of that size, and rows that are left over are padding. Padding rows belong to no sequence: they are
token 0 at position 0, read no cached keys, write none (slot -1), and what they give is cut off. Every other step, and
one with more sequences than the largest size, is not for here: the caller runs it with sizes as they come.

What capturing means is the backend's: on the CPU :meth:`graphsrt.lowering.executable.Executable.bind`, which settles
layouts, addresses and arguments, and replays all of it in one call where all is compiled code; on a GPU it would be a
CUDA graph. A backend relies on this: the buffers of a size, and all that is lent, are the same memory in each replay,
and what a replay returns is used up before the next one.

Source of the idea: padded batch sizes with a graph each, as in TensorRT-LLM, vLLM and SGLang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from graphsrt.program import Program

Replay = Callable[[], dict[str, Tensor]]
Capture = Callable[[Mapping[str, Tensor], Mapping[str, int] | None], tuple[dict[str, Tensor], Replay]]
"""Run a step over these tensors: its results, and what runs it again on what the tensors hold by then. The second
argument is None, or what the program's symbols stand for, to use code that was compiled for just this size."""

FILLINGS = {
    "tokens": 0, "positions": 0, "req_pool_indices": 0, "seq_lens": 0, "out_cache_loc": -1, "logit_rows": 0,
    "query_start_loc": None,
}  # fmt: skip
"""What a padding row holds, by input, int64 all of them. None: as the last one, so that a sequence has no tokens."""

_FINE = 8  # up to so many rows each number is a size; then there are four sizes for each doubling
_LINE = 64 // 8  # int64 numbers in a line of the processor's cache


def size_for(rows: int) -> int:
    """The least size for so many rows: at most a fifth of it is padding, and nothing up to 8 rows."""
    if rows <= _FINE:
        return max(rows, 1)
    step = 1 << (rows - 1).bit_length() - 3
    return -(-rows // step) * step


def size_within(rows: int, limit: int) -> int | None:
    """:func:`size_for`, where no step has more rows than the limit; None for more rows than that."""
    return min(size_for(rows), limit) if rows <= limit else None


def symbols(program: Program, size: int) -> dict[str, int]:
    """What the symbols of the program's inputs stand for in a step that decodes so many sequences."""
    found = {}
    for name, declared in program.inputs.items():
        if name in FILLINGS:
            found[str(declared.shape[0])] = size + (name == "query_start_loc")
    return found


def sizes(limit: int) -> list[int]:
    """All sizes for up to ``limit`` rows, which is the last of them."""
    return sorted({min(size_for(rows), limit) for rows in range(1, limit + 1)})


@dataclass(frozen=True)
class _Captured:
    buffers: dict[str, np.ndarray]  # the memory that the replay reads
    replay: Replay


class CapturedSteps:
    """The captured steps of one program on one rank. A size is captured when it is first wanted.

    ``lent``: what every step gets as it is, such as KV pools; ``limit``: most sequences of a step.
    """

    def __init__(self, program: Program, capture: Capture, lent: Mapping[str, Tensor], limit: int):
        self._program, self._capture, self._lent, self._limit = program, capture, dict(lent), limit
        self._names = [name for name in program.inputs if name not in lent]
        self._steps: dict[tuple[int, bool], _Captured] = {}

    @staticmethod
    def serves(program: Program, lent: Iterable[str]) -> bool:
        """Whether it is settled what padding is for every input that is not lent."""
        return program.inputs.keys() <= {*FILLINGS, *lent}

    def size(self, rows: int) -> int | None:
        """The size that decodes so many sequences; None if there are too many."""
        return size_within(rows, self._limit)

    def run(self, inputs: Mapping[str, np.ndarray], rows: int, *, compiled: bool = False) -> dict[str, Tensor]:
        """One step of ``rows`` sequences, one token and one row of logits each; no more than the limit.

        ``inputs``: int64, all but what is lent. ``compiled``: the cache has code for just this size. The results have
        the step's own rows, and are there until the next one.
        """
        size = self.size(rows)
        assert size is not None, f"{rows} rows of at most {self._limit}"
        captured = self._steps.get((size, compiled))
        if captured is not None:
            _fill(captured.buffers, inputs)
            results = captured.replay()
        else:
            results, self._steps[size, compiled] = self._first(size, inputs, compiled)
            self._steps.pop((size, not compiled), None)
        return results if rows == size else {name: value[:rows] for name, value in results.items()}

    def _first(
        self, size: int, inputs: Mapping[str, np.ndarray], compiled: bool
    ) -> tuple[dict[str, Tensor], _Captured]:
        # Side by side in one piece of memory, each where a line of the processor's cache begins.
        block = np.zeros((len(self._names), -(-(size + 1) // _LINE) * _LINE), dtype=np.int64)
        buffers = {
            name: row[: size + (name == "query_start_loc")] for name, row in zip(self._names, block, strict=True)
        }
        _fill(buffers, inputs)
        tensors = {name: torch.from_numpy(buffer) for name, buffer in buffers.items()}
        settled = symbols(self._program, size) if compiled else None
        results, replay = self._capture({**tensors, **self._lent}, settled)
        return results, _Captured(buffers, replay)


def _fill(buffers: Mapping[str, np.ndarray], inputs: Mapping[str, np.ndarray]) -> None:
    for name, buffer in buffers.items():
        given, filling = inputs[name], FILLINGS[name]
        count = len(given)
        buffer[:count] = given
        buffer[count:] = given[-1] if filling is None else filling
