"""One request and the states it passes through.

::

    WAITING ──admit──▶ PREFILL ──last prompt token computed──▶ RUNNING ──stop or length──▶ FINISHED
       ▲                  │                                       │
       └──────preempt─────┴───────────────────────────────────────┘

    PREFILL ──all logits computed──▶ FINISHED                  (a request for logits: it never runs)
    WAITING, PREFILL, RUNNING ──▶ CANCELLED (the caller, or a deadline) or FAILED (an error)

WAITING holds nothing. PREFILL and RUNNING hold a row of ``req_to_token`` and whole pages, the first of which may be the
cache's, read by others too. The last three are final and hold nothing.

admit    The longest cached prefix counts as computed; at least one token is left to compute, and all whose logits are
         wanted. Each step of PREFILL computes a chunk, after which the full pages are the cache's.
running  Each step computes the last known token and gives the next one; with drafts, it computes these as well and
         gives as many more tokens as were guessed right. ``num_computed == num_tokens - 1`` between two steps.
leave    By preemption, at the end or cancelled: full pages of computed, known tokens become the cache's, and the others
         are free. FAILED leaves nothing of its last step.
preempt  Keeps the tokens that it has generated: they are computed again as if they were prompt, as far as the cache has
         lost them, and the next token has the index in the output that it would have had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from graphsrt.runtime.detokenizer import Detokenizer
from graphsrt.runtime.drafter import Drafter
from graphsrt.runtime.logit_edits import LogitEdits
from graphsrt.runtime.radix_cache import Node
from graphsrt.runtime.sampling_params import SamplingParams
from graphsrt.runtime.token_logprobs import TokenLogprob

FinishReason = Literal["stop", "length", "cancelled", "deadline"]


@dataclass(frozen=True)
class Embeds:
    """Embeddings in a prompt: their places, int64[N], ascending, and themselves, float32 or float64 [N, E]."""

    positions: NDArray[np.int64]
    values: NDArray[np.floating]


class RequestState(Enum):
    """See the picture in the module's docstring."""

    WAITING = "waiting"
    PREFILL = "prefill"
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


_FINAL = frozenset({RequestState.FINISHED, RequestState.CANCELLED, RequestState.FAILED})
_NEXT: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.PREFILL, RequestState.CANCELLED, RequestState.FAILED}),
    RequestState.PREFILL: frozenset({RequestState.RUNNING, RequestState.WAITING}) | _FINAL,
    RequestState.RUNNING: frozenset({RequestState.WAITING}) | _FINAL,
    **{state: frozenset() for state in _FINAL},
}


