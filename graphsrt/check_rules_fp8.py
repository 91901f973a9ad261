"""How placements pass through linears over eight-bit floats: more rules of :mod:`graphsrt.check_rules`.

A scale belongs to the numbers that it multiplies, so it must be where they are: whole on every rank, or divided in the
same rows or blocks.
"""

from __future__ import annotations

import torch.fx as fx

from graphsrt import ops
from graphsrt.check_rules import SUM, WHOLE, Call, Held, Refused, addresses, rule, shard
from graphsrt.placement import Layout, Partial, R, Shard
from graphsrt.recipes import BlockNumbers, ShardOf


def _ordinary(call: Call, *names: str) -> None:
    for name in names:
        held = call.of(name)
        if held.zeroed or isinstance(held.placement, Partial):
            raise Refused(f"{name} is not ordinary", "R or S, with copies where not owned", str(held))


def _in_blocks(layout: Layout, block: int) -> Layout | None:
    """The layout of blocks, where every rank holds whole ones."""
    if layout.size % block or any(n % block for rank in layout.runs for run in rank for n in run[:2]):
        return None
    return layout.divide(block)


def _check_columns(call: Call, name: str, dim: int) -> None:
    """``columns`` numbers the blocks of exactly the columns that a rank holds of ``name``."""
    place, held = call.of(name).placement, call.of("columns")
    weight = call.program.weight_of(call.args["columns"])
    recipe = weight.recipe if weight is not None else None
    if not isinstance(place, Shard) or place.dim != dim or not isinstance(held.placement, Shard):
        raise Refused("blocks are numbered of a width that is not divided", f"S({dim})", f"{call.of(name)}, {held}")
    if addresses(held.placement.layout) != addresses(place.layout):
        raise Refused("blocks are numbered of other columns than a rank holds", str(call.of(name)), str(held))
    numbered = recipe.x if isinstance(recipe, ShardOf) else recipe
    wanted = BlockNumbers(place.layout.size, call.args["block"])
    if numbered != wanted:
        raise Refused("columns are not the numbers of their blocks", str(wanted), str(recipe))


