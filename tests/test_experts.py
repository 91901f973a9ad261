"""Mixtures of experts: the operator, and whole models divided by width and by expert, against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from graphsrt import ops
from graphsrt.placement import Partial, Replicate, Shard
from tests.support import mixtures, tiny

TOKENS = (1, 2, 7, 37)


def test_the_operator_is_a_sum_over_a_tokens_experts() -> None:
    """Against a loop over tokens; one expert has no tokens, one token names an expert that is not given."""
    tokens, k, experts, width, inner = 7, 2, 4, 6, 5
    draw = torch.Generator().manual_seed(0)
    shapes = [(tokens, width), (tokens, k), (experts, 2 * inner, width), (experts, width, inner),
              (experts, 2 * inner), (experts, width)]  # fmt: skip
    x, weights, gate_up, down, bias, down_bias = (torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes)
    ids = torch.tensor([[0, 1], [1, 0], [0, 3], [3, 3], [1, 0], [3, 0], [1, 4]])
    got = ops.moe_experts(
        x, ids, weights, gate_up, down, act="silu", interleaved=True, limit=0.7, alpha=1.3, up_offset=1.0,
        gate_up_bias=bias, down_bias=down_bias,
    )  # fmt: skip
    for t in range(tokens):
        want = torch.zeros(width, dtype=torch.float64)
        for j, expert in enumerate(ids[t].tolist()):
            if expert < experts:
                hidden = F.linear(x[t], gate_up[expert], bias[expert])
                gate, up = hidden[0::2].clamp(max=0.7), hidden[1::2].clamp(-0.7, 0.7)
                hidden = gate * torch.sigmoid(1.3 * gate) * (up + 1)
                want += weights[t, j] * F.linear(hidden, down[expert], down_bias[expert])
        assert torch.allclose(got[t], want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
def test_the_operators_of_parts_add_up(act: str) -> None:
    """Ungated experts, all in one, and in two calls with experts 0 to 2 and 3 to 4."""
    draw = torch.Generator().manual_seed(1)
    x, weights, up, down = (
        torch.randn(s, generator=draw, dtype=torch.float64) for s in ((3, 6), (3, 2), (5, 4, 6), (5, 6, 4))
    )
    ids = torch.tensor([[0, 4], [3, 2], [1, 4]])
    whole = ops.moe_experts(x, ids, weights, up, down, act=act, gated=False)
    parts = [
        ops.moe_experts(x, ids, weights, up[a:b], down[a:b], act=act, gated=False, first_expert=torch.tensor([a]))
        for a, b in ((0, 3), (3, 5))
    ]
    assert tiny.worst(parts[0] + parts[1], whole) <= 1e-15  # the same products, added in another order


CASES = [
    ("mixtral", 2, "tp"), ("mixtral", 4, "ep"), ("mixtral", 8, "ep"),
    ("qwen2_moe", 3, "tp"), ("qwen2_moe", 4, "ep"),
    ("qwen3_moe", 8, "tp"), ("gpt_oss", 4, "tp"), ("gpt_oss", 4, "ep"), ("dots1", 3, "tp"), ("dots1", 2, "ep"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "tp", "experts"), CASES)
def test_numbers(family: str, tp: int, experts: str) -> None:
    """Widths of 13 and 5, 6 or 7 experts divide over no number of ranks used."""
    net, one = mixtures.model(family), mixtures.compiled(family, 1)
    many = mixtures.compiled(family, tp, experts)
    for count in TOKENS:
        ids = tiny.tokens(count, seed=count)
        alone, together = one.logits(ids), many.logits(ids)
        assert tiny.worst(together, alone) <= 1e-10, f"{count} tokens, tp={tp} against tp=1"
        # transformers computes norms, rope and softmax in float32 whatever the model's dtype is: 24 bits, not 53
        assert tiny.worst(together, tiny.eager_logits(net, ids)) <= 1e-5, f"{count} tokens against transformers"


@pytest.mark.parametrize(("family", "tp", "experts"), CASES)
def test_experts_are_divided_and_routers_are_not(family: str, tp: int, experts: str) -> None:
    program = mixtures.compiled(family, tp, experts).program()
    report = next(r for r in program.history if r.name == "shard_tensor_parallel")
    assert report.fired == report.expected and not report.near_misses
    calls = program.calls(ops.moe_experts)
    assert calls
    for node in calls:
        assert node.meta["placement"] == Partial("sum")
        for argument in node.args[:3]:
            assert isinstance(argument.meta["placement"], Replicate)  # type: ignore[union-attr]
        for argument, dim in zip(node.args[3:5], (1, 2) if experts == "tp" else (0, 0)):
            weight: Any = program.weight_of(argument)
            assert isinstance(weight.placement, Shard) and weight.placement.dim == dim
            assert weight.placement.layout.local_size < weight.placement.layout.size


def test_experts_that_do_nothing() -> None:
    """LongCat-Flash: ids beyond the real experts stand for the identity. Against transformers' own loop."""
    from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashConfig, LongcatFlashExperts

    from graphsrt.models.experts import settle

    config = LongcatFlashConfig(hidden_size=6, expert_ffn_hidden_size=5, n_routed_experts=4, zero_expert_num=2)
    experts = LongcatFlashExperts(config).double()
    tiny.randomize(experts)
    draw = torch.Generator().manual_seed(3)
    x, weights = (torch.randn(s, generator=draw, dtype=torch.float64) for s in ((7, 6), (7, 3)))
    ids = torch.stack([torch.randperm(6, generator=draw)[:3] for _ in range(7)])
    want = experts(x, ids, weights).detach()
    settle(experts, "graphsrt")
    assert tiny.worst(experts(x, ids, weights).detach(), want) <= 1e-14  # sums in another order


@pytest.mark.parametrize(
    ("damage", "words"),
    [({"has_post_expert_norm": True}, "a norm after each expert"), ({"act_fn": torch.nn.Tanh()}, "an activation")],
)
def test_refused_by_name(damage: dict[str, Any], words: str) -> None:
    from graphsrt.errors import CompileError
    from graphsrt.models.experts import settle

    net = mixtures.build("mixtral")
    for name, value in damage.items():
        setattr(net.model.layers[1].mlp.experts, name, value)
    with pytest.raises(CompileError, match=rf"MixtralExperts needs {words}[\s\S]*layers.1.mlp.experts"):
        settle(net, "graphsrt")


def test_accounting_looks_through_a_transposed_weight() -> None:
    """The first stage need not be the captured one: after ``normalize`` gpt-oss's experts are transposed."""
    from graphsrt.api import with_checkpoint_names
    from graphsrt.models.source import resolve
    from graphsrt.passes.runner import Stages

    traced = mixtures.traced("gpt_oss", 2)
    later = Stages([(name, program.copy()) for name, program in traced.stages.programs[1:]])
    named = with_checkpoint_names(later, resolve(mixtures.model("gpt_oss"), dtype=torch.float64))
    assert any("transpose(" in str(line) for line in str(named).splitlines())
