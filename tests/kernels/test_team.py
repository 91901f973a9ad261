"""A team of threads: all work is met once, errors come out, and only memory that stays is read before its turn."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from graphsrt.lowering.kernels import team
from graphsrt.lowering.kernels.build import build_library

THREADS = (2, 3, 7)  # of two cores or more


@pytest.fixture(scope="module")
def checks() -> ctypes.CDLL:
    return load()


def load() -> ctypes.CDLL:
    team.load()
    library = build_library("team_checks", Path(__file__).with_name("team_checks.cpp"), [f"-I{team.SOURCE.parents[1]}"])
    loaded = ctypes.CDLL(str(library))
    loaded.wrongly_met.restype = ctypes.c_int64
    loaded.error_comes_out.restype = ctypes.c_bool
    return loaded


def met(checks: ctypes.CDLL, threads: int, n: int, piece: int, read: int = 0, failing: int = -1) -> tuple[int, int]:
    """Indices that were not met just once, and errors, of 300 jobs."""
    failures = ctypes.c_int64()
    numbers = [ctypes.c_int64(v) for v in (threads, 300, n, piece)]
    rest = [ctypes.c_int64(v) for v in (read, failing)]
    return checks.wrongly_met(*numbers, None, *rest, ctypes.byref(failures)), failures.value


@pytest.mark.parametrize("threads", [1, *THREADS])
@pytest.mark.parametrize(("n", "piece"), [(0, 1), (1, 1), (2, 1), (7, 3), (97, 1), (97, 10), (97, 97), (500, 1)])
def test_each_index_is_met_once_by_each_job(checks, threads: int, n: int, piece: int) -> None:
    assert met(checks, threads, n, piece) == (0, 0)
    assert met(checks, threads, n, piece, read=1 << 20) == (0, 0)  # in halves; nobody has said that it stays


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("failing", [0, 41, 96])
def test_an_error_in_a_piece_comes_out_of_its_job(checks, threads: int, failing: int) -> None:
    _, failures = met(checks, threads, 97, 1, failing=failing)
    assert failures == 300


@pytest.mark.parametrize("threads", [1, *THREADS])
def test_an_error_of_the_step_comes_out(checks, threads: int) -> None:
    assert checks.error_comes_out(ctypes.c_int64(threads))


def test_what_stays_is_read_before_its_turn_and_nothing_else(tmp_path: Path) -> None:
    """In a process of its own: reading what is not there would end it."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_team; test_team.read_ahead()"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr


def read_ahead() -> None:
    checks, size = load(), 1 << 24
    for stays in (False, True):
        with mmap.mmap(-1, size) as memory:
            held = (ctypes.c_char * size).from_buffer(memory)
            address = ctypes.addressof(held)
            arguments = [ctypes.c_int64(v) for v in (2, 1)], [ctypes.c_void_p(address), ctypes.c_int64(size)]
            checks.repeat(*arguments[0], *arguments[1], ctypes.c_bool(stays))
            assert resident(address) == 0, "the first step does not know yet"
            checks.repeat(ctypes.c_int64(2), ctypes.c_int64(2), *arguments[1], ctypes.c_bool(stays))
            read = resident(address)
            # The second of two threads reads its half, and no more than its cache holds.
            assert (0 < read <= size // 2) if stays else read == 0, read
            if not stays:
                protect = ctypes.CDLL(None).mprotect
                assert protect(ctypes.c_void_p(address), ctypes.c_size_t(size), 0) == 0
                checks.repeat(ctypes.c_int64(2), ctypes.c_int64(3), *arguments[1], ctypes.c_bool(False))
                assert protect(ctypes.c_void_p(address), ctypes.c_size_t(size), 3) == 0
            del held


def resident(address: int) -> int:
    """Bytes of the mapping at this address that are in memory."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        span = line.split()[0].split("-")
        if len(span) == 2 and int(span[0], 16) <= address < int(span[1], 16):
            return next(int(row.split()[1]) << 10 for row in lines if row.startswith("Rss:"))
    raise AssertionError("the mapping is not there")
