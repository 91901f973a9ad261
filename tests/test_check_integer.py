"""Linears over integers that are divided rightly pass the placement check; each is then broken, and refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.nn.functional as F

from graphsrt.check_placements import check_placements
from graphsrt.errors import CompileError
from graphsrt.passes import quantize_weights, shard_tensor_parallel
from graphsrt.passes.runner import run
from graphsrt.placement import Layout, R, Shard
from graphsrt.program import Program
from graphsrt.recipes import Ckpt, Quantized, ShardOf
from graphsrt.testing import trace

E, INNER, V, TP = 96, 192, 51, 3


def divided(form: str) -> Program:
    def mlp(x: Any, up: Any, down: Any, up_bias: Any, down_bias: Any, head: Any) -> Any:
        return F.linear(F.linear(F.relu(F.linear(x, up, up_bias)), down, down_bias), head)

    shapes = {"up": (INNER, E), "down": (E, INNER), "up_bias": (INNER,), "down_bias": (E,), "head": (V, E)}
    plain = trace(mlp, inputs={"x": ("T", E)}, weights=shapes, tp=TP)
    return run(plain, [shard_tensor_parallel, partial(quantize_weights, to=form)]).final


def _set(program: Program, name: str, recipe: Any, place: Any, *shape: int) -> None:
    weight = program.weights[name]
    weight.recipe, weight.placement, weight.shape = recipe, place, shape or weight.shape
    node = program.weight_node(name)
    node.meta["placement"], node.meta["val"] = place, program.shapes.tensor(weight.shape, weight.dtype)


def _moved(layout: Layout) -> Layout:
    return Layout.of([*layout.runs[1:], layout.runs[0]])


def scales_of_other_rows(program: Program) -> None:
    layout = _moved(Layout.blocks(INNER, TP))
    _set(program, "up_scales", ShardOf(Quantized(Ckpt("up"), "int8_scales"), 0, layout), Shard(0, layout))


def scales_of_all_rows(program: Program) -> None:
    _set(program, "up_scales", Quantized(Ckpt("up"), "int8_scales"), R, INNER)


def divided_scales_of_divided_columns(program: Program) -> None:
    layout = Layout.blocks(E, TP)
    recipe = ShardOf(Quantized(Ckpt("down"), "int8_scales"), 0, layout)
    _set(program, "down_scales", recipe, Shard(0, layout), layout.local_size)


def scales_of_a_part_of_the_columns(program: Program) -> None:
    """Each rank would have another scale for a row."""
    part = ShardOf(Ckpt("down"), 1, Layout.blocks(INNER, TP), "zero")
    _set(program, "down_scales", Quantized(part, "int8_scales"), R)


def other_columns(program: Program) -> None:
    layout = _moved(Layout.blocks(INNER, TP))
    _set(program, "down_int8", ShardOf(Quantized(Ckpt("down"), "int8"), 1, layout, "zero"), Shard(1, layout))


def groups_of_other_columns(program: Program) -> None:
    layout = _moved(Layout.blocks(INNER, TP))
    recipe = Quantized(ShardOf(Ckpt("down"), 1, layout, "zero"), "int4_pairs")
    _set(program, "down_pairs", recipe, Shard(1, layout.divide(32)))


def both_of_other_columns(program: Program) -> None:
    groups_of_other_columns(program)
    layout = _moved(Layout.blocks(INNER, TP))
    _set(
        program,
        "down_int4",
        Quantized(ShardOf(Ckpt("down"), 1, layout, "zero"), "int4"),
        Shard(1, Layout.blocks(96, TP)),
    )


def groups_of_another_matrix(program: Program) -> None:
    layout = Layout.blocks(INNER, TP)
    _set(
        program,
        "down_pairs",
        Quantized(ShardOf(Ckpt("other"), 1, layout, "zero"), "int4_pairs"),
        Shard(1, layout.divide(32)),
    )


def parts_of_groups(program: Program) -> None:
    layout = Layout.blocks(INNER, TP, 16)
    runs = [[*rank] for rank in layout.runs]
    runs[0][0], runs[1][0] = runs[0][0]._replace(start=16), runs[1][0]._replace(start=80)
    runs[2] = [runs[2][0]._replace(start=144, length=48), runs[2][0]._replace(start=0, length=16)]
    _set(program, "down_pairs", Quantized(ShardOf(Ckpt("down"), 1, Layout.of(runs), "zero"), "int4_pairs"), R)


def packed_columns_are_cut(program: Program) -> None:
    layout = Layout.blocks(INNER // 2, TP)
    _set(program, "down_int4", ShardOf(Quantized(Ckpt("down"), "int4"), 1, layout, "zero"), Shard(1, layout))


def rows_of_groups(program: Program) -> None:
    _set(program, "up_pairs", Quantized(Ckpt("up"), "int4_pairs"), R, INNER, E // 32, 2)


def bias_everywhere(program: Program) -> None:
    _set(program, "down_bias", program.weights["down_bias"].recipe.x, R)  # type: ignore[attr-defined]


BROKEN: list[tuple[str, Callable[[Program], None], str]] = [
    ("int8", scales_of_other_rows, "scales are not those of the rows"),
    ("int8", scales_of_all_rows, "scales are not those of the rows"),
    ("int8", divided_scales_of_divided_columns, "scales are not those of the rows"),
    ("int8", scales_of_a_part_of_the_columns, "what int8_scales is made of differs from rank to rank"),
    ("int8", other_columns, "contracted over different addresses"),
    ("int8", bias_everywhere, "bias would be added once on every rank"),
    ("int4", groups_of_other_columns, "numbers and scales are not of the same columns"),
    ("int4", both_of_other_columns, "contracted over different addresses"),
    ("int4", groups_of_another_matrix, "numbers and scales are not of the same columns"),
    ("int4", parts_of_groups, "a rank has parts of groups"),
    ("int4", packed_columns_are_cut, "numbers and scales are not of the same columns"),
    ("int4", rows_of_groups, "numbers and scales are not of the same columns"),
    ("int4", bias_everywhere, "bias would be added once on every rank"),
]


@pytest.mark.parametrize("form, breaks, words", BROKEN, ids=lambda value: getattr(value, "__name__", None))
def test_broken_programs_are_refused(form: str, breaks: Callable[[Program], None], words: str) -> None:
    program = divided(form)
    check_placements(program)
    breaks(program)
    with pytest.raises(CompileError, match=words):
        check_placements(program)


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("unowned", ["zero", "copy"])
def test_copies_are_counted_once(form: str, unowned: str) -> None:
    """Of 160 columns three ranks have 64 each, of which the last owns 32: the others must be zeros."""
    layout = Layout.blocks(160, TP, 32)
    program = divided(form)
    parts = ("int8", "int8_scales") if form == "int8" else ("int4", "int4_pairs")
    widths = {"int8": (E,), "int8_scales": (), "int4": (64,), "int4_pairs": (3, 2)}
    for part in parts:
        recipe = ShardOf(Quantized(Ckpt("up"), part), 0, layout)
        _set(program, f"up_{part.split('_')[-1]}", recipe, Shard(0, layout), 64, *widths[part])
    _set(program, "up_bias", ShardOf(Ckpt("up_bias"), 0, layout), Shard(0, layout), 64)
    part = ShardOf(Ckpt("down"), 1, layout, unowned)
    if form == "int8":
        _set(program, "down_int8", ShardOf(Quantized(Ckpt("down"), "int8"), 1, layout, unowned), None, E, 64)
    else:
        _set(program, "down_int4", Quantized(part, "int4"), None, E, 32)
        _set(program, "down_pairs", Quantized(part, "int4_pairs"), None, E, 2, 2)
    program.infer()
    if unowned == "zero":
        check_placements(program, record=True)
    else:
        with pytest.raises(CompileError, match="addresses held twice are counted twice"):
            check_placements(program, record=True)
