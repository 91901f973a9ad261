"""quantize_linears: stored matrices multiply in FP8, and their scales are divided, cut and merged with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from graphsrt import ops
from graphsrt.check_placements import check_placements
from graphsrt.passes import merge_gate_up, shard_tensor_parallel, split_linears
from graphsrt.passes.quantize_linears import quantize_linears
from graphsrt.passes.runner import run
from graphsrt.program import Program, arguments
from graphsrt.recipes import Ckpt, DequantFp8, Fill, Mul, evaluate
from graphsrt.testing import check, check_ranks, result, trace
from tests.support.fp8 import BLOCK, SCHEMES, source, stored

E, INNER = 38, 54
"""Neither is whole blocks of 16; 54 channels are divided by 2 and 3, and padded at 4 and 8."""

ROUNDED = 3 * 2.0**-4
"""How far a result may move, relative to the largest: FP8 moves a number by no more than 2**-4 of it (3 bits of
mantissa), so a sum of products by no more than that part of their sizes, which add up to about three times the largest
result of these. What exactly is computed, ``test_what_it_computes`` knows."""


def mlp(x: Any, gate: Any, up: Any, down: Any, down_bias: Any) -> Any:
    return F.linear(ops.glu(F.linear(x, gate), F.linear(x, up), act="silu"), down, down_bias)


def program(scheme: str, tp: int = 1, passes: list[Any] | None = None, inner: int = INNER) -> Program:
    shapes = {"gate": (inner, E), "up": (inner, E), "down": (E, inner), "down_bias": (E,)}
    plain = stored(trace(mlp, inputs={"x": ("T", E)}, weights=shapes, tp=tp), scheme)
    return run(plain, passes or []).final


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_it_computes(scheme: str) -> None:
    """Against the formula, in numbers, of a program whose gate and up have their own matrices."""
    before = program(scheme)
    given = source(before)
    done = check(quantize_linears, before, fires=3, source=given, tolerance=ROUNDED)

    def rounded(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        width = scale.shape[-1]
        over = scale if width == 1 else scale.repeat_interleave(BLOCK, -1)[:, : x.shape[1]]
        return (x / over).to(torch.float8_e4m3fn).double() * over

    def dequantized(name: str) -> torch.Tensor:
        weight = before.weights[name]
        return evaluate(weight.recipe, 0, given, torch.float64)

    def linear(x: torch.Tensor, name: str, bias: torch.Tensor | None = None) -> torch.Tensor:
        if scheme == "static":
            scale = given.read(f"input of {x.shape[1]}.input_scale").double()
        elif scheme == "token":
            scale = (x.abs().amax(1, keepdim=True).float() / 448).double()
        else:
            blocks = F.pad(x, (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
            scale = (blocks.abs().amax(2).float() / 448).double()
        return F.linear(rounded(x, scale), dequantized(name), bias)

    x = torch.randn(7, E, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    want = linear(F.silu(linear(x, "gate")) * linear(x, "up"), "down", given.read("down_bias"))
    weights = {n: [evaluate(w.recipe, 0, given, w.dtype)] for n, w in done.program.weights.items()}
    got = result(done.program, {"x": x}, weights)
    assert torch.allclose(got, want, rtol=0, atol=1e-12)


def test_text() -> None:
    done = check(quantize_linears, program("token"), fires=3, tolerance=ROUNDED, source=source(program("token")))
    assert done.after.splitlines() == [
        "x.scale: f32[T, 1] = graphsrt.fp8_scale(x)",
        "x.fp8: f8e4m3[T, 38] = graphsrt.quantize_fp8(x, x.scale)",
        "linear: f64[T, 54] = graphsrt.fp8_linear(x.fp8, x.scale, gate_fp8, gate_scale, out_dtype=f64)",
        "linear_1: f64[T, 54] = graphsrt.fp8_linear(x.fp8, x.scale, up_fp8, up_scale, out_dtype=f64)",
        'glu: f64[T, 54] = graphsrt.glu(linear, linear_1, act="silu")',
        "glu.scale: f32[T, 1] = graphsrt.fp8_scale(glu)",
        "glu.fp8: f8e4m3[T, 54] = graphsrt.quantize_fp8(glu, glu.scale)",
        "linear_2: f64[T, 38] = "
        "graphsrt.fp8_linear(glu.fp8, glu.scale, down_fp8, down_scale, down_bias, out_dtype=f64)",
        "return linear_2",
    ]  # fmt: skip


@pytest.mark.parametrize("tp", [2, 3, 4, 8])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_divided(scheme: str, tp: int) -> None:
    """No rank's 54/tp channels are whole blocks of 16. All ranks round as one would, so sums agree to float64."""
    passes = [shard_tensor_parallel, merge_gate_up, quantize_linears]
    whole, divided = program(scheme, 1, [quantize_linears]), program(scheme, tp, passes)
    check_placements(divided)
    check_ranks(whole, divided, source=source(whole), tolerance=1e-12, tokens=(1, 2, 7))
    assert str(Program.from_text(str(divided))) == str(divided)
    maxima = [arguments(node)["op"] for node in divided.calls(ops.all_reduce)].count("max")
    assert maxima == (0 if scheme == "static" else 1)


