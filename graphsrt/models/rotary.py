"""Rotary positions (Su et al. 2021) for reference models: channels ``i`` and ``i + n`` of a head make a pair."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


class Rotary(nn.Module):
    """``positions [T]`` → cosine and sine, each ``[T, 1, 2n]``, of every rope type that transformers knows."""

    def __init__(self, config: Any, head_size: int):
        super().__init__()
        self.config = config  # with rope_type: capture fixes frequencies that would depend on the sequence's length
        self.rope_type = config.rope_parameters["rope_type"]
        if self.rope_type == "default":
            channels = int(head_size * config.rope_parameters.get("partial_rotary_factor", 1.0))
            exponents = torch.arange(0, channels, 2, dtype=torch.float32, device="cpu") / channels
            inv_freq, self.attention_scaling = config.rope_parameters["rope_theta"] ** -exponents, 1.0
        else:
            with torch.device("cpu"):
                inv_freq, self.attention_scaling = ROPE_INIT_FUNCTIONS[self.rope_type](config, "cpu")
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].float() * self.inv_freq.float()
        angles = torch.cat([angles, angles], -1)[:, None]
        scaling = self.attention_scaling
        return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first ``2n`` channels of each head of ``x [T, heads, D]``; the others pass through."""
    size = cos.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    swapped = torch.cat([-turned[..., size // 2 :], turned[..., : size // 2]], -1)
    turned = turned * cos + swapped * sin
    return turned if size == x.shape[-1] else torch.cat([turned, rest], -1)
