"""One continuation that comes piece by piece, and can be ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from graphsrt.runtime.driving import events
from graphsrt.runtime.prompts import timeout_of_each
from graphsrt.runtime.results import Generation, StreamEvent

if TYPE_CHECKING:
    from graphsrt.runtime.engine import Engine
    from graphsrt.runtime.request import Request


class Stream(Iterator[StreamEvent]):
    """Iterates over the pieces of one continuation. Nothing runs before the first piece is asked for.

    Dropping it cancels the request. ``cancel`` may be called from any thread, iterating is for one at a time.
    """

    def __init__(self, engine: Engine, request: Request, timeout_s: float | None = None):
        self.request = request
        self._engine = engine
        engine.set_timeout(request, *timeout_of_each(timeout_s, 1))
        self._events = events(engine, request)

    def __next__(self) -> StreamEvent:
        return next(self._events)

    def cancel(self) -> None:
        """End it: the next event is the last, with what there is by then and the finish reason "cancelled"."""
        self._engine.cancel(self.request)

    def result(self) -> Generation:
        """The whole continuation; runs what is left of it. Pieces that were not taken are in its text all the same."""
        for _ in self:
            pass
        return self._engine.result(self.request)

    def close(self) -> None:
        """End it without another event."""
        self._events.close()  # type: ignore[attr-defined]
