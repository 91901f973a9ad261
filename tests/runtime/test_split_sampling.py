"""Sampling where each rank has a part of the vocabulary: the same tokens and numbers as in one piece."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import graphsrt
from graphsrt import SamplingParams
from graphsrt.errors import GraphsrtError
from graphsrt.runtime import sampler
from graphsrt.runtime.candidates import top
from graphsrt.runtime.logprobs import log_probabilities
from graphsrt.runtime.sampler import Sampling, sample
from graphsrt.runtime.split_logits import SplitLogits, edit
from tests.support import captures, tiny
from tests.support.splits import columns, split

VOCAB = 67  # 17, 17, 17 and 16 with one pad over four ranks; 23, 23 and 21 with two over three


def sampling(rows: int, seed: int = 0, top_k: tuple[int, ...] = (0, 0, 1, 3, 20, 66, 67, 5000)) -> Sampling:
    """Every combination of features, in rows of one batch."""
    generator = torch.Generator().manual_seed(seed)

    def choice(*values: float) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(0, len(values), (rows,), generator=generator)]

    return Sampling(
        choice(0.0, 0.3, 1.0, 1.0, 2.5).double(),
        choice(*top_k).long(),
        choice(1.0, 1.0, 0.2, 0.7, 0.999).double(),
        choice(0.0, 0.0, 0.05, 0.6, 1.0).double(),
        torch.rand(rows, generator=generator, dtype=torch.float64),
    )


@pytest.mark.parametrize("ranks", [2, 3, 4, 70])
@pytest.mark.parametrize("kind", ["random", "ties", "masked", "bfloat16", "flat"])
def test_tokens_are_those_of_one_piece(ranks: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties across the borders of ranks, and few candidates at first so that every round is taken."""
    monkeypatch.setattr(sampler, "FIRST_CANDIDATES", 2)
    rows = 160
    generator = torch.Generator().manual_seed(ranks)
    logits = torch.randn(rows, VOCAB, generator=generator, dtype=torch.float64) * 2
    if kind == "ties":
        logits = logits.round()
    elif kind == "masked":  # whole ranks of nothing but -inf
        logits[torch.rand(rows, VOCAB, generator=generator) < 0.9] = -math.inf
        logits[torch.arange(rows), torch.randint(0, VOCAB, (rows,), generator=generator)] = 0.5
    elif kind == "bfloat16":
        logits = logits.bfloat16()
    elif kind == "flat":
        logits = torch.zeros(rows, VOCAB)
    for how in (sampling(rows), sampling(rows, top_k=(0, 0, 2)), sampling(rows, top_k=(0,))):
        whole = sample(SplitLogits.of(logits), how)
        assert torch.equal(sample(split(logits, ranks), how), whole)
        assert len(whole.unique()) > 20
        one = torch.tensor([int(whole.argmax())])
        assert torch.equal(sample(split(logits[one], ranks), how.rows(one, logits.device)), whole[one])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_candidates_are_asked_for_until_they_reach_top_p(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peaked row is done at once, a flat one takes its whole row; neither changes the other."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(
        sampler,
        "top",
        lambda part, start, size, vocab: asked.append((len(part), size)) or top(part, start, size, vocab),
    )
    vocab = 1000
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(1, vocab, generator=generator) * 0.01
    peaked = torch.randn(1, vocab, generator=generator)
    peaked[0, 700] = 30.0
    one = torch.ones(2, dtype=torch.float64)
    how = Sampling(one, one.long() * 0, one * 0.9, one * 0, one * 0.75)
    tokens = sample(split(torch.cat([flat, peaked]), ranks), how)
    sizes = {1: [(2, 64), (1, 512), (1, 1000)], 2: [(2, 64), (1, 500)], 4: [(2, 64), (1, 250)]}[ranks]
    assert asked == [size for size in sizes for _ in range(ranks)]
    values, ids = flat[0].double().sort(descending=True, stable=True)
    reached = values.exp().cumsum(0)
    reached = reached[: int((reached < 0.9 * reached[-1]).sum()) + 1]
    assert tokens.tolist() == [int(ids[int((reached <= 0.75 * reached[-1]).sum())]), 700]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 70])
