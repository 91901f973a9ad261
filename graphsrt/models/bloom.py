"""BLOOM: ALiBi instead of positions, a norm after the embedding, queries, keys and values interleaved by head.

transformers adds the ALiBi biases rounded to the model's dtype, as large as slope · position; here they are exact.
Source: Scao et al. 2022 (arXiv:2211.05100).
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from graphsrt import ops
from graphsrt.models import alibi


class Bloom(nn.Module):
    """``(tokens [T], positions [T]) -> logits [T, V]`` of one sequence."""

    base_model_prefix = "transformer"

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.transformer = Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.transformer.word_embeddings.weight

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.lm_head(self.transformer(tokens))


class Model(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.word_embeddings_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.h = nn.ModuleList(Block(config, layer_id) for layer_id in range(config.num_hidden_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.register_buffer("slopes", alibi.slopes(config.num_attention_heads), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.word_embeddings_layernorm(self.word_embeddings(tokens))
        for block in self.h:
            x = block(x, self.slopes)
        return self.ln_f(x)


class Block(nn.Module):
    def __init__(self, config: Any, layer_id: int):
        super().__init__()
        self.residual_is_normed = config.apply_residual_connection_post_layernorm
        self.input_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.self_attention = Attention(config, layer_id)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, slopes: Tensor) -> Tensor:
        normed = self.input_layernorm(x)
        x = (normed if self.residual_is_normed else x) + self.self_attention(normed, slopes)
        normed = self.post_attention_layernorm(x)
        return (normed if self.residual_is_normed else x) + self.mlp(normed)


class Attention(nn.Module):
    def __init__(self, config: Any, layer_id: int):
        super().__init__()
        width, self.heads, self.layer_id = config.hidden_size, config.num_attention_heads, layer_id
        self.query_key_value = nn.Linear(width, 3 * width)
        self.dense = nn.Linear(width, width)

    def forward(self, x: Tensor, slopes: Tensor) -> Tensor:
        qkv = self.query_key_value(x).view(-1, self.heads, 3, x.shape[-1] // self.heads)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        scale = q.shape[-1] ** -0.5
        out = ops.attention(q, k, v, layer_id=self.layer_id, scale=scale, alibi_slopes=slopes)
        return self.dense(out.view(x.shape))


class MLP(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.hidden_size, 4 * config.hidden_size)
        self.dense_4h_to_h = nn.Linear(4 * config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x), approximate="tanh"))
