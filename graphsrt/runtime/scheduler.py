"""What each step computes: continuous batching over paged KV.

The rules, in order:

1. Every request that decodes gets one token per step. If one needs a page and none is free, the youngest active
   request is preempted (possibly itself): it gives everything back and waits, first in line, to be computed again.
2. What is left of the step's token budget goes to prompts in order of arrival, in chunks as large as fit.
3. Waiting requests are admitted first come, first served. The head of the line waits for pages for all its tokens, and
   nobody passes it. Active requests that may still need a page have one left to them, so that admission does
   not at once cause a preemption.

The active requests are therefore always older than all the waiting ones, and the oldest one always advances: it can
take the pages of every other, and no request is accepted that does not fit the pool alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from graphsrt.errors import explain
from graphsrt.runtime.forward_batch import ForwardBatch, ForwardMode
from graphsrt.runtime.kv_pool import ReqToTokenPool, TokenToKVPool
from graphsrt.runtime.request import FinishReason, Request, RequestState
from graphsrt.runtime.sampling_params import SamplingParams, uniform_at


@dataclass(frozen=True)
class Entry:
    """One sequence of a step: how many of its tokens are computed, and which of the step's logit rows are its own."""

    request: Request
    num_tokens: int
    first_logit_row: int
    num_logit_rows: int


@dataclass(frozen=True)
class ScheduledStep:
    """A batch to execute, and for whom. ``entries`` is in the order of the batch's sequences."""

    batch: ForwardBatch
    entries: list[Entry]


