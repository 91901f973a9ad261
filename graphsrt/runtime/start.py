"""Where the ranks of a model run, and how they are started: here, in processes of ours, or under ``torchrun``."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from tqdm import tqdm

from graphsrt.errors import explain
from graphsrt.lowering.collectives import ProcessCollectives
from graphsrt.models.checkpoint import Checkpoint, SafetensorsCheckpoint, StateDictCheckpoint
from graphsrt.models.memory_file import write_safetensors_memfd
from graphsrt.program import Program
from graphsrt.recipes import leaves
from graphsrt.runtime.agreement import COMPARE_EVERY
from graphsrt.runtime.executor import STALL_TIMEOUT_S, GroupExecutor, LocalExecutor, WorkersExecutor
from graphsrt.runtime.model_runner import EngineSizes, RankInit, rank_runner, simulated_runner
from graphsrt.runtime.network import interface_towards
from graphsrt.runtime.phases import Phases

RUNNER = "graphsrt.runtime.model_runner:create"
"""What rank processes run."""


@dataclass(frozen=True)
class RankOptions:
    """How ranks run; see :func:`graphsrt.compile`. ``group_size``: processes of ``torchrun``, 0 without it."""

    backend: str
    device: str = "cpu"
    group_size: int = 0
    threads_per_rank: int | None = None
    stall_timeout: float = STALL_TIMEOUT_S
    compare_every: int = COMPARE_EVERY
    progress: bool = False


def start_ranks(
    checkpoint: Checkpoint, phases: Phases, sizes: EngineSizes, tp: int, options: RankOptions, *,
    in_memory: bool = False, simulated: bool = False,
) -> LocalExecutor | WorkersExecutor | GroupExecutor:  # fmt: skip
    """Load the programs' weights where they are to be used. Raises as :func:`graphsrt.compile`.

    ``in_memory``: the checkpoint is of a module in memory.
    """
    if simulated:
        return LocalExecutor(simulated_runner(phases, checkpoint, sizes))
    if options.group_size:
        return _in_group(phases, checkpoint, sizes, tp, options)
    if tp > 1:
        return _in_processes(phases, checkpoint, in_memory, sizes, tp, options)
    with Bar("load", options.progress) as tell:
        return LocalExecutor(
            rank_runner(
                phases, 0, None, checkpoint, sizes, backend=options.backend, device=options.device, progress=tell
            )
        )


def _in_processes(
    phases: Phases, checkpoint: Checkpoint, in_memory: bool, sizes: EngineSizes, tp: int, options: RankOptions
) -> WorkersExecutor:
    tell: Callable[[int, int, str], None]

    @contextmanager
    def init() -> Iterator[tuple[bytes, Sequence[int]]]:
        """What ranks are started with, and started again. A copy of weights in memory is there only as long as this."""
        nonlocal tell
        fds: list[int] = []
        given = checkpoint
        try:
            if isinstance(checkpoint, StateDictCheckpoint) and in_memory:
                fds.append(write_safetensors_memfd({name: checkpoint.read(name) for name in _needed(phases.decode)}))
                given = SafetensorsCheckpoint(f"/proc/self/fd/{fds[0]}")
            texts = phases.texts(torch.device(options.device).type)
            about = RankInit(
                texts, given.spec(), sizes, options.backend, options.device, options.compare_every
            )  # fmt: skip
            with Bar("load", options.progress) as tell:
                yield pickle.dumps(about), fds
        finally:
            for fd in fds:
                os.close(fd)

    def tell_of_rank_0(rank: int, done: int, total: int, label: str) -> None:
        if rank == 0:
            tell(done, total, label)

    return WorkersExecutor(
        tp, RUNNER, init, device=options.device,
        threads_per_rank=options.threads_per_rank, progress=tell_of_rank_0, stall_timeout=options.stall_timeout,
    )  # fmt: skip


def _needed(program: Program) -> list[str]:
    return sorted({leaf for weight in program.weights.values() for leaf in leaves(weight.recipe)})


def _in_group(
    phases: Phases, checkpoint: Checkpoint, sizes: EngineSizes, tp: int, options: RankOptions
) -> GroupExecutor:
    if options.group_size != tp:
        raise ValueError(
            explain("tp must be the number of processes that torchrun started", expected=str(options.group_size),
                    got=str(tp))
        )  # fmt: skip
    device = options.device
    if torch.device(device).type == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        torch.cuda.set_device(device)
    collectives = ProcessCollectives.over_world(options.stall_timeout)
    try:
        runner = rank_runner(
            phases, collectives.rank, collectives, checkpoint, sizes, backend=options.backend, device=device,
            compare_every=options.compare_every,
        )  # fmt: skip
        return GroupExecutor(collectives, runner)
    except BaseException as error:
        # The others are in a collective, or will be: they end with us, and know why.
        lost = collectives.lost(error) if collectives.meeting.failed else None
        collectives.abandon(str(lost) if lost else "".join(traceback.format_exception(error)))
        raise (lost or error) from error


def group_size(device: str) -> int:
    """Size of the process group that ``torchrun`` (or the caller) has set up; 0 if there is none."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    if "TORCHELASTIC_RUN_ID" in os.environ and "WORLD_SIZE" in os.environ:
        # Read by gloo, also by the groups for host memory that NCCL's ranks have.
        if "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface_towards(os.environ["MASTER_ADDR"])):
            os.environ["GLOO_SOCKET_IFNAME"] = name
        torch.distributed.init_process_group("nccl" if torch.device(device).type == "cuda" else "gloo")
        return torch.distributed.get_world_size()
    return 0


class Bar:
    """A progress bar that is told ``(done, total, label)``; silent unless asked for."""

    def __init__(self, label: str, show: bool):
        self._bar = tqdm(desc=label, disable=not show, unit="", leave=False)

    def __enter__(self) -> Callable[[int, int, str], None]:
        return self._tell

    def _tell(self, done: int, total: int, label: str) -> None:
        self._bar.total = total
        self._bar.set_postfix_str(label[-40:], refresh=False)
        self._bar.update(done - self._bar.n)

    def __exit__(self, *exc_info: object) -> None:
        self._bar.close()
