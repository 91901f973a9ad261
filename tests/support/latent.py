"""Tiny random models with multi-head latent attention, in float64; all sizes differ, as in ``tiny``."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tests.support import tiny

LATENT, OWN, ROPE, VALUE = 18, 10, 8, 14
SIZES: dict[str, Any] = {
    "vocab_size": tiny.VOCAB, "intermediate_size": tiny.INTERMEDIATE, "num_hidden_layers": 1,
    "max_position_embeddings": tiny.CONTEXT, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "q_lora_rank": 22, "kv_lora_rank": LATENT, "qk_nope_head_dim": OWN, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE,
}  # fmt: skip
DENSE: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 2}
"""Of models with experts: none in the first two layers."""
YARN: dict[str, Any] = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 1.0,
    "rope_theta": 10000.0,
}  # fmt: skip
"""A long-context rope that scales the attention's scores, too."""
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**DENSE, "rope_parameters": YARN},
    "deepseek_v2": {**DENSE, "head_dim": ROPE},
    "minicpm3": {"head_dim": ROPE},
    "youtu": {"q_lora_rank": None},
}
"""Interleaved rope with YaRN; rope in complex numbers; rope by halves; queries without a latent of their own."""


def config(family: str, heads: int = 6, **extra: Any) -> PretrainedConfig:
    """The config of a tiny model; ``extra`` overrides anything."""
    sizes = {"hidden_size": heads * 10, "num_attention_heads": heads, "num_key_value_heads": heads}
    return AutoConfig.for_model(family, **{**SIZES, **sizes, **FAMILIES[family], **extra})


@cache
def model(family: str, heads: int = 6, layers: int = 1) -> PreTrainedModel:
    """A model with random weights, one for all callers that ask for the same: it must not be changed."""
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config(family, heads, num_hidden_layers=layers)).double().eval()
    made.set_attn_implementation("eager")
    tiny.randomize(made)
    return made
