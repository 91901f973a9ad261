"""Where requests come from: a prompt is tokenized, checked, and made a request that can be finished."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphsrt.runtime.detokenizer import Detokenizer
from graphsrt.runtime.drafter import Drafter, checked
from graphsrt.runtime.prompts import Prompt, check_ids, name_of, split_embeds
from graphsrt.runtime.request import Embeds, Request
from graphsrt.runtime.sampling_params import SamplingParams


class Intake:
    """Makes requests, in any thread.

    tokenizer: as in ``Engine``. check_fits: raises ValueError for prompt tokens and new tokens
        that can never be served. embeds_width: of input embeddings; None if the program takes none.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        vocab_size: int,
        eos_token_ids: Collection[int],
        check_fits: Callable[[int, int], None],
        embeds_width: int | None = None,
    ):
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._check_fits = check_fits
        self._embeds_width = embeds_width
        self._tokenizing = threading.Lock()  # tokenizers may not be called by two threads at once

    def make(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        index: int | None = None,
        *,
        drafter: Drafter | None = None,
        last_row: bool = False,
        wants_hidden: bool = False,
    ) -> Request:
        """A checked request. ``index`` is the prompt's number among several, for messages.

        Without ``params`` it asks for no tokens, but for logits, and hidden states: see :class:`Request`.
        Raises ValueError for an empty prompt, ids outside the vocabulary, or a request that could never be finished.
        """
        if params is not None and not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, got {type(params).__name__}")
        if params is not None and params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer; use stop_token_ids")
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(f"{name_of(index)} is a string, but there is no tokenizer: pass token ids")
            with self._tokenizing:
                given = self.tokenizer(prompt)["input_ids"]
            embeds = None
        else:
            given, embeds = split_embeds(prompt, self._embeds_width, index)
        ids = check_ids(given, self.vocab_size, index)
        if embeds is not None and params is not None and params.prompt_logprobs is not None:
            raise ValueError(f"{name_of(index)} has embeddings: there are no prompt_logprobs of what is no token")
        self._check_fits(len(ids), params.max_new_tokens if params is not None else 0)
        if params is None:
            return Request(ids, None, last_row=last_row, wants_hidden=wants_hidden, embeds=embeds)
        params.check_vocabulary(self.vocab_size, self._eos_token_ids)
        if drafter is not None:
            drafter = checked(drafter, self.vocab_size)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        return self._request(ids, params, drafter, seed, 0, embeds)

    def samples(self, prompt: Prompt, params: SamplingParams, index: int, drafter: Drafter | None) -> list[Request]:
        """The ``n`` requests of one prompt."""
        first = self.make(prompt, params, index, drafter=drafter)
        ids = first.tokens[: first.num_prompt_tokens]
        others = range(1, params.n)
        return [first, *(self._request(ids, params, first.drafter, first.seed, i, first.embeds) for i in others)]

    def _request(
        self,
        ids: NDArray[np.int64],
        params: SamplingParams,
        drafter: Drafter | None,
        seed: int,
        sample: int,
        embeds: Embeds | None,
    ) -> Request:
        request = Request(ids, params, seed=seed, drafter=drafter, sample=sample, embeds=embeds)
        if self.tokenizer is not None:
            request.detokenizer = Detokenizer(self.tokenizer, params.stop)
        return request
