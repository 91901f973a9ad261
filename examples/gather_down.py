"""gather_down: MLPs are completed by a gather in front of their down projection, not by a sum behind it.

    down = linear(x: S, W: S(1)): P;  all_reduce(down)  →  linear(all_gather(x): R, W: R)

Attention stays as it is. The down projections are whole on every rank then, which costs their bytes; in return nothing
is added across ranks, so that an MLP adds in the order of one rank.

Needs: shard_tensor_parallel.  Leaves: one all_gather instead of one all_reduce for each MLP.
Numerics: sums are associated as on one rank.  Source: ours.
"""

from dataclasses import replace

import torch.fx as fx

from graphsrt import ops
from graphsrt.placement import R, Shard
from graphsrt.program import NearMiss, Program, arguments, aten
from graphsrt.recipes import OnOwner, ShardOf


def gather_down(
    program: Program, *, axis: str = "tp", limit: int | None = None, near_misses: list[NearMiss] | None = None
) -> int:
    """Change every MLP whose channels lie in equal blocks; returns how many."""
    fired = 0
    for total in _sums_of_mlps(program):
        down = total.args[0]
        reason = _why_not(down, program.mesh[axis])
        if reason is not None:
            if near_misses is not None:
                near_misses.append(NearMiss(down.name, down.meta["module"], reason))
        elif limit is None or fired < limit:
            _change(program, total, down, axis)
            fired += 1
    return fired


gather_down.expect = lambda program: len(_sums_of_mlps(program))  # type: ignore[attr-defined]
gather_down.required = False  # type: ignore[attr-defined]  # a width that does not divide is no error
gather_down.after = "shard_tensor_parallel"  # type: ignore[attr-defined]


def _sums_of_mlps(program: Program) -> list[fx.Node]:
    return [
        total
        for total in program.calls(ops.all_reduce)
        if total.args[0].target is aten.linear.default and total.args[0].args[0].target is ops.glu
    ]


def _why_not(down: fx.Node, ranks: int) -> str | None:
    layout = arguments(down)["input"].meta["placement"].layout
    if layout.local_size * ranks != layout.size:
        return f"its {layout.size} channels lie as {layout.label()} on the ranks; a gather would keep the pads"
    if len(down.users) > 1:
        return "its terms are used before they are summed"
    return None


def _change(program: Program, total: fx.Node, down: fx.Node, axis: str) -> None:
    args = arguments(down)
    x = args["input"]
    for node in (args["weight"], args["bias"]):
        if node is None:
            continue
        weight = program.weights[str(node.target)]
        assert isinstance(weight.recipe, (ShardOf, OnOwner))
        place, shape = weight.placement, list(weight.shape)
        if isinstance(place, Shard):
            shape[place.dim] = place.layout.size
        program.weights[str(node.target)] = replace(weight, shape=tuple(shape), recipe=weight.recipe.x, placement=R)
        node.meta["val"] = program.shapes.tensor(shape, weight.dtype)
        node.meta["placement"] = R
    last = x.meta["val"].dim() - 1
    gathered = program.call(
        ops.all_gather, x, dim=last, axis=axis, size=program.mesh[axis],
        name=f"{x.name}.all_gather", before=down, like=down,
    )  # fmt: skip
    gathered.meta["placement"] = R
    down.replace_input_with(x, gathered)
    down.meta["placement"] = R
    total.replace_all_uses_with(down, propagate_meta=False)
    program.graph.erase_node(total)
