"""fold_norm_weight: the weight of a norm moves into the linears that read the norm.

    linear(rms_norm(x, w), W)  →  linear(rms_norm(x, 1), mul(W, w, dim=1))

Needs: shard_tensor_parallel, so that what is multiplied is a rank's own part of W.
Leaves: norms whose weight is one; merge_qkv and fuse_add_rms_norm treat them as any other.
Numerics: close; W·diag(w) is rounded to the model's dtype once, when weights are loaded.
Source: Ashkboos et al. 2024 (SliceGPT, QuaRot), who fold norms in the same way.
"""

from dataclasses import replace

import torch.fx as fx

from graphsrt import ops
from graphsrt.program import NearMiss, Program, arguments, aten
from graphsrt.recipes import Fill, Mul


def fold_norm_weight(program: Program, *, limit: int | None = None, near_misses: list[NearMiss] | None = None) -> int:
    """Fold wherever linears alone read a norm; returns how many norms have lost their weight."""
    fired = 0
    for norm in program.calls(ops.rms_norm):
        weight = program.weight_of(arguments(norm)["weight"])
        if weight is not None and isinstance(weight.recipe, Fill):
            continue  # folded already
        reason = _why_not(program, norm)
        if reason is not None:
            if near_misses is not None:
                near_misses.append(NearMiss(norm.name, norm.meta["module"], reason))
        elif limit is None or fired < limit:
            _fold(program, norm)
            fired += 1
    return fired


fold_norm_weight.after = "shard_tensor_parallel"  # type: ignore[attr-defined]


def _why_not(program: Program, norm: fx.Node) -> str | None:
    args = arguments(norm)
    if program.weight_of(args["weight"]) is None:
        return f"the norm's weight is computed, by {args['weight'].name}"
    if args["offset"]:
        return f"the norm adds {args['offset']} to its weight"
    if norm.meta["val"].dtype != args["x"].meta["val"].dtype:
        return f"the norm's weight makes its result {norm.meta['val'].dtype}"
    for user in norm.users:
        if user.target is not aten.linear.default or arguments(user)["input"] is not norm:
            return f"{user.name} reads the norm and is no linear"
        weight = arguments(user)["weight"]
        if program.weight_of(weight) is None:
            return f"the weight of {user.name} is computed"
        others = [other.name for other in weight.users if other is not user]
        if others:
            return f"{weight.target} is used by {others[0]} too, which reads no norm"
    return None


def _fold(program: Program, norm: fx.Node) -> None:
    weight = program.weights[str(arguments(norm)["weight"].target)]
    for linear in norm.users:
        name = str(arguments(linear)["weight"].target)
        matrix = program.weights[name]
        program.weights[name] = replace(matrix, recipe=Mul(matrix.recipe, weight.recipe, 1))
    ones = f"ones_{weight.shape[0]}"
    if ones not in program.weights:
        program.add_weight(ones, replace(weight, recipe=Fill(weight.shape, 1.0)))
    norm.replace_input_with(arguments(norm)["weight"], program.weight_node(ones))
    program.rename(norm, f"{norm.name}.normed")  # another value than before, so another name
    norm.meta["made_by"] = (*norm.meta["made_by"], "fold_norm_weight")
