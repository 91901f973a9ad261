"""Ten passes that are wrong, each in its own way: the runner or verify names pass and node, never by a mere crash."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphsrt import ops
from graphsrt.errors import CompileError
from graphsrt.passes.runner import run
from graphsrt.placement import R
from graphsrt.program import Program, arguments, aten
from graphsrt.recipes import Transpose
from graphsrt.verification import verify_stages
from tests.support import captures

MODEL: dict[str, Any] = {"heads": 2, "kv_heads": 2, "layers": 2}
"""As many keys as queries, so that swapping them changes no shape; every linear of the attention has a bias."""


def drops_a_collective(program: Program) -> int:
    node = program.calls(ops.all_reduce)[1]
    (partial,) = node.all_input_nodes
    partial.meta["placement"] = R  # it claims to be right, too
    node.replace_all_uses_with(partial, propagate_meta=False)
    return 1


def swaps_q_and_k(program: Program) -> int:
    node = program.calls(ops.attention)[1]
    q, k, v = node.args
    node.args = (k, q, v)
    return 1


def forgets_a_bias(program: Program) -> int:
    node = next(n for n in program.calls(aten.linear.default) if arguments(n)["bias"] is not None)
    node.args = node.args[:2]
    return 1


def uses_the_wrong_layer(program: Program) -> int:
    node = program.calls(ops.radix_attention)[1]
    node.kwargs = {**node.kwargs, "layer_id": 0}
    return 1


def transposes_a_recipe(program: Program) -> int:
    node = program.calls(aten.linear.default)[-2]
    weight = program.weights[str(arguments(node)["weight"].target)]
    weight.recipe = Transpose(weight.recipe, 0, 1)
    return 1


def transposes_a_square_recipe(program: Program) -> int:
    node = next(n for n in program.calls(aten.linear.default) if n.name == "layers.1.self_attn.q_proj")
    weight = program.weights[str(arguments(node)["weight"].target)]
    weight.recipe = Transpose(weight.recipe, 0, 1)
    return 1


def breaks_the_order(program: Program) -> int:
    node = next(n for n in program.nodes if n.name == "layers.1.mlp.down_proj")
    node.next.append(node)
    return 1


def loses_metadata(program: Program) -> int:
    """A new node that says nothing of where it comes from."""
    old = next(n for n in program.nodes if n.name == "layers.0.mlp.down_proj")
    with program.graph.inserting_before(old):
        new = program.graph.call_function(aten.linear.default, old.args)
    old.replace_all_uses_with(new, propagate_meta=False)
    new.name = "again"
    return 1


def clears_metadata(program: Program) -> int:
    node = next(n for n in program.nodes if n.name == "layers.1.post_attention_layernorm")
    node.meta["made_by"] = ()
    return 1


def writes_in_place(program: Program) -> int:
    old = next(n for n in program.nodes if n.name == "layers.0.add")
    new = program.call(aten.add_.Tensor, *old.args, name="sum", before=old, like=old)
    program.replace(old, new)
    return 1


def changes_a_dtype(program: Program) -> int:
    """Down to half the digits and back: no shape and no type of a result changes."""
    old = next(n for n in program.nodes if n.name == "layers.1.mlp.down_proj")
    low = program.call(aten.to.dtype, old, torch.bfloat16, name=f"{old.name}.low", before=old.next, like=old)
    back = program.call(aten.to.dtype, low, torch.float64, name=f"{old.name}.back", before=low.next, like=old)
    old.replace_all_uses_with(back, delete_user_cb=lambda user: user is not low, propagate_meta=False)
    return 1


def doubles_a_residual(program: Program) -> int:
    node = next(n for n in program.nodes if n.name == "layers.1.add")
    node.kwargs = {**node.kwargs, "alpha": 2}
    return 1


def swaps_q_and_k_of_a_batch(program: Program) -> int:
    node = program.calls(ops.radix_attention)[1]
    q, k, *rest = node.args
    node.args = (k, q, *rest)
    return 1


WRONG: list[tuple[Callable[[Program], int], str, str, str, str]] = [
    (drops_a_collective, "shard_tensor_parallel", "layers.0.self_attn.o_proj", "runner", "placement"),
    (swaps_q_and_k, "recognize_gated_mlp", "layers.1.self_attn.attention", "verify", "is off by"),
    (swaps_q_and_k_of_a_batch, "page_attention", "layers.1.self_attn.attention", "verify", "is off by"),
    (forgets_a_bias, "shard_tensor_parallel", "layers.0.self_attn.q_proj", "verify", "is off by"),
    (uses_the_wrong_layer, "page_attention", "layers.1.self_attn.attention", "runner", "layer"),
    (transposes_a_recipe, "recognize_gated_mlp", "layers.1.mlp.down_proj", "runner", "another size"),
    (transposes_a_square_recipe, "recognize_gated_mlp", "layers.1.self_attn.q_proj", "verify", "is off by"),
    (breaks_the_order, "merge_gate_up", "layers.1.mlp.down_proj", "runner", "before it is computed"),
    (loses_metadata, "recognize_gated_mlp", "again", "runner", "loses where a value comes from"),
    (clears_metadata, "recognize_rms_norm", "layers.1.post_attention_layernorm", "runner", "recognize_rms_norm made"),
    (writes_in_place, "recognize_gated_mlp", "layers.0.add", "runner", "in-place write"),
    (changes_a_dtype, "recognize_gated_mlp", "layers.1.mlp.down_proj.low", "runner", "rounds"),
    (doubles_a_residual, "recognize_gated_mlp", "layers.1.add", "verify", "is off by"),
    (doubles_a_residual, "merge_gate_up", "layers.1.add", "verify", "is off by"),
]


@pytest.mark.parametrize("wrong,stage,node,caught_by,words", WRONG, ids=lambda x: getattr(x, "__name__", None))
def test_wrong_pass_is_caught(
    wrong: Callable[[Program], int], stage: str, node: str, caught_by: str, words: str
) -> None:
    family = "qwen2" if wrong is transposes_a_square_recipe else "llama"  # only there is a projection square
    traced = captures.traced(family, **MODEL)
    before = traced.program(after=stage)
    where = "runner"
    with pytest.raises(CompileError) as caught:
        after = run(before.copy(), [wrong]).final
        where = "verify"
        whole = traced.program(after="recognize_gated_mlp")
        first = [("capture", traced.program(after="capture"))]
        middle = [] if stage == "recognize_gated_mlp" else [("recognize_gated_mlp", whole)]
        verify_stages([*first, *middle, (wrong.__name__, after)], tokens=(1, 5)).raise_if_bad()
    message = str(caught.value)
    assert where == caught_by, message
    assert wrong.__name__ in message, message
    assert node in message and words in message, message
    assert "Error:" not in message, message  # said on purpose, not what some library happened to trip over


def test_the_kv_pool_may_be_written() -> None:
    """Only it: the same operator is refused if it writes elsewhere."""
    program = captures.stage("page_attention", "llama", **MODEL)
    program.lint()
    node = program.calls(ops.radix_attention)[0]
    pool = arguments(node)["kv_pool"]
    copied = program.call(aten.clone.default, pool, name="copied", before=node, like=node)
    node.replace_input_with(pool, copied)
    with pytest.raises(CompileError, match=r"in-place write: graphsrt.radix_attention writes into copied"):
        program.lint()


def test_rounding_may_be_declared() -> None:
    def rounds(program: Program) -> int:
        return changes_a_dtype(program)

    rounds.numerics = "close"  # type: ignore[attr-defined]
    program = captures.stage("recognize_gated_mlp", "llama", **MODEL)
    final = run(program, [rounds]).final
    low = next(n for n in final.nodes if n.name.endswith(".low"))
    assert low.meta["made_by"] == ("rounds",) and low.meta["from_nodes"] == ("layers.1.mlp.down_proj",)
    assert low.meta["rule"].startswith("tests/test_wrong_passes.py:")
