"""Recipe ``quantized``: values, parts of them, what is read, text and names; and the operators' references."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from graphsrt import ops
from graphsrt.errors import CompileError
from graphsrt.folding import slices_text
from graphsrt.integer_weights import from_int4, from_int8, to_int4, to_int8
from graphsrt.placement import Layout
from graphsrt.printer import recipe_text
from graphsrt.program import Program
from graphsrt.recipes import Cat, Ckpt, Mul, Quantized, ShardOf, Take, Transpose, evaluate, leaves, localize, rename
from graphsrt.testing import RandomSource, checkpoint_shapes, trace

ROWS, COLUMNS = 7, 160
SHAPES = {"w": (ROWS, COLUMNS), "other": (5, COLUMNS), "turned": (COLUMNS, ROWS), "by": (COLUMNS,)}
DTYPES = {"int8": torch.int8, "int8_scales": torch.float32, "int4": torch.uint8, "int4_pairs": torch.bfloat16}
PARTS = {"int8": (to_int8, 0), "int8_scales": (to_int8, 1), "int4": (to_int4, 0), "int4_pairs": (to_int4, 1)}


class Source(RandomSource):
    def __init__(self) -> None:
        super().__init__(SHAPES, {name: torch.bfloat16 for name in SHAPES})
        self.reads: list[tuple[slice, ...] | None] = []

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> torch.Tensor:
        self.reads.append(slices)
        return super().read(name, slices)


def made(recipe: object, part: str, rank: int = 0) -> torch.Tensor:
    return evaluate(recipe, rank, Source(), DTYPES[part])  # type: ignore[arg-type]


def want(part: str, weight: torch.Tensor) -> torch.Tensor:
    function, index = PARTS[part]
    return function(weight)[index]


@pytest.mark.parametrize("part", PARTS)
def test_rows_are_those_of_the_whole(part: str) -> None:
    """Bitwise, whatever rows a rank takes, and of parts side by side."""
    whole = want(part, Source().read("w"))
    recipe, layout = Quantized(Ckpt("w"), part), Layout.blocks(ROWS, 3)
    assert torch.equal(made(recipe, part), whole)
    for rank in range(3):
        shard = ShardOf(recipe, 0, layout)
        assert torch.equal(made(shard, part, rank), whole[layout.addresses(rank)])
        assert torch.equal(made(localize(shard, rank, 3), part), whole[layout.addresses(rank)])
    both = Cat((Take(recipe, 0, ("5:7", "0:1")), Quantized(Ckpt("other"), part)), 0)
    assert torch.equal(made(both, part), torch.cat([whole[[5, 6, 0]], want(part, Source().read("other"))]))


def test_columns_of_8_bits_are_scaled_by_the_whole_row() -> None:
    whole, layout = want("int8", Source().read("w")), Layout.blocks(COLUMNS, 3, 20)
    for rank in range(3):
        part = whole[:, layout.addresses(rank)].clone()
        part[:, [not run.owned for run in layout.runs[rank] for _ in range(run.length)]] = 0
        assert torch.equal(made(ShardOf(Quantized(Ckpt("w"), "int8"), 1, layout, "zero"), "int8", rank), part)


def test_columns_of_4_bits_are_packed_by_each_rank() -> None:
    """160 columns for three ranks: 64 each, of which the last one owns 32; zeros are exact."""
    layout = Layout.blocks(COLUMNS, 3, 32)
    part = ShardOf(Ckpt("w"), 1, layout, "zero")
    whole = from_int4(*to_int4(Source().read("w")))
    for rank in range(3):
        packed, pairs = (made(Quantized(part, name), name, rank) for name in ("int4", "int4_pairs"))
        got = from_int4(packed, pairs)
        expected = whole[:, layout.addresses(rank)].clone()
        expected[:, [not run.owned for run in layout.runs[rank] for _ in range(run.length)]] = 0
        assert torch.equal(got, expected)
    assert (expected == 0).any(), "the last rank has columns that it does not own"


def test_changed_matrices_are_rounded_after_the_change() -> None:
    source = Source()
    weight = source.read("w").float() * source.read("by").float()
    assert torch.equal(made(Quantized(Mul(Ckpt("w"), Ckpt("by"), 1), "int8"), "int8"), to_int8(weight)[0])
    turned = ShardOf(Quantized(Transpose(Ckpt("turned"), 0, 1), "int4_pairs"), 0, Layout.blocks(ROWS, 7))
    assert torch.equal(made(turned, "int4_pairs", 3), to_int4(source.read("turned").T)[1][3:4])


def test_only_the_rows_that_are_kept_are_read() -> None:
    source = Source()
    evaluate(ShardOf(Quantized(Ckpt("w"), "int8"), 0, Layout.blocks(ROWS, 7)), 2, source, torch.int8)
    assert source.reads == [(slice(2, 3), slice(None))]


def test_many_rows_are_rounded_a_few_at_a_time() -> None:
    source = RandomSource({"tall": (40000, 64)}, {"tall": torch.float32})
    got = evaluate(Quantized(Ckpt("tall"), "int4"), 0, source, torch.uint8)
    assert torch.equal(got, to_int4(source.read("tall"))[0])


def test_names_and_text() -> None:
    recipe = Quantized(ShardOf(Ckpt("w"), 1, Layout.blocks(COLUMNS, 1)), "int4_pairs")
    assert list(leaves(recipe)) == ["w"] and list(leaves(rename(recipe, str.upper))) == ["W"]
    assert recipe_text(Quantized(Ckpt("w"), "int8")) == 'quantized(ckpt("w"), "int8")'
    program = trace(lambda x, w: F.linear(x, w), inputs={"x": ("T", 160)}, weights={"w": (7, 160)})
    program.weights["w"].recipe = Quantized(Ckpt("w"), "int8")
    assert str(Program.from_text(str(program))) == str(program)
    assert checkpoint_shapes(program) == {"w": (7, 160)}
    with pytest.raises(CompileError, match="part of quantized is not str"):
        Program.from_text(str(program).replace('"int8"', "3"))
    rows = ShardOf(Quantized(Ckpt("w"), "int8_scales"), 0, Layout.blocks(6, 2))
    assert slices_text(rows, 1, 1) == 'quantized(w[3:6, :], "int8_scales")'
    columns = ShardOf(Quantized(Ckpt("w"), "int8"), 1, Layout.blocks(6, 2), "zero")
    assert slices_text(columns, 1, 2) == 'quantized(w, "int8")[:, 3:6]'


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
def test_operators(dtype: torch.dtype, biased: bool) -> None:
    """Summed wide and rounded once: off by roundings of float32 (or none, in float64) and by half a unit of the
    result's last digit."""
    generator = torch.Generator().manual_seed(3)
    w = torch.randn(11, 96, generator=generator)
    x = torch.randn(2, 5, 96, generator=generator).to(dtype)
    bias = torch.randn(11, generator=generator).to(dtype) if biased else None
    q, scales = to_int8(w)
    packed, pairs = to_int4(w)
    for got, weight in (
        (ops.int8_linear(x, q, scales, bias), from_int8(q, scales)),
        (ops.int4_linear(x, packed, pairs, bias), from_int4(packed, pairs)),
    ):
        wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        terms = F.linear(x.double().abs(), weight.double().abs(), None if bias is None else bias.double().abs())
        steps = 0.0 if dtype == torch.float64 else 97 * 2.0**-24
        bound = steps * terms + torch.finfo(dtype).eps * (terms if dtype == torch.float64 else wanted.abs())
        assert got.dtype == dtype and (got.double() - wanted).abs().sub(97 * bound if not steps else bound).max() <= 0