class Scheduler:
    """Decides what each step computes, and owns the requests' rows and pages. Not safe for use by several threads.

    ``schedule`` gives pages and builds a batch; nothing counts as computed before ``complete``. A step that raised may
    therefore be scheduled again: it writes the same KV to the same slots.

    max_running: requests that hold KV at a time, at most ``req_to_token.max_requests``.
    max_tokens_per_step: token budget of a step, at least ``max_running``. Longer prompts are computed in chunks.
    eos_token_ids: tokens that end a request unless it ignores them.
    """

    def __init__(
        self,
        max_running: int,
        max_tokens_per_step: int,
        req_to_token: ReqToTokenPool,
        kv_pool: TokenToKVPool,
        eos_token_ids: Iterable[int] = (),
    ):
        if not 1 <= max_running <= req_to_token.max_requests:
            raise ValueError(f"max_running must lie between 1 and {req_to_token.max_requests}, got {max_running}")
        if max_tokens_per_step < max_running:
            raise ValueError(
                f"max_tokens_per_step ({max_tokens_per_step}) is below max_running ({max_running}): a step could not "
                "give every running request its token. Raise the first or lower the second."
            )
        self.max_running = max_running
        self.max_tokens_per_step = max_tokens_per_step
        self.req_to_token = req_to_token
        self.kv_pool = kv_pool
        self.eos_token_ids = frozenset(eos_token_ids)
        self._waiting: deque[Request] = deque()
        self._active: list[Request] = []  # in order of arrival
        self._num_arrived = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_active(self) -> int:
        """Requests that hold KV."""
        return len(self._active)

    @property
    def requests(self) -> list[Request]:
        """All requests that are not done, in order of arrival."""
        return [*self._active, *self._waiting]

    @property
    def has_work(self) -> bool:
        return bool(self._active or self._waiting)

    def check_fits(self, num_prompt_tokens: int, max_new_tokens: int) -> None:
        """Raise ValueError if such a request could not be finished even alone."""
        context = self.req_to_token.max_context
        if num_prompt_tokens > context:
            raise ValueError(
                explain(
                    "the prompt is longer than the context",
                    expected=f"at most {context} tokens",
                    got=f"{num_prompt_tokens} tokens",
                    hint="shorten the prompt, or give the engine a larger context length if the model has one",
                )
            )
        if num_prompt_tokens + max_new_tokens > context:
            room = context - num_prompt_tokens
            hint = f"set max_new_tokens to at most {room}, or shorten the prompt" if room else "shorten the prompt"
            raise ValueError(
                explain(
                    "the prompt and the new tokens do not fit the context",
                    expected=f"prompt + max_new_tokens of at most {context}",
                    got=f"{num_prompt_tokens} + {max_new_tokens} = {num_prompt_tokens + max_new_tokens}",
                    hint=hint,
                )
            )
        num_kv_tokens = num_prompt_tokens + max(max_new_tokens - 1, 0)
        total, page_size = self.kv_pool.total_pages, self.kv_pool.page_size
        needed = self.kv_pool.pages_for(num_kv_tokens)
        if needed > total:
            raise ValueError(
                explain(
                    "the request does not fit the KV pool even when it has it alone",
                    expected=f"at most {total} pages of {page_size} tokens ({total * page_size} tokens)",
                    got=f"{num_prompt_tokens} prompt + {max_new_tokens} new tokens need {needed} pages",
                    hint=f"give the pool at least {needed + 1} pages (one is reserved), or ask for fewer tokens",
                )
            )

    def add(self, request: Request) -> None:
        """Put a request at the end of the line. Raises ValueError if it could never be finished."""
        assert request.state is RequestState.WAITING and request.arrival < 0
        self.check_fits(request.num_prompt_tokens, request.max_new_tokens)
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self._waiting.append(request)

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None if there is nothing to do. It holds at least one token."""
        if not self.has_work:
            return None
        decoding, preempted = self._decoding()
        chunks = [(request, 1) for request in decoding]
        budget = self.max_tokens_per_step - len(decoding)
        for request in self._active:
            if request.state is RequestState.PREFILL and budget > 0:
                chunk = min(request.num_tokens - request.num_computed, budget)
                chunks.append((request, chunk))
                budget -= chunk
        while budget > 0 and not preempted and self._admit_head():
            request = self._active[-1]
            chunk = min(request.num_tokens, budget)
            chunks.append((request, chunk))
            budget -= chunk
        assert chunks, "no request can advance"
        return self._build(chunks, num_decoding=len(decoding))

    def complete(self, step: ScheduledStep, token_ids: Sequence[int]) -> list[Request]:
        """Take in a step's result, one token for each logit row; returns the requests that gained a token or finished.

        Tokens of requests that were cancelled meanwhile, and of requests for logits, are dropped.
        """
        assert len(token_ids) == len(step.batch.logit_rows), (
            f"{len(token_ids)} tokens for {len(step.batch.logit_rows)} logit rows"
        )
        advanced = []
        for entry in step.entries:
            request = entry.request
            if request.done:
                continue
            request.num_computed += entry.num_tokens
            if request.num_computed < request.num_tokens:
                continue
            advanced.append(request)
            if request.wants_logits:
                self.finish(request, "length")
                continue
            if request.state is RequestState.PREFILL:
                request.to(RequestState.RUNNING)
            request.append(int(token_ids[entry.first_logit_row]))
            reason = self._finish_reason(request)
            if reason is not None:
                self.finish(request, reason)
        return advanced

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a running request, for a reason of ours or of whoever reads its text."""
        request.to(RequestState.FINISHED)
        request.finish_reason = reason
        self._drop(request)

    def cancel(self, request: Request) -> None:
        """End a request at its caller's wish; does nothing to one that is done."""
        if not request.done:
            request.to(RequestState.CANCELLED)
            request.finish_reason = "cancelled"
            self._drop(request)

    def fail(self, requests: Iterable[Request], error: BaseException) -> None:
        """End requests that an error took down; those that are done stay as they are."""
        for request in requests:
            if not request.done:
                request.to(RequestState.FAILED)
                request.error = error
                self._drop(request)

    def abandon(self, requests: Collection[Request]) -> None:
        """Cancel these after an interruption that may have come between any two instructions of ours.

        The pools are made anew rather than trusted to be consistent; other requests are computed again, as after a
        preemption.
        """
        mine = {id(request) for request in requests}
        others = [request for request in self.requests if id(request) not in mine and not request.done]
        self._active.clear()
        self._waiting.clear()
        self.req_to_token.reset()
        self.kv_pool.reset()
        for request in [*requests, *others]:
            request.row, request.pages = None, []
        for request in requests:
            self.cancel(request)
        for request in others:
            if request.state is not RequestState.WAITING:
                request.restart()
            self._waiting.append(request)

    def _decoding(self) -> tuple[list[Request], bool]:
        """The requests that decode in this step, each with a slot for its token; and whether any was preempted."""
        decoding: list[Request] = []
        preempted = False
        for request in list(self._active):
            while request.state is RequestState.RUNNING:
                if request.num_tokens <= len(request.pages) * self.kv_pool.page_size:
                    decoding.append(request)
                    break
                if not self._give_pages(request, 1):
                    # The youngest is never one that was scheduled above, as these are older than ``request``.
                    self._preempt(self._active[-1])
                    preempted = True
        return decoding, preempted

    def _admit_head(self) -> bool:
        if not self._waiting or len(self._active) >= self.max_running:
            return False
        request = self._waiting[0]
        page_size, pages_for = self.kv_pool.page_size, self.kv_pool.pages_for
        promised = sum(other.max_kv_tokens > len(other.pages) * page_size for other in self._active)
        # With room for the token that it is to generate, where that is not its last.
        needed = pages_for(min(request.num_tokens + 1, request.max_kv_tokens))
        if self.kv_pool.available_pages < needed + promised:
            return False
        row = self.req_to_token.alloc()
        if row is None:
            return False
        self._waiting.popleft()
        request.to(RequestState.PREFILL)
        request.row = row
        assert not self._active or self._active[-1].arrival < request.arrival
        self._active.append(request)
        given = self._give_pages(request, pages_for(request.num_tokens))
        assert given
        return True

    def _give_pages(self, request: Request, num_pages: int) -> bool:
        pages = self.kv_pool.alloc(num_pages)
        if pages is None:
            return False
        start = len(request.pages) * self.kv_pool.page_size
        table_row = self.req_to_token.table[request.row]
        slots = self.kv_pool.slots(pages)[: len(table_row) - start]  # the last page may reach past the context
        table_row[start : start + len(slots)] = slots
        request.pages.extend(pages.tolist())
        return True

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.restart()
        assert not self._waiting or request.arrival < self._waiting[0].arrival
        self._waiting.appendleft(request)

    def _drop(self, request: Request) -> None:
        if request.row is not None:
            self._release(request)
        elif request in self._waiting:
            self._waiting.remove(request)

    def _release(self, request: Request) -> None:
        assert request.row is not None
        self._active.remove(request)
        self.req_to_token.free(request.row)
        self.kv_pool.free(request.pages)
        request.row, request.pages = None, []

    def _finish_reason(self, request: Request) -> FinishReason | None:
        params = request.params
        assert params is not None
        token = int(request.tokens[request.num_tokens - 1])
        if request.num_output_tokens >= params.min_new_tokens and (
            token in params.stop_token_ids or (token in self.eos_token_ids and not params.ignore_eos)
        ):
            request.stopped_by_token = True
            return "stop"
        return "length" if request.num_output_tokens >= params.max_new_tokens else None

    def _build(self, chunks: list[tuple[Request, int]], *, num_decoding: int) -> ScheduledStep:
        requests = [request for request, _ in chunks]
        rows = np.array([request.row for request in requests], dtype=np.int64)
        extend = np.array([count for _, count in chunks], dtype=np.int64)
        before = np.array([request.num_computed for request in requests], dtype=np.int64)
        last = np.cumsum(extend) - 1  # each sequence's last row
        sequence = np.repeat(np.arange(len(chunks)), extend)  # of each row
        num_tokens = len(sequence)
        positions = np.arange(num_tokens) + np.repeat(before - (last + 1 - extend), extend)
        tokens = np.concatenate(
            [request.tokens[request.num_computed : request.num_computed + count] for request, count in chunks]
        )

        wants_all = np.array([request.wants_logits for request in requests])
        reaches_end = before + extend == np.array([request.num_tokens for request in requests])
        wanted = wants_all[sequence]
        wanted[last[reaches_end]] = True
        logit_rows = np.flatnonzero(wanted)
        owner = sequence[logit_rows]  # the sequence of each logit row
        params = [request.params or _FOR_LOGITS for request in requests]
        uniform = uniform_at(
            np.array([request.seed for request in requests], dtype=np.uint64),
            np.array([request.num_output_tokens for request in requests], dtype=np.int64),
        )
        mode = ForwardMode.MIXED
        if num_decoding in (0, len(chunks)):
            mode = ForwardMode.DECODE if num_decoding else ForwardMode.EXTEND
        batch = ForwardBatch(
            forward_mode=mode,
            tokens=tokens,
            positions=positions,
            req_pool_indices=rows,
            seq_lens=before + extend,
            extend_seq_lens=extend,
            out_cache_loc=self.req_to_token.table[rows[sequence], positions].astype(np.int64),
            logit_rows=logit_rows,
            temperature=np.array([p.temperature for p in params], dtype=np.float64)[owner],
            top_p=np.array([p.top_p for p in params], dtype=np.float64)[owner],
            top_k=np.array([p.top_k for p in params], dtype=np.int64)[owner],
            uniform=uniform[owner],
            return_logits=bool(wants_all.any()),
        )
        num_rows = np.bincount(owner, minlength=len(chunks))
        first_row = np.cumsum(num_rows) - num_rows
        entries = [
            Entry(request, count, first, rows_of)
            for (request, count), first, rows_of in zip(chunks, first_row.tolist(), num_rows.tolist())
        ]
        return ScheduledStep(batch, entries)


# Rows of a request for logits are in the batch like any other; the greedy tokens that they give are dropped.
_FOR_LOGITS = SamplingParams(max_new_tokens=1)
