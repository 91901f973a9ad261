"""XGLM: sinusoidal positions, embeddings scaled by the square root of the width.

Source: Lin et al. 2021 (arXiv:2112.10668), as in transformers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from graphsrt import ops

_OFFSET = 2
"""Position 0 has the sinusoid of 2: rows 0 and 1 were meant for special tokens."""


class XGLM(nn.Module):
    """``(tokens [T], positions [T]) -> logits [T, V]`` of one sequence."""

    base_model_prefix = "model"

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.model = Model(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.lm_head(self.model(tokens, positions))


class Model(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.embed_positions = Sinusoids(config.d_model, config.pad_token_id)
        self.layers = nn.ModuleList(Layer(config, layer_id) for layer_id in range(config.num_layers))
        self.layer_norm = nn.LayerNorm(config.d_model)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed_tokens(tokens) * self.scale
        x = x + self.embed_positions(positions, x.dtype)
        for layer in self.layers:
            x = layer(x)
        return self.layer_norm(x)


class Sinusoids(nn.Module):
    """``positions [T]`` → ``[T, width]``: sines of all frequencies, then cosines; zeros in the padding token's row."""

    def __init__(self, width: int, padding_row: int | None):
        super().__init__()
        half = width // 2
        self.padding_row = padding_row if padding_row is not None and padding_row >= _OFFSET else None
        self.is_odd = width % 2 == 1
        self.frequencies: Tensor
        steps = torch.arange(half, dtype=torch.float32, device="cpu")
        self.register_buffer("frequencies", torch.exp(steps * -(math.log(10000) / (half - 1))), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        rows = positions[:, None] + _OFFSET
        angles = rows.float() * self.frequencies.float()
        out = torch.cat([angles.sin(), angles.cos()], -1)
        if self.is_odd:
            out = torch.nn.functional.pad(out, (0, 1))
        if self.padding_row is not None:
            out = out.masked_fill(rows == self.padding_row, 0.0)
        return out.to(dtype)


class Layer(nn.Module):
    def __init__(self, config: Any, layer_id: int):
        super().__init__()
        self.self_attn = Attention(config, layer_id)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model)
        self.fc1 = nn.Linear(config.d_model, config.ffn_dim)
        self.fc2 = nn.Linear(config.ffn_dim, config.d_model)
        self.final_layer_norm = nn.LayerNorm(config.d_model)
        self.act = ACT2FN[config.activation_function]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x))
        return x + self.fc2(self.act(self.fc1(self.final_layer_norm(x))))


class Attention(nn.Module):
    def __init__(self, config: Any, layer_id: int):
        super().__init__()
        self.heads, self.head_size, self.layer_id = (
            config.attention_heads,
            config.d_model // config.attention_heads,
            layer_id,
        )
        self.q_proj = nn.Linear(config.d_model, config.d_model)
        self.k_proj = nn.Linear(config.d_model, config.d_model)
        self.v_proj = nn.Linear(config.d_model, config.d_model)
        self.out_proj = nn.Linear(config.d_model, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        shape = (-1, self.heads, self.head_size)
        q, k, v = self.q_proj(x).view(shape), self.k_proj(x).view(shape), self.v_proj(x).view(shape)
        out = ops.attention(q, k, v, layer_id=self.layer_id, scale=self.head_size**-0.5)
        return self.out_proj(out.view(x.shape))
