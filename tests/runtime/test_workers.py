"""Rank processes: results, and that no failure of any party hangs, hides its cause or leaves something behind."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from graphsrt.errors import CheckpointError, RankError
from graphsrt.runtime.executor import LocalExecutor, WorkersExecutor
from graphsrt.runtime.token_logprobs import StepLogprobs
from graphsrt.runtime.wire import StepReply, decode_reply, encode_reply
from tests.support.echo_runner import EXIT, INFO, LOGITS, LONG, RAISE, SKIP, SLEEP, SPAWN, SPIN, SUM

REPOSITORY = Path(__file__).resolve().parents[2]
ECHO = "tests.support.echo_runner:make"


def words(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_gone(pids: list[int], seconds: float = 10.0) -> list[int]:
    """The processes that are still there after ``seconds``."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


@pytest.fixture
def tidy(tmp_path, monkeypatch):
    """Ranks see the test modules; afterwards no process of theirs, no file and no descriptor is left."""
    before = set(os.listdir("/proc/self/fd"))
    shared = set(os.listdir("/dev/shm"))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pids: list[int] = []
    yield pids
    assert wait_gone(pids) == []
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) <= len(before)
    assert {name for name in os.listdir("/dev/shm") if name.startswith(("torch", "gloo", "psm"))} <= shared


def start(tidy: list[int], tp: int, **options) -> WorkersExecutor:
    executor = WorkersExecutor(tp, ECHO, json.dumps(options.pop("init", {})).encode(), **options)
    tidy += executor.pids
    return executor


def test_steps(tidy):
    news = []
    with start(
        tidy,
        3,
        init={"progress": 2},
        env={"ECHO": "5"},
        threads_per_rank=2,
        progress=lambda *about: news.append(about),
    ) as executor:
        assert [n for n in news if n[0] == 1] == [(1, 1, 2, "loading on 1"), (1, 2, 2, "loading on 1")]
        for _ in range(3):
            assert executor.step_buffer(words(SUM, 1, 2, 3)).token_ids.tolist() == [111, 222, 333]
        assert executor.step_buffer(words(INFO)).token_ids.tolist() == [6, 15]
        assert executor.step_buffer(words(SUM)).token_ids.tolist() == []

        many = np.arange(1_000_001, dtype=np.int64)
        many[0] = SUM
        assert np.array_equal(executor.step_buffer(many).token_ids, many[1:] * 111)

        reply = executor.step_buffer(words(LOGITS, 1000, 5000))  # 20 MB
        assert reply.logits is not None
        assert torch.equal(reply.logits, torch.arange(5_000_000, dtype=torch.float32).view(5000, 1000).t())

        with pytest.raises(ValueError, match="flat int64"):
            executor.step_buffer(np.zeros((2, 2), dtype=np.int64))
        # What a rank started ends with it.
        tidy += executor.step_buffer(words(SPAWN)).token_ids.tolist()
        assert all(map(alive, tidy))
    assert wait_gone(tidy, 0.5) == []
    executor.close()
    with pytest.raises(ValueError, match="closed"):
        executor.step_buffer(words(SUM))


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system pins nothing")
def test_ranks_that_take_all_cores_have_their_own(tidy):
    cores = sorted(os.sched_getaffinity(0))
    ranks = max(n for n in (1, 2, 3, 4) if len(cores) % n == 0)
    each = len(cores) // ranks
    with start(tidy, ranks) as executor:
        assert [os.sched_getaffinity(pid) for pid in executor.pids] == [
            set(cores[rank * each : (rank + 1) * each]) for rank in range(ranks)
        ]
    with start(tidy, ranks, threads_per_rank=each + 1) as executor:  # more threads than cores: nobody is shut in
        assert all(os.sched_getaffinity(pid) == set(cores) for pid in executor.pids)


def test_collectives(tidy):
    with WorkersExecutor(3, "tests.support.echo_runner:make_collectives_check") as executor:
        tidy += executor.pids
        assert executor.step_buffer(words(0)).token_ids.tolist() == [96]


def test_collectives_of_one():
    from graphsrt.lowering.collectives import ProcessCollectives
    from tests.support.echo_runner import make_collectives_check

    with LocalExecutor(make_collectives_check(0, 1, ProcessCollectives(None), b"")) as executor:
        assert executor.step_buffer(words(0)).token_ids.tolist() == [96]


