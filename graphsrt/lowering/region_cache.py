"""The cache of compiled regions: ``$GRAPHSRT_CACHE/regions/<key>/`` holds ``region.so`` and ``meta.json``.

The key covers all that the code depends on: the region's text (operators, shapes, dtypes, strides, symbols), the schema
of each operator, the source of the references that are traced, Inductor's options, torch, and the processor. Entries
appear whole (written aside, then renamed) and carry a checksum; an entry that is damaged is said to be so and compiled
anew. Processes that want the same region at once wait for the one that compiles it.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import platform
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import filelock
import torch

from graphsrt import ops
from graphsrt.cache import cache_dir, writing
from graphsrt.errors import CompileError, explain
from graphsrt.lowering import inductor
from graphsrt.lowering.decompose import decompose
from graphsrt.lowering.kernels import linear
from graphsrt.lowering.kernels.build import _cpu_flags
from graphsrt.lowering.regions import Region, cut, distinct_regions
from graphsrt.program import Program, target_from_name

FORMAT = 1
"""Counts changes of this folder's layout, and of how a region becomes a module, that no other part of the key sees."""

Progress = Callable[[int, int, str], None]


@dataclass
class CompileStats:
    """What a start compiled. ``distinct = compiled + reused``; ``seconds`` is wall time, cache look-ups included."""

    distinct: int = 0
    compiled: int = 0
    reused: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.distinct} distinct regions: {self.compiled} compiled, {self.reused} reused, {self.seconds:.1f} s"


def compile_regions(
    *programs: Program, device: str = "cpu", progress: Progress | None = None, max_workers: int | None = None
) -> CompileStats:
    """Compile what the programs need and the cache lacks. Called once, before the ranks start: they only load.

    ``progress(done, total, label)`` is called after each distinct region, total counting only those to compile, and
    once at the start. Raises ``CompileError`` for a region that does not compile, and for devices other than the CPU.
    """
    if torch.device(device).type != "cpu":
        raise CompileError(explain(f"regions are compiled for the CPU, not for {device}", hint='use backend="eager"'))
    started = time.perf_counter()
    steps = [step for program in programs for step in cut(decompose(program, torch.device(device).type))]
    regions = distinct_regions(steps)
    missing = [region for region in regions if not is_intact(region)]
    stats = CompileStats(distinct=len(regions))
    for place in filter(Path.exists, map(folder, missing)):
        warnings.warn(f"the compiled region in {place} is damaged and is compiled again", stacklevel=2)
    if missing:
        finished = 0
        if progress:
            progress(0, len(missing), "")

        def done(region: Region, compiled: bool) -> None:
            nonlocal finished
            finished += 1
            stats.compiled += compiled  # or another process was faster
            if progress:
                uses = regions[region]
                progress(finished, len(missing), uses[0].label + (f" (×{len(uses)})" if len(uses) > 1 else ""))

        inductor.compile_all(missing, max_workers=max_workers, done=done)
    stats.reused = stats.distinct - stats.compiled
    stats.seconds = time.perf_counter() - started
    return stats


def load(region: Region) -> inductor.CompiledRegion:
    """Load a region that the cache holds. Raises ``CompileError`` where it does not, or not whole."""
    if not is_intact(region):
        raise CompileError(
            explain(
                "a region is not in the cache, or damaged",
                where=str(folder(region)),
                hint="call compile_regions(program) first; all ranks must see the same GRAPHSRT_CACHE",
            )
        )
    return inductor.CompiledRegion(region, folder(region) / "region.so")


def folder(region: Region) -> Path:
    """Where the cache keeps (or will keep) a region."""
    return cache_dir() / "regions" / region_key(region)


def region_key(region: Region, device: str = "cpu") -> str:
    """The name of a region's cache entry: a hash of everything that its code depends on, in hexadecimal."""
    options = repr(sorted(inductor.OPTIONS.items()))
    facts = [
        f"format {FORMAT}",
        repr(sorted(map(str, inductor.INSTEAD))),
        repr(sorted(linear.SHIMS.values())),
        device,
        torch.__version__,
        options,
        _machine(),
        region.text,
    ]
    for name in sorted({call.target for call in region.calls}):
        target = target_from_name(name)
        facts.append(str(getattr(target, "_schema", name)))
        if target in ops.REFERENCE:
            facts.append(_source(ops.REFERENCE[target]))  # type: ignore[index]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:32]


def _source(function: Callable) -> str:
    """The file of a reference, since it calls others in there; its own code where there is no file."""
    file = inspect.getsourcefile(function)
    if file and os.path.exists(file):
        return _text(file)
    return repr((function.__code__.co_code, function.__code__.co_consts))


@functools.cache
def _text(file: str) -> str:
    return Path(file).read_text()


@functools.cache
def _machine() -> str:
    """Inductor compiles for this very processor, as g++'s -march=native does."""
    capability = torch.backends.cpu.get_cpu_capability()
    return "\n".join((platform.machine(), capability, os.environ.get("CXX", ""), _cpu_flags()))


def is_intact(region: Region) -> bool:
    """Whether the cache holds the region, whole. Loading a cut-off library can kill a process instead of raising."""
    place = folder(region)
    try:
        meta = json.loads((place / "meta.json").read_text())
        return hashlib.sha256((place / "region.so").read_bytes()).hexdigest() == meta["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def build(region: Region) -> bool:
    """Compile a region into the cache, in this process; True if it did, False if the entry was there by then."""
    place = folder(region)
    with writing("a compiled region", place):
        return _build(region, place)


def _build(region: Region, place: Path) -> bool:
    place.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(place.with_suffix(".lock")):
        if is_intact(region):
            return False
        if place.exists():
            shutil.rmtree(place)
        for stale in place.parent.glob(f"{place.name}.tmp-*"):  # of a process that was killed: nobody else has the lock
            shutil.rmtree(stale, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{place.name}.tmp-", dir=place.parent))
        try:
            started = time.perf_counter()
            inductor.compile_region(region, scratch / "region.so")
            (scratch / "region.txt").write_text(region.text)
            meta = {
                "sha256": hashlib.sha256((scratch / "region.so").read_bytes()).hexdigest(),
                "torch": torch.__version__,
                "seconds": round(time.perf_counter() - started, 2),
            }
            (scratch / "meta.json").write_text(json.dumps(meta, indent=1))
            os.replace(scratch, place)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return True
