import pytest
import torch
from fold_norm import fold_norm_weight
from torch.nn.functional import linear
from transformers import Gemma2Config, LlamaConfig

import graphsrt
from graphsrt import ops
from graphsrt.passes import PIPELINE, insert
from graphsrt.testing import check, trace

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 48, "max_position_embeddings": 64,
}  # fmt: skip


def two_linears(x, norm, gate, up):
    h = ops.rms_norm(x, norm, eps=1e-5, cast="before_weight")
    return ops.glu(linear(h, gate), linear(h, up), act="silu")


def small(function, tp=1, **weights):
    shapes = {"norm": (34,), "gate": (46, 34), "up": (46, 34), **weights}
    return trace(function, tp=tp, inputs={"x": ("T", 34)}, weights=shapes)


def test_fires():
    done = check(fold_norm_weight, small(two_linears), fires=1)
    assert "rms_norm(x, norm, " in done.before
    assert "rms_norm(x, ones_34, " in done.after
    assert 'gate: f64[46, 34] = mul(ckpt("gate"), ckpt("norm"), dim=1)' in str(done.program)
    assert "ones_34: f64[34] = fill([34], 1.0)" in str(done.program)


def test_near_miss_another_user():
    def and_a_sum(x, norm, gate, up):
        h = ops.rms_norm(x, norm, eps=1e-5, cast="before_weight")
        return linear(linear(h, gate), up) + h

    program = small(and_a_sum, up=(34, 46))
    check(fold_norm_weight, program, fires=0, near_miss="add reads the norm and is no linear")


def test_near_miss_offset():
    def gemma(x, norm, gate, up):
        h = ops.rms_norm(x, norm, eps=1e-6, cast="after_weight", offset=1.0)
        return ops.glu(linear(h, gate), linear(h, up), act="silu")

    check(fold_norm_weight, small(gemma), fires=0, near_miss="the norm adds 1.0 to its weight")


@pytest.mark.parametrize("tied", [False, True])
def test_in_a_model(tied):
    """All norms of a Llama; with a head that is the embedding, all but the last."""
    config = LlamaConfig(**SIZES, tie_word_embeddings=tied)
    pipeline = insert(PIPELINE, fold_norm_weight)
    program = graphsrt.trace(config, tp=2, dtype=torch.bfloat16, passes=pipeline).program()
    report = next(report for report in program.history if report.name == "fold_norm_weight")
    assert report.fired == (4 if tied else 5)
    assert [miss.node for miss in report.near_misses] == (["norm"] if tied else [])
    assert program.count("graphsrt::all_reduce_add_rms_norm") == 4  # as without the pass
    if not tied:
        this_far = pipeline[: pipeline.index(fold_norm_weight) + 1]
        graphsrt.verify(config, tp=2, passes=this_far).raise_if_bad()


def test_in_a_model_without_any():
    program = graphsrt.trace(
        Gemma2Config(**SIZES), dtype=torch.bfloat16, passes=insert(PIPELINE, fold_norm_weight)
    ).program()
    report = next(report for report in program.history if report.name == "fold_norm_weight")
    assert report.fired == 0 and "adds 1.0" in report.near_misses[0].reason