def test_exception_in_a_step(tidy):
    executor = start(tidy, 3)
    with pytest.raises(RankError, match=r"rank 2 failed: KeyError(?s:.*)echo_runner.py(?s:.*)the echo broke") as caught:
        executor.step_buffer(words(RAISE, 2))
    assert caught.value.rank == 2
    assert wait_gone(tidy, 0.5) == []
    with pytest.raises(RankError, match="rank 2 failed"):  # later steps say why there are no ranks
        executor.step_buffer(words(SUM))


def test_exception_in_a_factory(tidy):
    # Rank 0 waits for rank 1 to join, and is not waited for.
    with pytest.raises(RankError, match=r"rank 1 failed: OSError(?s:.*)in make(?s:.*)no such disk") as caught:
        start(tidy, 2, init={"raise": 1})
    assert caught.value.rank == 1


def test_refusal_in_a_factory_keeps_its_type(tidy):
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing") as caught:
        start(tidy, 1, init={"damaged": 0})
    assert isinstance(caught.value.__cause__, RankError) and caught.value.__cause__.rank == 0


def test_unknown_runner(tidy):
    with pytest.raises(RankError, match="rank 0 failed: ModuleNotFoundError"):
        WorkersExecutor(1, "no_such_module:make")
    with pytest.raises(ValueError, match="module:factory"):
        WorkersExecutor(1, "no_such_module")


def test_killed_in_a_step(tidy):
    executor = start(tidy, 2)
    threading.Timer(0.3, os.kill, (executor.pids[1], signal.SIGKILL)).start()
    began = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 was killed by SIGKILL in step 1\n") as caught:
        executor.step_buffer(words(SLEEP, 1, 60))
    assert time.monotonic() - began < 5
    assert caught.value.rank == 1


def test_killed_while_idle(tidy):
    executor = start(tidy, 2)
    executor.step_buffer(words(SUM))
    os.kill(executor.pids[1], signal.SIGKILL)
    wait_gone([executor.pids[1]])
    began = time.monotonic()
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
        executor.step_buffer(words(SUM, 1))
    assert time.monotonic() - began < 5


def test_thread_interrupt_and_exit_code(tidy):
    # The kernel ties a process to the thread that started it: that thread must not be the caller's.
    started: list[WorkersExecutor] = []
    thread = threading.Thread(target=lambda: started.append(start(tidy, 1)))
    thread.start()
    thread.join()
    time.sleep(0.1)
    executor = started[0]
    os.kill(executor.pids[0], signal.SIGINT)  # the caller's to decide: a rank does not mind
    assert executor.step_buffer(words(SUM, 4)).token_ids.tolist() == [4]
    with pytest.raises(RankError, match="rank 0 ended with exit code 7 in step 2"):
        executor.step_buffer(words(EXIT, 0, 7))


