"""Who is next: the requests that wait, the order in which they are admitted, and a bound on how many may wait."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from typing import Literal, get_args

from graphsrt.errors import GraphsrtError, explain
from graphsrt.runtime.radix_cache import Node, RadixCache
from graphsrt.runtime.request import Request

Policy = Literal["lpm", "fcfs"]

_LOOK_AHEAD = 128  # requests from the front that are compared with the tree; the rest is first come, first served


class QueueFull(GraphsrtError):
    """As many requests wait as are allowed to. Nothing of the refused one is kept: it may be added again later."""


class WaitingLine:
    """Requests in order of arrival, and the order of their admission.

    policy: ``"fcfs"``, first come, first served; ``"lpm"``, longest cached prefix first, and of equal ones the first
        that came. Where nothing is cached the two are the same.
    max_queue: at most this many wait; ``None`` is no limit. Preempted requests come back whatever the limit.
    patience: fairness. Once this many requests have been admitted since a request arrived, it is *overdue*: it is
        admitted before everybody who came after it, and nobody passes it even if it does not fit and they would. So a
        request sees at most ``patience`` admissions of others, and those of the requests that came before it.
    """

    def __init__(self, policy: Policy, max_queue: int | None, patience: int):
        if policy not in get_args(Policy):
            raise ValueError(explain("no such policy", expected='"lpm" or "fcfs"', got=repr(policy)))
        for name, value, least in (("max_queue", max_queue, 1), ("patience", patience, 0)):
            if value is not None and value < least:
                raise ValueError(explain(f"{name} is too small", expected=f"at least {least}", got=str(value)))
        self.policy = policy
        self.max_queue = max_queue
        self.patience = patience
        self._requests: list[Request] = []  # in order of arrival

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def is_full(self) -> bool:
        """Whether ``add`` would be refused."""
        return self.max_queue is not None and len(self._requests) >= self.max_queue

    def check_room(self) -> None:
        """Raise QueueFull if there is none."""
        if self.is_full:
            raise QueueFull(
                explain(
                    "the queue is full",
                    expected=f"fewer than max_queue={self.max_queue} waiting requests",
                    got=f"{len(self._requests)} wait",
                    hint="try again once some have begun, or raise max_queue",
                )
            )

    def add(self, request: Request) -> None:
        """Put a new request at the end. Raises QueueFull."""
        self.check_room()
        assert not self._requests or self._requests[-1].arrival < request.arrival
        self._requests.append(request)

    def put_back(self, request: Request) -> None:
        """A preempted request waits again, in the place of its arrival."""
        insort(self._requests, request, key=lambda other: other.arrival)

    def remove(self, request: Request) -> None:
        """Take a request out, admitted or given up; does nothing if it is not here."""
        if request in self._requests:
            self._requests.remove(request)

    def clear(self) -> None:
        """Forget all of them."""
        self._requests.clear()

    def overdue(self, num_admitted: int) -> Request | None:
        """The first in line if it must be next. Arrivals are in order, so whoever else is overdue stands behind it."""
        if not self._requests:
            return None
        first = self._requests[0]
        return first if num_admitted - first.num_admitted_before >= self.patience else None

    def in_order(self, cache: RadixCache | None) -> Iterator[tuple[Request, Node | None, int]]:
        """Requests in the order of admission, with the end of what is cached of each and how many tokens that is.

        The line may be changed meanwhile; who has left it is left out.
        """
        line = list(self._requests)
        if cache is None:
            yield from ((request, None, 0) for request in line)
            return
        found = ((request, *cache.peek(request.tokens[: request.num_cacheable_tokens])) for request in line)
        if self.policy == "lpm":
            ahead = [next(found) for _ in range(min(_LOOK_AHEAD, len(line)))]
            yield from sorted(ahead, key=lambda item: -item[2])  # stable: by arrival among equals
        yield from found
