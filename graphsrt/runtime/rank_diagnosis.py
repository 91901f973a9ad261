"""Which rank failed first, and how: the errors that name it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence

import numpy as np

from graphsrt import errors
from graphsrt.errors import RankError, explain
from graphsrt.runtime.rank_peer import ENTERED, LEFT, STEPS, RankPeer
from graphsrt.runtime.wire import STACK_SIGNAL

DIAGNOSIS_S = 0.2  # after the first sign of a failure, to learn which rank was first
EXIT_STATUS_S = 2.0  # between a rank's connection closing and its process having a status
STACK_S = 0.3  # for a rank to write its stack


def failed(ranks: Sequence[RankPeer], stage: str) -> errors.GraphsrtError:
    """The failure that came first: others may be its consequences, such as a peer's lost connection."""
    until = time.monotonic() + DIAGNOSIS_S
    while time.monotonic() < until and not all(r.error or r.hung_up for r in ranks):
        for rank in ranks:
            rank.read()
        if any(rank.status() is not None for rank in ranks):
            break
        time.sleep(0.01)
    until = time.monotonic() + EXIT_STATUS_S
    while time.monotonic() < until and any(r.hung_up and r.status() is None for r in ranks):
        time.sleep(0.005)
    for rank in ranks:
        rank.read()
    # A rank with an error stays alive. So a dead one died of something else, and its peers' errors follow from it.
    dead = [r for r in ranks if r.error is None and (r.hung_up or r.status() is not None)]
    if dead:
        return _died(dead[0], stage)
    first = min((r for r in ranks if r.error), key=lambda r: r.error["when"])  # type: ignore[index]
    error = first.error
    assert error is not None
    where = RankError(explain(f"rank {first.rank} failed: {error['type']}", got=error["traceback"]), first.rank)
    refusals = {kind.__name__: kind for kind in (errors.CheckpointError, errors.CompileError, RankError)}
    if error["type"] not in refusals:
        return where
    refusal: errors.GraphsrtError = refusals[error["type"]](error["message"])
    if isinstance(refusal, RankError):
        refusal.rank = error["rank"]
    refusal.__cause__ = where
    return refusal


def _died(rank: RankPeer, stage: str) -> RankError:
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
    return RankError(explain(f"rank {rank.rank} {how} {stage}", got=rank.stack() or None, hint=hint), rank.rank)


def stopped(rank: RankPeer, seconds: float, stage: str) -> RankError:
    """A rank that a signal has stopped."""
    return RankError(
        explain(f"rank {rank.rank} has been stopped for {seconds:g} s {stage}", got="SIGSTOP or SIGTSTP",
                hint="do not stop the processes of a model that runs"),
        rank.rank,
    )  # fmt: skip


def stuck(ranks: Sequence[RankPeer], board: np.ndarray, late: Sequence[int], seconds: float, stage: str) -> RankError:
    """Name the ranks that hold up the others, and show where they are. ``late`` have not done what all should."""
    # Who is in a collective waits for somebody. The one that is not computes, or does something worse.
    busy = [r for r in late if board[r, ENTERED] == board[r, LEFT]]
    suspects = busy or [r for r in late if board[r, ENTERED] == board[list(late), ENTERED].min()]
    for r in suspects:
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[r].process.pid, STACK_SIGNAL)
    time.sleep(STACK_S)
    lines = []
    for r in suspects[:4]:
        where = "outside collectives" if r in busy else f"in collective {board[r, ENTERED]}"
        lines.append(f"rank {r}, {where}, {board[r, STEPS]} steps done\n{ranks[r].stack()}".rstrip())
    names = f"rank {suspects[0]}" if len(suspects) == 1 else f"ranks {', '.join(map(str, suspects))}"
    return RankError(
        explain(f"{names} did not advance for {seconds:g} s {stage}", got="\n".join(lines),
                hint="if it does what it should, only slowly, give compile() a larger stall_timeout"),
        suspects[0],
    )  # fmt: skip


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
