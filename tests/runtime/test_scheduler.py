from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_executor import EOS, VOCAB, MemoryExecutor, reference

from graphsrt.runtime.forward_batch import ForwardMode
from graphsrt.runtime.kv_pool import ReqToTokenPool, TokenToKVPool
from graphsrt.runtime.radix_cache import Node
from graphsrt.runtime.request import Request, RequestState
from graphsrt.runtime.sampling_params import SamplingParams
from graphsrt.runtime.scheduler import Scheduler

CONTEXT = 40


class ForgetfulPool(TokenToKVPool):
    """Pages that are given back cannot be read any more."""

    executor: MemoryExecutor

    def free(self, pages: Any) -> None:
        super().free(pages)
        self.executor.forget(pages)


def make(
    num_pages: int = 9,
    page_size: int = 4,
    max_running: int = 4,
    budget: int = 8,
    context: int = CONTEXT,
    **options: Any,
) -> tuple[Scheduler, MemoryExecutor]:
    rows, pool = ReqToTokenPool(max_running, context), ForgetfulPool(num_pages, page_size)
    scheduler = Scheduler(max_running, budget, rows, pool, [EOS], **options)
    pool.executor = MemoryExecutor(num_pages, page_size, max_running, context)
    return scheduler, pool.executor


def run_step(scheduler: Scheduler, executor: MemoryExecutor) -> list[Request]:
    step = scheduler.schedule()
    if step is None:
        return []
    return scheduler.complete(step, executor.step(step.batch).token_ids)


def assert_idle(scheduler: Scheduler) -> None:
    """Nothing is held; what is not free is cached, and can be had."""
    assert not scheduler.has_work
    check_books(scheduler)
    cache, pool = scheduler.ledger.cache, scheduler.kv_pool
    before = pool.available_pages
    assert all(node.num_locks == 0 for node in cache.nodes())
    assert scheduler.ledger.available_pages == pool.total_pages
    assert scheduler.req_to_token.available == scheduler.req_to_token.max_requests
    assert scheduler.flush_cache() == pool.total_pages - before
    assert pool.available_pages == pool.total_pages and not list(cache.nodes())


def check_books(scheduler: Scheduler) -> None:
    """Every page is free, or one request's own, or once in the tree; locks are those of the requests."""
    cache, pool = scheduler.ledger.cache, scheduler.kv_pool
    active = [request for request in scheduler.requests if request.row is not None]
    own = [page for request in active for page in request.pages[request.num_shared_pages :]]
    cached = [page for node in cache.nodes() for page in node.pages.tolist()]
    assert len({*own, *cached}) == len(own) + len(cached) == pool.total_pages - pool.available_pages
    assert len(cached) == cache.num_pages
    locks: dict[int, int] = {}
    for request in active:
        assert request.node is not None
        assert cache.pages_to(request.node).tolist() == request.pages[: request.num_shared_pages]
        node: Node | None = request.node
        while node is not None:
            locks[id(node)] = locks.get(id(node), 0) + 1
            node = node.parent
        slots = pool.slots(np.array(request.pages))[: request.num_computed]
        assert scheduler.req_to_token.table[request.row, : request.num_computed].tolist() == slots.tolist()
    assert all(node.num_locks == locks.get(id(node), 0) for node in cache.nodes())
    assert cache.num_locked_pages == sum(len(node.pages) for node in cache.nodes() if node.num_locks)
    waiting = [request.arrival for request in scheduler.line]
    assert waiting == sorted(waiting)


