"""A tiny config of any architecture, made from the class's own defaults: every size small, no two that matter alike.

Sizes are recognised by the field's name and by what it holds; layers are chosen so that each kind occurs; windows are
shorter than the test sequences; caps, clips and scales that default to "off" or to 1 are set to something that
shows. Nothing here is read by a pass: how a model is divided follows from its graph alone.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB, CONTEXT, WINDOW = 67, 64, 5


@dataclass(frozen=True)
class Sizes:
    """Head counts and what goes with them. ``name`` is what the table calls them."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int = 16
    width_per_head: int = 12
    """Model width for each head where the config has a head size of its own, else the head size."""


EVEN = Sizes("8/4", 8, 4)
UNEVEN = Sizes("9/3", 9, 3)
SIZES = {sizes.name: sizes for sizes in (EVEN, UNEVEN)}

_HEADS = {
    "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "swa_num_attention_heads",
    "decoder_attention_heads",
}  # fmt: skip
_KV_HEADS = {
    "num_key_value_heads", "num_kv_heads", "kv_n_heads", "swa_num_key_value_heads", "num_query_groups",
    "num_global_key_value_heads",
}  # fmt: skip
_WIDTH = {"hidden_size", "d_model", "n_embd", "emb_dim", "word_embed_proj_dim", "embedding_dim", "hidden_size_global"}
_LAYERS = {"num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks"}
_HEAD_DIM = {"head_dim", "kv_channels", "dim_head", "swa_head_dim", "d_head"}
_SMALL = {
    # experts and their groups
    "num_experts": 10, "num_local_experts": 10, "n_routed_experts": 10, "moe_num_experts": 10,
    "num_experts_per_tok": 3, "num_experts_per_token": 3, "moe_topk": 3, "moe_top_k": 3, "moe_k": 3, "top_k_experts": 3,
    "zero_expert_num": 4,
    # widths, all different
    "intermediate_size": 44, "ffn_dim": 44, "dff": 44, "dim_ff": 44, "d_inner": 44, "n_inner": 44,
    "ffn_hidden_size": 44, "dense_intermediate_size": 46, "intermediate_size_mlp": 46,
    "moe_intermediate_size": 20, "expert_ffn_hidden_size": 20, "moe_shared_expert_intermediate_size": 28,
    "shared_expert_intermediate_size": 28, "shared_intermediate_size": 28, "shared_experts_intermediate_size": 28,
    "hidden_size_per_layer_input": 6, "laurel_rank": 7, "router_hidden_size": 22, "gated_norm_rank": 5,
    # latent attention
    "q_lora_rank": 26, "kv_lora_rank": 18, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 14,
    "o_lora_rank": 30, "index_head_dim": 16, "index_n_heads": 3, "index_topk": 6, "index_block_size": 4,
    "index_topk_blocks": 3,
    # positions and windows
    "max_position_embeddings": CONTEXT, "n_positions": CONTEXT, "n_ctx": CONTEXT, "max_seq_len": CONTEXT,
    "model_max_length": CONTEXT, "context_length": CONTEXT, "rotary_dim": 8, "mem_len": 16,
    "sliding_window": WINDOW, "sliding_window_size": WINDOW, "window_size": WINDOW, "attention_window_size": WINDOW,
    "local_attention": 2 * WINDOW, "attention_chunk_size": WINDOW + 3, "keep_window_size": 12,
    "max_window_layers": 1, "log_scaling_n_floor": 7, "floor_scale": 7,
    "vocab_size_per_layer_input": VOCAB, "unpadded_vocab_size": VOCAB - 2, "dim_model_base": 40,
    "query_pre_attn_scalar": 11,
    # layers that are told apart by a number
    "first_k_dense_replace": 1, "num_dense_layers": 1, "moe_layer_start_index": 1, "moe_layer_end_index": 3,
    "num_layers_per_stack": 2, "n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1,
    "loop_layer_index_start": 1, "loop_layer_index_end": 2, "num_kv_shared_layers": 2,
    # recurrent models: only small, they are refused
    "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_num_heads": 8, "mamba_head_dim": 8,
    "state_size": 8, "ssm_state_size": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_head_dim": 8, "linear_num_heads": 4,
    "time_step_rank": 6, "mamba_dt_rank": 6, "chunk_size": 8, "mamba_chunk_size": 8, "attention_hidden_size": 96,
}  # fmt: skip
_ALWAYS = {"sliding_window", "window_size", "attention_chunk_size"}  # may be None by default, which is then kept


