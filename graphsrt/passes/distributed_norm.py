"""A norm over a width that is divided among ranks: one small sum over ranks, and exact.

    rms_norm(x S(1), weight)
    → squares: f32[T, 1] P(sum) = sum_of_squares(x, owned);  all_reduce;  rms_norm_of(x, squares, weight, width=E)

Addresses that a rank holds as a copy or pad are counted by their owner only: ``owned`` is one there and zero elsewhere.
Source: the definition of the norm; the mean over the width is a sum over ranks divided by the whole width.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from graphsrt import ops, ops_norms
from graphsrt.placement import Partial, Placement, Shard
from graphsrt.program import Program, Weight, arguments
from graphsrt.recipes import Fill, ShardOf

NORMS = (ops.rms_norm, ops.l2_norm, torch.ops.aten.layer_norm.default)
"""Norms that can run over a divided width."""


def distribute_norm(program: Program, norm: fx.Node, place: Shard) -> list[fx.Node]:
    """Write a norm over a divided width in pieces; returns the partial sums, which are still to be completed.

    ``place``: the placement of the norm's result and input, along its last dimension.
    """
    assert norm.target in NORMS, norm.target
    args = arguments(norm)
    width = place.layout.size
    owned = _owned(program, place)
    sums: list[fx.Node] = []

    def call(target: torch._ops.OpOverload, *given: object, role: str, where: Placement, **rest: object) -> fx.Node:
        node = program.call(target, *given, name=f"{norm.name}.{role}", before=norm, like=norm, **rest)
        node.meta.update(placement=where, made_by=(*norm.meta.get("made_by", ()), "shard_tensor_parallel"))
        if isinstance(where, Partial):
            sums.append(node)
        return node

    if norm.target is ops.rms_norm:
        x = args["x"]
        squares = call(ops_norms.sum_of_squares, x, owned, role="squares", where=Partial(), width=width)
        keywords = {name: args[name] for name in ("eps", "cast", "offset")}
        new = call(ops_norms.rms_norm_of, x, squares, args["weight"], role="norm", where=place, width=width, **keywords)
    elif norm.target is ops.l2_norm:
        x = args["x"]
        squares = call(ops_norms.sum_of_squares, x, owned, role="squares", where=Partial(), width=width)
        new = call(ops_norms.l2_norm_of, x, squares, role="norm", where=place, eps=args["eps"])
    else:
        x = args["input"]
        total = call(ops_norms.row_sum, x, owned, role="total", where=Partial())
        squares = call(ops_norms.sum_of_squares, x, owned, total, role="squares", where=Partial(), width=width)
        new = call(
            ops_norms.layer_norm_of, x, total, squares, args["weight"], args["bias"], role="norm", where=place,
            width=width, eps=args["eps"],
        )  # fmt: skip
    program.replace(norm, new)
    return sums


def _owned(program: Program, place: Shard) -> fx.Node | None:
    """A vector of ones at the channels that a rank owns; None where it owns all that it holds."""
    layout = place.layout
    if all(run.owned for rank in layout.runs for run in rank):
        return None
    recipe = ShardOf(Fill((layout.size,), 1.0), 0, layout, "zero")
    for name, weight in program.weights.items():
        if weight.recipe == recipe:
            return program.weight_node(name)
    name = program.fresh_name(f"owned.{layout.size}")
    dtype = torch.float64 if program.dtype == torch.float64 else torch.float32
    return program.add_weight(name, Weight((layout.local_size,), dtype, recipe, Shard(0, layout)))
