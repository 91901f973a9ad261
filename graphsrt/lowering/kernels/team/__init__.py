"""Threads that a captured step keeps at work from its first kernel to its last, on the CPU.

Kernels that divide their work (``share.h``) call the library's C functions, which :func:`load` puts into the process.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from graphsrt.lowering.kernels.build import load_for_all

SOURCE = Path(__file__).with_name("team.cpp")


@cache
def load() -> ctypes.CDLL:
    """Put the library into this process, for all: compiled once a machine. Raises ``CompileError``."""
    return load_for_all("team", SOURCE)
