"""Guessing the next tokens of a request, to verify several in one step instead of computing one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from graphsrt.errors import explain

Drafter = Callable[[NDArray[np.int64]], Sequence[int]]
"""From all known tokens of a request (read only, int64[num_tokens]) to tokens that may follow; none is a fine answer.

It is called before each step in which the request decodes, and must not keep the array. How good the guesses are
changes the number of steps and never a token: see ``Scheduler``.
"""


class PromptLookup:
    """Drafts what followed the last few tokens where they occurred before, in the prompt or in the output.

    max_drafts: at most this many tokens. max_ngram, min_ngram: how many last tokens must have occurred; longer matches
    are tried first, and of equal ones the latest is taken. Good where output repeats input (summaries, edits, code).
    Source: prompt lookup decoding (Saxena, 2023).
    """

    def __init__(self, max_drafts: int = 4, max_ngram: int = 3, min_ngram: int = 1):
        if max_drafts < 1 or not 1 <= min_ngram <= max_ngram:
            raise ValueError(
                explain(
                    "no such prompt lookup",
                    expected="max_drafts of at least 1, and 1 <= min_ngram <= max_ngram",
                    got=f"max_drafts={max_drafts}, min_ngram={min_ngram}, max_ngram={max_ngram}",
                )
            )
        self.max_drafts = max_drafts
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram

    def __call__(self, tokens: NDArray[np.int64]) -> list[int]:
        for size in range(min(self.max_ngram, len(tokens) - 1), self.min_ngram - 1, -1):
            # Where the last token occurs before, then the ones before it: most places drop out at once.
            ends = np.flatnonzero(tokens[size - 1 : -1] == tokens[-1]) + size - 1
            for back in range(1, size):
                ends = ends[tokens[ends - back] == tokens[-1 - back]]
            if len(ends):
                start = int(ends[-1]) + 1
                return tokens[start : start + self.max_drafts].tolist()
        return []


def checked(drafter: Drafter, vocab_size: int) -> Drafter:
    """The same drafter, with a ValueError for what is no list of token ids of this vocabulary."""

    def draft(tokens: NDArray[np.int64]) -> Sequence[int]:
        ids = np.asarray(drafter(tokens))
        if ids.size == 0:
            return ()
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= vocab_size:
            raise ValueError(
                explain(
                    "the drafter gave no list of token ids",
                    where=getattr(drafter, "__name__", type(drafter).__name__),
                    expected=f"a flat list of integers in [0, {vocab_size})",
                    got=f"{ids.tolist()!r:.80}",
                )
            )
        return ids.tolist()

    return draft
