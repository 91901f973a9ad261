"""Recipes ``dequant_fp8``, ``repeat`` and ``block_numbers``: values, what is read, text, and names."""

from __future__ import annotations

import pytest
import torch

from graphsrt.errors import CompileError
from graphsrt.passes.fp8_weights import Format, format_of
from graphsrt.placement import Layout
from graphsrt.printer import recipe_text
from graphsrt.program import Program
from graphsrt.recipes import (
    BlockNumbers,
    Cat,
    Ckpt,
    DequantFp8,
    Mul,
    Recipe,
    Repeat,
    ShardOf,
    Take,
    evaluate,
    leaves,
    localize,
    rename,
)
from graphsrt.testing import RandomSource, checkpoint_shapes, trace

ROWS, COLUMNS, BLOCK = 7, 10, 4
SHAPES = {"w": (ROWS, COLUMNS), "all": (1, 1), "each row": (ROWS, 1), "blocks": (2, 3), "inputs": (1, 1)}
BLOCKS = {"all": (ROWS, COLUMNS), "each row": (1, COLUMNS), "blocks": (BLOCK, BLOCK)}


class Source(RandomSource):
    """``w`` as it would be stored; notes what is read of it."""

    def __init__(self) -> None:
        super().__init__(SHAPES, {"w": torch.float8_e4m3fn})
        self.read_of_w: list[tuple[slice, ...] | None] = []

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> torch.Tensor:
        if name == "w":
            self.read_of_w.append(slices)
        return super().read(name, slices)


def recipe(scale: str) -> DequantFp8:
    return DequantFp8(Ckpt("w"), Ckpt(scale), (ROWS, COLUMNS), BLOCKS[scale], "token")


def want(scale: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Number for number, without the recipe's code."""
    source = Source()
    w, s = source.read("w"), source.read(scale).float()
    made = torch.empty(ROWS, COLUMNS, dtype=dtype)
    height, width = BLOCKS[scale]
    for i in range(ROWS):
        for j in range(COLUMNS):
            made[i, j] = w[i, j].to(torch.promote_types(dtype, torch.float32)) * s[i // height, j // width]
    return made


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", BLOCKS)
def test_values_are_the_checkpoints(scale: str, dtype: torch.dtype) -> None:
    """Bitwise, whole and in parts whose borders are not those of blocks."""
    made, whole = recipe(scale), want(scale, dtype)
    rows, columns = Layout.blocks(ROWS, 3), Layout.blocks(COLUMNS, 4)
    assert torch.equal(evaluate(made, 0, Source(), dtype), whole)
    for rank in range(3):
        part = whole[rows.addresses(rank)]
        assert torch.equal(evaluate(ShardOf(made, 0, rows), rank, Source(), dtype), part)
        assert torch.equal(evaluate(localize(ShardOf(made, 0, rows), rank, 3), rank, Source(), dtype), part)
    for rank in range(4):
        part = whole[:, columns.addresses(rank)].clone()
        part[:, [not run.owned for run in columns.runs[rank] for _ in range(run.length)]] = 0
        assert torch.equal(evaluate(ShardOf(made, 1, columns, "zero"), rank, Source(), dtype), part)
    taken = Take(made, 0, ("5:7", "0:1"))
    assert torch.equal(evaluate(taken, 0, Source(), dtype), whole[[5, 6, 0]])
    assert torch.equal(evaluate(Cat((taken, made), 0), 0, Source(), dtype), torch.cat([whole[[5, 6, 0]], whole]))


def test_only_what_is_kept_is_read() -> None:
    source = Source()
    evaluate(ShardOf(recipe("blocks"), 0, Layout.blocks(ROWS, 3)), 1, source, torch.float64)
    assert source.read_of_w == [(slice(3, 6), slice(0, None))] or source.read_of_w == [(slice(3, 6), slice(None))]


def test_scales_of_rows_and_numbers_of_blocks() -> None:
    source = Source()
    scales = source.read("blocks")
    made = Repeat(Ckpt("blocks"), 0, BLOCK, ROWS)
    assert torch.equal(evaluate(made, 0, source, torch.float64), scales[[0, 0, 0, 0, 1, 1, 1]])
    rows = Layout.blocks(ROWS, 2)
    assert torch.equal(evaluate(ShardOf(made, 0, rows), 1, source, torch.float64), scales[[1, 1, 1, 1]])
    numbers = ShardOf(BlockNumbers(COLUMNS, BLOCK), 0, Layout.blocks(COLUMNS, 4))
    assert evaluate(numbers, 1, source, torch.int64).tolist() == [0, 1, 1]


def test_names_and_text() -> None:
    static = DequantFp8(Ckpt("w"), Ckpt("all"), (ROWS, COLUMNS), (ROWS, COLUMNS), "static", Ckpt("inputs"))
    bound = DequantFp8(Ckpt("w"), Ckpt("each row"), (ROWS, COLUMNS), (1, COLUMNS), "token", None, 1200.0)
    assert list(leaves(static)) == ["w", "all", "inputs"]
    assert list(leaves(rename(static, str.upper))) == ["W", "ALL", "INPUTS"]
    program = trace(lambda x, w: torch.nn.functional.linear(x, w), inputs={"x": ("T", 10)}, weights={"w": (7, 10)})
    for made in (static, bound, Repeat(recipe("blocks"), 0, 1, ROWS)):
        program.weights["w"].recipe = made
        assert str(Program.from_text(str(program))) == str(program)
    program.weights["w"].recipe = static
    assert checkpoint_shapes(program) == {"w": (7, 10), "all": (1, 1), "inputs": (1, 1)}
    assert 'inputs="token", largest=1200.0)' in recipe_text(bound)
    broken = str(program).replace('"static"', "3")
    with pytest.raises(CompileError, match="inputs of dequant_fp8 is not str"):
        Program.from_text(broken)


def test_format() -> None:
    token = Format("token", None, None, 0)
    assert format_of(recipe("all")) == format_of(ShardOf(recipe("each row"), 0, Layout.blocks(ROWS, 3))) == token
    assert format_of(recipe("blocks")) == Format("token", None, None, BLOCK)
    wide = DequantFp8(Ckpt("w"), Ckpt("blocks"), (ROWS, COLUMNS), (16, 16), "block")
    assert format_of(wide) == token, "a block that is the whole row has the scale of a token"
    others: list[Recipe] = [Ckpt("w"), Cat((recipe("all"), recipe("blocks")), 0), Cat((recipe("all"), Ckpt("w")), 0)]
    others += [Mul(recipe("all"), Ckpt("v"), 1), Cat((recipe("all"), recipe("all")), 1)]
    assert [format_of(other) for other in others] == [None] * 5
