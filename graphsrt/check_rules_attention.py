"""Attention and what writes its cache: rules of :mod:`graphsrt.check_rules`."""

from __future__ import annotations

from functools import lru_cache

import torch.fx as fx

from graphsrt import ops
from graphsrt.check_rules import WHOLE, Call, Held, Refused, addresses, describe, rule
from graphsrt.placement import Layout, Partial, Run, Shard

# -- attention --------------------------------------------------------------------------------------------------------


@rule(ops.attention, ops.radix_attention)
def _attention(call: Call) -> Held:
    _check_others(call, "q", "k", "v", "sinks", "alibi_slopes", "kv_pool")
    query = _heads(call, "q", 1)
    pairs = {name: _heads(call, name, dim) for name, dim in (("k", 1), ("v", 1), ("kv_pool", 3))}
    names = [name for name in pairs if isinstance(call.args.get(name), fx.Node)]
    keys = pairs[names[0]]
    for name in names[1:]:
        if addresses(pairs[name]) != addresses(keys):
            raise Refused(f"{names[0]} and {name} hold different heads", f"heads {keys}", f"heads {pairs[name]}")
    wrong = mismatch(query, keys)
    if wrong is not None:
        raise Refused(
            "query heads meet KV heads of another group", f"rank {wrong[0]}: KV head {wrong[1]}", f"KV head {wrong[2]}"
        )
    for name in ("sinks", "alibi_slopes"):
        if isinstance(call.args[name], fx.Node) and addresses(_heads(call, name, 0)) != addresses(query):
            raise Refused(f"{name} do not follow the query heads", f"S(0) of {query}", str(call.of(name)))
    return call.of("q")


def _check_others(call: Call, *by_heads: str) -> None:
    """No argument is an incomplete sum, and those that are not divided ``by_heads`` are the same on every rank."""
    for name, node in call.args.items():
        if not isinstance(node, fx.Node):
            continue
        if isinstance(call.held[node].placement, Partial):
            raise Refused(f"{node.name} is a sum that is not complete", "R or S", str(call.held[node]))
        if name not in by_heads and call.held[node] != WHOLE:
            raise Refused(f"{node.name} differs from rank to rank", "R", str(call.held[node]))


def _heads(call: Call, name: str, dim: int) -> Layout:
    """The layout of an argument's heads; a whole one is held from 0 to H by every rank."""
    node = call.args.get(name)
    if not isinstance(node, fx.Node):
        return Layout.blocks(1, 1)
    place = call.held[node].placement
    if isinstance(place, Shard):
        if place.dim != dim:
            raise Refused(f"{node.name} must be divided by heads", f"S({dim})", describe(place))
        return place.layout
    size = call.shape(node)[dim]
    assert isinstance(size, int)
    return Layout.of([[Run(0, size, owned=rank == 0)] for rank in range(call.ranks)])


@lru_cache(maxsize=256)
def mismatch(query: Layout, keys: Layout) -> tuple[int, int, int] | None:
    """(rank, KV head that is needed, KV head that is used) of the first query head that reads a wrong one."""
    if query.size % keys.size or query.local_size % keys.local_size:
        return (0, keys.size, keys.local_size)
    group, local = query.size // keys.size, query.local_size // keys.local_size
    for rank in range(query.ranks):
        have = keys.addresses(rank)
        for i, head in enumerate(query.addresses(rank)):
            if have[i // local] != head // group:
                return (rank, head // group, have[i // local])
    return None


@rule(ops.kv_write)
def _kv_write(call: Call) -> Held:
    check_write(call)
    return WHOLE


def check_write(call: Call, *by_heads: str) -> None:
    """Keys, values and the pool that they go to hold the same heads, rank by rank; ``by_heads``: more arguments whose
    heads (dimension 1) may be divided. All else must be the same on every rank."""
    dims = {"k": 1, "v": 1, "kv_pool": 3, **dict.fromkeys(by_heads, 1)}
    _check_others(call, *dims)
    keys, values, pool = (_heads(call, name, dims[name]) for name in ("k", "v", "kv_pool"))
    if len({addresses(layout) for layout in (keys, values, pool)}) != 1:
        raise Refused("keys, values and pool hold different heads", str(pool), f"{keys} and {values}")
    for name in by_heads:
        _heads(call, name, 1)
