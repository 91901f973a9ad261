"""JetMoE: experts for the MLP, and experts for the queries and the output of attention over shared keys and values.

A token's queries come from the experts that the router picked: ``k`` sets of as many heads as there are KV heads. So
attention has ``k`` query heads for each KV head, however tokens are routed, and is an ordinary one. Which expert made a
query is a choice among the projections of all experts: exact, at the price of computing those that are not chosen.
Source: Shen et al. 2024 (arXiv:2404.07413); mixture of attention heads: Zhang et al. 2022 (arXiv:2210.05144).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from graphsrt import ops
from graphsrt.models.conversion import Layout
from graphsrt.models.experts import activation_name
from graphsrt.models.llama import RMSNorm
from graphsrt.models.rotary import Rotary, rotate


class JetMoe(nn.Module):
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

    @staticmethod
    def layouts(config: Any) -> dict[str, Layout]:
        """The projections of attention's experts are one matrix each, by KV head and then by expert."""
        experts, heads, size = config.num_local_experts, config.num_key_value_heads, config.kv_channels

        def by_head(name: str, dim: int) -> Layout:
            return ["cat", dim, [
                ["cut", dim, head * size, (head + 1) * size, ["item", 0, expert, name]]
                for head in range(heads) for expert in range(experts)
            ]]  # fmt: skip

        paths = [f"model.layers.{layer}.self_attention.experts" for layer in range(config.num_hidden_layers)]
        sides = (("input_linear", 0), ("output_linear", 1))
        return {f"{p}.{side}.weight": by_head(f"{p}.{side}.weight", dim) for p in paths for side, dim in sides}


class Model(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, layer_id) for layer_id in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = Rotary(config, config.kv_channels)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        cos, sin = self.rotary_emb(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class Layer(nn.Module):
    def __init__(self, config: Any, layer_id: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, 1e-6)  # the class gives it no eps
        self.self_attention = Attention(config, layer_id)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, 1e-6)
        self.mlp = Mixture(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attention(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Router(nn.Module):
    """Ids ``[T, k]`` of a token's experts, and their weights, which sum to one."""

    def __init__(self, config: Any):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.layer = nn.Linear(config.hidden_size, config.num_local_experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits, ids = self.layer(x).float().topk(self.top_k, dim=1)
        return ids, logits.softmax(1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: Any, layer_id: int):
        super().__init__()
        self.kv_heads, self.head_size, self.layer_id = config.num_key_value_heads, config.kv_channels, layer_id
        self.experts = AttentionExperts(config)
        self.kv_proj = nn.Linear(config.hidden_size, 2 * self.kv_heads * self.head_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        k, v = (part.reshape(-1, self.kv_heads, self.head_size) for part in self.kv_proj(x).chunk(2, -1))
        ids, weights = self.experts.router(x)
        shape = (-1, self.kv_heads, ids.shape[1], self.head_size)
        q = self.experts.queries(x, ids).reshape(-1, shape[1] * shape[2], self.head_size)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = ops.attention(q, k, v, layer_id=self.layer_id, scale=self.head_size**-0.5)
        return self.experts.output(out.view(shape), ids, weights)


class AttentionExperts(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.count, self.head_size = config.num_local_experts, config.kv_channels
        width, inner = config.hidden_size, self.count * self.head_size * config.num_key_value_heads
        self.bias = nn.Parameter(torch.empty(width))
        self.input_linear = nn.Linear(width, inner, bias=False)
        self.output_linear = nn.Linear(inner, width, bias=False)
        self.router = Router(config)

    def chosen(self, ids: Tensor) -> Tensor:
        """``[T, 1, k, X, 1]``: whether a token's expert is this one."""
        return (ids[:, None, :, None, None] == torch.arange(self.count, device=ids.device)[:, None]).float()

    def queries(self, x: Tensor, ids: Tensor) -> Tensor:
        """``[T, K, k, D]``: each of a token's experts makes a query for each KV head."""
        made = self.input_linear(x).unflatten(-1, (-1, 1, self.count, self.head_size))
        return (made * self.chosen(ids).to(x.dtype)).sum(3)

    def output(self, attended: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """``[T, K, k, D] -> [T, E]``: each expert projects what its own queries found."""
        shares = self.chosen(ids).to(weights.dtype) * weights[:, None, :, None, None]
        return self.output_linear((attended.unsqueeze(3) * shares).sum(2).flatten(1)) + self.bias


class Mixture(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        count, width, inner = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.act = activation_name(ACT2FN[config.activation_function])
        self.bias = nn.Parameter(torch.empty(width))
        self.input_linear, self.output_linear = Experts(count, 2 * inner, width), Experts(count, width, inner)
        self.router = Router(config)

    def forward(self, x: Tensor) -> Tensor:
        given = (self.input_linear.weight, self.output_linear.weight)
        return ops.moe_experts(x, *self.router(x), *given, act=self.act) + self.bias


class Experts(nn.Module):
    def __init__(self, count: int, rows: int, columns: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, rows, columns))
