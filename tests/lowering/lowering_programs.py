"""Tiny programs to lower: captured models, recognised but not sharded, and one by hand with paging and a collective."""

from __future__ import annotations

import functools
import hashlib
import operator
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from graphsrt import ops
from graphsrt.capture import capture, meta_model
from graphsrt.passes.normalize import normalize
from graphsrt.passes.recognize_gated_mlp import recognize_gated_mlp
from graphsrt.passes.recognize_rms_norm import recognize_rms_norm
from graphsrt.passes.recognize_rope import recognize_rope
from graphsrt.program import Input, Program, Weight, aten
from graphsrt.recipes import Ckpt, evaluate

CONTEXT = 512
ROOT = Path(__file__).parents[2]
SMALL = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": CONTEXT, "pad_token_id": 0,
}  # fmt: skip
KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {"sliding_window": 16, "query_pre_attn_scalar": 8}),
    "phi3": (Phi3Config, Phi3ForCausalLM, {}),
}


@functools.cache  # programs are only read here, and capturing takes seconds
def captured(kind: str, layers: int, dtype: torch.dtype) -> Program:
    config_class, model_class, extra = KINDS[kind]
    config = config_class(num_hidden_layers=layers, **SMALL, **extra)
    program = capture(meta_model(config, model_class, dtype), context_length=CONTEXT)
    normalize(program)
    for recognize in (recognize_rms_norm, recognize_rope, recognize_gated_mlp):
        recognize(program)
    program.infer()
    program.lint()
    return program


class RandomSource:
    """A checkpoint in which every tensor is random, the same for the same name in every dtype that it is read in."""

    def __init__(self, program: Program):
        self.program = program

    def shape(self, name: str) -> tuple[int, ...]:
        return self.program.weights[name].shape

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> torch.Tensor:
        assert slices is None
        generator = torch.Generator().manual_seed(int(hashlib.sha256(name.encode()).hexdigest()[:8], 16))
        shape = self.shape(name)
        value = torch.randn(shape, generator=generator)
        # Rounded once to bf16: programs of all dtypes then have the very same weights.
        return (1 + 0.1 * value if len(shape) == 1 else value * shape[-1] ** -0.5).bfloat16()


def weights_of(program: Program) -> dict[str, torch.Tensor]:
    source = RandomSource(program)
    return {name: evaluate(w.recipe, 0, source, w.dtype) for name, w in program.weights.items()}


def inputs_of(tokens: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return {
        "tokens": torch.randint(0, 97, (tokens,), generator=generator),
        "positions": torch.arange(tokens) % CONTEXT,
    }


def paged(dtype: torch.dtype, ranks: int = 2, *, summed: bool = True) -> Program:
    """One layer with fused q, k, v, the paged pool, a sum over ranks, and logits of the last tokens of sequences.

    ``summed=False`` leaves the sum out: a captured step is then compiled code throughout.
    """
    program = Program("paged", mesh={"tp": ranks})
    shapes = {
        "tokens": (("T",), torch.int64), "kv_pool": ((1, 2, 64, 2, 8), dtype), "req_to_token": ((4, 64), torch.int32),
        "req_pool_indices": (("B",), torch.int64), "seq_lens": (("B",), torch.int64),
        "query_start_loc": (("B+1",), torch.int64), "out_cache_loc": (("T",), torch.int64),
        "rows": (("R",), torch.int64),
    }  # fmt: skip
    value = {n: program.add_input(n, Input(s, d, "kv_pool" if n == "kv_pool" else n)) for n, (s, d) in shapes.items()}

    def weight(name: str, *shape: int) -> torch.fx.Node:
        return program.add_weight(name, Weight(shape, dtype, Ckpt(name)))

    call = program.call
    h = call(aten.embedding.default, weight("embed", 97, 48), value["tokens"], name="h")
    norm: dict[str, Any] = {"eps": 1e-5, "cast": "before_weight"}
    x = call(ops.rms_norm, h, weight("norm", 48), name="x", **norm)
    qkv = call(aten.linear.default, x, weight("qkv", 64, 48), name="qkv")
    part = {}
    for name, start, end, heads in (("q", 0, 32, 4), ("k", 32, 48, 2), ("v", 48, 64, 2)):
        part[name] = call(aten.slice.Tensor, qkv, 1, start, end, name=f"{name}_flat")
        part[name] = call(aten.view.default, part[name], [-1, heads, 8], name=name)
    batch = [value[n] for n in list(shapes)[1:-1]]
    attended = call(
        ops.radix_attention, part["q"], part["k"], part["v"], *batch, name="attended", layer_id=0, scale=8**-0.5
    )
    flat = call(aten.view.default, attended, [-1, 32], name="flat")
    total = call(ops.all_reduce, flat, name="total", axis="tp") if summed else flat
    out = call(aten.linear.default, total, weight("o", 48, 32), name="out")
    pair = call(ops.add_rms_norm, out, h, weight("norm_2", 48), name="pair", **norm)
    normed = call(operator.getitem, pair, 0, name="normed")
    rows = call(aten.index_select.default, normed, 0, value["rows"], name="last")
    program.graph.output(call(aten.linear.default, rows, weight("head", 97, 48), name="logits"))
    program.infer()
    return program


def environment(cache: Path) -> dict[str, str]:
    """For a fresh process that uses the cache of this test and can import this file."""
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent), *filter(None, sys.path)])
    return {**os.environ, "GRAPHSRT_CACHE": str(cache), "PYTHONPATH": path}
