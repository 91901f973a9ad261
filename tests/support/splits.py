"""Logits cut into parts as ranks hold them: blocks of the vocabulary, the last ranks padded."""

from __future__ import annotations

import math

import torch

from graphsrt.placement import Layout
from graphsrt.runtime.split_logits import Columns, SplitLogits


def columns(vocab_size: int, ranks: int) -> Columns:
    """As a program whose result is divided over ``ranks`` ranks gives them, all of them in this process."""
    layout = Layout.blocks(vocab_size, ranks)
    starts, counts = zip(*(layout.owned_block(rank) for rank in range(ranks)))
    return Columns(starts, counts)


def split(logits: torch.Tensor, ranks: int, pad: float = math.nan) -> SplitLogits:
    """Logits [R, V] over so many ranks; what stands in the padded columns must not matter."""
    layout = Layout.blocks(logits.shape[1], ranks)
    parts = []
    for rank in range(ranks):
        part = logits[:, layout.addresses(rank)].clone()
        part[:, layout.owned_block(rank)[1] :] = pad
        parts.append(part)
    return columns(logits.shape[1], ranks).cut(parts)
