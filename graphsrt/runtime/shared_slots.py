"""Memory that the ranks of one machine share while they load: two slots, each holding one chunk of the checkpoint.

It is memory without a name (``memfd``), which the first rank makes and the others open through ``/proc``: it is not
bounded by the size of ``/dev/shm``, and nothing is left of it however a rank ends.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

import torch

from graphsrt.errors import RankError, explain

if TYPE_CHECKING:
    from graphsrt.lowering.collectives import ProcessCollectives


def node_name() -> str:
    """Equal for processes that can share memory with each other, and that a launcher counts as one node."""
    if not hasattr(os, "memfd_create"):
        return f"process {os.getpid()} of {os.uname().nodename}"  # every rank reads for itself
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    # /proc/PID means the same in one namespace of process ids only.
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.environ.get('GROUP_RANK', '')}"


def shared_slots(node: ProcessCollectives | None, slot_bytes: int) -> list[torch.Tensor]:
    """Two uint8 tensors ``[slot_bytes]``, the same memory on every rank of ``node``; private memory for one rank.

    Called by all of them together. RankError, on every rank, where there is no such memory to be had.
    """
    if node is None or node.size == 1:
        return list(torch.empty(2, slot_bytes, dtype=torch.uint8))
    fd, failure = -1, ""
    if node.rank == 0:
        try:
            fd = os.memfd_create("graphsrt-slots")
            # Taken now: memory that is missing would later end a rank with a bus error.
            os.posix_fallocate(fd, 0, 2 * slot_bytes)
        except OSError as error:
            failure = str(error)
    pid, their_fd, failure = node.gather_objects((os.getpid(), fd, failure))[0]
    if failure:
        raise RankError(
            explain(f"the ranks cannot share {2 * slot_bytes >> 20} MiB of memory to load through", got=failure,
                    hint="raise the limit on memory, or on the size of a file (ulimit -f)")
        )  # fmt: skip
    try:
        if node.rank:
            fd = os.open(f"/proc/{pid}/fd/{their_fd}", os.O_RDWR | os.O_CLOEXEC)
        memory = mmap.mmap(fd, 2 * slot_bytes)
    except OSError as error:
        raise RankError(
            explain("the memory of another rank of this machine cannot be opened", where=f"/proc/{pid}/fd/{their_fd}",
                    got=str(error), hint="run the ranks of a machine as one user, in one container")
        ) from error  # fmt: skip
    node.barrier()  # then all have it open
    os.close(fd)
    return list(torch.frombuffer(memory, dtype=torch.uint8).view(2, slot_bytes))
