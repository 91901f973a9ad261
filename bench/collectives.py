"""Sums over ranks of one machine: through shared memory, and as between machines, through sockets (gloo).

    python bench/collectives.py [--ranks 2 4] [--width 4096] [--rounds 9]

Tensors are bf16, ``[tokens, width]``. Both ways are timed in turn by the same processes, one thread each; a time is the
median of the rounds, each of which calls as often as takes about a fifth of a second.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from traffic import table

from graphsrt.lowering.collectives import ProcessCollectives
from graphsrt.lowering.kernels import shared_rounds

TOKENS = (1, 32, 512)


def rank(number: int, size: int, port: int, options: argparse.Namespace, said: Any) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, size, number == 0)
    dist.init_process_group("gloo", store=store, rank=number, world_size=size)
    shared = ProcessCollectives(dist.group.WORLD)
    shared.all_reduce(torch.ones(1))  # now it has what it shares
    sockets = ProcessCollectives(dist.group.WORLD)
    sockets._asked_for_rounds = True  # and got none
    for tokens in TOKENS:
        x = torch.randn(tokens, options.width).bfloat16()
        times: dict[str, list[float]] = {"shared": [], "sockets": []}
        for _ in range(options.rounds):
            for name, group in (("shared", shared), ("sockets", sockets)):
                times[name].append(_time(group, x))
        if number == 0:
            said.put((size, tokens, *(statistics.median(times[name]) for name in times)))


def _time(group: ProcessCollectives, x: torch.Tensor) -> float:
    """Seconds of one sum. All ranks make the same number of calls: rank 0 says how many."""
    start = time.perf_counter()
    group.all_reduce(x)
    once = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    calls = max(3, int(0.2 / float(group.all_reduce(once, "max"))))
    start = time.perf_counter()
    for _ in range(calls):
        group.all_reduce(x)
    return (time.perf_counter() - start) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    shared_rounds.kernel()
    context = multiprocessing.get_context("spawn")
    rows = [("ranks", "tokens", "shared memory µs", "sockets µs", "times as fast")]
    for size in options.ranks:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        said = context.SimpleQueue()
        ranks = [context.Process(target=rank, args=(number, size, port, options, said)) for number in range(size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        while not said.empty():
            ranks_, tokens, shared, sockets = said.get()
            rows.append((str(ranks_), str(tokens), f"{shared * 1e6:,.1f}", f"{sockets * 1e6:,.1f}",
                         f"{sockets / shared:.1f}"))  # fmt: skip
    print(f"{os.cpu_count()} cores, width {options.width}, bf16\n\n{table(rows)}")


if __name__ == "__main__":
    main()
