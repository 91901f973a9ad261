"""graphsrt: a plain Hugging Face causal LM, rewritten as one FX graph into a tensor-parallel, paged serving program.

    import graphsrt
    model = graphsrt.compile("smollm2", tp=3)
    print(model.generate(["Hello"], graphsrt.SamplingParams(max_new_tokens=64))[0].text)

Names are imported when they are first used, so that ``import graphsrt`` is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphsrt import ops as ops
    from graphsrt.api import CompiledModel as CompiledModel
    from graphsrt.api import Traced as Traced
    from graphsrt.api import compile as compile
    from graphsrt.api import trace as trace
    from graphsrt.api import verify as verify
    from graphsrt.passes import PIPELINE as PIPELINE
    from graphsrt.passes.rewriter import rewrite as rewrite
    from graphsrt.program import Program as Program
    from graphsrt.runtime.drafter import PromptLookup as PromptLookup
    from graphsrt.runtime.results import Generation as Generation
    from graphsrt.runtime.sampling_params import SamplingParams as SamplingParams
    from graphsrt.runtime.waiting_line import QueueFull as QueueFull

__version__ = "0.1.0"

_WHERE = {
    "compile": "graphsrt.api", "trace": "graphsrt.api", "verify": "graphsrt.api",
    "CompiledModel": "graphsrt.api", "Traced": "graphsrt.api",
    "Program": "graphsrt.program", "PIPELINE": "graphsrt.passes", "rewrite": "graphsrt.passes.rewriter",
    "SamplingParams": "graphsrt.runtime.sampling_params", "Generation": "graphsrt.runtime.results",
    "PromptLookup": "graphsrt.runtime.drafter", "QueueFull": "graphsrt.runtime.waiting_line",
    "GraphsrtError": "graphsrt.errors", "CompileError": "graphsrt.errors", "CheckpointError": "graphsrt.errors",
    "RankError": "graphsrt.errors",
}  # fmt: skip
_MODULES = ("ops", "testing", "passes", "models")

__all__ = ["__version__", *_WHERE, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(importlib.import_module(_WHERE[name]), name)
        globals()[name] = value  # over a submodule of the same name, if its import has bound one
        return value
    if name in _MODULES:
        return importlib.import_module(f"graphsrt.{name}")
    raise AttributeError(f"module 'graphsrt' has no attribute {name!r}")
