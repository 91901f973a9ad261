"""How one step of a program is executed: a compiled region, or an operator, over a flat list of slots.

A launch is called with the slots of any step, and drops what no later launch reads. ``bound`` gives the same for one
list of slots, whose inputs stay the very tensors that they are and whose sizes do not change: what need not be looked
at again is not. If all launches of a step are compiled code, they run without the interpreter: ``add_to`` describes
them to a ``Replay``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch.fx as fx
from torch import Tensor

from graphsrt.errors import CompileError, explain
from graphsrt.lowering.inductor import CompiledRegion
from graphsrt.lowering.kernels.replay import Replay
from graphsrt.lowering.regions import Formal, Ref, RegionStep, referring, substitute
from graphsrt.program import walk, where

Slots = list[Any]
"""One entry for each value of a program."""


class Bound(Protocol):
    """An operator whose arguments are settled but for tensors that the program computes, of layouts that do not change.

    ``out`` is what it returns, the same tensor each time.
    """

    out: Tensor

    def __call__(self, *computed: Any) -> Tensor:
        """Run it."""

    def native(self) -> tuple[int, int]:
        """As :meth:`graphsrt.lowering.kernels.replay.Replay.add_kernel` takes it."""


Bind = Callable[..., Bound]
"""An operator's arguments → the operator for the same ones but the first three: these are what the program computes."""


@dataclass
class Spent:
    """Seconds so far: in kernels (compiled regions and operators), and in collectives, waiting included."""

    kernels_s: float = 0.0
    collectives_s: float = 0.0


class RegionLaunch:
    """A region with one occurrence's weights."""

    def __init__(
        self,
        step: RegionStep,
        slot: Mapping[fx.Node, int],
        compiled: CompiledRegion,
        weights: Sequence[Tensor],
        done: list[int],
        spent: Spent,
    ):
        self.region = step.region
        self._nodes = step.inputs
        self._formals = step.region.inputs
        self._inputs = [slot[node] for node in step.inputs]
        self._outputs = [slot[node] for node in step.outputs]
        self._weights = list(weights)
        self._compiled, self._done, self._spent = compiled, done, spent
        self._checked = False

    def __call__(self, slots: Slots) -> None:
        if not self._checked:
            for i, formal, node in zip(self._inputs, self._formals, self._nodes):
                _check_layout(slots[i], formal, node)
            self._checked = True
        self.bound(slots)()

    def add_to(self, replay: Replay, compiled: CompiledRegion | None = None) -> None:
        """The launch as a part of a replay. ``compiled``: for just its sizes."""
        library = (compiled or self._compiled).library
        replay.add_region(library, self._inputs, self._weights, self._outputs, self._done)

    def bound(self, slots: Slots, compiled: CompiledRegion | None = None) -> Callable[[], None]:
        """The launch over these slots. ``compiled``: for their very sizes."""
        inputs, outputs, weights, done = self._inputs, self._outputs, self._weights, self._done
        run = (compiled or self._compiled).run
        spent, clock = self._spent, time.perf_counter

        def launch() -> None:
            values = [slots[i] for i in inputs]
            values += weights
            start = clock()
            results = run(values)
            spent.kernels_s += clock() - start
            for i, value in zip(outputs, results):
                slots[i] = value
            for i in done:
                slots[i] = None

        return launch


class OperatorLaunch:
    """An operator outside of regions. ``timed``: it adds to ``spent`` itself."""

    def __init__(
        self,
        node: fx.Node,
        slot: Mapping[fx.Node, int],
        function: Callable[..., Any],
        done: list[int],
        spent: Spent,
        *,
        bind: Bind | None = None,
        timed: bool = False,
    ):
        refs = {a: Ref(slot[a]) for a in node.all_input_nodes}
        args, kwargs = referring((node.args, dict(node.kwargs)), refs)
        self._args, self._kwargs = list(args), dict(kwargs)
        self._places = [(i, a.index) for i, a in enumerate(args) if isinstance(a, Ref)]
        self._names = [(name, a.index) for name, a in kwargs.items() if isinstance(a, Ref)]
        found = sum(1 for _ in walk([node.args, list(node.kwargs.values())]))
        self._flat = len(self._places) + len(self._names) == found
        computed = [a for a in node.all_input_nodes if a.op == "call_function"]
        movable = bind is not None and computed == [a for a in node.args[:3] if isinstance(a, fx.Node)]
        self._bind, self._computed = (bind, [slot[a] for a in computed]) if movable else (None, [])
        self._out, self._function, self._done = slot[node], function, done
        self._spent, self._timed = spent, timed

    def __call__(self, slots: Slots) -> None:
        args, kwargs = self._arguments(slots)
        start = time.perf_counter()
        slots[self._out] = self._function(*args, **kwargs)
        if not self._timed:
            self._spent.kernels_s += time.perf_counter() - start
        for i in self._done:
            slots[i] = None

    def _arguments(self, slots: Slots) -> tuple[Sequence[Any], dict[str, Any]]:
        if not self._flat:
            return substitute(tuple(self._args), slots), substitute(self._kwargs, slots)
        args, kwargs = self._args.copy(), self._kwargs.copy()
        for i, source in self._places:
            args[i] = slots[source]
        for name, source in self._names:
            kwargs[name] = slots[source]
        return args, kwargs

    def bind(self, slots: Slots) -> Bound | None:
        """The operator over these slots, which hold what it reads at present; None if there is no such form of it."""
        if self._bind is None:
            return None
        args, kwargs = self._arguments(slots)
        return self._bind(*args, **kwargs)

    def add_to(self, replay: Replay, kernel: Bound) -> None:
        """The launch as a part of a replay."""
        replay.pin(self._out, kernel.out)
        replay.add_kernel(kernel.native(), self._computed, self._done, keep=kernel)

    def bound(self, slots: Slots, kernel: Bound | None) -> Callable[[], None]:
        """The launch over these slots; ``kernel`` is what ``bind`` gave."""
        if kernel is None:
            return lambda: self(slots)
        computed, out, done = self._computed, self._out, self._done
        spent, clock = self._spent, time.perf_counter

        def launch() -> None:
            values = [slots[i] for i in computed]
            start = clock()
            slots[out] = kernel(*values)
            spent.kernels_s += clock() - start
            for i in done:
                slots[i] = None

        return launch


def _check_layout(value: Tensor, formal: Formal, node: fx.Node) -> None:
    """Compiled code trusts dtype and strides; what runs between regions (a user's operator, say) might break them."""
    if formal.strides is None:
        same = value.is_contiguous()
    else:
        triples = zip(formal.strides, value.stride(), value.shape)
        same = all(isinstance(want, str) or size == 1 or want == got for want, got, size in triples)
    if not same or value.dtype != formal.dtype or len(formal.shape) != value.dim():
        raise CompileError(
            explain(
                "a value does not have the layout that its operator's shape function promised",
                where=f"{node.name} {where(node)}",
                expected=str(formal),
                got=f"{value.dtype} {list(value.shape)}, strides {value.stride()}",
            )
        )
