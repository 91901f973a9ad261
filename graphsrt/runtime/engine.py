"""From prompts to text: requests in, steps through an executor, tokens and text out."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from graphsrt.errors import GraphsrtError, RankError, explain
from graphsrt.runtime.detokenizer import Detokenizer
from graphsrt.runtime.forward_batch import ForwardBatch
from graphsrt.runtime.kv_pool import ReqToTokenPool, TokenToKVPool
from graphsrt.runtime.request import FinishReason, Request
from graphsrt.runtime.sampling_params import SamplingParams
from graphsrt.runtime.scheduler import Scheduler


@dataclass(frozen=True)
class StepResult:
    """What a step gives: one token per logit row, and logits [R, V] if the batch asked for them.

    ``logits`` may be anything that slices by rows. It must be memory that later steps do not overwrite.
    """

    token_ids: list[int]
    logits: Any | None = None


class Executor(Protocol):
    """Whoever holds the model and the KV memory, on one rank or many."""

    def step(self, batch: ForwardBatch) -> StepResult:
        """Update ``req_to_token``, write the KV of the batch's tokens, and sample a token for each of its logit rows.

        A batch may be given again after an exception; it then writes the same slots. Raises RankError if a rank died.
        """
        ...

    def close(self) -> None:
        """Free everything. May be called more than once, and after a RankError."""
        ...


@dataclass(frozen=True)
class Generation:
    """The continuation of one prompt.

    text: without the stop string or stop token; empty if the engine has no tokenizer. token_ids: all that were
    generated, the last of them being the one that ended it. finish_reason: "stop", "length" or "cancelled".
    num_preemptions: times that it was put back for want of KV pages and computed again.
    """

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: FinishReason
    num_preemptions: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class StreamEvent:
    """A piece of one continuation: its new text, the tokens since the last event, and on the last event the reason.

    A piece of text may lag behind its tokens. ``str(event)`` is the text.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None

    def __str__(self) -> str:
        return self.text


Prompt = str | Sequence[int]


