"""A small model with the parallel structure of a large one, for executing every stage on simulated ranks.

What decides how a model is divided stays: head counts, KV heads, experts, ties, biases, the kinds of layers, and how
widths and the vocabulary divide by the number of ranks. What only costs time shrinks: head size, widths, depth. All
widths differ, so that no two dimensions can be taken for each other.
"""

from __future__ import annotations

import copy
from typing import Any

from graphsrt.capture import rope_types

CONTEXT_LENGTH = 64
_WIDTHS = (
    "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "moe_intermediate_size", "shared_intermediate_size",
    "shared_expert_intermediate_size", "intermediate_size_mlp",
)  # fmt: skip
_LATENTS = ("q_lora_rank", "kv_lora_rank")
_OTHER_WIDTHS = ("word_embed_proj_dim", "embedding_size")
_WINDOW = 5
"""Tokens of a miniature's sliding window: shorter than the longest test sequence, so that windows matter."""


def miniature(config: Any, tp: int) -> Any:
    """A copy of a causal LM's config with small widths and one layer of each kind (at least two layers)."""
    whole = config.get_text_config() if hasattr(config, "get_text_config") else config
    small = copy.deepcopy(whole)
    heads = int(small.num_attention_heads)
    hidden = int(small.hidden_size)
    follows = isinstance(getattr(type(small), "head_dim", None), property)  # from the width and the heads
    own_head_dim = None if follows else getattr(small, "head_dim", None)
    head_dim = _head_dim(small, int(own_head_dim or hidden // heads))
    width = heads * head_dim
    if own_head_dim is not None and int(own_head_dim) * heads != hidden:
        width += heads * 2  # the model's width is not that of its heads; a multiple of the heads passes every config
    if not follows:
        _set(small, "head_dim", head_dim if own_head_dim is not None else None)
    for name in _OTHER_WIDTHS:
        if getattr(small, name, None) == hidden:
            setattr(small, name, width)
    small.hidden_size = width
    taken = {width, heads * head_dim}
    for name in _WIDTHS:
        value = getattr(small, name, None)
        if isinstance(value, int) and value > 0:
            taken.add(new := _like(value, tp, 40 + 2 * tp, taken))
            setattr(small, name, new)
    _latent_heads(small, tp, head_dim, taken)
    small.vocab_size = _like(int(small.vocab_size), tp, 64 + 3 * tp, taken)
    _layers(small)
    _ropes(small, int(own_head_dim or hidden // heads), head_dim)
    for name in ("sliding_window", "attention_window_size"):
        if getattr(small, name, None):
            setattr(small, name, min(int(getattr(small, name)), _WINDOW))
    if not rope_types(small) and getattr(small, "max_position_embeddings", None):
        small.max_position_embeddings = CONTEXT_LENGTH  # a learned table; rotary embeddings have none to shrink
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        _set(small, name, None)
    if getattr(small, "quantization_config", None) is not None:
        del small.quantization_config
    return small


def _latent_heads(config: Any, tp: int, head_dim: int, taken: set[int]) -> None:
    """Latent attention: ranks of the latents and the parts of a head shrink; the rotated part is a whole head of the
    rotary embedding."""
    if not getattr(config, "kv_lora_rank", None):
        return
    _set(config, "qk_rope_head_dim", head_dim)
    _set(config, "qk_nope_head_dim", head_dim + 2)
    _set(config, "v_head_dim", head_dim + 4)
    _set(config, "qk_head_dim", 2 * head_dim + 2)
    for name in _LATENTS:
        if getattr(config, name, None):
            taken.add(new := _like(int(getattr(config, name)), tp, 3 * head_dim, taken))
            setattr(config, name, new)


def _set(config: Any, name: str, value: Any) -> None:
    if hasattr(config, name) and getattr(config, name) != value:
        setattr(config, name, value)


def _like(value: int, tp: int, least: int, taken: set[int]) -> int:
    """The smallest new number from ``least`` on that leaves the same rest as ``value`` by ``tp`` and by 2."""
    return next(
        n for n in range(least, least + 64 * tp + 64) if n % tp == value % tp and n % 2 == value % 2 and n not in taken
    )


def _head_dim(config: Any, old: int) -> int:
    """The smallest head size whose rotated part is even, as it is in the model."""
    fraction = getattr(config, "partial_rotary_factor", None)
    parameters = getattr(config, "rope_parameters", None)
    if isinstance(parameters, dict):
        fraction = parameters.get("partial_rotary_factor", fraction)
    fraction = fraction or getattr(config, "rotary_pct", None) or 1.0
    sizes = [n for n in (8, 16, 20, 32, 40, 64) if n <= old] or [old]
    return next((n for n in sizes if int(n * fraction) % 2 == 0 and int(n * fraction) >= 2), old)


def _layers(config: Any) -> None:
    """Keep the first layer of each kind; a kind is what all per-layer lists of the config say about a layer."""
    layers = int(config.num_hidden_layers)
    lists = {
        name: list(value)
        for name, value in vars(config).items()
        if isinstance(value, (list, tuple)) and len(value) == layers and layers > 1
    }
    first: dict[tuple, int] = {}
    dense = int(getattr(config, "first_k_dense_replace", 0) or 0)
    for layer in range(layers):
        first.setdefault((*(repr(value[layer]) for value in lists.values()), layer < dense), layer)
    chosen = sorted(first.values())
    if len(chosen) < 2 and layers > 1:
        chosen = [*chosen, 1]
    for name, value in lists.items():
        setattr(config, name, [value[layer] for layer in chosen])
    if dense:
        config.first_k_dense_replace = sum(layer < dense for layer in chosen)
    config.num_hidden_layers = len(chosen)


def _ropes(config: Any, old: int, new: int) -> None:
    """Lists with one factor for each pair of channels are cut to the new head size."""
    for name in ("rope_parameters", "rope_scaling"):
        parameters = getattr(config, name, None)
        if isinstance(parameters, dict):
            for item in [parameters, *(p for p in parameters.values() if isinstance(p, dict))]:
                for key in ("short_factor", "long_factor"):
                    if isinstance(item.get(key), (list, tuple)):
                        item[key] = list(item[key])[: max(1, len(item[key]) * new // old)]
    if getattr(config, "rotary_dim", None):
        config.rotary_dim = min(int(config.rotary_dim), new // 2)
