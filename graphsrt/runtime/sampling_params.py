"""How one request is to be sampled, and the random numbers that it will use."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    The logits of a row become a token in this order, which is transformers': ``logit_bias``, ``repetition_penalty``,
    ``presence_penalty`` and ``frequency_penalty``, ``min_new_tokens``, ``temperature``, ``top_k``, ``top_p``,
    ``min_p``, the draw. Greedy sampling stops before the temperature.

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
    min_new_tokens: before this many tokens are generated, those that would end generation are not sampled; a stop
        string that lies in that part of the text does not count later either.
    min_p: drop tokens less probable than ``min_p`` times the most probable one; 0 keeps all.
    repetition_penalty: logits of tokens of the prompt and of the output are divided by it where positive, multiplied
        by it where negative (Keskar et al., 2019, section 4.1); 1 is off.
    presence_penalty, frequency_penalty: subtracted from the logits of tokens of the output, once, and for each time
        that the token was generated (as in OpenAI's API); 0 is off.
    logit_bias: token id → number added to its logit; -1e9 bans a token for all purposes.
    logprobs: give log-probabilities of each generated token, and of this many most probable ones beside it (0: of the
        generated token alone); None gives none. They are of the model's own logits, before all of the above.
    prompt_logprobs: the same of the prompt's tokens, each given those before it.
    n: samples of the prompt, each with a seed of its own, derived from ``seed``. ``generate`` gives the first one, and
        the others as its ``alternatives``; the prompt is computed once.

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
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        for name, at_least in (("max_new_tokens", 1), ("top_k", 0), ("n", 1), ("min_new_tokens", 0)):
            value = getattr(self, name)
            if not _is_int(value) or value < at_least:
                raise ValueError(f"{name} must be an integer of at least {at_least}, got {value!r}")
            object.__setattr__(self, name, int(value))
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens ({self.min_new_tokens}) is above max_new_tokens ({self.max_new_tokens})")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and (not _is_int(value) or value < 0):
                raise ValueError(f"{name} must be None or an integer of at least 0, got {value!r}")
        if not _is_real(self.temperature) or not (0.0 <= self.temperature < math.inf):
            raise ValueError(f"temperature must be finite and at least 0 (0 is greedy), got {self.temperature!r}")
        if not _is_real(self.top_p) or not (0.0 < self.top_p <= 1.0):
            raise ValueError(f"top_p must lie in (0, 1] (1 keeps every token), got {self.top_p!r}")
        if not _is_real(self.min_p) or not (0.0 <= self.min_p <= 1.0):
            raise ValueError(f"min_p must lie in [0, 1] (0 keeps every token), got {self.min_p!r}")
        if not _is_real(self.repetition_penalty) or not (0.0 < self.repetition_penalty < math.inf):
            raise ValueError(
                f"repetition_penalty must be finite and above 0 (1 is off), got {self.repetition_penalty!r}"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not _is_real(value) or not math.isfinite(value):
                raise ValueError(f"{name} must be finite (0 is off), got {value!r}")
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
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise ValueError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
            for token, bias in self.logit_bias.items():
                if not _is_int(token) or token < 0 or not _is_real(bias) or not math.isfinite(bias):
                    raise ValueError(
                        f"logit_bias must map token ids to finite numbers, got {token!r}: {bias!r}"
                        + (" (-1e9 bans a token)" if bias == -math.inf else "")
                    )
            object.__setattr__(self, "logit_bias", {int(t): float(bias) for t, bias in self.logit_bias.items()})

    @property
    def edits_logits(self) -> bool:
        """Whether single logits are changed before the temperature (``min_new_tokens`` apart)."""
        return bool(self.logit_bias) or self.penalises

    @property
    def penalises(self) -> bool:
        """Whether logits depend on the tokens that came before, beyond what the model makes of them."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def has_row_features(self) -> bool:
        """Whether any of its logit rows may need more than the numbers that every row has."""
        asked = self.logprobs is not None or self.prompt_logprobs is not None
        return asked or self.edits_logits or self.min_new_tokens > 0

    def ending(self, eos: Collection[int]) -> frozenset[int]:
        """The tokens that end generation; ``eos`` are the model's end-of-sequence tokens."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(eos))

    def check_vocabulary(self, vocab_size: int, eos: Collection[int]) -> None:
        """Raise ValueError for what a vocabulary of this size cannot serve."""
        for token in self.logit_bias or ():
            if token >= vocab_size:
                raise ValueError(f"logit_bias names token {token}, outside the vocabulary [0, {vocab_size})")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > vocab_size:
                raise ValueError(f"{name} is {getattr(self, name)}, above the {vocab_size} tokens of the vocabulary")
        if self.min_new_tokens and len(self.ending(eos)) >= vocab_size:
            raise ValueError("min_new_tokens leaves no token to sample: every token of the vocabulary ends generation")


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
