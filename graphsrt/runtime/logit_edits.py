"""Biases, penalties and bans of one request, as changes to single logits.

A logit ``x`` becomes ``scaled(x + bias) + shift``, where ``scaled`` divides a positive number by ``scale`` and
multiplies a negative one. A step carries these numbers for the tokens that they change, so that a rank keeps nothing
about requests that a preemption or a restart could make wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphsrt.runtime.sampling_params import SamplingParams


@dataclass(frozen=True)
class Edits:
    """Changes of M logits of one row: ids int64[M], each once; bias, scale, shift float64[M]."""

    ids: NDArray[np.int64]
    bias: NDArray[np.float64]
    scale: NDArray[np.float64]
    shift: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.ids)


class LogitEdits:
    """What a request's parameters make of its logits. Knows every token whose logit may differ, and how often it came.

    ending: tokens that end the request, which must not be sampled before ``min_new_tokens``.
    """

    def __init__(self, params: SamplingParams, prompt: NDArray[np.int64], ending: Collection[int]):
        self._params = params
        self._ending = np.unique(np.array(list(ending), dtype=np.int64)) if params.min_new_tokens else _NONE
        bias = params.logit_bias or {}
        penalised = prompt if params.repetition_penalty != 1 else _NONE
        self._ids = np.unique(np.concatenate([np.array(list(bias), dtype=np.int64), self._ending, penalised]))
        self._bias = np.array([bias.get(token, 0.0) for token in self._ids.tolist()], dtype=np.float64)
        self._in_prompt = np.isin(self._ids, penalised)
        self._counts = np.zeros(len(self._ids), dtype=np.int64)  # times generated
        self._num_counted = 0

    def at(self, output: NDArray[np.int64], ahead: Sequence[int] = ()) -> Edits:
        """The edits of the logits that follow ``output``, the tokens generated so far, and then ``ahead``.

        ``output`` may only have grown since the last call; what is ``ahead`` need not come true.
        """
        params = self._params
        if params.penalises:
            for token in output[self._num_counted :].tolist():
                self._count(token)
        self._num_counted = len(output)
        if ahead:
            guess = copy.copy(self)
            guess._counts = self._counts.copy()  # the other arrays are replaced where they change
            return guess.at(np.concatenate([output, ahead]))
        generated = self._counts > 0
        scale = np.where(self._in_prompt | generated, params.repetition_penalty, 1.0)
        shift = -(params.frequency_penalty * self._counts + params.presence_penalty * generated)
        if len(output) < params.min_new_tokens:
            shift[np.searchsorted(self._ids, self._ending)] = -np.inf
        kept = (self._bias != 0) | (scale != 1) | (shift != 0)
        return Edits(self._ids[kept], self._bias[kept], scale[kept], shift[kept])

    def _count(self, token: int) -> None:
        at = int(np.searchsorted(self._ids, token))
        if at == len(self._ids) or self._ids[at] != token:
            self._ids = np.insert(self._ids, at, token)
            self._bias = np.insert(self._bias, at, 0.0)
            self._in_prompt = np.insert(self._in_prompt, at, False)
            self._counts = np.insert(self._counts, at, 0)
        self._counts[at] += 1


_NONE = np.empty(0, dtype=np.int64)
