"""Collectives between the processes of one machine through memory that they share (shared_rounds.cpp).

Each rank lays its bytes down, says so, and reads those of the others: a copy in, one wait, a copy out. Results are
those of ``lowering.collectives``, bit for bit: sums in the order of ranks, half precision summed in float32. The way is
that of the shared-memory all-reduce of SGLang and DeepSpeed for CPUs; the rounds and their waiting are ours.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from graphsrt.lowering.kernels.build import load_extension
from graphsrt.lowering.shared_memory import node_name, share_memory

if TYPE_CHECKING:
    from torch import Tensor

    from graphsrt.lowering.collectives import ProcessCollectives

CAPACITY = 1 << 20
"""Bytes of a rank's buffer, of which it has two. Larger tensors go in pieces, which stay in the second cache."""
LINE = 64
"""Bytes of a rank's counters; as in the source."""
SPIN_S = 100e-6
"""How long a rank looks before it sleeps, if every thread of every rank has a core: about what waking it costs."""
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
"""That are reduced here, with their number in the source."""

SOURCE = Path(__file__).with_name("shared_rounds.cpp")


@cache
def kernel() -> ModuleType:
    """The compiled code; the first call on a machine compiles it. Raises ``CompileError``."""
    return load_extension("shared_rounds", SOURCE)


class SharedRounds:
    """Collectives of host tensors over ranks of one machine. Every method is called by all of them, in one order.

    Tensors are contiguous, and of one shape and dtype on all ranks. RuntimeError names a peer that has ended or left
    the group, within a tenth of a second, or that has not come after the timeout; then the group is of no more use.
    """

    def __init__(self, node: ProcessCollectives, timeout_s: float):
        """Called by all ranks of ``node`` together. RankError where there is no memory to share."""
        self.size = node.size
        self._kernel = kernel()
        self._memory = share_memory(node, self.size * (LINE + 2 * CAPACITY), "exchange")
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)  # keeps the memory where it is
        pids = node.gather_objects(os.getpid())
        self._peers = [os.pidfd_open(pid) if rank != node.rank else -1 for rank, pid in enumerate(pids)]
        crowded = self.size * torch.get_num_threads() > len(os.sched_getaffinity(0))
        self._group = self._kernel.join(
            self._bytes.data_ptr(), node.rank, self.size, CAPACITY, tuple(self._peers), 0.0 if crowded else SPIN_S,
            timeout_s,
        )  # fmt: skip

    def gather(self, x: Tensor) -> Tensor:
        """``[size, *x.shape]``: what each rank gave."""
        out = torch.empty((self.size, *x.shape), dtype=x.dtype)
        self._kernel.gather(self._group, x.data_ptr(), out.data_ptr(), x.nbytes)
        return out

    def exchange(self, blocks: Tensor) -> Tensor:
        """Block ``r`` of each rank's ``[size, …]`` goes to rank ``r``; row ``s`` of the result came from rank ``s``."""
        out = torch.empty_like(blocks)
        self._kernel.exchange(self._group, blocks.data_ptr(), out.data_ptr(), blocks.nbytes // self.size)
        return out

    def all_reduce(self, x: Tensor, maximum: bool, one_round_bytes: int) -> Tensor:
        """Sum or maximum over ranks; of up to so many bytes every rank adds up everything. A dtype of ``DTYPES``."""
        out = torch.empty_like(x)
        self._kernel.all_reduce(
            self._group, x.data_ptr(), out.data_ptr(), x.numel(), DTYPES[x.dtype], maximum, one_round_bytes
        )
        return out

    def reduce_scatter(self, blocks: Tensor, maximum: bool) -> Tensor:
        """This rank's row of the sum or maximum of ``[size, …]`` over ranks. A dtype of ``DTYPES``."""
        out = torch.empty_like(blocks[0])
        count = blocks.numel() // self.size
        self._kernel.reduce_scatter(
            self._group, blocks.data_ptr(), out.data_ptr(), count, DTYPES[blocks.dtype], maximum
        )
        return out

    def leave(self) -> None:
        """Peers that wait for this rank, or ever will, raise at once."""
        self._kernel.leave(self._group)
        for fd in self._peers:
            if fd >= 0:
                os.close(fd)
        self._peers = []


def join(group: ProcessCollectives, timeout_s: float) -> SharedRounds | None:
    """Rounds over the group, or None, on all ranks alike, if they are not all on one machine that lets them share."""
    return SharedRounds(group, timeout_s) if len(set(group.gather_objects(_where()))) == 1 else None


def _where() -> str:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # a system without them, or that forbids them
        return f"{node_name()} {os.getpid()}"
    return node_name()
