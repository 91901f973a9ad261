"""How placements pass through operators, read forwards: the rules of :mod:`graphsrt.check_placements`.

Written apart from the pass that chooses placements and shares no rule with it, so that one mistake cannot hide in
both. A rule answers one question: given what each rank holds of the arguments, what does each rank hold of the result?
Either the answer is a placement that is *true* of the values, or the operator is refused in words.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.fx as fx

from graphsrt import ops, ops_norms
from graphsrt.placement import Layout, Partial, Placement, R, Replicate, Shard, ShardTokens
from graphsrt.program import Program, arguments, aten

Runs = tuple[tuple[int, int], ...]
"""(first address, length) of consecutive positions."""


@dataclass(frozen=True)
class Held:
    """What the ranks hold of a value. The last three say more than the recorded placement can."""

    placement: Placement
    zeroed: bool = False
    """Positions that a rank does not own hold zeros, not copies: true of weights that are contracted."""
    starts: Layout | None = None
    """The value is each rank's first address in this layout."""
    gathered: tuple[int, Runs, int] | None = None
    """(dim, addresses, size): all ranks hold the same, but along ``dim`` in this order, pads and copies included."""

    @property
    def plain(self) -> bool:
        return not self.zeroed and self.starts is None and self.gathered is None

    def __str__(self) -> str:
        text = describe(self.placement)
        if self.zeroed:
            text += ", zeros where not owned"
        if self.starts is not None:
            text += ", the first address of each rank"
        if self.gathered is not None:
            dim, runs, size = self.gathered
            text += f" of {sum(length for _, length in runs)} gathered positions for {size} addresses along dim {dim}"
        return text


WHOLE = Held(R)
SUM = Held(Partial("sum"))


class Refused(Exception):
    """An operator cannot be applied to what the ranks hold."""

    def __init__(self, what: str, expected: str | None = None, got: str | None = None):
        super().__init__(what)
        self.what, self.expected, self.got = what, expected, got


def describe(place: Any) -> str:
    """``S(1) of 64/2``, ``R``, ``P(sum)``; tuples by element."""
    if isinstance(place, tuple):
        return "(" + ", ".join(describe(p) for p in place) + ")"
    if isinstance(place, ShardTokens):
        return f"S(0) of {place.local_size} tokens"
    return f"S({place.dim}) of {place.layout}" if isinstance(place, Shard) else str(place)


def shard(dim: int, layout: Layout) -> Held:
    """Divided along ``dim``; a layout that gives every rank all addresses in order divides nothing."""
    if all(runs == ((0, layout.size),) for runs in addresses(layout)):
        return WHOLE
    return Held(Shard(dim, layout))


@dataclass
class Call:
    """One operator call: its node, arguments by name, and what the ranks hold of each argument."""

    program: Program
    node: fx.Node
    args: dict[str, Any]
    held: dict[fx.Node, Any]
    ranks: int
    axis: str

    def of(self, name: str) -> Held:
        """What is held of a tensor argument; an absent one counts as whole."""
        value = self.args[name]
        return self.held[value] if isinstance(value, fx.Node) else WHOLE

    def shape(self, node: fx.Node) -> tuple[int | str, ...]:
        return self.program.shape(node)

    def ndim(self, name: str) -> int:
        return len(self.shape(self.args[name]))

    def dim(self, name: str = "self", dim: str = "dim") -> int:
        """The argument ``dim`` counted from the front of tensor ``name``."""
        return self.args[dim] % self.ndim(name)


Rule = Callable[[Call], Any]
RULES: dict[Any, Rule] = {}


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for target in targets:
            RULES[target] = function
        return function

    return register


