"""Who makes the steps: the thread that waits for a result, in turns with other threads that wait for theirs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tqdm import tqdm

from graphsrt.runtime.results import StreamEvent

if TYPE_CHECKING:
    from graphsrt.runtime.engine import Engine
    from graphsrt.runtime.request import Request


def run(engine: Engine, requests: list[Request], *, progress: bool = False) -> None:
    """Put requests in line, as many as it takes, and step until all are done. Whatever is raised, all are done then."""
    outside = deque(requests)
    pending = {id(request) for request in requests}
    try:
        with tqdm(total=len(requests), unit="prompt", disable=not progress) as bar:
            for request in requests:
                request.on_done.append(lambda done: pending.discard(id(done)))
            while pending:
                with engine.turns:
                    while outside and not engine.is_full:
                        engine.add(outside.popleft())
                    if pending:  # steps of another thread may have ended them meanwhile
                        engine.step()
                engine.turns.give_way()
                bar.update(len(requests) - len(pending) - bar.n)
    except Exception:
        for request in requests:
            engine.cancel(request)
        raise
    except BaseException:  # KeyboardInterrupt: it may have come between any two of our instructions
        engine.abandon(requests)
        raise


def events(engine: Engine, request: Request) -> Iterator[StreamEvent]:
    """Put a request in line, and yield what is new of it after each step until it is done; if left early, cancel it."""
    try:
        engine.add(request)
        while True:
            event = engine.take(request)
            if event is not None:
                yield event
                if event.finish_reason is not None:
                    return
            elif request.done:
                return
            with engine.turns:
                if not request.done:  # another call's steps move every request
                    engine.step()
            engine.turns.give_way()
    except (Exception, GeneratorExit):
        engine.cancel(request)
        raise
    except BaseException:
        engine.abandon([request])
        raise
