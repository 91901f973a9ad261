"""Views, permutations, parts and wholes: rules of :mod:`graphsrt.check_rules`."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch.fx as fx

from graphsrt import ops
from graphsrt.check_rules import (
    SUM,
    WHOLE,
    Call,
    Held,
    Refused,
    Runs,
    describe,
    like_value,
    not_partial,
    rule,
    shard,
)
from graphsrt.placement import Layout, Partial, R, Replicate, Run, Shard
from graphsrt.program import aten

# -- views, permutations ----------------------------------------------------------------------------------------------


@rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int)
def _view(call: Call) -> Held:
    held = call.of("self")
    place = held.placement
    if not isinstance(place, Shard):
        return held
    before, after = call.shape(call.args["self"]), call.shape(call.node)
    options = list(view_options(before, after, place))
    if not options:
        raise Refused(
            f"the view {list(before)} -> {list(after)} mixes what belongs to different ranks",
            f"whole units of dim {place.dim}",
            describe(place),
        )
    recorded = call.node.meta.get("placement")
    # With one unit on a rank, [8] -> [1, 8] can mean several global views. All of them are true of the values, and what
    # uses the result decides which is wanted, so the recorded one counts if it is among them.
    return Held(recorded if recorded in options else options[0])


def view_options(before: Sequence[int | str], after: Sequence[int | str], place: Shard) -> Iterable[Shard]:
    """The placements that are true of a view of local shape ``before`` as local shape ``after``."""
    for old, new in _groups(before, after):
        if place.dim not in old:
            continue
        outside = [before[d] for d in old]
        if any(isinstance(size, str) for size in [*outside, *(after[d] for d in new)]):
            if list(outside) == [after[d] for d in new]:
                yield Shard(new[list(old).index(place.dim)], place.layout)
            return
        sizes = {d: int(before[d]) for d in old}
        outer = math.prod(sizes[d] for d in old if d < place.dim)
        inner = math.prod(sizes[d] for d in old if d > place.dim)
        flat = Layout.concat([place.layout.scale(inner)] * outer)
        for dim in new:
            above = math.prod(int(after[d]) for d in new if d < dim)
            below = math.prod(int(after[d]) for d in new if d > dim)
            layout = _unflatten(flat, above, below)
            if layout is not None and layout.local_size == after[dim]:
                yield Shard(dim, layout)


def _groups(before: Sequence[int | str], after: Sequence[int | str]) -> list[tuple[range, range]]:
    """Smallest runs of dims of both shapes with the same number of elements; dims of size 1 go with the next run."""
    groups: list[tuple[range, range]] = []
    i = j = first_i = first_j = 0
    while i < len(before) or j < len(after):
        left, right = Counter[str](), Counter[str]()
        n = m = 1
        start = (i, j)
        while (n, left) != (m, right) or (i, j) == start:
            more_left = bool(right - left) or (not left - right and n <= m)
            if i < len(before) and (more_left or j == len(after)):
                n *= _take(before[i], left)
                i += 1
            elif j < len(after):
                m *= _take(after[j], right)
                j += 1
            else:
                raise Refused(f"cannot relate the shapes {list(before)} and {list(after)}")
        if n == 1 and not left and (i, j) != (len(before), len(after)):
            continue  # only ones so far: they join what follows
        groups.append((range(first_i, i), range(first_j, j)))
        first_i, first_j = i, j
    return groups


def _take(size: int | str, symbols: Counter) -> int:
    """The integer factor of a size; its symbols are added to ``symbols``."""
    if isinstance(size, int):
        return size
    factor = 1
    for part in size.split("*"):
        if part.isdigit():
            factor *= int(part)
        else:
            symbols[part] += 1
    return factor


@lru_cache(maxsize=1024)
def _unflatten(flat: Layout, outer: int, inner: int) -> Layout | None:
    """The layout of the middle dim when ``flat`` becomes [outer, dim, inner]; None if ranks' parts do not line up."""
    if flat.local_size % outer or flat.size % outer:
        return None
    local, size = flat.local_size // outer, flat.size // outer
    middle = None
    for index in range(outer):
        try:
            low, high, part = window_of(flat, index * local, (index + 1) * local)
        except Refused:
            return None
        if (low, high) != (index * size, (index + 1) * size) or middle not in (None, part):
            return None
        middle = part
    if middle is None or middle.granularity % inner:
        return None
    return middle.divide(inner)