def derive(call: Call) -> Any:
    """What the ranks hold of the result: a :class:`Held`, or a tuple of them for a tuple value."""
    node = call.node
    target: Any = node.target
    known = RULES.get(target)
    inputs = [call.held[a] for a in node.all_input_nodes]
    if target in ops.COLLECTIVES or target is operator.getitem:
        assert known is not None
        return known(call)
    tags = target.tags if isinstance(target, torch._ops.OpOverload) else ()
    if torch.Tag.nondeterministic_seeded in tags:
        raise Refused("random numbers differ from rank to rank")
    if all(item == WHOLE for item in inputs):
        return _repeated(call) or like_value(call, WHOLE)
    if any(isinstance(item, Held) and isinstance(item.placement, ShardTokens) for item in inputs):
        return RULES[ShardTokens](call)
    for argument in node.all_input_nodes:
        item = call.held[argument]
        if isinstance(item, tuple):
            raise Refused(f"{argument.name} is a tuple")
        if (
            (item.zeroed and target not in _MAY_BE_ZEROED)
            or (item.gathered is not None and target not in _MAY_BE_GATHERED)
            or (item.starts is not None and target not in _MAY_BE_STARTS)
        ):
            raise Refused(f"{argument.name} cannot be used here", "an ordinary value", str(item))
    if known is not None:
        return known(call)
    if torch.Tag.pointwise in tags:
        return _pointwise(call)
    if target in ops.ROWWISE:
        return _rowwise(call)
    raise Refused(
        "no rule says how this operator treats a value that is not whole on every rank",
        "R for every argument",
        ", ".join(f"{a.name} {call.held[a]}" for a in node.all_input_nodes if call.held[a] != WHOLE),
    )


def like_value(call: Call, held: Held) -> Any:
    val = call.node.meta.get("val")
    return tuple(held for _ in val) if isinstance(val, (tuple, list)) else held


def _repeated(call: Call) -> Held | None:
    """A whole value, repeated as often as each rank has positions: every address of such a dim holds the same."""
    place, shape = call.node.meta.get("placement"), call.node.meta.get("val")
    if call.node.target is not aten.expand.default or not isinstance(place, Shard) or shape is None:
        return None
    dim = place.dim - (shape.dim() - call.ndim("self"))
    once = dim < 0 or call.shape(call.args["self"])[dim] == 1
    return Held(place) if once and call.shape(call.node)[place.dim] == place.layout.local_size else None


# -- elementwise ------------------------------------------------------------------------------------------------------

_ADD = {aten.add.Tensor, aten.sub.Tensor}
_CAST = {aten.to.dtype, aten._to_copy.default, aten.clone.default, aten.contiguous.default, aten.alias.default,
         aten.detach.default, aten.lift_fresh_copy.default}  # fmt: skip


def _pointwise(call: Call) -> Held:
    tensors = call.node.all_input_nodes
    held = [call.held[a] for a in tensors]
    if any(isinstance(h.placement, Partial) for h in held):
        return _linear_pointwise(call)
    return aligned(call, tensors, len(call.shape(call.node)))


def _rowwise(call: Call) -> Any:
    """Rows are divided, never what is in them."""
    values: Any = call.node.meta["val"]
    results = values if isinstance(values, (tuple, list)) else [values]
    held = aligned(call, call.node.all_input_nodes, max(value.dim() for value in results))
    if isinstance(held.placement, Shard) and any(held.placement.dim >= value.dim() - 1 for value in results):
        raise Refused("this operator needs whole rows", "a value that is whole along its last dim", str(held))
    return tuple(held for _ in results) if isinstance(values, (tuple, list)) else held


def aligned(call: Call, tensors: Sequence[fx.Node], ndim: int) -> Held:
    """Broadcast from the right: all sharded arguments must be divided alike, whole ones must have size 1 there."""
    found: tuple[int, Layout] | None = None
    first = ""
    for tensor in tensors:
        place = call.held[tensor].placement
        if isinstance(place, Partial):
            raise Refused(f"{tensor.name} is a sum that is not complete", "R or S", str(place))
        if isinstance(place, Shard):
            mine = (place.dim + ndim - len(call.shape(tensor)), place.layout)
            if found is not None and mine != found:
                raise Refused(
                    f"{first} and {tensor.name} are divided differently",
                    f"S({found[0]}) of {found[1]}",
                    f"S({mine[0]}) of {mine[1]}",
                )
            found, first = mine, tensor.name
    if found is None:
        return WHOLE
    for tensor in tensors:
        shape = call.shape(tensor)
        dim = found[0] - (ndim - len(shape))
        if isinstance(call.held[tensor].placement, Replicate) and dim >= 0 and shape[dim] != 1:
            raise Refused(
                f"{tensor.name} is whole along dim {dim} where {first} is divided", f"S({dim}) of {found[1]}", "R"
            )
    return shard(*found)


