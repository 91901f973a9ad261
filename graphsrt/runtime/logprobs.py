"""Log-probabilities of tokens, from logits whose columns may lie on several ranks.

In two rounds each rank receives, from each of n ranks and for each row, 4 + 2 · K numbers of 8 bytes: the largest
logit, the sum of the exponentials, the target's logit, the K most probable tokens with their logits, and how many
logits come before the target.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphsrt.runtime.candidates import merge, top
from graphsrt.runtime.split_logits import SplitLogits
from graphsrt.runtime.token_logprobs import StepLogprobs

# Rows at a time: a step over a long prompt may want thousands, and each is widened to float64 here.
ROWS_AT_A_TIME = 64


def log_probabilities(logits: SplitLogits, rows: Tensor, targets: Tensor, num_top: int) -> StepLogprobs:
    """Of ``targets`` int64[L] and of the ``num_top`` most probable tokens, in ``rows`` int64[L] of logits [R, V].

    Computed in float64, natural logarithm, the same on every rank. Every rank calls this with the same arguments.
    """
    blocks = [
        _block(logits.rows(some), wanted, num_top)
        for some, wanted in zip(rows.split(ROWS_AT_A_TIME), targets.split(ROWS_AT_A_TIME))
    ]
    logprobs, ranks, ids, values = (torch.cat(parts).cpu().numpy() for parts in zip(*blocks))
    return StepLogprobs(targets.cpu().numpy(), logprobs, ranks, ids, values)


def _block(logits: SplitLogits, targets: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    vocab_size = logits.columns.vocab_size
    largest = [part.amax(-1).double() for part in logits.parts]
    summed = [_sum_exp(part, own) for part, own in zip(logits.parts, largest)]
    own = [_pick(part, targets - start) for part, start in logits]
    best = [top(part, start, max(num_top, 1), vocab_size) for part, start in logits]
    largest_of, summed_of, own_of, values, ids = logits.exchange(
        largest, summed, own, [values for values, _ in best], [ids for _, ids in best]
    )
    highest = largest_of.amax(0)
    log_sum = highest + (summed_of * (largest_of - highest).exp()).sum(0).log()
    target = own_of.amax(0)
    before = []
    for part, start in logits:
        tokens = torch.arange(start, start + part.shape[-1], device=part.device)
        wide = target[:, None].to(part.dtype)  # it is one of these values
        ahead = (part > wide) | ((part == wide) & (tokens < targets[:, None]))
        before.append(ahead.sum(-1))
    (before_of,) = logits.exchange(before)
    values, ids = (merged[:, :num_top] for merged in merge(values, ids)[:2])
    return target - log_sum, before_of.sum(0) + 1, ids, values - log_sum[:, None]


def _sum_exp(part: Tensor, largest: Tensor) -> Tensor:
    """Sum of ``exp(x - largest)``; 0 for a part that is nothing but ``-inf``."""
    total = (part.double() - largest[:, None]).exp().sum(-1)
    return total.masked_fill(largest == -torch.inf, 0.0)


def _pick(part: Tensor, columns: Tensor) -> Tensor:
    """The logit in each row's column, float64[R]; ``-inf`` where the column is another part's."""
    here = (columns >= 0) & (columns < part.shape[-1])
    found = part.gather(-1, columns.clamp(0, part.shape[-1] - 1)[:, None])[:, 0].double()
    return found.masked_fill(~here, -torch.inf)
