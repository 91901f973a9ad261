import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

from examples.squared_relu import fuse_squared_relu, squared_relu
from graphsrt.passes import shard_tensor_parallel
from graphsrt.testing import check, trace

ROOT = Path(__file__).parent.parent.parent
SHAPES = {"inputs": {"x": ("T", 34)}, "weights": {"up": (46, 34), "down": (34, 46)}}

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def mlp(x, up, down):
    return linear(torch.relu(linear(x, up)).square(), down)


def test_fires():
    done = check(fuse_squared_relu, trace(mlp, **SHAPES), fires=1, tolerance=0)
    assert "squared_relu(linear)" in done.after and "relu(" not in done.after.replace("squared_relu(", "")


def test_near_miss():
    def cubed(x, up):
        return torch.relu(linear(x, up)).pow(3)

    program = trace(cubed, inputs={"x": ("T", 34)}, weights={"up": (46, 34)})
    check(fuse_squared_relu, program, fires=0)


def test_is_divided_as_its_input_is():
    program = trace(mlp, tp=2, passes=[fuse_squared_relu], **SHAPES)
    done = check(shard_tensor_parallel, program, fires=2)
    assert "f64[T, 46/2] S(1) = examples.squared_relu(linear)" in done.after


def test_reference():
    x = torch.tensor([-2.0, 0.0, 3.0, float("nan")])
    torch.testing.assert_close(squared_relu(x), torch.tensor([0.0, 0.0, 9.0, float("nan")]), equal_nan=True)
    assert torch._C._dispatch_has_kernel_for_dispatch_key("examples::squared_relu", "CUDA")  # there, the kernel runs


def run(code: str, **environment: str) -> str:
    """In a process of its own: TRITON_INTERPRET must be set before triton is imported."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_triton
def test_kernel_agrees_with_the_reference():
    run(
        """
import torch
from examples.squared_relu import squared_relu as operator
from examples.squared_relu.kernel import squared_relu as kernel
for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
    for shape in ((1,), (3, 1024), (5, 1000), (0, 4)):
        x = torch.randn(shape).to(dtype)
        rounding = 2**-7 if dtype == torch.bfloat16 else 0  # the interpreter cuts bf16 off where a GPU rounds
        torch.testing.assert_close(kernel(x), operator(x), rtol=rounding, atol=0)
    x = torch.randn(6, 10).to(dtype).T  # strided
    x[0, 0] = float("nan")
    torch.testing.assert_close(kernel(x), operator(x), rtol=rounding, atol=0, equal_nan=True)
""",
        TRITON_INTERPRET="1",
    )


@needs_triton
def test_kernel_compiles_for_hopper(tmp_path):
    out = run(
        """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from examples.squared_relu.kernel import BLOCK, squared_relu_kernel
signature = {"x_ptr": "*bf16", "out_ptr": "*bf16", "count": "i32", "BLOCK": "constexpr"}
source = ASTSource(squared_relu_kernel, signature=signature, constexprs={"BLOCK": BLOCK})
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
print(".target sm_90" in compiled.asm["ptx"], len(compiled.asm["cubin"]) > 0)
""",
        TRITON_CACHE_DIR=str(tmp_path),
        TRITON_INTERPRET="0",
    )
    assert out.split() == ["True", "True"]
