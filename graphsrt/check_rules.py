"""How placements pass through operators, read forwards: the rules of :mod:`graphsrt.check_placements`.

Written apart from the pass that chooses placements and shares no rule with it, so that one mistake cannot hide in
both. A rule answers one question: given what each rank holds of the arguments, what does each rank hold of the result?
Either the answer is a placement that is *true* of the values, or the operator is refused in words.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.fx as fx

from graphsrt import ops, ops_norms
from graphsrt.placement import Layout, Partial, Placement, R, Replicate, Run, Shard
from graphsrt.program import Program, arguments, aten
from graphsrt.recipes import Fill, ShardOf

Runs = tuple[tuple[int, int], ...]
"""(first address, length) of consecutive positions."""


@dataclass(frozen=True)
class Held:
    """What the ranks hold of a value. The last three say more than the recorded placement can."""

    placement: Placement
    zeroed: bool = False
    """Positions that a rank does not own hold zeros, not copies: true of weights that are contracted."""
    starts: Layout | None = None
    """The value is each rank's first address in this layout."""
    gathered: tuple[int, Runs, int] | None = None
    """(dim, addresses, size): all ranks hold the same, but along ``dim`` in this order, pads and copies included."""

    @property
    def plain(self) -> bool:
        return not self.zeroed and self.starts is None and self.gathered is None

    def __str__(self) -> str:
        text = describe(self.placement)
        if self.zeroed:
            text += ", zeros where not owned"
        if self.starts is not None:
            text += ", the first address of each rank"
        if self.gathered is not None:
            dim, runs, size = self.gathered
            text += f" of {_length(runs)} gathered positions for {size} addresses along dim {dim}"
        return text


WHOLE = Held(R)
SUM = Held(Partial("sum"))


class Refused(Exception):
    """An operator cannot be applied to what the ranks hold."""

    def __init__(self, what: str, expected: str | None = None, got: str | None = None):
        super().__init__(what)
        self.what, self.expected, self.got = what, expected, got


def describe(place: Any) -> str:
    """``S(1) of 64/2``, ``R``, ``P(sum)``; tuples by element."""
    if isinstance(place, tuple):
        return "(" + ", ".join(describe(p) for p in place) + ")"
    return f"S({place.dim}) of {place.layout}" if isinstance(place, Shard) else str(place)


def shard(dim: int, layout: Layout) -> Held:
    """Divided along ``dim``; a layout that gives every rank all addresses in order divides nothing."""
    if all(runs == ((0, layout.size),) for runs in addresses(layout)):
        return WHOLE
    return Held(Shard(dim, layout))


@dataclass
class Call:
    """One operator call: its node, arguments by name, and what the ranks hold of each argument."""

    program: Program
    node: fx.Node
    args: dict[str, Any]
    held: dict[fx.Node, Any]
    ranks: int
    axis: str

    def of(self, name: str) -> Held:
        """What is held of a tensor argument; an absent one counts as whole."""
        value = self.args[name]
        return self.held[value] if isinstance(value, fx.Node) else WHOLE

    def shape(self, node: fx.Node) -> tuple[int | str, ...]:
        return self.program.shape(node)

    def ndim(self, name: str) -> int:
        return len(self.shape(self.args[name]))

    def dim(self, name: str = "self", dim: str = "dim") -> int:
        """The argument ``dim`` counted from the front of tensor ``name``."""
        return self.args[dim] % self.ndim(name)


Rule = Callable[[Call], Any]
RULES: dict[Any, Rule] = {}


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for target in targets:
            RULES[target] = function
        return function

    return register


def derive(call: Call) -> Any:
    """What the ranks hold of the result: a :class:`Held`, or a tuple of them for a tuple value."""
    node = call.node
    target: Any = node.target
    known = RULES.get(target)
    inputs = [call.held[a] for a in node.all_input_nodes]
    if target in ops.COLLECTIVES or target is operator.getitem:
        assert known is not None
        return known(call)
    tags = target.tags if isinstance(target, torch._ops.OpOverload) else ()
    if torch.Tag.nondeterministic_seeded in tags:
        raise Refused("random numbers differ from rank to rank")
    if all(item == WHOLE for item in inputs):
        return _repeated(call) or _like_value(call, WHOLE)
    for argument in node.all_input_nodes:
        item = call.held[argument]
        if isinstance(item, tuple):
            raise Refused(f"{argument.name} is a tuple")
        if (
            (item.zeroed and target not in _MAY_BE_ZEROED)
            or (item.gathered is not None and target not in _MAY_BE_GATHERED)
            or (item.starts is not None and target not in _MAY_BE_STARTS)
        ):
            raise Refused(f"{argument.name} cannot be used here", "an ordinary value", str(item))
    if known is not None:
        return known(call)
    if torch.Tag.pointwise in tags:
        return _pointwise(call)
    if target in ops.ROWWISE:
        return _rowwise(call)
    raise Refused(
        "no rule says how this operator treats a value that is not whole on every rank",
        "R for every argument",
        ", ".join(f"{a.name} {call.held[a]}" for a in node.all_input_nodes if call.held[a] != WHOLE),
    )


