"""Steps for coroutines: a thread makes them while there is work, and tells each event loop what has come.

An event loop must never wait for a step, so coroutines do not touch the engine: what they want done goes into a queue
that the thread empties between two steps.
"""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

from graphsrt.runtime.drafter import Drafter
from graphsrt.runtime.engine import Engine
from graphsrt.runtime.prompts import Prompt, Timeouts
from graphsrt.runtime.request import Request
from graphsrt.runtime.results import Generation, StreamEvent, one_per_prompt
from graphsrt.runtime.sampling_params import SamplingParams

T = TypeVar("T")


class BackgroundSteps:
    """Coroutines' view of an engine. Any number of them, on any number of event loops, at a time.

    The thread is started by the first request and ends when none is left; it takes turns with threads that use the
    engine themselves.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._watched: dict[Request, Callable[[], None]] = {}  # the thread's own: looked at after each step
        self._outside: deque[Request] = deque()  # watched, and not in the engine's queue yet; the thread's own
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()  # held while a command is put in, or the thread decides to end

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        timeout_s: Timeouts,
        drafter: Drafter | None = None,
    ) -> list[Generation]:
        """As ``Engine.generate``; a task that is cancelled ends its requests."""
        requests = await asyncio.to_thread(self._engine.make_requests, prompts, params, timeout_s, drafter)
        loop = asyncio.get_running_loop()
        results: list[asyncio.Future[Generation]] = [loop.create_future() for _ in requests]
        for request, result in zip(requests, results):
            self._watch(request, functools.partial(self._settle, loop, request, result), feed=True)
        try:
            return one_per_prompt(requests, await asyncio.gather(*results))
        finally:
            self._cancel(requests)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None, timeout_s: float | None
    ) -> AsyncIterator[StreamEvent]:
        """As ``Engine.stream``."""
        return self._events(self._engine.stream(prompt, params, timeout_s=timeout_s).request)

    @property
    def num_watched(self) -> int:
        """Requests that coroutines wait for."""
        return len(self._watched)

    def join(self) -> None:
        """Wait for the thread to end, once the engine is closed. All that wait are told."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    async def _events(self, request: Request) -> AsyncIterator[StreamEvent]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[StreamEvent | Exception] = asyncio.Queue()
        self._watch(request, lambda: self._pass_on(loop, request, arrived))
        try:
            while True:
                event = await arrived.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            self._cancel([request])

    # ---- what coroutines ask for ----

    def _watch(self, request: Request, look: Callable[[], None], *, feed: bool = False) -> None:
        """Have a request added and looked at; ``feed``: it stays outside for as long as the queue is full."""

        def add() -> None:
            self._watched[request] = look
            if feed:
                self._outside.append(request)
            else:
                self._add(request)

        self._tell_thread(add)

    def _cancel(self, requests: list[Request]) -> None:
        unfinished = [request for request in requests if not request.done]
        if unfinished:
            self._tell_thread(lambda: self._drop(unfinished))

    def _tell_thread(self, command: Callable[[], None]) -> None:
        with self._starting:
            self._commands.put(command)
            if self._thread is None:
                self._thread = threading.Thread(target=self._drive, daemon=True, name="graphsrt-steps")
                self._thread.start()

    # ---- in the thread ----

    def _add(self, request: Request) -> None:
        try:
            self._engine.add(request)
        except Exception as error:  # noqa: BLE001 - it is raised where the request is awaited
            request.error = error
            self._watched[request]()

    def _feed(self) -> None:
        with self._engine.turns:
            while self._outside and not self._engine.is_full:
                request = self._outside.popleft()
                if not request.done:
                    self._add(request)

    def _drive(self) -> None:
        while True:
            with self._starting:
                if not self._watched and self._commands.empty():
                    self._thread = None
                    return
            while not self._commands.empty():
                self._commands.get()()
            self._feed()
            if self._watched:
                try:
                    self._engine.step()
                except Exception as error:  # noqa: BLE001 - raised by each request that it ended
                    self._fail(error)
                for look in list(self._watched.values()):
                    look()
            self._engine.turns.give_way()

    def _fail(self, error: Exception) -> None:
        """A step's error is that of the requests in it. If it is nobody's, nothing can go on."""
        if not any(request.done for request in self._watched):
            for request in self._watched:
                self._engine.cancel(request)
                request.error = error

    def _drop(self, requests: list[Request]) -> None:
        for request in requests:
            self._watched.pop(request, None)
            self._engine.cancel(request)

    def _settle(self, loop: asyncio.AbstractEventLoop, request: Request, result: asyncio.Future[Generation]) -> None:
        if not request.done and request.error is None:
            return
        self._watched.pop(request, None)
        outcome = request.error or self._engine.result(request)

        def settle() -> None:
            if result.done():  # the task was cancelled
                return
            if isinstance(outcome, BaseException):
                result.set_exception(outcome)
            else:
                result.set_result(outcome)

        self._call(loop, request, settle)

    def _pass_on(self, loop: asyncio.AbstractEventLoop, request: Request, arrived: asyncio.Queue) -> None:
        try:
            event: StreamEvent | Exception | None = self._engine.take(request)
        except Exception as error:  # noqa: BLE001 - raised where the stream is read
            event = error
        if event is None:
            return
        if isinstance(event, Exception) or event.finish_reason is not None:
            self._watched.pop(request, None)
        self._call(loop, request, lambda: arrived.put_nowait(event))

    def _call(self, loop: asyncio.AbstractEventLoop, request: Request, function: Callable[[], None]) -> None:
        try:
            loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop was closed with the request still under way: nobody waits for it any more
            self._drop([request])
