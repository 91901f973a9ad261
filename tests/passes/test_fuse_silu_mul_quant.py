"""fuse_silu_mul_quant: gated units whose results are rounded to FP8, whole and divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from graphsrt import ops
from graphsrt.check_placements import check_placements
from graphsrt.errors import CompileError
from graphsrt.passes import fuse_silu_mul, merge_gate_up, quantize_linears, shard_tensor_parallel
from graphsrt.passes.fuse_silu_mul_quant import fuse_silu_mul_quant
from graphsrt.passes.runner import run
from graphsrt.program import Program
from graphsrt.testing import check, trace
from tests.support import fp8, fusing

E = 38


def plain(scheme: str, tp: int = 1, inner: int = 64, act: str = "silu") -> Program:
    def mlp(x: Any, gate: Any, up: Any, down: Any, bias: Any) -> Any:
        return F.linear(ops.glu(F.linear(x, gate), F.linear(x, up), act=act), down, bias)

    shapes = {"gate": (inner, E), "up": (inner, E), "down": (E, inner), "bias": (E,)}
    return fp8.stored(trace(mlp, inputs={"x": ("T", E)}, weights=shapes, tp=tp), scheme)


def made(scheme: str, tp: int = 1, inner: int = 64, act: str = "silu") -> Program:
    passes = [shard_tensor_parallel, merge_gate_up, quantize_linears, fuse_silu_mul]
    return run(plain(scheme, tp, inner, act), passes).final


def given_by(scheme: str, inner: int = 64) -> fp8.Source:
    return fp8.source(plain(scheme, inner=inner))


@pytest.mark.parametrize(
    ("scheme", "tp", "line"),
    [
        ("token", 1, "(f8e4m3[T, 64], f32[T, 1]) = graphsrt.silu_mul_quant(gate_up_proj, block=0, largest=None)"),
        ("block", 2, "(f8e4m3[T, 64/2] S(1), f32[T, 4/2] S(1)) = "
                     "graphsrt.silu_mul_quant(gate_up_proj, block=16, largest=None)"),
        ("static", 2, "f8e4m3[T, 64/2] S(1) = graphsrt.silu_mul_static_quant(gate_up_proj, down.input_scale)"),
    ],
)  # fmt: skip
def test_text(scheme: str, tp: int, line: str) -> None:
    """A row that one rank has, whole blocks of a divided one, and a scale that is given."""
    program = made(scheme, tp)
    done = check(fuse_silu_mul_quant, program, fires=1, tolerance=0, source=given_by(scheme), tokens=fusing.counts(tp))
    assert "graphsrt.silu_mul(" in done.before and "graphsrt.silu_mul(" not in done.after
    assert line in done.after


def test_near_misses() -> None:
    """A scale over a divided width is known when all ranks have made theirs."""
    reason = "its scale is the maximum over ranks, which is known when all of them have made theirs"
    check(fuse_silu_mul_quant, made("token", 2), fires=0, near_miss=reason, source=given_by("token"))
    parts = made("block", 3, inner=54)
    reason = "a rank holds parts of blocks, whose scales are known when all ranks have made theirs"
    check(fuse_silu_mul_quant, parts, fires=0, near_miss=reason, source=given_by("block", 54))
    gelu = made("token", act="gelu")
    reason = "its gate is glu(…, act='gelu'), which fuse_silu_mul left as it is"
    check(fuse_silu_mul_quant, gelu, fires=0, near_miss=reason, source=given_by("token"))


def test_checker_wants_whole_rows_or_whole_blocks() -> None:
    program = made("block", 2)
    assert fuse_silu_mul_quant(program) == 1
    check_placements(program)
    (node,) = program.calls(ops.silu_mul_quant)
    for block, words in ((0, "whole rows, or whole blocks of columns"), (24, "whole blocks of 24")):
        node.kwargs = {**node.kwargs, "block": block}
        with pytest.raises(CompileError, match=words):
            check_placements(program)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    tokens=st.integers(1, 7), width=st.integers(1, 40), block=st.sampled_from([0, 1, 8, 16]),
    largest=st.sampled_from([None, 0.5]), dtype=st.sampled_from(["float64", "bfloat16"]),
)  # fmt: skip
def test_operators_are_what_they_take_the_place_of(
    tokens: int, width: int, block: int, largest: float | None, dtype: str
) -> None:
    generator = torch.Generator().manual_seed(tokens * 41 + width)
    x = torch.randn(tokens, 2 * width, generator=generator, dtype=torch.float64).to(getattr(torch, dtype))
    with fusing.poisoned():
        product = ops.silu_mul(x)
        scale = ops.fp8_scale(product, block=block, largest=largest)
        numbers, scales = ops.silu_mul_quant(x, block=block, largest=largest)
        assert torch.equal(numbers.float(), ops.quantize_fp8(product, scale, block=block or width).float())
        assert torch.equal(scales, scale)
        one = torch.tensor([[0.02]])
        static = ops.silu_mul_static_quant(x, one)
        assert torch.equal(static.float(), ops.quantize_fp8(product, one).float())
    faked = (*ops.silu_mul_quant(x.to("meta"), block=block), ops.silu_mul_static_quant(x.to("meta"), one.to("meta")))
    assert [(f.shape, f.dtype) for f in faked] == [(g.shape, g.dtype) for g in (numbers, scales, static)]
