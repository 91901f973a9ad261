"""Where a step runs: in this process, in rank processes of our own, or in the process group of ``torchrun``.

All three take one flat int64 buffer per step and give back rank 0's reply. A rank that fails is a ``RankError`` that
names it; nothing waits for a rank that is gone.
"""

from __future__ import annotations

import pickle
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from graphsrt.errors import RankError, explain
from graphsrt.runtime.interrupts import DeferredInterrupt
from graphsrt.runtime.load_plan import LoadReport
from graphsrt.runtime.rank_processes import RankProcesses
from graphsrt.runtime.results import StepResult
from graphsrt.runtime.wire import Kind, StepReply, decode_reply

if TYPE_CHECKING:
    from graphsrt.lowering.collectives import ProcessCollectives
    from graphsrt.runtime.forward_batch import ForwardBatch
    from graphsrt.runtime.workers import BatchRunner, Runner

__all__ = ["GroupExecutor", "LocalExecutor", "StepReply", "WorkersExecutor"]

STALL_TIMEOUT_S = 60.0

T = TypeVar("T")
Progress = Callable[[int, int, int, str], None]
"""``(rank, done, total, label)``"""


class _Executor:
    """What the three have in common: the view of the engine, which speaks in batches."""

    is_driver = True
    load_reports: list[LoadReport]
    """What loading took, by rank; empty where runners do not say."""

    def step_buffer(self, buffer: np.ndarray) -> StepReply:
        raise NotImplementedError

    def step(self, batch: ForwardBatch) -> StepResult:
        """Run one batch on all ranks."""
        return _result(self.step_buffer(batch.encode()))

    def run(self, serve: Callable[[], T]) -> T:
        """The result of ``serve``, on every rank that calls this; only the driver calls ``serve``, to make steps."""
        return serve()

    def restart(self) -> None:
        """Start again what a RankError has ended. ValueError where that is not ours to do."""
        raise ValueError("there are no rank processes of ours to restart: start the program again")

    def close(self) -> None:
        """Release what the executor holds. May be called again."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class LocalExecutor(_Executor):
    """Runs steps in this process."""

    def __init__(self, runner: BatchRunner):
        self._runner: BatchRunner | None = runner
        self.load_reports = _reports([getattr(runner, "load_report", None)])

    def step(self, batch: ForwardBatch) -> StepResult:
        """Run one batch, which nobody needs to encode."""
        return _result(self._open().step_batch(batch) or _no_tokens())

    def step_buffer(self, buffer: np.ndarray) -> StepReply:
        return self._open().step(_as_words(buffer)) or _no_tokens()

    def _open(self) -> BatchRunner:
        if self._runner is None:
            raise ValueError("this executor is closed")
        return self._runner

    def close(self) -> None:
        runner, self._runner = self._runner, None
        _close_runner(runner)


class WorkersExecutor(_Executor):
    """Starts ``tp`` rank processes on this machine and runs steps in them.

    ``runner`` is ``"module:factory"``, importable in the rank processes; the factory gets ``(rank, size, collectives,
    init)``. ``init`` is bytes, or makes a context with bytes and file descriptors that the ranks inherit under the same
    numbers, entered for each start. The caller needs no ``__main__`` guard, and its own modules are not imported.
    ``env`` is added to the environment. ``threads_per_rank`` defaults to the cores of this process
    divided by ``tp``. ``device`` is ``"cpu"`` or ``"cuda"`` (rank r on GPU r). ``progress`` is called, in this thread,
    for each ``report_progress`` of a rank while it starts.

    ``start_timeout``: seconds without any sign of a starting rank; ``stall_timeout``: seconds of a step in which no
    rank enters or leaves a collective (a step may take as long as it likes while they do); ``collective_timeout``:
    seconds for one collective.

    Raises ``RankError`` if a rank cannot start, fails, dies or hangs, and then no rank is left, until ``restart``; a
    ``GraphsrtError`` of a factory (a damaged checkpoint, say) is raised as what it is. Ctrl-C in a step is raised at
    once and leaves the ranks intact: they finish the step, and its reply is dropped. Any other exception out of a step
    ends them. May be called from several threads, one step at a time.
    """

    def __init__(
        self,
        tp: int,
        runner: str,
        init: bytes | Callable[[], AbstractContextManager[tuple[bytes, Sequence[int]]]] = b"",
        *,
        env: Mapping[str, str] | None = None,
        threads_per_rank: int | None = None,
        device: str = "cpu",
        progress: Progress | None = None,
        start_timeout: float = 600.0,
        stall_timeout: float = STALL_TIMEOUT_S,
        collective_timeout: float = 600.0,
    ):
        if tp < 1:
            raise ValueError(f"tp is {tp}, and must be at least 1")
        if ":" not in runner:
            raise ValueError(f"runner is {runner!r}, and must be 'module:factory'")
        self.tp = tp
        self.stall_timeout = stall_timeout
        self._lock = threading.Lock()
        self._failure: str | None = None
        self._closed = False
        self._prepare = (lambda: nullcontext((init, ()))) if isinstance(init, bytes) else init
        self._start_timeout, self._progress = start_timeout, progress
        self._hello = {"runner": runner, "device": device, "collective_timeout": collective_timeout}
        self._env, self._threads_per_rank = dict(env or {}), threads_per_rank
        self._start()

    def _start(self) -> None:
        with self._prepare() as (init, fds):
            self._ranks = RankProcesses.start(
                self.tp, self._hello, init, fds=fds, env=self._env, threads_per_rank=self._threads_per_rank
            )
            # Also at interpreter exit, and when the executor is forgotten.
            self._finalizer = weakref.finalize(self, self._ranks.close)
            try:
                told = self._ranks.wait_ready(self._start_timeout, self._progress)
            except BaseException:
                self._ranks.kill()
                raise
        self.load_reports = [LoadReport.from_json(about) for about in told if about]

    def restart(self) -> None:
        """End what is left of the ranks and start them again, from the same program and weights."""
        with self._lock:
            if self._closed:
                raise ValueError("this executor is closed")
            self._finalizer.detach()
            self._ranks.kill()
            self._failure = "they could not be started again"
            self._start()
            self._failure = None

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return self._ranks.pids

    def step_buffer(self, buffer: np.ndarray) -> StepReply:
        """Run one step on every rank; ``buffer`` is int64 and flat. The reply is rank 0's."""
        words = _as_words(buffer)
        with self._lock:
            if self._closed:
                raise ValueError("this executor is closed")
            if self._failure is not None:
                raise RankError(
                    explain("the ranks have ended", got=self._failure, hint="restart them, or start a new executor")
                )
            with DeferredInterrupt() as interrupt:
                payload = self._await(words, interrupt)
                while payload is None:
                    interrupt.deliver()
                    payload = self._await(None, interrupt)
        return decode_reply(payload)

    def _await(self, words: np.ndarray | None, interrupt: DeferredInterrupt) -> np.ndarray | None:
        """Send a step, unless that has been done, and wait for its reply; None if there is an interrupt to deliver."""
        try:
            if words is not None:
                self._ranks.send(Kind.STEP, words)
            return self._ranks.wait_reply(self.stall_timeout, interrupt)
        except BaseException as error:
            self._failure = str(error).split("\n", 1)[0] or type(error).__name__
            self._ranks.kill()
            raise

    def close(self) -> None:
        self._closed = True
        if self._lock.acquire(blocking=False):
            try:
                self._ranks.close()
            finally:
                self._lock.release()
        else:  # another thread is in a step: it sees the ranks die, and cleans up
            self._ranks.kill_processes()


