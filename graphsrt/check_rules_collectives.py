"""Collectives, which alone change a placement: rules of :mod:`graphsrt.check_rules`."""

from __future__ import annotations

from graphsrt import ops
from graphsrt.check_rules import SUM, WHOLE, Call, Held, Refused, addresses, rule, shard
from graphsrt.check_rules_tokens import gathered_tokens, token_blocks
from graphsrt.check_rules_views import gathered
from graphsrt.placement import Layout, Partial, Shard

# -- collectives ------------------------------------------------------------------------------------------------------


def _axis(call: Call) -> Held:
    if call.args["axis"] != call.axis or call.axis not in call.program.mesh:
        raise Refused("the collective runs along another axis", call.axis, call.args["axis"])
    if call.args.get("size", call.ranks) != call.ranks:
        raise Refused("the collective is written for another number of ranks", str(call.ranks), str(call.args["size"]))
    held = call.of("x")
    if not held.plain:
        raise Refused("a collective of a value that is not ordinary", "R, S or P", str(held))
    return held


@rule(ops.all_reduce)
def _all_reduce(call: Call) -> Held:
    held = _axis(call)
    if held.placement != Partial(call.args["op"]):
        raise Refused("only a sum that is not complete may be summed", f"P({call.args['op']})", str(held))
    return WHOLE


@rule(ops.reduce_scatter)
def _reduce_scatter(call: Call) -> Held:
    held = _axis(call)
    if held != SUM:
        raise Refused("only a sum that is not complete may be summed", "P(sum)", str(held))
    return _even(call)


@rule(ops.take_own)
def _take_own(call: Call) -> Held:
    held = _axis(call)
    if held != WHOLE:
        raise Refused("each rank takes its own part of a value that is not whole", "R", str(held))
    return _even(call)


def _even(call: Call) -> Held:
    tokens = token_blocks(call)
    if tokens is not None:
        return tokens
    dim = call.dim("x")
    size = call.shape(call.args["x"])[dim]
    if not isinstance(size, int) or size % call.ranks:
        raise Refused(f"dim {dim} does not divide", f"a multiple of {call.ranks}", str(size))
    return shard(dim, Layout.blocks(size, call.ranks))


@rule(ops.all_gather)
def _all_gather(call: Call) -> Held:
    held, dim = _axis(call), call.dim("x")
    tokens = gathered_tokens(call)
    if tokens is not None:
        return tokens
    place = held.placement
    if call.args["rows_of"] is not None:
        raise Refused("rows_of goes with divided tokens", "none", call.args["rows_of"].name)
    if not isinstance(place, Shard) or place.dim != dim:
        raise Refused("only a value divided along the gathered dim may be gathered", f"S({dim})", str(held))
    return gathered(dim, tuple(run for rank in addresses(place.layout) for run in rank), place.layout.size)
