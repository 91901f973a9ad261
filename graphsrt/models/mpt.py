"""MPT: ALiBi with slopes in MosaicML's order, norms without bias, queries, keys and values side by side, maybe clipped.

Source: MosaicML 2023 (github.com/mosaicml/llm-foundry), as in transformers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphsrt import ops
from graphsrt.models import alibi


class Mpt(nn.Module):
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
        return self.lm_head(self.transformer(tokens))


class Model(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config, layer_id) for layer_id in range(config.n_layers))
        self.norm_f = nn.LayerNorm(config.d_model, config.layer_norm_epsilon, bias=False)
        # transformers does not pass attn_config.alibi_bias_max on: it is 8 whatever the config says
        self.register_buffer("slopes", alibi.mosaic_slopes(config.n_heads), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x, self.slopes)
        return self.norm_f(x)


class Block(nn.Module):
    def __init__(self, config: Any, layer_id: int):
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.d_model, config.layer_norm_epsilon, bias=False)
        self.attn = Attention(config, layer_id)
        self.norm_2 = nn.LayerNorm(config.d_model, config.layer_norm_epsilon, bias=False)
        self.ffn = MLP(config)

    def forward(self, x: Tensor, slopes: Tensor) -> Tensor:
        x = x + self.attn(self.norm_1(x), slopes)
        return x + self.ffn(self.norm_2(x))


class Attention(nn.Module):
    def __init__(self, config: Any, layer_id: int):
        super().__init__()
        self.heads, self.head_size, self.layer_id = config.n_heads, config.d_model // config.n_heads, layer_id
        self.scale = config.attn_config.softmax_scale or self.head_size**-0.5
        self.clip = config.attn_config.clip_qkv
        self.Wqkv = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.out_proj = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor, slopes: Tensor) -> Tensor:
        parts = self.Wqkv(x).chunk(3, -1)
        if self.clip:  # each by itself: the parts are then projections of their own
            parts = tuple(torch.clamp(part, -self.clip, self.clip) for part in parts)
        q, k, v = (part.reshape(-1, self.heads, self.head_size) for part in parts)
        out = ops.attention(q, k, v, layer_id=self.layer_id, scale=self.scale, alibi_slopes=slopes)
        return self.out_proj(out.view(x.shape))


class MLP(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.up_proj = nn.Linear(config.d_model, 4 * config.d_model, bias=False)
        self.down_proj = nn.Linear(4 * config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x)))
