"""Drafts and reused prefixes on real programs: tiny models on one rank and two give the tokens of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

import graphsrt
from graphsrt.runtime.drafter import PromptLookup
from graphsrt.runtime.forward_batch import ForwardBatch, ForwardMode
from graphsrt.runtime.sampling_params import SamplingParams
from tests.support import latent, tiny

PAGE = 4
PROMPTS = [tiny.tokens(9, seed=1), tiny.tokens(1, seed=2), tiny.tokens(14, seed=3)]
# float64, where the order of summation moves logits by 1e-15: tokens are equal, and nothing is left to luck.
GREEDY = SamplingParams(max_new_tokens=15, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=15, ignore_eos=True, temperature=1.3, top_k=30, seed=4)


MODELS = {
    "llama": (lambda: tiny.model("llama"), 1),
    "windows-tp2": (lambda: tiny.model("gemma2"), 2),  # every second layer sees five tokens
    "latents-tp2": (lambda: latent.model("deepseek_v3"), 2),  # the pool has another shape
}
"""Model, and ranks, all in this process."""


@pytest.fixture(scope="module", params=MODELS)
def compiled(request: pytest.FixtureRequest) -> Iterator[graphsrt.CompiledModel]:
    make, tp = MODELS[request.param]
    ranks = "simulated" if tp > 1 else None
    with graphsrt.compile(make(), tp=tp, ranks=ranks, backend="eager", page_size=PAGE, max_total_tokens=400) as model:
        yield model


@pytest.fixture(scope="module")
def plain(compiled: graphsrt.CompiledModel) -> dict[SamplingParams, list[list[int]]]:
    return {params: [g.token_ids for g in compiled.generate(PROMPTS, params)] for params in (GREEDY, SAMPLED)}


def drafters(expected: list[list[int]]) -> dict[str, Callable[[np.ndarray], list[int]]]:
    """Those that know what will come, that are always wrong, wrong in the middle, and that guess."""
    whole = [prompt + output for prompt, output in zip(PROMPTS, expected)]

    def good(tokens: np.ndarray) -> list[int]:
        (known,) = [w for w in whole if w[: len(tokens)] == tokens.tolist()]
        return known[len(tokens) :][:4]

    def half(tokens: np.ndarray) -> list[int]:
        return [(t + (i == 2)) % tiny.VOCAB for i, t in enumerate(good(tokens))]

    rng = np.random.default_rng(0)
    return {
        "good": good,
        "half": half,
        "bad": lambda tokens: [(t + 1) % tiny.VOCAB for t in good(tokens)],
        "random": lambda tokens: rng.integers(0, tiny.VOCAB, size=rng.integers(0, 6)).tolist(),
        "lookup": PromptLookup(),
    }


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["good", "half", "bad", "random", "lookup"])
def test_tokens_are_those_of_plain_decoding(
    compiled: graphsrt.CompiledModel,
    plain: dict[SamplingParams, list[list[int]]],
    params: SamplingParams,
    kind: str,
) -> None:
    assert compiled.engine is not None
    compiled.engine.flush_cache()
    before = replace(compiled.engine.scheduler.counters)
    results = compiled.generate(PROMPTS, params, drafter=drafters(plain[params])[kind])
    assert [g.token_ids for g in results] == plain[params]
    counters = compiled.engine.scheduler.counters
    drafted, accepted = (
        counters.drafted_tokens - before.drafted_tokens,
        counters.accepted_tokens - before.accepted_tokens,
    )
    # 14 tokens after the first: two steps of 4 drafts and one more token each, and 3 drafts in the last.
    assert {"good": accepted == drafted == 33, "half": 0 < accepted < drafted, "bad": accepted == 0 < drafted}.get(
        kind, accepted <= drafted
    )
    # What is cached now is of accepted tokens: another turn on top of it gives what it gives without the cache.
    turn = [PROMPTS[2] + results[2].token_ids + [5]]
    cached = compiled.generate(turn, params)[0]
    assert cached.num_cached_tokens == (14 + 14) // PAGE * PAGE
    compiled.engine.flush_cache()
    fresh = compiled.generate(turn, params)[0]
    assert fresh.num_cached_tokens == 0 and fresh.token_ids == cached.token_ids
    scheduler = compiled.engine.scheduler
    assert not scheduler.has_work and scheduler.ledger.available_pages == scheduler.kv_pool.total_pages


@pytest.mark.parametrize("kind", ["good", "half", "random"])
def test_penalties_and_log_probabilities_count_what_was_drafted_before(
    compiled: graphsrt.CompiledModel, kind: str
) -> None:
    params = SamplingParams(
        max_new_tokens=15, ignore_eos=True, temperature=1.3, seed=4, repetition_penalty=1.4, frequency_penalty=0.6,
        presence_penalty=0.3, min_new_tokens=3, logprobs=2, prompt_logprobs=0,
    )  # fmt: skip
    plain = compiled.generate(PROMPTS, params)
    drafted = compiled.generate(PROMPTS, params, drafter=drafters([g.token_ids for g in plain])[kind])
    assert [g.token_ids for g in drafted] == [g.token_ids for g in plain]
    for got, want in zip(drafted, plain):
        assert got.logprobs is not None and want.logprobs is not None and got.prompt_logprobs is not None
        assert len(got.logprobs) == 15 and len(got.prompt_logprobs) == len(got.prompt_token_ids)
        for one, other in zip(got.logprobs, want.logprobs):
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=1e-9)  # float64, in another order of summation


def step(runner: object, batch: ForwardBatch) -> torch.Tensor:
    reply = runner.step(batch.encode())  # type: ignore[attr-defined]
    assert reply.logits is not None
    return reply.logits


def batch_of(mode: ForwardMode, ids: list[int], start: int, **changes: object) -> ForwardBatch:
    """Tokens of one sequence at row 1, in slots from the third page on, all their logits wanted."""
    rows = len(ids)
    fields: dict[str, object] = dict(
        forward_mode=mode, tokens=ids, positions=range(start, start + rows), req_pool_indices=[1],
        seq_lens=[start + rows], extend_seq_lens=[rows], out_cache_loc=range(12 + start, 12 + start + rows),
        logit_rows=range(rows), temperature=[0.0] * rows, top_p=[1.0] * rows, top_k=[0] * rows,
        min_p=[0.0] * rows, uniform=[0.5] * rows,
        return_logits=True,
    )  # fmt: skip
    return ForwardBatch(**{name: np.array(v) if isinstance(v, (list, range)) else v for name, v in fields.items()}
                        | changes)  # type: ignore[arg-type]  # fmt: skip


def test_a_step_that_saves_no_kv_attends_to_its_own_and_leaves_no_trace(compiled: graphsrt.CompiledModel) -> None:
    assert compiled.engine is not None
    runner = compiled.engine.executor._runner
    ids = tiny.tokens(13, seed=7)
    net = compiled.source.module
    assert net is not None
    whole = tiny.eager_logits(net, ids)
    pools = runner._kv_pools["kv_pool"]
    for pool in pools:
        pool.fill_(float("nan"))
    step(runner, batch_of(ForwardMode.EXTEND, ids[:6], 0))
    saved = [pool.clone() for pool in pools], runner._req_to_token.clone()
    unsaved = batch_of(ForwardMode.TARGET_VERIFY, ids[6:], 6, save_kv_cache=False)
    assert unsaved.key_value_num_tokens == 13
    for _ in range(2):
        # eager torch in float64, with float32 casts in its norms and softmax
        assert tiny.worst(step(runner, unsaved), whole[6:]) < 1e-5
        for pool, before in zip(pools, saved[0]):
            assert torch.equal(pool.view(torch.int64), before.view(torch.int64))  # bits: NaN where nothing was written
        assert torch.equal(runner._req_to_token, saved[1])
    assert tiny.worst(step(runner, batch_of(ForwardMode.DECODE, ids[6:7], 6)), whole[6:7]) < 1e-5
    assert not any(
        torch.equal(pool.view(torch.int64), before.view(torch.int64)) for pool, before in zip(pools, saved[0])
    )


def test_an_unsaved_step_that_fails_leaves_no_trace_either(compiled: graphsrt.CompiledModel) -> None:
    assert compiled.engine is not None
    runner = compiled.engine.executor._runner
    pools = runner._kv_pools["kv_pool"]
    before, table, execute = [pool.clone() for pool in pools], runner._req_to_token.clone(), runner._execute

    def fail(inputs: dict[str, object]) -> torch.Tensor:
        execute(inputs)
        raise ZeroDivisionError

    runner._execute = fail
    try:
        with pytest.raises(ZeroDivisionError):
            step(runner, batch_of(ForwardMode.EXTEND, tiny.tokens(5), 0, save_kv_cache=False))
    finally:
        runner._execute = execute
    assert all(torch.equal(pool.view(torch.int64), b.view(torch.int64)) for pool, b in zip(pools, before))
    assert torch.equal(runner._req_to_token, table)
