"""Weight recipes: how a rank's weight is made from checkpoint tensors.

A recipe is a small expression over checkpoint names. Passes edit recipes, never data; the same recipe text serves
every rank, and evaluating it for one rank reads only the bytes that this rank keeps. The canonical form puts shards
innermost, ``cat([shard(a), shard(b)])``, so that a fused weight never needs the whole of its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from graphsrt import huge_pages
from graphsrt.integer_weights import to_int4, to_int8
from graphsrt.placement import Layout, Run

FP8 = torch.float8_e4m3fn


class TensorSource(Protocol):
    """What recipes read from: a checkpoint, or a model in memory."""

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> torch.Tensor:
        """The tensor, or the given part of it."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Its whole shape."""


@dataclass(frozen=True)
class Recipe:
    """Base of the expressions below. They are immutable, compare by value and print as they parse."""


@dataclass(frozen=True)
class Ckpt(Recipe):
    """A whole checkpoint tensor."""

    name: str


@dataclass(frozen=True)
class ShardOf(Recipe):
    """This rank's part of dimension ``dim`` of ``x``. With ``unowned="zero"``, elements that another rank owns, or
    that are padding, become zero: for weights whose dimension is contracted, so each address is counted once."""

    x: Recipe
    dim: int
    layout: Layout
    unowned: str = "copy"


@dataclass(frozen=True)
class Take(Recipe):
    """``addresses`` of dimension ``dim`` in order, ``"0:192"`` or ``"~192:256"`` for those that a rank does not own,
    which become zero with ``unowned="zero"``. Rows of a fused weight, or what :func:`localize` makes of a shard."""

    x: Recipe
    dim: int
    addresses: tuple[str, ...]
    unowned: str = "copy"


@dataclass(frozen=True)
class Cat(Recipe):
    """Tensors side by side along ``dim``."""

    parts: tuple[Recipe, ...]
    dim: int


@dataclass(frozen=True)
class Transpose(Recipe):
    """``x`` with two dimensions swapped."""

    x: Recipe
    dim0: int
    dim1: int


@dataclass(frozen=True)
class Mul(Recipe):
    """``x`` with every slice along dimension ``dim`` multiplied by one entry of the vector ``by``: what a norm's weight
    is to the linear that reads the norm. Computed in float32 or wider and rounded once, to the weight's dtype."""

    x: Recipe
    by: Recipe
    dim: int


@dataclass(frozen=True)
class DequantFp8(Recipe):
    """What a matrix stored as ``float8_e4m3fn`` means: each number of ``x [O, E]`` times its scale.

    ``shape`` is that of ``x``, whole; ``scale`` holds one float32 number for each ``block`` of it, the last of a row or
    column perhaps short: ``[O, E]`` for one scale in all, ``[1, E]`` for one of each row. Computed in float32 or wider
    and rounded once. ``inputs`` says how a linear with this weight rounds what it multiplies: "plain" (not at all),
    "token" or "block" (with scales of the values themselves, for each row or each block of columns, in which the
    largest number counts for no more than ``largest``), or "static" (with ``input_scale``, of shape ``[1, 1]``).
    """

    x: Recipe
    scale: Recipe
    shape: tuple[int, int]
    block: tuple[int, int]
    inputs: str = "plain"
    input_scale: Recipe | None = None
    largest: float | None = None


@dataclass(frozen=True)
class Quantized(Recipe):
    """What of a matrix ``x [N, K]`` is kept when it is rounded to integers as it is loaded: ``part`` of it, a name of
    :data:`PARTS`. Made of ``x`` as it is stored, or float32 where a recipe has changed it.

    Rows are rounded each by itself, so whoever takes rows takes rows of ``x``. The scale of 8 bits is that of a whole
    row, so columns of "int8" are cut from whole rows, around it; groups of 4 bits hold 32 columns and are packed 64 at
    a time, so columns of "int4" are cut before, inside of it.
    """

    x: Recipe
    part: str


PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "int8": lambda x: to_int8(x)[0],
    "int8_scales": lambda x: to_int8(x)[1],
    "int4": lambda x: to_int4(x)[0],
    "int4_pairs": lambda x: to_int4(x)[1],
}
"""Of ``[N, K]``: int8 ``[N, K]``, float32 ``[N]``; uint8 ``[N, ceil(K / 64) · 32]``, bfloat16 ``[N, K / 32, 2]``."""


@dataclass(frozen=True)
class Repeat(Recipe):
    """Every slice of ``x`` along ``dim`` ``times`` times over, cut to ``size``: scales of blocks, one for each row."""

    x: Recipe
    dim: int
    times: int
    size: int


@dataclass(frozen=True)
class BlockNumbers(Recipe):
    """int64 ``[size]``: the number of the block of ``block`` addresses that each address is in."""

    size: int
    block: int


@dataclass(frozen=True)
class OnOwner(Recipe):
    """``x`` on rank 0, zeros elsewhere: a bias that is added before a sum over ranks."""

    x: Recipe


@dataclass(frozen=True)
class ShardStart(Recipe):
    """int64 ``[1]``: the first address that this rank owns of a layout in consecutive blocks; its size if none."""

    layout: Layout


@dataclass(frozen=True)
class Const(Recipe):
    """Literal values, row-major: small buffers that a model computes when it is built."""

    shape: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Fill(Recipe):
    """One number everywhere."""

    shape: tuple[int, ...]
    value: float


@dataclass(frozen=True)
class RopeTable(Recipe):
    """Rotary table ``[max_positions, 2·n]``: ``scaling·cos(p·inv_freq)`` then ``scaling·sin(p·inv_freq)``.

    Angles, cosine and sine are computed in float32 as transformers does, then cast to the weight's dtype.
    """

    inv_freq: tuple[float, ...]
    scaling: float
    max_positions: int


def leaves(recipe: Recipe) -> Iterator[str]:
    """Checkpoint names that the recipe reads."""
    match recipe:
        case Ckpt(name):
            yield name
        case ShardOf(x) | Take(x) | Transpose(x) | OnOwner(x) | Repeat(x) | Quantized(x):
            yield from leaves(x)
        case DequantFp8(x, scale, input_scale=input_scale):
            for part in (x, scale, *([] if input_scale is None else [input_scale])):
                yield from leaves(part)
        case Mul(x, by):
            yield from leaves(x)
            yield from leaves(by)
        case Cat(parts):
            for part in parts:
                yield from leaves(part)


def rename(recipe: Recipe, names: Callable[[str], str]) -> Recipe:
    """The same recipe over other checkpoint names."""
    match recipe:
        case Ckpt(name):
            return Ckpt(names(name))
        case ShardOf(x, dim, layout, unowned):
            return ShardOf(rename(x, names), dim, layout, unowned)
        case Take(x, dim, addresses, unowned):
            return Take(rename(x, names), dim, addresses, unowned)
        case Transpose(x, dim0, dim1):
            return Transpose(rename(x, names), dim0, dim1)
        case OnOwner(x):
            return OnOwner(rename(x, names))
        case Mul(x, by, dim):
            return Mul(rename(x, names), rename(by, names), dim)
        case Repeat(x) | Quantized(x):
            return replace(recipe, x=rename(x, names))
        case DequantFp8(x, scale, input_scale=given):
            inputs = None if given is None else rename(given, names)
            return replace(recipe, x=rename(x, names), scale=rename(scale, names), input_scale=inputs)
        case Cat(parts, dim):
            return Cat(tuple(rename(p, names) for p in parts), dim)
    return recipe


