"""check_placements: are the recorded placements of a program true?

Every placement is derived again, forwards from the inputs and from what the weights' recipes read, by the rules of
:mod:`graphsrt.check_rules`, and must equal the recorded one. Because a placement says what the ranks hold, a dropped or
doubled collective, a bias on every rank or a projection cut at the wrong place is an error here, before any number is
computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch.fx as fx

from graphsrt import (  # noqa: F401  (their rules register themselves)
    check_rules_attention,
    check_rules_collectives,
    check_rules_experts,
    check_rules_fp8,
    check_rules_fused,
    check_rules_integer,
    check_rules_latent,
    check_rules_norms,
    check_rules_products,
    check_rules_tokens,
    check_rules_views,
    ops,
)
from graphsrt.check_rules import WHOLE, Held, Refused, call_of, derive, describe
from graphsrt.errors import CompileError, explain
from graphsrt.placement import Layout, Partial, Run, Shard, ShardTokens
from graphsrt.program import LOGITS, Program, Weight, target_name, where
from graphsrt.recipes import (
    BlockNumbers,
    Cat,
    Ckpt,
    Const,
    DequantFp8,
    Fill,
    Mul,
    OnOwner,
    Quantized,
    Recipe,
    Repeat,
    RopeTable,
    ShardOf,
    ShardStart,
    Take,
    Transpose,
)


def check_placements(program: Program, axis: str = "tp", *, record: bool = False) -> None:
    """Raise CompileError at the first value whose recorded placement is not what its operator gives.

    A program without any placement must be free of collectives and of recipes that differ from rank to rank.
    ``record``: what is derived is recorded instead of compared; what no rule allows is refused all the same.
    """
    recorded = any("placement" in node.meta for node in program.graph.nodes)
    if not recorded and not any(weight.placement is not None for weight in program.weights.values()):
        _check_whole(program)
        return
    ranks = program.mesh.get(axis, 1)
    sizes: dict[tuple[str, int], tuple[int, str]] = {}
    held: dict[fx.Node, Any] = {}
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        try:
            if node.op == "get_attr":
                held[node] = _weight(program, str(node.target), ranks, sizes, record)
            elif node.op == "placeholder":
                held[node] = _input(program, node)
            else:
                held[node] = derive(call_of(program, node, held, ranks, axis))
            if record:
                _record(node, held[node])
            _compare(program, node, held[node], ranks)
        except Refused as refusal:
            kinds = {"get_attr": "weight", "placeholder": "input"}
            label = kinds[node.op] if node.op in kinds else target_name(node.target)
            place = f"{node.name} {where(node)}".strip()
            raise CompileError(
                explain(f"{label}: {refusal.what}", where=place, expected=refusal.expected, got=refusal.got)
            ) from None
    for name, node in program.outputs.items():
        last = node.meta["val"].dim() - 1
        place = held[node].placement
        divided = name == LOGITS and isinstance(place, Shard) and place.dim == last and held[node].plain
        if held[node] != WHOLE and not divided:
            raise CompileError(
                explain(
                    f"the program's result {name} is not whole on every rank",
                    where=f"{node.name} {where(node)}".strip(),
                    expected=f"R or S({last})" if name == LOGITS else "R",
                    got=str(held[node]),
                )
            )


def _record(node: fx.Node, held: Any) -> None:
    node.meta["placement"] = tuple(h.placement for h in held) if isinstance(held, tuple) else held.placement


def _check_whole(program: Program) -> None:
    for node in program.nodes:
        if node.target in ops.COLLECTIVES:
            raise CompileError(
                explain(
                    f"{target_name(node.target)} in a program without placements",
                    where=f"{node.name} {where(node)}".strip(),
                    expected="no collective",
                )
            )
    for name, weight in program.weights.items():
        if _differs(weight.recipe):
            raise CompileError(
                explain(
                    "a weight differs from rank to rank in a program without placements",
                    where=name,
                    got=str(weight.recipe),
                )
            )


def _differs(recipe: Recipe) -> bool:
    match recipe:
        case ShardOf() | OnOwner() | ShardStart():
            return True
        case Transpose(x) | Take(x):
            return _differs(x)
        case Mul(x, by):
            return _differs(x) or _differs(by)
        case DequantFp8(x, scale):
            return _differs(x) or _differs(scale)
        case Repeat(x) | Quantized(x):
            return _differs(x)
        case Cat(parts):
            return any(_differs(part) for part in parts)
    return False


# -- the recorded side ------------------------------------------------------------------------------------------------


def _input(program: Program, node: fx.Node) -> Held:
    """Inputs are the same on all ranks; a KV pool holds each rank's heads."""
    place = node.meta.get("placement")
    if program.inputs[node.name].role == "kv_pool" and isinstance(place, Shard):
        if place.dim != 3:
            raise Refused("a KV pool is divided by heads", "S(3)", describe(place))
        return Held(place)
    return WHOLE


