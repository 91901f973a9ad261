"""Runs a final program on one rank: compiled regions, attention kernels and collectives, or node by node.

Both backends execute steps over a flat list of slots, one per value; where a value lies, what a step reads and what may
be dropped after it is settled once, so that a step of decoding spends little time in Python.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal, Protocol

import torch
import torch.fx as fx
from torch import Tensor

from graphsrt import ops
from graphsrt.errors import CompileError, explain
from graphsrt.lowering.collectives import padded
from graphsrt.lowering.decompose import decompose
from graphsrt.lowering.inductor import CompiledRegion
from graphsrt.lowering.kernels.replay import Replay
from graphsrt.lowering.launches import Bind, OperatorLaunch, RegionLaunch, Slots, Spent
from graphsrt.lowering.region_cache import CompileStats, Progress, compile_regions, load
from graphsrt.lowering.regions import OperatorStep, Region, RegionStep, Step, cut, distinct_regions, plain
from graphsrt.program import LOGITS, Program, target_name, where

Backend = Literal["inductor", "eager"]


class Collectives(Protocol):
    """What a program's collectives are executed by, such as ``lowering.collectives.ProcessCollectives``."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor, op: Any = "sum") -> Tensor:
        """Sum or maximum over ranks."""

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """All ranks' tensors along ``dim``."""

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's block of the sum."""