def test_edits(ranks: int) -> None:
    """Each (row, token) on the rank that has it; other logits keep their bits and pads stay out."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, VOCAB, generator=generator).bfloat16()
    chosen = torch.randperm(5 * VOCAB, generator=generator)[:90]
    rows, tokens = chosen // VOCAB, chosen % VOCAB
    bias, shift = (torch.randn(90, generator=generator, dtype=torch.float64) for _ in range(2))
    scale = torch.rand(90, generator=generator, dtype=torch.float64) + 0.5
    shift[:5] = -math.inf
    wanted = logits.float()
    for row, token, b, s, t in zip(rows.tolist(), tokens.tolist(), bias.tolist(), scale.tolist(), shift.tolist()):
        x = float(logits[row, token]) + b
        wanted[row, token] = (x / s if x > 0 else x * s) + t
    edited = edit(split(logits, ranks), rows, tokens, bias, scale, shift)
    got = torch.cat([part for part, start in edited if start < VOCAB], dim=1)
    assert got.dtype == torch.float32 and torch.equal(got, wanted)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 70])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_log_probabilities(ranks: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = (torch.randn(150, VOCAB, generator=generator) * 3).to(dtype)
    logits[::3] = logits[::3].round()  # ties, across the borders of ranks too
    logits[7, :40] = -math.inf
    rows = torch.arange(1, 140, 2)
    targets = torch.randint(0, VOCAB, (len(rows),), generator=generator)
    got = log_probabilities(split(logits, ranks), rows, targets, 5)
    wanted = logits[rows].double().log_softmax(-1)
    order = wanted.sort(dim=-1, descending=True, stable=True)
    assert got.token_ids.tolist() == targets.tolist()
    assert got.top_ids.tolist() == order.indices[:, :5].tolist()
    # sums of 67 float64 numbers in another order
    np.testing.assert_allclose(got.top_logprobs, order.values[:, :5].numpy(), rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(got.logprobs, wanted.gather(1, targets[:, None])[:, 0].numpy(), rtol=1e-13, atol=1e-13)
    assert got.ranks.tolist() == [order.indices[i].tolist().index(t) + 1 for i, t in enumerate(targets.tolist())]
    alone = log_probabilities(split(logits, ranks), rows, targets, 0)
    assert alone.top_ids.shape == (len(rows), 0) and alone.logprobs.tolist() == got.logprobs.tolist()
    every = log_probabilities(split(logits, ranks), rows, targets, VOCAB)
    assert every.top_ids.tolist() == order.indices.tolist()


def test_ranks_that_compute_their_own_part_agree() -> None:
    """Each rank with its part alone, among the others' messages: what a process does. All gather equally often."""
    rows, ranks = 60, 3
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(3)).round()
    how = sampling(rows, seed=4)
    together = split(logits, ranks)
    sent: list[torch.Tensor] = []

    def listen(parts: list[torch.Tensor]) -> torch.Tensor:
        sent.append(torch.stack(parts))
        return sent[-1]

    def all_of_it(split_logits: SplitLogits) -> tuple[list[int], list[Any]]:
        tokens = sample(split_logits, how)
        found = log_probabilities(split_logits, torch.arange(rows), tokens, 3)
        return tokens.tolist(), [getattr(found, name).tolist() for name in vars(found)]

    wanted = all_of_it(replace(together, columns=replace(together.columns, gather=listen)))
    for rank in range(ranks):
        heard = iter(sent)

        def speak(own: list[torch.Tensor], heard: Any = heard, rank: int = rank) -> torch.Tensor:
            message = next(heard)
            (mine,) = own
            assert torch.equal(mine, message[rank])  # it says what the others hear of it
            return message

        own = replace(together.columns, first_rank=rank, gather=speak)
        assert all_of_it(SplitLogits(own, [together.parts[rank]], [together.starts[rank]])) == wanted
        assert next(heard, None) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