def localize(recipe: Recipe, rank: int, size: int) -> Recipe:
    """What the recipe means on one rank, without layouts. ``size`` is the length of the weight's first dimension."""
    match recipe:
        case ShardOf(x, dim, layout, unowned):
            spans = tuple(f"{'' if r.owned else '~'}{r.start}:{r.start + r.length}" for r in layout.runs[rank])
            return Take(localize(x, rank, size), dim, spans, unowned)
        case Cat(parts, dim):
            return Cat(tuple(localize(part, rank, size) for part in parts), dim)
        case Transpose(x, dim0, dim1):
            return Transpose(localize(x, rank, size), dim0, dim1)
        case Mul(x, by, dim):
            return Mul(localize(x, rank, size), localize(by, rank, size), dim)
        case DequantFp8(x, scale):
            return replace(recipe, x=localize(x, rank, size), scale=localize(scale, rank, size))
        case Repeat(x) | Quantized(x):
            return replace(recipe, x=localize(x, rank, size))
        case OnOwner(x):
            return x if rank == 0 else Take(x, 0, (f"~0:{size}",), "zero")
        case ShardStart(layout):
            return Const((1,), (float(_first_owned(layout, rank)),))
    return recipe


def _first_owned(layout: Layout, rank: int) -> int:
    first = layout.runs[rank][0]
    return first.start if first.owned else layout.size


def evaluate(recipe: Recipe, rank: int, source: TensorSource, dtype: torch.dtype) -> torch.Tensor:
    """The weight of ``rank``: a new contiguous tensor of ``dtype``. Reads only the slices that it needs."""
    return _evaluate(recipe, rank, source, dtype).to(dtype).contiguous()


def _evaluate(recipe: Recipe, rank: int, source: TensorSource, dtype: torch.dtype) -> torch.Tensor:
    match recipe:
        case Ckpt(name):
            return source.read(name)
        case ShardOf(x, dim, layout, unowned):
            return _take(x, dim, layout.runs[rank], unowned, rank, source, dtype)
        case Take(x, dim, addresses, unowned):
            return _take(x, dim, [span(text) for text in addresses], unowned, rank, source, dtype)
        case Cat(parts, dim):
            return _cat([_evaluate(p, rank, source, dtype).to(dtype) for p in parts], dim)
        case Transpose(x, dim0, dim1):
            return _evaluate(x, rank, source, dtype).transpose(dim0, dim1)
        case OnOwner(x):
            value = _evaluate(x, rank, source, dtype)
            return value if rank == 0 else torch.zeros_like(value)
        case ShardStart(layout):
            return torch.tensor([_first_owned(layout, rank)])
        case Const(shape, values):
            return torch.tensor(values, dtype=torch.float64).reshape(shape)
        case Fill(shape, number):
            return torch.full(shape, number, dtype=dtype)
        case Mul(x, by, dim):
            return _times(_evaluate(x, rank, source, dtype), _evaluate(by, rank, source, dtype), dim, dtype)
        case DequantFp8(x):
            return _dequantized(recipe, _evaluate(x, rank, source, FP8), {}, rank, source, dtype)
        case Quantized(x, part):
            return _quantized(_evaluate(x, rank, source, torch.float32), part)
        case Repeat(x, dim, times, length):
            return _evaluate(x, rank, source, dtype).repeat_interleave(times, dim).narrow(dim, 0, length)
        case BlockNumbers(length, block):
            return torch.arange(length) // block
        case RopeTable():
            return rope_table(recipe)
    raise TypeError(f"unknown recipe {recipe!r}")


