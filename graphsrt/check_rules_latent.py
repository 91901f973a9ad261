"""How placements pass through latent attention: rules of :mod:`graphsrt.check_rules`, in a file of their own."""

from __future__ import annotations

import torch.fx as fx

from graphsrt import ops
from graphsrt.check_rules import WHOLE, Call, Held, Refused, addresses, describe, rule
from graphsrt.placement import Layout, Run, Shard


@rule(ops.latent_attention)
def _latent_attention(call: Call) -> Held:
    heads = _same_heads(call, ("q_nope", "q_rope"))
    size = call.shape(call.args["w_kv_b"])[0]
    local = call.shape(call.args["q_nope"])[1]
    assert isinstance(size, int) and isinstance(local, int)
    rows = _layout(call, "w_kv_b", 0)
    try:
        own = rows.divide(size // local)
    except ValueError:
        own = rows
    if size % local or addresses(own) != addresses(heads):
        raise Refused(
            "the rows of w_kv_b are not those of the query heads",
            f"S(0) of {heads} in units of {size // local} rows",
            describe(call.of("w_kv_b").placement),
        )
    return call.of("q_nope")


@rule(ops.radix_latent_attention)
def _radix_latent_attention(call: Call) -> Held:
    _same_heads(call, ("q_latent", "q_rope"))
    return call.of("q_latent")


def _same_heads(call: Call, queries: tuple[str, str]) -> Layout:
    """The heads of both parts of the queries, which those of the sinks follow; all that heads share must be whole."""
    by_heads = {call.args.get(name) for name in (*queries, "sinks", "w_kv_b")}
    for node in call.node.all_input_nodes:
        if node not in by_heads and call.held[node] != WHOLE:
            raise Refused(f"{node.name} is shared by all heads", "R", str(call.held[node]))
    heads, other = (_layout(call, name, 1) for name in queries)
    if addresses(heads) != addresses(other):
        raise Refused(f"{' and '.join(queries)} hold different heads", f"heads {heads}", f"heads {other}")
    if isinstance(call.args["sinks"], fx.Node) and addresses(_layout(call, "sinks", 0)) != addresses(heads):
        raise Refused("the sinks do not follow the query heads", f"S(0) of {heads}", str(call.of("sinks")))
    return heads


def _layout(call: Call, name: str, dim: int) -> Layout:
    """The layout of an argument along ``dim``; every rank holds a whole one from end to end."""
    place = call.of(name).placement
    node = call.args[name]
    if isinstance(place, Shard):
        if place.dim != dim:
            raise Refused(f"{node.name} must be divided by heads", f"S({dim})", describe(place))
        return place.layout
    if call.of(name) != WHOLE:
        raise Refused(f"{node.name} is a sum that is not complete", "R or S", str(place))
    size = call.shape(node)[dim]
    assert isinstance(size, int)
    return Layout.of([[Run(0, size, owned=rank == 0)] for rank in range(call.ranks)])
