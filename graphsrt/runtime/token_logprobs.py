"""Log-probabilities of tokens, as they come out of a step and as they are handed out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class TokenLogprob(NamedTuple):
    """What the model thought of one token, from its own logits: before biases, penalties, temperature and filters.

    logprob: natural logarithm of the token's probability. rank: 1 for the most probable token; of equal logits the
    lower id comes first. top: the most probable (token id, logprob), in that order, as many as were asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class StepLogprobs:
    """Log-probabilities of L rows of a step, in the order of the batch's ``logprob_rows``.

    token_ids int64[L], logprobs float64[L], ranks int64[L]; top_ids int64[L, K], top_logprobs float64[L, K], where K is
    the most that any row wants.
    """

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float64]
    ranks: NDArray[np.int64]
    top_ids: NDArray[np.int64]
    top_logprobs: NDArray[np.float64]

    def by_row(self, rows: NDArray[np.int64], num_top: NDArray[np.int64]) -> dict[int, TokenLogprob]:
        """For callers: ``rows`` are the batch's ``logprob_rows``, and each wants its ``num_top`` of the top tokens."""
        tops = zip(num_top.tolist(), self.top_ids.tolist(), self.top_logprobs.tolist())
        top = [list(zip(ids[:count], logprobs[:count])) for count, ids, logprobs in tops]
        found = zip(self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist(), top)
        return {row: TokenLogprob(*own) for row, own in zip(rows.tolist(), found)}
