"""Passes that run in one phase: two programs of a model, which of them has what, and which runs a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphsrt
from graphsrt import ops
from graphsrt.errors import CompileError
from graphsrt.passes import PIPELINE
from graphsrt.passes.runner import MANY_TOKENS, pass_name, select
from graphsrt.program import PREFILL_MIN_TOKENS, Program, aten
from tests.support import captures, tiny


def traced(**options: Any) -> graphsrt.Traced:
    with captures.shared():
        return graphsrt.trace(tiny.config("llama"), tp=2, dtype="float64", **options)


@pytest.mark.parametrize("phase, other", [("prefill", "decode"), ("decode", "prefill")])
def test_a_fusion_is_left_out_of_one_phase(phase: str, other: str) -> None:
    model = traced(without=[f"fuse_silu_mul:{phase}", f"fuse_rope_kv_write:{phase}"])
    for target, joined in ((ops.glu, ops.silu_mul), (ops.rope, ops.rope_kv_write)):
        assert model.program(phase=phase).calls(target) and not model.program(phase=phase).calls(joined)
        assert model.program(phase=other).calls(joined) and not model.program(phase=other).calls(target)
    assert model.program(phase="prefill").constants[PREFILL_MIN_TOKENS] == MANY_TOKENS
    assert PREFILL_MIN_TOKENS not in model.program().constants
    assert f"prefill, in steps of {MANY_TOKENS} tokens or more" in model.summary()
    ran = {name: model.stages_of(name).names for name in ("prefill", "decode")}
    assert "fuse_silu_mul" in ran[other] and "fuse_silu_mul" not in ran[phase]
    assert "fuse_add_rms_norm" in ran[phase] and "fuse_add_rms_norm" in ran[other]


def test_left_out_of_both() -> None:
    for without in (["fuse_silu_mul"], ["fuse_silu_mul:prefill", "fuse_silu_mul:decode"]):
        model = traced(without=without)
        assert model.stages.prefill is None and not model.program().calls(ops.silu_mul)
    names = [pass_name(p) for p in select(PIPELINE, without=["scatter_residual:prefill"])]
    assert "scatter_residual" not in names  # it is for no other
    assert select(PIPELINE, without=["scatter_residual:decode"]) == PIPELINE


def test_a_step_runs_the_program_of_its_phase() -> None:
    """The engine gives the same numbers, whichever program a step runs."""
    ids = tiny.tokens(40, seed=3)

    def negate(program: Program) -> int:
        out = program.output
        new = program.call(aten.neg.default, out, name="negated", before=out.next, like=out)
        new.meta["placement"] = out.meta["placement"]
        out.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        return 1

    negate.phase = "decode"  # type: ignore[attr-defined]
    how: dict[str, Any] = {"tp": 2, "ranks": "simulated", "dtype": torch.float64}
    with captures.shared():
        with graphsrt.compile(tiny.model("llama"), passes=[*PIPELINE, negate], **how) as model:
            model.program(phase="prefill")
            negated = model.logits(ids)
        with graphsrt.compile(tiny.model("llama"), without=["fuse_silu_mul:decode"], **how) as model:
            plain = model.logits(ids)
    assert torch.equal(negated, -plain)  # 40 tokens are not yet many


def test_mistakes() -> None:
    with pytest.raises(ValueError, match=r"no phase is called 'encode'(?s:.*)prefill, decode"):
        traced(without=["fuse_silu_mul:encode"])
    with pytest.raises(ValueError, match="no pass is called 'fuse_silu'"):
        traced(without=["fuse_silu:decode"])

    def lost(program: Program) -> int:
        return 0

    lost.phase = "both"  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="lost is for no phase that there is"):
        traced(passes=[*PIPELINE, lost])


def test_both_phases_have_the_same_weights() -> None:
    """A recipe that one phase alone has would load a weight twice; leaving a merge out of one phase does that."""
    with pytest.raises(CompileError, match="prefill and decode want different weights"):
        traced(without=["merge_gate_up:prefill"])
