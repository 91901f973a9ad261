"""recognize_gated_mlp: an activation times a second projection becomes one operator.

    mul(silu(gate), up) → glu(gate, up, act="silu")

Needs: normalize.  Leaves: ``graphsrt::glu`` for SiLU, exact and tanh GELU, and ReLU gates.
Numerics: exact.  Source: Shazeer 2020, "GLU Variants Improve Transformer".
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from graphsrt import ops
from graphsrt.passes.rewriter import Matched, rewrite


@rewrite(shapes={"gate": ("T", "F"), "up": ("T", "F")}, attributes={"act": "silu"})
def recognize_gated_mlp(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


@recognize_gated_mlp.also(act="gelu_tanh")
def gelu_tanh(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.gelu(gate, approximate="tanh") * up


@recognize_gated_mlp.also(act="gelu")
def gelu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.gelu(gate) * up


@recognize_gated_mlp.also(act="relu")
def relu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.relu(gate) * up


@recognize_gated_mlp.where
def _(gate: Matched, up: Matched) -> str | None:
    if gate.shape != up.shape:
        return f"gate {gate.shape} and up {up.shape} differ"
    return None


@recognize_gated_mlp.becomes
def _(gate: Any, up: Any, *, act: str) -> Any:
    return ops.glu(gate, up, act=act)