def _like_value(call: Call, held: Held) -> Any:
    val = call.node.meta.get("val")
    return tuple(held for _ in val) if isinstance(val, (tuple, list)) else held


# -- elementwise ------------------------------------------------------------------------------------------------------

_ADD = {aten.add.Tensor, aten.sub.Tensor}
_CAST = {aten.to.dtype, aten._to_copy.default, aten.clone.default, aten.contiguous.default, aten.alias.default,
         aten.detach.default, aten.lift_fresh_copy.default}  # fmt: skip


def _pointwise(call: Call) -> Held:
    tensors = call.node.all_input_nodes
    held = [call.held[a] for a in tensors]
    if any(isinstance(h.placement, Partial) for h in held):
        return _linear_pointwise(call)
    return aligned(call, tensors, len(call.shape(call.node)))


def _rowwise(call: Call) -> Any:
    """Rows are divided, never what is in them."""
    values: Any = call.node.meta["val"]
    results = values if isinstance(values, (tuple, list)) else [values]
    held = aligned(call, call.node.all_input_nodes, max(value.dim() for value in results))
    if isinstance(held.placement, Shard) and any(held.placement.dim >= value.dim() - 1 for value in results):
        raise Refused("this operator needs whole rows", "a value that is whole along its last dim", str(held))
    return tuple(held for _ in results) if isinstance(values, (tuple, list)) else held


def aligned(call: Call, tensors: Sequence[fx.Node], ndim: int) -> Held:
    """Broadcast from the right: all sharded arguments must be divided alike, whole ones must have size 1 there."""
    found: tuple[int, Layout] | None = None
    first = ""
    for tensor in tensors:
        place = call.held[tensor].placement
        if isinstance(place, Partial):
            raise Refused(f"{tensor.name} is a sum that is not complete", "R or S", str(place))
        if isinstance(place, Shard):
            mine = (place.dim + ndim - len(call.shape(tensor)), place.layout)
            if found is not None and mine != found:
                raise Refused(
                    f"{first} and {tensor.name} are divided differently",
                    f"S({found[0]}) of {found[1]}",
                    f"S({mine[0]}) of {mine[1]}",
                )
            found, first = mine, tensor.name
    if found is None:
        return WHOLE
    for tensor in tensors:
        shape = call.shape(tensor)
        dim = found[0] - (ndim - len(shape))
        if isinstance(call.held[tensor].placement, Replicate) and dim >= 0 and shape[dim] != 1:
            raise Refused(
                f"{tensor.name} is whole along dim {dim} where {first} is divided", f"S({dim}) of {found[1]}", "R"
            )
    return shard(*found)


def _linear_pointwise(call: Call) -> Held:
    """P(sum) passes through what is linear in it and nothing else."""
    target, args = call.node.target, call.args
    tensors = call.node.all_input_nodes
    partial = [a for a in tensors if isinstance(call.held[a].placement, Partial)]
    first = partial[0]
    if any(call.held[a].placement != Partial("sum") for a in partial):
        raise Refused(f"{first.name} is a maximum that is not complete", "R (after all_reduce)", "P(max)")
    if any(isinstance(call.held[a].placement, Shard) for a in tensors):
        raise Refused(f"{first.name} is a sum that is not complete and meets a divided value", "R or P(sum)", "S")
    whole = [a for a in tensors if a not in partial]
    if target in _ADD:
        if whole or not isinstance(args["other"], fx.Node):
            what = whole[0].name if whole else repr(args["other"])
            raise Refused(
                f"{what} would be added once on every rank", "P(sum) for both, or all_reduce before",
                f"{first.name} P(sum) and {what} R",
            )  # fmt: skip
        return SUM
    if target in (aten.mul.Tensor, aten.mul.Scalar) and len(partial) == 1 and args["self"] is not args["other"]:
        return SUM
    if (
        target in (aten.div.Tensor, aten.div.Scalar)
        and args["self"] is first
        and len(partial) == 1
        and args["other"] is not first
    ):
        return SUM
    if target is aten.neg.default:
        return SUM
    if target is aten.masked_fill.Scalar and args["self"] is first and len(partial) == 1 and args["value"] == 0:
        return SUM
    raise Refused(f"{first.name} is a sum that is not complete and this operator is not linear in it", "R", "P(sum)")


