"""Tiny configs of every reference model: head sizes odd where nothing forbids it, all widths different."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tests.support import tiny

HEADS, HEAD_SIZE = 6, 10
_WIDTH = HEADS * HEAD_SIZE
_GPT: dict[str, Any] = {"vocab_size": tiny.VOCAB, "hidden_size": _WIDTH, "n_layer": 2, "n_head": HEADS}
_PLAIN: dict[str, Any] = {
    "vocab_size": tiny.VOCAB, "hidden_size": _WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "max_position_embeddings": tiny.CONTEXT,
}  # fmt: skip
_FALCON: dict[str, Any] = {**_PLAIN, "ffn_hidden_size": 52}
_LLAMA: dict[str, Any] = {**_PLAIN, "intermediate_size": 52, "num_key_value_heads": 3, "head_dim": 16}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("BloomConfig", _GPT),
    "bloom_post_norm": ("BloomConfig", {**_GPT, "apply_residual_connection_post_layernorm": True}),
    "dbrx": (
        "DbrxConfig",
        {
            "vocab_size": tiny.VOCAB, "d_model": _WIDTH, "n_layers": 2, "n_heads": HEADS, "max_seq_len": 64,
            "attn_config": {"clip_qkv": 0.9, "kv_n_heads": 3, "rope_theta": 500.0},
            "ffn_config": {"ffn_hidden_size": 14, "moe_num_experts": 5, "moe_top_k": 2, "hidden_size": _WIDTH,
                           "moe_normalize_expert_weights": 2.0},
        },
    ),
    "falcon": ("FalconConfig", {**_FALCON, "bias": True}),
    "falcon_grouped": ("FalconConfig", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 3}),
    "falcon_one_norm": (
        "FalconConfig",
        {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon_alibi": (
        "FalconConfig",
        {**_FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "gpt_neo": (
        "GPTNeoConfig",
        {
            "vocab_size": tiny.VOCAB, "hidden_size": _WIDTH, "num_layers": 2, "num_heads": HEADS, "window_size": 5,
            "intermediate_size": 52, "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64,
        },
    ),
    "gpt_neox_japanese": (
        "GPTNeoXJapaneseConfig",
        {**_PLAIN, "intermediate_multiple_size": 2, "partial_rotary_factor": 0.6},
    ),
    "jetmoe": (
        "JetMoeConfig",
        {
            "vocab_size": tiny.VOCAB, "hidden_size": 34, "num_hidden_layers": 2, "num_key_value_heads": 3,
            "kv_channels": HEAD_SIZE, "intermediate_size": 14, "num_local_experts": 5, "num_experts_per_tok": 2,
            "max_position_embeddings": 64,
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        {**_LLAMA, "intermediate_size": 13, "intermediate_size_mlp": 52, "attention_chunk_size": 5,
         "no_rope_layers": [1, 0], "interleave_moe_layer_step": 2, "num_local_experts": 5, "num_experts_per_tok": 2,
         "floor_scale": 3, "attn_scale": 0.4, "attention_bias": True},
    ),
    "mpt": (
        "MptConfig",
        {
            "vocab_size": tiny.VOCAB, "d_model": _WIDTH, "n_layers": 2, "n_heads": HEADS, "max_seq_len": 64,
            "attn_config": {"clip_qkv": 0.9, "softmax_scale": 0.4},
        },
    ),
    "openai_gpt": ("OpenAIGPTConfig", {"vocab_size": tiny.VOCAB, "n_embd": _WIDTH, "n_layer": 2, "n_head": HEADS,
                                       "n_positions": 64}),
    "xglm": (
        "XGLMConfig",
        {"vocab_size": tiny.VOCAB, "d_model": _WIDTH, "num_layers": 2, "attention_heads": HEADS, "ffn_dim": 52,
         "max_position_embeddings": 64, "pad_token_id": 9},
    ),
    "llama": ("LlamaConfig", {**_LLAMA, "attention_bias": True, "mlp_bias": True}),
    "llama_scaled": (
        "LlamaConfig",
        {**_LLAMA, "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0,
                                       "original_max_position_embeddings": 16}},
    ),
    "qwen3": (
        "Qwen3Config",
        {**_LLAMA, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1,
         "tie_word_embeddings": True},
    ),
}  # fmt: skip
"""Name -> config class and sizes."""


def config(name: str) -> PretrainedConfig:
    """A tiny config of a reference model's architecture."""
    kind, sizes = CONFIGS[name]
    return getattr(transformers, kind)(**{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **sizes})


def build(name: str) -> PreTrainedModel:
    """transformers' own model of :func:`config`, in float64 with random weights, biases and norms."""
    torch.manual_seed(0)
    # transformers' eager Falcon adds its ALiBi biases twice, once with the mask; its default attention does not
    attention = "sdpa" if name == "falcon_alibi" else "eager"
    net = AutoModelForCausalLM.from_config(config(name), attn_implementation=attention).double().eval()
    tiny.randomize(net)
    return net


@torch.no_grad()
def eager_logits(net: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """transformers' own logits ``[T, V]`` of one sequence; XGLM makes constants of the default dtype."""
    torch.set_default_dtype(torch.float64)
    try:
        return net(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    finally:
        torch.set_default_dtype(torch.float32)
