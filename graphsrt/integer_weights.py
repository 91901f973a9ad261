"""Weights of linears in integers of 8 and 4 bits: how they are rounded, and how they lie in memory.

8 bits: ``w ≈ q · scale`` with a float32 scale for each row, the row's largest magnitude over 127.
4 bits: ``w ≈ q · scale + offset`` with a bfloat16 scale and offset for each :data:`GROUP` columns of a row, so that the
least number of them is 0 and the largest is 15.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

GROUP = 32
"""Columns that share a scale and an offset (4 bits)."""

BLOCK = 64
"""Columns that are stored together (4 bits): in 16 words of 16 bits, word j holding column 16 s + j in its bits 4 s to
4 s + 3. A row takes whole blocks; the last one may have 32 columns, and zeros in its upper halves."""


def to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``[N, K]`` → numbers int8 ``[N, K]`` and scales float32 ``[N]``. A row of zeros has the scale 1."""
    wide = weight.float()
    largest = wide.abs().amax(1) if wide.shape[1] else wide.new_zeros(wide.shape[0])
    scale = torch.where(largest > 0, largest / 127, 1.0)
    return (wide / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def from_int8(q: Tensor, scale: Tensor) -> Tensor:
    """The numbers that these stand for, float32 ``[N, K]``."""
    return q.float() * scale[:, None]


def to_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``[N, K]``, K a multiple of 32 → packed uint8 ``[N, ceil(K / 64) · 32]`` and bfloat16 ``[N, K / 32, 2]``.

    ``[..., 0]`` are scales, ``[..., 1]`` offsets. A group of equal numbers has the scale 1 and is its offset.
    """
    rows, width = weight.shape
    if width % GROUP:
        raise ValueError(f"4 bits need rows of whole groups of {GROUP} columns, and these have {width}")
    wide = weight.float().view(rows, width // GROUP, GROUP)
    low, high = wide.amin(-1), wide.amax(-1)
    scale = torch.where(high > low, (high - low) / 15, 1.0).to(torch.bfloat16)
    offset = low.to(torch.bfloat16)
    q = ((wide - offset.float()[..., None]) / scale.float()[..., None]).round().clamp(0, 15).to(torch.int32)
    blocks = -(-width // BLOCK)
    padded = torch.nn.functional.pad(q.view(rows, width), (0, blocks * BLOCK - width)).view(rows, blocks, 4, 16)
    words = reduce(torch.bitwise_or, (padded[:, :, s] << (4 * s) for s in range(4)))
    packed = torch.stack((words & 0xFF, words >> 8), dim=-1).to(torch.uint8)  # little-endian
    return packed.view(rows, blocks * BLOCK // 2), torch.stack((scale, offset), dim=-1)


def from_int4(packed: Tensor, pairs: Tensor) -> Tensor:
    """The numbers that these stand for, float32 ``[N, K]``."""
    rows, width = packed.shape[0], pairs.shape[1] * GROUP
    bytes_ = packed.view(rows, -1, 16, 2).to(torch.int32)
    words = bytes_[..., 0] | bytes_[..., 1] << 8
    q = torch.stack([words >> (4 * s) & 15 for s in range(4)], dim=2).view(rows, -1)[:, :width]
    scale, offset = pairs.float().unbind(-1)
    return (q.view(rows, -1, GROUP) * scale[..., None] + offset[..., None]).view(rows, width)
