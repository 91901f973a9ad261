"""What a caller may pass as prompts, read and checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphsrt.runtime.sampling_params import SamplingParams

Prompt = str | Sequence[int]
Timeouts = float | Sequence[float | None] | None
"""Seconds for each of a call's requests, one for all or one for each; None is no limit."""


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts; a single string or a flat list of ids is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = list(prompts)
    if items and all(isinstance(item, (int, np.integer)) for item in items):
        return [items]
    return items


def params_of_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """``SamplingParams`` of each of ``count`` prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    each = list(params)
    if len(each) != count:
        raise ValueError(f"{count} prompts but {len(each)} SamplingParams: give one, or one per prompt")
    return each


def timeout_of_each(timeout_s: Timeouts, count: int) -> list[float | None]:
    """The time limit of each of ``count`` prompts, in seconds from now on."""
    if timeout_s is None or isinstance(timeout_s, (int, float)):
        each: list[float | None] = [timeout_s] * count
    else:
        each = list(timeout_s)
        if len(each) != count:
            raise ValueError(f"{count} prompts but {len(each)} values of timeout_s: give one, or one per prompt")
    for seconds in each:
        if seconds is not None and not (isinstance(seconds, (int, float)) and 0 < seconds < math.inf):
            raise ValueError(f"timeout_s must be a positive number of seconds or None, got {seconds!r}")
    return each


def check_ids(prompt: Sequence[int], vocab_size: int, index: int | None) -> NDArray[np.int64]:
    """The prompt as int64[T]; ValueError that names it (by ``index``, its number among several) if it is no prompt."""
    ids = np.asarray(prompt)
    if ids.size == 0:
        raise ValueError(f"{name_of(index)} is empty: it must have at least one token")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"{name_of(index)} must be a string or a flat list of token ids, got {prompt!r:.80}")
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        shown = ", ".join(str(token) for token in np.unique(outside)[:8].tolist())
        raise ValueError(f"{name_of(index)} has token ids outside the vocabulary [0, {vocab_size}): {shown}")
    return ids.astype(np.int64)


def name_of(index: int | None) -> str:
    """How messages call a prompt."""
    return "the prompt" if index is None else f"prompt {index}"
