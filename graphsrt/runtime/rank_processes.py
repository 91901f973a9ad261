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
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from graphsrt import errors
from graphsrt.errors import RankError, explain
from graphsrt.runtime.wire import HEADER, STACK_SIGNAL, Kind

CLOSE_GRACE_S = 5.0  # for ranks to end by themselves
DIAGNOSIS_S = 0.2  # after the first sign of a failure, to learn which rank was first
EXIT_STATUS_S = 2.0  # between a rank's connection closing and its process having a status
POLL_S = 0.1  # where the system cannot wait for a process (no pidfd)


@dataclass(eq=False)
class _Rank:
    rank: int
    process: subprocess.Popen[bytes]
    sock: socket.socket
    stacks: BinaryIO
    pidfd: int | None
    to_send: deque[memoryview] = field(default_factory=deque)
    header: np.ndarray = field(default_factory=lambda: np.empty(HEADER.size, dtype=np.uint8))
    payload: np.ndarray | None = None  # None while the header is read
    filled: int = 0
    messages: deque[tuple[Kind, np.ndarray]] = field(default_factory=deque)
    error: dict[str, Any] | None = None
    hung_up: bool = False

    def status(self) -> int | None:
        """As ``Popen.returncode``, without reaping: until then the process id cannot become somebody else's."""
        if self.process.returncode is not None:
            return self.process.returncode
        try:
            info = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # the program reaps all children itself
            return self.process.poll()
        if info is None:
            return None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    def read(self) -> None:
        """Take in what has arrived, without waiting."""
        while not self.hung_up:
            buffer = self.header if self.payload is None else self.payload
            if self.filled < len(buffer):
                try:
                    count = self.sock.recv_into(buffer.data[self.filled :])
                except BlockingIOError:
                    return
                except ConnectionError:
                    count = 0
                self.hung_up = not count
                self.filled += count
                continue
            self.filled = 0
            if self.payload is None:
                self.payload = np.empty(HEADER.unpack(self.header.tobytes())[1], dtype=np.uint8)
                continue
            kind, payload, self.payload = Kind(HEADER.unpack(self.header.tobytes())[0]), self.payload, None
            if kind == Kind.ERROR:
                self.error = json.loads(payload.tobytes())
            else:
                self.messages.append((kind, payload))

    def write(self) -> None:
        """Send what can be sent, without waiting."""
        while self.to_send and not self.hung_up:
            try:
                count = self.sock.sendmsg(list(self.to_send)[:16])
            except BlockingIOError:
                return
            except ConnectionError:
                self.hung_up = True
                return
            while count or (self.to_send and not self.to_send[0].nbytes):
                part = self.to_send.popleft()
                if part.nbytes > count:
                    self.to_send.appendleft(part[count:])
                    break
                count -= part.nbytes


