"""Two programs of one model: what ranks are told, who runs which step, and that nobody sees a difference."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import graphsrt
from graphsrt.errors import CompileError
from graphsrt.lowering.decompose import decompose
from graphsrt.passes import PIPELINE, scatter_residual
from graphsrt.passes.runner import bind
from graphsrt.program import Program
from graphsrt.runtime import model_runner
from graphsrt.runtime.phases import Phases
from tests.support import captures, tiny

LEAST = 4


def compiled(tp: int, dtype: torch.dtype, **options: Any) -> graphsrt.CompiledModel:
    passes = bind(PIPELINE, scatter_residual, min_tokens=LEAST)
    with captures.shared():
        return graphsrt.compile(tiny.model("llama", layers=1), tp=tp, dtype=dtype, passes=passes, **options)


def test_texts() -> None:
    with captures.shared():
        traced = graphsrt.trace(
            tiny.config("llama", layers=1), tp=2, passes=bind(PIPELINE, scatter_residual, min_tokens=LEAST)
        )
    phases = Phases(traced.program(), traced.program(phase="prefill"))
    assert phases.min_tokens == LEAST and Phases(traced.program()).min_tokens is None
    again = Phases.from_texts(phases.texts("cpu"), "here")
    assert [str(p) for p in again.all()] == [str(decompose(p, "cpu")) for p in phases.all()]
    decode, prefill = phases.texts("cpu")
    with pytest.raises(CompileError, match=r"did not survive its text[\s\S]*here"):
        edited = decode._replace(text=decode.text.replace("eps=1e-06", "eps=1e-05"))
        Phases.from_texts((edited, prefill), "here")


@pytest.mark.parametrize("tp", [2, 3])
def test_simulated(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of four tokens and more are divided by tokens, others are not, and every logit is the same, bit for bit."""
    steps: list[tuple[int, bool]] = []
    simulate = model_runner.simulate_outputs

    def noted(program: Program, inputs: Any, weights: Any) -> Any:
        steps.append((len(inputs["tokens"]), "reduce_scatter" in str(program)))
        return simulate(program, inputs, weights)

    monkeypatch.setattr(model_runner, "simulate_outputs", noted)
    whole = captures.compiled("llama", 4, 2, tp, layers=1)
    with compiled(tp, torch.float64, ranks="simulated", max_tokens_per_step=8) as model:
        for count in (1, tp - 1, LEAST - 1, LEAST, LEAST + 1, 23):
            ids = tiny.tokens(count, seed=count)
            assert torch.equal(model.logits(ids), whole.logits(ids)), count
    assert {divided for count, divided in steps if count >= LEAST} == {True, False}  # False: the other model's
    assert all(not divided for count, divided in steps if count < LEAST)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_rank_processes(backend: str) -> None:
    """Regions of divided tokens too are right when a rank has but one, or none that is real."""
    prompts = [tiny.tokens(count, seed=count) for count in (1, 3, 4, 5, 19)]
    params = graphsrt.SamplingParams(max_new_tokens=4, ignore_eos=True)
    with compiled(2, torch.float32, backend=backend) as model:
        tokens = [result.token_ids for result in model.generate(prompts, params)]
        logits = [model.logits(prompt) for prompt in prompts]
    passes = functools.partial(graphsrt.compile, tiny.model("llama", layers=1), dtype=torch.float32)
    with captures.shared(), passes(tp=1, backend="eager") as plain:
        assert tokens == [result.token_ids for result in plain.generate(prompts, params)]
        for got, prompt in zip(logits, prompts):
            # float32: another order of sums, over widths of 48 and 60
            torch.testing.assert_close(got, plain.logits(prompt), rtol=1e-4, atol=1e-4)
