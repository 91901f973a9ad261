"""Run the comparison over many architectures, each in a process of its own, and keep every row as soon as it is there.

A crash, a hang or a model that eats memory is a row that says so. Rows go to a JSON-lines file with a key made from
the versions and from the text of this package; a later run takes rows with the same key from it.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import logging
import multiprocessing
import os
import resource
import signal
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tqdm import tqdm

from graphsrt.coverage import table
from graphsrt.coverage.table import Line
from graphsrt.errors import explain

_PRELOAD = ["graphsrt.coverage.measure", "transformers.models.auto.modeling_auto"]


@dataclass(frozen=True)
class Job:
    """What one process measures."""

    model_type: str
    sizes: str
    tps: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.model_type} {self.sizes} tp {','.join(map(str, self.tps))}"


def run_key() -> dict[str, str]:
    """Versions of what decides about a result, and a hash of this package's own text."""
    import torch
    import transformers

    import graphsrt

    root = Path(graphsrt.__file__).parent
    digest = hashlib.sha256()
    for file in sorted([*root.rglob("*.py"), *root.rglob("*.cpp")]):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return {
        "graphsrt": graphsrt.__version__,
        "text": digest.hexdigest()[:16],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


class Results:
    """The JSON-lines file: one row a line, the newest of a job counts."""

    def __init__(self, path: Path):
        self.path = path
        self.key = run_key()
        self.rows: dict[str, Line] = {}

    def read(self, *, any_version: bool = False) -> None:
        """Take the rows of earlier runs that have this run's key, or all of them. A line that was cut off is left."""
        if not self.path.exists():
            return
        for text in self.path.read_text().splitlines():
            try:
                item = json.loads(text)
            except json.JSONDecodeError:  # the run that wrote it was ended in the middle of the line
                continue
            if any_version or item["key"] == self.key:
                self.rows[item["job"]] = item["row"]

    def add(self, job: Job, row: Line) -> None:
        """Write a row to the end of the file and keep it."""
        self.rows[job.name] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps({"key": self.key, "job": job.name, "row": row}) + "\n")


def run_jobs(
    jobs: Sequence[Job],
    results: Results,
    *,
    processes: int = 1,
    timeout_s: float = 300.0,
    memory_bytes: int = 12 << 30,
    told: Any = None,
) -> None:
    """Measure ``jobs`` in processes of their own, ``processes`` at a time; ``told(job, row)`` hears of every row."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    waiting = list(reversed(jobs))
    running: dict[Connection, tuple[Job, Any, float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                job = waiting.pop()
                mine, theirs = context.Pipe(duplex=False)
                child = context.Process(target=_child, args=(theirs, job, memory_bytes), daemon=True)
                child.start()
                theirs.close()
                running[mine] = (job, child, time.monotonic() + timeout_s)
            until = min(deadline for _, _, deadline in running.values())
            ready = wait(list(running), timeout=max(0.0, until - time.monotonic()))
            now = time.monotonic()
            for connection in [c for c, (_, _, deadline) in running.items() if c in ready or now >= deadline]:
                job, child, _ = running.pop(connection)
                row = _received(connection, child, job, timeout_s, is_late=connection not in ready)
                results.add(job, row)
                if told is not None:
                    told(job, row)
    finally:
        for _, child, _ in running.values():
            child.kill()
            child.join()


def _received(connection: Connection, child: Any, job: Job, timeout_s: float, *, is_late: bool) -> Line:
    """The row that a child sent, or one that says how it ended instead; ``is_late``: by us, at its deadline."""
    row: Line | None = None
    with connection, contextlib.suppress(EOFError):
        if connection.poll():
            row = connection.recv()
    if row is not None:
        child.join()
        return row
    if not is_late:
        child.join(0.2)  # a pipe that closed is a moment ahead of the process's end
    if is_late or child.exitcode is None:  # a late one may find our end closed, and end of that
        child.kill()
        child.join()
        why = f"no result after {timeout_s:.0f} s"
    elif child.exitcode < 0:
        why = f"the process was ended by {signal.Signals(-child.exitcode).name}"
    else:
        why = f"the process ended with status {child.exitcode}"
    return {"model_type": job.model_type, "class_name": "", "sizes": job.sizes, "kind": "?", "mechanisms": [], "tp": {},
            "refused": why, "crashed": True, "seconds": 0.0}  # fmt: skip


def _child(connection: Connection, job: Job, memory_bytes: int) -> None:
    """Measure one job; what libraries print goes nowhere, since the row says what is to be said."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    import torch

    from graphsrt.coverage.measure import measure

    gc.disable()  # the process is short, and a collection would copy every page that it shares with its parent
    torch.set_num_threads(1)
    connection.send(json.loads(json.dumps(measure(job.model_type, job.sizes, job.tps).as_json())))
    connection.close()


def cover(
    *,
    only: Sequence[str] = (),
    tps: Sequence[int] = (1, 2, 4, 8),
    heads: Sequence[str] = ("8/4",),
    processes: int = 1,
    timeout_s: float = 300.0,
    results: Path | None = None,
    fresh: bool = False,
    markdown: Path | None = None,
    reasons: bool = False,
) -> str:
    """Measure what is not yet measured by this very version, and return the table as text.

    ``only``: model types, default all. ``heads``: names of :data:`graphsrt.coverage.tiny_config.SIZES`. ``results``:
    the JSON-lines file. ``fresh``: take nothing from it. ``markdown``: a file for the table as documentation.
    ``reasons``: what is not ok, grouped. ValueError for a model type or head counts that there are not.
    """
    from graphsrt.cache import cache_dir
    from graphsrt.coverage.tiny_config import SIZES

    for name in heads:
        if name not in SIZES:
            raise ValueError(explain(f"no tiny sizes are called {name!r}", expected=", ".join(SIZES)))
    decoders, apart = select_architectures(only)
    kept = Results(results if results is not None else cache_dir() / "coverage.jsonl")
    if not fresh:
        kept.read()
    jobs = [Job(one, name, tuple(tps)) for name in heads for one in decoders]
    missing = [job for job in jobs if job.name not in kept.rows]
    with tqdm(total=len(jobs), initial=len(jobs) - len(missing), unit="model", desc="coverage") as bar:

        def told(job: Job, row: Line) -> None:
            bar.set_postfix_str(f"{job.model_type}: {table.status(row)}", refresh=False)
            bar.update()

        run_jobs(missing, kept, processes=processes, timeout_s=timeout_s, told=told)
    rows = [kept.rows[job.name] for job in jobs]
    if markdown is not None:
        markdown.write_text(table.markdown(rows, apart, kept.key, time.strftime("%Y-%m-%d")), encoding="utf-8")
    parts = [table.text_table(rows), table.counts_text(rows)]
    if reasons:
        parts.append(table.grouped_reasons(rows))
    return "\n\n".join(part for part in parts if part)


def select_architectures(only: Iterable[str] = ()) -> tuple[list[str], list[tuple[str, str]]]:
    """Decoder-only model types to measure, and (type, reason) of those that stand apart. ValueError for a type that
    transformers does not have."""
    from graphsrt.coverage.architectures import architectures

    known = architectures()
    names = {one.model_type for one in known}
    wanted = list(only)
    for name in wanted:
        if name not in names:
            raise ValueError(explain(f"transformers has no causal LM {name!r}", hint="use a model_type such as llama"))
    chosen = [one for one in known if not wanted or one.model_type in wanted]
    return (
        [one.model_type for one in chosen if one.apart is None],
        [(one.model_type, one.apart) for one in chosen if one.apart is not None],
    )