def window_of(layout: Layout, start: int, end: int) -> tuple[int, int, Layout]:
    """Local positions ``[start, end)`` of every rank: the global window that they hold, and their layout in it."""
    parts: list[list[Run]] = []
    for rank in layout.runs:
        position, mine = 0, []
        for run in rank:
            low, high = max(position, start), min(position + run.length, end)
            if low < high:
                mine.append(Run(run.start + low - position, high - low, run.owned))
            position += run.length
        parts.append(mine)
    every = [run for mine in parts for run in mine]
    low, high = min(r.start for r in every), max(r.start + r.length for r in every)
    try:
        inside = Layout.of([[Run(r.start - low, r.length, r.owned) for r in mine] for mine in parts])
    except ValueError as error:
        raise Refused(
            f"local [{start}:{end}] is not one window of the global value", "the same contiguous part on all ranks",
            f"{layout} ({error})",
        ) from None  # fmt: skip
    if inside.size != high - low:
        raise Refused(f"local [{start}:{end}] leaves out addresses that nobody owns", f"[{low}:{high}]", str(layout))
    return low, high, inside


@rule(aten.transpose.int, aten.permute.default, aten.t.default, aten.unsqueeze.default, aten.squeeze.dim,
      aten.squeeze.dims,       aten.movedim.int)  # fmt: skip
def _permute(call: Call) -> Held:
    held = call.of("self")
    place = held.placement
    if not isinstance(place, Shard):
        return held
    args, ndim = call.args, call.ndim("self")
    order = list(range(ndim))
    target = call.node.target
    if target is aten.permute.default:
        order = [d % ndim for d in args["dims"]]
    elif target in (aten.transpose.int, aten.t.default):
        a, b = (args["dim0"] % ndim, args["dim1"] % ndim) if target is aten.transpose.int else (0, ndim - 1)
        order[a], order[b] = order[b], order[a]
    elif target is aten.movedim.int:
        order.insert(args["destination"] % ndim, order.pop(args["source"] % ndim))
    elif target is aten.unsqueeze.default:
        order.insert(args["dim"] % (ndim + 1), -1)
    else:
        dims = [args["dim"]] if isinstance(args["dim"], int) else args["dim"]
        gone = {d % ndim for d in dims if call.shape(args["self"])[d] == 1}
        if place.dim in gone:
            raise Refused(f"dim {place.dim} has size 1 only on one rank; its whole has {place.layout.size}")
        order = [d for d in order if d not in gone]
    return Held(Shard(order.index(place.dim), place.layout), zeroed=held.zeroed)


# -- parts and wholes -------------------------------------------------------------------------------------------------


@rule(aten.slice.Tensor, aten.narrow.default, aten.narrow_copy.default)
def _slice(call: Call) -> Held:
    held, dim = call.of("self"), call.dim()
    args = call.args
    size = call.shape(args["self"])[dim]
    if not _concerns(held, dim):
        return held
    assert isinstance(size, int)
    start = args["start"] or 0
    end = start + args["length"] if "length" in args else (size if args["end"] is None else args["end"])
    start, end = (max(0, min(size, n + size if n < 0 else n)) for n in (start, end))
    if args.get("step", 1) != 1:
        raise Refused(
            f"every {args['step']}th position of dim {dim}, which is divided", "step 1", describe(held.placement)
        )
    return _part(held, dim, start, end)


def _concerns(held: Held, dim: int) -> bool:
    sharded = isinstance(held.placement, Shard) and held.placement.dim == dim
    return sharded or (held.gathered is not None and held.gathered[0] == dim)


def _part(held: Held, dim: int, start: int, end: int) -> Held:
    if held.gathered is not None:
        _, runs, size = held.gathered
        return gathered(dim, cut(runs, start, end), size)
    assert isinstance(held.placement, Shard)
    if (start, end) == (0, held.placement.layout.local_size):
        return held
    return shard(dim, window_of(held.placement.layout, start, end)[2])


def gathered(dim: int, runs: Runs, size: int) -> Held:
    """Positions held alike by all ranks; once they are all addresses in order, the value is whole."""
    merged: list[tuple[int, int]] = []
    for start, length in runs:
        if merged and merged[-1][0] + merged[-1][1] == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((start, length))
    return WHOLE if merged == [(0, size)] else Held(R, gathered=(dim, tuple(merged), size))


def cut(runs: Runs, start: int, end: int) -> Runs:
    position, out = 0, []
    for first, length in runs:
        low, high = max(position, start), min(position + length, end)
        if low < high:
            out.append((first + low - position, high - low))
        position += length
    return tuple(out)


@rule(aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes, aten.chunk.default)
def _split(call: Call) -> Any:
    held, dim = call.of("self"), call.dim()
    out, start = [], 0
    for part in call.node.meta["val"]:
        size = call.program.shapes.name(part.shape[dim])
        out.append(held if not _concerns(held, dim) else _part(held, dim, start, start + int(size)))
        start += int(size) if isinstance(size, int) else 0
    return tuple(out)


