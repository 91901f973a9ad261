from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_executor import EOS, VOCAB, MemoryExecutor, reference

from graphsrt.runtime.batch_builder import BatchBuilder, Entry
from graphsrt.runtime.drafter import PromptLookup, checked
from graphsrt.runtime.forward_batch import ForwardBatch, ForwardMode
from graphsrt.runtime.kv_pool import ReqToTokenPool, TokenToKVPool
from graphsrt.runtime.radix_cache import Node
from graphsrt.runtime.request import Request, RequestState, seed_of_sample
from graphsrt.runtime.sampling_params import SamplingParams
from graphsrt.runtime.scheduler import Scheduler
from graphsrt.runtime.waiting_line import QueueFull

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
    assert step.batch == built_anew(scheduler, step.entries)
    return scheduler.complete(step, executor.step(step.batch).token_ids)


def built_anew(scheduler: Scheduler, entries: list[Entry]) -> ForwardBatch:
    """The batch of these entries from a builder that knows nothing of earlier steps."""
    builder = BatchBuilder(scheduler.req_to_token, scheduler.eos_token_ids)
    for entry in entries:
        builder.set_row(entry.request)
    decoding = sum(entry.request.state is RequestState.RUNNING for entry in entries)
    return builder.build([replace(entry) for entry in entries], decoding, scheduler.ledger.moved)


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
    params: SamplingParams | None  # None: the logits of the prompt
    seed: int
    sample: int
    cancel_at: int | None
    drafts: list[int] | None  # by output index: how many are drafted, and which of them is wrong

    @property
    def expected(self) -> tuple[list[int], str]:
        assert self.params is not None
        return reference(self.prompt, self.params, seed_of_sample(self.seed, self.sample))

    def request(self) -> Request:
        return Request(self.prompt, self.params, seed=self.seed, sample=self.sample, drafter=drafter(self))


# Few beginnings, so that prompts share them; some end at a page, some within one.
BEGINNINGS = [list(range(10)), [*range(6), 9, 9, 9, 9], [*range(8), 1], []]


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    max_new = draw(st.integers(1, 12))
    beginning = draw(st.sampled_from(BEGINNINGS))
    params = SamplingParams(
        max_new_tokens=max_new,
        temperature=draw(st.sampled_from([0.0, 1.0])),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.sampled_from([(), (3, 4)])),
        min_new_tokens=draw(st.integers(0, max_new)),
    )
    return Arrival(
        at=draw(st.integers(0, 12)),
        prompt=[*beginning, *draw(st.lists(st.integers(0, 2), min_size=not beginning, max_size=5))],
        params=None if draw(st.integers(0, 7)) == 0 else params,
        seed=draw(st.integers(0, 2**64 - 1)),
        sample=0,
        cancel_at=draw(st.one_of(st.none(), st.none(), st.integers(0, 20))),
        drafts=draw(st.one_of(st.none(), st.lists(st.integers(0, 9), min_size=1, max_size=6))),
    )


def drafter(arrival: Arrival) -> Callable[[np.ndarray], list[int]] | None:
    """Drafts what will come, but for one wrong token: at the beginning, in the middle, at the end, or not at all."""
    if arrival.drafts is None or arrival.params is None:
        return None
    plan, expected = arrival.drafts, arrival.expected[0]

    def draft(tokens: np.ndarray) -> list[int]:
        done = len(tokens) - len(arrival.prompt)
        number = plan[done % len(plan)]
        drafts = [*expected, *[0] * 10][done : done + number]
        if number % 3:
            wrong = number * 7 % len(drafts)
            drafts[wrong] = (drafts[wrong] + 1) % VOCAB
        return drafts

    return draft


