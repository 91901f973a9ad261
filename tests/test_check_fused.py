"""Placements of fused operators: what ``check_rules_fused`` refuses."""

from __future__ import annotations

from typing import Any

import pytest

from graphsrt import ops
from graphsrt.check_placements import check_placements
from graphsrt.errors import CompileError
from graphsrt.passes.fuse_all_reduce_add_rms_norm import fuse_all_reduce_add_rms_norm
from graphsrt.program import Program
from tests.passes.test_fuse_all_reduce_add_rms_norm import made
from tests.support import captures


def fused() -> Program:
    program = made()
    assert fuse_all_reduce_add_rms_norm(program) == 1
    check_placements(program)
    return program


def swap(program: Program) -> None:
    """The rank's term as the residual, the residual as what is summed."""
    (node,) = program.calls(ops.all_reduce_add_rms_norm)
    x, residual, weight = node.args
    node.args = (residual, x, weight)


def complete_before(program: Program) -> None:
    """A sum that is complete is summed again."""
    (node,) = program.calls(ops.all_reduce_add_rms_norm)
    term = node.args[0]
    total = program.call(ops.all_reduce, term, axis="tp", name="t", before=node, like=term)  # type: ignore[arg-type]
    node.args = (total, *node.args[1:])


def divided_residual(program: Program) -> None:
    (node,) = program.calls(ops.all_reduce_add_rms_norm)
    activation = next(n for n in program.nodes if str(n.meta.get("placement", "")).startswith("S("))
    node.args = (node.args[0], activation, node.args[2])


def another_axis(program: Program) -> None:
    (node,) = program.calls(ops.all_reduce_add_rms_norm)
    node.kwargs = {**node.kwargs, "axis": "pp"}


def term_twice(program: Program) -> None:
    (node,) = program.calls(ops.all_reduce_add_rms_norm)
    node.args = (node.args[0], node.args[0], node.args[2])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (swap, "only a sum that is not complete may be summed"),
        (complete_before, "only a sum that is not complete may be summed"),
        (divided_residual, "meets the sum over all ranks"),
        (another_axis, "the collective runs along another axis"),
        (term_twice, "linear_1 meets the sum over all ranks|the residual is a sum that is not complete"),
    ],
)
def test_a_sum_into_a_norm(wrong: Any, words: str) -> None:
    program = fused()
    wrong(program)
    with pytest.raises(CompileError, match=words):
        check_placements(program, record=True)


def test_heads_that_are_no_heads() -> None:
    """The norm of a head and its rotation want tokens and heads as they are, and the same tables everywhere."""
    program = captures.stage("fuse_qk_norm_rope", "qwen3")
    (node,) = program.calls(ops.qk_norm_rope)
    heads = node.args[0]
    for index, name in enumerate(("q_weight", "k_weight", "positions", "table"), start=2):
        node.args, right = (*node.args[:index], heads, *node.args[index + 1 :]), node.args
        with pytest.raises(CompileError, match=f"the {name} of normed and rotated heads differs from rank to rank"):
            check_placements(program)
        node.args = right
    check_placements(program)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_heads_that_are_written(family: str) -> None:
    """Keys, values and their pool hold the same heads; positions, slots and weights are the same everywhere."""
    program = captures.stage("fuse_rope_kv_write", family)
    (node,) = program.calls(ops.rope_kv_write)
    args, kwargs = node.args, dict(node.kwargs)
    queries = args[0]
    whole, partial = program.calls(ops.rms_norm)[0], program.calls(ops.vocab_embedding)[0]
    positions, table, slots = 3, 4, 6
    cases = [(index, queries, f"{queries.name} differs from rank to rank") for index in (positions, table, slots)]
    cases += [(index, whole, "hold different heads") for index in (1, 2)]
    cases += [(index, partial, "is a sum that is not complete") for index in (0, 1, 2)]
    for index, value, words in cases:
        node.args = (*args[:index], value, *args[index + 1 :])
        with pytest.raises(CompileError, match=words):
            check_placements(program)
    node.args = args
    for name in [name for name in ("q_weight", "k_weight") if name in kwargs]:
        node.kwargs = {**kwargs, name: args[1]}
        with pytest.raises(CompileError, match="differs from rank to rank"):
            check_placements(program)
    node.kwargs = kwargs
    check_placements(program)
