"""fuse_all_reduce_add_layer_norm: the twin of fuse_all_reduce_add_rms_norm; the rules they share are tested there."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F

from graphsrt.passes import shard_tensor_parallel
from graphsrt.passes.fuse_add_layer_norm import fuse_add_layer_norm
from graphsrt.passes.fuse_all_reduce_add_layer_norm import fuse_all_reduce_add_layer_norm
from graphsrt.passes.fuse_all_reduce_add_rms_norm import fuse_all_reduce_add_rms_norm
from graphsrt.program import Program
from graphsrt.testing import check, trace
from tests.support import captures, fusing


def made(passes: Any = (), branch: bool = False) -> Program:
    def block(x: Any, residual: Any, up: Any, down: Any, up_bias: Any, down_bias: Any, w: Any, b: Any) -> Any:
        y = F.linear(F.relu(F.linear(x, up, up_bias)), down, down_bias)
        if branch:
            return residual + F.layer_norm(y, (6,), w, b, 3e-6)
        total = residual + y
        return total * F.layer_norm(total, (6,), w, b, 3e-6)

    weights = {"up": (14, 6), "down": (6, 14), "up_bias": (14,), "down_bias": (6,), "w": (6,), "b": (6,)}
    inputs: dict[str, Any] = {"x": ("T", 6), "residual": ("T", 6)}
    return trace(block, tp=3, inputs=inputs, weights=weights, passes=[shard_tensor_parallel, *passes])


@pytest.mark.parametrize("passes", [(), (fuse_add_layer_norm,)])
def test_text(passes: Any) -> None:
    program = made(passes)
    done = check(fuse_all_reduce_add_layer_norm, program, fires=1, tolerance=0, tokens=fusing.counts(3))
    assert "graphsrt.all_reduce(linear_1" in done.before
    assert done.after.splitlines()[-5:-2] == [
        "all_reduce_add_layer_norm: (f64[T, 6] R, f64[T, 6] R) = "
        'graphsrt.all_reduce_add_layer_norm(linear_1, residual, w, b, axis="tp", eps=3e-06)',
        "layer_norm: f64[T, 6] R = getitem(all_reduce_add_layer_norm, 0)",
        "add: f64[T, 6] R = getitem(all_reduce_add_layer_norm, 1)",
    ]
    fusing.check_padding(program, done.program, (1, 5))
    misses: list[Any] = []
    assert fuse_add_layer_norm(done.program, near_misses=misses) == 0
    assert misses[0].reason.endswith("has it already, made by fuse_all_reduce_add_layer_norm")


def test_near_misses() -> None:
    check(fuse_all_reduce_add_layer_norm, made(branch=True), fires=0, near_miss="norms the sum over ranks itself")
    check(fuse_all_reduce_add_rms_norm, made(), fires=0)  # a layer norm is none of its sites
    parallel = captures.before("fuse_all_reduce_add_layer_norm", "gpt_neox", layers=2)
    check(fuse_all_reduce_add_layer_norm, parallel, fires=2, tokens=(3,), tolerance=0)


def test_engine() -> None:
    fusing.check_engine("fuse_all_reduce_add_layer_norm", "gpt_neox")
