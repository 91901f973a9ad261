"""Falcon: one KV head, or groups of query heads beside their key and value; attention and MLP side by side on one
residual; rotary positions, or ALiBi.

Source: Almazrouei et al. 2023 (arXiv:2311.16867), as in transformers with its default attention.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN

from graphsrt import ops
from graphsrt.models import alibi
from graphsrt.models.rotary import Rotary, rotate

Bias = Tensor | tuple[Tensor, Tensor]
"""ALiBi slopes, or the cosine and sine of the positions."""


class Falcon(nn.Module):
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
        return self.lm_head(self.transformer(tokens, positions))


class Model(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.h = nn.ModuleList(Block(config, layer_id) for layer_id in range(config.num_hidden_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.is_rotary = not config.alibi
        if self.is_rotary:
            self.rotary_emb = Rotary(config, config.head_dim)
        else:  # rounded as in training, and scaled along with the scores
            slopes = alibi.slopes(config.num_attention_heads).bfloat16().float() * config.head_dim**-0.5
            self.register_buffer("slopes", slopes, persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.word_embeddings(tokens)
        bias = self.rotary_emb(positions, x.dtype) if self.is_rotary else self.slopes
        for block in self.h:
            x = block(x, bias)
        return self.ln_f(x)


class Block(nn.Module):
    def __init__(self, config: Any, layer_id: int):
        super().__init__()
        norms = config.num_ln_in_parallel_attn or (2 if config.new_decoder_architecture else 1)
        self.is_parallel = config.parallel_attn
        self.has_two_norms = self.is_parallel and norms == 2
        if self.has_two_norms:
            self.ln_attn = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
            self.ln_mlp = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        else:
            self.input_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        if not self.is_parallel:
            self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.self_attention = Attention(config, layer_id)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, bias: Bias) -> Tensor:
        if self.has_two_norms:
            return x + (self.mlp(self.ln_mlp(x)) + self.self_attention(self.ln_attn(x), bias))
        normed = self.input_layernorm(x)
        if self.is_parallel:
            return x + (self.mlp(normed) + self.self_attention(normed, bias))
        x = x + self.self_attention(normed, bias)
        return x + self.mlp(self.post_attention_layernorm(x))


class Attention(nn.Module):
    def __init__(self, config: Any, layer_id: int):
        super().__init__()
        self.heads, self.head_size, self.layer_id = config.num_attention_heads, config.head_dim, layer_id
        self.is_grouped = config.new_decoder_architecture
        self.is_multi_query = config.multi_query and not self.is_grouped
        self.kv_heads = config.num_kv_heads if self.is_grouped else 1 if self.is_multi_query else self.heads
        width, rows = config.hidden_size, (self.heads + 2 * self.kv_heads) * self.head_size
        self.query_key_value = nn.Linear(width, rows, config.bias)
        self.dense = nn.Linear(width, width, config.bias)

    def forward(self, x: Tensor, bias: Bias) -> Tensor:
        q, k, v = self.split(self.query_key_value(x))
        slopes = None
        if isinstance(bias, Tensor):
            slopes = bias
        else:
            q, k = rotate(q, *bias), rotate(k, *bias)
        out = ops.attention(q, k, v, layer_id=self.layer_id, scale=self.head_size**-0.5, alibi_slopes=slopes)
        return self.dense(out.view(x.shape))

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of queries, then of one key and one value; so for each group of heads."""
        if self.is_multi_query:
            rows = qkv.view(-1, self.heads + 2, self.head_size)
            return rows[:, :-2], rows[:, -2:-1], rows[:, -1:]
        rows = qkv.view(-1, self.kv_heads, self.heads // self.kv_heads + 2, self.head_size)
        return rows[:, :, :-2].reshape(-1, self.heads, self.head_size), rows[:, :, -2], rows[:, :, -1]


class MLP(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.hidden_size, config.ffn_hidden_size, config.bias)
        self.dense_4h_to_h = nn.Linear(config.ffn_hidden_size, config.hidden_size, config.bias)
        self.act = ACT2FN[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(self.act(self.dense_h_to_4h(x)))
