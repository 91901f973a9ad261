"""How the experts of a mixture are divided over ranks: every expert by its width, or whole experts.

Either way the tokens and their routing are whole on every rank, and the operator's result is a sum over ranks.
"""

from __future__ import annotations

import torch.fx as fx

from graphsrt import ops
from graphsrt.placement import Layout, Partial, Placement, Shard
from graphsrt.program import Program, Weight, arguments, aten
from graphsrt.recipes import OnOwner, Recipe, ShardOf

WEIGHTS = ("gate_up", "down", "gate_up_bias", "down_bias")
HOW = ("tp", "ep")


def computed_weight(program: Program, node: fx.Node) -> str | None:
    """Why an experts operator stays whole: a weight that is computed cannot be divided while it is loaded."""
    given = arguments(node)
    names = (n for n in WEIGHTS if given[n] is not None and program.weight_of(given[n]) is None)
    return next((f"its weight {name} is computed" for name in names), None)


def divide_experts(program: Program, node: fx.Node, ranks: int, how: str) -> dict[fx.Node, Weight]:
    """Each weight of an experts operator -> this rank's part of it.

    ``how="tp"``: every expert is divided along its width ``F``; the down bias is kept by one rank, since all ranks'
    results are added. ``"ep"``: whole experts are divided; where they do not divide, ranks hold pads that nobody is
    routed to. Experts of which some have no second matrix (LongCat-Flash's, which do nothing) are divided along their
    width in any case.
    """
    given = arguments(node)
    num_experts, _, width = (int(size) for size in given["down"].meta["val"].shape)
    if how == "ep" and given["gate_up"].meta["val"].shape[0] == num_experts:
        layout = Layout.blocks(num_experts, ranks)
        return {
            given[name]: _part(program, given[name], 0, layout) for name in WEIGHTS if isinstance(given[name], fx.Node)
        }
    layout = Layout.blocks(width, ranks)
    rows = layout
    if given["gated"]:
        rows = layout.scale(2) if given["interleaved"] else Layout.concat([layout, layout])
    parts = {
        given["gate_up"]: _part(program, given["gate_up"], 1, rows),
        given["down"]: _part(program, given["down"], 2, layout, "zero"),
    }
    if given["gate_up_bias"] is not None:
        parts[given["gate_up_bias"]] = _part(program, given["gate_up_bias"], 1, rows)
    if given["down_bias"] is not None:
        whole = program.weights[str(given["down_bias"].target)]
        parts[given["down_bias"]] = Weight(whole.shape, whole.dtype, OnOwner(whole.recipe), Partial())
    return parts


def _part(program: Program, node: fx.Node, dim: int, layout: Layout, unowned: str = "copy") -> Weight:
    whole = program.weights[str(node.target)]
    shape = list(whole.shape)
    shape[dim] = layout.local_size
    recipe: Recipe = ShardOf(whole.recipe, dim, layout, unowned)
    place: Placement = Shard(dim, layout)
    return Weight(tuple(shape), whole.dtype, recipe, place)


def only_routes(program: Program, linear: fx.Node) -> bool:
    """Whether a linear's result says nothing but where tokens go, and how much of each expert they take.

    That must be the same on every rank, so such a linear is whole by design: a router, or the gate of a shared expert
    (one channel).
    """
    if linear.target is aten.linear.default and linear.meta["val"].shape[-1] == 1:
        return True
    stack, seen = [linear], {linear}
    routed = False
    while stack:
        for user in stack.pop().users:
            if user.target is ops.moe_experts:
                given = arguments(user)
                if seen & {given["x"], *(given[n] for n in WEIGHTS)}:
                    return False
                routed = True
            elif user.op == "output" or user.target is aten.linear.default:
                return False
            elif user not in seen:
                seen.add(user)
                stack.append(user)
    return routed
