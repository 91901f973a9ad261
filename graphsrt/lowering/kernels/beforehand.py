"""Compiles the CPU's kernels beside whatever else a start does: the first one on a machine waits less for them."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from graphsrt.errors import CompileError
from graphsrt.lowering.kernels import first_largest, linear, replay, shared_rounds, team
from graphsrt.lowering.kernels.build import build_library
from graphsrt.lowering.kernels.radix_attention import cpu

_HERE = Path(__file__).parent


def start_building(tp: int) -> list[threading.Thread]:
    """Have what ``tp`` ranks need compiled in the background, unless the cache, or this process, has it.

    One thread for each library: the largest takes half a minute. Whoever needs a library then waits for it.
    """
    loaders = {
        "linear": linear.load,
        "radix_attention": cpu.kernel,
        "replay": replay.load,
        "team": team.load,
        "first_largest": first_largest.load,
    }
    if tp > 1:
        loaders["shared_rounds"] = shared_rounds.kernel

    def build(name: str) -> None:
        with contextlib.suppress(CompileError):  # it comes again where the kernel is used, and is told there
            build_library(name, _HERE / name / f"{name}.cpp")

    missing = [name for name, load in loaders.items() if not load.cache_info().currsize]
    threads = [threading.Thread(target=build, args=(name,), daemon=True, name=f"build-{name}") for name in missing]
    for thread in threads:
        thread.start()
    return threads