@dataclass
class Arrival:
    at: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    cancel_at: int | None


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    max_new = draw(st.integers(1, 12))
    return Arrival(
        at=draw(st.integers(0, 12)),
        prompt=draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14)),
        params=SamplingParams(
            max_new_tokens=max_new,
            temperature=draw(st.sampled_from([0.0, 1.0])),
            ignore_eos=draw(st.booleans()),
            stop_token_ids=draw(st.sampled_from([(), (3, 4)])),
            min_new_tokens=draw(st.integers(0, max_new)),
        ),
        seed=draw(st.integers(0, 2**64 - 1)),
        cancel_at=draw(st.one_of(st.none(), st.none(), st.integers(0, 20))),
    )


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_tokens_are_those_of_one_request_at_a_time(data: st.DataObject) -> None:
    page_size = data.draw(st.integers(1, 6))
    max_running = data.draw(st.integers(1, 5))
    budget = data.draw(st.integers(max_running, 20))
    incoming = data.draw(st.lists(arrivals(), min_size=1, max_size=8))
    # From "the largest fits alone" to "plenty".
    largest = max(-(-(len(a.prompt) + a.params.max_new_tokens - 1) // page_size) for a in incoming)
    scheduler, executor = make(largest + 1 + data.draw(st.integers(0, 8)), page_size, max_running, budget)

    requests: list[tuple[Arrival, Request]] = []
    incoming.sort(key=lambda arrival: arrival.at)
    now = 0
    while scheduler.has_work or len(requests) < len(incoming):
        assert now < 2000, "no progress"
        for arrival in incoming[len(requests) :]:
            if arrival.at > now:
                break
            request = Request(arrival.prompt, arrival.params, seed=arrival.seed)
            scheduler.add(request)
            requests.append((arrival, request))
        for arrival, request in requests:
            if arrival.cancel_at is not None and arrival.cancel_at + arrival.at == now:
                scheduler.cancel(request)
        run_step(scheduler, executor)
        check_books(scheduler)
        if executor.batches:
            assert executor.batches[-1].num_tokens <= budget and executor.batches[-1].batch_size <= max_running
        now += 1

    for arrival, request in requests:
        expected, reason = reference(arrival.prompt, arrival.params, arrival.seed)
        output = request.output_ids
        if request.state is RequestState.CANCELLED:
            assert output == expected[: len(output)] and request.finish_reason == "cancelled"
        else:
            assert (request.state, output, request.finish_reason) == (RequestState.FINISHED, expected, reason)
    assert_idle(scheduler)


def test_preemption_loses_and_doubles_nothing() -> None:
    scheduler, executor = make(num_pages=7, page_size=2, max_running=3, budget=16)
    params = SamplingParams(max_new_tokens=8, ignore_eos=True, temperature=1.0)
    requests = [Request([i, i + 1, i + 2], params, seed=i) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        run_step(scheduler, executor)
        check_books(scheduler)
    assert requests[0].num_preemptions == 0 and sum(request.num_preemptions for request in requests) > 0
    for request in requests:
        assert request.output_ids == reference(request.tokens[:3].tolist(), params, request.seed)[0]
    assert_idle(scheduler)


def test_a_long_prompt_is_chunked_and_mixed_with_decoding() -> None:
    scheduler, executor = make(num_pages=20, page_size=4, budget=6)
    short = Request([1, 2], SamplingParams(max_new_tokens=10, ignore_eos=True))
    scheduler.add(short)
    run_step(scheduler, executor)
    long = Request(list(range(13)), SamplingParams(max_new_tokens=2, ignore_eos=True))
    scheduler.add(long)
    for _ in range(4):
        run_step(scheduler, executor)
    modes = [batch.forward_mode for batch in executor.batches]
    assert modes == [ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.MIXED, ForwardMode.MIXED, ForwardMode.DECODE]
    assert [batch.extend_seq_lens.tolist() for batch in executor.batches] == [[2], [1, 5], [1, 5], [1, 3], [1, 1]]
    # A chunk that does not end its prompt wants no logits.
    assert [batch.logit_rows.tolist() for batch in executor.batches] == [[1], [0], [0], [0, 3], [0, 1]]
    assert short.num_output_tokens == 5 and long.output_ids == reference(list(range(13)), long.params)[0]  # type: ignore[arg-type]


def test_head_of_line_is_not_overtaken_by_what_would_fit() -> None:
    scheduler, executor = make(num_pages=6, page_size=4, budget=40)
    first = Request(list(range(12)), SamplingParams(max_new_tokens=4, ignore_eos=True))
    big = Request(list(range(20, 36)), SamplingParams(max_new_tokens=2, ignore_eos=True))
    small = Request([1], SamplingParams(max_new_tokens=1))
    for request in (first, big, small):
        scheduler.add(request)
    finished: list[Request] = []
    while scheduler.has_work:
        finished += [request for request in run_step(scheduler, executor) if request.done]
        if not first.done:
            assert big.state is small.state is RequestState.WAITING
    assert finished[0] is first and big.done and small.done
    assert_idle(scheduler)


def test_admission_leaves_a_page_to_those_who_may_still_need_one() -> None:
    scheduler, executor = make(num_pages=5, page_size=4, budget=40)
    growing = Request([1] * 4, SamplingParams(max_new_tokens=9, ignore_eos=True))  # 12 slots in the end, 4 now
    settled = Request([2] * 2, SamplingParams(max_new_tokens=3, ignore_eos=True))  # never more than its first page
    late = Request([3] * 7, SamplingParams(max_new_tokens=1))  # two pages: the last free ones, but one is promised
    for request in (growing, settled, late):
        scheduler.add(request)
    run_step(scheduler, executor)
    assert [r.state.name for r in (growing, settled, late)] == ["RUNNING", "RUNNING", "WAITING"]
    while scheduler.has_work:
        run_step(scheduler, executor)
    assert growing.num_preemptions == settled.num_preemptions == late.num_preemptions == 0
    assert_idle(scheduler)


def test_requests_that_can_never_fit_are_refused_with_numbers() -> None:
    scheduler, _ = make(num_pages=4, page_size=4, context=40)
    with pytest.raises(ValueError, match=r"prompt is longer than the context(?s:.*)at most 40 tokens(?s:.*)41 tokens"):
        scheduler.add(Request([1] * 41, SamplingParams(max_new_tokens=1)))
    with pytest.raises(ValueError, match=r"30 \+ 20 = 50(?s:.*)max_new_tokens to at most 10"):
        scheduler.add(Request([1] * 30, SamplingParams(max_new_tokens=20)))
    with pytest.raises(ValueError, match=r"3 pages of 4 tokens(?s:.*)need 4 pages(?s:.*)at least 5 pages"):
        scheduler.add(Request([1] * 10, SamplingParams(max_new_tokens=4)))
    scheduler.add(Request([1] * 10, SamplingParams(max_new_tokens=3)))  # the last token takes no slot: 12 are enough
    assert scheduler.num_waiting == 1
    with pytest.raises(ValueError, match=r"max_tokens_per_step \(2\) is below max_running \(4\)"):
        make(budget=2)


def test_cancel_in_every_state_and_between_schedule_and_complete() -> None:
    scheduler, executor = make(budget=4)
    running = Request([1], SamplingParams(ignore_eos=True, max_new_tokens=9))
    scheduler.add(running)
    run_step(scheduler, executor)
    prefilling, waiting = (
        Request([2] * 9, SamplingParams(max_new_tokens=2)),
        Request([3], SamplingParams(max_new_tokens=2)),
    )
    scheduler.add(prefilling)
    scheduler.add(waiting)
    step = scheduler.schedule()
    assert step is not None
    assert [r.state.name for r in (running, prefilling, waiting)] == ["RUNNING", "PREFILL", "WAITING"]
    tokens = executor.step(step.batch).token_ids
    for request in (running, prefilling, waiting):
        scheduler.cancel(request)
        scheduler.cancel(request)
    assert scheduler.complete(step, tokens) == []
    assert running.num_output_tokens == 1
    assert_idle(scheduler)


def test_illegal_transitions_are_assertions() -> None:
    request = Request([1], SamplingParams())
    with pytest.raises(AssertionError, match="WAITING -> RUNNING"):
        request.to(RequestState.RUNNING)
    request.to(RequestState.CANCELLED)
    with pytest.raises(AssertionError, match="CANCELLED -> WAITING"):
        request.to(RequestState.WAITING)