@rule(*_CAST)
def _cast(call: Call) -> Held:
    held = call.of("self")
    before = call.args["self"].meta["val"].dtype
    after = call.node.meta["val"].dtype
    if isinstance(held.placement, Partial) and torch.promote_types(before, after) != after:
        raise Refused(
            "every rank's term would be rounded, not the sum",
            "R, or a cast to a wider dtype",
            f"P, {before} to {after}",
        )
    return held


@rule(ops.glu)
def _glu(call: Call) -> Held:
    return aligned(call, call.node.all_input_nodes, len(call.shape(call.node)))


@rule(ops.silu_mul)
def _silu_mul(call: Call) -> Held:
    held, last = call.of("gate_up"), call.ndim("gate_up") - 1
    place = _not_partial(call, "gate_up")
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


def _not_partial(call: Call, name: str) -> Placement:
    place = call.of(name).placement
    if isinstance(place, Partial):
        raise Refused(f"{call.args[name].name} is a sum that is not complete", "R or S", str(place))
    return place


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
        return gathered(dim, _cut(runs, start, end), size)
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


def _cut(runs: Runs, start: int, end: int) -> Runs:
    position, out = 0, []
    for first, length in runs:
        low, high = max(position, start), min(position + length, end)
        if low < high:
            out.append((first + low - position, high - low))
        position += length
    return tuple(out)


def _length(runs: Runs) -> int:
    return sum(length for _, length in runs)


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
    return _like_value(call, held)


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


def _repeated(call: Call) -> Held | None:
    """A whole value, repeated as often as each rank has positions: every address of such a dim holds the same."""
    place, shape = call.node.meta.get("placement"), call.node.meta.get("val")
    if call.node.target is not aten.expand.default or not isinstance(place, Shard) or shape is None:
        return None
    dim = place.dim - (shape.dim() - call.ndim("self"))
    once = dim < 0 or call.shape(call.args["self"])[dim] == 1
    return Held(place) if once and call.shape(call.node)[place.dim] == place.layout.local_size else None


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
    place = _not_partial(call, "self")
    dims = call.args["dims"] if "dims" in call.args else [call.args["dim"]]
    if isinstance(place, Shard) and place.dim in {d % call.ndim("self") for d in dims}:
        raise Refused(
            f"each rank would see its own part of dim {place.dim} only", "R, or S along another dim", describe(place)
        )
    return _like_value(call, call.of("self"))


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


@rule(ops.add_rms_norm)
def _add_rms_norm(call: Call) -> tuple[Held, Held]:
    held = _norm(call, [call.args["x"], call.args["residual"]], [call.args["weight"]], 1)
    return held, held


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
    place, last = _not_partial(call, "x"), call.ndim("x") - 1
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


@rule(ops_norms.rms_norm_of, ops_norms.layer_norm_of)
def _norm_of(call: Call) -> Held:
    _check_width(call)
    sums = [call.args[n] for n in ("total", "squares") if n in call.args]
    for value in sums:
        if call.held[value] != WHOLE:
            raise Refused(f"{value.name} is not complete", "R (after all_reduce)", str(call.held[value]))
    vectors = [call.args[n] for n in ("weight", "bias") if isinstance(call.args.get(n), fx.Node)]
    return aligned(call, [call.args["x"], *vectors], call.ndim("x"))


@rule(ops.rope)
def _rope(call: Call) -> Held:
    place = _not_partial(call, "x")
    for name in ("positions", "table"):
        if call.of(name) != WHOLE:
            raise Refused(f"the {name} of a rope differ from rank to rank", "R", str(call.of(name)))
    if isinstance(place, Shard) and place.dim != 1:
        raise Refused("a rope needs whole heads and all tokens", "S(1), by heads", describe(place))
    return call.of("x")


# -- contractions -----------------------------------------------------------------------------------------------------


@rule(aten.linear.default)
def _linear(call: Call) -> Held:
    bias = call.args["bias"]
    return _product(call, "input", "weight", contracted=1, made=0, bias="bias" if bias is not None else None)


@rule(aten.addmm.default)
def _addmm(call: Call) -> Held:
    return _product(call, "mat1", "mat2", contracted=0, made=1, bias="self")


