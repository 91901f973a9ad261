"""Recipes ``mul`` and ``fill``: values, the slices that are read, their text, and what the check of placements says."""

from __future__ import annotations

import pytest
import torch

from graphsrt.check_placements import check_placements
from graphsrt.errors import CompileError
from graphsrt.passes import shard_tensor_parallel
from graphsrt.placement import Layout
from graphsrt.program import Program
from graphsrt.recipes import Cat, Ckpt, Fill, Mul, Recipe, ShardOf, evaluate, leaves, localize, rename
from graphsrt.testing import RandomSource, trace

SOURCE = RandomSource({"W": (6, 8), "w": (8,)})
WHOLE = SOURCE.read("W") * SOURCE.read("w")
ROWS, COLUMNS = Layout.blocks(6, 2), Layout.blocks(8, 2)
SCALED = Mul(Ckpt("W"), Ckpt("w"), 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_values(rank: int) -> None:
    def value(recipe: Recipe) -> torch.Tensor:
        return evaluate(recipe, rank, SOURCE, torch.float64)

    rows, columns = slice(3 * rank, 3 * rank + 3), slice(4 * rank, 4 * rank + 4)
    assert torch.equal(value(SCALED), WHOLE)
    assert torch.equal(value(ShardOf(SCALED, 0, ROWS)), WHOLE[rows])
    assert torch.equal(value(ShardOf(SCALED, 1, COLUMNS, "zero")), WHOLE[:, columns])
    assert torch.equal(value(Mul(ShardOf(Ckpt("W"), 0, ROWS), Ckpt("w"), 1)), WHOLE[rows])
    assert torch.equal(value(localize(ShardOf(SCALED, 1, COLUMNS), rank, 6)), WHOLE[:, columns])
    assert torch.equal(value(Mul(Ckpt("W"), Fill((8,), 1.0), 1)), SOURCE.read("W"))


def test_reads_only_what_it_keeps() -> None:
    read: list[tuple[str, object]] = []

    class Watched(RandomSource):
        def read(self, name: str, slices: tuple[slice, ...] | None = None) -> torch.Tensor:
            read.append((name, slices))
            return super().read(name, slices)

    evaluate(ShardOf(SCALED, 0, ROWS), 1, Watched(SOURCE.shapes), torch.float64)
    assert sorted(name for name, _ in read) == ["W", "w"]
    assert ("W", (slice(3, 6), slice(None))) in read


def test_rounds_once() -> None:
    exact = evaluate(SCALED, 0, SOURCE, torch.float64)
    assert torch.equal(evaluate(SCALED, 0, SOURCE, torch.bfloat16), exact.float().to(torch.bfloat16))


def test_names() -> None:
    assert list(leaves(SCALED)) == ["W", "w"]
    assert rename(SCALED, str.upper) == Mul(Ckpt("W"), Ckpt("W"), 1)


def program(recipe: Recipe) -> Program:
    """x · Wᵀ, divided by rows, with another recipe for W."""
    made = trace(
        lambda x, W: torch.nn.functional.linear(x, W),
        tp=2, inputs={"x": ("T", 8)}, weights={"W": (6, 8)}, passes=[shard_tensor_parallel],
    )  # fmt: skip
    made.weights["W"].recipe = recipe
    return made


@pytest.mark.parametrize("recipe", [Mul(ShardOf(Ckpt("W"), 0, ROWS), Ckpt("w"), 1), ShardOf(SCALED, 0, ROWS)])
def test_placements_and_text(recipe: Recipe) -> None:
    made = program(recipe)
    check_placements(made)
    assert str(Program.from_text(str(made))) == str(made)
    merged = program(Cat((recipe,), 0))
    check_placements(merged)


@pytest.mark.parametrize(
    "recipe",
    [
        Mul(ShardOf(Ckpt("W"), 0, ROWS), Ckpt("u"), 0),  # a whole vector along the dimension that is divided
        Mul(Ckpt("W"), ShardOf(Ckpt("w"), 0, COLUMNS), 1),  # a part of the vector, all of the matrix
    ],
)
def test_vector_and_matrix_are_divided_alike(recipe: Recipe) -> None:
    with pytest.raises(CompileError, match=r"divided differently|another length"):
        check_placements(program(recipe))
