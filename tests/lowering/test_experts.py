"""Experts in the lowered engine: routers are compiled, the experts run between regions."""

from __future__ import annotations

import graphsrt
from graphsrt import ops
from graphsrt.lowering.regions import OperatorStep, RegionStep, cut
from tests.support import mixtures, tiny


def test_a_mixture_through_inductor() -> None:
    """Groups of experts, a correction bias and a shared expert, in float32, in chunks of 11 tokens."""
    net = mixtures.build("dots1", num_hidden_layers=1, first_k_dense_replace=0).float()
    prompts = [tiny.tokens(13, seed=1), tiny.tokens(1, seed=2)]
    with graphsrt.compile(net, tp=1, dtype="float32", max_tokens_per_step=11, max_running=2) as model:
        steps = cut(model.program())
        alone = [step.node.target for step in steps if isinstance(step, OperatorStep)]
        assert alone.count(ops.moe_experts) == 1
        compiled = [call.target for step in steps if isinstance(step, RegionStep) for call in step.region.calls]
        assert "aten.topk" in compiled and "graphsrt.moe_experts" not in compiled
        for ids, got in zip(prompts, model.logits(prompts)):
            # float32 has 24 bits, and sums run in another order than transformers'
            assert tiny.worst(got, tiny.eager_logits(net, ids)) <= 1e-4
