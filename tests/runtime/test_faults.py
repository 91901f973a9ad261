"""Faults put in on purpose, one after the other into one engine with three ranks.

Each ends with the message that ``docs/operations.md`` promises, within ten seconds, and leaves no process, file, shared
memory or page behind; and the engine generates the same as before, after ``restart()`` where ranks were lost.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import graphsrt
from graphsrt.errors import CheckpointError, CompileError, RankError
from graphsrt.lowering import inductor, region_cache
from graphsrt.runtime import start
from graphsrt.runtime.request import RequestState
from tests.support import tiny

RANKS = 3
BOUND_S = 10.0
PROMPT = tiny.tokens(7)
LONG_PROMPT = tiny.tokens(50, seed=1)
PARAMS = graphsrt.SamplingParams(max_new_tokens=6, ignore_eos=True)
LONG_PARAMS = graphsrt.SamplingParams(max_new_tokens=13, ignore_eos=True)


def shared_memory() -> set[str]:
    """Names in shared memory, without multiprocessing's semaphores: what runs beside this has them for a moment."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def descendants() -> set[int]:
    """Processes below this one that are alive."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                state, parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
            except (OSError, ValueError):
                continue
            if state not in "ZX":
                parents[int(entry)] = int(parent)
    found, new = set(), {os.getpid()}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - found
        found |= new
    return found


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    """What the system lets this process, and those that it starts meanwhile, write: as a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Bench:
    """The engine that all faults share, and what must be as before after each of them."""

    def __init__(self, folder: Path):
        self.folder, self.scratch, self.fault = folder, folder / "tmp", folder / "fault"
        self.scratch.mkdir()
        tiny.build("llama", heads=6, kv_heads=3).float().save_pretrained(folder / "model")
        self.model = self.compile(folder / "model")
        self.expected = self.generate()
        self.shared = shared_memory()
        self.processes = len(descendants())

    def compile(self, folder: Path, ranks: int = RANKS) -> graphsrt.CompiledModel:
        return graphsrt.compile(
            str(folder), tp=ranks, backend="eager", compare_every=2, stall_timeout=4.0, max_total_tokens=64,
            max_tokens_per_step=8, max_running=4,
        )  # fmt: skip

    def generate(self) -> list[int]:
        return self.model.generate(PROMPT, PARAMS)[0].token_ids

    def pid(self, rank: int) -> int:
        return self.model._executor.pids[rank]

    def check_nothing_left(self) -> None:
        engine = self.model.engine
        assert engine is not None and not engine.scheduler.has_work
        assert engine.metrics().pages_used == 0
        deadline = time.monotonic() + 5
        while len(descendants()) != self.processes and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(descendants()) == self.processes
        assert list(self.scratch.iterdir()) == []
        assert shared_memory() <= self.shared


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Iterator[Bench]:
    patch = pytest.MonkeyPatch()
    folder = tmp_path_factory.mktemp("faults")
    patch.setattr(start, "RUNNER", "tests.support.faulty_runner:create")
    patch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    patch.setenv("FAULT", str(folder / "fault"))
    patch.setenv("TMPDIR", str(folder / "tmp"))
    patch.setattr("tempfile.tempdir", str(folder / "tmp"))
    bench = Bench(folder)
    yield bench
    processes = bench.processes
    bench.model.close()
    assert len(descendants()) == processes - RANKS
    patch.undo()


# -- ranks -------------------------------------------------------------------------------------------------------------


def rank_killed(bench: Bench) -> None:
    threading.Timer(0.05, os.kill, (bench.pid(1), signal.SIGKILL)).start()
    with pytest.raises(RankError, match=r"^rank 1 was killed by SIGKILL in step \d+\n") as caught:
        while True:
            bench.model.generate([LONG_PROMPT] * 4, LONG_PARAMS)
    assert caught.value.rank == 1
    restarted(bench)


def rank_stopped(bench: Bench) -> None:
    os.kill(bench.pid(2), signal.SIGSTOP)
    with pytest.raises(RankError, match=r"^rank 2 has been stopped for [34].* s in step") as caught:
        bench.generate()
    assert caught.value.rank == 2
    restarted(bench)


def wrong_token(bench: Bench) -> None:
    bench.fault.write_text("1")
    with pytest.raises(RankError, match=r"^rank 1 sampled other tokens than the others\n") as caught:
        bench.generate()
    assert caught.value.rank == 1
    bench.fault.unlink()
    restarted(bench)


def restarted(bench: Bench) -> None:
    """Until then calls say why they cannot be served; starting again is no part of the bound."""
    with pytest.raises(RankError, match=r"because a rank failed(?s:.*)restart\(\)"):
        bench.generate()
    bench.restart_s = -time.monotonic()
    bench.model.restart()
    bench.restart_s += time.monotonic()


# -- disk and memory ---------------------------------------------------------------------------------------------------


