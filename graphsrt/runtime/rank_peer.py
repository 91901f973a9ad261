"""One rank process as its caller sees it: the process, its connection, and the counters that it writes."""

from __future__ import annotations

import json
import mmap
import os
import socket
import subprocess
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from graphsrt.runtime.wire import HEADER, Kind

BOARD_ROW_BYTES = 3 * 8
STEPS, ENTERED, LEFT = range(3)
"""Columns of the board: steps finished, collectives entered, collectives left."""


def share_board(fd: int, size: int) -> np.ndarray:
    """The board in a rank: a file without a name as shared memory, int64 ``[size, 3]``, where it counts in its row."""
    return np.frombuffer(mmap.mmap(fd, BOARD_ROW_BYTES * size), dtype=np.int64).reshape(size, 3)


def read_board(file: BinaryIO, size: int) -> np.ndarray:
    """The board in the caller, who looks only when a step takes long: a message from each rank would wake it for
    nothing."""
    return np.frombuffer(os.pread(file.fileno(), BOARD_ROW_BYTES * size, 0), dtype=np.int64).reshape(size, 3)


@dataclass(eq=False)
class RankPeer:
    """A rank and what has been heard of it."""

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

    def is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP, say) has stopped it; false where there is no /proc. A debugger's stop is none."""
        try:
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except (OSError, IndexError):
            return False

    def stack(self) -> str:
        """What it has written of its stack: where it crashed, or was when it was asked."""
        size = os.fstat(self.stacks.fileno()).st_size
        return os.pread(self.stacks.fileno(), min(size, 8000), max(0, size - 8000)).decode(errors="replace").strip()

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
