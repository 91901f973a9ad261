"""An engine as a process that loads a model and runs prompts when it is told to."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from graphsrt.errors import GraphsrtError, explain

OURS = "graphsrt"
PEERS = ("hf", "vllm", "llamacpp", "openvino")
_SCRIPTS = Path(__file__).parent / "engines"


@dataclass(frozen=True)
class EngineSpec:
    """Which engine, in which Python, on which model. ``options`` go to its ``load``."""

    name: str
    model: str
    python: str = sys.executable
    environment: tuple[tuple[str, str], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Ran:
    """Seconds of a run, the tokens of each prompt, and what the engine has counted so far, if it counts anything."""

    seconds: float
    tokens: list[list[int]]
    counters: dict[str, float]


class EngineError(GraphsrtError):
    """An engine said no, or ended."""


class EngineProcess:
    """One engine; it ends with the ``with`` block. Its own output goes to a file, shown if it fails."""

    def __init__(self, spec: EngineSpec):
        self.spec = spec
        self.version = ""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        env = {**os.environ, **dict(spec.environment), "TOKENIZERS_PARALLELISM": "false"}
        if spec.name == OURS:  # importable as it is here; other environments keep what is theirs
            env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [spec.python, str(_SCRIPTS / f"run_{spec.name}.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._log, text=True, env=env, start_new_session=True,
        )  # fmt: skip

    def load(self, **options: Any) -> float:
        """Load the model; seconds. EngineError with the engine's words if it does not."""
        answer = self._ask({"do": "load", "model": self.spec.model, **options, **dict(self.spec.options)})
        self.version = answer["version"]
        return answer["seconds"]

    def run(self, prompts: list[list[int]], new: int) -> Ran:
        """``new`` tokens of every prompt."""
        answer = self._ask({"do": "run", "prompts": prompts, "new": new})
        return Ran(answer["seconds"], answer["tokens"], answer["counters"])

    def peak_memory(self) -> int:
        """The most bytes that the process and its children have had resident, to be read while it does nothing.

        Pages that processes share are divided by the number of these (PSS). The kernel keeps the most for resident
        pages alone (VmHWM): what that was above now, this adds to the PSS of now. Looking on from outside while an
        engine runs would be in its way: each look walks all of its pages.
        """
        return sum(map(_peak_bytes, _family(self._process.pid)))

    def _ask(self, what: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps(what), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        answer = json.loads(line) if line else {"error": f"it ended with status {self._process.wait()}"}
        if "error" in answer:
            self._log.seek(0)
            said = self._log.read().decode(errors="replace").strip()[-1500:]
            raise EngineError(
                explain(f"{self.spec.name} failed to {what['do']} {self.spec.model}", where=self.spec.python,
                        got=answer["error"].strip() + (f"\n{said}" if said else ""),
                        hint=None if self.spec.name == OURS else "bench/peers.md says how to install it")
            )  # fmt: skip
        return answer

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()


def start_seconds(spec: EngineSpec, **options: Any) -> float:
    """From nothing to the first token: a new process, the imports, the model, a prompt of eight tokens."""
    start = time.perf_counter()
    with EngineProcess(spec) as engine:
        engine.load(**options)
        engine.run([[1, 2, 3, 4, 5, 6, 7, 8]], 1)
        return time.perf_counter() - start


def _family(pid: int) -> Iterable[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            children = (task / "children").read_text().split()
        except OSError:
            continue
        for child in map(int, children):
            yield from _family(child)


def _peak_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text() + Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has just ended
        return 0
    kilobytes = dict(re.findall(r"^(Pss|VmHWM|VmRSS):\s+(\d+) kB$", text, re.MULTILINE))
    if "Pss" not in kilobytes:  # it is ending
        return 0
    above = int(kilobytes["VmHWM"]) - int(kilobytes["VmRSS"])
    return (int(kilobytes["Pss"]) + max(0, above)) << 10
