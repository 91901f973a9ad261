"""scatter_residual: the text of what is divided, numbers with NaN in the padding, the reckoning, the refusals."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import graphsrt
from graphsrt import ops
from graphsrt.check_placements import check_placements
from graphsrt.devices import DEVICES
from graphsrt.errors import CompileError
from graphsrt.passes import PIPELINE, merge_gate_up, quantize_linears, shard_tensor_parallel
from graphsrt.passes.runner import pass_name, run, run_phases
from graphsrt.passes.scatter_residual import scatter_residual
from graphsrt.passes.token_cut import TokenGraph, divide
from graphsrt.placement import ShardTokens
from graphsrt.program import PREFILL_MIN_TOKENS, NearMiss, Program
from graphsrt.testing import check, trace
from tests.passes.test_quantize_linears import mlp
from tests.support import captures, tiny
from tests.support.fp8 import source, stored

always = functools.partial(scatter_residual, min_tokens=1)


def before(family: str = "llama", tp: int = 2, **options: object) -> Program:
    return captures.before("scatter_residual", family, tp=tp, **options)


def test_text() -> None:
    """Of two layers the first: what follows the last attention is not computed for all tokens."""
    done = check(always, before(layers=2), fires=3, tolerance=0)
    lines = done.after.splitlines()
    divided = [line.partition(" = ") for line in lines if "T/2" in line]
    assert [(name, text.partition("(")[0]) for name, _, text in divided] == [
        ("embed_tokens.reduce_scatter: f64[T/2, 48] S(0)", "graphsrt.reduce_scatter"),
        ("layers.0.input_layernorm: f64[T/2, 48] S(0)", "graphsrt.rms_norm"),
        ("layers.0.self_attn.o_proj.reduce_scatter: f64[T/2, 48] S(0)", "graphsrt.reduce_scatter"),
        ("layers.0.add: f64[T/2, 48] S(0)", "aten.add.Tensor"),
        ("layers.0.post_attention_layernorm: f64[T/2, 48] S(0)", "graphsrt.rms_norm"),
        ("layers.0.mlp.down_proj.reduce_scatter: f64[T/2, 48] S(0)", "graphsrt.reduce_scatter"),
        ("layers.0.add_1: f64[T/2, 48] S(0)", "aten.add.Tensor"),
    ]
    assert [line for line in lines if "all_gather" in line] == [
        f'{name}.all_tokens: f64[T, 48] R = graphsrt.all_gather({name}, dim=0, axis="tp", size=2, rows_of=tokens)'
        for name in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "layers.0.add_1")
    ]
    assert str(Program.from_text(str(done.program))) == str(done.program)


@pytest.mark.parametrize(("family", "tp"), [("llama", 3), ("gemma2", 4), ("gpt_neox", 2), ("mixtral", 2)])
def test_numbers(family: str, tp: int) -> None:
    """Bitwise what the program computed before, with fewer tokens than ranks, one more, and one token.

    Simulated ranks pad with NaN, so whoever read a padding row would be found out. Experts multiply all rows that are
    routed to them at once, and so do not depend on what is scattered either.
    """
    whole = before(family, tp=tp, layers=2)
    check(always, whole, tolerance=0, tokens=sorted({1, tp - 1, tp, tp + 1, 37}))


def test_two_norms_of_one_sum() -> None:
    """A parallel block reads one residual through two norms: one gather of the sum is cheaper than one of each norm."""
    done = check(always, before("gpt_neox", tp=2, layers=2), tolerance=0, tokens=(3,))
    gathers = [str(node.args[0]) for node in done.program.calls(ops.all_gather)]
    assert len(gathers) == len(done.program.calls(ops.reduce_scatter)), gathers


def test_what_is_gathered_is_quantised() -> None:
    """Eight bits of a value are gathered instead of all, with one scale for each token."""

    def two_blocks(x: Any, norm: Any, g0: Any, u0: Any, d0: Any, b0: Any, g1: Any, u1: Any, d1: Any, b1: Any) -> Any:
        total = x + mlp(x, g0, u0, d0, b0)
        return total + mlp(ops.rms_norm(total, norm, eps=1e-5, cast="before_weight"), g1, u1, d1, b1)

    one = {"g": (54, 38), "u": (54, 38), "d": (38, 54), "b": (38,)}
    shapes = {"norm": (38,), **{f"{name}{block}": shape for block in "01" for name, shape in one.items()}}
    plain = stored(trace(two_blocks, inputs={"x": ("T", 38)}, weights=shapes, tp=3), "token")
    whole = run(plain, [shard_tensor_parallel, merge_gate_up, quantize_linears]).final
    done = check(always, whole, tolerance=0, tokens=(1, 2, 3, 4, 7), source=source(plain))
    gathered = {node.name: node.meta["val"].dtype for node in done.program.calls(ops.all_gather)}
    assert gathered["rms_norm.fp8.all_tokens"] == torch.float8_e4m3fn
    assert gathered["rms_norm.scale.all_tokens"] == torch.float32 and "rms_norm.all_tokens" not in gathered


def test_every_stage_of_both_phases() -> None:
    report = graphsrt.verify(tiny.config("gemma2", 4, 2), tp=2)
    report.raise_if_bad()
    parted = [stage for stage in report.stages if stage.name.endswith(" (prefill)")]
    tail = PIPELINE[PIPELINE.index(scatter_residual) :]
    assert [stage.name for stage in parted] == [f"{pass_name(function)} (prefill)" for function in tail]
    assert all(stage.num_compared > 50 for stage in parted)


def test_hidden_states_are_whole() -> None:
    config = tiny.config("llama", layers=2)
    traced = graphsrt.trace(
        config, tp=2, dtype=torch.float64, capture_hidden=[1], passes=[always if f is scatter_residual else f
                                                                    for f in PIPELINE],
    )  # fmt: skip
    program = traced.program(phase="prefill")
    assert PREFILL_MIN_TOKENS in program.constants and PREFILL_MIN_TOKENS not in traced.program().constants
    check_placements(program)
    assert str(program.outputs["hidden_1"].meta["placement"]) == "R"
    assert traced.diff("scatter_residual") and "reduce_scatter" not in str(traced.program(phase="decode"))
    assert "scatter_residual" in traced.summary()


# -- the reckoning -----------------------------------------------------------------------------------------------------


def test_from_how_many_tokens_on() -> None:
    """By hand: two layers of a llama kin, float64, two ranks; the sums of the embedding and of the first layer."""
    program, device = before(layers=2), DEVICES["a100"]
    division = divide(TokenGraph(program, 2, device, None))
    width = 48 * 8
    # of two norms, each reads a row and writes one, and two additions, each reads two and writes one, half is saved
    assert division.saved.memory_bytes == (2 * 2 + 2 * 3) * width / 2
    # a reduce-scatter and a gather for each all-reduce, all of the same width
    assert division.saved.sent_bytes == 0
    assert division.saved.collectives == -len(division.reductions) == -3
    seconds = division.saved.memory_bytes / device.memory_bandwidth
    assert division.least_tokens(device) == math.ceil(3 * device.link_latency_s / seconds)


def test_it_does_not_pay() -> None:
    """A model this small never does, and says so."""
    misses: list[NearMiss] = []
    notes: list[str] = []
    program = before(layers=2)
    assert scatter_residual(program, near_misses=misses, notes=notes) == 0
    whole = [miss.node for miss in misses if miss.reason == "its rows are not the tokens of the step"]
    assert whole == [f"layers.1.{name}.all_reduce" for name in ("self_attn.o_proj", "mlp.down_proj")]
    assert len(misses) == 5 and all("more" in miss.reason for miss in misses if miss.node not in whole), misses
    large = replace(DEVICES["h200"], link_latency_s=1e-12)
    report = run(before(layers=2), [functools.partial(scatter_residual, device=large)]).final.history[-1]
    assert report.fired == 3 and "pays from 1 tokens on" in report.notes[0], report.notes
    once = before(tp=1)
    assert scatter_residual(once, near_misses=misses) == 0


def test_one_program_where_nothing_parts() -> None:
    stages = run_phases(before(), PIPELINE[PIPELINE.index(scatter_residual) :])
    assert stages.prefill is None and "scatter_residual" in stages.names
    both = run_phases(before(), [always, *PIPELINE[PIPELINE.index(scatter_residual) + 1 :]])
    assert both.prefill is not None and "scatter_residual" not in both.names
    assert both.prefill.programs[0][1] is both.programs[0][1]
    assert set(both.prefill.final.weights) == set(both.final.weights)


# -- what the checker refuses ------------------------------------------------------------------------------------------

STEP = """program x {tp: 3}
constants context_length=8