def _compare(program: Program, node: fx.Node, held: Any, ranks: int) -> None:
    val = node.meta.get("val")
    if val is None:
        return  # an operator that only writes
    vals = val if isinstance(val, (tuple, list)) else [val]
    derived = held if isinstance(held, tuple) else (held,)
    recorded = node.meta.get("placement")
    places = recorded if isinstance(val, (tuple, list)) and isinstance(recorded, (tuple, list)) else (recorded,)
    if len(places) != len(derived) or any(place != item.placement for place, item in zip(places, derived)):
        raise Refused(
            "the recorded placement is not what this gives",
            describe(tuple(item.placement for item in derived) if len(derived) > 1 else derived[0].placement),
            "none recorded" if recorded is None else describe(recorded),
        )
    for tensor, place in zip(vals, places):
        if isinstance(place, ShardTokens):
            rows = program.shape_of(tensor)[:1]
            if place.ranks != ranks or rows != (place.local_size,):
                raise Refused("the rows are not one rank's tokens", f"[T/{ranks}, …]", str(list(rows)))
        if not isinstance(place, Shard):
            continue
        _check_layout(place.layout, ranks)
        size = program.shapes.name(tensor.shape[place.dim]) if 0 <= place.dim < tensor.dim() else None
        if size != place.layout.local_size:
            raise Refused(
                f"dim {place.dim} has another size than its layout says", str(place.layout.local_size), str(size)
            )


def _check_layout(layout: Layout, ranks: int) -> None:
    if layout.ranks != ranks:
        raise Refused("a layout is made for another number of ranks", str(ranks), str(layout))
    try:
        again = Layout.of(layout.runs)
    except ValueError as error:
        raise Refused(f"a layout is not one: {error}", got=str(layout.runs)) from None
    if again != layout:
        raise Refused("a layout is not in canonical form", str(again), str(layout.runs))
    if any(run.start < 0 or run.start + run.length > layout.size for rank in layout.runs for run in rank):
        raise Refused("a layout has addresses outside of its value", f"0 to {layout.size}", str(layout))


# -- weights: what the recipe reads -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """One dimension of a recipe's value on one rank: runs of addresses of the whole, some of them zeros."""

    runs: tuple[tuple[int, int, str], ...]
    """(first address, length, "own" | "copy" | "zero")"""

    @property
    def length(self) -> int:
        return sum(run[1] for run in self.runs)


@dataclass(frozen=True)
class Read:
    """What a recipe reads: for each divided dimension the pieces of all ranks and the whole's size; rest whole."""

    divided: tuple[tuple[int, tuple[Piece, ...], int], ...] = ()
    once: bool = False
    """Rank 0 has the value, the others zeros."""
    starts: Layout | None = None


