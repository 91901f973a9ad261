"""What a caller may pass as prompts, read and checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphsrt.errors import explain
from graphsrt.runtime.request import Embeds
from graphsrt.runtime.sampling_params import SamplingParams

Prompt = str | Sequence[int] | Any
"""Text, token ids, embeddings (a float tensor [T, E]), or a list that mixes ids and embeddings."""
Timeouts = float | Sequence[float | None] | None
"""Seconds for each of a call's requests, one for all or one for each; None is no limit."""


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts; a single string, a flat list of ids, or embeddings [T, E] are one prompt."""
    if isinstance(prompts, str) or _is_embeds(prompts):
        return [prompts]
    items: list[Any] = list(prompts)
    is_id = [isinstance(item, (int, np.integer)) for item in items]
    if items and (all(is_id) or (any(is_id) and any(map(_is_embeds, items)))):
        return [items]
    return items


def split_embeds(prompt: Any, width: int | None, index: int | None) -> tuple[Any, Embeds | None]:
    """Token ids, 0 where the prompt has embeddings, and these. ``width`` is the model's; None if it takes none."""
    parts = [prompt] if _is_embeds(prompt) else prompt
    if not isinstance(parts, (list, tuple)) or not any(map(_is_embeds, parts)):
        return prompt, None
    if width is None:
        raise ValueError(
            explain(f"{name_of(index)} has embeddings, and the program takes tokens only",
                    hint="compile the model with input_embeds=True")
        )  # fmt: skip
    ids: list[int] = []
    positions, values = [], []
    for part in parts:
        if not _is_embeds(part):
            ids += [int(part)] if isinstance(part, (int, np.integer)) else list(part)
            continue
        given = part.detach().cpu() if hasattr(part, "detach") else part
        # float64 as it is, all others exactly: NumPy has no bfloat16
        array = np.asarray(given if "float64" in str(part.dtype) or not hasattr(given, "float") else given.float())
        if array.shape[1] != width or not np.isfinite(array).all():
            raise ValueError(
                explain(f"{name_of(index)} has embeddings that do not fit the model", expected=f"finite [T, {width}]",
                        got=f"{list(array.shape)}" + ("" if np.isfinite(array).all() else ", not all finite"))
            )  # fmt: skip
        positions.append(np.arange(len(ids), len(ids) + len(array)))
        values.append(array)
        ids += [0] * len(array)
    return ids, Embeds(np.concatenate(positions), np.concatenate(values))


def _is_embeds(value: Any) -> bool:
    """Whether this is a matrix of floats, of torch or of NumPy."""
    return hasattr(value, "dtype") and getattr(value, "ndim", 0) == 2 and "float" in str(value.dtype)


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
