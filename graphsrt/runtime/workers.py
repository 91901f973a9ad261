"""One rank process, started by ``executor.WorkersExecutor`` as ``python -m graphsrt.runtime.workers``.

It never outlives its caller: the kernel kills it when the caller's process ends (Linux), and everywhere a thread waits
for the connection to close. While it has nothing to do it sleeps in a blocking read.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from graphsrt.runtime.rank_peer import ENTERED, STEPS, share_board
from graphsrt.runtime.wire import STACK_SIGNAL, Kind, StepReply, encode_reply, receive, send

if TYPE_CHECKING:
    from graphsrt.lowering.collectives import ProcessCollectives
    from graphsrt.runtime.forward_batch import ForwardBatch


class Runner(Protocol):
    """What a factory makes. ``close()`` is called as well, where there is one."""

    def step(self, buffer: np.ndarray) -> StepReply | None:
        """Run one step from its int64 words. Only rank 0's reply is used."""


class BatchRunner(Runner, Protocol):
    """A runner that takes batches as they are, too."""

    def step_batch(self, batch: ForwardBatch) -> StepReply | None:
        """As ``step`` of the encoded batch, on the only rank that there is."""


Factory = Callable[[int, int, "ProcessCollectives", bytes], Runner]
"""``(rank, size, collectives, init) -> Runner``; named as ``"module:function"``."""


def report_progress(done: int, total: int, label: str) -> None:
    """Tell the caller how far this rank's start has come. From any thread; outside a rank process it does nothing."""
    if _connection is not None:
        _connection.send_json(Kind.PROGRESS, {"done": done, "total": total, "label": label})


class _Connection:
    def __init__(self, sock: socket.socket):
        self.sock = sock
        self._sending = threading.Lock()

    def send(self, kind: Kind, parts: list[memoryview]) -> None:
        with self._sending:
            send(self.sock, kind, parts)

    def send_json(self, kind: Kind, data: Mapping[str, Any]) -> None:
        self.send(kind, [memoryview(json.dumps(data).encode())])

    def receive(self) -> tuple[Kind, np.ndarray]:
        return receive(self.sock)


_connection: _Connection | None = None


def main(arguments: list[str]) -> None:
    """``SOCKET_FD BOARD_FD STACK_FD CALLER_PID RANK/SIZE``."""
    global _connection
    caller_pid = int(arguments[3])
    _die_with(caller_pid)
    socket_fd, board_fd, stack_fd = map(int, arguments[:3])
    for fd in (socket_fd, board_fd, stack_fd):
        os.set_inheritable(fd, False)  # a compiler that we start must not keep the connection open
    # Ctrl-C is the caller's to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Crashes and hangs write their stack into a file that has no name, which the caller reads.
    faulthandler.enable(stack_fd, all_threads=False)
    faulthandler.register(STACK_SIGNAL, stack_fd, all_threads=False)
    sock = socket.socket(fileno=socket_fd)
    threading.Thread(target=_die_when_closed, args=(sock.fileno(),), daemon=True, name="graphsrt-caller").start()
    _connection = _Connection(sock)
    try:
        _serve(_connection, board_fd)
        # Not through the interpreter's own end: it takes seconds to free what the system frees at once.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    except EOFError:
        _die()
    except BaseException as error:  # noqa: BLE001 - it is raised in the caller, with its traceback
        _connection.send_json(Kind.ERROR, _describe(error))
        # Stay: an exit here would make the peers fail too, and race them to tell the caller a consequence as the cause.
        threading.Event().wait()


def _serve(connection: _Connection, board_fd: int) -> None:
    hello = _expect(connection, Kind.HELLO)
    hello_data = json.loads(hello.tobytes())
    init = _expect(connection, Kind.INIT).tobytes()
    rank, size = hello_data["rank"], hello_data["size"]
    if hello_data["cores"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, hello_data["cores"])  # before there are threads that compute: they inherit it
    counts = share_board(board_fd, size)[rank]
    module, _, name = hello_data["runner"].partition(":")
    factory: Factory = getattr(importlib.import_module(module), name)
    collectives = _join_group(hello_data)
    collectives.meeting.counts = counts[ENTERED:]
    runner = factory(rank, size, collectives, init)
    del init
    report = getattr(runner, "load_report", None)
    connection.send_json(Kind.READY, {"load": report and asdict(report)})
    while True:
        kind, payload = connection.receive()
        if kind == Kind.CLOSE:
            break
        assert kind == Kind.STEP, kind
        reply = runner.step(payload.view(np.int64))
        counts[STEPS] += 1
        if rank == 0:
            connection.send(Kind.REPLY, encode_reply(reply))
        del payload, reply
    close = getattr(runner, "close", None)
    if close is not None:
        close()


def _join_group(hello: dict[str, Any]) -> ProcessCollectives:
    # Here and not above, so that the caller's death is noticed during this import, which takes seconds.
    import torch
    import torch.distributed as dist

    from graphsrt.lowering.collectives import ProcessCollectives

    torch.set_num_threads(hello["threads"])
    rank, size, device = hello["rank"], hello["size"], torch.device(hello["device"])
    if device.type == "cuda":
        torch.cuda.set_device(rank if device.index is None else device.index + rank)
    if rank == 0:
        os.set_inheritable(hello["store_fd"], False)
    if size == 1:
        return ProcessCollectives(None)
    timeout = timedelta(seconds=hello["collective_timeout"])
    listen = {"master_listen_fd": hello["store_fd"]} if rank == 0 else {}
    store = dist.TCPStore(
        "127.0.0.1", hello["store_port"], size, rank == 0, timeout=timeout, wait_for_workers=False, **listen
    )
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    collectives = ProcessCollectives(dist.group.WORLD, hello["collective_timeout"])
    collectives.prepare()
    return collectives


def _expect(connection: _Connection, kind: Kind) -> np.ndarray:
    got, payload = connection.receive()
    assert got == kind, (got, kind)
    return payload


def _describe(error: BaseException) -> dict[str, Any]:
    return {
        "type": type(error).__name__,
        "message": str(error),
        "rank": getattr(error, "rank", None),
        "traceback": "".join(traceback.format_exception(error)),
        # One clock for all processes of a machine: the earliest error is the cause, the others follow from it.
        "when": time.clock_gettime(time.CLOCK_MONOTONIC),
    }


def _die_with(caller_pid: int) -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != caller_pid:  # it ended before we asked
        _die()


def _die_when_closed(fd: int) -> None:
    poller = select.poll()
    poller.register(fd, getattr(select, "POLLRDHUP", 0))  # POLLHUP is always reported
    while not any(events for _, events in poller.poll()):
        pass
    _die()


def _die() -> None:
    # The group is our own and holds what we started, such as compilers.
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    # The imported module, not this copy of it: a runner that imports report_progress must find the connection there.
    from graphsrt.runtime import workers

    workers.main(sys.argv[1:])
