"""Biases, penalties, bans and filters against transformers' own processors, in its order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from graphsrt.runtime.batch_builder import BatchBuilder, Entry
from graphsrt.runtime.forward_batch import ForwardBatch
from graphsrt.runtime.kv_pool import ReqToTokenPool
from graphsrt.runtime.logit_edits import LogitEdits
from graphsrt.runtime.request import Request
from graphsrt.runtime.sampler import Sampling, sample
from graphsrt.runtime.sampling_params import SamplingParams
from graphsrt.runtime.split_logits import edit
from tests.support.splits import split

VOCAB = 67
EOS = (2, 9)

PARAMS = [
    {},
    {"logit_bias": {3: 2.5, 60: -4.0, 2: 1.5}},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "min_new_tokens": 5},
    {"repetition_penalty": 1.3, "logit_bias": {11: 3.0, 5: -1.0}, "min_new_tokens": 3},
    {"min_new_tokens": 4, "stop_token_ids": [7, 2]},
    {"min_new_tokens": 6, "stop_token_ids": [7], "ignore_eos": True},
]
FILTERS = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.6, "top_k": 9},
    {"temperature": 1.1, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.07},
    {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.1},
]


def processors(params: SamplingParams, prompt_length: int) -> LogitsProcessorList:
    """What ``generate`` would make of the same parameters, in the order of its ``_get_logits_processor``."""
    made = LogitsProcessorList()
    if params.logit_bias:
        made.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in params.logit_bias.items()}))
    if params.repetition_penalty != 1:
        made.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.min_new_tokens:
        ending = sorted(params.ending(EOS))
        made.append(MinNewTokensLengthLogitsProcessor(prompt_length, params.min_new_tokens, ending))
    if params.temperature != 0:
        made.append(TemperatureLogitsWarper(params.temperature))
        if params.top_k:
            made.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            made.append(TopPLogitsWarper(params.top_p))
        if params.min_p:
            made.append(MinPLogitsWarper(params.min_p))
    return made


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("changes", PARAMS, ids=str)
def test_as_transformers(changes: dict, filters: dict, ranks: int) -> None:
    """Every token that transformers leaves is drawn by the middle of its share of the random numbers."""
    params = SamplingParams(**changes, **filters)
    generator = np.random.default_rng(0)
    prompt, output = generator.integers(0, VOCAB, 12), generator.integers(0, VOCAB, 4)
    logits = torch.from_numpy(generator.normal(size=(1, VOCAB)) * 2)
    ids = torch.from_numpy(np.concatenate([prompt, output]))[None]
    scores = processors(params, len(prompt))(ids, logits.clone())
    edits = LogitEdits(params, prompt, params.ending(EOS)).at(output)
    if params.temperature == 0:
        wanted, uniform = scores.argmax(-1), torch.zeros(1, dtype=torch.float64)
    else:
        probabilities = scores[0].softmax(-1)
        wanted = probabilities.nonzero()[:, 0]
        if params.top_k or params.top_p < 1:
            wanted = wanted[probabilities[wanted].argsort(descending=True)]
        shares = probabilities[wanted]
        uniform = shares.cumsum(0) - shares / 2
    count = len(wanted)
    edited = edit(
        split(logits.expand(count, -1), ranks),
        torch.arange(count).repeat_interleave(len(edits)),
        *(torch.from_numpy(np.tile(x, count)) for x in (edits.ids, edits.bias, edits.scale, edits.shift)),
    )
    how = Sampling(
        torch.full((count,), params.temperature, dtype=torch.float64),
        torch.full((count,), params.top_k),
        torch.full((count,), params.top_p, dtype=torch.float64),
        torch.full((count,), params.min_p, dtype=torch.float64),
        uniform,
    )
    assert sample(edited, how).tolist() == wanted.tolist()
    if "top_k" in filters:
        assert count < filters["top_k"] + 1
    elif changes.get("min_new_tokens", 0) > 4:
        assert not set(wanted.tolist()) & params.ending(EOS)


def test_presence_and_frequency_count_the_output_alone() -> None:
    """OpenAI's definition: counts of the generated tokens, after the repetition penalty, which sees the prompt too."""
    params = SamplingParams(
        presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0, logit_bias={8: 1.0}, min_new_tokens=2
    )
    prompt = np.array([4, 5, 4])
    edits = LogitEdits(params, prompt, {9, 5})
    output = np.array([6, 5, 6, 6, 8])

    def at(length: int) -> dict[int, tuple[float, float, float]]:
        found = edits.at(output[:length])
        assert (np.diff(found.ids) > 0).all()
        numbers = zip(found.bias.tolist(), found.scale.tolist(), found.shift.tolist())
        return dict(zip(found.ids.tolist(), numbers))

    banned = -np.inf
    assert at(0) == {4: (0, 2, 0), 5: (0, 2, banned), 8: (1, 1, 0), 9: (0, 1, banned)}
    assert at(1) == {4: (0, 2, 0), 5: (0, 2, banned), 6: (0, 2, -0.75), 8: (1, 1, 0), 9: (0, 1, banned)}
    assert at(2) == {4: (0, 2, 0), 5: (0, 2, -0.75), 6: (0, 2, -0.75), 8: (1, 1, 0)}
    assert at(2) == at(2)  # a step that failed is scheduled again
    for ahead in ([6, 8], [6, 33], []):  # drafts that do not come true
        fresh = LogitEdits(params, prompt, {9, 5}).at(np.array([6, 5, *ahead]))
        assert repr(edits.at(output[:2], ahead)) == repr(fresh)
    assert at(5) == {4: (0, 2, 0), 5: (0, 2, -0.75), 6: (0, 2, -1.25), 8: (1, 2, -0.75)}


