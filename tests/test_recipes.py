"""Recipes: what a rank's weight is made of, and that no more is read than it keeps."""

from __future__ import annotations

import math

import pytest
import torch

from graphsrt.placement import Heads, Layout
from graphsrt.recipes import (
    Cat,
    Ckpt,
    Const,
    OnOwner,
    Recipe,
    RopeTable,
    ShardOf,
    ShardStart,
    Transpose,
    evaluate,
    leaves,
    rename,
)


class Counting:
    """A checkpoint ``w [6, 4]``, ``v [4, 4]``, ``b [6]`` with distinct numbers, that counts what is read."""

    def __init__(self) -> None:
        self.tensors = {
            "w": torch.arange(24, dtype=torch.float64).reshape(6, 4) + 1,
            "v": torch.arange(16, dtype=torch.float64).reshape(4, 4) + 101,
            "b": torch.arange(6, dtype=torch.float64) + 201,
        }
        self.numbers_read = 0

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> torch.Tensor:
        part = self.tensors[name] if slices is None else self.tensors[name][slices]
        self.numbers_read += part.numel()
        return part


def local(recipe: Recipe, rank: int, dtype: torch.dtype = torch.float64) -> list:
    value = evaluate(recipe, rank, Counting(), dtype)
    assert value.is_contiguous() and value.dtype == dtype
    return value.tolist()


def test_shards() -> None:
    assert local(ShardOf(Ckpt("w"), 0, Layout.blocks(6, 3)), 1) == [[9, 10, 11, 12], [13, 14, 15, 16]]
    assert local(ShardOf(Ckpt("w"), 1, Layout.blocks(4, 2)), 1)[0] == [3, 4]
    padded = Layout.blocks(6, 4)
    assert local(ShardOf(Ckpt("b"), 0, padded), 3) == [205, 206]  # a pad copies real units
    assert local(ShardOf(Ckpt("b"), 0, padded, "zero"), 3) == [0, 0]  # and counts for nothing where it is contracted


def test_cat_transpose_owner() -> None:
    fused = Cat((ShardOf(Ckpt("w"), 0, Layout.blocks(6, 2)), ShardOf(Ckpt("v"), 0, Layout.blocks(4, 2))), 0)
    assert [row[0] for row in local(fused, 1)] == [13, 17, 21, 109, 113]
    across = ShardOf(Transpose(Ckpt("w"), 0, 1), 0, Layout.blocks(4, 2))
    assert local(across, 1) == [[3, 7, 11, 15, 19, 23], [4, 8, 12, 16, 20, 24]]
    assert local(OnOwner(Ckpt("b")), 0)[0] == 201 and local(OnOwner(Ckpt("b")), 1) == [0.0] * 6
    assert local(ShardStart(Layout.blocks(6, 2)), 1, torch.int64) == [3]
    assert local(ShardStart(Layout.blocks(1, 2)), 1, torch.int64) == [1]  # a rank of pads only owns no row
    assert local(Const((2, 1), (0.5, 1.5)), 0) == [[0.5], [1.5]]


@pytest.mark.parametrize(
    ("recipe", "numbers"),
    [
        (ShardOf(Ckpt("w"), 0, Layout.blocks(6, 3)), 8),
        (ShardOf(Ckpt("w"), 1, Layout.blocks(4, 2)), 12),
        (ShardOf(Transpose(Ckpt("w"), 0, 1), 0, Layout.blocks(4, 2)), 12),
        (Cat((ShardOf(Ckpt("w"), 0, Layout.blocks(6, 2)), ShardOf(Ckpt("v"), 0, Layout.blocks(4, 2))), 0), 12 + 8),
        (ShardOf(Ckpt("w"), 0, Heads.choose(6, 6, 2).kv), 12),
    ],
)
def test_reads_only_what_it_keeps(recipe: Recipe, numbers: int) -> None:
    for rank in range(2):
        source = Counting()
        assert evaluate(recipe, rank, source, torch.float32).numel() == numbers
        assert source.numbers_read == numbers


def test_all_ranks_together_hold_all() -> None:
    layout = Layout.blocks(6, 4)
    total = torch.zeros(6, dtype=torch.float64)
    for rank in range(4):
        for address, value in zip(layout.addresses(rank), local(ShardOf(Ckpt("b"), 0, layout, "zero"), rank)):
            total[address] += value
    assert total.tolist() == Counting().tensors["b"].tolist()


def test_rope_table() -> None:
    table = local(RopeTable((1.0, 0.5), 2.0, 3), 0)
    assert [len(table), len(table[0])] == [3, 4]
    wanted = [2 * math.cos(2.0), 2 * math.cos(1.0), 2 * math.sin(2.0), 2 * math.sin(1.0)]
    assert table[2] == pytest.approx(wanted, abs=1e-6)


def test_names() -> None:
    recipe = Cat((ShardOf(Ckpt("w"), 0, Layout.blocks(6, 2)), OnOwner(Transpose(Ckpt("v"), 0, 1))), 0)
    assert list(leaves(recipe)) == ["w", "v"]
    renamed = rename(recipe, lambda name: f"model.{name}")
    assert list(leaves(renamed)) == ["model.w", "model.v"]
    assert rename(renamed, lambda name: name.removeprefix("model.")) == recipe
