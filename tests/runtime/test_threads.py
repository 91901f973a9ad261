"""Several callers at a time: threads, coroutines, deadlines, and ends that come from elsewhere."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from memory_executor import reference
from test_engine import GREEDY, assert_idle, make, make_text
from test_metrics import Clock

from graphsrt.errors import GraphsrtError, RankError
from graphsrt.runtime.background import BackgroundSteps
from graphsrt.runtime.forward_batch import ForwardBatch
from graphsrt.runtime.sampling_params import SamplingParams
from graphsrt.runtime.turns import Turns
from graphsrt.runtime.waiting_line import QueueFull

LONG = SamplingParams(max_new_tokens=40, ignore_eos=True)


def slow(batch: ForwardBatch) -> None:
    time.sleep(0.004)


# -- deadlines ---------------------------------------------------------------------------------------------------------


def test_a_deadline_ends_a_request_wherever_it_is() -> None:
    clock = Clock()
    engine, executor = make(num_pages=30, max_running=2, clock=clock)

    def tick(batch: ForwardBatch) -> None:
        clock.now += 1.0

    executor.before_step = tick
    # running, never admitted (two run at a time), and without a limit
    results = engine.generate([[1], [2], [3], [4]], LONG, timeout_s=[10.5, None, 5.0, None])
    assert [result.finish_reason for result in results] == ["deadline", "length", "deadline", "length"]
    assert [len(result.token_ids) for result in results] == [11, 40, 0, 40]
    for prompt, result in zip(([1], [2], [3], [4]), results):
        assert result.token_ids == reference(prompt, LONG)[0][: len(result.token_ids)]
    assert_idle(engine)
    assert engine.generate([[1]], GREEDY, timeout_s=1e9)[0].finish_reason == "length"


def test_text_that_was_held_back_is_given_at_the_deadline() -> None:
    clock = Clock()
    engine, executor = make_text("go", b"abcdefgh", clock=clock)

    def tick(batch: ForwardBatch) -> None:
        clock.now += 1.0

    executor.before_step = tick
    events = list(engine.stream("go", SamplingParams(max_new_tokens=20, stop="dX"), timeout_s=4))
    assert [event.text for event in events] == ["a", "b", "c", "d"]
    assert events[-1].finish_reason == "deadline"
    assert_idle(engine)


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), float("inf"), "1", [1.0], True and [1.0, "x"]])
def test_a_bad_time_limit_is_refused(timeout_s: Any) -> None:
    engine, executor = make()
    with pytest.raises(ValueError, match="timeout_s"):
        engine.generate([[1], [2]], GREEDY, timeout_s=timeout_s)
    assert not executor.batches


# -- threads -----------------------------------------------------------------------------------------------------------


def test_threads_share_steps_and_each_gets_its_own() -> None:
    engine, executor = make(num_pages=12, max_running=6, budget=10)
    executor.before_step = slow
    prompts = [[[t, i, 3] for i in range(4)] for t in range(4)]
    results: dict[int, Any] = {}

    def work(t: int) -> None:
        if t == 3:
            results[t] = [[x for event in engine.stream(p, GREEDY) for x in event.token_ids] for p in prompts[t]]
        else:
            results[t] = [result.token_ids for result in engine.generate(prompts[t], GREEDY)]

    threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {t: [reference(p, GREEDY)[0] for p in prompts[t]] for t in range(4)}
    assert max(batch.batch_size for batch in executor.batches) > 4  # more than any one thread has
    assert_idle(engine)


def test_a_thread_that_steps_on_and_on_lets_others_in() -> None:
    turns, done = Turns(), threading.Event()
    waits = []

    def greedy() -> None:
        while not done.is_set():
            with turns:
                time.sleep(0.001)
            turns.give_way()

    thread = threading.Thread(target=greedy)
    thread.start()
    for _ in range(20):
        start = time.perf_counter()
        with turns:
            waits.append(time.perf_counter() - start)
    done.set()
    thread.join(60)
    assert sorted(waits)[10] < 0.1  # a plain lock: seconds


def test_cancelling_from_another_thread_gives_what_there_is() -> None:
    engine, executor = make(num_pages=30)

    def cancel_soon(batch: ForwardBatch) -> None:
        slow(batch)
        if len(executor.batches) == 7:
            threading.Thread(target=engine.cancel_all).start()

    executor.before_step = cancel_soon
    results = engine.generate([[1], [2], [3], [4], [5]], LONG)
    assert {result.finish_reason for result in results} == {"cancelled"}
    for i, result in enumerate(results):
        assert result.token_ids == reference([i + 1], LONG)[0][: len(result.token_ids)]
    assert 0 < len(results[0].token_ids) < 40
    stream = engine.stream([1], LONG)
    first = next(stream)
    stream.cancel()
    last = next(stream)
    assert (first.finish_reason, last.finish_reason, last.token_ids) == (None, "cancelled", [])
    with pytest.raises(StopIteration):
        next(stream)
    assert stream.result().token_ids == first.token_ids
    assert_idle(engine)


def test_logits_that_were_cancelled_are_an_error_and_no_half_result() -> None:
    engine, executor = make(num_pages=30, budget=4)
    executor.before_step = lambda batch: engine.cancel_all() if len(executor.batches) == 1 else None
    with pytest.raises(GraphsrtError, match="cancelled"):
        engine.logits([list(range(20))])
    assert_idle(engine)


# -- coroutines --------------------------------------------------------------------------------------------------------


async def _collect(background: BackgroundSteps, prompt: list[int], params: SamplingParams) -> list[int]:
    return [token async for event in background.stream(prompt, params, None) for token in event.token_ids]


def test_coroutines_share_steps_also_with_a_thread() -> None:
    engine, executor = make(num_pages=14, max_running=6, budget=10)
    executor.before_step = slow
    background = BackgroundSteps(engine)
    from_thread: list[Any] = []
    thread = threading.Thread(target=lambda: from_thread.extend(engine.generate([[9], [8]], GREEDY)))

    async def main() -> tuple[Any, Any]:
        thread.start()
        streams = [_collect(background, [i, 3], GREEDY) for i in range(4)]
        batch = background.generate([[5], [6, 7]], GREEDY, None)
        *streamed, generated = await asyncio.gather(*streams, batch)
        return streamed, generated

    streamed, generated = asyncio.run(main())
    thread.join(60)
    background.join()
    assert streamed == [reference([i, 3], GREEDY)[0] for i in range(4)]
    assert [g.token_ids for g in generated] == [reference(p, GREEDY)[0] for p in ([5], [6, 7])]
    assert [g.token_ids for g in from_thread] == [reference(p, GREEDY)[0] for p in ([9], [8])]
    assert max(batch.batch_size for batch in executor.batches) >= 3
    assert background._thread is None  # it has ended: no work, no thread
    assert_idle(engine)


def test_coroutines_with_more_prompts_than_may_wait_and_a_full_queue() -> None:
    engine, executor = make(num_pages=14, max_running=2, max_queue=2, budget=10)
    executor.before_step = slow
    background = BackgroundSteps(engine)
    prompts = [[i, 3] for i in range(25)]

    async def main() -> tuple[list[Any], int]:
        batch = asyncio.create_task(background.generate(prompts, replace(GREEDY, n=2), None))
        refused = 0
        while not engine.is_full:
            await asyncio.sleep(0.001)
        for _ in range(5):  # the queue is kept full by those that are fed, so that most streams are refused
            try:
                await _collect(background, [7], GREEDY)
            except QueueFull:
                refused += 1
        return await batch, refused

    results, refused = asyncio.run(main())
    background.join()
    assert [r.token_ids for r in results] == [reference(prompt, GREEDY)[0] for prompt in prompts]
    assert all(len(r.alternatives) == 1 and r.alternatives[0].token_ids == r.token_ids for r in results)
    assert refused > 0
    assert_idle(engine)


def test_the_event_loop_never_waits_for_a_step() -> None:
    engine, executor = make()
    executor.before_step = lambda batch: time.sleep(0.3)
    background = BackgroundSteps(engine)

    async def main() -> float:
        task = asyncio.create_task(_collect(background, [1, 2], SamplingParams(max_new_tokens=4, ignore_eos=True)))
        worst = 0.0
        while not task.done():
            start = time.perf_counter()
            await asyncio.sleep(0)
            worst = max(worst, time.perf_counter() - start)
            if len(executor.batches) == 2:
                another = background.stream([3], GREEDY, None)  # adding and leaving in the middle of a step
                await anext(another)
                await another.aclose()  # type: ignore[attr-defined]
        return worst

    ticks = asyncio.run(main())
    background.join()
    assert ticks < 0.2
    assert_idle(engine)


@pytest.mark.parametrize("how", ["task", "break", "timeout", "generate", "deadline"])
def test_leaving_cancels_the_request(how: str) -> None:
    engine, executor = make()
    executor.before_step = slow
    background = BackgroundSteps(engine)

    async def read() -> None:
        async for _ in background.stream([1, 2], SamplingParams(max_new_tokens=60, ignore_eos=True), None):
            if how == "break":
                break

    async def main() -> None:
        other = asyncio.create_task(_collect(background, [4], GREEDY))
        if how == "generate":
            task = asyncio.create_task(background.generate([[1], [2]], LONG, None))  # type: ignore[arg-type]
        elif how == "deadline":
            results = await background.generate([[1], [2]], LONG, [0.02, None])
            assert [r.finish_reason for r in results] == ["deadline", "length"]
            assert await other == reference([4], GREEDY)[0]
            return
        else:
            task = asyncio.create_task(read())  # type: ignore[arg-type]
        if how == "break":
            await task
        elif how == "timeout":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(task, 0.03)
        else:
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await other == reference([4], GREEDY)[0]  # nobody else is touched

    asyncio.run(main())
    background.join()
    assert_idle(engine)


def test_errors_reach_who_awaits() -> None:
    engine, executor = make()
    background = BackgroundSteps(engine)

    async def main() -> None:
        with pytest.raises(ValueError, match="the prompt is empty"):
            background.stream([], GREEDY, None)  # at once
        with pytest.raises(ValueError, match="prompt 1 has token ids outside"):
            await background.generate([[1], [99]], GREEDY, None)

        def fail(batch: ForwardBatch) -> None:
            raise ZeroDivisionError("in a step")

        executor.before_step = fail
        failed = await asyncio.gather(
            _collect(background, [1], GREEDY), background.generate([[2]], GREEDY, None), return_exceptions=True
        )
        assert [type(error) for error in failed] == [ZeroDivisionError] * 2

        def die(batch: ForwardBatch) -> None:
            raise RankError("rank 1 died", rank=1)

        executor.before_step = die
        with pytest.raises(RankError, match="rank 1 died"):
            await _collect(background, [1], GREEDY)
        executor.before_step = None
        with pytest.raises(RankError, match="engine has stopped"):
            await background.generate([[2]], GREEDY, None)

    asyncio.run(main())
    background.join()
    assert_idle(engine)


def test_closing_ends_what_is_awaited() -> None:
    engine, executor = make()
    executor.before_step = slow
    background = BackgroundSteps(engine)

    async def main() -> str | None:
        events = background.stream([1], LONG, None)
        await anext(events)
        await asyncio.to_thread(engine.close)
        reason = None
        async for event in events:
            reason = event.finish_reason
        return reason

    assert asyncio.run(main()) == "cancelled"
    background.join()
    assert executor.num_closed == 1
