"""recognize_l2_norm: a projection onto the unit sphere becomes one operator.

    to(mul(to(x, f32), rsqrt(add(sum(pow(to(x, f32), 2), [-1], True), eps))), bf16) → l2_norm(x, eps=…)

Needs: normalize.  Leaves: ``graphsrt::l2_norm`` wherever the structure and the behaviour agree with it; over a divided
width it becomes a distributed norm, as the others do.
Numerics: exact; what is found by structure is run against the operator, bitwise in the program's dtype.
Source: nGPT (Loshchilov et al. 2024), which keeps hidden states, queries and keys at norm 1.
"""

from __future__ import annotations

from typing import Any

import torch

from graphsrt import ops
from graphsrt.passes.rewriter import rewrite
from graphsrt.program import Program, aten


def _sums_of_squares(program: Program) -> int:
    """Reciprocal roots of a sum of squares and a number."""
    count = 0
    for node in program.calls(aten.rsqrt.default):
        total = node.all_input_nodes[0]
        summed = total.all_input_nodes[0] if total.target is aten.add.Tensor else None
        squared = summed.all_input_nodes[0] if summed is not None and summed.target is aten.sum.dim_IntList else None
        count += squared is not None and squared.target is aten.pow.Tensor_Scalar
    return count


@rewrite(shapes={"x": ("T", "E")}, named="module", confirm=True, expect=_sums_of_squares, required=False)
def recognize_l2_norm(x: torch.Tensor, *, eps: float) -> torch.Tensor:
    wide = x.to(torch.float32)
    return (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + eps)).to(x.dtype)


@recognize_l2_norm.becomes
def _(x: Any, *, eps: float) -> Any:
    return ops.l2_norm(x, eps=eps)
