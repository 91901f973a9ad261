"""Reductions, norms and rotations: rules of :mod:`graphsrt.check_rules`."""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from graphsrt import ops, ops_norms
from graphsrt.check_rules import (
    SUM,
    WHOLE,
    Call,
    Held,
    Refused,
    aligned,
    describe,
    like_value,
    not_partial,
    rule,
    shard,
)
from graphsrt.placement import Partial, Shard
from graphsrt.program import aten
from graphsrt.recipes import Fill, ShardOf

# -- reductions, norms ------------------------------------------------------------------------------------------------


@rule(aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.var.correction,
      aten.logsumexp.default, aten.argmax.default, aten.any.dim, aten.all.dim)  # fmt: skip
def _reduce(call: Call) -> Held:
    held, target = call.of("self"), call.node.target
    place = held.placement
    if isinstance(place, Partial):
        if target in (aten.sum.dim_IntList, aten.mean.dim) and place.op == "sum":
            return held
        raise Refused("a sum that is not complete is reduced by something that is not linear", "R", str(place))
    assert isinstance(place, Shard)
    ndim = call.ndim("self")
    dims = call.args["dim"]
    over = (
        set(range(ndim))
        if dims is None or dims == []
        else {d % ndim for d in ([dims] if isinstance(dims, int) else dims)}
    )
    if place.dim not in over:
        gone = 0 if call.args["keepdim"] else sum(d < place.dim for d in over)
        return shard(place.dim - gone, place.layout)
    if target is aten.sum.dim_IntList:
        if not all(run.owned for rank in place.layout.runs for run in rank):
            raise Refused("copies would be counted twice", "every address on one rank", describe(place))
        return SUM
    if target is aten.amax.default:
        return Held(Partial("max"))
    raise Refused(
        f"each rank would reduce its own part of dim {place.dim} only", "R, or S along another dim", describe(place)
    )


@rule(aten.softmax.int, aten._softmax.default, aten.log_softmax.int, aten._log_softmax.default, aten.cumsum.default,
      aten.sort.default, aten.topk.default, aten.flip.default)  # fmt: skip
def _along_dim(call: Call) -> Any:
    place = not_partial(call, "self")
    dims = call.args["dims"] if "dims" in call.args else [call.args["dim"]]
    if isinstance(place, Shard) and place.dim in {d % call.ndim("self") for d in dims}:
        raise Refused(
            f"each rank would see its own part of dim {place.dim} only", "R, or S along another dim", describe(place)
        )
    return like_value(call, call.of("self"))


def _norm(call: Call, tensors: list[fx.Node], vectors: list[fx.Node], width: int) -> Held:
    """Norms: ``tensors`` are added first, the last ``width`` dims are the norm's, ``vectors`` scale and shift."""
    ndim = len(call.shape(tensors[0]))
    places = {call.held[t] for t in tensors}
    if len(places) != 1:
        raise Refused("the sum before the norm has terms that are held differently", *map(str, list(places)[:2]))
    held = places.pop()
    if isinstance(held.placement, Partial):
        raise Refused(f"{tensors[0].name} is a sum that is not complete", "R", str(held))
    if isinstance(held.placement, Shard) and held.placement.dim >= ndim - width:
        raise Refused(
            "the norm runs over a width that is divided", f"R, or S along dims before {ndim - width}", str(held)
        )
    both = aligned(call, [*tensors, *vectors], ndim)
    if both != held:
        raise Refused("the norm's weight is divided where its input is not", str(held), str(both))
    return held


@rule(ops.rms_norm)
def _rms_norm(call: Call) -> Held:
    return _norm(call, [call.args["x"]], [call.args["weight"]], 1)


@rule(ops.l2_norm)
def _l2_norm(call: Call) -> Held:
    return _norm(call, [call.args["x"]], [], 1)


@rule(ops.add_rms_norm)
def _add_rms_norm(call: Call) -> tuple[Held, Held]:
    held = _norm(call, [call.args["x"], call.args["residual"]], [call.args["weight"]], 1)
    return held, held


@rule(aten.rms_norm.default)
def _plain_rms_norm(call: Call) -> Held:
    vectors = [call.args["weight"]] if isinstance(call.args["weight"], fx.Node) else []
    return _norm(call, [call.args["input"]], vectors, len(call.args["normalized_shape"]))


@rule(aten.layer_norm.default)
def _layer_norm(call: Call) -> Held:
    vectors = [call.args[n] for n in ("weight", "bias") if isinstance(call.args[n], fx.Node)]
    return _norm(call, [call.args["input"]], vectors, len(call.args["normalized_shape"]))


@rule(ops_norms.row_sum, ops_norms.sum_of_squares)
def _row_sums(call: Call) -> Held:
    """Sums over a divided width: each address is to be counted once."""
    if "width" in call.args:
        if call.of("total") != WHOLE:
            raise Refused(
                "the mean of a row is not the same on all ranks", "R (after all_reduce)", str(call.of("total"))
            )
        _check_width(call)
    place, last = not_partial(call, "x"), call.ndim("x") - 1
    if call.of("x").zeroed:
        raise Refused("the row has zeros in place of copies", "copies where not owned", str(call.of("x")))
    if not isinstance(place, Shard) or place.dim != last:
        raise Refused("each rank's share of a row's sum, but the row is not divided", f"S({last})", describe(place))
    if call.args["owned"] is None:
        if not all(run.owned for rank in place.layout.runs for run in rank):
            raise Refused("copies would be counted twice", "a vector of ones where owned", describe(place))
        return SUM
    owned = call.of("owned")
    if owned.placement != Shard(0, place.layout) or not owned.zeroed or not _is_ones(call, "owned"):
        raise Refused(
            "what is owned is not what the row holds", f"ones, zeros where not owned, of {place.layout}", str(owned)
        )
    return SUM


def _is_ones(call: Call, name: str) -> bool:
    weight = call.program.weight_of(call.args[name])
    recipe = weight.recipe if weight is not None else None
    return isinstance(recipe, ShardOf) and isinstance(recipe.x, Fill) and recipe.x.value == 1.0


def _check_width(call: Call) -> None:
    place, last = call.of("x").placement, call.ndim("x") - 1
    width = place.layout.size if isinstance(place, Shard) and place.dim == last else call.shape(call.args["x"])[last]
    if call.args["width"] != width:
        raise Refused("the norm divides by another width", str(width), str(call.args["width"]))


@rule(ops_norms.rms_norm_of, ops_norms.layer_norm_of, ops_norms.l2_norm_of)
def _norm_of(call: Call) -> Held:
    if "width" in call.args:
        _check_width(call)
    sums = [call.args[n] for n in ("total", "squares") if n in call.args]
    for value in sums:
        if call.held[value] != WHOLE:
            raise Refused(f"{value.name} is not complete", "R (after all_reduce)", str(call.held[value]))
    vectors = [call.args[n] for n in ("weight", "bias") if isinstance(call.args.get(n), fx.Node)]
    return aligned(call, [call.args["x"], *vectors], call.ndim("x"))


@rule(ops.rope)
def _rope(call: Call) -> Held:
    place = not_partial(call, "x")
    for name in ("positions", "table"):
        if call.of(name) != WHOLE:
            raise Refused(f"the {name} of a rope differ from rank to rank", "R", str(call.of(name)))
    if isinstance(place, Shard) and place.dim != 1:
        raise Refused("a rope needs whole heads and all tokens", "S(1), by heads", describe(place))
    return call.of("x")
