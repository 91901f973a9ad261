"""What `graphsrt bench` does between its options and its output."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from graphsrt.benchmark.engine_process import OURS, PEERS, EngineSpec
from graphsrt.benchmark.measure import Bench, Case, Told, measure
from graphsrt.errors import explain


def bench(
    model: Any,
    cases: Sequence[Case],
    *,
    peers: Sequence[str] = (),
    pythons: Mapping[str, str] | None = None,
    models: Mapping[str, str] | None = None,
    dtype: str = "bfloat16",
    threads: int = 2,
    tp: int = 1,
    quantize: str | None = None,
    rounds: int = 5,
    new: int = 33,
    starts: bool = True,
    told: Told = lambda _: None,
) -> Bench:
    """Measure this engine and ``peers`` on a model: a folder, a name, or a config, which gets random weights.

    ``pythons``: peer -> the interpreter of the environment that it is installed in (default this one). ``models``: peer
    -> its own form of the model, such as a GGUF file. ``quantize``: as this engine's ``compile`` has it; peers get the
    model as it is. ValueError for an unknown peer and for cases that cannot be.
    """
    from graphsrt.api import trace
    from graphsrt.models import smollm2

    pythons, models = pythons or {}, models or {}
    for name in (*peers, *pythons, *models):
        if name not in PEERS:
            raise ValueError(explain(f"no peer is called {name!r}", expected=", ".join(PEERS)))
    for case in cases:
        if hasattr(case, "context") and case.context <= new:
            raise ValueError(
                explain(f"a context of {case.context} tokens is too short to decode {new} of them",
                        hint="raise --contexts or lower --new")
            )  # fmt: skip
    with ExitStack() as temporary:
        if not isinstance(model, str):
            model = random_checkpoint(model, temporary.enter_context(tempfile.TemporaryDirectory()), dtype)
        folder = str(smollm2.model_folder()) if model == "smollm2" else model
        program = trace(folder, dtype=dtype, quantize=quantize).program()
        specs = [EngineSpec(OURS, folder, options=(("quantize", quantize),) if quantize else ())]
        specs += [EngineSpec(name, models.get(name, folder), pythons.get(name, sys.executable)) for name in peers]
        found = measure(
            specs, cases, program, dtype=dtype, threads=threads, tp=tp, rounds=rounds, new=new, starts=starts, told=told
        )
    found.model, found.quantize = model, quantize
    return found


def random_checkpoint(config: Any, folder: str, dtype: str) -> str:
    """A checkpoint of a config, with random weights; its folder."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    target = Path(folder) / "random"
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(target)
    return str(target)
