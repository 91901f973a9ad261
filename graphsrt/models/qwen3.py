"""Qwen3, to read: LLaMA with a norm over each head's queries and keys, and windows in some layers.

Captured in place of transformers' own class only with ``GRAPHSRT_REFERENCE_ARCHS=Qwen3ForCausalLM``.
Source: Yang et al. 2025 (arXiv:2505.09388).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN

from graphsrt import ops
from graphsrt.models.llama import RMSNorm
from graphsrt.models.rotary import Rotary, rotate


class Qwen3(nn.Module):
    """``(tokens [T], positions [T]) -> logits [T, V]`` of one sequence."""

    base_model_prefix = "model"

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.model = Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.lm_head(self.model(tokens, positions))


class Model(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, layer_id) for layer_id in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = Rotary(config, config.head_dim)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        cos, sin = self.rotary_emb(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class Layer(nn.Module):
    def __init__(self, config: Any, layer_id: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer_id)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Attention(nn.Module):
    def __init__(self, config: Any, layer_id: int):
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_size, self.layer_id = config.head_dim, layer_id
        width, bias = config.hidden_size, config.attention_bias
        self.window = config.sliding_window if config.layer_types[layer_id] == "sliding_attention" else None
        self.q_proj = nn.Linear(width, self.heads * self.head_size, bias)
        self.k_proj = nn.Linear(width, self.kv_heads * self.head_size, bias)
        self.v_proj = nn.Linear(width, self.kv_heads * self.head_size, bias)
        self.o_proj = nn.Linear(self.heads * self.head_size, width, bias)
        self.q_norm = RMSNorm(self.head_size, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = self.q_norm(self.q_proj(x).view(-1, self.heads, self.head_size))
        k = self.k_norm(self.k_proj(x).view(-1, self.kv_heads, self.head_size))
        v = self.v_proj(x).view(-1, self.kv_heads, self.head_size)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = ops.attention(
            q, k, v, layer_id=self.layer_id, scale=self.head_size**-0.5, sliding_window=self.window
        )  # fmt: skip
        return self.o_proj(out.view(-1, self.heads * self.head_size))


class MLP(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
