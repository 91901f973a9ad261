"""What each step computes: continuous batching over paged KV, with reuse of what is computed already.

The rules, in order:

1. Every request that decodes gets one token per step. If one needs a page and none is free, cached pages that no
   request uses are given up; if there are none, the request that was admitted last is preempted (possibly itself): it
   gives everything back and waits, in the place of its arrival, to be computed again.
2. What is left of the step's token budget goes to prompts in the order of their admission, in chunks as large as fit.
3. Waiting requests are admitted in the order of the policy (``waiting_line.py``). The next of them waits for pages for
   all its tokens that are not cached, and nobody passes it. Active requests that may still need a page have one left to
   them, so that admission does not at once cause a preemption. A request whose prompt goes on as that of another one
   does which is computing it just now is *held* until it can reuse it, unless it is overdue; others may pass meanwhile.
4. What is left after that goes to drafts: tokens that a request's drafter guesses to follow are computed together with
   its last one. Each gives a token as if it were known; they count up to the first that was guessed wrong. Since the
   random number of a token depends on its place alone, the tokens are those of decoding one by one.

The request that was admitted first always advances: it can take the pages of every other, and no request is accepted
that does not fit the pool alone. So each step makes progress, and whoever is overdue is next when pages come free.

Which pages are whose, and how prefixes are reused: ``kv_ledger.py`` and ``radix_cache.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from graphsrt.errors import explain
from graphsrt.runtime.batch_builder import BatchBuilder, Entry, ScheduledStep
from graphsrt.runtime.counters import Counters
from graphsrt.runtime.kv_ledger import KVLedger
from graphsrt.runtime.kv_pool import ReqToTokenPool, TokenToKVPool
from graphsrt.runtime.radix_cache import Node
from graphsrt.runtime.request import FinishReason, Request, RequestState
from graphsrt.runtime.token_logprobs import StepLogprobs, TokenLogprob
from graphsrt.runtime.waiting_line import Policy, WaitingLine


class Scheduler:
    """Decides what each step computes, and owns the requests' rows and pages. Not safe for use by several threads.

    ``schedule`` gives pages and builds a batch; nothing counts as computed before ``complete``. A step that raised may
    therefore be scheduled again: it writes the same KV to the same slots.

    max_running: requests that hold KV at a time, at most ``req_to_token.max_requests``.
    max_tokens_per_step: token budget of a step, at least ``max_running``. Longer prompts are computed in chunks.
    eos_token_ids: tokens that end a request unless it ignores them.
    prefix_cache: whether computed pages are kept for requests with the same beginning.
    policy, max_queue, patience: see ``WaitingLine``.
    """

    def __init__(
        self,
        max_running: int,
        max_tokens_per_step: int,
        req_to_token: ReqToTokenPool,
        kv_pool: TokenToKVPool,
        eos_token_ids: Iterable[int] = (),
        *,
        prefix_cache: bool = True,
        policy: Policy = "lpm",
        max_queue: int | None = None,
        patience: int = 256,
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
        self.counters = Counters()
        self.ledger = KVLedger(req_to_token, kv_pool, self.counters, prefix_cache=prefix_cache)
        self.line = WaitingLine(policy, max_queue, patience)
        self._active: list[Request] = []  # in order of admission
        self._num_arrived = 0
        self._builder = BatchBuilder(req_to_token, self.eos_token_ids)

    @property
    def num_waiting(self) -> int:
        return len(self.line)

    @property
    def num_active(self) -> int:
        """Requests that hold KV."""
        return len(self._active)

    @property
    def requests(self) -> list[Request]:
        """All requests that are not done: the active ones in order of admission, the waiting ones of arrival."""
        return [*self._active, *self.line]

    @property
    def has_work(self) -> bool:
        return bool(self._active or len(self.line))

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
        """Put a request at the end of the line. ValueError if it can never be finished, QueueFull if too many wait."""
        assert request.state is RequestState.WAITING and request.arrival < 0
        self.check_fits(request.num_prompt_tokens, request.max_new_tokens)
        self.line.check_room()
        request.arrival = self._num_arrived
        request.num_admitted_before = self.counters.num_admitted
        self._num_arrived += 1
        self.line.add(request)

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None if there is nothing to do. It holds at least one token.

        Raises what a drafter raises; nothing is lost, and the next call goes on.
        """
        if not self.has_work:
            return None
        decoding, preempted = self._decoding()
        entries = [Entry(request, 1) for request in decoding]
        budget = self.max_tokens_per_step - len(decoding)
        if len(decoding) < len(self._active):
            for request in self._active:
                if request.state is RequestState.PREFILL and budget > 0:
                    chunk = min(request.num_tokens - request.num_computed, budget)
                    entries.append(Entry(request, chunk))
                    budget -= chunk
        if budget > 0 and not preempted:
            for request in self._admitted():
                chunk = min(request.num_tokens - request.num_computed, budget)
                entries.append(Entry(request, chunk))
                budget -= chunk
                if budget == 0:
                    break
        assert entries, "no request can advance"
        if budget > 0:
            self._draft(entries[: len(decoding)], budget)
        return ScheduledStep(self._builder.build(entries, len(decoding), self.ledger.moved), entries)

    def complete(
        self, step: ScheduledStep, token_ids: Sequence[int], logprobs: StepLogprobs | None = None
    ) -> list[Request]:
        """Take in a step's result, one token for each logit row; returns the requests that gained a token or finished.

        Tokens of requests that were cancelled meanwhile, and of requests for logits, are dropped.
        """
        assert len(token_ids) == len(step.batch.logit_rows), (
            f"{len(token_ids)} tokens for {len(step.batch.logit_rows)} logit rows"
        )
        rows, num_top = step.batch.logprob_rows, step.batch.logprob_top
        assert logprobs is not None or not len(rows), "the executor gave no log-probabilities"
        known = logprobs.by_row(rows, num_top) if logprobs is not None else {}
        self.ledger.moved.clear()  # the ranks know
        advanced = []
        for entry in step.entries:
            request = entry.request
            if request.done:
                continue
            if request.state is RequestState.RUNNING:
                advanced.append(request)
                self._take_in(request, entry, token_ids, known)
                continue
            request.num_computed += entry.num_tokens
            self.ledger.share(request)
            ends = request.num_computed == request.num_tokens
            after_last = entry.first_logit_row + entry.num_logit_rows
            if known:
                prompt_rows = range(entry.first_logit_row, after_last - ends)
                request.prompt_logprobs += [known[row] for row in prompt_rows if row in known]
            if not ends:
                continue
            advanced.append(request)
            if request.wants_no_tokens:
                self.finish(request, "length")
                continue
            request.to(RequestState.RUNNING)
            self._append(request, token_ids[after_last - 1], known.get(after_last - 1))
        return advanced

    def flush_cache(self) -> int:
        """Give up all cached pages that no request uses; how many they were."""
        return self.ledger.flush()

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a running request, for a reason of ours or of whoever reads its text."""
        request.finish_reason = reason
        self._drop(request)
        request.to(RequestState.FINISHED)

    def cancel(self, request: Request, reason: FinishReason = "cancelled") -> None:
        """End a request at its caller's wish, or as its time is out; does nothing to one that is done."""
        if not request.done:
            request.finish_reason = reason
            self._drop(request)
            request.to(RequestState.CANCELLED)

    def fail(self, requests: Iterable[Request], error: BaseException) -> None:
        """End requests that an error took down; those that are done stay as they are."""
        for request in requests:
            if not request.done:
                request.error = error
                self._drop(request, share=False)  # what the step has left in its pages is anybody's guess
                request.to(RequestState.FAILED)

    def abandon(self, requests: Collection[Request]) -> None:
        """Cancel these after an interruption that may have come between any two instructions of ours.

        The pools are made anew rather than trusted to be consistent; other requests are computed again, as after a
        preemption.
        """
        mine = {id(request) for request in requests}
        others = [request for request in self.requests if id(request) not in mine and not request.done]
        self._active.clear()
        self.line.clear()
        self.ledger.reset([*requests, *others])
        for request in requests:
            self.cancel(request)
        for request in others:
            if request.state is not RequestState.WAITING:
                request.restart()
            self.line.put_back(request)

    # ---- what a step computes ----

    def _decoding(self) -> tuple[list[Request], bool]:
        """The requests that decode in this step, each with a slot for its token; and whether any was preempted."""
        decoding: list[Request] = []
        preempted = False
        page_size = self.kv_pool.page_size
        for request in list(self._active):
            while request.state is RequestState.RUNNING:
                if request.num_tokens <= len(request.pages) * page_size:
                    decoding.append(request)
                    break
                if not self.ledger.give(request, 1):
                    # The last is never one that was scheduled above, as these were admitted before ``request``.
                    self._preempt(self._active[-1])
                    preempted = True
        return decoding, preempted

    def _admitted(self) -> Iterator[Request]:
        """Admit one request after the other, for as long as they are asked for and there is room."""
        if not len(self.line) or len(self._active) >= self.max_running:
            return
        page_size = self.kv_pool.page_size
        promised = sum(other.max_kv_tokens > len(other.pages) * page_size for other in self._active)
        if self.ledger.available_pages <= promised:  # everybody needs a page: do not look for who would be next
            return
        computing = {self._next_page(request) for request in self._active if request.state is RequestState.PREFILL}
        candidates = self.line.in_order(self.ledger.cache if self.ledger.prefix_cache else None)
        while len(self._active) < self.max_running:
            request = self.line.overdue(self.counters.num_admitted)
            if request is None:
                request = next((r for r, node, at in candidates if self._may_go(r, node, at, computing)), None)
            if request is None or not self.ledger.seat(request, promised):
                return
            self._admit(request)
            promised += request.max_kv_tokens > len(request.pages) * page_size
            computing.add(self._next_page(request))
            yield request

    def _admit(self, request: Request) -> None:
        self.line.remove(request)
        request.to(RequestState.PREFILL)
        self._active.append(request)
        self._builder.set_row(request)
        if request.params is not None:
            request.ending = request.params.ending(self.eos_token_ids)
        self.counters.num_admitted += 1
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed
            self.counters.prompt_tokens += request.num_prompt_tokens
            self.counters.cached_tokens += request.num_computed

    def _next_page(self, request: Request) -> tuple[Node | None, int, bytes]:
        """Names the first page that a request in prefill will add to the tree: where, and its tokens."""
        at = request.num_shared_pages * self.kv_pool.page_size
        return request.node, at, request.tokens[at : at + self.kv_pool.page_size].tobytes()

    def _may_go(self, request: Request, node: Node | None, at: int, computing: Collection[object]) -> bool:
        """Whether a candidate still waits, and nobody computes the page just now that follows what is cached of it."""
        end = at + self.kv_pool.page_size
        if request.state is not RequestState.WAITING or node is None or end > request.num_cacheable_tokens:
            return request.state is RequestState.WAITING
        return (node, at, request.tokens[at:end].tobytes()) not in computing

    def _draft(self, entries: list[Entry], budget: int) -> None:
        """Add drafts to these decoding entries, as far as the budget and the pages go without taking anybody's."""
        page_size = self.kv_pool.page_size
        for entry in entries:
            request = entry.request
            if request.drafter is None:
                continue
            room = min(budget, request.max_new_tokens - request.num_output_tokens - 1)
            if room <= 0:
                continue
            known = request.tokens[: request.num_tokens]
            known.flags.writeable = False
            drafts = list(request.drafter(known))[:room]
            missing = self.kv_pool.pages_for(request.num_tokens + len(drafts)) - len(request.pages)
            if missing > 0 and not self.ledger.give(request, missing):
                del drafts[len(request.pages) * page_size - request.num_tokens :]
            entry.drafts = drafts
            entry.num_tokens += len(drafts)
            budget -= len(drafts)

    def _take_in(
        self, request: Request, entry: Entry, token_ids: Sequence[int], known: Mapping[int, TokenLogprob]
    ) -> None:
        """Append what a decoding request has gained: a token, and one more for each draft that was right."""
        row = entry.first_logit_row
        token = token_ids[row]
        request.num_computed += 1
        ended = self._append(request, token, known.get(row))
        for index, draft in enumerate(entry.drafts, start=1):
            if ended or token != draft:
                break
            self.counters.accepted_tokens += 1
            token = token_ids[row + index]
            request.num_computed += 1
            ended = self._append(request, token, known.get(row + index))
        self.counters.drafted_tokens += len(entry.drafts)

    def _append(self, request: Request, token: int, logprob: TokenLogprob | None) -> bool:
        """Add a generated token, and finish the request if it is the last one, which is returned."""
        request.append(token, logprob)
        params = request.params
        assert params is not None
        num_output = request.num_tokens - request.num_prompt_tokens
        if num_output >= params.min_new_tokens and token in request.ending:
            request.stopped_by_token = True
            self.finish(request, "stop")
            return True
        if num_output >= request.max_new_tokens:
            self.finish(request, "length")
            return True
        return False

    def _preempt(self, request: Request) -> None:
        self._active.remove(request)
        self.ledger.release(request, share=True)
        request.restart()
        self.line.put_back(request)
        self.counters.num_preemptions += 1

    def _drop(self, request: Request, *, share: bool = True) -> None:
        if request.row is not None:
            self._active.remove(request)
            self.ledger.release(request, share=share)
        else:
            self.line.remove(request)