def tiny_config(model_type: str, sizes: Sizes = EVEN) -> Any:
    """The tiny config; whatever the config class itself objects to is raised."""
    config_class = CONFIG_MAPPING[model_type]
    given = copy.deepcopy(OVERRIDES.get(model_type, {}))
    before = given.pop("_default", {})
    default = config_class(**before)
    text = getattr(default, "text_config", None)
    if text is not None and hasattr(text, "to_dict"):
        config_class, default = type(text), text
    values = {**before, **shrunk(default, sizes)}
    for name, value in given.items():
        value = value(sizes) if callable(value) else value
        both = isinstance(value, dict) and isinstance(values.get(name), dict)
        values[name] = {**values[name], **value} if both else value
    return config_class(**values)


def shrunk(config: Any, sizes: Sizes) -> dict[str, Any]:
    """Field -> small value, for the fields of ``config`` that say something about size."""
    fields = {k: v for k, v in vars(config).items() if not k.startswith("_")}
    names = {**{v: k for k, v in (getattr(config, "attribute_map", None) or {}).items()}}
    own_head_dim = any(name in fields for name in _HEAD_DIM)
    latent = bool(fields.get("kv_lora_rank"))
    width = sizes.heads * (sizes.width_per_head if own_head_dim or latent else sizes.head_dim)
    found: dict[str, Any] = {}
    layers = _chosen_layers(fields)
    for name, value in fields.items():
        key = name if name in _known() else names.get(name, name)
        if value is None and name in ("head_dim", "num_key_value_heads"):
            found[name] = sizes.head_dim if name == "head_dim" else sizes.kv_heads
        if isinstance(value, bool) or value is None:
            continue
        if hasattr(value, "to_dict") and not isinstance(value, type):
            inner = shrunk(value, sizes)
            inner |= dict.fromkeys(_WIDTH & vars(value).keys(), width)  # parts have the width of the whole
            found[name] = {**{k: v for k, v in value.to_dict().items() if k in vars(value)}, **inner}
        elif isinstance(value, (list, tuple)):
            if layers and _is_per_layer(value, layers[0]):
                found[name] = type(value)(_per_layer(name, value[index], sizes) for index in layers[1])
        elif key == "vocab_size":
            found[name] = VOCAB
        elif key in _HEADS:
            found[name] = sizes.heads
        elif key in _KV_HEADS:
            many = value == _heads_of(fields)
            found[name] = value if value == 1 else sizes.heads if many and "num_kv_heads" not in key else sizes.kv_heads
            if key == "num_key_value_heads" and many and not latent:
                found[name] = sizes.kv_heads
        elif key in _WIDTH:
            found[name] = width
        elif key in _LAYERS:
            found[name] = len(layers[1]) if layers else 3
        elif key in _HEAD_DIM and not latent:
            found[name] = sizes.head_dim
        elif key in _SMALL and isinstance(value, int) and value > 0:
            found[name] = min(value, _SMALL[key])
        elif key == "n_group" and value > 1:
            found[name], found["topk_group"] = 2, 1
        elif re.search("softcap|soft_cap", key) and value:
            found[name] = 3.0
        elif isinstance(value, float) and value == 1.0 and re.search("multiplier|scal", key):
            found[name] = 0.8
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        found[name] = ["pad_token_id", "bos_token_id", "eos_token_id"].index(name)
    if "use_sliding_window" in fields:
        found |= {"use_sliding_window": True, "sliding_window": WINDOW}
        found.pop("layer_types", None)
    if "clip_qkv" in fields:
        found["clip_qkv"] = 1.5
    return found


def _known() -> set[str]:
    return _HEADS | _KV_HEADS | _WIDTH | _LAYERS | _HEAD_DIM | set(_SMALL) | {"vocab_size"}


def _heads_of(fields: dict[str, Any]) -> Any:
    return next((fields[name] for name in fields if name in _HEADS), None)