@rule(ops.fp8_scale)
def _fp8_scale(call: Call) -> Held:
    _ordinary(call, "x")
    place, last, block = call.of("x").placement, call.ndim("x") - 1, call.args["block"]
    if call.args["columns"] is not None:
        _check_columns(call, "x", last)
        assert isinstance(place, Shard)
        if call.args["num_blocks"] != -(-place.layout.size // block):
            raise Refused("not all blocks get a scale", str(-(-place.layout.size // block)), call.args["num_blocks"])
        return Held(Partial("max"))
    if not isinstance(place, Shard) or place.dim != last:
        return call.of("x")
    if not block:
        return Held(Partial("max"))
    blocks = _in_blocks(place.layout, block)
    if blocks is None:
        raise Refused("a rank holds parts of blocks", f"whole blocks of {block}, or columns", str(call.of("x")))
    return shard(last, blocks)


def _fits(call: Call, name: str, x: str, dim: int, layout: Layout) -> None:
    """The scales of ``x``, divided along its columns ``dim`` by ``layout``, are those of a rank's columns."""
    held, node = call.of(name), call.args[name]
    shape = call.shape(node)
    if held == WHOLE and (not shape or shape[-1] == 1):
        return
    if call.args["columns"] is not None and held == WHOLE:
        return _check_columns(call, x, dim)
    blocks = _in_blocks(layout, call.args["block"])
    if blocks is None or held != shard(len(shape) - 1, blocks):
        wanted = "the scales of all blocks, and columns" if blocks is None else str(shard(len(shape) - 1, blocks))
        raise Refused(f"{name} is not that of a rank's columns", wanted, str(held))
    return None


@rule(ops.quantize_fp8)
def _quantize_fp8(call: Call) -> Held:
    _ordinary(call, "x", "scale")
    place, last = call.of("x").placement, call.ndim("x") - 1
    if isinstance(place, Shard) and place.dim == last:
        _fits(call, "scale", "x", last, place.layout)
        return call.of("x")
    _no_columns(call)
    _same_rows(call, "scale", "x")
    return call.of("x")


def _no_columns(call: Call) -> None:
    if call.args["columns"] is not None:
        raise Refused("blocks are numbered of columns that every rank has", "no columns", str(call.of("columns")))


def _same_rows(call: Call, scale: str, x: str) -> None:
    """``x`` is whole, or divided in rows: then a scale for each row is divided alike."""
    held, shape = call.of(scale), call.shape(call.args[scale])
    place = call.of(x).placement
    one = isinstance(place, Shard) and (len(shape) <= place.dim or shape[place.dim] == 1)
    wanted = WHOLE if one else call.of(x)
    if held != wanted:
        raise Refused(f"{scale} is not divided as the rows of {x}", str(wanted), str(held))


@rule(ops.fp8_linear)
def _fp8_linear(call: Call) -> Held:
    _ordinary(call, "q", "x_scale", "w_scale")
    q, w = call.of("q"), call.of("w")
    bias = call.of("bias") if isinstance(call.args["bias"], fx.Node) else None
    place, last = w.placement, call.ndim("q") - 1
    if place == R:
        if isinstance(q.placement, Shard) and q.placement.dim == last:
            raise Refused("the input is divided along the contracted dim, the weight is whole", "S(1)", str(w))
        _no_columns(call)
        _same_rows(call, "x_scale", "q")
        if call.of("w_scale") != WHOLE or bias not in (None, WHOLE):
            raise Refused("scales or bias are divided where the weight is whole", "R", f"{call.of('w_scale')}, {bias}")
        return q
    if not isinstance(place, Shard) or place.dim > 1:
        raise Refused("an FP8 weight is divided in rows or columns", "S(0) or S(1)", str(w))
    return _by_rows(call, place.layout, bias) if place.dim == 0 else _by_columns(call, place.layout, bias)


def _by_rows(call: Call, layout: Layout, bias: Held | None) -> Held:
    _no_columns(call)
    if call.of("q") != WHOLE or call.of("x_scale") != WHOLE:
        raise Refused("a weight divided in rows needs a whole input", "R", f"{call.of('q')}, {call.of('x_scale')}")
    if call.of("w").zeroed:
        raise Refused("rows of the weight that claim to be copies are zeros", "copies where not owned")
    scale, shape = call.of("w_scale"), call.shape(call.args["w_scale"])
    blocks = _in_blocks(layout, call.args["block"])
    allowed = [shard(0, layout), *([] if blocks is None else [shard(0, blocks)])]
    if not (scale == WHOLE and (not shape or shape[0] == 1)) and scale not in allowed:
        raise Refused("w_scale does not follow the rows of its weight", " or ".join(map(str, allowed)), str(scale))
    if bias not in (None, shard(0, layout)):
        raise Refused("the bias does not follow the rows of its weight", str(shard(0, layout)), str(bias))
    return shard(call.ndim("q") - 1, layout)


def _by_columns(call: Call, layout: Layout, bias: Held | None) -> Held:
    q, w, last = call.of("q").placement, call.of("w"), call.ndim("q") - 1
    if not isinstance(q, Shard) or q.dim != last or addresses(q.layout) != addresses(layout):
        raise Refused("input and weight are contracted over different addresses", f"S({last}) of {layout}", str(q))
    if not w.zeroed and not all(run.owned for rank in layout.runs for run in rank):
        raise Refused("addresses held twice are counted twice", "zeros in the weight where not owned", str(w))
    _fits(call, "x_scale", "q", last, q.layout)
    _fits(call, "w_scale", "w", 1, layout)
    if bias not in (None, SUM):
        raise Refused("the bias would be added once on every rank", "P(sum), on one rank only", str(bias))
    return SUM
