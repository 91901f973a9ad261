"""Requests like those of users, out of this repository's own text, for stress.py and soak.py; memory of processes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import graphsrt

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Ask:
    """One request: its prompt, how it is sampled, and after how many of its events it is left (None: never)."""

    number: int
    prompt: list[int]
    params: graphsrt.SamplingParams
    shared: bool
    leave_after: int | None


class Traffic:
    """Draws requests from a seed. ``tokenizer``: the model's. Lengths are log-uniform: most short, some very long.

    A third begins with one of ``num_families`` prefixes and goes on in its own way; a tenth is left by its caller, some
    before their first token.
    """

    def __init__(self, tokenizer: Any, *, seed: int, longest: int, most_new: int, num_families: int = 16):
        self._random = random.Random(seed)
        self._longest, self._most_new = longest, most_new
        files = sorted(ROOT.glob("docs/*.md")) + sorted((ROOT / "graphsrt").glob("*.py"))
        self._tokens: list[int] = tokenizer("\n".join(file.read_text() for file in files))["input_ids"]
        spans = [self._random.randint(longest // 5, longest // 2) for _ in range(num_families)]
        self._prefixes = [self._window(span) for span in spans]
        self._count = 0

    def ask(self, **params: Any) -> Ask:
        """The next request; ``params`` of ``SamplingParams`` over the drawn ones."""
        draw = self._random
        shared = draw.random() < 1 / 3
        if shared:
            prefix = draw.choice(self._prefixes)
            prompt = prefix + self._window(self._length(max(self._longest // 10, 1)))
        else:
            prompt = self._window(self._length(self._longest))
        new = draw.randint(1, self._most_new)
        leave_after = draw.randint(0, new) if draw.random() < 0.1 else None
        own = graphsrt.SamplingParams(**{"max_new_tokens": new, "ignore_eos": True, **params})
        self._count += 1
        return Ask(self._count - 1, prompt, own, shared, leave_after)

    def _length(self, longest: int) -> int:
        return min(int(longest ** self._random.random()), longest)

    def _window(self, length: int) -> list[int]:
        start = self._random.randrange(len(self._tokens) - length)
        return self._tokens[start : start + length]


def proportional_bytes() -> int:
    """Memory of this process and its children, each page divided by the number of processes that share it (PSS)."""
    total = 0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:  # a compiler that has just ended
            continue
    return total


def leftovers(model: graphsrt.CompiledModel) -> list[str]:
    """What is still held once nothing runs: empty if all is well. Cached prefixes are given up first."""
    engine = model.engine
    assert engine is not None
    engine.flush_cache()
    now, scheduler = model.metrics(), engine.scheduler
    found = []
    if now.num_running or now.num_waiting:
        found.append(f"{now.num_running} requests running, {now.num_waiting} waiting")
    if now.pages_used or now.pages_cached:
        found.append(f"{now.pages_used} pages held, {now.pages_cached} cached")
    if scheduler.req_to_token.available != scheduler.req_to_token.max_requests:
        found.append(
            f"{scheduler.req_to_token.max_requests - scheduler.req_to_token.available} rows of req_to_token held"
        )
    ended = now.num_finished + now.num_cancelled + now.num_expired + now.num_failed
    if ended != now.num_requests:
        found.append(f"{now.num_requests} requests added, {ended} ended")
    return found


def table(rows: list[tuple[str, ...]]) -> str:
    """Rows as a Markdown table, the first being the head."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
