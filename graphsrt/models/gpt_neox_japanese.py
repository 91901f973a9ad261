"""GPT-NeoX-Japanese: GPT-NeoX in sequence instead of side by side, without biases but for one in the last layer.

Source: ABEJA 2022 (huggingface.co/abeja/gpt-neox-japanese-2.7b), as in transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from graphsrt import ops
from graphsrt.models.rotary import Rotary, rotate


class GPTNeoXJapanese(nn.Module):
    """``(tokens [T], positions [T]) -> logits [T, V]`` of one sequence."""

    base_model_prefix = "gpt_neox_japanese"

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.gpt_neox_japanese = Model(config)
        self.embed_out = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.embed_out.weight = self.gpt_neox_japanese.embed_in.weight

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.embed_out(self.gpt_neox_japanese(tokens, positions))


class Model(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.embed_in = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, layer_id) for layer_id in range(config.num_hidden_layers))
        self.final_layer_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.rotary_emb = Rotary(config, config.hidden_size // config.num_attention_heads)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed_in(tokens)
        cos, sin = self.rotary_emb(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.final_layer_norm(x)


class Layer(nn.Module):
    def __init__(self, config: Any, layer_id: int):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.attention = Attention(config, layer_id)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Attention(nn.Module):
    def __init__(self, config: Any, layer_id: int):
        super().__init__()
        width, self.heads, self.layer_id = config.hidden_size, config.num_attention_heads, layer_id
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.dense = nn.Linear(width, width, bias=False)
        is_last = layer_id == config.num_hidden_layers - 1
        self.dense_bias = nn.Parameter(torch.zeros(width)) if is_last else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        qkv = self.query_key_value(x).view(-1, self.heads, 3, x.shape[-1] // self.heads)
        q, k, v = rotate(qkv[:, :, 0], cos, sin), rotate(qkv[:, :, 1], cos, sin), qkv[:, :, 2]
        out = self.dense(ops.attention(q, k, v, layer_id=self.layer_id, scale=q.shape[-1] ** -0.5).view(x.shape))
        return out if self.dense_bias is None else out + self.dense_bias


class MLP(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        inner = int(config.hidden_size * config.intermediate_multiple_size)
        self.dense_h_to_4h = nn.Linear(config.hidden_size, inner, bias=False)
        self.dense_4h_to_h = nn.Linear(inner, config.hidden_size, bias=False)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(self.act(self.dense_h_to_4h(x)))
