"""Models whose layers have keys and values of several shapes, or share those of earlier layers: one pool for each."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch

import graphsrt
from graphsrt import ops
from graphsrt.api import CompiledModel
from graphsrt.coverage import tiny_model
from graphsrt.coverage.architectures import model_class
from graphsrt.coverage.audit import audit
from graphsrt.coverage.tiny_config import SIZES, tiny_config
from graphsrt.program import arguments
from graphsrt.summary import kv_bytes
from graphsrt.verification import verify
from tests.support import tiny
from tests.support.captures import shared

FIELDS: dict[str, dict[str, Any]] = {
    # heads of 16 under the window and of 20 without; fewer KV heads without, whose values are their keys
    "gemma4_text": {
        "num_hidden_layers": 5, "num_kv_shared_layers": 2, "attention_k_eq_v": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] + ["full_attention"] * 2,
        "num_global_key_value_heads": 2, "global_head_dim": 20,
    },
    # twice as many KV heads under the window; keys of 16, values of 14
    "mimo_v2_flash": {"mlp_layer_types": ["dense"] * 3},
}  # fmt: skip


@cache
def net(model_type: str) -> Any:
    """A tiny model in float32, of 8 query and 4 KV heads."""
    config = type(tiny_config(model_type))(**{**_given(model_type), **FIELDS[model_type]})
    torch.manual_seed(0)
    model = model_class(model_type)(config).eval()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    tiny_model.randomize(model)
    return model


def _given(model_type: str) -> dict[str, Any]:
    fields = copy.deepcopy(tiny_config(model_type, SIZES["8/4"]).to_dict())
    return {name: value for name, value in fields.items() if name != "per_layer_config"}


def compiled(model_type: str, tp: int, **options: Any) -> CompiledModel:
    with shared():
        return graphsrt.compile(net(model_type), tp=tp, ranks="simulated", page_size=4, **options)


def follows(model_type: str, prompt: list[int], tokens: list[int]) -> bool:
    """Whether each token is transformers' greedy choice after those before it."""
    logits = tiny.eager_logits(net(model_type), [*prompt, *tokens])
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens


GREEDY = graphsrt.SamplingParams(max_new_tokens=9, ignore_eos=True)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("model_type", FIELDS)
def test_engine(model_type: str, tp: int) -> None:
    """Chunks beside decoding, more than the pool holds at a time, and a prefix that is there already."""
    head = tiny.tokens(9, seed=1)
    prompts = [head + tiny.tokens(4, seed=2), tiny.tokens(1, seed=3), tiny.tokens(14, seed=4), tiny.tokens(8, seed=5)]
    with compiled(model_type, tp, max_tokens_per_step=6, max_running=3, max_total_tokens=32) as model:
        for prompt, made in zip(prompts, model.generate(prompts, GREEDY)):
            assert follows(model_type, prompt, made.token_ids)
        engine = model.engine
        assert engine is not None and engine.metrics().num_preemptions > 0
        for seed in (6, 7):
            (again,) = model.generate([head + tiny.tokens(3, seed=seed)], GREEDY)
            assert follows(model_type, head + tiny.tokens(3, seed=seed), again.token_ids)
        assert again.num_cached_tokens == 8  # whole pages of what they have in common


def test_what_is_kept_of_gemma4() -> None:
    """Five layers: two kinds of heads, and the last two layers read what the two before them have written."""
    model = compiled("gemma4_text", 4, strict=True)
    program = model.program()
    found = audit(program, model.stages.programs[0][1])
    assert not found.faults and found.whole_bytes["bottlenecks"] == 4 * (2 * 5 + 5) * 6 * 96  # of each layer's inputs
    pools = {name: item.shape for name, item in program.kv_pools.items()}
    assert pools == {"kv_pool": (2, 2, "slots", 1, 16), "kv_pool_1": (1, 2, "slots", 1, 20)}
    written = [arguments(node) for node in program.calls(ops.rope_kv_write)]
    read = [arguments(node) for node in program.calls(ops.radix_attention)]
    places = [[(a["kv_pool"].name, a["layer_id"], a["kv_layer"]) for a in calls] for calls in (written, read)]
    assert places[0] == [("kv_pool", 0, 0), ("kv_pool_1", 1, 0), ("kv_pool", 2, 1)]
    assert places[1] == [*places[0], ("kv_pool_1", 3, 0), ("kv_pool_1", 4, 0)]
    layouts = [node.meta["placement"].layout for node in program.graph.nodes if node.name in pools]
    assert [layout.size for layout in layouts] == [4, 2]  # of these 2, two ranks each hold one
    assert kv_bytes(program) == 4 * 2 * (2 * 16 + 20)
    assert graphsrt.Program.from_text(str(program)).kv_pools == program.kv_pools


def test_verify(model_type: str = "mimo_v2_flash") -> None:
    """Every stage on three ranks, which divide neither 8 heads nor 4: node by node, in chunks and in single tokens."""
    with shared():
        report = verify(net(model_type), tp=3)
    report.raise_if_bad()
    assert report.stages[-1].num_compared > 50


def test_inductor() -> None:
    """The lowered engine, in a process: regions do not know of pools."""
    prompts = [tiny.tokens(13, seed=1), tiny.tokens(1, seed=2)]
    with shared(), graphsrt.compile(net("mimo_v2_flash"), max_tokens_per_step=11, max_running=3) as model:
        for ids, got in zip(prompts, model.logits(prompts)):
            # 24 bits, summed in another order than transformers does
            assert tiny.worst(got, tiny.eager_logits(net("mimo_v2_flash"), ids)) <= 1e-4
        for prompt, made in zip(prompts, model.generate(prompts, GREEDY)):
            assert follows("mimo_v2_flash", prompt, made.token_ids)