class Executable:
    """A program with one rank's weights, ready to run.

    ``stats`` tells what was compiled for it, ``spent`` where the time went so far.
    """

    def __init__(
        self,
        program: Program,
        weights: Mapping[str, Tensor],
        *,
        backend: Backend,
        collectives: Collectives | None = None,
        spent: Spent | None = None,
        stats: CompileStats | None = None,
        progress: Progress | None = None,
    ):
        """``weights``: every weight of the program by name, local shapes, contiguous; they are not copied.

        ``collectives=None`` is a single rank. With ``backend="inductor"`` regions that the cache lacks are compiled
        now; ``stats`` is given where the caller has done that already, and is kept as it is. ``spent``: where to add
        the time, together with other programs.

        Raises ``ValueError`` for a missing weight or one of another shape or dtype, and for an unknown backend;
        ``CompileError`` for a collective over several ranks that ``collectives`` does not serve, and for a region that
        does not compile. No backend stands in for the other.
        """
        if backend not in ("inductor", "eager"):
            raise ValueError(f'unknown backend {backend!r}: "inductor" or "eager"')
        _check_weights(program, weights)
        device = next((w.device for w in weights.values()), torch.device("cpu"))
        program = decompose(program, device.type)
        self.program = program
        self.backend: Backend = backend
        self._collectives = collectives
        self.spent = spent or Spent()
        self._device = device.type
        self.stats = CompileStats()
        steps: list[Step]
        if backend == "eager":
            steps = [OperatorStep(node) for node in program.nodes]
            regions = {}
        else:
            found = compile_regions(program, device=str(device), progress=progress)
            self.stats = stats if stats is not None else found
            steps = cut(program)
            regions = {region: load(region) for region in distinct_regions(steps)}
        self.num_steps = len(steps)

        slot = {node: i for i, node in enumerate(program.graph.nodes) if node.op != "output"}
        self._template: Slots = [None] * len(slot)
        for node in program.graph.nodes:
            if node.op == "get_attr" and backend == "eager":
                self._template[slot[node]] = weights[str(node.target)]
        self._inputs = [(node.name, slot[node]) for node in program.graph.nodes if node.op == "placeholder"]
        self._outputs = {name: slot[node] for name, node in program.outputs.items()}
        last_use = _last_uses(steps, keep=set(program.outputs.values()))
        self._steps: list[RegionLaunch | OperatorLaunch] = []
        for number, step in enumerate(steps):
            done = [slot[node] for node in last_use.get(number, ())]
            if isinstance(step, RegionStep):
                mine = [weights[name] for name in step.weights]
                self._steps.append(RegionLaunch(step, slot, regions[step.region], mine, done, self.spent))
            else:
                for argument in step.node.all_input_nodes:
                    if argument.op == "get_attr":
                        self._template[slot[argument]] = weights[str(argument.target)]
                self._steps.append(self._operator(step.node, slot, done))
        self._checked = False

    def __call__(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The logits of one step; see :meth:`run`."""
        return self.run(inputs)[LOGITS]

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One step; all that the program returns, by name.

        ``inputs``: every input of the program by name, contiguous; ``kv_pool`` is written.

        Raises ``ValueError`` for a missing input and, in the first step, for one of another dtype or shape.
        """
        slots = self._filled(inputs)
        with torch.no_grad():
            if not self._checked:
                self._check_inputs(inputs)
                self._checked = True
            for step in self._steps:
                step(slots)
        return {name: slots[index] for name, index in self._outputs.items()}

    def bind(
        self, inputs: Mapping[str, Tensor], sizes: Mapping[str, int] | None = None
    ) -> tuple[dict[str, Tensor], Callable[[], dict[str, Tensor]]]:
        """Run one step: what it returns, and what runs a step over the same tensors again, on what they hold by then.

        Such a step looks at no shapes and layouts: they are those of the first one. ``sizes``: to use regions that are
        compiled for just these, which :func:`compile_regions` has put into the cache. Raises as :meth:`run`.
        """
        self._check_inputs(inputs)
        slots = self._filled(inputs)
        given = [(index, slots[index]) for _, index in self._inputs]
        launches = []
        compiled: dict[Region, CompiledRegion] = {}
        native: Replay | None = Replay(len(slots)) if self._device == "cpu" and self.backend == "inductor" else None
        with torch.no_grad():
            for step in self._steps:
                if isinstance(step, RegionLaunch):
                    if sizes is not None and step.region not in compiled:
                        compiled[step.region] = load(step.region.at(sizes))
                    own = compiled.get(step.region)
                    launches.append(step.bound(slots, own))
                    if native is not None:
                        step.add_to(native, own)
                else:
                    kernel = step.bind(slots)
                    launches.append(step.bound(slots, kernel))
                    if native is not None and kernel is not None:
                        step.add_to(native, kernel)
                    else:
                        native = None  # some launch needs the interpreter
                step(slots)

        def results() -> dict[str, Tensor]:
            return {name: slots[index] for name, index in self._outputs.items()}

        def replay() -> dict[str, Tensor]:
            for index, value in given:
                slots[index] = value
            with torch.no_grad():
                for launch in launches:
                    launch()
            return results()

        if native is None:
            return results(), replay
        for index, value in given:
            native.pin(index, value)
        found = results()
        return found, self._timed_kernels(native.runner(self._outputs, rows=len(found[LOGITS])))

    def _filled(self, inputs: Mapping[str, Tensor]) -> Slots:
        slots = self._template.copy()
        try:
            for name, index in self._inputs:
                slots[index] = inputs[name]
        except KeyError as error:
            raise ValueError(f"the program's input {error} is missing; given: {', '.join(sorted(inputs))}") from None
        return slots

    def _check_inputs(self, inputs: Mapping[str, Tensor]) -> None:
        """Compiled code reads memory by the declared layout and looks at nothing; so this looks once."""
        for name, _ in self._inputs:
            declared, given = self.program.inputs[name], inputs[name]
            fits = len(declared.shape) == given.dim() and all(
                isinstance(want, str) or want == got for want, got in zip(declared.shape, given.shape)
            )
            if declared.role != "kv_pool" and (declared.dtype != given.dtype or not fits or not given.is_contiguous()):
                raise ValueError(
                    explain(
                        f"input {name} has another layout",
                        expected=f"contiguous {declared.dtype} {list(declared.shape)}",
                        got=f"{given.dtype} {list(given.shape)}, strides {given.stride()}",
                    )
                )

    def _timed_kernels(self, run: Callable[[], dict[str, Tensor]]) -> Callable[[], dict[str, Tensor]]:
        spent, clock = self.spent, time.perf_counter

        def timed() -> dict[str, Tensor]:
            start = clock()
            try:
                return run()
            finally:
                spent.kernels_s += clock() - start

        return timed

    # -- operators ------------------------------------------------------------------------------------------------

    def _operator(self, node: fx.Node, slot: Mapping[fx.Node, int], done: list[int]) -> OperatorLaunch:
        bind: Bind | None = None
        if node.target is ops.radix_attention and self._device == "cpu":
            from graphsrt.lowering.kernels.radix_attention import cpu

            bind = cpu.bind
        timed = node.target in ops.COLLECTIVES
        function = self._collective(node) if timed else self._executor(node)
        return OperatorLaunch(node, slot, function, done, self.spent, bind=bind, timed=timed)

    def _executor(self, node: fx.Node) -> Callable[..., Any]:
        if node.target in (ops.radix_attention, ops.kv_write):
            # Straight to the kernel: the dispatcher would only bring us back to Python.
            from graphsrt.lowering.kernels import radix_attention

            return radix_attention.radix_attention if node.target is ops.radix_attention else radix_attention.kv_write
        if node.target is ops.radix_latent_attention:
            from graphsrt.lowering.kernels.radix_latent_attention import radix_latent_attention

            return radix_latent_attention
        assert callable(node.target)
        kernels = ops.KERNELS.get(node.target, {})  # type: ignore[call-overload]
        return kernels.get(self._device, plain(node.target))

    def _collective(self, node: fx.Node) -> Callable[..., Any]:
        axis = node.kwargs["axis"]
        size = node.kwargs.get("size", self.program.mesh.get(str(axis)))
        there = 1 if self._collectives is None else self._collectives.size
        if size != there or axis != "tp":
            raise CompileError(
                explain(
                    f"{target_name(node.target)} cannot be executed by this process",
                    where=f"{node.name} {where(node)}",
                    expected=f"the {size} ranks of axis {axis}",
                    got="a single process without collectives" if self._collectives is None else f"a group of {there}",
                    hint='start one process per rank, or use ranks="simulated"',
                )
            )
        group = self._collectives
        if group is None or there == 1:
            return lambda x, **_: x
        if node.target is ops.all_reduce:
            return self._timed(lambda x, *, axis, op="sum": group.all_reduce(x, op))
        if node.target is ops.all_gather:
            return self._timed(lambda x, *, dim, axis, size, rows_of=None: _rows(group.all_gather(x, dim), rows_of))
        if node.target is ops.reduce_scatter:
            return self._timed(lambda x, *, dim, axis, size: group.reduce_scatter(x, dim))
        assert node.target is ops.take_own
        return lambda x, *, dim, axis, size: take_own(x, dim, group.rank, size)

    def _timed(self, collective: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def timed(x: Tensor, **how: Any) -> Tensor:
            start = time.perf_counter()
            result = collective(x, **how)
            self.spent.collectives_s += time.perf_counter() - start
            return result

        return timed


def take_own(x: Tensor, dim: int, rank: int, size: int) -> Tensor:
    """Block ``rank`` of ``size`` equal ones along ``dim``, contiguous; zeros where ``x`` has ended."""
    x = padded(x, dim, size)
    length = x.shape[dim] // size
    return x.narrow(dim, rank * length, length).contiguous()


def _rows(whole: Tensor, rows_of: Tensor | None) -> Tensor:
    """The first rows, as many as ``rows_of`` has: padding is at the end."""
    return whole if rows_of is None else whole[: rows_of.shape[0]]


def _last_uses(steps: Iterable[Step], keep: Collection[fx.Node]) -> dict[int, list[fx.Node]]:
    """Step number -> computed values and inputs that no later step reads."""
    last: dict[fx.Node, int] = {}
    for number, step in enumerate(steps):
        read = step.inputs if isinstance(step, RegionStep) else step.node.all_input_nodes
        made = step.outputs if isinstance(step, RegionStep) else [step.node]
        for node in (*read, *made):
            last[node] = number
    found: dict[int, list[fx.Node]] = {}
    for node, number in last.items():
        if node not in keep and node.op != "get_attr":
            found.setdefault(number, []).append(node)
    return found


def _check_weights(program: Program, weights: Mapping[str, Tensor]) -> None:
    for name, weight in program.weights.items():
        if name not in weights:
            raise ValueError(explain(f"weight {name} is missing", expected=f"{weight.dtype} {list(weight.shape)}"))
        given = weights[name]
        if tuple(given.shape) != tuple(weight.shape) or given.dtype != weight.dtype or not given.is_contiguous():
            raise ValueError(
                explain(
                    f"weight {name} has another layout",
                    expected=f"contiguous {weight.dtype} {list(weight.shape)}",
                    got=f"{given.dtype} {list(given.shape)}, strides {given.stride()}",
                )
            )