class GroupExecutor(_Executor):
    """Runs steps in an existing process group, as under ``torchrun``. Rank 0 drives, the others follow.

    Every rank calls ``run(serve)``; ``serve`` is called on rank 0 and its result, which must pickle, is returned on
    every rank. An exception of the driver is raised there as itself and on the others as ``RankError``. A rank that
    fails in the middle of a step abandons the group, since its peers may be in a collective: they raise ``RankError``
    naming it, and no further step is possible. That is why ``collectives`` should be over a group of our own,
    ``ProcessCollectives.over_world()``.
    """

    _STEP, _END, _ERROR = range(3)

    def __init__(self, collectives: ProcessCollectives, runner: Runner):
        self._collectives = collectives
        self._runner: Runner | None = runner
        self._broken: str | None = None
        self.is_driver = collectives.rank == 0
        self.load_reports = _reports(collectives.gather_objects(getattr(runner, "load_report", None)))

    def run(self, serve: Callable[[], T]) -> T:
        if not self.is_driver:
            return self.follow()
        try:
            result = serve()
        except BaseException as error:
            self.fail(error)
            raise
        self.finish(result)
        return result

    def step_buffer(self, buffer: np.ndarray) -> StepReply:
        if not self.is_driver:
            raise ValueError(f"rank {self._collectives.rank} follows: only rank 0 makes steps")
        words = _as_words(buffer)
        self._tell(self._STEP, words)
        return self._run_step(words) or _no_tokens()

    def finish(self, result: object) -> None:
        """Driver: end ``follow`` on the other ranks, which return ``result``."""
        self._tell_object(self._END, result)

    def fail(self, error: BaseException) -> None:
        """Driver: end ``follow`` on the other ranks with a ``RankError``. Does nothing if the group was abandoned."""
        if self._broken is None:
            self._tell_object(self._ERROR, "".join(traceback.format_exception(error)))

    def follow(self) -> Any:
        """Other ranks: run the driver's steps until it ends, and return what it returned."""
        if self.is_driver:
            raise ValueError("rank 0 drives: there is nobody to follow")
        while True:
            self._check_open()
            try:
                message = self._collectives.broadcast_buffer()
            except RuntimeError as error:
                raise self._peer_lost(error) from error
            kind, body = int(message[0]), message[1:]
            if kind == self._STEP:
                self._run_step(body)
            elif kind == self._END:
                return _unpack(body)
            else:
                raise RankError(explain("rank 0 failed", got=_unpack(body)), rank=0)

    def close(self) -> None:
        runner, self._runner = self._runner, None
        _close_runner(runner)

    def _run_step(self, words: np.ndarray) -> StepReply | None:
        if self._runner is None:
            raise ValueError("this executor is closed")
        try:
            return self._runner.step(words)
        except BaseException as error:
            lost = self._peer_lost(error) if self._collectives.meeting.failed else None
            self._broken = str(lost or error)
            self._collectives.abandon(str(lost) if lost else "".join(traceback.format_exception(error)))
            if lost is not None:
                raise lost from error
            raise

    def _tell(self, kind: int, words: np.ndarray) -> None:
        self._check_open()
        try:
            self._collectives.broadcast_buffer(np.concatenate([np.array([kind], dtype=np.int64), words]))
        except RuntimeError as error:
            raise self._peer_lost(error) from error

    def _tell_object(self, kind: int, value: object) -> None:
        data = pickle.dumps(value)
        words = np.zeros(1 + -(-len(data) // 8), dtype=np.int64)
        words[0] = len(data)
        words[1:].view(np.uint8)[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        self._tell(kind, words)

    def _check_open(self) -> None:
        if self._broken is not None:
            raise RankError(explain("the ranks no longer work together", got=self._broken, hint="start them again"))

    def _peer_lost(self, error: BaseException) -> RankError:
        lost = self._collectives.lost(error)
        self._broken = str(lost)
        return lost


def _result(reply: StepReply) -> StepResult:
    return StepResult(
        reply.token_ids.tolist(), reply.logits, reply.logprobs, reply.compute_s, reply.collectives_s,
        reply.captured_rows, reply.hidden,
    )  # fmt: skip


def _reports(given: Sequence[LoadReport | None]) -> list[LoadReport]:
    return [report for report in given if report is not None]


def _as_words(buffer: np.ndarray) -> np.ndarray:
    if buffer.dtype != np.int64 or buffer.ndim != 1:
        raise ValueError(f"a step is a flat int64 array, not {buffer.dtype} {buffer.shape}")
    return np.ascontiguousarray(buffer)


def _unpack(words: np.ndarray) -> Any:
    return pickle.loads(words[1:].tobytes()[: int(words[0])])


def _no_tokens() -> StepReply:
    return StepReply(np.empty(0, dtype=np.int64))


def _close_runner(runner: Runner | None) -> None:
    close = getattr(runner, "close", None)
    if close is not None:
        close()
