"""recognize_rms_norm: every spelling, each with its cast order, and nothing that only looks like it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from graphsrt.passes.normalize import normalize
from graphsrt.passes.recognize_rms_norm import recognize_rms_norm
from graphsrt.program import Program
from graphsrt.testing import check, trace
from tests.support import captures

CASTS = 1e-5  # the model computes in float32 inside, the operator in float64: they differ by float32's rounding


def normed(x: Any, eps: float) -> Any:
    wide = x.to(torch.float32)
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def llama(x: Any, weight: Any) -> Any:
    return weight * normed(x, 3e-6).to(x.dtype)


def gemma(x: Any, weight: Any) -> Any:
    return (normed(x, 3e-6) * (1.0 + weight.float())).type_as(x)


def late_cast(x: Any, weight: Any) -> Any:
    return (weight.float() * normed(x, 3e-6)).to(x.dtype)


def made(function: Any, dtype: torch.dtype = torch.float64) -> Program:
    given: dict[str, Any] = {"inputs": {"x": ("T", 6)}, "weights": {"weight": (6,)}}
    return trace(function, dtype=dtype, passes=[normalize], **given)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("function", "attributes"),
    [
        (llama, 'cast="before_weight", offset=0.0'),
        (gemma, 'cast="after_weight", offset=1.0'),
        (late_cast, 'cast="after_weight", offset=0.0'),
    ],
)
def test_spellings(function: Any, attributes: str, dtype: torch.dtype) -> None:
    exact = 0.0 if dtype == torch.bfloat16 else CASTS
    done = check(recognize_rms_norm, made(function, dtype), fires=1, tolerance=exact)
    kind = "bf16" if dtype == torch.bfloat16 else "f64"
    assert "aten.rsqrt" in done.before
    assert re.sub(r"\bmul_\d|\bto_\d", "norm", done.after) == (
        f"norm: {kind}[T, 6] = graphsrt.rms_norm(x, weight, eps=3e-06, {attributes})\nreturn norm"
    )


def test_other_numbers() -> None:
    """An offset of 2 has the structure of Gemma's 1 + w; the numbers tell them apart."""

    def offset_two(x: Any, weight: Any) -> Any:
        return (normed(x, 3e-6) * (2.0 + weight.float())).type_as(x)

    check(recognize_rms_norm, made(offset_two), fires=0, near_miss="aten.add.Tensor has 2.0 where 1.0 is expected")


def test_mean_over_another_dimension() -> None:
    def across(x: Any, weight: Any) -> Any:
        wide = x.to(torch.float32)
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-2, keepdim=True) + 1e-6)).to(x.dtype)

    check(recognize_rms_norm, made(across), fires=0, near_miss="aten.mean.dim has")


def test_second_user() -> None:
    def leaks(x: Any, weight: Any) -> Any:
        inner = normed(x, 3e-6)
        return weight * inner.to(x.dtype) + inner.sum().to(x.dtype)

    check(recognize_rms_norm, made(leaks), fires=0, near_miss="has another user")


@pytest.mark.parametrize(("family", "norms"), [("llama", 3), ("qwen3", 5), ("gemma2", 5)])
def test_models(family: str, norms: int) -> None:
    """Norms of heads (Qwen3) and sandwich norms (Gemma-2) too."""
    before = captures.before("recognize_rms_norm", family)
    check(recognize_rms_norm, before, fires=norms, tolerance=CASTS, tokens=(3,))