def reference_logits(prompt: list[int]) -> list[list[float]]:
    return [[i + 1.0, float(sum(prompt[: i + 1]))] for i in range(len(prompt))]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_tokens_are_those_of_one_request_at_a_time(data: st.DataObject) -> None:
    page_size = data.draw(st.integers(1, 6))
    max_running = data.draw(st.integers(1, 5))
    budget = data.draw(st.integers(max_running, 20))
    incoming = [
        replace(arrival, sample=sample)
        for arrival in data.draw(st.lists(arrivals(), min_size=1, max_size=6))
        for sample in range(data.draw(st.sampled_from([1, 1, 3])))  # as for SamplingParams(n=3)
    ]
    # From "the largest fits alone" to "plenty".
    largest = max(-(-(len(a.prompt) + (a.params.max_new_tokens - 1 if a.params else 0)) // page_size) for a in incoming)
    scheduler, executor = make(
        largest + 1 + data.draw(st.integers(0, 8)),
        page_size,
        max_running,
        budget,
        prefix_cache=data.draw(st.integers(0, 4)) > 0,
        policy=data.draw(st.sampled_from(["lpm", "fcfs"])),
        patience=(patience := data.draw(st.integers(0, 4))),
        max_queue=data.draw(st.sampled_from([None, 1, 3])),
    )
    flush_at = data.draw(st.one_of(st.none(), st.integers(0, 20)))
    fail_at = data.draw(st.one_of(st.none(), st.none(), st.integers(0, 20)))

    requests: list[tuple[Arrival, Request]] = []
    most_others: dict[Request, int] = {}  # that may be admitted between a request's arrival and its own admission
    logits: dict[int, list[list[float]]] = {}
    incoming.sort(key=lambda arrival: arrival.at)
    now = 0
    while scheduler.has_work or len(requests) < len(incoming):
        assert now < 2000, "no progress"
        for arrival in incoming[len(requests) :]:
            if arrival.at > now or scheduler.line.is_full:
                break
            request = arrival.request()
            most_others[request] = patience + scheduler.num_waiting
            scheduler.add(request)
            requests.append((arrival, request))
        for arrival, request in requests:
            if arrival.cancel_at is not None and arrival.cancel_at + arrival.at == now:
                scheduler.cancel(request)
        if now == flush_at:
            scheduler.flush_cache()
        now += 1
        num_admitted, waiting = scheduler.counters.num_admitted, list(scheduler.line)
        step = scheduler.schedule()
        check_books(scheduler)
        if scheduler.counters.num_preemptions == 0:  # whoever is preempted is admitted again, and counts again
            admitted = [entry.request for entry in step.entries if entry.request in waiting] if step else []
            for number, request in enumerate(admitted, start=num_admitted):
                assert number - request.num_admitted_before <= most_others[request], "somebody has starved"
        if step is None:
            continue
        assert step.batch.num_tokens <= budget and step.batch.batch_size <= max_running
        if now == fail_at:  # the step is lost before or after it has run: it is made again
            if flush_at is None:
                executor.step(step.batch)
            continue
        result = executor.step(step.batch)
        for entry in step.entries:
            if entry.request.every_row and result.logits is not None:
                if entry.request.num_computed == 0:
                    logits[id(entry.request)] = []
                rows = slice(entry.first_logit_row, entry.first_logit_row + entry.num_logit_rows)
                logits[id(entry.request)] += result.logits[rows].tolist()
        scheduler.complete(step, result.token_ids)
        check_books(scheduler)

    for arrival, request in requests:
        if arrival.params is None:
            if request.state is not RequestState.CANCELLED:
                assert logits[id(request)] == reference_logits(arrival.prompt)
            continue
        expected, reason = arrival.expected
        output = request.output_ids
        if request.state is RequestState.CANCELLED:
            assert output == expected[: len(output)] and request.finish_reason == "cancelled"
        else:
            assert (request.state, output, request.finish_reason) == (RequestState.FINISHED, expected, reason)
    counters = scheduler.counters
    assert 0 <= counters.accepted_tokens <= counters.drafted_tokens
    assert counters.num_preemptions == sum(request.num_preemptions for _, request in requests)
    assert counters.cached_tokens == sum(request.num_cached_tokens for _, request in requests)
    assert scheduler.ledger.prefix_cache or scheduler.ledger.cache.num_pages == 0
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


# ---- reuse of prefixes ----


def run_all(scheduler: Scheduler, executor: MemoryExecutor, *requests: Request) -> None:
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        run_step(scheduler, executor)
        check_books(scheduler)
    for request in requests:
        assert request.params is not None
        prompt = request.tokens[: request.num_prompt_tokens].tolist()
        assert request.output_ids == reference(prompt, request.params, request.seed)[0]


LONG = list(range(10, 21))  # two pages and three tokens
FEW = SamplingParams(max_new_tokens=3, ignore_eos=True)


def test_the_next_turn_computes_what_is_new_only() -> None:
    scheduler, executor = make(num_pages=20, budget=40)
    first = Request(LONG, SamplingParams(max_new_tokens=6, ignore_eos=True))
    run_all(scheduler, executor, first)
    turn = [*LONG, *first.output_ids, 1, 2, 3]  # 20 tokens, of which 16 were computed: 4 pages
    second = Request(turn, FEW)
    run_all(scheduler, executor, second)
    assert second.num_cached_tokens == 16
    batch = executor.batches[len(executor.batches) - 3]
    assert (batch.tokens.tolist(), batch.positions.tolist()) == (turn[16:], [16, 17, 18, 19])
    (update,) = batch.prefix_updates
    assert (update.start, len(update.slots)) == (0, 16)
    assert not executor.batches[-1].prefix_updates
    assert scheduler.counters.hit_rate == 16 / 31


def test_one_token_is_always_computed_and_all_of_a_request_for_logits() -> None:
    scheduler, executor = make(num_pages=20, budget=40)
    run_all(scheduler, executor, Request(LONG[:8], FEW))
    again = Request(LONG[:8], FEW)
    run_all(scheduler, executor, again)
    assert again.num_cached_tokens == 4
    scheduler.add(Request(LONG[:8], None))
    run_step(scheduler, executor)
    assert executor.batches[-1].extend_seq_lens.tolist() == [8] and len(executor.batches[-1].logit_rows) == 8
    assert scheduler.ledger.cache.num_pages == 2  # its own pages were given up for those that were there
    assert_idle(scheduler)


def test_a_prefix_in_flight_is_waited_for_and_then_reused() -> None:
    scheduler, executor = make(num_pages=20, budget=40)
    first, second = Request(LONG, FEW, seed=1), Request([*LONG, 1], FEW, seed=2)
    other = Request([5, 6, 7], FEW)
    for request in (first, second, other):
        scheduler.add(request)
    run_step(scheduler, executor)
    assert [r.state.name for r in (first, second, other)] == ["RUNNING", "WAITING", "RUNNING"]
    run_step(scheduler, executor)
    assert executor.batches[-1].extend_seq_lens.tolist() == [1, 1, 4] and second.num_cached_tokens == 8
    assert second.pages[:2] == first.pages[:2]
    while scheduler.has_work:
        run_step(scheduler, executor)
    assert_idle(scheduler)


def test_a_held_request_follows_a_long_prompt_and_is_free_when_that_is_cancelled() -> None:
    scheduler, executor = make(num_pages=20, budget=5)
    first, second = Request(LONG, FEW), Request(LONG, FEW)
    scheduler.add(first)
    scheduler.add(second)
    run_step(scheduler, executor)
    run_step(scheduler, executor)
    assert first.num_computed == 10 and second.state is RequestState.WAITING
    scheduler.cancel(first)
    run_step(scheduler, executor)
    assert second.num_cached_tokens == 8 and second.state is RequestState.RUNNING
    while scheduler.has_work:
        run_step(scheduler, executor)
    assert_idle(scheduler)


def test_pages_computed_twice_are_kept_once() -> None:
    scheduler, executor = make(num_pages=20, budget=40, patience=0)  # everybody is overdue: nobody is held
    requests = [Request(LONG, SamplingParams(max_new_tokens=9, temperature=1.0), seed=i) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    run_step(scheduler, executor)
    assert executor.batches[-1].extend_seq_lens.tolist() == [11, 11, 11]
    assert requests[0].pages[:2] == requests[1].pages[:2] == requests[2].pages[:2]
    assert scheduler.kv_pool.total_pages - scheduler.kv_pool.available_pages == 2 + 3
    run_step(scheduler, executor)
    assert [(u.start, len(u.slots)) for u in executor.batches[-1].prefix_updates] == [(0, 8)] * 2
    while scheduler.has_work:
        run_step(scheduler, executor)
    for request in requests:
        assert request.output_ids == reference(LONG, request.params, request.seed)[0]  # type: ignore[arg-type]
    assert_idle(scheduler)


def test_cached_pages_are_given_up_for_requests_and_preempted_ones_find_theirs_again() -> None:
    scheduler, executor = make(num_pages=7, budget=40)
    for i in range(4):
        run_all(scheduler, executor, Request([i] * 9, FEW, seed=i))  # two full pages each, of six
    assert scheduler.counters.evicted_pages >= 2 and scheduler.counters.num_preemptions == 0
    scheduler.flush_cache()
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    requests = [Request([7, 7, 7], params), Request([8, 8, 8], params), Request([9, 9, 9], params)]
    run_all(scheduler, executor, *requests)
    assert scheduler.counters.num_preemptions > 0
    computed = sum(batch.num_tokens for batch in executor.batches)
    assert computed < 4 * 11 + 3 * 14 + 11 * scheduler.counters.num_preemptions
    assert_idle(scheduler)


def test_without_the_cache_nothing_is_kept() -> None:
    scheduler, executor = make(num_pages=20, budget=40, prefix_cache=False)
    run_all(scheduler, executor, Request(LONG, FEW), Request(LONG, FEW))
    assert scheduler.kv_pool.available_pages == scheduler.kv_pool.total_pages
    assert scheduler.counters.hit_rate == 0.0 and not any(batch.prefix_updates for batch in executor.batches)


def test_a_failed_step_leaves_nothing_of_itself_in_the_tree() -> None:
    scheduler, _ = make(num_pages=20, budget=40)
    scheduler.add(Request(LONG, FEW))
    step = scheduler.schedule()
    assert step is not None
    scheduler.fail([entry.request for entry in step.entries], RuntimeError("NaN"))
    assert scheduler.ledger.cache.num_pages == 0
    assert_idle(scheduler)


# ---- order of admission ----


def admissions(scheduler: Scheduler, executor: MemoryExecutor, requests: list[Request]) -> list[int]:
    """The order in which these, all added, are admitted."""
    order: list[int] = []
    while scheduler.has_work:
        run_step(scheduler, executor)
        order += [i for i, r in enumerate(requests) if r.state is not RequestState.WAITING and i not in order]
    return order


@pytest.mark.parametrize(("policy", "order"), [("lpm", [1, 3, 0, 2]), ("fcfs", [0, 1, 2, 3])])
def test_policies(policy: str, order: list[int]) -> None:
    scheduler, executor = make(num_pages=20, max_running=1, budget=40, policy=policy)
    run_all(scheduler, executor, Request(LONG, FEW))
    requests = [Request(tokens, FEW) for tokens in ([1, 2], LONG, [3, 4], LONG[:6])]
    for request in requests:
        scheduler.add(request)
    assert admissions(scheduler, executor, requests) == order


@pytest.mark.parametrize("patience", [0, 1, 5])
def test_nobody_starves(patience: int) -> None:
    """Two in line with nothing cached, and requests that are preferred come for as long as they wait."""
    scheduler, executor = make(num_pages=20, max_running=1, budget=40, patience=patience)
    run_all(scheduler, executor, Request(LONG, FEW))
    slighted = [Request([1, 2], FEW), Request([3, 4], FEW)]
    for request in slighted:
        scheduler.add(request)
    before = scheduler.counters.num_admitted
    for _ in range(100):
        if scheduler.num_waiting < 4:
            scheduler.add(Request(LONG, FEW))
        run_step(scheduler, executor)
        if all(request.done for request in slighted):
            break
    assert slighted[0].done and slighted[1].done
    # All that was admitted until the second was: `patience` others, the first of the two, and itself.
    assert scheduler.counters.num_admitted - before <= patience + 2 + 1  # and one may have followed it since
    assert scheduler.counters.num_admitted - before >= patience + 2


def test_an_overdue_request_is_passed_by_nobody_even_if_it_does_not_fit() -> None:
    scheduler, executor = make(num_pages=6, page_size=4, budget=40, patience=0)
    run_all(scheduler, executor, Request([1] * 5, FEW))
    running = Request([2] * 9, SamplingParams(max_new_tokens=4, ignore_eos=True))
    big, preferred = Request([3] * 14, FEW), Request([1] * 5, FEW)
    for request in (running, big, preferred):
        scheduler.add(request)
    assert admissions(scheduler, executor, [running, big, preferred]) == [0, 1, 2]


def test_a_full_queue_says_so_and_keeps_nothing() -> None:
    scheduler, executor = make(max_queue=2, budget=40)
    for i in range(2):
        scheduler.add(Request([i], FEW))
    refused = Request([7], FEW)
    with pytest.raises(QueueFull, match=r"queue is full(?s:.*)max_queue=2(?s:.*)2 wait(?s:.*)raise max_queue"):
        scheduler.add(refused)
    assert refused.arrival < 0 and scheduler.num_waiting == 2
    run_step(scheduler, executor)
    scheduler.add(refused)  # there is room again, and it is as new
    while scheduler.has_work:
        run_step(scheduler, executor)
    assert refused.done
    for bad, message in (({"policy": "sjf"}, "lpm"), ({"max_queue": 0}, "max_queue is too small"),
                         ({"patience": -1}, "patience is too small")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            make(**bad)


# ---- drafts ----


def test_right_drafts_save_steps_and_wrong_ones_cost_none() -> None:
    params = SamplingParams(max_new_tokens=13, ignore_eos=True, temperature=1.0)
    expected = reference(LONG, params, seed=3)[0]

    def run(draft: Callable[[np.ndarray], list[int]] | None) -> tuple[int, int, int]:
        scheduler, executor = make(num_pages=20, budget=40)
        request = Request(LONG, params, seed=3, drafter=draft)
        run_all(scheduler, executor, request)
        if draft is not None:
            assert executor.batches[1].forward_mode is ForwardMode.TARGET_VERIFY
        assert_idle(scheduler)
        return len(executor.batches), scheduler.counters.drafted_tokens, scheduler.counters.accepted_tokens

    assert run(None) == (13, 0, 0)
    # 1 of the prompt, then 5, 5 and the last 2 of 13; no draft is made for what cannot come.
    assert run(lambda tokens: expected[len(tokens) - 11 :][:4]) == (4, 9, 9)
    steps, drafted, accepted = run(lambda tokens: [VOCAB - 1 - token for token in expected[len(tokens) - 11 :][:2]])
    assert steps == 13 and drafted > accepted == 0


def test_drafts_take_what_budget_and_pages_are_left_and_preempt_nobody() -> None:
    scheduler, executor = make(num_pages=4, page_size=4, max_running=2, budget=6)
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    drafting, other = Request([1] * 3, params, drafter=lambda tokens: [0] * 9), Request([2] * 4, params)
    scheduler.add(drafting)
    scheduler.add(other)
    while scheduler.has_work:
        run_step(scheduler, executor)
        check_books(scheduler)
    assert scheduler.counters.num_preemptions == 0 and scheduler.counters.drafted_tokens > 0
    assert max(batch.num_tokens for batch in executor.batches) <= 6
    assert_idle(scheduler)


def test_prompt_lookup() -> None:
    lookup = PromptLookup(max_drafts=3, max_ngram=2)
    tokens = np.array
    assert lookup(tokens([1, 2, 3, 4, 5, 9, 2, 3])) == [4, 5, 9]
    assert lookup(tokens([1, 2, 3, 7, 1, 2, 3, 8, 6, 2, 3])) == [8, 6, 2]  # the latest
    assert lookup(tokens([5, 3, 4, 9, 3])) == [4, 9, 3]  # one token, as no two have occurred
    assert lookup(tokens([4, 4])) == [4]
    assert lookup(tokens([1, 2, 3])) == lookup(tokens([1])) == []
    with pytest.raises(ValueError, match="no such prompt lookup"):
        PromptLookup(min_ngram=3, max_ngram=2)


def test_a_drafter_is_checked_and_its_error_loses_nothing() -> None:
    for given_ids in ([VOCAB], [-1], [0.5], [[1]]):
        with pytest.raises(ValueError, match=r"drafter gave no list of token ids(?s:.*)\[0, 50\)"):
            checked(lambda tokens, ids=given_ids: ids, VOCAB)(np.array([1]))  # type: ignore[misc]
    scheduler, executor = make(num_pages=20, budget=40)
    calls = iter([None, *[[]] * 20])

    def draft(tokens: np.ndarray) -> list[int]:
        drafts = next(calls)
        if drafts is None:
            raise ZeroDivisionError
        tokens[:1] = 5
        return drafts

    request = Request(LONG, FEW, drafter=draft)
    scheduler.add(request)
    run_step(scheduler, executor)
    with pytest.raises(ZeroDivisionError):
        scheduler.schedule()
    with pytest.raises(ValueError, match="read-only"):
        scheduler.schedule()
    check_books(scheduler)
    request.drafter = None
    while scheduler.has_work:
        run_step(scheduler, executor)
    assert request.output_ids == reference(LONG, FEW)[0]