def _weight(
    program: Program, name: str, ranks: int, sizes: dict[tuple[str, int], tuple[int, str]], record: bool
) -> Held:
    weight = program.weights[name]
    read = _read(weight.recipe, weight.shape, ranks)
    _same_sizes(weight.recipe, weight, sizes, name)
    held = _held(read, ranks)
    if record:
        weight.placement = held.placement
    if weight.placement != held.placement:
        raise Refused(
            "the recorded placement is not what the recipe reads", describe(held.placement), describe(weight.placement)
        )
    return held


def _held(read: Read, ranks: int) -> Held:
    if read.starts is not None:
        return Held(Shard(0, Layout.blocks(ranks, ranks)), starts=read.starts)
    if read.once:
        if read.divided:
            raise Refused("a weight is both divided and kept by one rank only")
        return Held(Partial("sum"))
    if not read.divided:
        return WHOLE
    if len(read.divided) > 1:
        raise Refused("a weight is divided along two dims", "one", str([dim for dim, _, _ in read.divided]))
    ((dim, pieces, size),) = read.divided
    states = {run[2] for piece in pieces for run in piece.runs}
    if {"copy", "zero"} <= states:
        raise Refused(
            "some addresses that a rank does not own are copies, others zeros", 'one word for all, "copy" or "zero"'
        )
    try:
        layout = Layout.of(
            [[Run(start, length, state == "own") for start, length, state in piece.runs] for piece in pieces]
        )
    except ValueError as error:
        raise Refused(f"the recipe does not cover its tensor: {error}") from None
    if layout.size != size:
        raise Refused("the recipe leaves out addresses", str(size), str(layout))
    return Held(Shard(dim, layout), zeroed="zero" in states)


def _read(recipe: Recipe, shape: tuple[int, ...], ranks: int) -> Read:
    """``shape`` is the local shape of this recipe's value, -1 where not known."""
    match recipe:
        case Ckpt() | Const() | Fill() | RopeTable():
            return Read()
        case ShardStart(layout):
            _check_layout(layout, ranks)
            return Read(starts=layout)
        case OnOwner(x):
            inner = _read(x, shape, ranks)
            if inner.divided or inner.once or inner.starts:
                raise Refused("one rank is to keep what is divided already", "on_owner of a whole tensor")
            return Read(once=True)
        case Transpose(x, a, b):
            swap = {a: b, b: a}
            order = list(shape)
            order[a], order[b] = order[b], order[a]
            inner = _read(x, tuple(order), ranks)
            return Read(tuple((swap.get(d, d), p, s) for d, p, s in inner.divided), inner.once, inner.starts)
        case ShardOf(x, dim, layout, unowned):
            _check_layout(layout, ranks)
            if unowned not in ("copy", "zero"):
                raise Refused(f"unowned={unowned!r}", '"copy" or "zero"')
            if len(shape) <= dim or shape[dim] not in (-1, layout.local_size):
                raise Refused(f"dim {dim} is cut to another length", str(list(shape)), str(layout))
            inner = _read(x, tuple(-1 if d == dim else n for d, n in enumerate(shape)), ranks)
            if inner != Read():
                raise Refused("a shard of something that differs from rank to rank", "shards innermost")
            return Read(((dim, tuple(_piece(rank, unowned) for rank in layout.runs), layout.size),))
        case Mul(x, by, dim):
            return _read_mul(_read(x, shape, ranks), _read(by, (shape[dim],) if shape else (), ranks), dim)
        case DequantFp8(x, scale, whole):
            if any(size not in (-1, own) for size, own in zip(shape, whole, strict=True)):
                raise Refused(
                    "a stored matrix is not as large as it is taken to be", str(list(whole)), str(list(shape))
                )
            return _read_whole([(x, whole), (scale, (-1, -1))], ranks)
        case Quantized(x, part):
            return _read_quantized(_read(x, (*shape[:1], -1), ranks), part, shape)
        case Repeat(x, dim, _, size):
            if shape[dim] not in (-1, size):
                raise Refused(f"dim {dim} is repeated to another length", str(shape[dim]), str(size))
            return _read_whole([(x, tuple(-1 if d == dim else n for d, n in enumerate(shape)))], ranks)
        case BlockNumbers(size):
            if shape not in ((-1,), (size,)):
                raise Refused("blocks are numbered for another length", str(list(shape)), str([size]))
            return Read()
        case Take(x, dim, addresses):
            return _read_take(
                _read(x, tuple(-1 if d == dim else n for d, n in enumerate(shape)), ranks), dim, addresses
            )
        case Cat(parts, dim):
            return _read_cat(parts, dim, shape, ranks)
    raise Refused(f"unknown recipe {type(recipe).__name__}")


