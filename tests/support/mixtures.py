"""Tiny mixtures of experts in float64, random as those of ``tiny`` are; no two sizes are alike."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Dots1Config,
    GptOssConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

import graphsrt
from graphsrt.api import CompiledModel
from tests.support import tiny
from tests.support.captures import shared

EXPERTS, WIDTH, INNER = 6, 48, 13
MIXTURES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "mixtral": (MixtralConfig, {"intermediate_size": INNER, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2_moe": (  # a shared expert with a gate; routing weights are not normalised
        Qwen2MoeConfig,
        {
            "num_experts": EXPERTS, "num_experts_per_tok": 3, "moe_intermediate_size": INNER,
            "shared_expert_intermediate_size": 19, "head_dim": None,
        },
    ),
    "qwen3_moe": (Qwen3MoeConfig, {"num_experts": 7, "num_experts_per_tok": 1, "moe_intermediate_size": INNER}),
    "gpt_oss": (  # interleaved, transposed, biases, a limit
        GptOssConfig,
        {
            "intermediate_size": INNER, "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"], "swiglu_limit": 1.5,
        },
    ),
    "dots1": (  # groups of experts, a correction bias, a shared expert, a dense layer first
        Dots1Config,
        {
            "n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INNER, "n_group": 3,
            "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7,
        },
    ),
}  # fmt: skip
"""Name -> config class and what the family adds."""


def config(family: str, **extra: Any) -> PretrainedConfig:
    """The config of a tiny model; ``extra`` overrides anything."""
    config_class, own = MIXTURES[family]
    sizes = {
        "vocab_size": tiny.VOCAB, "hidden_size": WIDTH, "intermediate_size": 29, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": tiny.CONTEXT,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    given = {**sizes, **own, **extra}
    return config_class(**{name: value for name, value in given.items() if value is not None})


def build(family: str, **extra: Any) -> PreTrainedModel:
    """A new model in float64 whose experts run as transformers' own loop over them."""
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config(family, **extra)).double().eval()
    made.set_attn_implementation("eager")
    made.set_experts_implementation("eager")
    tiny.randomize(made)
    for name, buffer in made.named_buffers():
        if name.endswith("bias"):
            buffer.copy_(torch.linspace(-0.2, 0.3, buffer.numel()).reshape(buffer.shape))
    return made


@cache
def model(family: str) -> PreTrainedModel:
    """One model for all callers: it must not be changed."""
    return build(family)


@cache
def compiled(family: str, tp: int, experts: str = "tp") -> CompiledModel:
    """A tiny mixture in float64 on simulated ranks, through the whole pipeline."""
    with shared():
        return graphsrt.compile(model(family), tp=tp, ranks="simulated", dtype=torch.float64, experts=experts)


@cache
def traced(family: str, tp: int, experts: str = "tp") -> graphsrt.api.Traced:
    """All stages of a tiny mixture. Programs in it are shared: copy one before changing it."""
    with shared():
        return graphsrt.trace(config(family), tp=tp, dtype=torch.float64, experts=experts)
