"""The first GPT: learned positions, norms after each sum, weights stored as inputs × outputs.

Source: Radford et al. 2018 (Improving Language Understanding by Generative Pre-Training).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.models.openai.modeling_openai import ACT_FNS
from transformers.pytorch_utils import Conv1D

from graphsrt import ops


class OpenAIGPT(nn.Module):
    """``(tokens [T], positions [T]) -> logits [T, V]`` of one sequence."""

    base_model_prefix = "transformer"

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.transformer = Model(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.transformer.tokens_embed.weight

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.lm_head(self.transformer(tokens, positions))


class Model(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.tokens_embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.positions_embed = nn.Embedding(config.n_positions, config.n_embd)
        self.h = nn.ModuleList(Block(config, layer_id) for layer_id in range(config.n_layer))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens_embed(tokens) + self.positions_embed(positions)
        for block in self.h:
            x = block(x)
        return x


class Block(nn.Module):
    def __init__(self, config: Any, layer_id: int):
        super().__init__()
        self.attn = Attention(config, layer_id)
        self.ln_1 = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.mlp = MLP(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        x = self.ln_1(x + self.attn(x))
        return self.ln_2(x + self.mlp(x))


class Attention(nn.Module):
    def __init__(self, config: Any, layer_id: int):
        super().__init__()
        self.heads, self.head_size, self.layer_id = config.n_head, config.n_embd // config.n_head, layer_id
        self.c_attn = Conv1D(3 * config.n_embd, config.n_embd)
        self.c_proj = Conv1D(config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.reshape(-1, self.heads, self.head_size) for part in self.c_attn(x).chunk(3, -1))
        out = ops.attention(q, k, v, layer_id=self.layer_id, scale=self.head_size**-0.5)
        return self.c_proj(out.view(x.shape))


class MLP(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.c_fc = Conv1D(4 * config.n_embd, config.n_embd)
        self.c_proj = Conv1D(config.n_embd, 4 * config.n_embd)
        self.act = ACT_FNS[config.afn]

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.act(self.c_fc(x)))