def batch(builder: BatchBuilder, *chunks: tuple[Request, int], drafts: Sequence[int] = ()) -> ForwardBatch:
    """So many tokens of each request; the drafts are the last one's, which then decodes."""
    entries = [Entry(request, count) for request, count in chunks]
    entries[-1].drafts = drafts
    return ForwardBatch.decode(builder.build(entries, bool(drafts), []).encode())


def seated(builder: BatchBuilder, row: int, prompt: list[int], **params: Any) -> Request:
    request = Request(prompt, SamplingParams(**params), seed=row)
    request.row = row
    builder.set_row(request)
    return request


def test_rows_without_features_carry_nothing() -> None:
    """Only the rows that need it, and only while they need it."""
    builder = BatchBuilder(ReqToTokenPool(3, 20), {9})
    plain = seated(builder, 0, [4, 5], temperature=0.5, top_k=3, min_p=0.25)
    early = seated(builder, 2, [4, 5, 6], min_new_tokens=1, logprobs=2, max_new_tokens=3)
    both = batch(builder, (plain, 2), (early, 3))
    assert both.logit_rows.tolist() == [1, 4] and both.min_p.tolist() == [0.25, 0]
    assert both.edit_rows.tolist() == [1] and both.edit_tokens.tolist() == [9] and both.edit_shift.tolist() == [-np.inf]
    assert both.logprob_rows.tolist() == [1] and both.logprob_targets.tolist() == [-1]
    early.append(33)
    early.num_computed = 3
    both = batch(builder, (plain, 2), (early, 1))
    assert not len(both.edit_rows) and both.logprob_rows.tolist() == [1]
    alone = batch(builder, (plain, 2))
    assert not len(alone.edit_rows) and not len(alone.logprob_rows)


def test_rows_of_a_prompt_know_their_targets() -> None:
    """Chunks that do not end a prompt give its log-probabilities all the same; what is known is not asked for again."""
    builder = BatchBuilder(ReqToTokenPool(3, 20), {9})
    request = seated(
        builder, 1, [4, 5, 6, 7], temperature=0.5, prompt_logprobs=1, logprobs=0, repetition_penalty=2, max_new_tokens=9
    )
    assert request.num_skippable_tokens == 0
    chunk = batch(builder, (request, 2))
    assert chunk.logit_rows.tolist() == chunk.logprob_rows.tolist() == [0, 1]
    assert chunk.logprob_targets.tolist() == [5, 6] and chunk.logprob_top.tolist() == [1, 1]
    assert chunk.temperature.tolist() == [0, 0] and not len(chunk.edit_rows)
    request.prompt_logprobs += [None, None]  # stand for those of 5 and 6
    assert request.num_skippable_tokens == 2
    for first in (0, 1, 2):  # after a preemption, with and without a cached prefix, or in the next chunk
        request.num_computed = first
        chunk = batch(builder, (request, 4 - first))
        assert chunk.logit_rows.tolist() == [2 - first, 3 - first]
        assert chunk.logprob_targets.tolist() == [7, -1] and chunk.logprob_top.tolist() == [1, 0]
        assert chunk.temperature.tolist() == [0, 0.5] and set(chunk.edit_rows.tolist()) == {1}
    request.prompt_logprobs.append(None)
    request.append(33)
    assert request.num_skippable_tokens == 4


def test_rows_of_drafts_are_edited_as_if_the_drafts_were_right() -> None:
    builder = BatchBuilder(ReqToTokenPool(3, 20), {9})
    request = seated(
        builder, 1, [4, 5], presence_penalty=1.0, frequency_penalty=0.5, min_new_tokens=2, logprobs=3, max_new_tokens=9
    )
    request.append(7)
    request.num_computed = 2
    drafted = batch(builder, (request, 4), drafts=[8, 7, 6])
    found: list[dict[int, float]] = [{} for _ in range(4)]
    for row, token, shift in zip(drafted.edit_rows.tolist(), drafted.edit_tokens.tolist(), drafted.edit_shift.tolist()):
        found[row][token] = shift
    assert found == [{7: -1.5, 9: -np.inf}, {7: -1.5, 8: -1.5}, {7: -2.0, 8: -1.5}, {7: -2.0, 8: -1.5, 6: -1.5}]
    assert drafted.logprob_rows.tolist() == [0, 1, 2, 3] and set(drafted.logprob_targets.tolist()) == {-1}
