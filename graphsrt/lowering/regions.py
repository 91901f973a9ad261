"""Cuts the final program into regions that Inductor compiles, and the steps between them.

Attention, experts and collectives run as they are; the operators between two of them form a region, at most one for
each gap, in the program's order. A region's text holds its operators with values and weights renamed to formals, so
layers that compute the same have the same region, are compiled once and differ only in the weights they pass.
``layer_id`` never gets into a region, because attention is outside.

A view that depends only on what was there before its region is never compiled where other steps read it: it runs by
itself before the region (it moves no data), so that a region returns only what it computes. A run of operators that is
nothing but such views needs no region at all.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.fx as fx

from graphsrt import ops
from graphsrt.errors import CompileError, explain
from graphsrt.program import Declared, Program, is_mutating, target_from_name, target_name, where

WITH_KERNELS = {
    ops.attention, ops.latent_attention, ops.radix_attention, ops.radix_latent_attention, ops.kv_write,
    ops.rope_kv_write, ops.moe_experts,
}  # fmt: skip
"""Operators that run a kernel of their own and are never part of a region."""

MAY_COPY = {"aten::to", "aten::reshape", "aten::reshape_as", "aten::contiguous", "aten::flatten", "aten::type_as"}
"""Views by their schema that move data where they must: better compiled, with what comes after."""


@dataclass(frozen=True)
class Ref:
    """A value inside a region: inputs first, then weights, then the results of its calls."""

    index: int

    def __repr__(self) -> str:
        return f"%{self.index}"


@dataclass(frozen=True)
class Formal:
    """What a region knows of a value. ``strides`` is None for contiguous tensors; symbols stand by name."""

    shape: tuple[int | str, ...]
    dtype: torch.dtype
    strides: tuple[int | str, ...] | None = None

    def at(self, sizes: Mapping[str, int]) -> Formal:
        """With numbers for symbols, and for what is made of them, such as ``64*T``."""
        strides = None if self.strides is None else tuple(_number(stride, sizes) for stride in self.strides)
        return Formal(tuple(_number(size, sizes) for size in self.shape), self.dtype, strides)

    def __str__(self) -> str:
        strides = "" if self.strides is None else f" strides ({', '.join(map(str, self.strides))})"
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]{strides}"


def _number(size: int | str, sizes: Mapping[str, int]) -> int:
    if isinstance(size, int) or size in sizes:
        return size if isinstance(size, int) else sizes[size]
    import sympy  # not before it is needed: it is slow to import

    value = sympy.sympify(size, locals={name: sympy.Symbol(name) for name in sizes}).subs(sizes)
    if value.free_symbols:
        raise KeyError(f"{size} is not settled by {dict(sizes)}")
    return int(value)


@dataclass(frozen=True)
class Call:
    """One operator: its name as in program text, and arguments with :class:`Ref` for values."""

    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        parts = [repr(a) for a in self.args] + [f"{name}={value!r}" for name, value in self.kwargs]
        return f"{self.target}({', '.join(parts)})"


@dataclass(frozen=True, eq=False)
class Region:
    """A piece of program as plain data (it travels to the processes that compile). Equal text is equal code.

    ``weights`` are contiguous and come after ``inputs``; ``outputs`` are the calls whose results are returned.
    """

    inputs: tuple[Formal, ...]
    weights: tuple[Formal, ...]
    calls: tuple[Call, ...]
    outputs: tuple[tuple[Ref, Formal], ...]

    @cached_property
    def text(self) -> str:
        """The canonical text, one line for each input, weight, operator and output."""
        lines, number = [], 0
        for kind, formals in (("input", self.inputs), ("weight", self.weights)):
            for formal in formals:
                lines.append(f"%{number} = {kind} {formal}")
                number += 1
        for call in self.calls:
            lines.append(f"%{number} = {call}")
            number += 1
        lines += [f"return {ref} {formal}" for ref, formal in self.outputs]
        return "\n".join(lines) + "\n"

    def at(self, sizes: Mapping[str, int]) -> Region:
        """The same code for inputs of these sizes alone. KeyError for a symbol that ``sizes`` does not settle."""
        inputs, weights = (tuple(f.at(sizes) for f in formals) for formals in (self.inputs, self.weights))
        return Region(inputs, weights, self.calls, tuple((ref, formal.at(sizes)) for ref, formal in self.outputs))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Region) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def run(
        self, values: Sequence[torch.Tensor], instead: Mapping[str, Callable[..., Any]] | None = None
    ) -> list[torch.Tensor]:
        """The plain meaning: execute with the operators' references. ``values``: inputs, then weights.

        ``instead``: name of an operator -> what is executed in its place.
        """
        found: list[Any] = list(values)
        for call in self.calls:
            args, kwargs = substitute((call.args, dict(call.kwargs)), found)
            function = (instead or {}).get(call.target) or plain(target_from_name(call.target))
            found.append(function(*args, **kwargs))
        return [found[ref.index] for ref, _ in self.outputs]


@dataclass
class RegionStep:
    """A region with one occurrence's values, weight names and results."""

    region: Region
    inputs: list[fx.Node]
    weights: list[str]
    outputs: list[fx.Node]
    label: str