def test_whole_blocks_stay_where_they_are() -> None:
    """64 channels over 2 ranks: the scales of blocks are divided, and nothing is reduced but the sum."""
    passes = [shard_tensor_parallel, merge_gate_up, quantize_linears]
    whole, divided = program("block", 1, [quantize_linears], 64), program("block", 2, passes, 64)
    check_ranks(whole, divided, source=source(whole), tolerance=1e-12, tokens=(1, 7))
    text = str(divided)
    assert "f32[4(3)" not in text
    assert "glu.scale: f32[T, 4/2] S(1) = graphsrt.fp8_scale(glu, block=16)" in text
    assert "down_scale: f32[3, 4/2] S(1) = shard(" in text
    (rows,) = [line for line in text.splitlines() if line.startswith("  gate.gate_up_proj.weight_scale:")]
    assert rows.startswith("  gate.gate_up_proj.weight_scale: f32[8/2{0:2,4:6|2:4,6:8}, 3] S(0) = cat([shard(")
    assert len(divided.calls(ops.all_reduce)) == 1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_fused_matrix_is_cut(scheme: str) -> None:
    """Rows of one stored matrix, interleaved, and one scale for all of it: each part keeps the scales of its rows."""

    def fused(x: Any, both: Any, down: Any) -> Any:
        pairs = F.linear(x, both).view(-1, 27, 2)
        return F.linear(ops.glu(pairs[:, :, 0], pairs[:, :, 1], act="silu"), down)

    shapes = {"both": (54, E), "down": (E, 27)}
    plain = [stored(trace(fused, inputs={"x": ("T", E)}, weights=shapes, tp=tp), scheme) for tp in (1, 2)]
    given = source(plain[0])
    whole = run(plain[0], [quantize_linears]).final
    cut = run(plain[1], [split_linears, shard_tensor_parallel, merge_gate_up, quantize_linears]).final
    assert len(cut.calls(ops.fp8_linear)) == 2
    check_ranks(whole, cut, source=given, tolerance=1e-12, tokens=(1, 7))


def test_different_input_scales_are_not_merged() -> None:
    before = program("static")
    recipe = before.weights["up"].recipe
    assert isinstance(recipe, DequantFp8)
    before.weights["up"].recipe = DequantFp8(
        recipe.x, recipe.scale, recipe.shape, recipe.block, "static", Ckpt("another.input_scale")
    )
    check(merge_gate_up, before, fires=0, near_miss="round their input differently", source=source(before))
    done = check(quantize_linears, before, fires=3, source=source(before), tolerance=ROUNDED)
    assert done.after.count("quantize_fp8(x, ") == 2


def test_plain_beside_stored() -> None:
    shapes = {"gate": (INNER, E), "up": (INNER, E), "down": (E, INNER), "down_bias": (E,)}
    before = stored(trace(mlp, inputs={"x": ("T", E)}, weights=shapes), "token", skip={"up", "down"})
    check(merge_gate_up, before, fires=0, near_miss="stored in two formats", source=source(before))
    done = check(quantize_linears, before, fires=1, source=source(before), tolerance=ROUNDED)
    assert "linear_1: f64[T, 54] = aten.linear(x, up)" in done.after


def test_a_scaled_matrix_stays_a_linear() -> None:
    before = program("token")
    weight = before.weights["down"]
    before.weights["down"] = replace(weight, recipe=Mul(weight.recipe, Fill((INNER,), 0.5), 1))
    done = check(quantize_linears, before, fires=2, source=source(before), tolerance=ROUNDED)
    assert "changed after it was multiplied" in done.near_misses[0].reason
    assert "linear_2: f64[T, 38] = aten.linear(glu, down, down_bias)" in done.after
