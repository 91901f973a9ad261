"""The most probable tokens of each row: of one part of the vocabulary, and of all parts together."""

from __future__ import annotations

import torch
from torch import Tensor


def top(part: Tensor, start: int, size: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """The ``size`` largest logits of each row and their tokens, float64 and int64 [R, size], largest first.

    part: [R, n], of which column 0 is token ``start``. Of equal logits the lower token comes first, which
    ``torch.topk`` does not promise. What a narrower part lacks is ``-inf`` of token ``vocab_size``.
    """
    rows, width = part.shape
    count = min(size, width)
    border = part.topk(count, dim=-1).values[:, -1:]
    above, equal = part > border, part == border
    kept = above | (equal & (equal.cumsum(-1) <= count - above.sum(-1, keepdim=True)))
    ids = kept.nonzero()[:, 1].view(rows, count)
    values, order = part.gather(-1, ids).double().sort(dim=-1, descending=True, stable=True)
    missing = (0, size - count)
    ids = torch.nn.functional.pad(ids.gather(-1, order) + start, missing, value=vocab_size)
    return torch.nn.functional.pad(values, missing, value=-torch.inf), ids


def merge(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What :func:`top` gives on each rank, [ranks, R, C], as one list [R, ranks · C], largest first: values and ids.

    Of equal logits the lower token comes first. The third tensor tells where each came from: ``rank · C + place``.
    """
    ranks, rows, size = values.shape
    values, ids = (x.transpose(0, 1).reshape(rows, ranks * size) for x in (values, ids))
    ids, by_id = ids.sort(dim=-1, stable=True)  # what stands in for missing ones is now behind all that are ``-inf``
    values, order = values.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order), by_id.gather(-1, order)
