"""What comes out: of a step, of a request, and piece by piece of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from graphsrt.runtime.request import FinishReason, Request
from graphsrt.runtime.token_logprobs import StepLogprobs, TokenLogprob


@dataclass(frozen=True)
class StepResult:
    """What a step gives: a token per logit row; logits [R, V], log-probabilities, hidden states [R, E] where asked for.

    ``logits``, and the hidden states by their names, may be anything that slices by rows. It must be memory that later
    steps do not overwrite.
    compute_s, collectives_s: seconds that rank 0 spent in the program's kernels, and in its collectives, the wait for
    the slowest rank included; the two do not overlap. captured_rows: rows of the captured step that ran, its padding
    included; 0 if sizes were as they came.
    """

    token_ids: list[int]
    logits: Any | None = None
    logprobs: StepLogprobs | None = None
    compute_s: float = 0.0
    collectives_s: float = 0.0
    captured_rows: int = 0
    hidden: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Generation:
    """The continuation of one prompt.

    text: without the stop string or stop token; empty if the engine has no tokenizer. token_ids: all that were
    generated, the last of them being the one that ended it. finish_reason: "stop", "length", "cancelled", or
    "deadline" if its time ran out; the last two leave what there was by then. num_preemptions: times that it was put
    back for want of KV pages and computed again. num_cached_tokens: prompt tokens that another request had computed.
    alternatives: with ``SamplingParams(n=…)`` the other ``n - 1`` samples of the prompt, in order; ``samples`` has all
    of them, this one first. logprobs: one of each of ``token_ids``, None unless ``SamplingParams.logprobs`` asked for
    them. prompt_logprobs: the same of the prompt; nothing comes before its first token, whose place holds None.
    """

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: FinishReason
    num_preemptions: int = 0
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_cached_tokens: int = 0
    alternatives: list[Generation] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def samples(self) -> list[Generation]:
        """This one and its alternatives."""
        return [self, *self.alternatives]


@dataclass(frozen=True)
class StreamEvent:
    """A piece of one continuation: its new text, the tokens since the last event, and on the last event the reason.

    A piece of text may lag behind its tokens. ``str(event)`` is the text. logprobs: one of each of ``token_ids``, None
    unless asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] | None = None

    def __str__(self) -> str:
        return self.text


def one_per_prompt(requests: Iterable[Request], generations: Iterable[Generation]) -> list[Generation]:
    """Samples of a prompt, which follow one another, become the first one's alternatives."""
    prompts: list[Generation] = []
    for request, generation in zip(requests, generations):
        if request.sample == 0:
            prompts.append(generation)
        else:
            prompts[-1].alternatives.append(generation)
    return prompts