class Request:
    """A prompt, how to continue it, and how far it has come.

    prompt: token ids, at least one. params: ``None`` asks for no token, but for what the model gives for the prompt:
        its logits and, with ``wants_hidden``, its hidden states, of every row, or with ``last_row`` of the last alone.
    seed: 64 bits, of which ``uniform_at(seed, index)`` makes the random number of each output token. sample: its number
        among the samples of one prompt, of which each has a seed of its own.

    tokens: int64[prompt + max_new_tokens], of which ``num_tokens`` are known. num_computed: tokens whose KV is written.
    row, pages: what is held in ``ReqToTokenPool`` and ``TokenToKVPool``. The first ``num_shared_pages`` of the pages
        belong to the ``RadixCache``, where ``node`` is the end of that prefix, locked.
    logprobs: one of each output token, where asked for. prompt_logprobs: one of each prompt token so far, where asked
        for; none for the first. Neither is computed again after a preemption.
    embeds: embeddings in place of some of the prompt's tokens, which are 0 there. Its KV is not shared.
    drafter: proposes tokens that are likely to follow, see ``drafter.py``; ``None`` decodes token by token.
    """

    def __init__(
        self,
        prompt: Sequence[int] | NDArray[np.int64],
        params: SamplingParams | None,
        *,
        seed: int = 0,
        last_row: bool = False,
        wants_hidden: bool = False,
        drafter: Drafter | None = None,
        sample: int = 0,
        embeds: Embeds | None = None,
    ):
        ids = np.asarray(prompt, dtype=np.int64)
        assert ids.ndim == 1 and len(ids) > 0
        self.params = params
        self.sample = sample
        self.seed = seed_of_sample(seed, sample)
        self.num_prompt_tokens = len(ids)
        self.max_new_tokens = params.max_new_tokens if params is not None else 0
        self.tokens: NDArray[np.int64] = np.zeros(len(ids) + self.max_new_tokens, dtype=np.int64)
        self.tokens[: len(ids)] = ids
        self.num_tokens = len(ids)
        self.num_computed = 0
        self.num_preemptions = 0
        self.row: int | None = None
        self.pages: list[int] = []
        self.num_shared_pages = 0
        self.node: Node | None = None
        self.drafter = drafter
        self.embeds = embeds
        self.num_cached_tokens = 0  # of the prompt, found in the cache when it was first admitted
        self.arrival = -1  # set by the scheduler: its place in first-come-first-served order
        self.ending: frozenset[int] = frozenset()  # set on admission: tokens that end it
        self.num_admitted_before = 0  # requests admitted by the scheduler until this one arrived
        self.state = RequestState.WAITING
        self.done = False  # whether the state is final
        self.finish_reason: FinishReason | None = None
        self.error: BaseException | None = None
        self.every_row = params is None and not last_row
        self.wants_hidden = wants_hidden
        self.given: list[dict[str, Any]] = []  # of each step that gave some: logits and hidden states by name
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] = [None]
        self.edits: LogitEdits | None = None  # made when a row first needs it
        self.detokenizer: Detokenizer | None = None
        self.num_detokenized = 0  # output tokens that the detokenizer has seen
        self.num_taken: int | None = 0  # output tokens handed out to a stream; None once its last event is out
        self.stopped_by_token = False  # the last output token ended it and is no text
        self.deadline: float | None = None  # of the engine's clock
        self.on_done: list[Callable[[Request], None]] = []  # called once, when the state has become final
        self.added_at = 0.0  # of the engine's clock, as the time of the last token below
        self.last_token_at: float | None = None
        self.num_timed = 0  # output tokens that the metrics have counted

    @property
    def wants_no_tokens(self) -> bool:
        """Whether this asks for what the model gives for its prompt instead of new tokens."""
        return self.params is None

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def output_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[self.num_prompt_tokens : self.num_tokens].tolist()

    @property
    def num_skippable_tokens(self) -> int:
        """Known tokens that need not be computed if their KV is cached: not those whose logits are wanted.

        All logits of a request for logits, those that give the log-probabilities of a prompt that are still missing,
        else the last known token's.
        """
        if self.every_row:
            return 0
        wants_prompt = self.params is not None and self.params.prompt_logprobs is not None
        if wants_prompt and len(self.prompt_logprobs) < self.num_prompt_tokens:
            return len(self.prompt_logprobs) - 1
        return self.num_tokens - 1

    @property
    def num_cacheable_tokens(self) -> int:
        """Known tokens whose KV may be that of other requests: none if the tokens do not tell what it is."""
        return 0 if self.embeds is not None else self.num_skippable_tokens

    @property
    def prompt_ids(self) -> NDArray[np.int64]:
        """The prompt's tokens, int64[prompt], without the places of embeddings."""
        ids = self.tokens[: self.num_prompt_tokens]
        return ids if self.embeds is None else np.delete(ids, self.embeds.positions)

    @property
    def max_kv_tokens(self) -> int:
        """KV slots this can ever need: the last token that it may generate is never computed."""
        return self.num_prompt_tokens + max(self.max_new_tokens - 1, 0)

    def to(self, state: RequestState) -> None:
        """Change the state; a transition that the picture does not show is a bug of ours."""
        assert state in _NEXT[self.state], f"{self.state.name} -> {state.name}"
        self.state = state
        self.done = state in _FINAL
        if self.done:
            for tell in self.on_done:
                tell(self)

    def append(self, token: int, logprob: TokenLogprob | None = None) -> None:
        """Add a generated token, and its log-probability where that is asked for."""
        if logprob is not None:
            self.logprobs.append(logprob)
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1

    def cut(self, num_output_tokens: int) -> None:
        """Forget the last output tokens: the text ended before them, in the midst of what one step gave."""
        assert num_output_tokens < self.num_output_tokens
        self.num_tokens = self.num_prompt_tokens + num_output_tokens
        del self.logprobs[num_output_tokens:]
        self.stopped_by_token = False

    def restart(self) -> None:
        """Preempted: everything known is to be computed again, and what it gives is collected anew."""
        self.to(RequestState.WAITING)
        self.num_computed = 0
        self.num_preemptions += 1
        self.given.clear()


def seed_of_sample(seed: int, sample: int) -> int:
    """64 bits for the sample with this number; the first one has the seed itself. Source: ours, by BLAKE2b."""
    seed &= 0xFFFF_FFFF_FFFF_FFFF
    if sample == 0:
        return seed
    return int.from_bytes(blake2b(f"{seed} {sample}".encode(), digest_size=8).digest(), "little")