def test_stopped(tidy):
    executor = start(tidy, 2)
    executor.step_buffer(words(SUM))
    os.kill(executor.pids[1], signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 has been stopped for [34].* s in step 2") as caught:
        executor.step_buffer(words(SUM, 1))
    assert caught.value.rank == 1 and time.monotonic() - began < 8


@pytest.fixture(scope="module")
def healthy():
    """Two ranks that every test leaves as they were."""
    with WorkersExecutor(2, ECHO, stall_timeout=1.5, env={"PYTHONPATH": str(REPOSITORY)}) as executor:
        pids = executor.pids
        yield executor
        assert executor.pids == pids


def test_stopped_for_a_moment(healthy):
    executor = healthy
    os.kill(executor.pids[1], signal.SIGSTOP)
    threading.Timer(0.8, os.kill, (executor.pids[1], signal.SIGCONT)).start()
    assert executor.step_buffer(words(SUM, 1)).token_ids.tolist() == [11]


@pytest.mark.parametrize("command", [SLEEP, SPIN])
def test_hung_rank_is_named_and_shows_where(tidy, command):
    executor = start(tidy, 3, stall_timeout=1.5)
    executor.step_buffer(words(SUM))
    began = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 did not advance for 1.5 s in step 2(?s:.*)echo_runner.py") as caught:
        executor.step_buffer(words(command, 1, 60))
    assert "rank 1, outside collectives, 1 steps done" in str(caught.value)
    assert caught.value.rank == 1 and time.monotonic() - began < 8


def test_lost_message_is_found(tidy):
    # One rank leaves a collective out: the others wait in it, and it waits in the next step's.
    executor = start(tidy, 2, stall_timeout=1.5)
    with pytest.raises(RankError, match=r"rank 0 did not advance(?s:.*)rank 0, in collective 1,"):
        executor.step_buffer(words(SKIP, 1))


def test_long_step_that_advances_is_healthy(healthy):
    assert healthy.step_buffer(words(LONG, 8, 400)).token_ids.tolist() == [8]  # 3.2 s


def interrupt_in(seconds: float) -> None:
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()


def test_interrupt_leaves_ranks_intact(healthy):
    executor = healthy
    interrupt_in(0.3)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        executor.step_buffer(words(LONG, 5, 400))  # 1.6 s
    assert time.monotonic() - began < 1.3
    # The step goes on; its reply is nobody's, and the next one is right.
    assert executor.step_buffer(words(SUM, 5)).token_ids.tolist() == [55]
    assert executor.step_buffer(words(SUM, 6)).token_ids.tolist() == [66]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupt_handler_of_the_program(healthy):
    executor, seen = healthy, []
    before = signal.signal(signal.SIGINT, lambda *about: seen.append(about[0]))
    try:
        interrupt_in(0.2)
        assert executor.step_buffer(words(SLEEP, 0, 1)).token_ids.tolist() == [2]
        assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_restart(tidy):
    executor = start(tidy, 2)
    os.kill(executor.pids[1], signal.SIGKILL)
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
        executor.step_buffer(words(SUM, 1))
    with pytest.raises(RankError, match=r"the ranks have ended(?s:.*)restart"):
        executor.step_buffer(words(SUM, 1))
    executor.restart()
    tidy += executor.pids
    assert executor.step_buffer(words(SUM, 1)).token_ids.tolist() == [11]
    executor.close()
    with pytest.raises(ValueError, match="closed"):
        executor.restart()


def test_close_during_a_step(tidy):
    executor = start(tidy, 1)
    threading.Timer(0.3, executor.close).start()
    with pytest.raises(RankError, match="SIGKILL"):
        executor.step_buffer(words(SLEEP, 0, 60))


@pytest.mark.parametrize("end", ["sigkill", "sigterm", "exit"])
def test_the_caller_ends(tidy, end):
    program = textwrap.dedent(f"""
        import numpy as np, sys, threading
        from graphsrt.runtime.executor import WorkersExecutor
        executor = WorkersExecutor({1 if end == "exit" else 2}, {ECHO!r})
        print(*executor.pids, *executor.step_buffer(np.array([{SPAWN}])).token_ids, flush=True)
        if {end != "exit"}:
            executor.step_buffer(np.array([{SLEEP}, 0, 600]))
    """)
    caller = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert caller.stdout is not None
    pids = [int(pid) for pid in caller.stdout.readline().split()]
    caller.stdout.close()
    if end != "exit":
        ranks, children = pids[:2], pids[2:]
        time.sleep(0.3)
        caller.send_signal(signal.SIGKILL if end == "sigkill" else signal.SIGTERM)
    else:
        ranks, children = pids, []
    assert caller.wait(20) == {"sigkill": -signal.SIGKILL, "sigterm": -signal.SIGTERM, "exit": 0}[end]
    assert wait_gone(ranks) == []
    for child in children:  # the kernel tells the ranks only; compilers look after themselves
        if alive(child):
            os.kill(child, signal.SIGKILL)


def test_torchrun(tmp_path):
    folder = tmp_path
    script = folder / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import json, sys, time
        import numpy as np, torch.distributed as dist
        from graphsrt.errors import RankError
        from graphsrt.lowering.collectives import ProcessCollectives
        from graphsrt.runtime.executor import GroupExecutor
        from tests.support.echo_runner import EchoRunner
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        seen = []

        def attempt(serve):
            try:
                seen.append(executor.run(serve))
            except (RankError, ValueError, KeyError) as error:
                seen.append(f"{{type(error).__name__}}: {{error}}")

        def new(timeout=None):
            collectives = ProcessCollectives.over_world(timeout)
            return GroupExecutor(collectives, EchoRunner(rank, 2, collectives))

        def refuse():
            executor.step_buffer(np.array([{SUM}, 1]))
            raise ValueError("the scheduler broke")

        executor = new()
        attempt(lambda: [executor.step_buffer(np.array([{SUM}, n])).token_ids.tolist() for n in range(3)])
        attempt(lambda: len(executor.step_buffer(np.arange(100_000) * ({SUM} + 1)).token_ids))
        attempt(refuse)
        attempt(lambda: "still works")
        # In the middle of a step, the other rank waits in its collective.
        attempt(lambda: executor.step_buffer(np.array([{RAISE}, 1])))
        attempt(lambda: "not reached")
        executor = new()
        attempt(lambda: executor.step_buffer(np.array([{RAISE}, 0])))
        executor = new(1.0)
        attempt(lambda: executor.step_buffer(np.array([{SLEEP}, 1, 4])))
        dist.barrier()
        open(sys.argv[1] + f"/{{rank}}.json", "w").write(json.dumps(seen))
        """)
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(tmp_path)}
    subprocess.run([*command, str(folder)], check=True, timeout=60, env=env)
    driver, follower = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    assert driver[:2] == follower[:2] == [[[0], [11], [22]], 99_999]
    assert driver[2] == "ValueError: the scheduler broke"
    assert follower[2].startswith("RankError: rank 0 failed") and "the scheduler broke" in follower[2]
    assert driver[3] == follower[3] == "still works"
    assert driver[4].startswith("RankError: rank 1 failed") and "the echo broke" in driver[4]
    assert follower[4] == "KeyError: 'the echo broke'"
    assert all(seen[5].startswith("RankError: the ranks no longer work together") for seen in (driver, follower))
    assert driver[6] == "KeyError: 'the echo broke'"
    assert follower[6].startswith("RankError: rank 0 failed") and "the echo broke" in follower[6]
    assert driver[7].startswith("RankError: rank 1 died or hangs")
    assert follower[7].startswith("RankError: rank 0 failed") and "rank 1 died or hangs" in follower[7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(3, 5), (0, 5), ()])
def test_reply_survives_the_wire(dtype, shape):
    reply = StepReply(np.array([3, -1, 2**40]), torch.randn(shape).to(dtype))
    got = decode_reply(np.frombuffer(b"".join(encode_reply(reply)), dtype=np.uint8).copy())
    assert got.token_ids.tolist() == [3, -1, 2**40]
    assert (
        reply.logits is not None
        and got.logits is not None
        and torch.equal(got.logits, reply.logits)
        and got.logits.dtype == dtype
    )


@pytest.mark.parametrize("shape", [None, (0, 5), (2, 5)])
@pytest.mark.parametrize("num_top", [0, 3])
def test_log_probabilities_survive_the_wire(shape, num_top):
    numbers = np.random.default_rng(0)
    arrays = {
        "token_ids": numbers.integers(0, 99, 7),
        "logprobs": numbers.normal(size=7),
        "ranks": numbers.integers(1, 9, 7),
        "top_ids": numbers.integers(0, 99, (7, num_top)),
        "top_logprobs": numbers.normal(size=(7, num_top)),
    }
    logits = None if shape is None else torch.randn(shape)
    reply = StepReply(np.arange(3), logits, StepLogprobs(**arrays))
    got = decode_reply(np.frombuffer(b"".join(encode_reply(reply)), dtype=np.uint8).copy())
    assert got.token_ids.tolist() == [0, 1, 2] and got.logprobs is not None
    for name, array in arrays.items():
        other = getattr(got.logprobs, name)
        assert other.dtype == array.dtype and other.shape == array.shape and np.array_equal(other, array), name
    assert (got.logits is None) == (logits is None)
    assert logits is None or got.logits is None or torch.equal(got.logits, logits)


def test_a_batch_becomes_a_result():
    """In the own process it is not encoded on the way, and its words are still taken."""
    batch: Any = SimpleNamespace(tokens=np.array([SUM, 1, 2]))

    class Reverse:
        def step(self, buffer):
            return self.step_batch(SimpleNamespace(tokens=buffer))

        def step_batch(self, given):
            return StepReply(given.tokens[::-1], torch.ones(2, 3), captured_rows=4)

    with LocalExecutor(Reverse()) as executor:
        result = executor.step(batch)
        assert result.token_ids == executor.step_buffer(words(SUM, 1, 2)).token_ids.tolist() == [2, 1, SUM]
        assert result.logits is not None and result.logits.shape == (2, 3) and result.captured_rows == 4
    for step, given in ((executor.step, batch), (executor.step_buffer, words(SUM, 1, 2))):
        with pytest.raises(ValueError, match="closed"):
            step(given)
