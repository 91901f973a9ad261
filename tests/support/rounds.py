"""Processes that are ranks of one group, for tests of collectives: ``start(size, name, *arguments)``."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from graphsrt.lowering.collectives import ProcessCollectives
from graphsrt.lowering.kernels.shared_rounds import CAPACITY


def start(size: int, name: str, *arguments: Any) -> tuple[list[Any], Any]:
    """The processes, each in the function of this module by that name, and a queue with what they say."""
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    said = context.SimpleQueue()
    processes = [context.Process(target=_run, args=(rank, size, port, name, arguments, said)) for rank in range(size)]
    for process in processes:
        process.start()
    return processes, said


def _run(rank: int, size: int, port: int, name: str, arguments: tuple[Any, ...], said: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    getattr(sys.modules[__name__], name)(rank, size, said, *arguments)


def same_bits_as_sockets(rank: int, size: int, said: Any) -> None:
    """Every collective, dtype and size class through shared memory and through gloo, NaN and infinities among them."""
    shared, plain = ProcessCollectives(dist.group.WORLD), ProcessCollectives(dist.group.WORLD)
    plain._asked_for_rounds = True  # and got none
    generator = torch.Generator().manual_seed(rank)
    compared = 0
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64):
        big = CAPACITY // dtype.itemsize // 300 + 1  # more than a buffer holds, and no multiple of it
        for shape in ((1,), (3, 7), (1, 4096), (41, 1000), (big, 301)):
            x = (torch.randn(shape, generator=generator) * 3).to(dtype)
            if dtype.is_floating_point:
                x.view(-1)[rank::97] = float("nan") if rank == 1 else float("inf")
            for mine, theirs in (
                *((shared.all_reduce(x, op), plain.all_reduce(x, op)) for op in ("sum", "max")),
                *((shared.reduce_scatter(x, 0, op), plain.reduce_scatter(x, 0, op)) for op in ("sum", "max")),
                *((shared.all_gather(x, dim), plain.all_gather(x, dim)) for dim in range(x.dim())),
                (shared.all_reduce(x.T), plain.all_reduce(x.T)),
            ):
                assert mine.dtype == theirs.dtype and mine.is_contiguous()
                torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
                compared += 1
    assert shared._rounds is not None and plain._rounds is None
    said.put((rank, compared))
    dist.barrier()


def fall_behind(rank: int, size: int, said: Any, how: str) -> None:
    """The last rank never enters the second round; the others say what they are told, and after how long."""
    group = ProcessCollectives(dist.group.WORLD, timeout=1.0 if how == "sleeps" else 60.0)
    group.all_reduce(torch.ones(5))
    if rank == size - 1:
        said.put((rank, os.getpid()))
        if how == "leaves":
            time.sleep(0.5)
            group.abandon("it wants to")
        time.sleep(60)
    began = time.monotonic()
    try:
        group.all_reduce(torch.ones(5))
    except RuntimeError as error:
        said.put((rank, f"{error} in {time.monotonic() - began:.1f} s"))
    time.sleep(60)
