"""docs/fusions.md: where each fusion fires in models of published sizes on eight ranks, and why not elsewhere.

    python -m graphsrt.passes.document_fusions > docs/fusions.md

Layers repeat, so three of each model's are traced: the first, the last, and one between, which stands for all others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from graphsrt.passes import PIPELINE
from graphsrt.passes.runner import pass_name
from graphsrt.program import PassReport, layer_of

TP, LAYERS = 8, 3
SCATTER = "scatter_residual"
FUSIONS = [SCATTER, *(pass_name(function) for function in PIPELINE if pass_name(function).startswith("fuse_"))]
_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}

HEADER = """\
# Fusions

Written by `python -m graphsrt.passes.document_fusions > docs/fusions.md`. Models have the sizes of published ones, on
eight ranks; no weights are read. A *site* is a place that a fusion is about: a norm, a sum over ranks, a rounding to
FP8, an attention whose heads are normed, or whose keys are rotated and written, a gated unit. Each site fires or has a
reason. `graphsrt explain MODEL PASS` says the same of any model, value by value, and `without=["fuse_…"]` (`--without`)
turns a fusion off. `scatter_residual` stands for the prefill program, the others for the one that decodes.

Whoever runs a program takes `all_reduce_…` apart again where nothing does all of it (`lowering/decompose.py`): the sum
is a collective, and what follows it is compiled with its neighbours. On CPUs every fused operator is compiled from its
definition, so that none is slower than what it takes the place of, and the attention's kernel writes the keys that
`rope_kv_write` would. On CUDA devices norms, gated units and rotations with what is fused to them run the Triton
kernels in `lowering/kernels/{rms_norm,silu_mul,rope}`; `python -m graphsrt.lowering.kernels.rms_norm.resources` prints
registers and spills, likewise of the others. On any device, results are bitwise those of the definitions' parts but for
the order of sums.
"""


@dataclass(frozen=True)
class Model:
    """A published size: its model type, its number of layers, and what its config says otherwise."""

    name: str
    model_type: str
    layers: int
    config: dict[str, Any]


_LLAMA: dict[str, Any] = {"vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}
_LLAMA_8B = {**_LLAMA, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
             "intermediate_size": 14336}  # fmt: skip
_LLAMA_70B = {**_LLAMA, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8,
              "intermediate_size": 28672}  # fmt: skip
_QWEN3_32B = {"vocab_size": 151936, "hidden_size": 5120, "num_attention_heads": 64, "num_key_value_heads": 8,
              "head_dim": 128, "intermediate_size": 25600, "max_position_embeddings": 8192}  # fmt: skip
_GEMMA2_9B = {"vocab_size": 256000, "hidden_size": 3584, "num_attention_heads": 16, "num_key_value_heads": 8,
              "head_dim": 256, "intermediate_size": 14336, "query_pre_attn_scalar": 256}  # fmt: skip

MODELS = [
    Model("Llama-3.1-8B", "llama", 32, _LLAMA_8B),
    Model("Llama-3.1-70B", "llama", 80, _LLAMA_70B),
    Model("Qwen3-32B", "qwen3", 64, _QWEN3_32B),
    Model("Gemma-2-9B", "gemma2", 42, _GEMMA2_9B),
    Model("Llama-3.1-8B in FP8, blocks of 128", "llama", 32, {**_LLAMA_8B, "quantization_config": _BLOCKS}),
    Model("Qwen3-32B in FP8, blocks of 128", "qwen3", 64, {**_QWEN3_32B, "quantization_config": _BLOCKS}),
]


@dataclass
class Line:
    """One fusion in one model of which three layers were traced."""

    name: str
    fired: int = 0
    fired_in_a_layer: int = 0
    missed: int = 0
    missed_in_a_layer: int = 0
    reasons: dict[tuple[str, str], None] = field(default_factory=dict)
    """(where, why not), each once."""

    def in_all(self, layers: int) -> tuple[int, int]:
        """(sites, fired) in a model of so many layers."""
        more = layers - LAYERS
        fired = self.fired + more * self.fired_in_a_layer
        return fired + self.missed + more * self.missed_in_a_layer, fired


@cache
def _traced(index: int) -> list[Line]:
    from transformers import AutoConfig

    from graphsrt.api import trace

    model = MODELS[index]
    config = AutoConfig.for_model(model.model_type, num_hidden_layers=LAYERS, **model.config)
    traced = trace(config, tp=TP, dtype="bfloat16", context_length=1024)
    prefill = [report for report in traced.program(phase="prefill").history if report.name == SCATTER]
    history = [*prefill, *(report for report in traced.program().history if report.name != SCATTER)]
    found = [_line(report) for report in history if report.name in FUSIONS]
    return [line for line in found if line.fired or line.missed]


def lines(model: Model) -> list[Line]:
    """The fusions that have a site in the model, which is one of :data:`MODELS`."""
    return _traced(MODELS.index(model))


def _line(report: PassReport) -> Line:
    inner = LAYERS // 2
    line = Line(report.name, fired=report.fired, missed=len(report.near_misses))
    line.fired_in_a_layer = sum(_layer(site.node) == inner for site in report.sites)
    for miss in report.near_misses:
        layer = _layer(miss.node)
        line.missed_in_a_layer += layer == inner
        place = _without_layer(miss.node)
        line.reasons[("each layer: " if layer == inner else "") + place, _without_layer(miss.reason)] = None
    each = {(place.removeprefix("each layer: "), why) for place, why in line.reasons if place.startswith("each ")}
    line.reasons = {key: None for key in line.reasons if key not in each}  # of the first and the last layer as well
    return line


def _layer(name: str) -> int | None:
    return layer_of(name) if name.startswith("layers.") else None


def _without_layer(text: str) -> str:
    return re.sub(r"\blayers\.\d+\.", "", text)


def section(model: Model) -> str:
    """The table of one model."""
    text = [
        f"## {model.name}\n",
        f"{model.layers} layers.\n",
        "| fusion | sites | fired | in a layer | why not |",
        "|---|---|---|---|---|",
    ]
    for line in lines(model):
        sites, fired = line.in_all(model.layers)
        why = "<br>".join(f"`{place}`: {reason}" if ": " not in place else _each(place, reason)
                          for place, reason in line.reasons)  # fmt: skip
        text.append(f"| {line.name} | {sites} | {fired} | {line.fired_in_a_layer} | {why} |")
    return "\n".join(text) + "\n"


def _each(place: str, reason: str) -> str:
    return f"each layer's `{place.removeprefix('each layer: ')}`: {reason}"


def document() -> Iterator[str]:
    """The page, in pieces."""
    yield HEADER
    for model in MODELS:
        yield section(model)


if __name__ == "__main__":
    for piece in document():
        print(piece)
