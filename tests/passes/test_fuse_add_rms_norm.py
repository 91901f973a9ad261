"""fuse_add_rms_norm: a residual sum and the norm that reads it, whatever the order and whoever else reads the sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphsrt import ops
from graphsrt.passes.fuse_add_rms_norm import fuse_add_rms_norm
from graphsrt.program import Program
from graphsrt.testing import check, trace
from tests.support import captures

NORM: dict[str, Any] = {"eps": 3e-6, "cast": "before_weight", "offset": 0.0}


def made(function: Any, residual: tuple[int | str, ...] = ("T", 6), dtype: torch.dtype = torch.float64) -> Program:
    return trace(function, inputs={"x": ("T", 6), "residual": residual}, weights={"w": (6,)}, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_text(dtype: torch.dtype) -> None:
    def block(x: Any, residual: Any, w: Any) -> Any:
        total = residual + x
        return total * ops.rms_norm(total, w, **NORM)

    done = check(fuse_add_rms_norm, made(block, dtype=dtype), fires=1, tolerance=0)
    kind = "bf16" if dtype == torch.bfloat16 else "f64"
    norm = 'eps=3e-06, cast="before_weight"'  # the default offset is left away, until the pass says it
    assert done.before == (
        f"add: {kind}[T, 6] = aten.add.Tensor(residual, x)\n"
        f"rms_norm: {kind}[T, 6] = graphsrt.rms_norm(add, w, {norm})\n"
        f"mul: {kind}[T, 6] = aten.mul.Tensor(add, rms_norm)\n"
        "return mul"
    )
    assert done.after == (
        f"add_rms_norm: ({kind}[T, 6], {kind}[T, 6]) = graphsrt.add_rms_norm(x, residual, w, {norm}, offset=0.0)\n"
        f"rms_norm: {kind}[T, 6] = getitem(add_rms_norm, 0)\n"
        f"add: {kind}[T, 6] = getitem(add_rms_norm, 1)\n"
        f"mul: {kind}[T, 6] = aten.mul.Tensor(add, rms_norm)\n"
        "return mul"
    )


def test_dead_residual() -> None:
    """The last norm: nobody reads the sum any more."""
    check(fuse_add_rms_norm, made(lambda x, residual, w: ops.rms_norm(x + residual, w, **NORM)), fires=1, tolerance=0)


def test_broadcast_is_no_residual() -> None:
    program = made(lambda x, residual, w: ops.rms_norm(x + residual, w, **NORM), residual=("T", 1))
    check(fuse_add_rms_norm, program, fires=0, near_miss="differ")


def test_sum_needed_too_early() -> None:
    def block(x: Any, residual: Any, w: Any) -> Any:
        total = residual + x
        early = total * 2.0
        return early + ops.rms_norm(total, w, **NORM)

    check(fuse_add_rms_norm, made(block), fires=0, near_miss="mul uses add before rms_norm is computed")


@pytest.mark.parametrize(("family", "fires"), [("llama", 4), ("gemma2", 4)])
def test_models(family: str, fires: int) -> None:
    """The first norm has no sum before it. Gemma-2's norms of a branch have none either."""
    done = check(fuse_add_rms_norm, captures.before("fuse_add_rms_norm", family, layers=2), fires=fires, tokens=(3,))
    assert done.after.splitlines()[2].startswith("layers.0.input_layernorm: ") or "rms_norm(embed" in done.after
