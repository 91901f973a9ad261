"""Llama 4 (text): chunked attention with rope, layers without positions, and experts that see scaled tokens.

transformers' class multiplies complex numbers for its rope, runs every expert over every token, and counts positions
from the start of the step; this one says the same in terms of positions.
Source: Meta 2025 (model card); temperature of attention: Nakanishi 2025 (arXiv:2501.19399).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from graphsrt import ops
from graphsrt.models.experts import activation_name
from graphsrt.models.llama import RMSNorm
from graphsrt.models.rotary import Rotary


class Llama4(nn.Module):
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
        n = self.rotary_emb.inv_freq.shape[0]
        cos, sin = (table[..., :n].repeat_interleave(2, -1) for table in self.rotary_emb(positions, x.dtype))
        for layer in self.layers:
            x = layer(x, positions, cos, sin)
        return self.norm(x)


class Layer(nn.Module):
    def __init__(self, config: Any, layer_id: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer_id)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        sparse = layer_id in config.moe_layers
        self.feed_forward = Mixture(config) if sparse else MLP(config, config.intermediate_size_mlp)

    def forward(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions, cos, sin)
        return x + self.feed_forward(self.post_attention_layernorm(x))


class Attention(nn.Module):
    def __init__(self, config: Any, layer_id: int):
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_size, self.layer_id, self.eps = config.head_dim, layer_id, config.rms_norm_eps
        width, bias = config.hidden_size, config.attention_bias
        self.has_rope = bool(config.no_rope_layers[layer_id])
        self.has_norm = config.use_qk_norm and self.has_rope
        self.floor_scale, self.attn_scale = config.floor_scale, config.attn_scale
        self.has_temperature = bool(config.attn_temperature_tuning) and not self.has_rope
        self.chunk = config.attention_chunk_size if config.layer_types[layer_id] == "chunked_attention" else None
        self.q_proj = nn.Linear(width, self.heads * self.head_size, bias)
        self.k_proj = nn.Linear(width, self.kv_heads * self.head_size, bias)
        self.v_proj = nn.Linear(width, self.kv_heads * self.head_size, bias)
        self.o_proj = nn.Linear(self.heads * self.head_size, width, bias)

    def forward(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = self.q_proj(x).view(-1, self.heads, self.head_size)
        k = self.k_proj(x).view(-1, self.kv_heads, self.head_size)
        v = self.v_proj(x).view(-1, self.kv_heads, self.head_size)
        if self.has_rope:
            q, k = rotate_pairs(q, cos, sin), rotate_pairs(k, cos, sin)
        if self.has_norm:
            q, k = self.norm(q), self.norm(k)
        if self.has_temperature:
            late = torch.floor((positions.float() + 1.0) / self.floor_scale)
            q = (q * (torch.log1p(late) * self.attn_scale + 1.0)[:, None, None]).to(q.dtype)
        out = ops.attention(
            q, k, v, layer_id=self.layer_id, scale=self.head_size**-0.5, chunk_size=self.chunk
        )  # fmt: skip
        return self.o_proj(out.view(-1, self.heads * self.head_size))

    def norm(self, x: Tensor) -> Tensor:
        """Each head to a root mean square of one; no weight."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of channels ``2i`` and ``2i + 1`` of each head."""
    swapped = torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2)
    return x * cos + swapped * sin


class MLP(nn.Module):
    def __init__(self, config: Any, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.down_proj = nn.Linear(inner, config.hidden_size, bias=False)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Mixture(nn.Module):
    """A shared expert beside the routed ones; a token is scaled before its experts, not after them."""

    def __init__(self, config: Any):
        super().__init__()
        self.top_k, self.act = config.num_experts_per_tok, activation_name(ACT2FN[config.hidden_act])
        self.experts = Experts(config)
        self.router = nn.Linear(config.hidden_size, config.num_local_experts, bias=False)
        self.shared_expert = MLP(config, config.intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        values, ids = torch.topk(self.router(x), self.top_k, dim=1)
        scores = torch.sigmoid(values.float()).to(x.dtype)
        gate_up, down = self.experts.gate_up_proj.transpose(1, 2), self.experts.down_proj.transpose(1, 2)
        out = self.shared_expert(x)
        for j in range(self.top_k):
            scaled, one, chosen = x * scores[:, j : j + 1], torch.ones_like(scores[:, :1]), ids[:, j : j + 1]
            out = out + ops.moe_experts(scaled, chosen, one, gate_up, down, act=self.act)
        return out


class Experts(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        count, width, inner = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, width, 2 * inner))
        self.down_proj = nn.Parameter(torch.empty(count, inner, width))
