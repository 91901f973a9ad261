"""How one request is to be sampled, and the random numbers that it will use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    max_new_tokens: at most this many tokens are generated, at least 1.
    temperature: 0 is greedy (arg-max); otherwise logits are divided by it.
    top_p: keep the smallest set of tokens whose probabilities reach ``top_p``, after ``top_k``; 1 keeps all.
    top_k: keep this many most probable tokens; 0 keeps all.
    seed: random numbers depend on (seed, index of the output token) alone, so the same prompt and seed give the same
        tokens whatever else is in the batch. ``None`` draws a fresh seed for each request.
    stop: a string, or several; generation ends where one appears, and it is cut from the text.
    stop_token_ids: tokens that end generation as an end-of-sequence token does. The token is kept in ``token_ids`` and
        left out of the text.
    ignore_eos: go on after an end-of-sequence token of the model (``stop_token_ids`` still count).
    min_new_tokens: nothing but ``max_new_tokens`` ends generation before this many tokens; a stop string that lies in
        that part of the text does not count later either.

    Raises ValueError for a value outside these ranges.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        for name, at_least in (("max_new_tokens", 1), ("top_k", 0), ("min_new_tokens", 0)):
            value = getattr(self, name)
            if not _is_int(value) or value < at_least:
                raise ValueError(f"{name} must be an integer of at least {at_least}, got {value!r}")
            object.__setattr__(self, name, int(value))
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens ({self.min_new_tokens}) is above max_new_tokens ({self.max_new_tokens})")
        if not _is_real(self.temperature) or not (0.0 <= self.temperature < math.inf):
            raise ValueError(f"temperature must be finite and at least 0 (0 is greedy), got {self.temperature!r}")
        if not _is_real(self.top_p) or not (0.0 < self.top_p <= 1.0):
            raise ValueError(f"top_p must lie in (0, 1] (1 keeps every token), got {self.top_p!r}")
        if self.seed is not None and not _is_int(self.seed):
            raise ValueError(f"seed must be an integer or None, got {self.seed!r}")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop must be a non-empty string or a sequence of them, got {self.stop!r}")
        object.__setattr__(self, "stop", stop)
        stop_token_ids = tuple(self.stop_token_ids)
        for token in stop_token_ids:
            if not _is_int(token) or token < 0:
                raise ValueError(f"stop_token_ids must be non-negative integers, got {token!r}")
        object.__setattr__(self, "stop_token_ids", tuple(int(token) for token in stop_token_ids))


def _is_int(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return _is_int(value) or isinstance(value, (float, np.floating))


def uniform_at(seeds: ArrayLike, indices: ArrayLike) -> NDArray[np.float64]:
    """The random number of each (seed, output index): float64[R] in [0, 1), from uint64[R] and int64[R].

    A hash and not a generator with state: preempting, batching or cancelling requests cannot shift anybody's numbers.
    Source: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014); the seed is mixed first so that nearby seeds do not give
    one sequence shifted by a few places.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is what the hash is defined by
        start = _mix(np.atleast_1d(np.asarray(seeds, dtype=np.uint64)) + golden)
        counter = np.atleast_1d(np.asarray(indices, dtype=np.int64)).astype(np.uint64) + np.uint64(1)
        bits = _mix(start + counter * golden)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
