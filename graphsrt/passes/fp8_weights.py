"""Matrices stored in FP8 as recipes: which format they are in, and how numbers and scales part.

A captured weight that a checkpoint stores in FP8 is ``dequant_fp8(x, scale)``, and passes divide, cut and merge it like
any other. Whatever they made of it, here the two come apart again: the same rows and columns of ``x`` alone, and the
scales that belong to them.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphsrt.placement import Placement, R, Shard
from graphsrt.program import Weight
from graphsrt.recipes import FP8, BlockNumbers, Cat, DequantFp8, Recipe, Repeat, ShardOf, Take, leaves, span

import torch  # isort: skip


@dataclass(frozen=True)
class Format:
    """What linears over one input must have in common to be one: how their input is rounded, and the columns of a
    block of weights (0: a scale counts for a whole row). Fields as in :class:`~graphsrt.recipes.DequantFp8`."""

    inputs: str
    input_scale: Recipe | None
    largest: float | None
    block: int


def stored_parts(recipe: Recipe) -> list[DequantFp8]:
    """All matrices stored in FP8 that a recipe reads, however it puts them together."""
    match recipe:
        case DequantFp8():
            return [recipe]
        case Cat(parts):
            return [found for part in parts for found in stored_parts(part)]
        case _:
            inner = getattr(recipe, "x", None)
            return [] if inner is None else stored_parts(inner)


def format_of(recipe: Recipe) -> Format | None:
    """The one format of a weight made of stored matrices, side by side, cut, or divided along one dimension.

    None for anything else: a plain weight, parts in two formats, or what was changed after it was multiplied.
    """
    if not _is_made_of_parts(recipe):
        return None
    formats = {_format(part) for part in stored_parts(recipe)}
    return formats.pop() if len(formats) == 1 else None


def _format(part: DequantFp8) -> Format:
    if part.block[1] < part.shape[1]:
        return Format(part.inputs, part.input_scale, part.largest, part.block[1])
    # one block is the whole row, and its scale that of a token
    return Format("token" if part.inputs == "block" else part.inputs, part.input_scale, part.largest, 0)


def _is_made_of_parts(recipe: Recipe) -> bool:
    match recipe:
        case DequantFp8():
            return True
        case ShardOf(x):
            return _is_made_of_parts(x)
        case Take(x, 0):
            return _is_made_of_parts(x)
        case Cat(parts, 0):
            return all(_is_made_of_parts(part) for part in parts)
    return False


def numbers(weight: Weight) -> Weight:
    """The numbers of a weight without their scales."""

    def stored(recipe: Recipe) -> Recipe:
        match recipe:
            case DequantFp8(x):
                return x
            case ShardOf(x, dim, layout, unowned):
                return ShardOf(stored(x), dim, layout, unowned)
            case Take(x, dim, addresses, unowned):
                return Take(stored(x), dim, addresses, unowned)
            case Cat(parts, dim):
                return Cat(tuple(stored(part) for part in parts), dim)
        raise AssertionError(recipe)

    return Weight(weight.shape, FP8, stored(weight.recipe), weight.placement)


def columns(weight: Weight, block: int) -> Weight | None:
    """Which block each of a rank's columns is in, where a rank does not hold whole blocks of them; else None."""
    place = weight.placement
    if not isinstance(place, Shard) or place.dim != 1:
        return None
    layout = place.layout
    if layout.size % block == 0 and layout.granularity % block == 0:
        return None
    recipe = ShardOf(BlockNumbers(layout.size, block), 0, layout)
    return Weight((layout.local_size,), torch.int64, recipe, Shard(0, layout))


def scales(weight: Weight) -> Weight:
    """The scales of a weight's numbers: ``[1, C]``, or with a row for each block of rows, or for each row.

    A row for each where the weight's parts, or a rank's part of one, are not whole blocks. ``C`` is 1, or the number of
    blocks in a row: those of this rank where it holds whole ones, else all.
    """
    parts = stored_parts(weight.recipe)
    row_blocks = {part.block[0] for part in parts}
    if len(parts) == 1 and (parts[0].block[0] >= parts[0].shape[0] or not _cuts_rows(weight.recipe)):
        recipe, rows, place = parts[0].scale, -(-parts[0].shape[0] // parts[0].block[0]), weight.placement
        place = place if place is None else R
    else:
        # block rows serve a program whose blocks are square
        square = len(row_blocks) == 1 and all(part.block[0] == part.block[1] < part.shape[1] for part in parts)
        unit = row_blocks.pop() if square else 1
        try:
            recipe, place = _rows(weight.recipe, unit), _divided(weight.placement, unit)
        except ValueError:  # a part that is not whole blocks
            unit = 1
            recipe, place = _rows(weight.recipe, unit), weight.placement
        rows = weight.shape[0] // unit
    width, block = parts[0].shape[1], parts[0].block[1]
    num_blocks = -(-width // block)
    if num_blocks > 1 and isinstance(weight.placement, Shard) and weight.placement.dim == 1:
        place = R
        if columns(weight, block) is None:
            layout = weight.placement.layout.divide(block)
            recipe, place, num_blocks = ShardOf(recipe, 1, layout), Shard(1, layout), layout.local_size
    elif isinstance(place, Shard) and place.dim == 1:
        place = R
    return Weight((rows, num_blocks), torch.float32, recipe, place)


def _cuts_rows(recipe: Recipe) -> bool:
    match recipe:
        case ShardOf(x, dim):
            return dim == 0 or _cuts_rows(x)
        case DequantFp8():
            return False
    return True


def _divided(place: Placement | None, unit: int) -> Placement | None:
    return Shard(0, place.layout.divide(unit)) if isinstance(place, Shard) and place.dim == 0 else place


def _rows(recipe: Recipe, unit: int) -> Recipe:
    """Scales with a row for every ``unit`` rows of what ``recipe`` makes. ValueError if it cuts through a unit."""
    match recipe:
        case DequantFp8(_, scale, (height, _), (block, _)):
            if height % unit:
                raise ValueError(f"{height} rows are not whole units of {unit}")
            return scale if block == unit else Repeat(scale, 0, min(block, height), height)
        case ShardOf(x, 0, layout, _):
            return ShardOf(_rows(x, unit), 0, layout.divide(unit))
        case ShardOf(x):
            return _rows(x, unit)
        case Take(x, 0, addresses):
            runs = [span(text) for text in addresses]
            if any(run.start % unit or run.length % unit for run in runs):
                raise ValueError("rows are taken that are not whole units")
            taken = tuple(f"{run.start // unit}:{(run.start + run.length) // unit}" for run in runs)
            return Take(_rows(x, unit), 0, taken)
        case Cat(parts, 0):
            return Cat(tuple(_rows(part, unit) for part in parts), 0)
    raise AssertionError(recipe)


__all__ = ["Format", "columns", "format_of", "leaves", "numbers", "scales", "stored_parts"]
