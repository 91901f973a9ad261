"""Captured steps that run without the interpreter: their launches are described once, and one call runs them all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from graphsrt.lowering.kernels import linear, team
from graphsrt.lowering.kernels.build import load_extension

MOST = 64
"""Rows times threads up to which a step has a team of threads. Whatever a region computes between its products runs on
one thread then: the more rows there are, and threads that could divide them, the longer the others have nothing to do.
And oneDNN, which serves many rows, has threads of its own."""

SOURCE = Path(__file__).with_name("replay.cpp")


@cache
def load() -> ModuleType:
    """The extension, compiled once a machine. Raises ``CompileError``."""
    team.load()
    return load_extension("replay", SOURCE)


class Replay:
    """A step whose values lie in numbered slots. Launches run in the order in which they are added.

    ``pin`` says what a slot holds in every run; all other slots are filled by launches, and emptied after those that
    name them as ``done``. One run at a time.
    """

    def __init__(self, num_slots: int):
        self._code = load()
        self._step = self._code.new_step(num_slots)
        self._kept: list[Any] = []

    def pin(self, slot: int, value: Tensor) -> None:
        """The slot holds this very tensor."""
        self._code.pin(self._step, slot, *_given([value]))

    def add_region(
        self, library: Path, inputs: list[int], weights: Sequence[Tensor], outputs: list[int], done: list[int]
    ) -> None:
        """A library of AOTInductor, which is called with the inputs and then the weights."""
        self._code.add_region(self._step, str(library), inputs, _given(weights), outputs, done)

    def add_kernel(self, native: tuple[int, int], inputs: list[int], done: list[int], keep: Any) -> None:
        """``native``: the addresses of a C function and of its first argument, which ``keep`` keeps there.

        The second one is an array of the inputs' addresses. Where the result goes, the first one knows.
        """
        self._code.add_kernel(self._step, *native, inputs, done)
        self._kept.append(keep)

    def runner(self, results: Mapping[str, int], rows: int) -> Callable[[], dict[str, Tensor]]:
        """What runs the step: the values of these slots, by name. It raises what a launch does.

        ``rows``: of its activations. If they are few, threads stay with the step from beginning to end.
        """
        most = 0 if rows >= (linear.rows_for_onednn() or sys.maxsize) else MOST // max(rows, 1)
        return partial(self._run, list(results), list(results.values()), most)

    def _run(self, names: list[str], slots: list[int], most: int) -> dict[str, Tensor]:
        threads = torch.get_num_threads()
        values = self._code.replay(self._step, slots, threads if threads <= most else 1)
        return dict(zip(names, _TAKEN(values), strict=True))


_TAKEN = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs


def _given(tensors: Sequence[Tensor]) -> list[Any]:
    """References that the extension takes over."""
    return torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors))
