"""Compiles the CPU's kernels beside whatever else a start does: the first one on a machine waits less for them."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from graphsrt.errors import CompileError
from graphsrt.lowering.kernels import first_largest, linear, shared_rounds
from graphsrt.lowering.kernels.build import build_library
from graphsrt.lowering.kernels.radix_attention import cpu

_HERE = Path(__file__).parent


def start_building(tp: int) -> threading.Thread | None:
    """Have what ``tp`` ranks need compiled in the background, unless the cache, or this process, has it.

    Whoever needs it then waits for it.
    """
    loaders = {"linear": linear.load, "radix_attention": cpu.kernel, "first_largest": first_largest.load}
    if tp > 1:
        loaders["shared_rounds"] = shared_rounds.kernel
    missing = [name for name, load in loaders.items() if not load.cache_info().currsize]
    if not missing:
        return None

    def build() -> None:
        for name in missing:
            with contextlib.suppress(CompileError):  # it comes again where the kernel is used, and is told there
                build_library(name, _HERE / name / f"{name}.cpp")

    thread = threading.Thread(target=build, daemon=True, name="graphsrt-kernels")
    thread.start()
    return thread
