"""Which requests are out of time."""

from __future__ import annotations

import heapq
import itertools

from graphsrt.runtime.request import Request


class Deadlines:
    """Requests with a deadline, the nearest first. Looking costs nothing while none is due."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._numbers = itertools.count()  # break ties

    def watch(self, request: Request) -> None:
        """Remember a request, if it has a deadline."""
        if request.deadline is not None:
            heapq.heappush(self._heap, (request.deadline, next(self._numbers), request))

    def due(self, now: float) -> list[Request]:
        """The requests whose deadline has passed and that are not done, each given once."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            request = heapq.heappop(self._heap)[2]
            if not request.done:
                found.append(request)
        return found