class Engine:
    """Generates from many prompts at a time. Not safe for use by several threads.

    executor: closed with the engine. tokenizer: a transformers tokenizer, of which ``tokenizer(text)["input_ids"]`` and
        ``decode(ids, skip_special_tokens=True)`` are used; None if prompts are token ids and no text is wanted.
    context_length: most tokens of a sequence. num_pages, page_size: the executor's KV memory is
        ``num_pages * page_size`` slots, of which page 0 is never used.
    max_running: requests that hold KV at a time, and rows of ``req_to_token``; by default 256, or less where
        ``max_tokens_per_step``, the most tokens of a step, is less.
    concat: joins the logits [R, V] of one sequence computed in several chunks; by default numpy arrays only.
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
        concat: Callable[[list[Any]], Any] | None = None,
    ):
        if eos_token_ids is None:
            eos_token_ids = ()
        elif isinstance(eos_token_ids, int):
            eos_token_ids = (eos_token_ids,)
        self.executor = executor
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(int(token) for token in eos_token_ids)
        self.context_length = context_length
        self.vocab_size = vocab_size
        self.max_running = min(256, max_tokens_per_step) if max_running is None else max_running
        self.scheduler = Scheduler(
            self.max_running,
            max_tokens_per_step,
            ReqToTokenPool(self.max_running, context_length),
            TokenToKVPool(num_pages, page_size),
            self.eos_token_ids,
        )
        self._concat = concat or _concat_numpy
        self._broken: RankError | None = None
        self._closed = False

    # ---- whole prompts ----

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
    ) -> list[Generation]:
        """Continue each prompt; always a list, in the order of the prompts, also for a single one.

        prompts: strings or token-id lists; a single string or a flat list of ids is one prompt.
        params: one for all, or one for each. With a seed, equal prompts get equal continuations.
        progress: show a bar on stderr.

        Raises ValueError before anything runs if any prompt cannot be served, and RankError if a rank dies. Whatever
        is raised, KeyboardInterrupt included, all requests of this call are released.
        """
        self._check_usable()
        items = _as_list(prompts)
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(items)
        else:
            each = list(params)
            if len(each) != len(items):
                raise ValueError(f"{len(items)} prompts but {len(each)} SamplingParams: give one, or one per prompt")
        requests = [self.make_request(item, own, index) for index, (item, own) in enumerate(zip(items, each))]
        self._run(requests, progress=progress)
        return [self.result(request) for request in requests]

    def logits(self, sequences: Sequence[Sequence[int]]) -> list[Any]:
        """Logits of every position: for each id list of length T what the executor gives for [T, V].

        All sequences are run as flattened batches; long ones in chunks, joined by ``concat``. Raises as ``generate``.
        """
        self._check_usable()
        requests = []
        for index, sequence in enumerate(sequences):
            ids = self._check_ids(sequence, index)
            self.scheduler.check_fits(len(ids), 0)
            requests.append(Request(ids, None))
        self._run(requests)
        chunks = [request.logits_chunks for request in requests]
        return [parts[0] if len(parts) == 1 else self._concat(parts) for parts in chunks]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamEvent]:
        """Continue one prompt piece by piece; the pieces' texts join to the text of ``generate``.

        Text that may yet change is held back: half a UTF-8 character, and what may become a stop string. Dropping the
        iterator cancels the request. Other requests, of ``generate`` or other streams, advance along with it.
        Raises ValueError at once if the prompt cannot be served, and RankError while iterating if a rank dies.
        """
        self._check_usable()
        return self._stream(self.make_request(prompt, params or SamplingParams()))

    def close(self) -> None:
        """Cancel what is running and close the executor. May be called more than once."""
        if not self._closed:
            self._closed = True
            self.scheduler.abandon(self.scheduler.requests)
            self.executor.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ---- one step at a time: what a server drives ----

    def make_request(self, prompt: Prompt, params: SamplingParams, index: int | None = None) -> Request:
        """A checked request, not yet in line. ``index`` is its number among several, for messages.

        Raises ValueError for an empty prompt, ids outside the vocabulary, or a request that could never be finished.
        """
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, got {type(params).__name__}")
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer; use stop_token_ids")
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(f"{_name(index)} is a string, but there is no tokenizer: pass token ids")
            ids = self._check_ids(self.tokenizer(prompt)["input_ids"], index)
        else:
            ids = self._check_ids(prompt, index)
        self.scheduler.check_fits(len(ids), params.max_new_tokens)
        request = Request(ids, params, seed=secrets.randbits(64) if params.seed is None else params.seed)
        if self.tokenizer is not None:
            request.detokenizer = Detokenizer(self.tokenizer, params.stop)
        return request

    def add(self, request: Request) -> None:
        """Put a request of ``make_request`` in line."""
        self._check_usable()
        self.scheduler.add(request)

    def step(self) -> list[Request]:
        """Run one step; returns the requests that gained a token or finished, none if there was nothing to do.

        An exception of the executor fails the requests of the step. After a RankError all requests have failed, and
        the engine is of no more use.
        """
        self._check_usable()
        step = self.scheduler.schedule()
        if step is None:
            return []
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
            if entry.request.wants_logits:
                assert result.logits is not None, "the executor gave no logits"
                rows = slice(entry.first_logit_row, entry.first_logit_row + entry.num_logit_rows)
                entry.request.logits_chunks.append(result.logits[rows])
        advanced = self.scheduler.complete(step, result.token_ids)
        for request in advanced:
            if request.params is not None and request.params.stop:
                self._detokenize(request)
        return advanced

    def cancel(self, request: Request) -> None:
        """End a request; does nothing to one that is done."""
        self.scheduler.cancel(request)

    def take(self, request: Request) -> StreamEvent | None:
        """What is new of a request since the last call, or None. Raises the error that it failed with.

        The first event of a request that is done bears its ``finish_reason``, and is its last.
        """
        if request.error is not None:
            raise request.error
        if request.wants_logits or request.num_taken is None:
            return None
        text = ""
        if request.detokenizer is not None:
            self._detokenize(request)
            text = request.detokenizer.take()
        token_ids = request.output_ids[request.num_taken :]
        if request.done:
            request.num_taken = None
            return StreamEvent(text, token_ids, request.finish_reason)
        if not text and (request.detokenizer is not None or not token_ids):
            return None
        request.num_taken += len(token_ids)
        return StreamEvent(text, token_ids)

    def result(self, request: Request) -> Generation:
        """The whole of a request that is done. Raises the error that it failed with."""
        assert request.done
        if request.error is not None:
            raise request.error
        text = ""
        if request.detokenizer is not None:
            self._detokenize(request)
            text = request.detokenizer.text
        assert request.finish_reason is not None
        prompt = request.tokens[: request.num_prompt_tokens].tolist()
        return Generation(text, request.output_ids, prompt, request.finish_reason, request.num_preemptions)

    # ---- private ----

    def _run(self, requests: list[Request], *, progress: bool = False) -> None:
        try:
            with tqdm(total=len(requests), unit="prompt", disable=not progress) as bar:
                for request in requests:
                    self.scheduler.add(request)
                mine = {id(request) for request in requests}
                while mine and self.scheduler.has_work:
                    done = [id(request) for request in self.step() if request.done and id(request) in mine]
                    mine.difference_update(done)
                    bar.update(len(done))
        except Exception:
            for request in requests:
                self.scheduler.cancel(request)
            raise
        except BaseException:  # KeyboardInterrupt: it may have come between any two of our instructions
            self.scheduler.abandon(requests)
            raise

    def _stream(self, request: Request) -> Iterator[StreamEvent]:
        self.add(request)
        try:
            while True:
                event = self.take(request)
                if event is not None:
                    yield event
                    if event.finish_reason is not None:
                        return
                elif request.done:
                    return
                # It may have advanced while the caller had the event: another call's steps move every request.
                if not request.done:
                    self.step()
        except (Exception, GeneratorExit):
            self.scheduler.cancel(request)
            raise
        except BaseException:
            self.scheduler.abandon([request])
            raise

    def _detokenize(self, request: Request) -> None:
        """Bring the text up to date. Text without stop strings is decoded when asked for, many tokens at a time."""
        detokenizer, params = request.detokenizer, request.params
        assert detokenizer is not None and params is not None
        output = request.output_ids
        end = len(output)
        if request.stopped_by_token:
            end -= 1
        # Text of the first tokens cannot stop it, so they are pushed apart from those that can.
        floor = max(params.min_new_tokens - 1, 0)
        if request.num_detokenized < min(floor, end):
            detokenizer.push(output[request.num_detokenized : min(floor, end)], may_stop=False)
            request.num_detokenized = min(floor, end)
        detokenizer.push(output[request.num_detokenized : end])
        request.num_detokenized = max(end, request.num_detokenized)
        if request.done:
            detokenizer.finish()
        if detokenizer.stopped:
            if not request.done:
                self.scheduler.finish(request, "stop")
            elif request.finish_reason == "length":  # the last token that was allowed ended a stop string as well
                request.finish_reason = "stop"

    def _check_ids(self, prompt: Sequence[int], index: int | None) -> NDArray[np.int64]:
        ids = np.asarray(prompt)
        if ids.size == 0:
            raise ValueError(f"{_name(index)} is empty: it must have at least one token")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(f"{_name(index)} must be a string or a flat list of token ids, got {prompt!r:.80}")
        outside = ids[(ids < 0) | (ids >= self.vocab_size)]
        if len(outside):
            shown = ", ".join(str(token) for token in np.unique(outside)[:8].tolist())
            raise ValueError(f"{_name(index)} has token ids outside the vocabulary [0, {self.vocab_size}): {shown}")
        return ids.astype(np.int64)

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise RankError(
                explain(
                    "the engine has stopped because a rank failed",
                    got=str(self._broken),
                    hint="close it and compile the model again",
                ),
                rank=self._broken.rank,
            ) from self._broken
        if self._closed:
            raise GraphsrtError("the engine is closed: compile the model again to go on")


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = list(prompts)
    if items and all(isinstance(item, (int, np.integer)) for item in items):
        return [items]
    return items


def _name(index: int | None) -> str:
    return "the prompt" if index is None else f"prompt {index}"


def _concat_numpy(chunks: list[Any]) -> Any:
    if not all(isinstance(chunk, np.ndarray) for chunk in chunks):
        raise TypeError(f"logits came in {len(chunks)} chunks of {type(chunks[0]).__name__}: give the engine a concat")
    return np.concatenate(chunks)
