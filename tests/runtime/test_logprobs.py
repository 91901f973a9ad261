"""Log-probabilities through the whole engine, against transformers' logits, and what sampling parameters do there."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import graphsrt
from graphsrt import SamplingParams
from graphsrt.api import CompiledModel
from graphsrt.runtime.token_logprobs import TokenLogprob
from tests.support import captures, tiny

PROMPTS = [tiny.tokens(13, seed=1), tiny.tokens(6, seed=2), tiny.tokens(9, seed=3)]


def compiled(**options: Any) -> CompiledModel:
    with captures.shared():
        return graphsrt.compile(
            tiny.model("llama", 4, 2, 1), tp=2, ranks="simulated", dtype=torch.float64, page_size=4, **options
        )


def check(found: TokenLogprob, token: int, wanted: torch.Tensor, num_top: int) -> None:
    """Against the logits [V] that transformers gives."""
    logprobs = wanted.log_softmax(-1)
    order = logprobs.sort(descending=True, stable=True)
    assert found.token_id == token
    # transformers' norms and rope are float32 in a model of float64, and round other sums of it otherwise
    assert found.logprob == pytest.approx(float(logprobs[token]), abs=1e-6)
    assert found.rank == order.indices.tolist().index(token) + 1
    assert [id for id, _ in found.top] == order.indices[:num_top].tolist()
    assert [value for _, value in found.top] == pytest.approx(order.values[:num_top].tolist(), abs=1e-6)


def check_generation(result: graphsrt.Generation, logprobs: int | None, prompt_logprobs: int | None) -> None:
    ids = [*result.prompt_token_ids, *result.token_ids]
    logits = tiny.eager_logits(tiny.model("llama", 4, 2, 1), ids)
    assert (result.logprobs is None) == (logprobs is None)
    assert (result.prompt_logprobs is None) == (prompt_logprobs is None)
    if result.logprobs is not None:
        assert len(result.logprobs) == len(result.token_ids)
        start = result.num_prompt_tokens
        for i, found in enumerate(result.logprobs):
            check(found, ids[start + i], logits[start + i - 1], logprobs or 0)
    if result.prompt_logprobs is not None:
        assert len(result.prompt_logprobs) == result.num_prompt_tokens and result.prompt_logprobs[0] is None
        for i, found in enumerate(result.prompt_logprobs[1:], 1):
            assert found is not None
            check(found, ids[i], logits[i - 1], prompt_logprobs or 0)


@pytest.mark.parametrize("per_step", [5, 64])
def test_prompts_and_outputs_in_chunks_and_after_preemptions(per_step: int) -> None:
    """Of the model's own logits, whatever penalties, temperature and filters do; none lost, none there twice."""
    features = {"temperature": 1.3, "top_k": 30, "repetition_penalty": 1.2, "max_new_tokens": 14, "ignore_eos": True}
    wanted = [(2, 3), (0, None), (None, 1)]
    params = [
        SamplingParams(seed=i, logprobs=logprobs, prompt_logprobs=prompt, **features)
        for i, (logprobs, prompt) in enumerate(wanted)
    ]
    with compiled(max_total_tokens=48, max_tokens_per_step=per_step, max_running=4) as model:
        results = model.generate(PROMPTS, params)
        assert sum(result.num_preemptions for result in results) > 0
        alone = [model.generate(prompt, own)[0] for prompt, own in zip(PROMPTS, params)]
    for result, single, (logprobs, prompt) in zip(results, alone, wanted):
        check_generation(result, logprobs, prompt)
        assert result.token_ids == single.token_ids


def test_streams_carry_them() -> None:
    params = SamplingParams(temperature=1.0, seed=5, logprobs=1, max_new_tokens=6, ignore_eos=True)
    with compiled() as model:
        (result,) = model.generate(PROMPTS[0], params)
        events = list(model.stream(PROMPTS[0], params))
        plain = list(model.stream(PROMPTS[0], SamplingParams(max_new_tokens=2, ignore_eos=True)))
    assert result.logprobs is not None
    streamed = [found for event in events for found in event.logprobs or []]
    assert [found.token_id for found in streamed] == [id for event in events for id in event.token_ids]
    for found, known in zip(streamed, result.logprobs, strict=True):
        assert (found.token_id, found.rank, found.top[0][0]) == (known.token_id, known.rank, known.top[0][0])
        assert found.logprob == pytest.approx(known.logprob, abs=1e-6)  # the second time the prompt was cached
    assert all(len(event.logprobs or ()) == len(event.token_ids) for event in events)
    assert {event.logprobs for event in plain} == {None}


def test_parameters_act() -> None:
    """Each where nothing else could have done it: greedy decoding of one prompt, with one thing changed."""
    length = 8
    with compiled() as model:

        def greedy(**changes: Any) -> list[int]:
            params = SamplingParams(max_new_tokens=length, **{"ignore_eos": True, **changes})
            return model.generate(PROMPTS[1], params)[0].token_ids

        plain = greedy()
        first = plain[0]
        assert greedy(logit_bias={first: -1e9})[0] != first and first not in greedy(logit_bias={first: -1e9})
        assert greedy(logit_bias={60: 1e6}) == [60] * length
        # a token that is pushed by more than any difference of logits, and penalised by twice that once it was there
        assert greedy(logit_bias={60: 1e4}, presence_penalty=2e4).count(60) == 1
        assert greedy(logit_bias={60: 1e4}, frequency_penalty=3e3).count(60) == 4
        assert greedy(logit_bias={60: 1e4, 61: 9e3}, repetition_penalty=2.0)[:2] == [60, 61]
        # ended by its first token unless that comes too early: then the token is not sampled at all
        assert greedy(stop_token_ids=[first]) == [first]
        late = greedy(stop_token_ids=[first, 60], min_new_tokens=3, logit_bias={60: 1e6})
        assert late[3:] == [60] and not {first, 60} & set(late[:3])
        assert greedy(temperature=5.0, min_p=1.0) == plain
        assert greedy(temperature=5.0, seed=1) != plain


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logit_bias": {tiny.VOCAB: 1.0}}, rf"token {tiny.VOCAB}, outside the vocabulary \[0, {tiny.VOCAB}\)"),
        ({"logprobs": tiny.VOCAB + 1}, rf"logprobs is {tiny.VOCAB + 1}, above the {tiny.VOCAB} tokens"),
        ({"prompt_logprobs": 1000}, "prompt_logprobs is 1000"),
        ({"min_new_tokens": 1, "stop_token_ids": range(tiny.VOCAB)}, "leaves no token to sample"),
    ],
)
def test_what_the_vocabulary_cannot_serve(changes: dict, message: str) -> None:
    model = captures.compiled("llama", 4, 2, 2, 1)
    with pytest.raises(ValueError, match=message):
        model.generate([[3, 4]], SamplingParams(max_new_tokens=5, **changes))


def test_probabilities_sum_to_one() -> None:
    model = captures.compiled("llama", 4, 2, 2, 1)
    (result,) = model.generate([[3, 4, 5]], SamplingParams(max_new_tokens=1, logprobs=tiny.VOCAB))
    assert result.logprobs is not None
    assert math.fsum(math.exp(value) for _, value in result.logprobs[0].top) == pytest.approx(1, abs=1e-12)
