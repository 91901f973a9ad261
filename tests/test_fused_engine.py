"""Through the whole engine, every fusion on against every fusion off: the same bits, in every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphsrt
from graphsrt import ops
from graphsrt.passes import PIPELINE
from graphsrt.passes.runner import pass_name
from tests.support import captures, fusing, tiny

FUSIONS = tuple(name for name in map(pass_name, PIPELINE) if name.startswith("fuse_"))
REDUCED = {"fuse_all_reduce_add_rms_norm", "fuse_rope_kv_write"}
FIRE: dict[str, set[str]] = {
    **{family: REDUCED for family in ("llama", "llama_tied", "qwen2", "qwen3", "mistral", "phi3", "mixtral")},
    "gemma2": {"fuse_add_rms_norm", "fuse_rope_kv_write"},
    "olmo2": {"fuse_rope_kv_write"},
    "gpt_neox": {"fuse_all_reduce_add_layer_norm", "fuse_rope_kv_write"},
}
"""Of each family on two ranks; on one there is no sum to begin with, and the smaller fusion takes its place."""


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", [*tiny.FAMILIES, *tiny.MORE])
def test_families(family: str, tp: int) -> None:
    """Prompts of several lengths, in chunks and beside one another, and tokens decoded after them."""
    how = (("max_tokens_per_step", 5),)
    fused = captures.compiled(family, 4, 2, tp, options=how)
    plain = captures.compiled(family, 4, 2, tp, options=(*how, ("without", FUSIONS)))
    fired = {report.name for report in fused.program().history if report.fired and report.name in FUSIONS}
    wanted = {name if tp > 1 else name.replace("all_reduce_", "") for name in FIRE[family]}
    assert wanted <= fired and not {report.name for report in plain.program().history} & set(FUSIONS)
    prompts = [tiny.tokens(count, seed=count) for count in (1, 7, 13)]
    params = graphsrt.SamplingParams(max_new_tokens=6, ignore_eos=True)
    with fusing.poisoned():
        for ids in prompts:
            assert torch.equal(fused.logits(ids), plain.logits(ids))
        found: list[Any] = [
            [result.token_ids for result in model.generate(prompts, params)] for model in (fused, plain)
        ]
    assert found[0] == found[1] and all(len(tokens) == 6 for tokens in found[0])


def test_all_operators_are_met() -> None:
    """The families together have every fused operator of models that are not rounded."""
    targets = {
        node.target
        for family in (*tiny.FAMILIES, *tiny.MORE)
        for tp in (1, 2)
        for node in captures.compiled(family, 4, 2, tp, options=(("max_tokens_per_step", 5),)).program().nodes
    }
    norms = {ops.add_rms_norm, ops.all_reduce_add_rms_norm, ops.add_layer_norm, ops.all_reduce_add_layer_norm}
    assert {*norms, ops.rope_kv_write, ops.silu_mul} <= targets
