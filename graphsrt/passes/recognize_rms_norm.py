"""recognize_rms_norm: the many spellings of RMSNorm become one operator.

    mul(weight, to(mul(to(x, f32), rsqrt(add(mean(pow(to(x, f32), 2), [-1], True), eps))), bf16))
    → rms_norm(x, weight, eps=…, cast="before_weight")

Needs: normalize.  Leaves: ``graphsrt::rms_norm`` wherever the structure and the behaviour agree with it.
Numerics: exact; what is found by structure is run against the operator, bitwise in the program's dtype.
Source: Zhang & Sennrich 2019; the two cast orders are those of LLaMA and Gemma.
"""

from __future__ import annotations

from typing import Any

import torch

from graphsrt import ops
from graphsrt.passes.rewriter import rewrite
from graphsrt.program import Program, aten


def _root_mean_squares(program: Program) -> int:
    """Reciprocal roots of a mean of squares; a layer norm's variance, of ``x - mean``, is something else."""
    count = 0
    for node in program.calls(aten.rsqrt.default):
        chain = [node.all_input_nodes[0]]
        while chain[-1].target in (aten.add.Tensor, aten.mean.dim):
            chain.append(chain[-1].all_input_nodes[0])
        squared = chain[-1].all_input_nodes[0] if chain[-1].target is aten.pow.Tensor_Scalar else None
        count += squared is not None and squared.target is not aten.sub.Tensor
    return count


def _normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.to(torch.float32)
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


@rewrite(
    shapes={"x": ("T", "E"), "weight": ("E",)},
    attributes={"cast": "before_weight", "offset": 0.0},
    named="module",
    confirm=True,
    expect=_root_mean_squares,
    required=False,
)
def recognize_rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    return weight * _normed(x, eps).to(x.dtype)


@recognize_rms_norm.also(cast="after_weight", offset=1.0)
def plus_one_cast_after_weight(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    return (_normed(x, eps) * (1.0 + weight.float())).type_as(x)


@recognize_rms_norm.also(cast="after_weight", offset=0.0)
def cast_after_weight(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    return (_normed(x, eps) * weight.float()).type_as(x)


@recognize_rms_norm.also(cast="after_weight", offset=0.0)
def cast_after_plain_weight(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    return (weight * _normed(x, eps)).to(x.dtype)


@recognize_rms_norm.becomes
def _(x: Any, weight: Any, *, eps: float, cast: str, offset: float) -> Any:
    return ops.rms_norm(x, weight, eps=eps, cast=cast, offset=offset)
