"""Memory that processes of one machine share.

It is memory without a name (``memfd``), which the first rank makes and the others open through ``/proc``: it is not
bounded by the size of ``/dev/shm``, and nothing is left of it however a rank ends.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

from graphsrt.errors import RankError, explain

if TYPE_CHECKING:
    from graphsrt.lowering.collectives import ProcessCollectives


def node_name() -> str:
    """Equal for processes that can share memory with each other, and that a launcher counts as one node."""
    if not hasattr(os, "memfd_create"):
        return f"process {os.getpid()} of {os.uname().nodename}"  # every rank is by itself
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    # /proc/PID means the same in one namespace of process ids only.
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.environ.get('GROUP_RANK', '')}"


def share_memory(node: ProcessCollectives, num_bytes: int, what: str) -> mmap.mmap:
    """Memory of so many bytes, zero at first, the same on every rank of ``node``. ``what`` it is for, in an error.

    Called by all of them together. RankError, on every rank, where there is no such memory to be had.
    """
    fd, failure = -1, ""
    if node.rank == 0:
        try:
            fd = os.memfd_create("graphsrt")
            # Taken now: memory that is missing would later end a rank with a bus error.
            os.posix_fallocate(fd, 0, num_bytes)
        except OSError as error:
            failure = str(error)
    pid, their_fd, failure = node.gather_objects((os.getpid(), fd, failure))[0]
    if failure:
        raise RankError(
            explain(f"the ranks cannot share {num_bytes >> 20} MiB of memory to {what} through", got=failure,
                    hint="raise the limit on memory, or on the size of a file (ulimit -f)")
        )  # fmt: skip
    try:
        if node.rank:
            fd = os.open(f"/proc/{pid}/fd/{their_fd}", os.O_RDWR | os.O_CLOEXEC)
        memory = mmap.mmap(fd, num_bytes)
    except OSError as error:
        raise RankError(
            explain("the memory of another rank of this machine cannot be opened", where=f"/proc/{pid}/fd/{their_fd}",
                    got=str(error), hint="run the ranks of a machine as one user, in one container")
        ) from error  # fmt: skip
    node.barrier()  # then all have it open
    os.close(fd)
    return memory
