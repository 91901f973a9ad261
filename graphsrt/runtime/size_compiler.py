"""Compiles regions for the sizes of captured steps that are used a lot, while the engine runs.

Regions are compiled once for any number of tokens, and that code serves every step. With ``compile_effort="max"`` a
size that has been used :data:`OFTEN` times gets code of its own: one process compiles it when nobody else wants the
processor, and the engine changes over, on all ranks in the same step, when it is in the cache.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter

from graphsrt.errors import CompileError
from graphsrt.lowering.captured_steps import CapturedSteps, size_within, symbols
from graphsrt.lowering.decompose import decompose
from graphsrt.lowering.inductor import Worker
from graphsrt.lowering.region_cache import is_intact
from graphsrt.lowering.regions import Region, cut, distinct_regions
from graphsrt.program import Program

OFTEN = 64


class SizeCompiler:
    """``program``: what decodes; ``limit``: most sequences of a step. Close it; what is half compiled is given up."""

    def __init__(self, program: Program, limit: int):
        self._program, self._limit = program, limit
        self._regions: list[Region] = list(distinct_regions(cut(decompose(program, "cpu"))))
        self._uses: Counter[int] = Counter()
        self._ready: set[int] = set()
        self._wanted: list[int] = []
        self._change = threading.Condition()
        self._closed = False
        self._worker: Worker | None = None
        self._thread: threading.Thread | None = None

    @staticmethod
    def of(program: Program, limit: int) -> SizeCompiler | None:
        """None for a program whose steps are not captured."""
        serves = CapturedSteps.serves(program, {"req_to_token", *program.kv_pools})
        return SizeCompiler(program, limit) if serves else None

    def count(self, rows: int) -> bool:
        """A step decodes so many sequences: whether there is code for just its size."""
        size = size_within(rows, self._limit)
        if size is None:
            return False
        self._uses[size] += 1
        if self._uses[size] == OFTEN:
            with self._change:
                self._wanted.append(size)
                self._change.notify()
                if self._thread is None:
                    self._thread = threading.Thread(target=self._compile, daemon=True, name="graphsrt-sizes")
                    self._thread.start()
        return size in self._ready

    def close(self) -> None:
        """May be called again."""
        with self._change:
            self._closed = True
            self._change.notify()
            worker = self._worker
        if worker is not None:
            worker.kill()
        if self._thread is not None:
            self._thread.join()

    def _compile(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._wanted or self._closed)
                if self._closed:
                    return
                size = self._wanted.pop(0)
            try:
                self._compile_for(size)
            except CompileError as error:
                if not self._closed:
                    warnings.warn(f"steps of {size} rows keep the code for any number: {error}", stacklevel=1)
                continue
            self._ready.add(size)

    def _compile_for(self, size: int) -> None:
        settled = symbols(self._program, size)
        missing = [region for region in (each.at(settled) for each in self._regions) if not is_intact(region)]
        if not missing:
            return
        with self._change:
            if self._closed:
                raise CompileError("closed")
            self._worker = worker = Worker(idle=True)
        try:
            for region in missing:
                worker.compile(region)
        finally:
            with self._change:
                self._worker = None
            worker.close()
