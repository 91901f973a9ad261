"""Compiles the CPU's kernels beside whatever else a start does: the first one on a machine waits less for them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path

from graphsrt.errors import CompileError
from graphsrt.lowering.kernels import first_largest, linear, replay, shared_rounds, team
from graphsrt.lowering.kernels.build import build_library
from graphsrt.lowering.kernels.radix_attention import cpu
from graphsrt.program import Program

_HERE = Path(__file__).parent


def start_building(tp: int) -> list[threading.Thread]:
    """Have what ``tp`` ranks need of any model compiled in the background, unless the cache, or this process, has it.

    One thread for each library: the largest takes half a minute. Whoever needs a library then waits for it.
    """
    loaders = {"linear": linear.load, "replay": replay.load, "team": team.load, "first_largest": first_largest.load}
    if tp > 1:
        loaders["shared_rounds"] = shared_rounds.kernel
    return [
        _started(name, _HERE / name / f"{name}.cpp") for name, load in loaders.items() if not load.cache_info().currsize
    ]


def start_building_attention(program: Program) -> list[threading.Thread]:
    """The same for the attention over this program's pools."""
    kinds = {(pool.dtype, cpu.is_wide(program.dtype, pool.dtype)) for pool in program.kv_pools.values()}
    return [_started("radix_attention", cpu.SOURCE, cpu.flags(*kind)) for kind in kinds if kind[0] in cpu.POOLS]


def _started(name: str, source: Path, flags: Sequence[str] = ()) -> threading.Thread:
    def build() -> None:
        with contextlib.suppress(CompileError):  # it comes again where the kernel is used, and is told there
            build_library(name, source, flags)

    thread = threading.Thread(target=build, daemon=True, name=f"build-{name}")
    thread.start()
    return thread
