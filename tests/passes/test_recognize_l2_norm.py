"""recognize_l2_norm: the norm of nGPT, and nothing that only looks like it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from graphsrt.passes.normalize import normalize
from graphsrt.passes.recognize_l2_norm import recognize_l2_norm
from graphsrt.passes.shard_tensor_parallel import shard_tensor_parallel
from graphsrt.testing import check, trace

CASTS = 1e-6  # the model computes in float32 inside, the operator in float64: they differ by float32's rounding


def l2(x: Any) -> Any:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + 3e-4)).type_as(x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_text(dtype: torch.dtype) -> None:
    def scaled(x: Any, weight: Any) -> Any:
        return l2(x) - weight

    program = trace(scaled, inputs={"x": ("T", 6)}, weights={"weight": (6,)}, dtype=dtype, passes=[normalize])
    done = check(recognize_l2_norm, program, fires=1, tolerance=0.0 if dtype == torch.bfloat16 else CASTS)
    kind = "bf16" if dtype == torch.bfloat16 else "f64"
    assert "aten.rsqrt" in done.before
    assert re.sub(r"\bto(_\d)?\b", "norm", done.after).startswith(
        f"norm: {kind}[T, 6] = graphsrt.l2_norm(x, eps=0.0003)\nsub: {kind}[T, 6] = aten.sub.Tensor(norm, weight)"
    )


def test_mean_is_no_sum() -> None:
    def rms(x: Any) -> Any:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 3e-4)).type_as(x)

    check(recognize_l2_norm, trace(rms, inputs={"x": ("T", 6)}, passes=[normalize]), fires=0)


def test_second_user() -> None:
    def function(x: Any) -> Any:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + 3e-4)
        return (wide * scale).type_as(x) + scale.type_as(x)

    program = trace(function, inputs={"x": ("T", 6)}, dtype=torch.float32, passes=[normalize])
    check(recognize_l2_norm, program, fires=0, near_miss="another user")


@pytest.mark.parametrize("tp", [2, 4])
def test_over_a_divided_width(tp: int) -> None:
    """Nine channels over the ranks: one number a token is summed, copies are counted once."""

    def mlp(x: Any, up: Any, down: Any) -> Any:
        return F.linear(l2(torch.tanh(F.linear(x, up))), down)

    program = trace(mlp, inputs={"x": ("T", 5)}, weights={"up": (9, 5), "down": (7, 9)}, tp=tp, passes=[normalize])
    assert recognize_l2_norm(program) == 1
    done = check(shard_tensor_parallel, program, fires=2, tolerance=1e-13)
    assert "f64[T, 1] R = graphsrt.all_reduce(" in done.after and "graphsrt.l2_norm_of(" in done.after