class RankProcesses:
    """Use ``start``. One thread at a time, except for ``kill_processes``."""

    def __init__(self, ranks: list[_Rank], board: BinaryIO, release: threading.Event):
        self._ranks = ranks
        self._board = board
        self._release = release
        self._owner_pid = os.getpid()
        self._steps = 0
        self.closed = False
        self._selector = selectors.DefaultSelector()
        for rank in ranks:
            self._selector.register(rank.sock, selectors.EVENT_READ, rank)
            if rank.pidfd is not None:
                self._selector.register(rank.pidfd, selectors.EVENT_READ, None)
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
        threads = threads_per_rank or max(1, _num_cores() // size)
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as ours_only_now:
            board = undo.enter_context(tempfile.TemporaryFile())
            board.truncate(8 * size)
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
            ranks: list[_Rank] = []
            for process, sock, stack in zip(processes, socks, stacks):
                sock.setblocking(False)
                pidfd = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else None
                ranks.append(_Rank(len(ranks), process, sock, stack, pidfd))
            self = cls(ranks, board, release)
            undo.pop_all()
            for peer in ranks:
                about = {**hello, "rank": peer.rank, "size": size, "threads": threads}
                about |= {"store_port": store.getsockname()[1], "store_fd": store.fileno()}
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
        deadline = time.monotonic() + timeout
        while waiting:
            if not self._pump(deadline):
                raise self._late(sorted(waiting), f"did not start: no word from any rank for {timeout:g} s")
            for rank, kind, payload in self._take_messages():
                deadline = time.monotonic() + timeout  # a rank that makes progress may take as long as it likes
                news = json.loads(payload.tobytes())
                if kind == Kind.READY:
                    waiting.discard(rank)
                    reports[rank] = news["load"]
                elif progress is not None:
                    progress(rank, news["done"], news["total"], news["label"])
        return reports

    def send(self, kind: Kind, words: np.ndarray) -> None:
        """Send to every rank; ``words`` must stay as they are until ``wait_reply`` returns."""
        self._steps += 1
        for rank in self._ranks:
            self._queue(rank, kind, words.view(np.uint8).data)

    def wait_reply(self, timeout: float) -> np.ndarray:
        """Rank 0's reply, once the step has been sent to all."""
        deadline = time.monotonic() + timeout
        reply = None
        while reply is None or any(rank.to_send for rank in self._ranks):
            if not self._pump(deadline):
                finished = self._finished()
                late = [r for r in range(len(finished)) if finished[r] < self._steps] or [0]
                raise self._late(late, f"did not answer step {self._steps} within {timeout:g} s")
            for _, kind, payload in self._take_messages():
                if kind == Kind.REPLY:
                    reply = payload
        return reply

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
                self._pump(deadline, ending=True)
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

    def _queue(self, rank: _Rank, kind: Kind, *parts: memoryview) -> None:
        rank.to_send += [memoryview(HEADER.pack(kind, sum(part.nbytes for part in parts))), *parts]
        rank.write()
        self._watch(rank)

    def _watch(self, rank: _Rank) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if rank.to_send else 0)
        if rank.sock in self._selector.get_map() and self._selector.get_key(rank.sock).events != events:
            self._selector.modify(rank.sock, events, rank)

    def _pump(self, deadline: float, *, ending: bool = False) -> bool:
        """Sleep until something happens and take it in; ``False`` at the deadline. Raises if a rank has failed."""
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        ready = self._selector.select(left if self._poll_s is None else min(left, self._poll_s))
        for key, events in ready:
            if key.data is None:
                self._selector.unregister(key.fileobj)
                continue
            if events & selectors.EVENT_READ:
                key.data.read()
            if events & selectors.EVENT_WRITE:
                key.data.write()
            self._watch(key.data)
            if key.data.hung_up:
                self._selector.unregister(key.fileobj)
        gone = any(rank.hung_up for rank in self._ranks) or any(key.data is None for key, _ in ready)
        if not ending and (gone or any(rank.error for rank in self._ranks) or (self._poll_s and self._any_ended())):
            raise self._failed()
        return True

    def _any_ended(self) -> bool:
        return any(rank.status() is not None for rank in self._ranks)

    def _take_messages(self) -> Iterator[tuple[int, Kind, np.ndarray]]:
        for rank in self._ranks:
            while rank.messages:
                yield rank.rank, *rank.messages.popleft()

    # ---- what went wrong --------------------------------------------------------------------------------------------

    def _failed(self) -> errors.GraphsrtError:
        """The failure that came first: others may be its consequences, such as a peer's lost connection."""
        until = time.monotonic() + DIAGNOSIS_S
        while time.monotonic() < until and not all(r.error or r.hung_up for r in self._ranks):
            for rank in self._ranks:
                rank.read()
            if self._any_ended():
                break
            time.sleep(0.01)
        until = time.monotonic() + EXIT_STATUS_S
        while time.monotonic() < until and any(r.hung_up and r.status() is None for r in self._ranks):
            time.sleep(0.005)
        for rank in self._ranks:
            rank.read()
        # A rank with an error stays alive. So a dead one died of something else, and its peers' errors follow from it.
        dead = [r for r in self._ranks if r.error is None and (r.hung_up or r.status() is not None)]
        if dead:
            return self._died(dead[0])
        first = min((r for r in self._ranks if r.error), key=lambda r: r.error["when"])  # type: ignore[index]
        error = first.error
        assert error is not None
        where = RankError(explain(f"rank {first.rank} failed: {error['type']}", got=error["traceback"]), first.rank)
        own = getattr(errors, error["type"], None)
        if own in (errors.CheckpointError, errors.CompileError):
            refusal: errors.GraphsrtError = own(error["message"])
            refusal.__cause__ = where
            return refusal
        return where

    def _died(self, rank: _Rank) -> RankError:
        status = rank.status()
        hint = None
        if status is None:
            how = "closed its connection"
        elif status < 0:
            how = f"was killed by {_signal_name(-status)}"
            if -status == signal.SIGKILL:
                hint = "if nobody killed it, the system may have run out of memory: look at the kernel's log"
        else:
            how = f"ended with exit code {status}"
        stage = f"in step {self._steps}" if self._steps else "at its start"
        headline = f"rank {rank.rank} {how} {stage}"
        return RankError(explain(headline, got=self._stack(rank) or None, hint=hint), rank.rank)

    def _late(self, late: list[int], what: str) -> RankError:
        """Name the ranks that hold up the others: stopped ones, or else those furthest behind; show where they are."""
        finished = self._finished()
        stopped = [r for r in late if _process_state(self._ranks[r].process.pid) in ("T", "t")]
        behind = [r for r in late if finished[r] == min(finished[late])]
        suspects = stopped or behind
        for r in suspects:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._ranks[r].process.pid, STACK_SIGNAL)
        time.sleep(0.3)  # to write the stacks
        lines = []
        for r in suspects[:4]:
            state = " is stopped (SIGSTOP, or a debugger)" if r in stopped else ""
            lines.append(f"rank {r}{state}: {finished[r]} steps done\n{self._stack(self._ranks[r])}".rstrip())
        names = f"rank {suspects[0]}" if len(suspects) == 1 else f"ranks {', '.join(map(str, suspects))}"
        return RankError(explain(f"{names} {what}", got="\n".join(lines)), suspects[0])

    def _finished(self) -> np.ndarray:
        """Steps finished, by rank; each rank counts for itself."""
        return np.frombuffer(os.pread(self._board.fileno(), 8 * len(self._ranks), 0), dtype=np.int64)

    def _stack(self, rank: _Rank) -> str:
        size = os.fstat(rank.stacks.fileno()).st_size
        return os.pread(rank.stacks.fileno(), min(size, 8000), max(0, size - 8000)).decode(errors="replace").strip()


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


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _process_state(pid: int) -> str | None:
    """The letter of ``ps``, where there is a /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