@rule(aten.select.int, aten.unbind.int)
def _select(call: Call) -> Any:
    held, dim = call.of("self"), call.dim()
    place = held.placement
    if isinstance(place, Shard):
        if place.dim == dim:
            raise Refused(f"one position of dim {dim}, which is divided", "another dim", describe(place))
        held = shard(place.dim - (place.dim > dim), place.layout)
    return like_value(call, held)


@rule(operator.getitem)
def _getitem(call: Call) -> Held:
    return call.held[call.node.args[0]][call.node.args[1]]  # type: ignore[index]


@rule(aten.cat.default, aten.stack.default)
def _cat(call: Call) -> Held:
    stack = call.node.target is aten.stack.default
    tensors: list[fx.Node] = list(call.args["tensors"])
    ndim = len(call.shape(call.node))
    dim = call.args["dim"] % ndim
    held = [call.held[a] for a in tensors]
    if all(h.placement == Partial("sum") for h in held):
        return SUM
    if all(isinstance(h.placement, Replicate) for h in held):
        return _cat_gathered(call, tensors, dim, stack)
    if not all(isinstance(h.placement, Shard) for h in held):
        raise Refused("parts side by side are held differently", "one kind of placement", ", ".join(map(str, held)))
    dims = {h.placement.dim for h in held}  # type: ignore[union-attr]
    layouts = [h.placement.layout for h in held]  # type: ignore[union-attr]
    if len(dims) == 1:
        (at,) = dims
        if not stack and at == dim:
            return shard(dim, Layout.concat(layouts))
        if len(set(layouts)) == 1:
            return shard(at + (stack and at >= dim), layouts[0])
    raise Refused("parts side by side are divided differently", str(held[0]), ", ".join(map(str, held[1:])))


def _cat_gathered(call: Call, tensors: list[fx.Node], dim: int, stack: bool) -> Held:
    runs: list[tuple[int, int]] = []
    sizes = set()
    for tensor in tensors:
        held = call.held[tensor]
        if held.gathered is None or held.gathered[0] != dim or stack:
            raise Refused(
                f"{tensor.name} does not belong beside gathered positions", "parts of one gathered value", str(held)
            )
        runs += held.gathered[1]
        sizes.add(held.gathered[2])
    if len(sizes) != 1:
        raise Refused("parts of different values are put together", "one size", str(sorted(sizes)))
    return gathered(dim, tuple(runs), sizes.pop())


@rule(aten.expand.default, aten.broadcast_to.default, aten.repeat.default)
def _expand(call: Call) -> Held:
    held = call.of("self")
    place = held.placement
    if not isinstance(place, Shard):
        return held
    dim = place.dim + len(call.shape(call.node)) - call.ndim("self")
    if call.shape(call.node)[dim] != place.layout.local_size:
        raise Refused(f"dim {place.dim} is divided and repeated as a whole", "repeats of other dims", describe(place))
    return shard(dim, place.layout)


@rule(aten.repeat_interleave.self_int)
def _repeat_interleave(call: Call) -> Held:
    held = call.of("self")
    place = held.placement
    if call.args["dim"] is None:
        raise Refused("repeats of the flattened value", "a dim")
    if isinstance(place, Shard) and place.dim == call.dim():
        return shard(place.dim, place.layout.scale(call.args["repeats"]))
    return held


@rule(aten.index_select.default)
def _index_select(call: Call) -> Held:
    held, dim = call.of("self"), call.dim()
    if call.of("index") != WHOLE:
        raise Refused("the index is not the same on all ranks", "R", str(call.of("index")))
    if isinstance(held.placement, Shard) and held.placement.dim == dim:
        raise Refused(f"rows are picked from dim {dim}, which is divided", "another dim", str(held))
    return held


@rule(ops.silu_mul)
def _silu_mul(call: Call) -> Held:
    held, last = call.of("gate_up"), call.ndim("gate_up") - 1
    place = not_partial(call, "gate_up")
    if not isinstance(place, Shard) or place.dim != last:
        return held
    half = place.layout.local_size // 2
    low, middle, gate = window_of(place.layout, 0, half)
    also_middle, high, up = window_of(place.layout, half, 2 * half)
    if gate != up or low != 0 or middle != also_middle or high != place.layout.size:
        raise Refused(
            "a rank's two halves do not pair the same channels", "segments [gate | up] of one layout", str(place.layout)
        )
    return shard(last, gate)
