"""GPT-Neo: learned positions, unscaled scores, every second layer looks through a window.

Source: Black et al. 2021 (github.com/EleutherAI/gpt-neo), as in transformers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN

from graphsrt import ops


class GPTNeo(nn.Module):
    """``(tokens [T], positions [T]) -> logits [T, V]`` of one sequence."""

    base_model_prefix = "transformer"

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.transformer = Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.transformer.wte.weight

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.lm_head(self.transformer(tokens, positions))


class Model(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.wpe = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.h = nn.ModuleList(Block(config, layer_id) for layer_id in range(config.num_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(positions)
        for block in self.h:
            x = block(x)
        return self.ln_f(x)


class Block(nn.Module):
    def __init__(self, config: Any, layer_id: int):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.attn = nn.ModuleDict({"attention": Attention(config, layer_id)})  # the name in checkpoints
        self.ln_2 = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn["attention"](self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Attention(nn.Module):
    def __init__(self, config: Any, layer_id: int):
        super().__init__()
        width, self.heads, self.layer_id = config.hidden_size, config.num_heads, layer_id
        self.window = config.window_size if config.attention_layers[layer_id] == "local" else None
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        shape = (-1, self.heads, x.shape[-1] // self.heads)
        q, k, v = self.q_proj(x).view(shape), self.k_proj(x).view(shape), self.v_proj(x).view(shape)
        out = ops.attention(q, k, v, layer_id=self.layer_id, scale=1.0, sliding_window=self.window)
        return self.out_proj(out.view(x.shape))


class MLP(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        inner = config.intermediate_size or 4 * config.hidden_size
        self.c_fc = nn.Linear(config.hidden_size, inner)
        self.c_proj = nn.Linear(inner, config.hidden_size)
        self.act = ACT2FN[config.activation_function]

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.act(self.c_fc(x)))
