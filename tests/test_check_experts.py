"""Experts that were divided rightly pass the placement check; each program is then broken in one way and refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphsrt import ops
from graphsrt.check_placements import check_placements
from graphsrt.errors import CompileError
from graphsrt.passes.shard_tensor_parallel import shard_tensor_parallel
from graphsrt.placement import Layout, Partial, R, Run, Shard
from graphsrt.program import Program, aten
from graphsrt.recipes import Ckpt, OnOwner, ShardOf, ShardStart
from graphsrt.testing import check_ranks, trace

T, E, F, X, K, TP = "T", 10, 7, 5, 2, 3


def _program(interleaved: bool = False) -> Program:
    """A router and its experts, with biases; neither 5 experts nor a width of 7 divides over 3 ranks."""

    def mixture(x: Any, router: Any, gate_up: Any, down: Any, bias: Any, down_bias: Any) -> Any:
        weights, ids = torch.nn.functional.linear(x, router).softmax(-1).topk(K)
        return ops.moe_experts(
            x, ids, weights, gate_up, down, act="silu", interleaved=interleaved, gate_up_bias=bias, down_bias=down_bias
        )

    shapes = {"router": (X, E), "gate_up": (X, 2 * F, E), "down": (X, E, F), "bias": (X, 2 * F), "down_bias": (X, E)}
    return trace(mixture, inputs={"x": (T, E)}, weights=shapes, tp=TP)


def _sharded(how: str, interleaved: bool = False) -> Program:
    program = _program(interleaved)
    shard_tensor_parallel(program, experts=how)
    return program


@pytest.mark.parametrize("how", ["tp", "ep"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_right_programs_pass(how: str, interleaved: bool) -> None:
    program = _sharded(how, interleaved)
    check_placements(program)
    check_placements(Program.from_text(str(program)))
    check_ranks(_program(interleaved), program)


def _set(program: Program, name: str, recipe: Any, place: Any) -> None:
    program.weights[name].recipe, program.weights[name].placement = recipe, place
    program.weight_node(name).meta["placement"] = place


def _copies(program: Program) -> None:
    layout = Layout.blocks(F, TP)
    _set(program, "down", ShardOf(Ckpt("down"), 2, layout, "copy"), Shard(2, layout))


def _equal_blocks(program: Program) -> None:
    """Gates and ups cut as one plain matrix."""
    assert program.weights["gate_up"].shape[1] == 6
    layout = Layout.of([[Run(0, 6)], [Run(6, 6)], [Run(12, 2), Run(0, 4, owned=False)]])
    _set(program, "gate_up", ShardOf(Ckpt("gate_up"), 1, layout), Shard(1, layout))


def _other_channels(program: Program) -> None:
    turned = Layout.of(reversed(Layout.blocks(F, TP).runs))
    _set(program, "down", ShardOf(Ckpt("down"), 2, turned, "zero"), Shard(2, turned))


def _bias_everywhere(program: Program) -> None:
    _set(program, "down_bias", Ckpt("down_bias"), R)


def _bias_whole(program: Program) -> None:
    layout = Layout.blocks(2 * F, TP)
    _set(program, "bias", ShardOf(Ckpt("bias"), 1, layout), Shard(1, layout))


def _split_pairs(program: Program) -> None:
    """The interleaved rows in blocks that part a gate from its up."""
    size = program.weights["gate_up"].shape[1]
    layout = Layout.of([[Run(0, 5), Run(0, 1, False)], [Run(5, size)], [Run(5 + size, 3), Run(0, 3, False)]])
    _set(program, "gate_up", ShardOf(Ckpt("gate_up"), 1, layout), Shard(1, layout))


def _expert_order(program: Program) -> None:
    turned = Layout.of([[Run(2, 2)], [Run(0, 2)], [Run(4, 1), Run(4, 1, False)]])
    for name in ("gate_up", "down", "bias", "down_bias"):
        _set(program, name, ShardOf(Ckpt(name), 0, turned), Shard(0, turned))


def _other_experts(program: Program) -> None:
    turned = Layout.of([[Run(2, 2)], [Run(0, 2)], [Run(4, 1), Run(4, 1, False)]])
    _set(program, "bias", ShardOf(Ckpt("bias"), 0, turned), Shard(0, turned))


def _starts(program: Program) -> None:
    program.weights["down.start"].recipe = ShardStart(Layout.of([[Run(0, 1)], [Run(1, 1)], [Run(2, 1)]]))


def _no_starts(program: Program) -> None:
    node = _experts(program)
    node.kwargs = {name: value for name, value in node.kwargs.items() if name != "first_expert"}


def _owner_bias(program: Program) -> None:
    _set(program, "down_bias", OnOwner(Ckpt("down_bias")), Partial("sum"))


def _experts(program: Program) -> Any:
    (node,) = program.calls(ops.moe_experts)
    return node


def _partial_routing(program: Program) -> None:
    """Routing weights of which each rank holds a term: products of sums are not sums of products."""
    node = _experts(program)
    program.add_weight("term", _weight((K,), OnOwner(Ckpt("term"))))
    scaled = program.call(aten.mul.Tensor, node.args[2], program.weight_node("term"), name="scaled", before=node)
    node.update_arg(2, scaled)
    program.infer()
    scaled.meta["placement"] = Partial("sum")


def _weight(shape: tuple[int, ...], recipe: Any) -> Any:
    from graphsrt.program import Weight

    return Weight(shape, torch.float64, recipe, Partial("sum"))


def _nonlinear_after(program: Program) -> None:
    """What is done to the experts' sum before it is complete must be linear."""
    node = _experts(program)
    relu = program.call(aten.relu.default, node, name="relu", before=node.next)
    node.replace_all_uses_with(relu, delete_user_cb=lambda user: user is not relu, propagate_meta=False)
    program.infer()
    relu.meta["placement"] = Partial("sum")


BROKEN: dict[str, tuple[str, bool, Callable[[Program], None], str]] = {
    "pads contracted": ("tp", False, _copies, "counted twice"),
    "gate and up in equal blocks": ("tp", False, _equal_blocks, "not one window"),
    "other channels in the down weight": ("tp", False, _other_channels, "not those of its down weight"),
    "down bias on every rank": ("tp", False, _bias_everywhere, "once on every rank"),
    "bias in equal blocks": ("tp", False, _bias_whole, "another length"),
    "a gate parted from its up": ("tp", True, _split_pairs, "on different ranks"),
    "experts in another order": ("ep", False, _expert_order, "does not hold them in order"),
    "a bias of other experts": ("ep", False, _other_experts, "belongs to other experts"),
    "first ids of other experts": ("ep", False, _starts, "takes experts from 1 on"),
    "no first id": ("ep", False, _no_starts, "needs the first one's id"),
    "down bias on one rank, of all experts": ("ep", False, _owner_bias, "does not follow"),
    "partial routing weights": ("tp", False, _partial_routing, "expert_weights of experts differ"),
    "a nonlinearity before the sum": ("tp", False, _nonlinear_after, "not linear"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_programs_are_refused(name: str) -> None:
    how, interleaved, damage, words = BROKEN[name]
    program = _sharded(how, interleaved)
    damage(program)
    with pytest.raises(CompileError, match=words):
        check_placements(program)
