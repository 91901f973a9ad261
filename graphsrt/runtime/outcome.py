"""What there is of a request so far: its text, the next event of its stream, and the whole of it."""

from __future__ import annotations

from collections.abc import Callable

from graphsrt.errors import GraphsrtError
from graphsrt.runtime.request import FinishReason, Request, RequestState
from graphsrt.runtime.results import Generation, StreamEvent

Finish = Callable[[Request, FinishReason], None]
"""Ends a running request, as its text has come to a stop string."""


def next_event(request: Request, finish: Finish) -> StreamEvent | None:
    """What is new since the last call, or None; see ``Engine.take``."""
    if request.error is not None:
        raise request.error
    if request.wants_no_tokens or request.num_taken is None:
        return None
    text = ""
    if request.detokenizer is not None:
        detokenize(request, finish)
        text = request.detokenizer.take()
    token_ids = request.output_ids[request.num_taken :]
    wanted = request.params is not None and request.params.logprobs is not None
    logprobs = request.logprobs[request.num_taken :] if wanted else None
    if request.done:
        request.num_taken = None
        return StreamEvent(text, token_ids, request.finish_reason, logprobs)
    if not text and (request.detokenizer is not None or not token_ids):
        return None
    request.num_taken += len(token_ids)
    return StreamEvent(text, token_ids, None, logprobs)


def whole(request: Request, finish: Finish) -> Generation:
    """All of a request that is done; raises the error that it failed with."""
    assert request.done
    if request.error is not None:
        raise request.error
    text = ""
    if request.detokenizer is not None:
        detokenize(request, finish)
        text = request.detokenizer.text
    params = request.params
    assert params is not None and request.finish_reason is not None
    return Generation(
        text,
        request.output_ids,
        request.tokens[: request.num_prompt_tokens].tolist(),
        request.finish_reason,
        request.num_preemptions,
        num_cached_tokens=request.num_cached_tokens,
        logprobs=list(request.logprobs) if params.logprobs is not None else None,
        prompt_logprobs=list(request.prompt_logprobs) if params.prompt_logprobs is not None else None,
    )


def raise_if_unfinished(request: Request) -> None:
    """What was computed only in part is no result: another thread has cancelled it, or an error ended it."""
    if request.error is not None:
        raise request.error
    if request.state is not RequestState.FINISHED:
        raise GraphsrtError("the computation was cancelled before it was complete")


def detokenize(request: Request, finish: Finish) -> None:
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
    if params.stop:  # one by one: of several tokens of one step, those after the end of the text do not count
        for token in output[request.num_detokenized : end]:
            request.num_detokenized += 1
            if detokenizer.push([token]):
                break
        if detokenizer.stopped and request.num_detokenized < len(output):
            request.cut(request.num_detokenized)
    else:
        detokenizer.push(output[request.num_detokenized : end])
        request.num_detokenized = max(end, request.num_detokenized)
    if request.done:
        detokenizer.finish()
    if detokenizer.stopped:
        if not request.done:
            finish(request, "stop")
        elif request.finish_reason == "length":  # the last token that was allowed ended a stop string as well
            request.finish_reason = "stop"
