"""From prompts to text: requests in, steps through an executor, tokens and text out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from graphsrt.errors import GraphsrtError, RankError, explain
from graphsrt.runtime.batch_builder import Entry, ScheduledStep
from graphsrt.runtime.deadlines import Deadlines
from graphsrt.runtime.drafter import Drafter
from graphsrt.runtime.driving import run
from graphsrt.runtime.forward_batch import ForwardBatch, ForwardMode
from graphsrt.runtime.intake import Intake
from graphsrt.runtime.kv_pool import ReqToTokenPool, TokenToKVPool
from graphsrt.runtime.metrics import Metrics
from graphsrt.runtime.outcome import detokenize, next_event, raise_if_unfinished, whole
from graphsrt.runtime.prompts import (
    Prompt,
    Timeouts,
    as_list,
    params_of_each,
    timeout_of_each,
)
from graphsrt.runtime.request import Request, RequestState
from graphsrt.runtime.results import Generation, StepResult, StreamEvent, one_per_prompt
from graphsrt.runtime.sampling_params import SamplingParams
from graphsrt.runtime.scheduler import Scheduler
from graphsrt.runtime.stream import Stream
from graphsrt.runtime.turns import Turns
from graphsrt.runtime.waiting_line import Policy

if TYPE_CHECKING:
    from graphsrt.runtime.size_compiler import SizeCompiler


class Executor(Protocol):
    """Whoever holds the model and the KV memory, on one rank or many."""

    def step(self, batch: ForwardBatch) -> StepResult:
        """Update ``req_to_token``, write the KV of the batch's tokens, and sample a token for each of its logit rows.

        A batch may be given again after an exception; it then writes the same slots. Raises RankError if a rank died.
        """
        ...

    def restart(self) -> None:
        """After a RankError: begin anew, with KV memory of any content. ValueError where that cannot be."""
        ...

    def close(self) -> None:
        """Free everything. May be called more than once, and after a RankError."""
        ...


class Engine:
    """Generates from many prompts at a time.

    Safe for use by several threads: each waits for its own requests and runs a step for everybody's whenever it has the
    lock, so that the requests of all share steps. What one thread cancels ends in the others as cancelled.

    executor: closed with the engine. tokenizer: a transformers tokenizer, of which ``tokenizer(text)["input_ids"]`` and
        ``decode(ids, skip_special_tokens=True)`` are used; None if prompts are token ids and no text is wanted.
    context_length: most tokens of a sequence. num_pages, page_size: the executor's KV memory is
        ``num_pages * page_size`` slots, of which page 0 is never used.
    max_running: requests that hold KV at a time, and rows of ``req_to_token``; by default 256, or less where
        ``max_tokens_per_step``, the most tokens of a step, is less.
    prefix_cache: keep the KV of prompts and outputs for requests that begin with the same tokens, as long as nothing
        else needs the memory. policy: ``"lpm"`` admits those first that have most of their prompt cached, ``"fcfs"``
        those that came first; nobody starves. max_queue: at most this many requests wait for admission, a further one
        is refused with QueueFull; None is no limit. ``generate`` and ``logits`` never exceed it.
    concat: joins the logits [R, V] of one sequence computed in several chunks; by default numpy arrays only.
    clock: seconds, for deadlines and metrics. embeds_width: of embeddings in prompts, None if the program takes none.
    sizes: compiles code for the sizes that decode a lot; closed with the engine.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Any | None,
        eos_token_ids: int | Iterable[int] | None,
        context_length: int,
        num_pages: int,
        page_size: int,
        *,
        vocab_size: int,
        max_running: int | None = None,
        max_tokens_per_step: int = 2048,
        prefix_cache: bool = True,
        policy: Policy = "lpm",
        max_queue: int | None = 4096,
        concat: Callable[[list[Any]], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        embeds_width: int | None = None,
        sizes: SizeCompiler | None = None,
    ):
        if eos_token_ids is None:
            eos_token_ids = ()
        elif isinstance(eos_token_ids, int):
            eos_token_ids = (eos_token_ids,)
        self.executor = executor
        self.eos_token_ids = frozenset(int(token) for token in eos_token_ids)
        self.context_length = context_length
        self.max_running = min(256, max_tokens_per_step) if max_running is None else max_running
        self._new_scheduler = lambda: Scheduler(
            self.max_running,
            max_tokens_per_step,
            ReqToTokenPool(self.max_running, context_length),
            TokenToKVPool(num_pages, page_size),
            self.eos_token_ids,
            prefix_cache=prefix_cache,
            policy=policy,
            max_queue=max_queue,
        )
        self.scheduler = self._new_scheduler()
        self.intake = Intake(tokenizer, vocab_size, self.eos_token_ids, self.scheduler.check_fits, embeds_width)
        self._concat = concat or _concat_numpy
        self._sizes = sizes
        self._clock = clock
        self.turns = Turns()  # held while requests, pages or the executor are touched
        self._deadlines = Deadlines()
        self._totals = Metrics()
        self._broken: RankError | None = None
        self._closed = False

    # ---- whole prompts ----

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        timeout_s: Timeouts = None,
        drafter: Drafter | None = None,
    ) -> list[Generation]:
        """Continue each prompt; always a list, in the order of the prompts, also for a single one.

        prompts: strings or token-id lists; a single string or a flat list of ids is one prompt.
        params: one for all, or one for each. With a seed, equal prompts get equal continuations. With ``n`` above 1, a
        prompt's result is its first sample, with the others as ``alternatives``.
        progress: show a bar on stderr. timeout_s: seconds after which a prompt ends with what it has, with the finish
        reason "deadline": one for all, or one for each. drafter: guesses what follows, as ``PromptLookup`` does, to
        compute several tokens in one step; the tokens are the same without it.

        Raises ValueError before anything runs if any prompt cannot be served, and RankError if a rank dies. Whatever
        is raised, KeyboardInterrupt included, all requests of this call are released.
        """
        requests = self.make_requests(prompts, params, timeout_s, drafter)
        run(self, requests, progress=progress)
        return one_per_prompt(requests, map(self.result, requests))

    def logits(self, sequences: Sequence[Sequence[int]]) -> list[Any]:
        """Logits of every position: for each id list of length T what the executor gives for [T, V].

        All sequences are run as flattened batches; long ones in chunks, joined by ``concat``. Raises as ``generate``.
        """
        return [given["logits"] for given in self.forward(sequences)]

    def forward(
        self, prompts: Sequence[Prompt], *, last_row: bool = False, hidden: bool = False
    ) -> list[dict[str, Any]]:
        """What the model gives for each prompt, by name: ``logits`` [T, V], and hidden states [T, E] if asked for.

        last_row: of the last position alone, [1, E], and without logits. Raises as ``generate``.
        """
        self._check_usable()
        requests = [
            self.intake.make(prompt, None, index, last_row=last_row, wants_hidden=hidden)
            for index, prompt in enumerate(prompts)
        ]
        run(self, requests)
        for request in requests:
            raise_if_unfinished(request)
        return [
            {name: self._join([part[name] for part in request.given]) for name in request.given[0]}
            for request in requests
        ]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, timeout_s: float | None = None) -> Stream:
        """Continue one prompt piece by piece; the pieces' texts join to the text of ``generate``.

        Text that may yet change is held back: half a UTF-8 character, and what may become a stop string. Dropping the
        iterator cancels the request. Other requests, of ``generate`` or other streams, advance along with it.
        Raises ValueError at once if the prompt cannot be served, and RankError while iterating if a rank dies.
        """
        self._check_usable()
        if params is not None and params.n > 1:
            raise ValueError(f"a stream is one continuation, and n is {params.n}: use generate, or several streams")
        return Stream(self, self.make_request(prompt, params or SamplingParams()), timeout_s)

    def flush_cache(self) -> int:
        """Free the KV pages of all prefixes that no running request uses; how many pages they were."""
        with self.turns:
            return self.scheduler.flush_cache()

    def metrics(self) -> Metrics:
        """What has been done so far, and what is going on now; see :class:`Metrics`."""
        now = self._totals.copy()
        scheduler = self.scheduler
        now.num_waiting, now.num_running = scheduler.num_waiting, scheduler.num_active
        now.num_preemptions = scheduler.counters.num_preemptions
        now.asked_tokens, now.cached_tokens = scheduler.counters.prompt_tokens, scheduler.counters.cached_tokens
        now.drafted_tokens, now.accepted_tokens = scheduler.counters.drafted_tokens, scheduler.counters.accepted_tokens
        now.pages_total = scheduler.kv_pool.total_pages
        now.pages_used = now.pages_total - scheduler.ledger.available_pages
        now.pages_cached = now.pages_total - now.pages_used - scheduler.kv_pool.available_pages
        return now

    def restart(self) -> None:
        """Start the executor's ranks again, with empty KV memory. What is running or waiting fails with RankError."""
        with self.turns:
            if self._closed:
                raise GraphsrtError("the engine is closed: compile the model again to go on")
            error = self._broken or RankError("the ranks were started again")
            self._broken = error  # until they are there
            self.scheduler.fail(self.scheduler.requests, error)
            self.executor.restart()
            self.scheduler = self._new_scheduler()
            self._broken = None

    def close(self) -> None:
        """Cancel what is running, after the step that is running, and close the executor. May be called again."""
        with self.turns:
            if not self._closed:
                self._closed = True
                self.scheduler.abandon(self.scheduler.requests)
                self.executor.close()
                if self._sizes is not None:
                    self._sizes.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ---- one step at a time: what a server drives ----

    def make_requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        timeout_s: Timeouts = None,
        drafter: Drafter | None = None,
    ) -> list[Request]:
        """The checked requests of ``generate``, not yet in line: ``n`` of each prompt, one after the other."""
        self._check_usable()
        items = as_list(prompts)
        each, timeouts = params_of_each(params, len(items)), timeout_of_each(timeout_s, len(items))
        requests: list[Request] = []
        for index, (item, own, seconds) in enumerate(zip(items, each, timeouts)):
            samples = self.intake.samples(item, own, index, drafter)
            for request in samples:
                self.set_timeout(request, seconds)
            requests += samples
        return requests

    def make_request(self, prompt: Prompt, params: SamplingParams) -> Request:
        """A checked request for one sample, not yet in line. Raises ValueError for one that can never be served."""
        return self.intake.make(prompt, params)

    def set_timeout(self, request: Request, timeout_s: float | None) -> None:
        """End the request this many seconds from now, unless it is done by then; looked at before each step."""
        if timeout_s is not None:
            request.deadline = self._clock() + timeout_s

    def add(self, request: Request) -> None:
        """Put a request of ``make_request`` in line. Raises QueueFull, and keeps nothing of it, if too many wait."""
        with self.turns:
            self._check_usable()
            self.scheduler.add(request)
            request.on_done.append(self._count_end)
            request.added_at = self._clock()
            self._totals.num_requests += 1
            self._deadlines.watch(request)

    @property
    def is_full(self) -> bool:
        """Whether ``add`` would be refused because too many requests wait."""
        return self.scheduler.line.is_full

    def step(self) -> list[Request]:
        """Run one step; returns the requests that gained a token or finished, none if there was nothing to do.

        An exception of the executor fails the requests of the step. After a RankError all requests have failed, and
        the engine is of no more use. After a KeyboardInterrupt requests are computed again, as after a preemption.
        """
        with self.turns:
            self._check_usable()
            start = self._clock()
            try:
                expired = self._deadlines.due(start)
                for request in expired:
                    self.scheduler.cancel(request, "deadline")
                step = self.scheduler.schedule()
                return expired if step is None else expired + self._execute(step, start)
            except Exception:
                raise
            except BaseException:  # it may have come between any two of our instructions
                self.scheduler.abandon(())
                raise

    def cancel(self, request: Request) -> None:
        """End a request; does nothing to one that is done."""
        with self.turns:
            self.scheduler.cancel(request)

    def cancel_all(self) -> None:
        """End every request; whoever waits for one gets what there is of it."""
        with self.turns:
            for request in self.scheduler.requests:
                self.scheduler.cancel(request)

    def take(self, request: Request) -> StreamEvent | None:
        """What is new of a request since the last call, or None. Raises the error that it failed with.

        The first event of a request that is done bears its ``finish_reason``, and is its last.
        """
        with self.turns:
            return next_event(request, self.scheduler.finish)

    def result(self, request: Request) -> Generation:
        """The whole of a request that is done. Raises the error that it failed with."""
        with self.turns:
            return whole(request, self.scheduler.finish)

    def abandon(self, requests: list[Request]) -> None:
        """Cancel these after an interruption that may have come at any time; all others are computed again."""
        with self.turns:
            self.scheduler.abandon(requests)

    # ---- private ----

    def _execute(self, step: ScheduledStep, start: float) -> list[Request]:
        prompt_tokens = sum(e.num_tokens for e in step.entries if e.request.state is RequestState.PREFILL)
        if self._sizes is not None and step.batch.forward_mode == ForwardMode.DECODE:
            step.batch.size_is_compiled = self._sizes.count(step.batch.batch_size)
        try:
            result = self.executor.step(step.batch)
        except RankError as error:
            self._broken = error
            self.scheduler.fail(self.scheduler.requests, error)
            raise
        except Exception as error:
            self.scheduler.fail([entry.request for entry in step.entries], error)
            raise
        for entry in step.entries:
            if entry.request.wants_no_tokens and entry.num_logit_rows:
                self._collect(entry, result)
        advanced = self.scheduler.complete(step, result.token_ids, result.logprobs)
        for request in advanced:
            if request.params is not None and request.params.stop:
                detokenize(request, self.scheduler.finish)
        now = self._clock()
        for request in advanced:
            self._totals.count_tokens(request, now)
        self._totals.count_step(now - start, prompt_tokens, result)
        return advanced

    def _collect(self, entry: Entry, result: StepResult) -> None:
        rows = slice(entry.first_logit_row, entry.first_logit_row + entry.num_logit_rows)
        given: dict[str, Any] = {"logits": result.logits} if entry.request.every_row else {}
        if entry.request.wants_hidden:
            given.update(result.hidden)
        assert given and all(value is not None for value in given.values()), "the executor gave less than was asked for"
        entry.request.given.append({name: value[rows] for name, value in given.items()})

    def _join(self, parts: list[Any]) -> Any:
        return parts[0] if len(parts) == 1 else self._concat(parts)

    def _count_end(self, request: Request) -> None:
        self._totals.count_end(request, self._clock())

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise RankError(
                explain(
                    "the engine has stopped because a rank failed",
                    got=str(self._broken),
                    hint="restart() it, or close it and compile the model again",
                ),
                rank=self._broken.rank,
            ) from self._broken
        if self._closed:
            raise GraphsrtError("the engine is closed: compile the model again to go on")


def _concat_numpy(chunks: list[Any]) -> Any:
    if not all(isinstance(chunk, np.ndarray) for chunk in chunks):
        raise TypeError(f"logits came in {len(chunks)} chunks of {type(chunks[0]).__name__}: give the engine a concat")
    return np.concatenate(chunks)