inputs:
  tokens: i64[T] R = input("tokens")
  x: f32[T, 12] R = input("x")

weights:
  w: f32[12] R = ckpt("w")

step:
  own: f32[T/3, 12] S(0) = graphsrt.take_own(x, dim=0, axis="tp", size=3)
  %s
"""
BAD = {
    "treat each alone": "c: f32[T/3, 12] S(0) = aten.cumsum(own, 0)\n  return c",
    "works along the tokens": "c: f32[1, 12] S(0) = aten.sum.dim_IntList(own, [0], True)\n  return c",
    "not whole on every rank": "c: f32[T/3, 12] S(0) = aten.mul.Tensor(own, w)\n  return c",
    "gathered with the number of all": 'c: f32[3*T/3, 12] R = graphsrt.all_gather(own, dim=0, axis="tp", size=3)\n'
    "  return c",
    "only a sum that is not complete": 'c: f32[T, 12] R = graphsrt.all_reduce(own, axis="tp", op="sum")\n  return c',
    "another number of ranks": 'c: f32[T, 12] R = graphsrt.all_gather(own, dim=0, axis="tp", size=2, rows_of=tokens)\n'
    "  return c",
}


@pytest.mark.parametrize("reason", BAD)
def test_refused(reason: str) -> None:
    lines = STEP % BAD[reason]
    with pytest.raises(CompileError, match=reason):
        check_placements(_as_written(lines))


def _as_written(text: str) -> Program:
    """The program, whatever types its declarations claim: only placements are under test here."""
    import re

    program = Program.from_text(re.sub(r": f32\[[^=]*\] (R|S\(0\)) = (?=aten|graphsrt.all)", ": ? = ", text))
    for node in program.nodes[1:]:
        node.meta["placement"] = ShardTokens(3) if "S(0) = " in text.splitlines()[-2] else node.meta.get("placement")
    return program
