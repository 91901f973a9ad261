"""shard_tensor_parallel: every pattern as text, and numbers that show which rank was lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import graphsrt
from graphsrt import ops
from graphsrt.errors import CompileError
from graphsrt.passes.runner import run
from graphsrt.passes.shard_tensor_parallel import shard_tensor_parallel
from graphsrt.placement import Shard
from graphsrt.printer import recipe_text
from graphsrt.simulate import load
from graphsrt.testing import check, result, step_text, trace
from tests.support import captures, hand


def test_column_then_row() -> None:
    done = check(shard_tensor_parallel, hand.mlp(tp=4), fires=2)
    assert done.before == (
        "linear: f64[T, 8] = aten.linear(x, up, up_bias)\n"
        "relu: f64[T, 8] = aten.relu(linear)\n"
        "linear_1: f64[T, 6] = aten.linear(relu, down, down_bias)\n"
        "return linear_1"
    )
    assert done.after == (
        "linear: f64[T, 8/4] S(1) = aten.linear(x, up, up_bias)\n"
        "relu: f64[T, 8/4] S(1) = aten.relu(linear)\n"
        "linear_1: f64[T, 6] P(sum) = aten.linear(relu, down, down_bias)\n"
        'linear_1.all_reduce: f64[T, 6] R = graphsrt.all_reduce(linear_1, axis="tp")\n'
        "return linear_1.all_reduce"
    )
    recipes = {name: recipe_text(weight.recipe, short=True) for name, weight in done.program.weights.items()}
    assert recipes == {
        "up": 'shard(ckpt("up"), dim=0, layout=8/4)',
        "down": 'shard(ckpt("down"), dim=1, layout=8/4, unowned="zero")',
        "up_bias": 'shard(ckpt("up_bias"), dim=0, layout=8/4)',
        "down_bias": 'on_owner(ckpt("down_bias"))',
    }


@pytest.mark.parametrize("tp", [2, 3, 4, 8])
def test_which_rank_was_lost(tp: int) -> None:
    """Channel i of eight contributes 10^i: every digit of the sum is one, whatever rank holds the channel."""
    program = run(hand.mlp(width=1, bias=False, tp=tp), [shard_tensor_parallel]).final
    powers = 10.0 ** torch.arange(8)
    source = hand.Given(up=torch.ones(8, 1), down=powers[None])
    assert result(program, {"x": torch.ones(1, 1, dtype=torch.float64)}, load(program, source)).item() == 11111111


def test_row_bias_once() -> None:
    program = run(hand.mlp(width=1, tp=2), [shard_tensor_parallel]).final
    source = hand.Given(up=torch.zeros(8, 1), up_bias=torch.zeros(8), down=torch.zeros(1, 8), down_bias=torch.ones(1))
    assert result(program, {"x": torch.ones(1, 1, dtype=torch.float64)}, load(program, source)).item() == 1


def test_inner_width_not_divisible() -> None:
    done = check(shard_tensor_parallel, hand.mlp(inner=5, tp=4), fires=2)
    assert "linear: f64[T, 5/4{0:2|2:4|4:5,~4:5|~3:5}] S(1) = aten.linear(x, up, up_bias)" in done.after
    source = hand.Given(up=torch.ones(5, 6), up_bias=torch.zeros(5), down=torch.ones(6, 5), down_bias=torch.zeros(6))
    down = load(done.program, source)["down"]
    assert [part[0].tolist() for part in down] == [[1, 1], [1, 1], [1, 0], [0, 0]]  # each channel once


@pytest.mark.parametrize(("heads", "kv_heads", "tp"), [(4, 4, 2), (4, 2, 4), (3, 3, 2), (6, 2, 4), (5, 5, 4)])
def test_attention_by_heads(heads: int, kv_heads: int, tp: int) -> None:
    """Head sizes are found from the refusals of views and attention; nothing says them."""
    done = check(shard_tensor_parallel, hand.attention(heads=heads, kv_heads=kv_heads, tp=tp), fires=4)
    assert done.program.count("graphsrt::all_reduce") == 1 and done.program.count("graphsrt::all_gather") == 0


def test_more_ranks_than_kv_heads() -> None:
    done = check(shard_tensor_parallel, hand.attention(heads=4, kv_heads=2, tp=4))
    assert done.after == (
        "linear: f64[T, 8/4] S(1) = aten.linear(x, q)\n"
        "view: f64[T, 4/4, 2] S(1) = aten.view(linear, [-1, 1, 2])\n"
        "linear_1: f64[T, 4/4{0:2|~0:2|2:4|~2:4}] S(1) = aten.linear(x, k)\n"
        "view_1: f64[T, 2/4{0:1|~0:1|1:2|~1:2}, 2] S(1) = aten.view(linear_1, [-1, 1, 2])\n"
        "linear_2: f64[T, 4/4{0:2|~0:2|2:4|~2:4}] S(1) = aten.linear(x, v)\n"
        "view_2: f64[T, 2/4{0:1|~0:1|1:2|~1:2}, 2] S(1) = aten.view(linear_2, [-1, 1, 2])\n"
        "attention: f64[T, 4/4, 2] S(1) = graphsrt.attention(view, view_1, view_2, layer_id=0, scale=0.5)\n"
        "view_3: f64[T, 8/4] S(1) = aten.view(attention, [-1, 2])\n"
        "linear_3: f64[T, 6] P(sum) = aten.linear(view_3, o)\n"
        'linear_3.all_reduce: f64[T, 6] R = graphsrt.all_reduce(linear_3, axis="tp")\n'
        "return linear_3.all_reduce"
    )


def test_layers_that_share_keys_are_divided_together(tp: int = 2) -> None:
    """Six query heads and three KV heads: two attentions read the same keys, so both get the same heads of them."""

    def block(x: Any, q: Any, k: Any, v: Any, o: Any, q1: Any, o1: Any) -> Any:
        key, value = (F.linear(x, w).view(-1, 3, 4) for w in (k, v))
        for layer, (query, out) in enumerate([(q, o), (q1, o1)]):
            heads = ops.attention(F.linear(x, query).view(-1, 6, 4), key, value, layer_id=layer, scale=0.5)
            x = torch.tanh(x + F.linear(heads.view(-1, 24), out))
        return x

    weights = {"q": (24, 10), "k": (12, 10), "v": (12, 10), "o": (10, 24), "q1": (24, 10), "o1": (10, 24)}
    done = check(shard_tensor_parallel, trace(block, inputs={"x": ("T", 10)}, weights=weights, tp=tp), fires=6)
    assert not done.near_misses
    first, second = (line for line in done.after.splitlines() if "graphsrt.attention(" in line)
    assert first.partition("(view_2, ")[2].startswith("view, view_1, layer_id=0")
    assert ", view, view_1, layer_id=1" in second
    assert done.after.count("graphsrt.all_reduce(") == 2


def test_a_bottleneck_is_left_whole_and_is_no_failure() -> None:
    """10 → 2 → 10: it is gated by a value that others need whole; the sum that dividing it takes would cost more."""

    def block(x: Any, gates: Any, down: Any, up: Any, inner: Any, outer: Any) -> Any:
        gate = F.linear(x, gates)
        x = torch.tanh(x + F.linear(torch.relu(F.linear(x, inner)), outer))
        x = torch.tanh(x + F.linear(torch.relu(F.linear(x, down)) * gate, up))
        return x * gate.sum(-1, keepdim=True)

    for width, is_failure in [(2, False), (5, True)]:
        weights = {"gates": (width, 10), "down": (width, 10), "up": (10, width), "inner": (14, 10), "outer": (10, 14)}
        done = check(shard_tensor_parallel, trace(block, inputs={"x": ("T", 10)}, weights=weights, tp=2), fires=2)
        assert bool(done.near_misses) == is_failure


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize(("inner", "tp"), [(8, 2), (7, 3), (5, 4)])
def test_norm_over_a_divided_width(layer_norm: bool, inner: int, tp: int) -> None:
    """Between two linears a norm becomes a distributed one: its sums count each channel once, pads never."""

    def block(x: Any, a: Any, weight: Any, bias: Any, b: Any) -> Any:
        y = F.linear(x, a)
        if layer_norm:
            return F.linear(F.layer_norm(y, (inner,), weight, bias, 1e-5), b)
        return F.linear(ops.rms_norm(y, weight, eps=1e-6, cast="before_weight") + bias, b)

    weights = {"a": (inner, 6), "weight": (inner,), "bias": (inner,), "b": (6, inner)}
    done = check(shard_tensor_parallel, trace(block, inputs={"x": ("T", 6)}, weights=weights, tp=tp), fires=2)
    sums = 2 if layer_norm else 1
    assert done.program.count("graphsrt::all_reduce") == 1 + sums
    assert "f64[T, 1] R = graphsrt.all_reduce" in done.after
    assert ("owned" in done.after) == (inner % tp != 0)


def test_parallel_branches_are_summed_once() -> None:
    """(x + P1) + P2 becomes x + all_reduce(P1 + P2), whichever way the additions are written."""

    def block(x: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        return (x + F.linear(F.relu(F.linear(x, a)), b)) + 0.5 * F.linear(F.silu(F.linear(x, c)), d)

    weights = {"a": (8, 6), "b": (6, 8), "c": (10, 6), "d": (6, 10)}
    done = check(shard_tensor_parallel, trace(block, inputs={"x": ("T", 6)}, weights=weights, tp=2), fires=4)
    assert done.after.endswith(
        "add_1.partial: f64[T, 6] P(sum) = aten.add.Tensor(linear_1, mul)\n"
        'add_1.partial.all_reduce: f64[T, 6] R = graphsrt.all_reduce(add_1.partial, axis="tp")\n'
        "add_1: f64[T, 6] R = aten.add.Tensor(x, add_1.partial.all_reduce)\n"
        "return add_1"
    )


def test_one_key_head_for_all_ranks() -> None:
    """Multi-query attention: queries are divided, the one KV head is computed by every rank."""
    done = check(shard_tensor_parallel, hand.attention(heads=6, kv_heads=1, tp=3), fires=2)
    assert not done.near_misses
    assert done.program.count("graphsrt::all_reduce") == 1
    assert "[T, 2] R = aten.linear(x, k)" in done.after and "[T, 12/3] S(1) = aten.linear(x, q)" in done.after


def test_vocabulary_not_divisible_and_tied() -> None:
    """One tied matrix is divided once, for the embedding and the logits; 67 rows over 4 ranks are padded to 68."""
    done = check(shard_tensor_parallel, captures.before("shard_tensor_parallel", "llama_tied", tp=4), fires=9)
    tables = [name for name, weight in done.program.weights.items() if weight.placement == vocabulary(done.program)]
    assert tables == ["model.embed_tokens.weight"] and "lm_head.weight" not in done.program.weights
    lines = [line for line in done.after.splitlines() if "embed" in line.partition(":")[0] or "lm_head" in line]
    layout = "67/4{0:17|17:34|34:51|51:67,~66:67}"
    table = "model.embed_tokens.weight"
    assert lines == [
        f"embed_tokens: f64[T, 48] P(sum) = graphsrt.vocab_embedding(tokens, {table}, {table}.start)",
        'embed_tokens.all_reduce: f64[T, 48] R = graphsrt.all_reduce(embed_tokens, axis="tp")',
        f"lm_head: f64[T, {layout}] S(1) = aten.linear(norm, {table})",
        'lm_head.all_gather: f64[T, 68] R = graphsrt.all_gather(lm_head, dim=1, axis="tp", size=4)',
        "lm_head.vocabulary: f64[T, 67] R = aten.slice.Tensor(lm_head.all_gather, 1, 0, 67)",
        "return lm_head.vocabulary",
    ]


def vocabulary(program: graphsrt.Program) -> Shard:
    place = program.weights["model.embed_tokens.weight"].placement
    assert isinstance(place, Shard)
    return place


def test_models() -> None:
    """Two reductions a layer and one for the embedding; every linear and embedding divided."""
    for family, fires in (("phi3", 9), ("gemma2", 9), ("qwen3", 9)):
        program = captures.before("shard_tensor_parallel", family, tp=2)
        done = check(shard_tensor_parallel, program, fires=fires, tokens=(3,))
        assert done.program.count("graphsrt::all_reduce") == 3


def test_residual_stream_is_left_whole() -> None:
    """A residual between two linears: neither can be divided, and the report says why."""

    def block(x: Any, a: Any, norm: Any, b: Any) -> Any:
        y = x + F.linear(x, a)
        return y + F.linear(ops.rms_norm(y, norm, eps=1e-6, cast="before_weight"), b)

    weights = {"a": (6, 6), "norm": (6,), "b": (6, 6)}
    program = trace(block, inputs={"x": ("T", 6)}, weights=weights, tp=2)
    misses: list = []
    copy = program.copy()
    assert shard_tensor_parallel(copy, near_misses=misses) == 0
    assert [(m.node, m.reason) for m in misses] == [
        ("linear", "x: add needs the whole value"),
        ("linear_1", "add: add_1 needs the whole value"),
    ]
    assert "S(" not in step_text(copy) and "P(" not in step_text(copy)
    copy = program.copy()
    with pytest.raises(CompileError, match="fired nowhere"):
        run(copy, [shard_tensor_parallel])


def test_strict() -> None:
    """A linear between the MLP's two: one of the three stays whole; strict makes that an error that names it."""

    def block(x: Any, up: Any, middle: Any, down: Any, norm: Any) -> Any:
        inner = F.linear(F.relu(F.linear(F.relu(F.linear(x, up)), middle)), down)
        return ops.rms_norm(inner, norm, eps=1e-6, cast="before_weight")

    weights = {"up": (8, 6), "middle": (4, 8), "down": (6, 4), "norm": (6,)}
    program = trace(block, inputs={"x": ("T", 6)}, weights=weights, tp=2)
    done = check(shard_tensor_parallel, program, fires=2, near_miss="its input is sharded already")
    assert done.near_misses and done.program.count("graphsrt::all_reduce") == 1
    with pytest.raises(CompileError, match="1 linears stay whole on every rank") as caught:
        run(program.copy(), [shard_tensor_parallel], strict=True)
    assert done.near_misses[0].node in str(caught.value) and done.near_misses[0].reason in str(caught.value)


def test_second_user_is_refused() -> None:
    """A sharded value that something else needs whole: no division, and the reason names the user."""

    def block(x: Any, up: Any, down: Any, norm: Any) -> Any:
        inner = F.relu(F.linear(x, up))
        total = F.linear(inner, down) + inner.sum(-1, keepdim=True)
        return ops.rms_norm(total, norm, eps=1e-6, cast="before_weight")

    program = trace(block, inputs={"x": ("T", 6)}, weights={"up": (8, 6), "down": (6, 8), "norm": (6,)}, tp=2)
    misses: list = []
    assert shard_tensor_parallel(program, near_misses=misses) == 0
    assert ("linear_1", "relu: sum_1 needs the whole value") in [(m.node, m.reason) for m in misses]


def test_one_rank_is_left_alone() -> None:
    check(shard_tensor_parallel, hand.mlp(tp=1), fires=0)
