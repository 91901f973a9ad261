"""fuse_silu_mul: a SiLU gate that reads the two halves of one projection."""

from __future__ import annotations

from typing import Any

from graphsrt import ops
from graphsrt.passes.fuse_silu_mul import fuse_silu_mul
from graphsrt.passes.normalize import normalize
from graphsrt.program import Program
from graphsrt.testing import check, trace
from tests.support import captures


def made(first: slice, second: slice, act: str = "silu") -> Program:
    def block(x: Any) -> Any:
        return ops.glu(x[:, first], x[:, second], act=act)

    return trace(block, inputs={"x": ("T", 8)}, passes=[normalize])


def test_text() -> None:
    done = check(fuse_silu_mul, made(slice(0, 4), slice(4, 8)), fires=1, tolerance=0)
    assert done.before.splitlines()[-2].endswith('act="silu")')
    assert done.after.endswith(": f64[T, 4] = graphsrt.silu_mul(x)\nreturn " + done.after.partition(":")[0])
    assert done.after.count("\n") == 1


def test_sharded() -> None:
    done = check(fuse_silu_mul, captures.before("fuse_silu_mul", "llama"), fires=1)
    line = "layers.0.mlp.silu_mul: f64[R, 41/2{0:21|21:41,~40:41}] S(1) = graphsrt.silu_mul(layers.0.mlp.gate_up_proj)"
    assert line in done.after


def test_near_misses() -> None:
    gelu = made(slice(0, 4), slice(4, 8), act="gelu_tanh")
    check(fuse_silu_mul, gelu, fires=0, near_miss="the activation is gelu_tanh; only SiLU has a fused operator")
    swapped = made(slice(4, 8), slice(0, 4))
    check(fuse_silu_mul, swapped, fires=0, near_miss="of 8 channels, not its first and second half")
    apart = trace(lambda x, y: ops.glu(x, y, act="silu"), inputs={"x": ("T", 4), "y": ("T", 4)})
    check(fuse_silu_mul, apart, fires=0, near_miss="gate and up are not slices of one value")


def test_limit() -> None:
    program = captures.before("fuse_silu_mul", "llama", layers=2)
    assert fuse_silu_mul(program, limit=1) == 1
    assert len(program.calls(ops.silu_mul)) == 1 and len(program.calls(ops.glu)) == 1
