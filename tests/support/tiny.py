"""Tiny random models of every family, in float64.

All sizes differ, so that no two dimensions can be taken for each other; biases and norm weights are random, so that one
that is lost, doubled or taken from another rank shows in the numbers.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB, INTERMEDIATE, HEAD_SIZE, CONTEXT, WINDOW = 67, 41, 16, 64, 5
FAMILIES: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel], dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"head_dim": HEAD_SIZE, "attention_bias": True}),
    "llama_tied": (
        LlamaConfig,
        LlamaForCausalLM,
        {"head_dim": HEAD_SIZE, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": HEAD_SIZE}),
    "mistral": (MistralConfig, MistralForCausalLM, {"head_dim": HEAD_SIZE, "sliding_window": WINDOW}),
    "phi3": (Phi3Config, Phi3ForCausalLM, {"partial_rotary_factor": 0.5}),
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        {
            "head_dim": HEAD_SIZE,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 11,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.5,
        },
    ),
}
"""Name -> config class, model class and what the family adds. Gemma-2's embedding is tied by default."""

MORE: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel], dict[str, Any]]] = {
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, {}),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"head_dim": HEAD_SIZE, "num_local_experts": 5}),
    "gpt_neox": (GPTNeoXConfig, GPTNeoXForCausalLM, {"rotary_pct": 0.5}),
}
"""Families for what those above do not have: norms over the whole width of q and k, experts, parallel branches."""

HEADS = [(8, 8, 2), (8, 2, 4), (8, 2, 8), (9, 3, 2), (9, 3, 3), (12, 4, 8), (28, 4, 8), (10, 5, 4)]
"""Query heads, KV heads, ranks: dividing, replicated, padded, and several of these at once."""


def config(family: str, heads: int = 4, kv_heads: int = 2, layers: int = 2, **extra: Any) -> PretrainedConfig:
    """The config of a tiny model; ``extra`` overrides anything."""
    config_class, _, own = (FAMILIES | MORE)[family]
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": heads * 12,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": CONTEXT,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return config_class(**{**sizes, **own, **extra})


def build(family: str, heads: int = 4, kv_heads: int = 2, layers: int = 2, **extra: Any) -> PreTrainedModel:
    """A new model in float64, its weights random but the same every time."""
    torch.manual_seed(0)
    made = (FAMILIES | MORE)[family][1](config(family, heads, kv_heads, layers, **extra)).double().eval()
    made.set_attn_implementation("eager")
    randomize(made)
    return made


@cache
def _built(family: str, heads: int, kv_heads: int, layers: int, extra: tuple[tuple[str, Any], ...]) -> PreTrainedModel:
    return build(family, heads, kv_heads, layers, **dict(extra))


def model(family: str, heads: int = 4, kv_heads: int = 2, layers: int = 2, **extra: Any) -> PreTrainedModel:
    """Like :func:`build`, but one model for all callers that ask for the same: it must not be changed."""
    shared = _built(family, heads, kv_heads, layers, tuple(sorted(extra.items())))
    assert {x.dtype for x in shared.parameters()} == {torch.float64}, "a test has changed the model of all: use build()"
    return shared


def randomize(module: torch.nn.Module, seed: int = 1) -> None:
    """Matrices ~ N(0, 0.15), norm weights ~ N(0.7, 0.3), biases ~ N(0, 0.5): nothing zero, nothing one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if name.endswith("bias"):
                values = values * 0.5
            elif parameter.dim() == 1:
                values = values * 0.3 + 0.7
            else:
                values = values * 0.15
            parameter.copy_(values.to(parameter.dtype))


def tokens(count: int, seed: int = 0) -> list[int]:
    """Random token ids that are no special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (count,), generator=generator).tolist()


@torch.no_grad()
def eager_logits(net: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """transformers' own logits ``[T, V]`` of one sequence."""
    return net(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()


def worst(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference, relative to the largest wanted value; infinite where anything is not finite."""
    if not (torch.isfinite(got).all() and torch.isfinite(want).all()):
        return float("inf")
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


def tokenizer() -> Any:
    """A token for each byte, and one that ends a sequence: 257 in all."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
