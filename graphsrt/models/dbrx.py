"""DBRX: fused and clipped projections, and experts that share one long matrix each for gates, ups and downs.

transformers' class loops over the experts that were hit; here they are one operator, over weights that are read from
the same long matrices expert by expert. Source: Databricks 2024 (model card).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from graphsrt import ops
from graphsrt.models.conversion import Layout
from graphsrt.models.experts import activation_name
from graphsrt.models.rotary import Rotary, rotate


class Dbrx(nn.Module):
    """``(tokens [T], positions [T]) -> logits [T, V]`` of one sequence."""

    base_model_prefix = "transformer"

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.transformer = Model(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.transformer.wte.weight

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.lm_head(self.transformer(tokens, positions))

    @staticmethod
    def layouts(config: Any) -> dict[str, Layout]:
        """``w1``, ``v1`` and ``w2`` are ``[X · F, E]``, expert after expert."""
        count, width = config.ffn_config.moe_num_experts, config.ffn_config.ffn_hidden_size

        def experts(name: str) -> Layout:
            return ["stack", 0, [["cut", 0, i * width, (i + 1) * width, name] for i in range(count)]]

        found: dict[str, Layout] = {}
        for layer in range(config.n_layers):
            path = f"transformer.blocks.{layer}.ffn.experts"
            found[f"{path}.gate_up_proj"] = ["cat", 1, [experts(f"{path}.mlp.{name}") for name in ("w1", "v1")]]
            found[f"{path}.down_proj"] = ["swap", 1, 2, experts(f"{path}.mlp.w2")]
        return found


class Model(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config, layer_id) for layer_id in range(config.n_layers))
        self.norm_f = nn.LayerNorm(config.d_model, bias=False)
        self.rotary_emb = Rotary(config, config.d_model // config.n_heads)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.wte(tokens)
        cos, sin = self.rotary_emb(positions, x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.norm_f(x)


class Block(nn.Module):
    def __init__(self, config: Any, layer_id: int):
        super().__init__()
        self.norm_attn_norm = NormAttentionNorm(config, layer_id)
        self.ffn = Mixture(config.ffn_config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x, normed = self.norm_attn_norm(x, cos, sin)
        return x + self.ffn(normed)


class NormAttentionNorm(nn.Module):
    def __init__(self, config: Any, layer_id: int):
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.d_model, bias=False)
        self.attn = Attention(config, layer_id)
        self.norm_2 = nn.LayerNorm(config.d_model, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attn(self.norm_1(x), cos, sin)
        return x, self.norm_2(x)


class Attention(nn.Module):
    def __init__(self, config: Any, layer_id: int):
        super().__init__()
        self.heads, self.kv_heads = config.n_heads, config.attn_config.kv_n_heads
        self.head_size, self.layer_id = config.d_model // config.n_heads, layer_id
        self.clip = config.attn_config.clip_qkv
        self.Wqkv = nn.Linear(config.d_model, (self.heads + 2 * self.kv_heads) * self.head_size, bias=False)
        self.out_proj = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = (self.heads, self.kv_heads, self.kv_heads)
        rows = self.Wqkv(x).split([count * self.head_size for count in heads], -1)
        parts = [part.reshape(-1, count, self.head_size) for part, count in zip(rows, heads)]
        if self.clip is not None:
            parts = [part.clamp(-self.clip, self.clip) for part in parts]
        q, k, v = parts
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = ops.attention(q, k, v, layer_id=self.layer_id, scale=self.head_size**-0.5)
        return self.out_proj(out.view(x.shape))


class Mixture(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.top_k, self.power = config.moe_top_k, config.moe_normalize_expert_weights
        self.act = activation_name(ACT2FN[config.ffn_act_fn.get("name", "silu")])
        self.router = Router(config)
        self.experts = Experts(config)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(self.router(x).softmax(-1), self.top_k, dim=-1)
        if self.power is not None:
            weights = weights / weights.norm(p=self.power, dim=-1, keepdim=True)
        return ops.moe_experts(x, ids, weights, self.experts.gate_up_proj, self.experts.down_proj, act=self.act)


class Router(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.layer = nn.Linear(config.hidden_size, config.moe_num_experts, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Experts(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        count, width, inner = config.moe_num_experts, config.hidden_size, config.ffn_hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(count, width, inner))
