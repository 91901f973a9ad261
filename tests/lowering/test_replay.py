"""Captured steps that run without the interpreter: that they do, and that errors and memory are as with it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lowering_programs import paged, weights_of
from test_captured_steps import batch

from graphsrt.lowering.executable import Executable
from graphsrt.lowering.kernels.replay import Replay

# With and without a team of threads that stays with the step.
ROWS = (8, 40)


@pytest.fixture(params=ROWS)
def bound(request) -> tuple[dict[str, torch.Tensor], Callable[[], dict[str, torch.Tensor]]]:
    program = paged(torch.float32, ranks=1, summed=False)
    held = batch(program, request.param, seed=0)
    _, replay = Executable(program, weights_of(program), backend="inductor").bind(held)
    return held, replay


def test_the_interpreter_has_nothing_to_do_for_a_launch(bound) -> None:
    _, replay = bound
    names = []
    sys.setprofile(lambda frame, event, _: names.append(frame.f_code.co_qualname) if event == "call" else None)
    try:
        replay()
    finally:
        sys.setprofile(None)
    assert len(names) <= 3 and any("Replay" in name for name in names), names


@pytest.mark.parametrize("threads", [1, 2, 3, 7])  # and more than there are cores
def test_the_number_of_threads_does_not_change_a_bit(bound, threads: int) -> None:
    _, replay = bound
    want = replay()["logits"]
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(20):
            assert torch.equal(replay()["logits"], want)
    finally:
        torch.set_num_threads(usual)


def test_an_error_is_told_and_the_next_step_is_right(bound) -> None:
    held, replay = bound
    want = replay()["logits"]
    before = held["seq_lens"].clone()
    held["seq_lens"][7] = 1000
    for _ in range(2):
        with pytest.raises(ValueError, match="sequence 7: seq_lens is 1000, expected 1 "):
            replay()
    held["seq_lens"].copy_(before)
    assert torch.equal(replay()["logits"], want)


def test_results_are_the_caller_s_and_memory_does_not_grow(bound) -> None:
    held, replay = bound
    first = replay()["logits"]
    kept = first.clone()
    held["tokens"].copy_((held["tokens"] + 1) % 97)
    size = first.numel() * first.element_size()
    count = 3 * (32 << 20) // size
    for _ in range(count // 10):  # buffers of the allocator settle
        replay()
    before = resident()
    for _ in range(count):
        last = replay()["logits"]
    assert resident() - before < 32 << 20  # a third of what all results take
    assert torch.equal(first, kept) and not torch.equal(last, kept)


def test_what_cannot_run_is_refused(tmp_path: Path) -> None:
    replay = Replay(3)
    with pytest.raises(RuntimeError, match=r"cannot be loaded.*missing\.so"):
        replay.add_region(tmp_path / "missing.so", [0], [], [1], [])
    with pytest.raises(RuntimeError, match="not there"):
        replay.add_kernel((1, 1), [0], [], keep=None)  # the input is looked for first
        replay.runner({"x": 1}, rows=1)()
    with pytest.raises(RuntimeError):
        replay.pin(3, torch.ones(1))


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
