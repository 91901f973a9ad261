"""The simulator: a list of local values for each value, and collectives that combine the list."""

from __future__ import annotations

import pytest
import torch

from graphsrt import ops
from graphsrt.placement import Layout, Shard
from graphsrt.program import Input, Program, aten
from graphsrt.simulate import simulate
from graphsrt.testing import whole

ONE_EACH = [torch.full((2, 4), float(10**rank)) for rank in range(4)]  # 1, 10, 100, 1000: a digit for every rank


def program_of(target: object, **keywords: object) -> Program:
    program = Program("collective", mesh={"tp": 4})
    x = program.add_input("x", Input((2, 4), torch.float32, "input.x"))
    program.graph.output(program.call(target, x, name="y", **keywords))  # type: ignore[arg-type]
    program.infer()
    return program


def test_all_reduce() -> None:
    for value in simulate(program_of(ops.all_reduce, axis="tp"), {"x": ONE_EACH}, {}):
        assert (value == 1111).all()
    for value in simulate(program_of(ops.all_reduce, axis="tp", op="max"), {"x": ONE_EACH}, {}):
        assert (value == 1000).all()


def test_half_precision_sums_round_once() -> None:
    program = Program("sum", mesh={"tp": 3})
    x = program.add_input("x", Input((1,), torch.bfloat16, "input.x"))
    program.graph.output(program.call(ops.all_reduce, x, name="y", axis="tp"))
    program.infer()
    parts = [torch.tensor([v], dtype=torch.bfloat16) for v in (256.0, 1.0, 1.0)]  # 256 + 1 is 256 in bf16
    assert [v.item() for v in simulate(program, {"x": parts}, {})] == [258.0] * 3


def test_all_gather() -> None:
    for value in simulate(program_of(ops.all_gather, dim=1, axis="tp", size=4), {"x": ONE_EACH}, {}):
        assert value[0].tolist() == [10.0**r for r in range(4) for _ in range(4)]


def test_scatter_and_take() -> None:
    counted = [torch.arange(8.0).reshape(2, 4) + 100 * rank for rank in range(4)]
    scattered = simulate(program_of(ops.reduce_scatter, dim=1, axis="tp", size=4), {"x": counted}, {})
    assert [v.flatten().tolist() for v in scattered] == [[600.0 + 4 * c, 616.0 + 4 * c] for c in range(4)]
    taken = simulate(program_of(ops.take_own, dim=1, axis="tp", size=4), {"x": counted}, {})
    assert [v.flatten().tolist() for v in taken] == [[101.0 * r, 101.0 * r + 4] for r in range(4)]


def test_ranks_share_no_memory() -> None:
    seen: list = []
    program = program_of(ops.all_reduce, axis="tp")
    simulate(program, {"x": torch.ones(2, 4)}, {}, watch=lambda node, values: seen.append(values))
    for values in seen:
        assert len({value.data_ptr() for value in values}) == 4


def test_watch_sees_every_node() -> None:
    program = Program("add", mesh={"tp": 2})
    x = program.add_input("x", Input(("T",), torch.float32, "input.x"))
    program.graph.output(program.call(aten.add.Tensor, x, x, name="y"))
    program.infer()
    names: list[str] = []
    simulate(program, {"x": torch.ones(3)}, {}, watch=lambda node, values: names.append(node.name))
    assert names == ["x", "y"]


def test_whole() -> None:
    layout = Layout.blocks(5, 2)
    parts = [torch.tensor([0.0, 1.0, 2.0]), torch.tensor([3.0, 4.0, -9.0])]  # the last is a pad
    assert whole(parts, Shard(0, layout)).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(AssertionError, match="rank 1 holds another value"):
        whole([torch.zeros(2), torch.ones(2)], None)
