"""Collectives through shared memory, between real processes."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from tests.support import rounds


@pytest.mark.parametrize("size", [2, 3])
def test_same_bits_as_sockets(size):
    processes, said = rounds.start(size, "same_bits_as_sockets")
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * size
    assert len({said.get()[1] for _ in processes}) == 1


@pytest.mark.parametrize(
    "how, words",
    [("dies", "rank 2 has ended"), ("leaves", "rank 2 has left the group"), ("sleeps", "did not come within 1 s")],
)  # fmt: skip
def test_a_peer_that_does_not_come(how, words):
    """More ranks than this machine may have cores; each that waits is told of the one that is not there."""
    processes, said = rounds.start(3, "fall_behind", how)
    try:
        rank, pid = said.get()
        assert rank == 2
        if how == "dies":
            time.sleep(0.5)  # the others are asleep by now
            os.kill(pid, signal.SIGKILL)
        told = dict(said.get() for _ in range(2))
    finally:
        for process in processes:
            process.kill()
            process.join(20)
    assert sorted(told) == [0, 1]
    for text in told.values():
        assert re.search(f"{words} in ([0-9.]+) s", text), text
        assert float(text.split()[-2]) < 5, text
