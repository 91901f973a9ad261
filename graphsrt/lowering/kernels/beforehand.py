"""Compiles the CPU's kernels beside whatever else a start does: the first one on a machine waits less for them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphsrt.errors import CompileError
from graphsrt.lowering.kernels import first_largest, linear, replay, shared_rounds, team
from graphsrt.lowering.kernels.build import build_library
from graphsrt.lowering.kernels.radix_attention import cpu
from graphsrt.program import Program


def start_building(tp: int, *, integers: bool = False) -> list[threading.Thread]:
    """Have what ``tp`` ranks need of any model compiled in the background, unless the cache, or this process, has it.

    ``integers``: linears of 8 and 4 bits as well. One thread for each library: the largest takes 20 seconds. Whoever
    needs a library then waits for it.
    """
    wanted: list[tuple[Any, Path]] = [
        (linear.load, linear.SOURCE), (replay.load, replay.SOURCE), (team.load, team.SOURCE),
        (first_largest.load, first_largest.SOURCE),
    ]  # fmt: skip
    if integers:
        wanted.append((linear.load_integers, linear.INTEGERS))
    if tp > 1:
        wanted.append((shared_rounds.kernel, shared_rounds.SOURCE))
    return [_started(source) for load, source in wanted if not load.cache_info().currsize]


def start_building_attention(program: Program) -> list[threading.Thread]:
    """The same for the attention over this program's pools."""
    kinds = {(pool.dtype, cpu.is_wide(program.dtype, pool.dtype)) for pool in program.kv_pools.values()}
    return [_started(cpu.SOURCE, cpu.flags(*kind)) for kind in kinds if kind[0] in cpu.POOLS]


def _started(source: Path, flags: Sequence[str] = ()) -> threading.Thread:
    def build() -> None:
        with contextlib.suppress(CompileError):  # it comes again where the kernel is used, and is told there
            build_library(source.stem, source, flags)

    thread = threading.Thread(target=build, daemon=True, name=f"build-{source.stem}")
    thread.start()
    return thread