@dataclass
class OperatorStep:
    """An operator that runs as it is: attention, experts, a collective, or a view between regions."""

    node: fx.Node


Step = RegionStep | OperatorStep


def plain(target: Callable[..., Any]) -> Callable[..., Any]:
    """What executes an operator outside of compiled code: its reference, or the operator itself."""
    return ops.REFERENCE.get(target, target)  # type: ignore[call-overload]


def substitute(value: Any, found: Sequence[Any]) -> Any:
    """``value`` with every :class:`Ref` in it replaced."""
    if isinstance(value, Ref):
        return found[value.index]
    if isinstance(value, (list, tuple)):
        return type(value)(substitute(item, found) for item in value)
    if isinstance(value, dict):
        return {name: substitute(item, found) for name, item in value.items()}
    return value


def referring(value: Any, refs: Mapping[fx.Node, Ref]) -> Any:
    """The inverse: nodes replaced by refs, fx's immutable lists by plain ones (which pickle and copy as expected)."""
    if isinstance(value, fx.Node):
        return refs[value]
    if isinstance(value, tuple):
        return tuple(referring(item, refs) for item in value)
    if isinstance(value, list):
        return [referring(item, refs) for item in value]
    if isinstance(value, dict):
        return {str(name): referring(item, refs) for name, item in value.items()}
    return value


def is_cut(node: fx.Node) -> bool:
    """True for operators that never enter a region: attention, experts, collectives, whatever else writes memory."""
    return node.target in WITH_KERNELS or node.target in ops.COLLECTIVES or is_mutating(node.target)


def is_view(node: fx.Node) -> bool:
    """True for operators whose result always shares the memory of their argument."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.name in MAY_COPY:
        return False
    returns = node.target._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None and not node.target._schema.is_mutable


def cut(program: Program) -> list[Step]:
    """The steps of a program, in order. Every operator is in one step (a view of earlier values perhaps in two).

    Raises ``CompileError`` for values that a region cannot pass on (anything but tensors).
    """
    runs: list[list[fx.Node]] = [[]]
    cuts: list[fx.Node] = []
    place: dict[fx.Node, int] = {}
    for node in program.nodes:
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and source in place:
            runs[place[source]].append(node)  # picked apart where it is made: a tuple never crosses a cut
            place[node] = place[source]
        elif is_cut(node):
            cuts.append(node)
            runs.append([])
        else:
            runs[-1].append(node)
            place[node] = len(runs) - 1
    steps: list[Step] = []
    for number, run in enumerate(runs):
        steps += _run_steps(program, run)
        if number < len(cuts):
            steps.append(OperatorStep(cuts[number]))
    return steps


def distinct_regions(steps: Sequence[Step]) -> dict[Region, list[RegionStep]]:
    """Each distinct region with the steps that it serves, in the order of first use."""
    found: dict[Region, list[RegionStep]] = {}
    for step in steps:
        if isinstance(step, RegionStep):
            found.setdefault(step.region, []).append(step)
    return found


def _run_steps(program: Program, run: list[fx.Node]) -> list[Step]:
    inside = set(run)
    free: set[fx.Node] = set()
    for node in run:
        if is_view(node) and all(a not in inside or a in free for a in node.all_input_nodes):
            free.add(node)
    outputs = [n for n in run if any(user not in inside for user in n.users)]
    before = _ancestors([n for n in outputs if n in free], inside)
    steps: list[Step] = [OperatorStep(n) for n in run if n in before]
    computed = [n for n in outputs if n not in free]
    if computed:
        needed = _ancestors(computed, inside)
        steps.append(_region_step(program, [n for n in run if n in needed], computed))
    return steps


def _ancestors(nodes: Sequence[fx.Node], inside: set[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node in inside and node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found


def _region_step(program: Program, nodes: list[fx.Node], outputs: list[fx.Node]) -> RegionStep:
    inside = set(nodes)
    outer = list(dict.fromkeys(a for node in nodes for a in node.all_input_nodes if a not in inside))
    inputs = [a for a in outer if a.op != "get_attr"]
    weights = [a for a in outer if a.op == "get_attr"]
    number = {node: Ref(i) for i, node in enumerate([*inputs, *weights, *nodes])}
    calls = []
    for node in nodes:
        args, kwargs = referring((node.args, dict(node.kwargs)), number)
        calls.append(Call(target_name(node.target), args, tuple(sorted(kwargs.items()))))
    region = Region(
        tuple(_formal(program, n) for n in inputs),
        tuple(_formal(program, n) for n in weights),
        tuple(calls),
        tuple((number[n], _formal(program, n)) for n in outputs),
    )
    first, last = (n.meta.get("module") or n.name for n in (nodes[0], nodes[-1]))
    label = first if first == last else f"{first} … {last}"
    return RegionStep(region, inputs, [str(w.target) for w in weights], outputs, label)


def _formal(program: Program, node: fx.Node) -> Formal:
    value = node.meta["val"]
    if not isinstance(value, (torch.Tensor, Declared)):
        raise CompileError(
            explain("a value between two steps is no tensor", where=f"{node.name} {where(node)}", got=str(type(value)))
        )
    shape = program.shape(node)
    strides = None if value.is_contiguous() else tuple(program.shapes.name(stride) for stride in value.stride())
    return Formal(shape, value.dtype, strides)
