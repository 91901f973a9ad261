"""fuse_all_reduce_add_rms_norm: a sum over ranks, the residual and the norm, whichever of them are joined already."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from graphsrt import ops
from graphsrt.lowering.decompose import decompose
from graphsrt.passes import shard_tensor_parallel
from graphsrt.passes.fuse_add_rms_norm import fuse_add_rms_norm
from graphsrt.passes.fuse_all_reduce_add_rms_norm import fuse_all_reduce_add_rms_norm
from graphsrt.program import Program, arguments
from graphsrt.testing import check, check_ranks, step_text, trace
from tests.support import captures, fusing

NORM: dict[str, Any] = {"eps": 3e-6, "cast": "before_weight", "offset": 0.0}
WEIGHTS = {"up": (14, 6), "down": (6, 14), "up_bias": (14,), "down_bias": (6,), "w": (6,)}


def mlp(x: Any, up: Any, down: Any, up_bias: Any, down_bias: Any) -> Any:
    return F.linear(F.relu(F.linear(x, up, up_bias)), down, down_bias)


def block(x: Any, residual: Any, up: Any, down: Any, up_bias: Any, down_bias: Any, w: Any) -> Any:
    total = residual + mlp(x, up, down, up_bias, down_bias)
    return total * ops.rms_norm(total, w, **NORM)


def made(function: Any = block, tp: int = 4, dtype: Any = torch.float64, passes: Any = ()) -> Program:
    inputs: dict[str, Any] = {"x": ("T", 6), "residual": ("T", 6)}
    return trace(
        function, tp=tp, inputs=inputs, weights=WEIGHTS, dtype=dtype, passes=[shard_tensor_parallel, *passes]
    )  # fmt: skip


@pytest.mark.parametrize("passes", [(), (fuse_add_rms_norm,)])
def test_text(passes: Any) -> None:
    """The same program, whether addition and norm were one operator before or not."""
    program = made(passes=passes)
    done = check(fuse_all_reduce_add_rms_norm, program, fires=1, tolerance=0, tokens=fusing.counts(4))
    assert "graphsrt.all_reduce(linear_1" in done.before
    norm = 'axis="tp", eps=3e-06, cast="before_weight", offset=0.0'
    assert done.after.splitlines()[-5:] == [
        "all_reduce_add_rms_norm: (f64[T, 6] R, f64[T, 6] R) = "
        f"graphsrt.all_reduce_add_rms_norm(linear_1, residual, w, {norm})",
        "rms_norm: f64[T, 6] R = getitem(all_reduce_add_rms_norm, 0)",
        "add: f64[T, 6] R = getitem(all_reduce_add_rms_norm, 1)",
        "mul: f64[T, 6] R = aten.mul.Tensor(add, rms_norm)",
        "return mul",
    ]
    fusing.check_padding(program, done.program, fusing.counts(4))


def test_residual_first_or_last() -> None:
    def swapped(x: Any, residual: Any, up: Any, down: Any, up_bias: Any, down_bias: Any, w: Any) -> Any:
        return ops.rms_norm(mlp(x, up, down, up_bias, down_bias) + residual, w, **NORM)

    for passes in ((), (fuse_add_rms_norm,)):
        done = check(fuse_all_reduce_add_rms_norm, made(swapped, passes=passes), fires=1, tolerance=0)
        assert "all_reduce_add_rms_norm(linear_1, residual, w, " in done.after


def test_half_precision_rounds_where_it_did() -> None:
    """The sum is rounded before the residual is added, and the total before the norm."""
    program = made(dtype=torch.bfloat16)
    check(fuse_all_reduce_add_rms_norm, program, fires=1, tolerance=0, tokens=(1, 3, 37))


def test_near_misses() -> None:
    def branch(x: Any, residual: Any, up: Any, down: Any, up_bias: Any, down_bias: Any, w: Any) -> Any:
        return residual + ops.rms_norm(mlp(x, up, down, up_bias, down_bias), w, **NORM)

    reason = "rms_norm norms the sum over ranks itself, no residual is added to it"
    check(fuse_all_reduce_add_rms_norm, made(branch), fires=0, near_miss=reason)

    def read_twice(x: Any, residual: Any, up: Any, down: Any, up_bias: Any, down_bias: Any, w: Any) -> Any:
        y = mlp(x, up, down, up_bias, down_bias)
        return ops.rms_norm(residual + y, w, **NORM) * y

    reason = "add and mul read the sum over ranks"
    check(fuse_all_reduce_add_rms_norm, made(read_twice), fires=0, near_miss=reason)

    def early(x: Any, residual: Any, up: Any, down: Any, up_bias: Any, down_bias: Any, w: Any) -> Any:
        total = residual + mlp(x, up, down, up_bias, down_bias)
        return total * 2.0 + ops.rms_norm(total, w, **NORM)

    check(fuse_all_reduce_add_rms_norm, made(early), fires=0, near_miss="mul uses add before rms_norm is computed")

    def two(x: Any, residual: Any, up: Any, down: Any, up_bias: Any, down_bias: Any, w: Any) -> Any:
        total = residual + mlp(x, up, down, up_bias, down_bias)
        return ops.rms_norm(total, w, **NORM) * ops.rms_norm(total, w, **{**NORM, "offset": 1.0})

    check(fuse_all_reduce_add_rms_norm, made(two), fires=0, near_miss="rms_norm and rms_norm_1 both read add")


def test_scattered_tokens_stay() -> None:
    """A reduce_scatter gives each rank tokens of its own, which is not what an all_reduce gives."""
    program = made(tp=2)
    (summed,) = program.calls(ops.all_reduce)
    scattered = program.call(
        ops.reduce_scatter, arguments(summed)["x"], dim=1, axis="tp", size=2, name="s", before=summed
    )
    program.replace(summed, scattered)
    misses: list[Any] = []
    assert fuse_all_reduce_add_rms_norm(program, near_misses=misses) == 0
    assert "each rank gets its own tokens of the sum (reduce_scatter)" in misses[0].reason


def test_models_and_the_smaller_fusion_names_the_larger() -> None:
    """The embedding's sum has a reason; fuse_add_rms_norm, run afterwards, says who took its sites."""
    program = captures.before("fuse_add_rms_norm", "llama", layers=2)
    done = check(fuse_all_reduce_add_rms_norm, program, fires=4, tokens=(3,), tolerance=0)
    assert [miss.node for miss in done.near_misses] == ["embed_tokens.all_reduce"]
    misses: list[Any] = []
    assert fuse_add_rms_norm(done.program.copy(), near_misses=misses) == 0
    taken = "graphsrt.all_reduce_add_rms_norm has it already, made by fuse_all_reduce_add_rms_norm"
    assert [miss.reason for miss in misses].count(taken) == 4


def test_lowering_takes_it_apart() -> None:
    """No kernel here does all of it: the sum is a collective, the rest joins the region after it, the bits stay."""
    fused = check(fuse_all_reduce_add_rms_norm, made(), fires=1).program
    apart = decompose(fused, "cpu")
    assert "= graphsrt.all_reduce(linear_1, " in step_text(apart) and "= graphsrt.add_rms_norm(" in step_text(apart)
    assert check_ranks(fused, apart, tolerance=0) == 0
    assert decompose(apart, "cpu") is apart


def test_engine() -> None:
    fusing.check_engine("fuse_all_reduce_add_rms_norm", "llama")
