"""fuse_add_rms_norm: a residual addition and the norm that reads it become one operator with two results.

    h = add(residual, x); n = rms_norm(h, weight)  →  n, h = add_rms_norm(x, residual, weight)

Needs: recognize_rms_norm.  Leaves: ``graphsrt::add_rms_norm`` where x, the residual and the norm have one shape and
dtype; a norm of a value that is not such a sum (the first layer's) stays, and a near miss says what it norms.
Numerics: exact; the sum is rounded to its dtype before the norm, as the two operators do.
Source: ours; the fused kernel is common to vLLM, SGLang and TensorRT-LLM.
"""

from __future__ import annotations

from typing import Any

import torch

from graphsrt import ops
from graphsrt.passes.norm_forms import FORMS, residual_sum, taken, why_no_sum
from graphsrt.passes.rewriter import Matched, rewrite
from graphsrt.program import Program

LARGER = tuple(t for t, form in FORMS.items() if form.kind == "rms_norm" and form.adds and t is not ops.add_rms_norm)
"""What this fusion is a part of."""


def _sums_normed(program: Program) -> int:
    """Norms whose input is the sum of two values of their own shape."""
    count = 0
    for norm in program.calls(ops.rms_norm):
        total = residual_sum(norm)
        if total is not None:
            count += all(program.shape(a) == program.shape(norm) for a in total.all_input_nodes)
    return count


@rewrite(shapes={"x": ("T", "E"), "residual": ("T", "E"), "weight": ("E",)}, expect=_sums_normed)
def fuse_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float, cast: str, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = residual + x
    return ops.rms_norm(total, weight, eps=eps, cast=cast, offset=offset), total


@fuse_add_rms_norm.where
def _(x: Matched, residual: Matched) -> str | None:
    if x.shape != residual.shape:
        return f"x {x.shape} and residual {residual.shape} differ"
    if x.dtype != residual.dtype:
        return f"x is {x.dtype}, the residual {residual.dtype}"
    return None


@fuse_add_rms_norm.becomes
def _(x: Any, residual: Any, weight: Any, *, eps: float, cast: str, offset: float) -> Any:
    pair = ops.add_rms_norm(x, residual, weight, eps=eps, cast=cast, offset=offset)
    return pair[0], pair[1]


@fuse_add_rms_norm.otherwise(ops.rms_norm, *LARGER)
def _(norm: Matched) -> str | None:
    return why_no_sum(norm.node) if norm.node.target is ops.rms_norm else taken(norm.node)