def _linear_pointwise(call: Call) -> Held:
    """P(sum) passes through what is linear in it and nothing else."""
    target, args = call.node.target, call.args
    tensors = call.node.all_input_nodes
    partial = [a for a in tensors if isinstance(call.held[a].placement, Partial)]
    first = partial[0]
    if any(call.held[a].placement != Partial("sum") for a in partial):
        raise Refused(f"{first.name} is a maximum that is not complete", "R (after all_reduce)", "P(max)")
    if any(isinstance(call.held[a].placement, Shard) for a in tensors):
        raise Refused(f"{first.name} is a sum that is not complete and meets a divided value", "R or P(sum)", "S")
    whole = [a for a in tensors if a not in partial]
    if target in _ADD:
        if whole or not isinstance(args["other"], fx.Node):
            what = whole[0].name if whole else repr(args["other"])
            raise Refused(
                f"{what} would be added once on every rank", "P(sum) for both, or all_reduce before",
                f"{first.name} P(sum) and {what} R",
            )  # fmt: skip
        return SUM
    if target in (aten.mul.Tensor, aten.mul.Scalar) and len(partial) == 1 and args["self"] is not args["other"]:
        return SUM
    if (
        target in (aten.div.Tensor, aten.div.Scalar)
        and args["self"] is first
        and len(partial) == 1
        and args["other"] is not first
    ):
        return SUM
    if target is aten.neg.default:
        return SUM
    if target is aten.masked_fill.Scalar and args["self"] is first and len(partial) == 1 and args["value"] == 0:
        return SUM
    raise Refused(f"{first.name} is a sum that is not complete and this operator is not linear in it", "R", "P(sum)")


@rule(*_CAST)
def _cast(call: Call) -> Held:
    held = call.of("self")
    before = call.args["self"].meta["val"].dtype
    after = call.node.meta["val"].dtype
    if isinstance(held.placement, Partial) and torch.promote_types(before, after) != after:
        raise Refused(
            "every rank's term would be rounded, not the sum",
            "R, or a cast to a wider dtype",
            f"P, {before} to {after}",
        )
    return held


@rule(ops.glu)
def _glu(call: Call) -> Held:
    return aligned(call, call.node.all_input_nodes, len(call.shape(call.node)))


def not_partial(call: Call, name: str) -> Placement:
    place = call.of(name).placement
    if isinstance(place, Partial):
        raise Refused(f"{call.args[name].name} is a sum that is not complete", "R or S", str(place))
    return place


@lru_cache(maxsize=1024)
def addresses(layout: Layout) -> tuple[Runs, ...]:
    """What each rank holds, whoever owns it."""
    out = []
    for rank in layout.runs:
        merged: list[tuple[int, int]] = []
        for run in rank:
            if merged and sum(merged[-1]) == run.start:
                merged[-1] = (merged[-1][0], merged[-1][1] + run.length)
            else:
                merged.append((run.start, run.length))
        out.append(tuple(merged))
    return tuple(out)


@rule(aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default)
def _creator(call: Call) -> Held:
    return WHOLE  # reads only dtype and device of its argument


_MAY_BE_ZEROED = {
    aten.linear.default, aten.addmm.default, aten.mm.default, aten.matmul.default, aten.transpose.int, aten.t.default,
    aten.permute.default, aten.to.dtype, aten._to_copy.default, ops.vocab_embedding, ops_norms.row_sum,
    ops_norms.sum_of_squares, ops.moe_experts, ops.fp8_linear, ops.int8_linear, ops.int4_linear,
}  # fmt: skip
"""Operators whose rules look at zeros in place of copies themselves."""
_MAY_BE_STARTS = {ops.vocab_embedding, ops.moe_experts}
"""Operators whose rules look at each rank's first address themselves."""
_MAY_BE_GATHERED = {
    aten.slice.Tensor, aten.narrow.default, aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes,
    aten.chunk.default, aten.cat.default, aten.to.dtype, aten._to_copy.default,
}  # fmt: skip
"""Operators whose rules look at positions in gathered order themselves."""


def call_of(program: Program, node: fx.Node, held: dict[fx.Node, Any], ranks: int, axis: str) -> Call:
    return Call(program, node, arguments(node), held, ranks, axis)
