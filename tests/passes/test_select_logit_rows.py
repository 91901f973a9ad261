"""select_logit_rows: the selection moves up through whatever treats rows alone."""

from __future__ import annotations

import torch

from graphsrt.passes.select_logit_rows import select_logit_rows
from graphsrt.simulate import load
from graphsrt.testing import RandomSource, check, checkpoint_shapes, example_inputs, result
from tests.support import captures, hand


def test_text() -> None:
    """Above all of the last layer that follows its attention; below what the attention gives, and the residual."""
    done = check(select_logit_rows, captures.before("select_logit_rows", "llama"), fires=1)
    assert done.before.splitlines()[-5].startswith("norm: f64[T, 48] R = graphsrt.rms_norm(layers.0.add_1, ")
    lines = [line.partition(" = ")[0] for line in done.after.splitlines()]
    assert lines[-18:-14] == [
        "layers.0.self_attn.view_3.rows: f64[R, 64/2] S(1)",
        "layers.0.self_attn.o_proj: f64[R, 48] P(sum)",
        "layers.0.self_attn.o_proj.all_reduce: f64[R, 48] R",
        "embed_tokens.all_reduce.rows: f64[R, 48] R",
    ]
    assert lines[-6:] == [
        "layers.0.add_1: f64[R, 48] R",
        "norm: f64[R, 48] R",
        "lm_head: f64[R, 67/2{0:34|34:67,~66:67}] S(1)",
        "lm_head.all_gather: f64[R, 68] R",
        "lm_head.vocabulary: f64[R, 67] R",
        "return lm_head.vocabulary",
    ]
    assert all("[T" not in line for line in lines[-18:])
    assert "aten.index_select(embed_tokens.all_reduce, 0, logit_rows)" in done.after


def test_soft_cap_of_logits() -> None:
    done = check(select_logit_rows, captures.before("select_logit_rows", "gemma2"), fires=1)
    assert done.after.count("[R, ") >= 6 and "aten.tanh" in done.after


def test_rows() -> None:
    """The rows asked for, in their order, are those of the whole result."""
    before = captures.before("select_logit_rows", "llama")
    after = captures.stage("select_logit_rows", "llama")
    weights = load(before, RandomSource(checkpoint_shapes(before)))
    inputs = example_inputs(after, 7)
    whole = result(before, inputs, weights)
    some = result(after, {**example_inputs(after, 7), "logit_rows": torch.tensor([1, 6])}, weights)
    assert torch.allclose(some, whole[[1, 6]], rtol=1e-12)


def test_nothing_paged() -> None:
    check(select_logit_rows, hand.attention(heads=2, kv_heads=2, tp=1), fires=0)