@rule(aten.mm.default)
def _mm(call: Call) -> Held:
    return _product(call, "self", "mat2", contracted=0, made=1, bias=None)


@rule(aten.matmul.default, aten.bmm.default)
def _matmul(call: Call) -> Held:
    right = "other" if "other" in call.args else "mat2"
    a, b = call.of("self"), call.of(right)
    na, nb = call.ndim("self"), call.ndim(right)
    if na < 2 or nb < 2:
        raise Refused("a product with a vector that is not whole", "matrices")
    if nb == 2:
        return _product(call, "self", right, contracted=0, made=1, bias=None)
    out = max(na, nb)
    batch = []
    for held, n in ((a, na), (b, nb)):
        if held.zeroed or not isinstance(held.placement, Shard) or held.placement.dim >= n - 2:
            raise Refused(
                "a product of batches that is divided inside a matrix", "S along a batch dim of both", f"{a} and {b}"
            )
        batch.append((held.placement.dim + out - n, held.placement.layout))
    if batch[0] != batch[1]:
        raise Refused("batches are divided differently", str(a), str(b))
    return shard(*batch[0])


def _product(call: Call, x_name: str, w_name: str, *, contracted: int, made: int, bias: str | None) -> Held:
    """``x [..., k] @ w``: ``contracted`` and ``made`` are the dims of ``w`` that go and that appear."""
    x, w = call.of(x_name), call.of(w_name)
    b = call.of(bias) if bias else None
    last = call.ndim(x_name) - 1
    xp, wp = x.placement, w.placement
    if x.zeroed or (b is not None and b.zeroed):
        raise Refused("the input or the bias has zeros in place of copies", "copies where not owned", f"{x} and {b}")
    if isinstance(wp, Partial):
        raise Refused("the weight is a sum that is not complete", "R or S", str(w))
    if isinstance(xp, Partial):
        if xp.op != "sum" or wp != R or b not in (None, SUM):
            raise Refused("a sum that is not complete meets a divided weight or a bias on every rank", "R", str(x))
        return SUM
    if isinstance(wp, Shard) and wp.dim == made:
        if xp != R:
            raise Refused("a weight divided along its output needs a whole input", "R", str(x))
        if w.zeroed:
            raise Refused("rows of the weight that claim to be copies are zeros", "copies where not owned", str(w))
        want = shard(call.ndim(bias) - 1, wp.layout) if bias else None
        if b != want:
            raise Refused("the bias does not follow the rows of its weight", str(want), str(b))
        return shard(last, wp.layout)
    if isinstance(wp, Shard) and wp.dim == contracted:
        if not isinstance(xp, Shard) or xp.dim != last or addresses(xp.layout) != addresses(wp.layout):
            raise Refused(
                "input and weight are contracted over different addresses", f"S({last}) of {wp.layout}", str(x)
            )
        if not w.zeroed and not all(run.owned for rank in wp.layout.runs for run in rank):
            raise Refused("addresses held twice are counted twice", "zeros in the weight where not owned", str(w))
        if b not in (None, SUM):
            raise Refused("the bias would be added once on every rank", "P(sum), on one rank only", str(b))
        return SUM
    if wp != R:
        raise Refused("the weight is divided along a dim that this product does not know", "dim 0 or 1", str(w))
    if isinstance(xp, Shard) and xp.dim == last:
        raise Refused(
            "the input is divided along the contracted dim, the weight is whole",
            f"S({contracted}) of {xp.layout}",
            str(w),
        )
    if b not in (None, WHOLE):
        raise Refused("the bias is not whole where the product is", "R", str(b))
    return x


@lru_cache(maxsize=1024)
def addresses(layout: Layout) -> tuple[Runs, ...]:
    """What each rank holds, whoever owns it."""
    out = []
    for rank in layout.runs:
        merged: list[tuple[int, int]] = []
        for run in rank:
            if merged and sum(merged[-1]) == run.start:
                merged[-1] = (merged[-1][0], merged[-1][1] + run.length)
            else:
                merged.append((run.start, run.length))
        out.append(tuple(merged))
    return tuple(out)


# -- tables -----------------------------------------------------------------------------------------------------------


@rule(aten.embedding.default)
def _embedding(call: Call) -> Held:
    table, index = call.of("weight"), call.of("indices")
    if isinstance(index.placement, Partial) or isinstance(table.placement, Partial):
        raise Refused("an index or table that is a sum that is not complete", "R or S", f"{table}, {index}")
    if index.placement == R and isinstance(table.placement, Shard) and table.placement.dim == 1:
        return shard(len(call.shape(call.node)) - 1, table.placement.layout)
    if table.placement == R:
        return index
    raise Refused("a rank holds only some rows of the table", "graphsrt.vocab_embedding", str(table))


