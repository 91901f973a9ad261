"""merge_qkv: three projections of one input become one matrix, each rank keeping its own part of all three."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F

from graphsrt import ops
from graphsrt.passes.merge_qkv import merge_qkv
from graphsrt.printer import recipe_text
from graphsrt.testing import check, trace
from tests.support import captures


def test_text() -> None:
    done = check(merge_qkv, captures.before("merge_qkv", "llama"), fires=1)
    at, fused = "layers.0.self_attn", "128/2{0:32,64:80,96:112|32:64,80:96,112:128}"
    lines = done.after.splitlines()
    assert lines[3:7] == [
        f"{at}.qkv_proj: f64[T, {fused}] S(1) = aten.linear(layers.0.input_layernorm, model.{at}.qkv_proj.weight, "
        f"model.{at}.qkv_proj.bias)",
        f"{at}.q_proj: f64[T, 64/2] S(1) = aten.slice.Tensor({at}.qkv_proj, 1, 0, 32)",
        f"{at}.k_proj: f64[T, 32/2] S(1) = aten.slice.Tensor({at}.qkv_proj, 1, 32, 48)",
        f"{at}.v_proj: f64[T, 32/2] S(1) = aten.slice.Tensor({at}.qkv_proj, 1, 48, 64)",
    ]
    parts = ", ".join(
        f'shard(ckpt("model.{at}.{x}_proj.bias"), dim=0, layout={n}/2)' for x, n in (("q", 64), ("k", 32), ("v", 32))
    )
    bias = done.program.weights[f"model.{at}.qkv_proj.bias"]
    assert recipe_text(bias.recipe, short=True) == f"cat([{parts}], dim=0)"
    assert f"model.{at}.q_proj.weight" not in done.program.weights


@pytest.mark.parametrize("tp", [1, 4])
def test_one_rank_and_replicated_heads(tp: int) -> None:
    check(merge_qkv, captures.before("merge_qkv", "qwen2", tp=tp), fires=1)


def test_split_and_merged_again() -> None:
    """What the model fuses is put together again, and reads the same rows of the same tensor."""
    done = check(merge_qkv, captures.before("merge_qkv", "phi3"), fires=1)
    (weight,) = [w for name, w in done.program.weights.items() if "layers.0.self_attn.qkv_proj" in name]
    text = recipe_text(weight.recipe, short=True)
    assert text.count('ckpt("model.layers.0.self_attn.qkv_proj.weight")') == 3 and text.startswith("cat([shard(take(")


def test_two_inputs() -> None:
    """Cross attention: keys come from another value than queries."""

    def block(x: Any, y: Any, q: Any, k: Any, v: Any) -> Any:
        parts = [F.linear(z, w).view(-1, 2, 3) for z, w in ((x, q), (y, k), (y, v))]
        return ops.attention(*parts, layer_id=0, scale=0.5)

    weights = {"q": (6, 5), "k": (6, 5), "v": (6, 5)}
    program = trace(block, inputs={"x": ("T", 5), "y": ("T", 5)}, weights=weights)
    check(merge_qkv, program, fires=0, near_miss="linear_1 has another input than linear")


def test_one_weight_for_two() -> None:
    """Keys and values from one matrix: it cannot be moved into the merged one, since each would need its own copy."""

    def block(x: Any, q: Any, k: Any) -> Any:
        parts = [F.linear(x, w).view(-1, 2, 3) for w in (q, k, k)]
        return ops.attention(*parts, layer_id=0, scale=0.5)

    program = trace(block, inputs={"x": ("T", 5)}, weights={"q": (6, 5), "k": (6, 5)})
    check(merge_qkv, program, fires=0, near_miss="the weight of linear_1 is used elsewhere too")


def test_a_layer_that_reads_the_keys_of_an_earlier_one() -> None:
    """Its q has another input; the projections of the layer that makes the keys merge all the same."""

    def block(x: Any, q: Any, k: Any, v: Any, q1: Any) -> Any:
        parts = [F.linear(x, w).view(-1, n, 4) for w, n in ((q, 6), (k, 3), (v, 3))]
        first = ops.attention(*parts, layer_id=0, scale=0.5).view(-1, 24)
        return ops.attention(F.linear(first, q1).view(-1, 6, 4), *parts[1:], layer_id=1, scale=0.5)

    weights = {"q": (24, 10), "k": (12, 10), "v": (12, 10), "q1": (24, 24)}
    done = check(merge_qkv, trace(block, inputs={"x": ("T", 10)}, weights=weights), fires=1)
    assert not done.near_misses and "q1" in done.after
