"""verify passes right pipelines at 1e-14, and names the first wrong node of wrong ones."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.fx as fx
from transformers import AutoConfig, LlamaConfig, PretrainedConfig

from graphsrt import ops
from graphsrt.capture import capture, meta_model
from graphsrt.errors import CompileError
from graphsrt.miniature import miniature
from graphsrt.passes import PIPELINE as PASSES
from graphsrt.passes.runner import Stages, run
from graphsrt.placement import Layout, Partial, R, Run, Shard
from graphsrt.program import Program, arguments, aten
from graphsrt.verification import TOLERANCE, VerifyReport, gather, promoted, verify, verify_stages
from tests.support import tiny

PIPELINE: list[Any] = list(PASSES)
TOKENS = (1, 3, 7)


@cache
def _stages(family: str = "llama", heads: int = 3, kv_heads: int = 1, tp: int = 2) -> Stages:
    config = tiny.config(family, heads, kv_heads, layers=1)
    model = meta_model(config, tiny.FAMILIES[family][1], torch.float64)
    program = capture(model, context_length=tiny.CONTEXT)
    program.mesh = {"tp": tp}
    return run(program, PIPELINE)


def _after(wrong: object, name: str, **model: object) -> VerifyReport:
    """The report of the pipeline up to ``name`` and then a wrong pass."""
    stages = _stages(**model)  # type: ignore[arg-type]
    names = stages.names[: stages.names.index(name) + 1]
    program = stages.after(name).copy()
    wrong(program)  # type: ignore[operator]
    program.remove_dead()
    program.infer()
    # the stage before, and the whole program to compare with
    chosen = [s for s in stages.programs if s[0] in (names[0], "recognize_gated_mlp", name) and s[0] in names]
    return verify_stages([*chosen, ("wrong", program)], tokens=TOKENS)


def _first(program: Program, target: object) -> fx.Node:
    return program.calls(target)[0]  # type: ignore[arg-type]


def swap_q_and_k(program: Program) -> None:
    node = _first(program, ops.attention)
    q, k, v = node.args
    node.args = (k, q, v)


def drop_collective(program: Program) -> None:
    node = program.calls(ops.all_reduce)[1]
    node.replace_all_uses_with(node.args[0], propagate_meta=False)  # type: ignore[arg-type]
    program.graph.erase_node(node)


def forget_bias(program: Program) -> None:
    node = next(n for n in program.calls(aten.linear.default) if arguments(n)["bias"] is not None)
    node.args = node.args[:2]


def double_residual(program: Program) -> None:
    node = _first(program, aten.add.Tensor)
    node.kwargs = {**node.kwargs, "alpha": 2}


def wrong_layer(program: Program) -> None:
    node = program.calls(ops.radix_attention)[-1]
    # as good as right within a step; seen because another layer's keys are then overwritten
    node.kwargs = {**node.kwargs, "layer_id": 0}


def wrong_scale(program: Program) -> None:
    node = _first(program, ops.attention)
    node.kwargs = {**node.kwargs, "scale": 2 * node.kwargs["scale"]}  # type: ignore[operator]


def share_eps(program: Program) -> None:
    node = _first(program, ops.rms_norm)
    node.kwargs = {**node.kwargs, "eps": 1e-3}


WRONG = [
    (swap_q_and_k, "recognize_gated_mlp", "layers.0.self_attn.attention"),
    (wrong_scale, "recognize_gated_mlp", "layers.0.self_attn.attention"),
    (double_residual, "recognize_gated_mlp", "layers.0.add"),
    (share_eps, "recognize_gated_mlp", "layers.0.input_layernorm"),
    (forget_bias, "shard_tensor_parallel", "layers.0.self_attn.q_proj"),
    (wrong_scale, "shard_tensor_parallel", "layers.0.self_attn.attention"),
    (double_residual, "merge_gate_up", "layers.0.add"),
]


@pytest.mark.parametrize("wrong,stage,node", WRONG, ids=lambda x: getattr(x, "__name__", x))
def test_wrong_pass_is_named(wrong: object, stage: str, node: str) -> None:
    heads = {"heads": 2, "kv_heads": 2} if wrong is swap_q_and_k else {}  # as many keys as queries
    report = _after(wrong, stage, **heads)
    assert [s.ok for s in report.stages] == [True] * (len(report.stages) - 1) + [False], str(report)
    assert report.stages[-1].first_bad_node == node
    with pytest.raises(CompileError, match=r"(?s)wrong changes what the program computes.*" + node):
        report.raise_if_bad()
    assert "wrong" in str(report) and node in str(report)


def test_dropped_collective_shows_on_ranks() -> None:
    report = _after(drop_collective, "shard_tensor_parallel")
    assert not report.ok
    assert "rank 1 and rank 0 hold other numbers" in str(report.stages[-1].reason)


def test_pages_of_another_layer() -> None:
    config = tiny.config("llama", 2, 1, layers=2)
    program = capture(meta_model(config, tiny.FAMILIES["llama"][1], torch.float64), context_length=tiny.CONTEXT)
    program.mesh = {"tp": 2}
    stages = run(program, PIPELINE[: [f.__name__ for f in PIPELINE].index("page_attention") + 1])
    final = stages.final.copy()
    wrong_layer(final)
    report = verify_stages([stages.programs[0], stages.programs[-1], ("wrong", final)], tokens=(7,))
    assert [s.ok for s in report.stages] == [True, True, False], str(report)
    assert "step 1" in str(report.stages[-1].reason)


@pytest.mark.parametrize("family,heads,kv_heads,tp", [("gemma2", 3, 1, 2), ("llama_tied", 2, 2, 3), ("qwen2", 5, 1, 4)])
def test_pipeline_agrees(family: str, heads: int, kv_heads: int, tp: int) -> None:
    report = verify_stages(_stages(family, heads, kv_heads, tp).programs, tokens=(1, tp, 9))
    assert report.ok, str(report)
    assert max(stage.max_error for stage in report.stages) < 1e-3 * TOLERANCE
    assert all(stage.num_compared > 10 for stage in report.stages[1:])


def test_large_config_is_verified_as_a_miniature() -> None:
    config = LlamaConfig(
        hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128,
        num_key_value_heads=8, vocab_size=128256, rope_parameters={
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
        },
    )  # fmt: skip
    small = miniature(config, 16)
    assert (small.num_attention_heads, small.num_key_value_heads, small.num_hidden_layers) == (128, 8, 2)
    assert small.vocab_size % 16 == 0 and small.vocab_size < 200
    assert len({small.vocab_size, small.hidden_size, small.intermediate_size}) == 3
    wanted = [f for f in PIPELINE if f.__name__ in (
        "normalize", "recognize_rms_norm", "recognize_rope", "recognize_gated_mlp", "shard_tensor_parallel",
    )]  # fmt: skip
    assert config.num_hidden_layers == 126
    small.num_attention_heads = 16  # keeps this test short; the head counts above are what matters
    small.num_key_value_heads, small.hidden_size = 8, 128
    report = verify(small, 4, passes=wanted)
    assert report.ok, str(report)


def test_miniature_keeps_one_layer_of_each_kind() -> None:
    config: PretrainedConfig = tiny.config("gemma2", 4, 2, layers=8)
    small = miniature(config, 2)
    assert small.layer_types == ["sliding_attention", "full_attention"] and small.num_hidden_layers == 2
    assert small.tie_word_embeddings == config.tie_word_embeddings
    assert small.vocab_size % 2 == config.vocab_size % 2
    uniform = miniature(tiny.config("llama", 4, 2, layers=8), 2)
    assert uniform.num_hidden_layers == 2


def test_miniature_of_latent_attention() -> None:
    """DeepSeek-V3: latents and parts of heads shrink, all to different sizes; heads, experts and the first layers of
    each kind stay."""
    config = AutoConfig.for_model("deepseek_v3")
    small = miniature(config, 8)
    kept = ("num_attention_heads", "n_routed_experts", "num_experts_per_tok", "n_group", "topk_group")
    assert [getattr(small, name) for name in kept] == [getattr(config, name) for name in kept]
    sizes = [small.qk_rope_head_dim, small.qk_nope_head_dim, small.v_head_dim, small.qk_head_dim, small.kv_lora_rank,
             small.q_lora_rank, small.moe_intermediate_size, small.intermediate_size, small.hidden_size]  # fmt: skip
    assert len(set(sizes)) == len(sizes) and max(sizes[:-1]) < 100
    assert small.head_dim == small.qk_rope_head_dim and small.first_k_dense_replace == 1 < small.num_hidden_layers
    small.num_attention_heads = small.num_key_value_heads = 6  # keeps this test short, as do fewer experts
    small.n_routed_experts, small.n_group, small.topk_group, small.num_experts_per_tok = 10, 2, 1, 3
    small.hidden_size = 46
    report = verify(small, 4)
    assert report.ok, str(report)


def test_half_precision_programs_are_compared_in_float64() -> None:
    config = tiny.config("llama", 2, 1, layers=1)
    program = capture(meta_model(config, tiny.FAMILIES["llama"][1], torch.bfloat16), context_length=tiny.CONTEXT)
    program.mesh = {"tp": 2}
    stages = run(program, PIPELINE)
    assert promoted(stages.final).output.meta["val"].dtype == torch.float64
    assert stages.final.output.meta["val"].dtype != torch.float64
    report = verify_stages(stages.programs, tokens=(3,))
    assert report.ok and max(stage.max_error for stage in report.stages) < 1e-3 * TOLERANCE, str(report)


def test_gather() -> None:
    layout = Layout.of([[Run(2, 1), Run(0, 1)], [Run(1, 1), Run(0, 1, owned=False)]])
    values = [torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 9.0]])]
    assert gather(values, Shard(1, layout)).tolist() == [[0.0, 1.0, 2.0]]
    assert gather(values, Partial("sum")).tolist() == [[3.0, 9.0]]
    assert gather(values, Partial("max")).tolist() == [[2.0, 9.0]]
    assert gather(values[:1], R) is values[0]


def test_nan_is_never_right() -> None:
    def spoil(program: Program) -> None:
        node = program.output
        for user in list(node.users):
            if user.op == "output":
                bad = program.call(aten.sqrt.default, program.call(aten.sub.Tensor, node, 1e9, name="low"), name="bad")
                user.replace_input_with(node, bad)

    report = _after(spoil, "recognize_gated_mlp")
    assert not report.ok and "NaN" in str(report.stages[-1].reason)
