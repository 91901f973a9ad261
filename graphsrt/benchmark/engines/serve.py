"""What the scripts beside this one share: they load a model and run prompts as lines of JSON on stdin tell them to.

This file imports nothing but the standard library: it runs in the environment of whichever engine is measured.

    {"do": "load", "model": "…", "threads": 2, "dtype": "bfloat16", "context": 8192, "batch": 32, …}
    {"do": "run", "prompts": [[1, 2, 3], …], "new": 64}

Answers are one line each: ``{"seconds": …}`` with what the function returned, or ``{"error": "…"}``; after a run also
``counters``, numbers that only grow, of an engine that has any.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any


def serve(
    load: Callable[..., tuple[Any, str]],
    run: Callable[[Any, list[list[int]], int], list[list[int]]],
    counters: Callable[[Any], dict[str, float]] = lambda _: {},
) -> None:
    """``load(model, **options)`` gives an engine and its version; ``run(engine, prompts, new)`` the new tokens.

    ``run`` generates exactly ``new`` tokens for each prompt, greedily, whatever tokens they are.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an engine prints must not get between the answers
    engine: Any = None
    for line in sys.stdin:
        asked = json.loads(line)
        start = time.perf_counter()
        try:
            if asked.pop("do") == "load":
                engine, version = load(**asked)
                answer: dict[str, Any] = {"version": version}
            else:
                tokens = run(engine, asked["prompts"], asked["new"])
                lengths = {len(row) for row in tokens}
                if lengths != {asked["new"]}:
                    raise RuntimeError(f"asked for {asked['new']} tokens of each prompt, got {sorted(lengths)}")
                answer = {"tokens": tokens, "counters": counters(engine)}
            answer["seconds"] = time.perf_counter() - start
        except Exception as error:  # noqa: BLE001 - the other end raises it, with these words
            answer = {"error": f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}"}
        print(json.dumps(answer), file=answers, flush=True)
