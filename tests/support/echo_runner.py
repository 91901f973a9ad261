"""A runner that does what its buffer says: the smallest thing that the rank processes can run.

The first word is the command, the rest its arguments; every command ends in an all_reduce, so that ranks meet.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import numpy as np
import torch

from graphsrt.errors import CheckpointError
from graphsrt.runtime.wire import StepReply
from graphsrt.runtime.workers import report_progress

SUM, LOGITS, RAISE, SLEEP, EXIT, INFO, SPAWN, SPIN, SKIP, LONG = range(10)


class EchoRunner:
    def __init__(self, rank, size, collectives):
        self.rank, self.size, self.collectives = rank, size, collectives

    def step(self, buffer: np.ndarray) -> StepReply | None:
        command, arguments = int(buffer[0]), buffer[1:]
        logits = None
        if command == SUM:
            # Each rank counts, with a weight of its own: a lost or doubled rank shows in the result.
            x = torch.from_numpy(arguments.copy()) * 10**self.rank
        elif command == LOGITS:
            x = torch.ones(1, dtype=torch.int64)
            rows, columns = map(int, arguments)
            logits = torch.arange(rows * columns, dtype=torch.float32).view(columns, rows).t()
        elif command == RAISE:
            if self.rank == arguments[0]:
                raise KeyError("the echo broke")
            x = torch.ones(1)
        elif command == SLEEP:
            if self.rank == arguments[0]:
                time.sleep(float(arguments[1]))
            x = torch.ones(1)
        elif command == EXIT:
            if self.rank == arguments[0]:
                os._exit(int(arguments[1]))
            x = torch.ones(1)
        elif command == INFO:
            x = torch.tensor([torch.get_num_threads(), int(os.environ.get("ECHO", "0"))])
        elif command == SPIN:
            # In C++, without Python's lock and without a look at signals.
            if self.rank == arguments[0]:
                deadline = time.monotonic() + float(arguments[1])
                while time.monotonic() < deadline:
                    a = torch.ones(300, 300, dtype=torch.float64)
                    for _ in range(200):
                        a = a @ a * 0
            x = torch.ones(1)
        elif command == SKIP:
            if self.rank == arguments[0]:
                return None
            x = torch.ones(1)
        elif command == LONG:
            for _ in range(int(arguments[0]) - 1):
                time.sleep(arguments[1] / 1000)
                self.collectives.all_reduce(torch.ones(1))
            x = torch.full((1,), arguments[0] // self.size)
        elif command == SPAWN:
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            pids = torch.zeros(self.size, dtype=torch.int64)
            pids[self.rank] = child.pid
            x = pids
        total = self.collectives.all_reduce(x)
        return StepReply(total.to(torch.int64).numpy(), logits) if self.rank == 0 else None


def make(rank, size, collectives, init):
    settings = json.loads(init or b"{}")
    if settings.get("raise") == rank:
        raise OSError("no such disk")
    if settings.get("damaged") == rank:
        raise CheckpointError("tensor lm_head.weight is missing")
    for done in range(settings.get("progress", 0)):
        report_progress(done + 1, settings["progress"], f"loading on {rank}")
    return EchoRunner(rank, size, collectives)


def make_collectives_check(rank, size, collectives, init):
    """Its one step checks every collective against what the ranks' data say, and returns how many were checked."""
    return _CollectivesCheck(rank, size, collectives)


class _CollectivesCheck:
    def __init__(self, rank, size, collectives):
        self.rank, self.size, self.collectives = rank, size, collectives

    def step(self, buffer: np.ndarray) -> StepReply | None:
        checked = 0
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
            # Below and above the size from which a reduction takes two rounds; one that does not divide; no rows.
            for shape in ((self.size, 5), (2 * self.size, 20011), (0, 4), (self.size, 1)):
                parts = []
                for rank in range(self.size):
                    generator = torch.Generator().manual_seed(rank)
                    values = torch.randn(shape[::-1], generator=generator, dtype=torch.float64) * 100
                    parts.append(values.to(dtype).t())  # not contiguous
                mine = parts[self.rank]
                wide = torch.float32 if dtype == torch.bfloat16 else dtype
                total = parts[0].to(wide)
                for part in parts[1:]:
                    total = total + part.to(wide)
                total = total.to(dtype)
                highest = torch.stack(parts).amax(0) if mine.numel() else total
                rows = shape[0] // self.size
                own = slice(self.rank * rows, (self.rank + 1) * rows)
                for got, want in (
                    (self.collectives.all_reduce(mine), total),
                    (self.collectives.all_reduce(mine, "max"), highest),
                    (self.collectives.all_gather(mine, 0), torch.cat(parts, 0)),
                    (self.collectives.all_gather(mine, -1), torch.cat(parts, 1)),
                    (self.collectives.reduce_scatter(mine, 0), total[own]),
                    (self.collectives.reduce_scatter(mine.t(), 1), total[own].t()),
                ):
                    assert got.dtype == dtype and got.is_contiguous()
                    assert torch.equal(got, want), (dtype, shape, got, want)
                    got.add_(1)  # a result is ours: neither the input nor another result changes
                    checked += 1
                assert torch.equal(mine, parts[self.rank])
        assert self.collectives.all_reduce(torch.tensor(float(self.rank))).item() == sum(range(self.size))
        nan = torch.tensor([float("nan") if self.rank == 0 else 1.0])
        assert self.collectives.all_reduce(nan, "max").isnan().all()
        for length in (0, 3, 5000):
            data = np.arange(length, dtype=np.int64)
            got = self.collectives.broadcast_buffer(data if self.rank == 0 else None)
            assert np.array_equal(got, data)
        return StepReply(np.array([checked]))