def _per_layer(name: str, value: Any, sizes: Sizes) -> Any:
    """An entry of a list with one for each layer; head counts in it shrink too."""
    if "heads" in name and isinstance(value, int):
        return sizes.kv_heads if "key_value" in name else sizes.heads
    if "intermediate" in name and isinstance(value, int):
        return _SMALL["intermediate_size"]
    return value


def _is_per_layer(value: Any, depth: int) -> bool:
    """A list with an entry for each layer; one whose entries all differ lists layers itself, and says nothing more."""
    return isinstance(value, (list, tuple)) and len(value) == depth > 1 and len({repr(item) for item in value}) < depth


def _chosen_layers(fields: dict[str, Any]) -> tuple[int, list[int]] | None:
    """The default's depth, and which of its layers to keep: the first of each kind, at least three in all."""
    depth = next((fields[name] for name in fields if name in _LAYERS and isinstance(fields[name], int)), None)
    if depth is None:
        return None
    lists = [list(v) for v in fields.values() if _is_per_layer(v, depth)]
    first: dict[tuple[str, ...], int] = {}
    for layer in range(depth):
        first.setdefault(tuple(repr(one[layer]) for one in lists), layer)
    chosen = sorted(first.values())[:6]
    for extra in range(depth):
        if len(chosen) >= 3:
            break
        if extra not in chosen:
            chosen.append(extra)
    return depth, sorted(chosen)


OVERRIDES: dict[str, dict[str, Any]] = {
    # What a class needs to be built small, or to show what it can do; never anything about how it is divided.
    "bamba": {"mamba_d_head": lambda s: s.heads * s.head_dim * 2 // 8},
    "granitemoehybrid": {"mamba_d_head": lambda s: s.heads * s.head_dim * 2 // 8},
    "falcon_h1": {"mamba_d_ssm": 64},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50000.0},
        },
    },
    "dots1": {
        "n_routed_experts": 10, "num_experts_per_tok": 3, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "n_group": 2, "topk_group": 1,
    },
    "deepseek_v2": {"num_experts_per_tok": 3},
    "longcat_flash": {"head_dim": 8, "num_layers": 2},  # the rotary part of a head; two attentions in each layer
    "dbrx": {"attn_config": {"rope_theta": 10000.0}},
    "diffllama": {  # its KV heads come in pairs
        "num_attention_heads": lambda s: s.heads if s.kv_heads % 2 == 0 else 12,
        "num_key_value_heads": lambda s: s.kv_heads if s.kv_heads % 2 == 0 else 6,
        "hidden_size": lambda s: (s.heads if s.kv_heads % 2 == 0 else 12) * s.width_per_head,
    },
    "dots3_note_text": {
        "swa_kv_lora_rank": 22, "swa_q_lora_rank": 34, "swa_head_dim": 24, "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 10, "head_dim": 20, "swa_num_attention_heads": lambda s: s.heads,
        "swa_num_key_value_heads": lambda s: s.heads,
    },
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": lambda s: s.kv_heads},
    "gemma4_text": {  # keys are values without a window, and the last two layers have none of their own
        "global_head_dim": 20, "attention_k_eq_v": True, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
        "num_global_key_value_heads": lambda s: 3 if s.kv_heads % 2 else 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_unified_text": {"global_head_dim": 20},
    "mimo_v2_flash": {  # layers with a window have twice as many KV heads
        "num_attention_heads": lambda s: s.heads if s.heads % (2 * s.kv_heads) == 0 else 12,
    },
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]], "num_layers": 2, "attention_layers": ["global", "local"],
    },
    "inkling2_loop_text": {"n_layers_per_attn_res_block": 1},
    "helium": {"head_dim": lambda s: s.width_per_head},  # its width is that of its heads
    "llama4_text": {"interleave_moe_layer_step": 2},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {"head_dim": lambda s: s.width_per_head * 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 6,
        "indexer_compress_ratio": 2, "hc_lowrank": 6, "ple_embed_dim": 12, "ngram_vocab_size_base": 50,
        "split_ngram_parts": 2,
    },
    "xlnet": {"d_head": 12},
    "zamba": {"num_hidden_layers": 8, "attn_layer_period": 3, "attn_layer_offset": 1, "layers_block_type": None},
}  # fmt: skip
"""Model type -> fields that the rules above do not find; ``_default`` are given to the class before sizes are read."""
