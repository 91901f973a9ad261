"""The rank processes seen from their caller: start, messages, failure, end.

The caller sleeps on all connections *and* on all processes at once, so that a dead rank ends any wait at once.
Nothing here has a name in the file system or a fixed port: after a SIGKILL of any party there is nothing to tidy.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from graphsrt.errors import RankError
from graphsrt.runtime.interrupts import DeferredInterrupt
from graphsrt.runtime.rank_diagnosis import failed, stopped, stuck
from graphsrt.runtime.rank_peer import BOARD_ROW_BYTES, STEPS, RankPeer, read_board
from graphsrt.runtime.wire import HEADER, Kind

CLOSE_GRACE_S = 5.0  # for ranks to end by themselves
CHECK_S = 0.5  # how often a caller who waits looks after the ranks
STOPPED_S = 3.0  # a rank that a signal stops for longer is taken for lost
POLL_S = 0.1  # where the system cannot wait for a process (no pidfd)
PROCESS_ENDED = "process ended"  # what a selector's key stands for


class Watch:
    """Looks, while the caller waits, whether the ranks advance: whether any counter of the board moves.

    Counters move at each collective, several times in each layer. So however long a step takes, a healthy one moves
    them within seconds; a rank that loops, hangs or waits for a message that never comes stops all of them.
    """

    def __init__(self, ranks: list[RankPeer], board: BinaryIO, stall_timeout: float):
        self._ranks, self._board, self._stall_timeout = ranks, board, stall_timeout
        self.seen = read_board(board, len(ranks))
        self._moved = self._looked = time.monotonic()
        self._stopped: dict[int, float] = {}

    def advanced(self) -> None:
        """There has been another sign of life."""
        self._moved = time.monotonic()

    def check(self, late: list[int], stage: str) -> None:
        """RankError that names a rank, if one of those that are ``late`` is stopped or stuck."""
        now = time.monotonic()
        if now - self._looked < CHECK_S:
            return
        self._looked = now
        for rank in self._ranks:
            since = self._stopped.setdefault(rank.rank, now) if rank.is_stopped() else self._stopped.pop(rank.rank, now)
            if now - since >= min(STOPPED_S, self._stall_timeout):
                raise stopped(rank, now - since, stage)
        counts = read_board(self._board, len(self._ranks))
        if not np.array_equal(self.seen, counts):
            self.seen, self._moved = counts, now
        elif now - self._moved >= self._stall_timeout and not self._stopped:
            raise stuck(self._ranks, self.seen, late, self._stall_timeout, stage)


class RankProcesses:
    """Use ``start``. One thread at a time, except for ``kill_processes``."""

    def __init__(self, ranks: list[RankPeer], board: BinaryIO, release: threading.Event):
        self._ranks = ranks
        self._board = board
        self._release = release
        self._owner_pid = os.getpid()
        self._steps = self._replies = 0
        self._reply: np.ndarray | None = None
        self.closed = False
        self._selector = selectors.DefaultSelector()
        for rank in ranks:
            self._selector.register(rank.sock, selectors.EVENT_READ, rank)
            if rank.pidfd is not None:
                self._selector.register(rank.pidfd, selectors.EVENT_READ, PROCESS_ENDED)
        self._poll_s = None if all(rank.pidfd is not None for rank in ranks) else POLL_S

    @classmethod
    def start(
        cls,
        size: int,
        hello: Mapping[str, object],
        init: bytes,
        *,
        fds: Sequence[int],
        env: Mapping[str, str],
        threads_per_rank: int | None,
    ) -> RankProcesses:
        """Start the processes and send them ``hello`` and ``init``; does not wait for them."""
        cores = _cores()
        threads = threads_per_rank or max(1, len(cores) // size)
        # Where the ranks take all cores that we may use, each has its own: threads that wait for one another do not
        # move into each other's way. Where they leave some, others may have them, and so the system decides.
        pinned = str(hello["device"]) == "cpu" and threads * size == len(cores)
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as ours_only_now:
            board = undo.enter_context(tempfile.TemporaryFile())
            board.truncate(BOARD_ROW_BYTES * size)
            # Listening here and handing the socket to rank 0: a free port that nobody can take in between.
            store = ours_only_now.enter_context(socket.create_server(("127.0.0.1", 0), backlog=4 * size))
            commands, socks, stacks = [], [], []
            for rank in range(size):
                ours, theirs = socket.socketpair()
                socks.append(undo.enter_context(ours))
                ours_only_now.enter_context(theirs)
                stacks.append(undo.enter_context(tempfile.TemporaryFile()))
                passed = [theirs.fileno(), board.fileno(), stacks[rank].fileno()]
                # -P: a file of the caller's working directory must not stand in for a library's.
                command = [sys.executable, "-P", "-m", "graphsrt.runtime.workers", *map(str, passed)]
                command += [str(os.getpid()), f"{rank}/{size}"]
                commands.append((command, (*passed, *fds, *([store.fileno()] if rank == 0 else []))))
            processes, release = _spawn(commands, _environment(env, threads, str(hello["device"])))
            undo.callback(release.set)
            ranks: list[RankPeer] = []
            for process, sock, stack in zip(processes, socks, stacks):
                sock.setblocking(False)
                pidfd = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else None
                ranks.append(RankPeer(len(ranks), process, sock, stack, pidfd))
            self = cls(ranks, board, release)
            undo.pop_all()
            for peer in ranks:
                about = {**hello, "rank": peer.rank, "size": size, "threads": threads}
                about |= {"store_port": store.getsockname()[1], "store_fd": store.fileno()}
                about["cores"] = cores[peer.rank * threads :][:threads] if pinned else []
                self._queue(peer, Kind.HELLO, memoryview(json.dumps(about).encode()))
                self._queue(peer, Kind.INIT, memoryview(init))
            return self

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    def wait_ready(
        self, timeout: float, progress: Callable[[int, int, int, str], None] | None
    ) -> list[dict[str, Any] | None]:
        """Wait for all; returns what each says of its loading."""
        reports: list[dict[str, Any] | None] = [None] * len(self._ranks)
        waiting = {rank.rank for rank in self._ranks}
        watch = Watch(self._ranks, self._board, timeout)
        while waiting:
            self._pump(CHECK_S)
            for rank, kind, payload in self._take_messages():
                watch.advanced()
                news = json.loads(payload.tobytes())
                if kind == Kind.READY:
                    waiting.discard(rank)
                    reports[rank] = news["load"]
                elif progress is not None:
                    progress(rank, news["done"], news["total"], news["label"])
            watch.check(sorted(waiting), self._stage)
        return reports

    def send(self, kind: Kind, words: np.ndarray) -> None:
        """Send to every rank; ``words`` must stay as they are until the reply is there."""
        self._steps += 1
        for rank in self._ranks:
            self._queue(rank, kind, words.view(np.uint8).data)

    def wait_reply(self, stall_timeout: float, interrupt: DeferredInterrupt) -> np.ndarray | None:
        """Rank 0's reply, once the step is sent to all; None if an interrupt came first: call again, or let it be.

        Replies to steps that nobody waits for any more are dropped.
        """
        watch = Watch(self._ranks, self._board, stall_timeout)
        while True:
            for _, kind, payload in self._take_messages():
                if kind == Kind.REPLY:
                    self._replies += 1
                    self._reply = payload
            if self._replies == self._steps and not any(rank.to_send for rank in self._ranks):
                reply, self._reply = self._reply, None
                return reply
            if interrupt.pending:
                return None
            self._pump(CHECK_S)
            watch.check(np.flatnonzero(watch.seen[:, STEPS] < self._steps).tolist() or [0], self._stage)

    def close(self) -> None:
        """Let the ranks end by themselves, within limits."""
        # A forked child inherits this object, but not the processes.
        if self.closed or os.getpid() != self._owner_pid:
            return
        with contextlib.suppress(RankError):
            for rank in self._ranks:
                self._queue(rank, Kind.CLOSE)
            deadline = time.monotonic() + CLOSE_GRACE_S
            while any(rank.status() is None for rank in self._ranks) and time.monotonic() < deadline:
                self._pump(min(CHECK_S, max(deadline - time.monotonic(), 0)), ending=True)
        self.kill()

    def kill(self) -> None:
        """End the ranks and all they started, and release everything."""
        if self.closed or os.getpid() != self._owner_pid:
            return
        self.closed = True
        self.kill_processes()
        for rank in self._ranks:
            # Not for ever: a process in an uninterruptible wait (a driver) ends when that does.
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(10)
            rank.sock.close()
            rank.stacks.close()
            if rank.pidfd is not None:
                os.close(rank.pidfd)
        self._selector.close()
        self._board.close()
        self._release.set()

    def kill_processes(self) -> None:
        for rank in self._ranks:
            _kill_group(rank.process)

    # ---- waiting ----------------------------------------------------------------------------------------------------

    def _queue(self, rank: RankPeer, kind: Kind, *parts: memoryview) -> None:
        rank.to_send += [memoryview(HEADER.pack(kind, sum(part.nbytes for part in parts))), *parts]
        rank.write()
        self._watch(rank)

    def _watch(self, rank: RankPeer) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if rank.to_send else 0)
        if rank.sock in self._selector.get_map() and self._selector.get_key(rank.sock).events != events:
            self._selector.modify(rank.sock, events, rank)

    def _pump(self, seconds: float, *, ending: bool = False) -> None:
        """Sleep until something happens, or for some seconds, and take it in. Raises if a rank has failed."""
        ready = self._selector.select(seconds if self._poll_s is None else min(seconds, self._poll_s))
        gone = False
        for key, events in ready:
            if not isinstance(key.data, RankPeer):
                if key.data == PROCESS_ENDED:
                    gone = True
                    self._selector.unregister(key.fileobj)
                continue
            if events & selectors.EVENT_READ:
                key.data.read()
            if events & selectors.EVENT_WRITE:
                key.data.write()
            self._watch(key.data)
            if key.data.hung_up:
                self._selector.unregister(key.fileobj)
        gone = gone or any(rank.hung_up for rank in self._ranks)
        if not ending and (gone or any(rank.error for rank in self._ranks) or (self._poll_s and self._any_ended())):
            raise failed(self._ranks, self._stage)

    @property
    def _stage(self) -> str:
        return f"in step {self._steps}" if self._steps else "at its start"

    def _any_ended(self) -> bool:
        return any(rank.status() is not None for rank in self._ranks)

    def _take_messages(self) -> Iterator[tuple[int, Kind, np.ndarray]]:
        for rank in self._ranks:
            while rank.messages:
                yield rank.rank, *rank.messages.popleft()


def _spawn(
    commands: list[tuple[list[str], tuple[int, ...]]], env: dict[str, str]
) -> tuple[list[subprocess.Popen[bytes]], threading.Event]:
    """Start the processes in a thread that lives until the event is set.

    The kernel ends a rank when the *thread* that started it ends, and the caller's may be one of a pool.
    """
    processes: list[subprocess.Popen[bytes]] = []
    failure: list[BaseException] = []
    started, release = threading.Event(), threading.Event()

    def keep() -> None:
        try:
            for command, fds in commands:
                # Standard output belongs to the caller's results. An own session: Ctrl-C and Ctrl-Z are the caller's
                # to decide, and what a rank starts, compilers say, can be ended with it.
                process = subprocess.Popen(
                    command, pass_fds=fds, env=env, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True
                )
                processes.append(process)
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            failure.append(error)
        started.set()
        release.wait()

    threading.Thread(target=keep, daemon=True, name="graphsrt-ranks").start()
    try:
        started.wait()
        if failure:
            raise failure[0]
    except BaseException:
        for process in processes:
            _kill_group(process)
            process.wait()
        release.set()
        raise
    return processes, release


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    # Only while the process is not reaped: its id is its group's, and cannot be anybody else's until then.
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _environment(extra: Mapping[str, str], threads: int, device: str) -> dict[str, str]:
    env = dict(os.environ)
    package_root = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, env.get("PYTHONPATH")]))
    env["OMP_NUM_THREADS"] = str(threads)
    if sys.platform == "linux" and device == "cpu":
        # The ranks are on one machine: do not depend on its name resolving to an address that works.
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return {**env, **extra}


def _cores() -> list[int]:
    """The numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