def _cat(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """``torch.cat`` of equal dtypes, in huge pages. Its own rule for tensors without data is in Python and imports
    Dynamo, which takes a second."""
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    if parts[0].device.type != "cpu":
        return parts[0].new_empty(shape) if parts[0].is_meta else torch.cat(list(parts), dim)
    out = huge_pages.empty(shape, parts[0].dtype)
    return torch.cat(list(parts), dim, out=out)


def rope_table(recipe: RopeTable) -> torch.Tensor:
    """Float32 table of a :class:`RopeTable`."""
    inv_freq = torch.tensor(recipe.inv_freq, dtype=torch.float32)
    angles = torch.arange(recipe.max_positions, dtype=torch.float32)[:, None] * inv_freq
    return torch.cat([angles.cos() * recipe.scaling, angles.sin() * recipe.scaling], dim=-1)


def _times(x: torch.Tensor, by: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    return x.to(wide) * by.to(wide).reshape([-1 if d == dim else 1 for d in range(x.dim())])


def _dequantized(
    recipe: DequantFp8, x: torch.Tensor, cut: dict[int, torch.Tensor], rank: int, source: TensorSource,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """``x``, all of the stored matrix or what is left of it, times its scales; ``cut``: dim -> the addresses kept."""
    scale = _evaluate(recipe.scale, rank, source, torch.float32)
    for dim, (size, block) in enumerate(zip(recipe.shape, recipe.block)):
        if scale.shape[dim] > 1:
            addresses = cut[dim] if dim in cut else torch.arange(size)
            scale = scale.index_select(dim, addresses // block)
    wide = torch.promote_types(dtype, torch.float32)
    return x.to(FP8).to(wide) * scale.to(torch.float32).to(wide)


def _quantized(x: torch.Tensor, part: str) -> torch.Tensor:
    """A few rows at a time: in float32, all of them would be twice what was read, several times over."""
    rows = max(1, (1 << 20) // max(1, x.shape[1]))
    return _cat([PARTS[part](some) for some in x.split(rows)], 0)


def is_quantized(recipe: Recipe) -> bool:
    """Whether a weight is a part of matrices that are rounded to integers."""
    match recipe:
        case Quantized():
            return True
        case ShardOf(x) | Take(x):
            return is_quantized(x)
        case Cat(parts):
            return any(map(is_quantized, parts))
    return False


def span(text: str) -> Run:
    """``"0:192"`` or ``"~192:256"`` as a run."""
    start, end = (int(number) for number in text.lstrip("~").split(":"))
    return Run(start, end - start, not text.startswith("~"))


def within(addresses: Sequence[str], runs: Sequence[Run]) -> list[Run]:
    """``runs`` of what ``addresses`` take, as runs of what these are taken from."""
    inner, found = [span(text) for text in addresses], []
    for run in runs:
        position = 0
        for part in inner:
            low, high = max(run.start, position), min(run.start + run.length, position + part.length)
            if low < high:
                found.append(Run(part.start + low - position, high - low, run.owned))
            position += part.length
    return found


def _take(
    x: Recipe, dim: int, runs: Sequence[Run], unowned: str, rank: int, source: TensorSource, dtype: torch.dtype
) -> torch.Tensor:
    if isinstance(x, Transpose):  # push the slices inwards: the checkpoint's own dimension is the one to cut
        swapped = {x.dim0: x.dim1, x.dim1: x.dim0}.get(dim, dim)
        return _take(x.x, swapped, runs, unowned, rank, source, dtype).transpose(x.dim0, x.dim1)
    if isinstance(x, Take) and x.dim == dim and x.unowned == "copy":
        return _take(x.x, dim, within(x.addresses, runs), unowned, rank, source, dtype)
    if isinstance(x, Mul):
        cut = dim == x.dim  # a vector along the dimension that is cut is cut as well
        scale = _take(x.by, 0, runs, unowned, rank, source, dtype) if cut else _evaluate(x.by, rank, source, dtype)
        return _times(_take(x.x, dim, runs, unowned, rank, source, dtype), scale, x.dim, dtype)
    if isinstance(x, Quantized) and dim == 0:
        return _quantized(_take(x.x, 0, runs, unowned, rank, source, torch.float32), x.part)
    if isinstance(x, DequantFp8):
        kept = torch.cat([torch.arange(run.start, run.start + run.length) for run in runs])
        return _dequantized(x, _take(x.x, dim, runs, unowned, rank, source, FP8), {dim: kept}, rank, source, dtype)
    whole = None if isinstance(x, Ckpt) else _evaluate(x, rank, source, dtype)
    pieces = []
    for run in runs:
        index = slice(run.start, run.start + run.length)
        if whole is not None:
            piece = whole.narrow(dim, run.start, run.length)
        else:
            assert isinstance(x, Ckpt)
            ndim = len(source.shape(x.name))
            piece = source.read(x.name, tuple(index if d == dim else slice(None) for d in range(ndim)))
        pieces.append(torch.zeros_like(piece) if unowned == "zero" and not run.owned else piece)
    return pieces[0] if len(pieces) == 1 else _cat(pieces, dim)
