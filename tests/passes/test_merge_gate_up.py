"""merge_gate_up: the two projections of a gated MLP become one matrix, gate first, on each rank."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from graphsrt import ops
from graphsrt.passes.merge_gate_up import merge_gate_up
from graphsrt.printer import recipe_text
from graphsrt.testing import check, trace
from tests.support import captures


def mlp(x: Any, gate: Any, up: Any) -> Any:
    return ops.glu(F.linear(x, gate), F.linear(x, up), act="silu")


def test_text() -> None:
    program = trace(mlp, inputs={"x": ("T", 6)}, weights={"gate": (4, 6), "up": (4, 6)})
    done = check(merge_gate_up, program, fires=1)
    assert len(done.program.weights) == 1
    lines = done.after.splitlines()
    assert lines[1:] == [
        "linear: f64[T, 4] = aten.slice.Tensor(gate_up_proj, 1, 0, 4)",
        "linear_1: f64[T, 4] = aten.slice.Tensor(gate_up_proj, 1, 4, 8)",
        'glu: f64[T, 4] = graphsrt.glu(linear, linear_1, act="silu")',
        "return glu",
    ]
    assert lines[0].startswith("gate_up_proj: f64[T, 8] = aten.linear(x, ")


def test_padded_shards() -> None:
    """41 channels over 2 ranks: each rank's gate, with its pad, then each rank's up."""
    done = check(merge_gate_up, captures.before("merge_gate_up", "llama"), fires=1)
    fused = "f64[T, 82/2{0:21,41:62|21:41,~40:41,62:82,~81:82}] S(1)"
    assert f"layers.0.mlp.gate_up_proj: {fused} = aten.linear(" in done.after


def test_split_and_merged_again() -> None:
    """What the model fuses is put together again, from the same tensor."""
    done = check(merge_gate_up, captures.before("merge_gate_up", "phi3"), fires=1)
    (recipe,) = [w.recipe for name, w in done.program.weights.items() if name.endswith("mlp.gate_up_proj.weight")]
    assert recipe_text(recipe, short=True).count('ckpt("model.layers.0.mlp.gate_up_proj.weight")') == 2


def test_one_has_a_bias() -> None:
    def biased(x: Any, gate: Any, up: Any, bias: Any) -> Any:
        return ops.glu(F.linear(x, gate), F.linear(x, up, bias), act="silu")

    weights = {"gate": (4, 6), "up": (4, 6), "bias": (4,)}
    program = trace(biased, inputs={"x": ("T", 6)}, weights=weights)
    check(merge_gate_up, program, fires=0, near_miss="linear_1 and linear do not both have a bias")


def test_not_a_linear() -> None:
    def scaled(x: Any, gate: Any, up: Any) -> Any:
        return ops.glu(F.linear(x, gate) * 2.0, F.linear(x, up), act="silu")

    program = trace(scaled, inputs={"x": ("T", 6)}, weights={"gate": (4, 6), "up": (4, 6)})
    check(merge_gate_up, program, fires=0, near_miss="gate or up is not a linear itself")
