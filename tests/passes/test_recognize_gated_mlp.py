"""recognize_gated_mlp: an activation times a second projection, in either order, for four activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from graphsrt.passes.recognize_gated_mlp import recognize_gated_mlp
from graphsrt.testing import check, trace

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
}
SHAPES: dict[str, Any] = {"inputs": {"gate": ("T", 6), "up": ("T", 6)}}


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("swapped", [False, True])
def test_text(act: str, swapped: bool) -> None:
    def block(gate: Any, up: Any) -> Any:
        return up * ACTIVATIONS[act](gate) if swapped else ACTIVATIONS[act](gate) * up

    done = check(recognize_gated_mlp, trace(block, **SHAPES), fires=1, tolerance=0)
    name = act.partition("_")[0]
    assert done.before.splitlines()[0].startswith(f"{name}: f64[T, 6] = aten.{name}(gate")
    assert done.after == f'glu: f64[T, 6] = graphsrt.glu(gate, up, act="{act}")\nreturn glu'


def test_shapes_differ() -> None:
    shapes: dict[str, Any] = {"inputs": {"gate": ("T", 6), "up": ("T", 1)}}
    program = trace(lambda gate, up: F.silu(gate) * up, **shapes)
    check(recognize_gated_mlp, program, fires=0, near_miss="gate ('T', 6) and up ('T', 1) differ")


def test_second_user() -> None:
    def block(gate: Any, up: Any) -> Any:
        active = F.silu(gate)
        return active * up + active

    check(recognize_gated_mlp, trace(block, **SHAPES), fires=0, near_miss="silu has another user: add")


def test_other_activation() -> None:
    check(recognize_gated_mlp, trace(lambda gate, up: torch.tanh(gate) * up, **SHAPES), fires=0)