@rule(ops.vocab_embedding)
def _vocab_embedding(call: Call) -> Held:
    table, start = call.of("weight"), call.of("start")
    if call.of("tokens") != WHOLE:
        raise Refused("tokens differ from rank to rank", "R", str(call.of("tokens")))
    if not isinstance(table.placement, Shard) or table.placement.dim != 0 or start.starts is None:
        raise Refused("a vocabulary slice and its first id are needed", "S(0) and shard_start", f"{table} and {start}")
    layout, end = table.placement.layout, 0
    for rank, (runs, first) in enumerate(zip(layout.runs, starts(start.starts))):
        if first >= layout.size and end == layout.size:
            continue
        real = min(layout.local_size, layout.size - first)
        held = _cut(addresses(layout)[rank], 0, real)
        owned = sum(run.length for run in runs if run.owned)
        if first != end or held != ((first, real),) or (table.zeroed and owned != real):
            raise Refused(
                f"rank {rank} takes ids from {first} on, but does not hold them",
                f"ids {end} on, in order",
                f"ids {held}, {table}",
            )
        end = first + real
    if end != layout.size:
        raise Refused("some ids are looked up on no rank", f"ids up to {layout.size}", f"up to {end}")
    return SUM


def starts(layout: Layout) -> list[int]:
    """What :class:`~graphsrt.recipes.ShardStart` evaluates to on every rank."""
    return [rank[0].start if rank[0].owned else layout.size for rank in layout.runs]


# -- attention --------------------------------------------------------------------------------------------------------


@rule(ops.attention, ops.radix_attention)
def _attention(call: Call) -> Held:
    for node in call.node.all_input_nodes:
        if isinstance(call.held[node].placement, Partial):
            raise Refused(f"{node.name} is a sum that is not complete", "R or S", str(call.held[node]))
    known = {call.args.get(n) for n in ("q", "k", "v", "sinks", "alibi_slopes", "kv_pool")}
    for node in call.node.all_input_nodes:
        if node not in known and call.held[node] != WHOLE:
            raise Refused(f"{node.name} differs from rank to rank", "R", str(call.held[node]))
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
    layouts = [_heads(call, name, dim) for name, dim in (("k", 1), ("v", 1), ("kv_pool", 3))]
    if len({addresses(layout) for layout in layouts}) != 1:
        raise Refused("keys, values and pool hold different heads", str(layouts[2]), f"{layouts[0]} and {layouts[1]}")
    return WHOLE


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
    dim = call.dim("x")
    size = call.shape(call.args["x"])[dim]
    if not isinstance(size, int) or size % call.ranks:
        raise Refused(f"dim {dim} does not divide", f"a multiple of {call.ranks}", str(size))
    return shard(dim, Layout.blocks(size, call.ranks))


@rule(ops.all_gather)
def _all_gather(call: Call) -> Held:
    held, dim = _axis(call), call.dim("x")
    place = held.placement
    if not isinstance(place, Shard) or place.dim != dim:
        raise Refused("only a value divided along the gathered dim may be gathered", f"S({dim})", str(held))
    return gathered(dim, tuple(run for rank in addresses(place.layout) for run in rank), place.layout.size)


@rule(aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default)
def _creator(call: Call) -> Held:
    return WHOLE  # reads only dtype and device of its argument


_MAY_BE_ZEROED = {
    aten.linear.default, aten.addmm.default, aten.mm.default, aten.matmul.default, aten.transpose.int, aten.t.default,
    aten.permute.default, aten.to.dtype, aten._to_copy.default, ops.vocab_embedding, ops_norms.row_sum,
    ops_norms.sum_of_squares, ops.moe_experts,
}  # fmt: skip
"""Operators whose rules look at zeros in place of copies themselves."""
_MAY_BE_STARTS = {ops.vocab_embedding, ops.moe_experts}
"""Operators whose rules look at each rank's first address themselves."""
_MAY_BE_GATHERED = {
    aten.slice.Tensor, aten.narrow.default, aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes,
    aten.chunk.default, aten.cat.default, aten.to.dtype, aten._to_copy.default,
}  # fmt: skip
"""Operators whose rules look at positions in gathered order themselves."""


def call_of(program: Program, node: fx.Node, held: dict[fx.Node, Any], ranks: int, axis: str) -> Call:
    return Call(program, node, arguments(node), held, ranks, axis)
