"""Slopes of ALiBi, attention with linear biases: each head lowers a score by slope · distance (Press et al. 2022)."""

from __future__ import annotations

import math

import torch


def slopes(heads: int) -> torch.Tensor:
    """Slopes of ``heads`` heads, float32 ``[H]``: ``2^(-8i/n)`` for n heads, n the power of two below; the heads beyond
    it take every second slope of 2n heads. As in BLOOM and Falcon."""
    n = 2 ** math.floor(math.log2(heads))
    return torch.cat([_geometric(n, 8.0), _geometric(2 * n, 8.0)[::2][: heads - n]])


def mosaic_slopes(heads: int, bias_max: float = 8.0) -> torch.Tensor:
    """Slopes as in MPT: those of the power of two *above*, the second, fourth … before the first, third …"""
    n = 2 ** math.ceil(math.log2(heads))
    all_slopes = _geometric(n, bias_max)
    return all_slopes if n == heads else torch.cat([all_slopes[1::2], all_slopes[::2]])[:heads]


def _geometric(n: int, bias_max: float) -> torch.Tensor:
    # on the CPU by name: models are built on the meta device, and computed buffers must have values
    return 2.0 ** (torch.arange(1, n + 1, dtype=torch.float32, device="cpu") * (-bias_max / n))
