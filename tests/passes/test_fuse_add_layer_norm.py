"""fuse_add_layer_norm: a residual sum and the layer norm that reads it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from graphsrt.passes.fuse_add_layer_norm import fuse_add_layer_norm
from graphsrt.program import Program
from graphsrt.testing import check, trace
from tests.support import fusing


def made(function: Any, residual: tuple[int | str, ...] = ("T", 6), dtype: torch.dtype = torch.float64) -> Program:
    inputs: dict[str, Any] = {"x": ("T", 6), "residual": residual}
    return trace(function, inputs=inputs, weights={"w": (6,), "b": (6,)}, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_text(dtype: torch.dtype) -> None:
    def block(x: Any, residual: Any, w: Any, b: Any) -> Any:
        total = residual + x
        return total * F.layer_norm(total, (6,), w, b, 3e-6)

    program = made(block, dtype=dtype)
    done = check(fuse_add_layer_norm, program, fires=1, tolerance=0, tokens=fusing.counts(1))
    kind = "bf16" if dtype == torch.bfloat16 else "f64"
    assert done.before.splitlines()[1] == (f"layer_norm: {kind}[T, 6] = aten.layer_norm(add, [6], w, b, 3e-06)")
    assert done.after == (
        f"add_layer_norm: ({kind}[T, 6], {kind}[T, 6]) = graphsrt.add_layer_norm(x, residual, w, b, eps=3e-06)\n"
        f"layer_norm: {kind}[T, 6] = getitem(add_layer_norm, 0)\n"
        f"add: {kind}[T, 6] = getitem(add_layer_norm, 1)\n"
        f"mul: {kind}[T, 6] = aten.mul.Tensor(add, layer_norm)\n"
        "return mul"
    )
    fusing.check_padding(program, done.program, (1, 5))


def test_without_weights_and_with_a_dead_residual() -> None:
    done = check(
        fuse_add_layer_norm, made(lambda x, residual, w, b: F.layer_norm(x + residual, (6,)) * w + b), fires=1,
        tolerance=0,
    )  # fmt: skip
    assert "add_layer_norm(residual, x, None, None, eps=1e-05)" in done.after
    assert "getitem(add_layer_norm, 1)" not in done.after


def test_near_misses() -> None:
    plain = made(lambda x, residual, w, b: F.layer_norm(x, (6,), w, b) + residual)
    check(fuse_add_layer_norm, plain, fires=0, near_miss="nothing is added before it: it norms x, which is given")
    wide = made(lambda x, residual, w, b: F.layer_norm(x + residual, (6,), w, b), residual=("T", 1))
    check(fuse_add_layer_norm, wide, fires=0, near_miss="differ")
    doubled = made(lambda x, residual, w, b: F.layer_norm(torch.add(x, residual, alpha=2), (6,), w, b))
    check(fuse_add_layer_norm, doubled, fires=0, near_miss="the residual is added 2 times")

    def both(x: Any, residual: Any, w: Any, b: Any) -> Any:
        total = x + residual
        return F.layer_norm(total, (6,), w, b) * F.layer_norm(total, (6,), b, w)

    misses: list[Any] = []
    program = made(both)
    assert fuse_add_layer_norm(program, near_misses=misses) == 1
    assert misses[0].reason == "the sum that it norms is a result of add_layer_norm already"


def test_engine() -> None:
    fusing.check_engine("fuse_add_layer_norm", "gpt_neox")