def disk_full(bench: Bench) -> None:
    """While a compiled region is kept. Compiling is another matter: here it only writes."""
    patch = pytest.MonkeyPatch()
    patch.setenv("GRAPHSRT_CACHE", str(bench.folder / "cache"))
    patch.setattr(inductor, "compile_region", lambda region, path: path.write_bytes(b"x" * 100_000))
    patch.setattr(region_cache, "region_key", lambda region: "some_region")
    region = type("Region", (), {"text": "some region"})()
    try:
        with file_size_limit(50_000), pytest.raises(CompileError, match=r"a compiled region cannot be kept") as caught:
            region_cache.build(region)
        assert "File too large" in str(caught.value) and "GRAPHSRT_CACHE" in str(caught.value)
        assert [place.name for place in (bench.folder / "cache/regions").iterdir()] == ["some_region.lock"]
        assert region_cache.build(region) and region_cache.is_intact(region)
    finally:
        patch.undo()


def truncated(bench: Bench) -> None:
    with damaged(bench, lambda header, data: (header, data[:-20])) as folder:
        what = r"model\.safetensors is not a sound safetensors file\n.*tensor \S+ up to byte \d+ of \d+ bytes"
        with pytest.raises(CheckpointError, match=what):
            bench.compile(folder)


def overlapping(bench: Bench) -> None:
    def move(header, data):
        shape = header["model.norm.weight"]["shape"]
        header["model.norm.weight"]["data_offsets"] = [8, 8 + 4 * shape[0]]
        return header, data

    with damaged(bench, move) as folder, pytest.raises(CheckpointError, match=r"model\.safetensors.*\n.*they overlap"):
        bench.compile(folder)


@contextmanager
def damaged(bench: Bench, change) -> Iterator[Path]:
    """A copy of the checkpoint with something changed in its header or data."""
    folder = bench.folder / "damaged"
    shutil.copytree(bench.folder / "model", folder)
    raw = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, data = change(json.loads(raw[8 : 8 + length]), raw[8 + length :])
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    yield folder
    shutil.rmtree(folder)


def out_of_pages(bench: Bench) -> None:
    """64 tokens of KV for prompts of up to 64: one that can never fit is refused, those that have to wait do wait."""
    with pytest.raises(ValueError, match=r"do not fit the context|does not fit the KV pool"):
        bench.model.generate(LONG_PROMPT, graphsrt.SamplingParams(max_new_tokens=30))
    several = bench.model.generate([PROMPT] + [LONG_PROMPT] * 3, [PARAMS] + [LONG_PARAMS] * 3)
    assert several[0].token_ids == bench.expected and all(len(g.token_ids) == 13 for g in several[1:])
    assert len({tuple(g.token_ids) for g in several[1:]}) == 1


def out_of_shared_memory(bench: Bench) -> None:
    with file_size_limit(16 << 20), pytest.raises(RankError, match=r"^the ranks cannot share 64 MiB of memory") as e:
        bench.compile(bench.folder / "model", ranks=2)
    assert "File too large" in str(e.value) and "ulimit -f" in str(e.value)


# -- callers -----------------------------------------------------------------------------------------------------------


def cancelled_in_prefill(bench: Bench) -> None:
    engine = bench.model.engine
    assert engine is not None
    stream = bench.model.stream(tiny.tokens(50, seed=2), LONG_PARAMS)  # a prompt that no cached prefix shortens
    engine.add(stream.request)
    engine.step()
    assert stream.request.state is RequestState.PREFILL and engine.metrics().pages_used > 0
    bench.model.cancel()
    assert stream.request.finish_reason == "cancelled" and stream.request.output_ids == []


class Broken(Exception):
    pass


def exception_in_callback(bench: Bench) -> None:
    """In the loop over a stream, and in a drafter."""
    engine = bench.model.engine
    assert engine is not None
    with pytest.raises(Broken):
        for _ in bench.model.stream(PROMPT, PARAMS):
            raise Broken
    gc.collect()

    def drafter(known):
        raise Broken

    request = engine.make_request(PROMPT, PARAMS)
    request.drafter = drafter
    engine.add(request)
    with pytest.raises(Broken):
        while not request.done:
            engine.step()
    engine.cancel(request)


def interrupted(bench: Bench) -> None:
    """Ctrl-C: the call ends, the ranks stay."""
    pids = [bench.pid(rank) for rank in range(RANKS)]
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        while True:
            bench.model.generate([LONG_PROMPT] * 4, LONG_PARAMS)
    assert pids == [bench.pid(rank) for rank in range(RANKS)]


@pytest.mark.parametrize(
    "fault",
    [
        rank_killed, rank_stopped, wrong_token, disk_full, truncated, overlapping, out_of_pages, out_of_shared_memory,
        cancelled_in_prefill, exception_in_callback, interrupted,
    ],
    ids=lambda fault: fault.__name__,
)  # fmt: skip
def test_fault(bench, fault):
    bench.restart_s = 0.0
    began = time.monotonic()
    fault(bench)
    took = time.monotonic() - began - bench.restart_s
    assert bench.generate() == bench.expected
    bench.check_nothing_left()
    if fault is not out_of_shared_memory:  # which waits for processes to start
        assert took < BOUND_S
