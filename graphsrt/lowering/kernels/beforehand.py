"""Compiles the CPU's kernels beside whatever else a start does: the first one on a machine waits less for them."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from graphsrt.errors import CompileError
from graphsrt.lowering.kernels.build import build_library

_HERE = Path(__file__).parent


def start_building(tp: int) -> threading.Thread:
    """Have what ``tp`` ranks need compiled in the background, unless the cache has it. Whoever needs it waits."""
    names = ["linear", "radix_attention", *(["shared_rounds"] if tp > 1 else [])]

    def build() -> None:
        for name in names:
            with contextlib.suppress(CompileError):  # it comes again where the kernel is used, and is told there
                build_library(name, _HERE / name / f"{name}.cpp")

    thread = threading.Thread(target=build, daemon=True, name="graphsrt-kernels")
    thread.start()
    return thread
