from __future__ import annotations

import re

import pytest
from test_engine import make

from graphsrt.runtime.metrics import Histogram
from graphsrt.runtime.results import StepResult
from graphsrt.runtime.sampling_params import SamplingParams


class Clock:
    """Time that moves only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_histogram() -> None:
    times = Histogram((1.0, 2.0, 4.0))
    assert times.mean == times.quantile(0.5) == 0.0
    for value in (0.5, 1.0, 1.5, 3.0, 9.0):
        times.observe(value)
    times.observe(1.75, times=5)
    assert times.counts == [2, 6, 1, 1] and times.count == 10
    assert times.mean == pytest.approx((0.5 + 1 + 1.5 + 3 + 9 + 5 * 1.75) / 10)
    assert [times.quantile(q) for q in (0.2, 0.5, 0.9, 1.0)] == [1.0, 2.0, 4.0, float("inf")]


def test_every_count_and_time() -> None:
    clock = Clock()
    engine, executor = make(num_pages=9, budget=8, clock=clock)
    plain = executor.step

    def step(batch):  # type: ignore[no-untyped-def]
        clock.now += 0.3
        result = plain(batch)
        return StepResult(result.token_ids, result.logits, compute_s=0.2, collectives_s=0.04)

    executor.step = step  # type: ignore[method-assign]
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)
    engine.generate([[1, 2, 3], [4, 5]], params)
    now = engine.metrics()
    assert (now.num_requests, now.num_finished, now.num_steps) == (2, 2, 3)
    assert (now.prompt_tokens, now.generated_tokens, now.num_running, now.num_waiting) == (5, 6, 0, 0)
    assert now.step_s == pytest.approx(0.9) and now.compute_s == pytest.approx(0.6)
    assert now.collectives_s == pytest.approx(0.12) and now.host_s == pytest.approx(0.18)
    assert now.prompt_tokens_per_s == pytest.approx(5 / 0.9) and now.generated_tokens_per_s == pytest.approx(6 / 0.9)
    assert now.time_to_first_token.count == 2 and now.time_to_first_token.total == pytest.approx(0.6)
    assert now.inter_token.count == 4 and now.inter_token.total == pytest.approx(1.2)
    assert now.request_time.count == 2 and now.request_time.total == pytest.approx(1.8)
    stream = engine.stream([1] * 6, params)
    next(stream)
    late = engine.stream([2], params, timeout_s=0.5)
    next(late)
    then = engine.metrics()
    assert then.num_running == 2 and then.pages_used == 3 and then.pages_total == 8
    assert now.num_running == 0  # a picture does not change
    stream.cancel()
    assert [event.finish_reason for event in late][-1] == "deadline"

    def fail(batch):  # type: ignore[no-untyped-def]
        raise ZeroDivisionError

    executor.before_step = fail
    with pytest.raises(ZeroDivisionError):
        engine.generate([[7]], params)
    end = engine.metrics()
    assert (end.num_cancelled, end.num_expired, end.num_failed, end.num_finished) == (1, 1, 1, 2)
    assert end.num_requests == 5 and end.pages_used == 0


def test_preemptions_are_counted_and_tokens_once() -> None:
    engine, _ = make(num_pages=9)
    results = engine.generate([[i] * 5 for i in range(4)], SamplingParams(max_new_tokens=20, ignore_eos=True))
    now = engine.metrics()
    assert now.num_preemptions == sum(result.num_preemptions for result in results) > 0
    assert now.generated_tokens == now.inter_token.count + now.time_to_first_token.count == 80
    assert now.prompt_tokens > 20  # what is computed again counts again


def test_the_table_and_the_text_for_prometheus() -> None:
    engine, _ = make()
    assert "0 of 29 held" in str(engine.metrics())  # nothing has happened: no division by zero
    engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4, ignore_eos=True))
    now = engine.metrics()
    assert "1: 1 finished" in str(now) and "3 prompt" in str(now) and "4 generated" in str(now)
    text = now.prometheus()
    values = dict(re.findall(r"^(graphsrt_\S+) (\S+)$", text, re.MULTILINE))
    assert values["graphsrt_generated_tokens_total"] == "4"
    assert values['graphsrt_requests_ended_total{reason="finished"}'] == "1"
    assert (
        values['graphsrt_inter_token_seconds_bucket{le="+Inf"}'] == "3" == values["graphsrt_inter_token_seconds_count"]
    )
    buckets = [int(value) for name, value in values.items() if name.startswith("graphsrt_inter_token_seconds_bucket")]
    assert buckets == sorted(buckets)
    for name in re.findall(r"^# TYPE (\S+)", text, re.MULTILINE):
        assert f"# HELP {name} " in text
    parser = pytest.importorskip("prometheus_client.parser")
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    assert families["graphsrt_generated_tokens"].samples[0].value == 4
    assert families["graphsrt_inter_token_seconds"].type == "histogram"
