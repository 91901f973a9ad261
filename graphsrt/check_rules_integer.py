"""How placements pass through linears over integers: more rules of :mod:`graphsrt.check_rules`.

The product is that of a plain weight (:mod:`graphsrt.check_rules_products`). What scales the integers must be where
these are, and the two halves of a weight of four bits must be halves of the same matrix.
"""

from __future__ import annotations

from dataclasses import replace

from graphsrt import ops
from graphsrt.check_rules import WHOLE, Call, Held, Refused, describe, rule, shard
from graphsrt.check_rules_products import product
from graphsrt.placement import Shard
from graphsrt.recipes import Cat, Quantized, Recipe, ShardOf, Take


@rule(ops.int8_linear)
def _int8_linear(call: Call) -> Held:
    q, scales = call.of("q"), call.of("scales")
    by_rows = isinstance(q.placement, Shard) and q.placement.dim == 0
    wanted = shard(0, q.placement.layout) if by_rows else WHOLE  # type: ignore[union-attr]
    if scales != wanted:
        raise Refused("scales are not those of the rows that a rank has", str(wanted), str(scales))
    return _product(call, q)


@rule(ops.int4_linear)
def _int4_linear(call: Call) -> Held:
    """Packed columns have no addresses; those of their groups do, which belong to the same columns."""
    q, pairs = (call.program.weight_of(call.args[name]) for name in ("q", "pairs"))
    if q is None or pairs is None or not _halves(q.recipe, pairs.recipe):
        raise Refused(
            "numbers and scales are not of the same columns", "weights made of one matrix in one way",
            f"{q and q.recipe} and {pairs and pairs.recipe}",
        )  # fmt: skip
    held = call.of("pairs")
    place = held.placement
    if isinstance(place, Shard) and place.dim == 1:
        return _product(call, Held(Shard(1, place.layout.scale(32)), held.zeroed))
    if call.of("q") != held:
        raise Refused("scales are not those of the rows that a rank has", describe(call.of("q").placement), str(held))
    return _product(call, held)


def _product(call: Call, weight: Held) -> Held:
    return product(call, "x", weight, contracted=1, made=0, bias="bias" if call.args["bias"] is not None else None)


def _halves(q: Recipe, pairs: Recipe) -> bool:
    """Whether two recipes differ in nothing but that one says "int4" where the other says "int4_pairs"."""
    match q, pairs:
        case Quantized(x, "int4"), Quantized(y, "int4_pairs"):
            return x == y
        case (ShardOf(), ShardOf()) | (Take(), Take()):
            return replace(q, x=pairs.x) == pairs and _halves(q.x, pairs.x)  # type: ignore[call-arg, attr-defined]
        case Cat(parts, dim), Cat(others, other_dim):
            return dim == other_dim and len(parts) == len(others) and all(map(_halves, parts, others))
    return False
