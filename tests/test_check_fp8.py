"""FP8 linears that are divided rightly pass the placement check; each is then broken in one way, and refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F

from graphsrt import ops
from graphsrt.check_placements import check_placements
from graphsrt.errors import CompileError
from graphsrt.passes import shard_tensor_parallel
from graphsrt.passes.quantize_linears import quantize_linears
from graphsrt.passes.runner import run
from graphsrt.placement import Layout, R, Shard
from graphsrt.program import Program
from graphsrt.recipes import BlockNumbers, ShardOf
from graphsrt.testing import trace
from tests.support.fp8 import BLOCK, stored

E, INNER, TP = 38, 54, 3


def divided(scheme: str, inner: int = INNER) -> Program:
    """An MLP of which neither projection's part is whole blocks; a bias in the row-parallel one."""

    def mlp(x: Any, up: Any, down: Any, up_bias: Any, down_bias: Any) -> Any:
        return F.linear(F.relu(F.linear(x, up, up_bias)), down, down_bias)

    shapes = {"up": (inner, E), "down": (E, inner), "up_bias": (inner,), "down_bias": (E,)}
    plain = stored(trace(mlp, inputs={"x": ("T", E)}, weights=shapes, tp=TP), scheme)
    return run(plain, [shard_tensor_parallel, quantize_linears]).final


def _set(program: Program, name: str, recipe: Any, place: Any) -> None:
    program.weights[name].recipe, program.weights[name].placement = recipe, place
    program.weight_node(name).meta["placement"] = place


def no_maximum(program: Program) -> None:
    """Each rank scales by its own largest number."""
    (scale,) = [node for node in program.calls(ops.all_reduce) if node.kwargs.get("op") == "max"]
    scale.replace_all_uses_with(scale.args[0])
    program.remove_dead()


def a_sum_of_scales(program: Program) -> None:
    (scale,) = [node for node in program.calls(ops.all_reduce) if node.kwargs.get("op") == "max"]
    scale.kwargs = {**scale.kwargs, "op": "sum"}


def scales_of_other_rows(program: Program) -> None:
    layout = Layout.of(reversed(Layout.blocks(INNER, TP).runs))
    scale = program.weights["up_scale"].recipe
    assert isinstance(scale, ShardOf)
    _set(program, "up_scale", ShardOf(scale.x, 0, layout), Shard(0, layout))


def whole_scales(program: Program) -> None:
    scale = program.weights["up_scale"]
    assert isinstance(scale.recipe, ShardOf)
    _set(program, "up_scale", scale.recipe.x, R)
    program.weights["up_scale"].shape = (INNER, scale.shape[1])
    program.weight_node("up_scale").meta["val"] = program.shapes.tensor((INNER, scale.shape[1]), scale.dtype)


def copies_in_columns(program: Program) -> None:
    weight = program.weights["down_fp8"]
    layout = Layout.of([[*runs] for runs in Layout.blocks(INNER, TP).runs])
    assert isinstance(weight.recipe, ShardOf)
    everywhere = Layout.of(reversed(layout.runs))
    _set(program, "down_fp8", ShardOf(weight.recipe.x, 1, everywhere, "zero"), Shard(1, everywhere))


def other_blocks(program: Program) -> None:
    layout = Layout.blocks(INNER, TP)
    _set(program, "blocks_of_16", ShardOf(BlockNumbers(INNER, BLOCK + 2), 0, layout), Shard(0, layout))


def blocks_of_other_columns(program: Program) -> None:
    layout = Layout.of(reversed(Layout.blocks(INNER, TP).runs))
    _set(program, "blocks_of_16", ShardOf(BlockNumbers(INNER, BLOCK), 0, layout), Shard(0, layout))


def fewer_blocks(program: Program) -> None:
    (scale,) = [node for node in program.calls(ops.fp8_scale) if node.kwargs.get("num_blocks")]
    scale.kwargs = {**scale.kwargs, "num_blocks": 3}


def bias_everywhere(program: Program) -> None:
    weight = program.weights["down_bias"]
    _set(program, "down_bias", weight.recipe.x, R)  # type: ignore[attr-defined]


BROKEN: list[tuple[str, Callable[[Program], None], str]] = [
    ("token", no_maximum, "scale is not ordinary"),
    ("token", a_sum_of_scales, r"P\(sum\)"),
    ("token", scales_of_other_rows, "w_scale does not follow the rows"),
    ("token", whole_scales, "w_scale does not follow the rows"),
    ("token", copies_in_columns, "contracted over different addresses"),
    ("token", bias_everywhere, "bias would be added once on every rank"),
    ("block", no_maximum, "scale is not ordinary"),
    ("block", scales_of_other_rows, "w_scale does not follow the rows"),
    ("block", other_blocks, "columns are not the numbers of their blocks"),
    ("block", blocks_of_other_columns, "blocks are numbered of other columns"),
    ("block", fewer_blocks, "not all blocks get a scale"),
    ("static", bias_everywhere, "bias would be added once on every rank"),
]


@pytest.mark.parametrize("scheme, breaks, words", BROKEN, ids=lambda value: getattr(value, "__name__", None))
def test_broken_programs_are_refused(scheme: str, breaks: Callable[[Program], None], words: str) -> None:
    program = divided(scheme)
    check_placements(program)
    breaks(program)
    with pytest.raises(CompileError, match=words):
        check_placements(program)


def test_scales_of_whole_blocks_follow_their_columns() -> None:
    program = divided("block", 3 * 2 * BLOCK)
    check_placements(program)
    layout = Layout.of(reversed(Layout.blocks(6, TP).runs))
    scale = program.weights["down_scale"].recipe
    assert isinstance(scale, ShardOf) and scale.dim == 1
    _set(program, "down_scale", ShardOf(scale.x, 1, layout), Shard(1, layout))
    with pytest.raises(CompileError, match="w_scale is not that of a rank's columns"):
        check_placements(program)