def _read_whole(parts: list[tuple[Recipe, tuple[int, ...]]], ranks: int) -> Read:
    """Parts that belong together by address, and so are cut together, from outside."""
    if any(_read(part, shape, ranks) != Read() for part, shape in parts):
        raise Refused("a part of a stored matrix that differs from rank to rank", "shards around the whole")
    return Read()


def _read_quantized(x: Read, part: str, shape: tuple[int, ...]) -> Read:
    """Groups of 32 columns may be divided before they are packed, which each rank does with its own."""
    if x == Read():
        return x
    if part not in ("int4", "int4_pairs") or x.once or x.starts or [d for d, _, _ in x.divided] != [1]:
        raise Refused(f"what {part} is made of differs from rank to rank", "shards around it, or groups of 4 bits")
    ((_, pieces, size),) = x.divided
    numbers = [number for piece in pieces for start, length, _ in piece.runs for number in (start, length)]
    if any(number % 32 for number in (*numbers, size)):
        raise Refused("a rank has parts of groups of columns", "runs of whole groups of 32", str(pieces))
    groups = tuple(Piece(tuple((start // 32, n // 32, state) for start, n, state in p.runs)) for p in pieces)
    if part == "int4":  # two groups share 32 bytes, the last one has them alone
        wide = -(-groups[0].length // 2) * 32
        size = wide * len(groups)
        groups = tuple(Piece(((rank * wide, wide, "own"),)) for rank in range(len(groups)))
    else:
        size //= 32
    if len(shape) < 2 or shape[1] not in (-1, groups[0].length):
        raise Refused(f"{part} of a rank's columns has another length", str(groups[0].length), str(list(shape)))
    return Read(((1, groups, size),))


def _read_take(x: Read, dim: int, addresses: tuple[str, ...]) -> Read:
    """The same rows of a whole tensor on all ranks, each once."""
    if x != Read() or any(text.startswith("~") for text in addresses):
        raise Refused("rows are taken that differ from rank to rank", "rows of a whole tensor, all of them owned")
    spans = sorted(tuple(int(n) for n in text.split(":")) for text in addresses)
    if any(low >= high for low, high in spans) or any(a[1] > b[0] for a, b in pairwise(spans)):
        raise Refused("rows of a weight are taken twice, or none", "each row once", ", ".join(addresses))
    return Read()


def _read_mul(x: Read, by: Read, dim: int) -> Read:
    """Both sides must be cut alike along ``dim``; zeros stay zeros, whatever they are multiplied by."""
    if x.starts or by.starts or by.once:
        raise Refused("a weight is multiplied by something that one rank only holds", "a vector that all ranks hold")
    mine = [(pieces, size) for d, pieces, size in x.divided if d == dim]
    other = [(pieces, size) for _, pieces, size in by.divided]
    if [(_addresses(p), n) for p, n in mine] != [(_addresses(p), n) for p, n in other]:
        raise Refused(f"a weight and the vector along its dim {dim} are divided differently", "the same addresses")
    return x


def _addresses(pieces: tuple[Piece, ...]) -> list[list[tuple[int, int]]]:
    return [[(start, length) for start, length, _ in piece.runs] for piece in pieces]


def _piece(runs: tuple[Run, ...], unowned: str) -> Piece:
    return Piece(tuple((run.start, run.length, "own" if run.owned else unowned) for run in runs))


def _read_cat(parts: tuple[Recipe, ...], dim: int, shape: tuple[int, ...], ranks: int) -> Read:
    loose = tuple(-1 if d == dim else n for d, n in enumerate(shape))
    reads = [_read(part, loose, ranks) for part in parts]
    if all(read == reads[0] and all(d != dim for d, _, _ in read.divided) for read in reads):
        return reads[0]
    if any(read.once or read.starts or [d for d, _, _ in read.divided] not in ([dim], []) for read in reads):
        raise Refused(
            "parts of a weight are divided differently", f"all along dim {dim}", "other dims, or one rank only"
        )
    known = sum(read.divided[0][1][0].length for read in reads if read.divided)
    whole = [read for read in reads if not read.divided]
    if len(whole) > 1 or (whole and shape[dim] < 0):
        raise Refused("parts of a weight that are whole beside parts that are divided", "shards of all parts")
    pieces: list[list[tuple[int, int, str]]] = [[] for _ in range(ranks)]
    offset = 0
    for read in reads:
        if read.divided:
            _, mine, size = read.divided[0]
        else:  # every rank holds this part; the first owns it
            size = shape[dim] - known
            mine = tuple(Piece(((0, size, "own" if rank == 0 else "copy"),)) for rank in range(ranks))
        for rank, piece in enumerate(mine):
            pieces[rank] += [(start + offset, length, state) for start, length, state in piece.runs]
        offset += size
    if shape[dim] not in (-1, sum(run[1] for run in pieces[0])):
        raise Refused(f"parts do not add up along dim {dim}", str(shape[dim]), str(sum(run[1] for run in pieces[0])))
    return Read(((dim, tuple(Piece(tuple(runs)) for runs in pieces), offset),))


def _same_sizes(recipe: Recipe, weight: Weight, sizes: dict[tuple[str, int], tuple[int, str]], name: str) -> None:
    """A checkpoint tensor has one size, however many weights read it."""
    dims: list[int | None] = list(weight.shape)
    for leaf, shape in _leaf_shapes(recipe, dims):
        for dim, size in enumerate(shape):
            if size is None:
                continue
            before, first = sizes.setdefault((leaf, dim), (size, name))
            if before != size:
                raise Refused(
                    f"{leaf} has another size along dim {dim} than {first} takes it to have", str(before), str(size)
                )


def _leaf_shapes(recipe: Recipe, shape: list[int | None]) -> list[tuple[str, list[int | None]]]:
    match recipe:
        case Ckpt(name):
            return [(name, shape)]
        case OnOwner(x):
            return _leaf_shapes(x, shape)
        case Mul(x, by, dim):
            return _leaf_shapes(x, shape) + _leaf_shapes(by, [shape[dim]])
        case DequantFp8(x, scale, whole, block, input_scale=input_scale):
            scales: list[int | None] = [-(-n // size) for n, size in zip(whole, block)]
            inputs = [] if input_scale is None else _leaf_shapes(input_scale, [1, 1])
            return _leaf_shapes(x, list(whole)) + _leaf_shapes(scale, scales) + inputs
        case Quantized(x, part):
            columns = {"int8": lambda: shape[1], "int4_pairs": lambda: shape[1] and 32 * shape[1]}
            return _leaf_shapes(x, [shape[0], columns[part]() if part in columns else None])
        case Repeat(x, dim, times, size):
            return _leaf_shapes(x, [-(-size // times) if d == dim else n for d, n in enumerate(shape)])
        case ShardOf(x, dim, layout):
            return _leaf_shapes(x, [layout.size if d == dim else n for d, n in enumerate(shape)])
        case Take(x, dim):
            return _leaf_shapes(x, [None if d == dim else n for d, n in enumerate(shape)])
        case Transpose(x, a, b):
            order = list(shape)
            order[a], order[b] = order[b], order[a]
            return _leaf_shapes(x, order)
        case Cat(parts, dim):
            loose = [None if d == dim else n for d, n in enumerate(shape)]
            return [leaf for part in parts for leaf in _leaf_shapes(part, loose)]
    return []
