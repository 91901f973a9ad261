"""Eight-bit linears: what the operators mean, by loops over numbers; their text; and compiled code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from graphsrt import ops, ops_fp8
from graphsrt.lowering import inductor
from graphsrt.lowering.regions import Call, Formal, Ref, Region
from graphsrt.program import Program
from graphsrt.testing import trace

T, E, O, BLOCK = 5, 38, 27, 16  # noqa: E741  (neither side is whole blocks)
FP8 = torch.float8_e4m3fn


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_scale_makes_the_largest_number_the_largest_of_fp8(dtype: torch.dtype) -> None:
    x = draw(T, E, dtype=dtype)
    rows, blocks = ops.fp8_scale(x), ops.fp8_scale(x, block=BLOCK)
    assert rows.shape == (T, 1) and blocks.shape == (T, 3) and rows.dtype == blocks.dtype == torch.float32
    for t in range(T):
        assert rows[t, 0] == x[t].abs().max().float() / 448
        for g in range(3):
            assert blocks[t, g] == x[t, g * BLOCK : (g + 1) * BLOCK].abs().max().float() / 448
    for scale in (rows, blocks):
        q = ops.quantize_fp8(x, scale, block=BLOCK)
        largest = q.float().abs().reshape(T, -1).amax(1)
        assert torch.equal(largest, torch.full((T,), 448.0))


def test_rows_of_zeros_and_of_less_than_anything() -> None:
    x = draw(T, E, dtype=torch.float32)
    x[1] = 0
    x[2] = 1e-30
    for block in (0, BLOCK):
        scale = ops.fp8_scale(x, block=block)
        assert (scale > 0).all() and torch.equal(scale[1], torch.full_like(scale[1], 1e-10 / 448))
        q = ops.quantize_fp8(x, scale, block=BLOCK).float()
        assert torch.equal(q[1:3], torch.zeros(2, E)) and q.isfinite().all()


def test_what_is_too_large_saturates() -> None:
    q = ops.quantize_fp8(torch.tensor([[1e9, -1e9, 449.0, 0.0]]), torch.tensor(1.0))
    assert q.float().tolist() == [[448.0, -448.0, 448.0, 0.0]]


def test_columns_of_a_rank_that_holds_no_whole_blocks() -> None:
    """Two ranks hold the columns in an order that no block survives; the maximum of theirs is the scale."""
    x = draw(T, E)
    order = torch.randperm(E, generator=torch.Generator().manual_seed(3))
    block_of = torch.arange(E) // BLOCK
    parts = [order[:17], order[17:]]
    scales = [ops.fp8_scale(x[:, mine], block=BLOCK, columns=block_of[mine], num_blocks=3) for mine in parts]
    scale = torch.maximum(*scales)
    assert torch.equal(scale, ops.fp8_scale(x, block=BLOCK))
    whole = ops.quantize_fp8(x, scale, block=BLOCK)
    w, w_scale = draw(O, E, seed=1).to(FP8), draw(2, 3, seed=2, dtype=torch.float32).abs()
    total = torch.zeros(T, O, dtype=torch.float64)
    for mine in parts:
        q = ops.quantize_fp8(x[:, mine], scale, block=BLOCK, columns=block_of[mine])
        assert torch.equal(q.float(), whole[:, mine].float())
        total += ops.fp8_linear(
            q, scale, w[:, mine], w_scale, out_dtype=torch.float64, block=BLOCK, columns=block_of[mine]
        )
    want = ops.fp8_linear(whole, scale, w, w_scale, out_dtype=torch.float64, block=BLOCK)
    assert torch.allclose(total, want, rtol=0, atol=1e-13)  # the same 38 products of about 1, added in another order


SCALES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "tensor": ((), (1, 1)), "scalars": ((), ()), "rows": ((T, 1), (O, 1)), "blocks": ((T, 3), (2, 3)),
    "rows of blocks": ((T, 3), (O, 3)),
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALES)
def test_linear_is_a_sum_of_products_of_what_is_meant(kind: str) -> None:
    x_shape, w_shape = SCALES[kind]
    q, w, bias = draw(T, E).to(FP8), draw(O, E, seed=1).to(FP8), draw(O, seed=2)
    xs, ws = (draw(*s, seed=n, dtype=torch.float32).abs() for n, s in ((3, x_shape), (4, w_shape)))
    got = ops.fp8_linear(q, xs, w, ws, bias, out_dtype=torch.float64, block=BLOCK)

    def of(scale: torch.Tensor, row: int, column: int, rows: int) -> float:
        if scale.dim() == 0:
            return float(scale)
        height, width = scale.shape
        i = 0 if height == 1 else row if height == rows else row // BLOCK
        return float(scale[i, 0 if width == 1 else column // BLOCK])

    for t in range(T):
        for o in range(O):
            terms = [float(q[t, e]) * of(xs, t, e, T) * float(w[o, e]) * of(ws, o, e, O) for e in range(E)]
            assert abs(got[t, o] - sum(terms) - bias[o]) <= 1e-13
    half = ops.fp8_linear(q, xs, w, ws, bias.bfloat16(), out_dtype=torch.bfloat16, block=BLOCK)
    want = ops.fp8_linear(q, xs, w, ws, bias.bfloat16().double(), out_dtype=torch.float64, block=BLOCK)
    size = (got.abs().max() + 40).item()  # of the sums of 38 terms that float32 rounds, before they cancel
    assert half.dtype == torch.bfloat16
    assert ((half.double() - want).abs() <= want.abs() * 2**-8 + size * 40 * 2**-24).all()  # one rounding to bf16


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: ops.quantize_fp8(draw(T, E), torch.ones(T, 2), block=BLOCK), "2 scales for 38 columns"),
        (
            lambda: ops.fp8_linear(
                draw(T, E).to(FP8), torch.ones(()), draw(O, E).to(FP8), torch.ones(3, 1), out_dtype=torch.float32,
                block=BLOCK,
            ),
            "3 rows of scales for 27 rows",
        ),
        (lambda: ops.fp8_scale(draw(T, E), columns=torch.zeros(E, dtype=torch.int64)), "given together"),
    ],
)  # fmt: skip
def test_scales_for_another_matrix_are_refused(call: Callable[[], torch.Tensor], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_text() -> None:
    def linear(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        scale = ops.fp8_scale(x, block=BLOCK)
        q = ops.quantize_fp8(x, scale, block=BLOCK)
        return ops.fp8_linear(q, scale, w.to(FP8), s.to(torch.float32), out_dtype=torch.bfloat16, block=BLOCK)

    program = trace(linear, inputs={"x": ("T", E)}, weights={"w": (O, E), "s": (O, 3)})
    text = str(program)
    assert "f32[T, 3] = graphsrt.fp8_scale(x, block=16)" in text
    assert "f8e4m3[T, 38] = graphsrt.quantize_fp8(x, fp8_scale, block=16)" in text
    assert "bf16[T, 27] = graphsrt.fp8_linear(quantize_fp8, fp8_scale, " in text and "out_dtype=bf16" in text
    assert str(Program.from_text(text)) == text


def test_compiled(tmp_path: Path) -> None:
    """All forms in one region, so that there is one compilation."""
    f32, f8, bf16 = torch.float32, FP8, torch.bfloat16
    calls, outputs = [], []

    def call(name: str, *args: object, **kwargs: object) -> Ref:
        calls.append(Call(f"graphsrt.{name}", args, tuple(sorted(kwargs.items()))))
        return Ref(6 + len(calls) - 1)

    x, static, w, per_row, blocks, bias = (Ref(i) for i in range(6))
    for w_scale, kind in ((per_row, 0), (blocks, BLOCK), (per_row, None)):
        scale = static if kind is None else call("fp8_scale", x, block=kind)
        q = call("quantize_fp8", x, scale, block=BLOCK)
        out = call("fp8_linear", q, scale, w, w_scale, bias, out_dtype=bf16, block=BLOCK)
        outputs.append((out, Formal(("T", O), bf16)))
    region = Region(
        (Formal(("T", E), bf16),),
        (Formal((), f32), Formal((O, E), f8), Formal((O, 1), f32), Formal((2, 3), f32), Formal((O,), bf16)),
        tuple(calls), tuple(outputs),
    )  # fmt: skip
    library = tmp_path / "region.so"
    inductor.compile_region(region, library)
    weights = [torch.tensor(0.01), draw(O, E, seed=1).to(FP8), draw(O, 1, seed=2).abs().float(),
               draw(2, 3, seed=3).abs().float(), draw(O, seed=4).bfloat16()]  # fmt: skip
    compiled = inductor.CompiledRegion(region, library)
    for tokens in (1, 2, 7, 37):
        values = [draw(tokens, E, seed=tokens).bfloat16(), *weights]
        for got, want in zip(compiled.run(values), region.run(values)):
            # float32 sums of 38 products in another order, then one rounding to bf16
            assert torch.allclose(got.float(), want.float(), rtol=2**-7, atol=1e-4)


def test_dequantized_weights_are_products() -> None:
    w, scale = draw(O, E).to(FP8), draw(2, 3, seed=5, dtype=torch.float32).abs()
    whole = ops_fp8.dequantize_fp8(w, scale, torch.float64, block=BLOCK)
    assert torch.equal(whole[17, 33], w[17, 33].double() * scale[1, 2].double())
    x = draw(T, E, seed=6).to(FP8)
    got = ops.fp8_linear(x, torch.tensor(1.0), w, scale, out_dtype=torch.float64, block=BLOCK)
    assert torch.allclose(got, F.linear(x.double(), whole), rtol=0, atol=1e-13)