def test_a_bad_row_is_named_on_every_rank(bad: float | None) -> None:
    logits = torch.randn(3, VOCAB)
    logits[1] = -math.inf
    if bad is not None:
        logits[1, 40] = bad
    found = f"1 NaN of {VOCAB}" if bad is not None and math.isnan(bad) else "a maximum of"
    with pytest.raises(GraphsrtError, match=f"logit row 1(?s:.*){found}"):
        sample(split(logits, 4), sampling(3))


def test_whole() -> None:
    logits = torch.randn(3, VOCAB)
    for ranks in (2, 3, 4, 70):
        layout = columns(VOCAB, ranks)
        width = -(-VOCAB // ranks)
        local = [torch.full((3, width), math.nan) for _ in range(ranks)]
        for part, start, count in zip(local, layout.starts, layout.counts):
            part[:, :count] = logits[:, start : start + count]
        assert torch.equal(layout.whole(local), logits)


def test_rank_processes_sample_as_gathered_logits_do() -> None:
    """Two processes that each hold half of the vocabulary, against simulated ranks that gather it: bit for bit."""
    features: list[dict[str, Any]] = [
        {},
        {"temperature": 1.5, "logprobs": 3, "prompt_logprobs": 2},
        {"temperature": 1.5, "top_k": 5, "repetition_penalty": 1.4, "logprobs": 0},
        {"temperature": 2.0, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.25},
        {"temperature": 1.2, "min_p": 0.2, "logit_bias": {66: 3.0, 33: 2.0, 34: 2.0}, "min_new_tokens": 7},
        {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "stop_token_ids": [5, 50], "logprobs": 67},
    ]
    params = [SamplingParams(max_new_tokens=9, seed=i, **own) for i, own in enumerate(features)]
    prompts = [tiny.tokens(3 + 2 * i, seed=i) for i in range(len(params))]
    model = tiny.model("llama", 4, 2, 1)
    options: dict[str, Any] = {"tp": 2, "page_size": 4, "max_tokens_per_step": 20, "dtype": torch.float64}
    with (
        captures.shared(),
        graphsrt.compile(model, backend="eager", **options) as split_up,
        graphsrt.compile(model, ranks="simulated", without=["scatter_logits"], **options) as gathered,
    ):
        assert str(split_up.program().output.meta["placement"]) == "S(1)"
        assert str(gathered.program().output.meta["placement"]) == "R"
        got, want = split_up.generate(prompts, params), gathered.generate(prompts, params)
        logits = [compiled.logits(prompts[-1]) for compiled in (split_up, gathered)]
    # processes and this one may sum with another number of threads: the last bits of float64
    torch.testing.assert_close(*logits, rtol=1e-10, atol=1e-12)
    assert logits[0].shape == (len(prompts[-1]), tiny.VOCAB)
    for one, other in zip(got, want):
        assert one.token_ids == other.token_ids and one.finish_reason == other.finish_reason
        for mine, theirs in ((one.logprobs, other.logprobs), (one.prompt_logprobs, other.prompt_logprobs)):
            assert (mine is None) == (theirs is None)
            for found, known in zip(mine or (), theirs or (), strict=True):
                assert (found is None) == (known is None)
                if found is not None and known is not None:
                    assert (found.token_id, found.rank) == (known.token_id, known.rank)
                    # a sum of exponentials in two parts or in one
                    assert found.logprob == pytest.approx(known.logprob, abs=1e-13)
                    assert [id for id, _ in found.top] == [id for id, _ in known.top]
    assert sum(len(one.token_ids) for one in got) > 30
