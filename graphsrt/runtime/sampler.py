"""From logits to tokens, for a whole batch at once, wherever the columns of the logits lie.

Ranks that hold a part of the vocabulary each tell one another a few numbers per row; no row of logits is moved. With
n ranks and R rows, each rank receives 8-byte numbers:

==============================  =================================================================================
every row                       n · 2: the largest logit and its token
drawn without top_k, top_p      n · 2 more, in two rounds: the weight of all tokens of a rank, and the token
drawn with top_k                n · 2 · top_k: the most probable tokens and their logits
drawn with top_p alone          n · (2 · 64 + 1), and eight times as many candidates each time that they do not reach
                                ``top_p``, for the rows concerned, up to the whole row
==============================  =================================================================================

All V logits of a row, gathered, are V elements. For greedy decoding of 64 rows over a vocabulary of 128256 on 8 ranks
that is 64 · 128256 · 4 bytes = 33 MB (float32) against 64 · 8 · 2 · 8 bytes = 8 KB.

Probabilities are integers: ``floor(2**b · exp((x - largest) / temperature))``, with b such that V of them fit into 63
bits. Sums of integers do not depend on how they are associated, so a token is the same however the vocabulary is
divided. b is 45 for V = 128256: a token 2**45 times less probable than the most probable one is never drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graphsrt.errors import GraphsrtError, explain
from graphsrt.lowering.kernels.first_largest import first_largest
from graphsrt.runtime.candidates import merge, top
from graphsrt.runtime.split_logits import SplitLogits

FIRST_CANDIDATES = 64  # of each rank, for a row with top_p alone; ample for a model that knows what it wants to say
MORE_CANDIDATES = 8  # times as many in the next round


@dataclass(frozen=True)
class Sampling:
    """How each of R rows is sampled: tensors [R] on one device; on the host they spare the device a synchronisation.

    temperature: 0 takes the largest logit. top_k: int64, 0 is off. top_p: 1 is off. min_p: 0 is off. uniform: in
    [0, 1); float64, so that rare tokens of a large vocabulary keep their chance.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor

    def rows(self, rows: Tensor, device: torch.device) -> Sampling:
        """Some of the rows, on ``device``."""
        return Sampling(*(getattr(self, name)[rows.to(self.top_k.device)].to(device) for name in vars(self)))


def sample(logits: SplitLogits, how: Sampling | None = None) -> Tensor:
    """One token per row of logits: int64[R], the same on every rank.

    logits: [R, V], any float dtype. how: None takes the largest logit of every row.

    Of equal logits the lower token comes first, in the arg-max and in the filters. Filters apply in the order
    temperature, ``top_k``, ``top_p`` (of what ``top_k`` left, scaled to sum to 1) and ``min_p``, as in transformers;
    exactly ``top_k`` tokens remain. The random number falls on the tokens in their order, or in order of probability
    where ``top_k`` or ``top_p`` is set. A row's token does not depend on other rows.

    Raises GraphsrtError for a row that holds NaN or +inf, or nothing but ``-inf``.
    Source: inverse transform sampling; top-p is nucleus sampling (Holtzman et al., 2020, section 3.1); min-p is Nguyen
    et al., 2024.
    """
    largest, tokens = _largest(logits)
    if how is None:
        return tokens
    sampled = how.temperature != 0
    cut = sampled & ((how.top_k > 0) | (how.top_p < 1))
    # Which way a row takes depends on that row alone.
    for rows, draw in ((sampled & ~cut, _draw), (cut, _draw_candidates)):
        chosen = rows.nonzero()[:, 0]
        if len(chosen):
            here = chosen.to(logits.device)
            tokens[here] = draw(logits.rows(here), largest[here], how.rows(chosen, logits.device))
    return tokens


def _largest(logits: SplitLogits) -> tuple[Tensor, Tensor]:
    """The largest logit of each row, float64[R], and the first token that has it."""
    found = [_first_largest(part) for part in logits.parts]
    if logits.columns.split:
        values, ids = logits.exchange(
            [values for values, _, _ in found], [ids + start for (_, ids, _), start in zip(found, logits.starts)]
        )
        # max and not max of the finite entries only: NaN must win, and does, on every device.
        largest, rank = values.max(dim=0)
        tokens = ids.gather(0, rank[None])[0]
        finite = bool(torch.isfinite(largest).all())
    else:
        ((largest, tokens, finite),) = found
    if not finite:
        row = int((~torch.isfinite(largest)).nonzero()[0, 0])
        (num_nan,) = logits.exchange([part[row].isnan().sum() for part in logits.parts])
        raise GraphsrtError(_describe(row, int(num_nan.sum()), float(largest[row]), logits.columns.vocab_size))
    return largest, tokens


def _first_largest(part: Tensor) -> tuple[Tensor, Tensor, bool]:
    """``part.max(dim=-1)`` in float64, and whether it is finite; of equal numbers the first, NaN being the largest."""
    if part.is_cpu:
        return first_largest(part)
    values, ids = part.max(dim=-1)
    return values.double(), ids, bool(values.isfinite().all())


def _draw(logits: SplitLogits, largest: Tensor, how: Sampling) -> Tensor:
    """Rows that keep all tokens, or those that ``min_p`` leaves: each rank weighs its own."""
    reached = []
    for part in logits.parts:
        weights = _weights(part, largest, how)
        kept = weights.masked_fill(weights < how.min_p[:, None], 0.0)
        reached.append(_integers(kept, logits.columns.vocab_size).cumsum(-1))
    (totals,) = logits.exchange([own[:, -1] for own in reached])  # [ranks, R]
    target = _target(how.uniform, totals.sum(0))
    before = totals.cumsum(0) - totals
    found = []
    for rank, (own, start) in enumerate(zip(reached, logits.starts), logits.columns.first_rank):
        within = target - before[rank]
        index = torch.searchsorted(own, within[:, None], right=True)[:, 0]
        found.append(torch.where((within >= 0) & (within < totals[rank]), index + start, -1))
    (tokens,) = logits.exchange(found)
    return tokens.amax(0)


def _draw_candidates(logits: SplitLogits, largest: Tensor, how: Sampling) -> Tensor:
    """Rows with ``top_k`` or ``top_p``: every rank gets the most probable tokens of all ranks, and draws from them."""
    vocab_size, most = logits.columns.vocab_size, max(logits.columns.counts)
    tokens = torch.empty_like(how.top_k)
    totals = [torch.zeros_like(tokens) for _ in logits.parts]
    alone = (how.top_k == 0).nonzero()[:, 0]  # with top_k the candidates are all that count
    if len(alone):
        own = how.rows(alone, logits.device)
        for total, part in zip(totals, logits.rows(alone).parts):
            total[alone] = _integers(_weights(part, largest[alone], own), vocab_size).sum(-1)
    pending = torch.arange(len(tokens), device=tokens.device)
    size = max(FIRST_CANDIDATES if len(alone) else 1, int(how.top_k.max()))
    while len(pending):
        some = logits if len(pending) == len(tokens) else logits.rows(pending)
        own = how.rows(pending, logits.device)
        size = min(size, most)
        best = [top(part, start, size, vocab_size) for part, start in some]
        values, ids, total = some.exchange(
            [values for values, _ in best], [ids for _, ids in best], [total[pending] for total in totals]
        )
        drawn, done = _draw_merged(some, values, ids, total.sum(0), largest[pending], own)
        tokens[pending[done]] = drawn[done]
        pending = pending[~done]
        size *= MORE_CANDIDATES
    return tokens


def _draw_merged(
    logits: SplitLogits, values: Tensor, ids: Tensor, total: Tensor, largest: Tensor, how: Sampling
) -> tuple[Tensor, Tensor]:
    """Tokens int64[R] drawn from candidates [ranks, R, C], and whether these were enough, bool[R]."""
    size, columns = values.shape[-1], logits.columns
    values, ids, order = merge(values, ids)
    known = _num_known(order, size, columns.counts)
    probable = _weights(values, largest, how)
    weights = _integers(probable, columns.vocab_size)
    place = torch.arange(weights.shape[-1], device=weights.device)
    top_k, top_p = how.top_k[:, None], how.top_p[:, None]
    weights = weights.masked_fill((top_k > 0) & (place >= top_k), 0)
    reached = weights.cumsum(-1)
    total = torch.where(how.top_k > 0, reached[:, -1], total)[:, None]
    # A token stays if those before it have not reached p; the first always does. Rounding must not cost p = 1 its tail.
    full = ((reached - weights).double() >= top_p * total.double()) & (top_p < 1)
    reached_known = reached.gather(-1, known[:, None] - 1).double()
    enough = (how.top_k > 0) | (size >= max(columns.counts)) | (reached_known >= top_p * total.double())[:, 0]
    reached = weights.masked_fill(full | (probable < how.min_p[:, None]), 0).cumsum(-1)
    index = torch.searchsorted(reached, _target(how.uniform, reached[:, -1])[:, None], right=True)
    return ids.gather(-1, index)[:, 0], enough


def _num_known(order: Tensor, size: int, counts: tuple[int, ...]) -> Tensor:
    """How many of the first places of merged candidates are those of the whole row, int64[R].

    A rank that has more than the ``size`` tokens that it gave may have one that belongs right after its last.
    """
    has_more = torch.tensor([count > size for count in counts], device=order.device)
    last = (order % size == size - 1) & has_more[order // size]
    return torch.where(last.any(-1), last.to(torch.uint8).argmax(-1) + 1, order.shape[-1])


def _weights(logits: Tensor, largest: Tensor, how: Sampling) -> Tensor:
    """Unscaled probabilities in float64, the largest exactly 1, so that no temperature overflows."""
    return ((logits.double() - largest[:, None]) / how.temperature[:, None].double()).exp()


def _integers(weights: Tensor, vocab_size: int) -> Tensor:
    """``weights``, at most 1, as int64 such that a whole row of them can be added."""
    return (weights * 2.0 ** (62 - (vocab_size - 1).bit_length())).to(torch.int64)


def _target(uniform: Tensor, total: Tensor) -> Tensor:
    """The integer in [0, total) that a random number falls on. Rounding up must not take it past the end."""
    return torch.minimum((uniform.double() * total.double()).to(torch.int64), total - 1)


def _describe(row: int, num_nan: int, largest: float, vocab_size: int) -> str:
    return explain(
        f"no token can be sampled from logit row {row}",
        expected="at least one finite logit, no NaN and no +inf",
        got=f"{num_nan} NaN of {vocab_size}" if num_nan else f"a maximum of {largest}",
        hint="the model has overflowed or is miscompiled: run graphsrt verify on it, or try dtype=torch.float32",
    )
