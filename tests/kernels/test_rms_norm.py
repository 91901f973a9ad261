"""The Triton kernel of rms_norm and what fusions make of it: against the references, and compiled for Hopper."""

from __future__ import annotations

from pathlib import Path

from tests.support.interpreted import needs_triton, run

pytestmark = needs_triton


def test_agrees_with_the_references() -> None:
    """Also in rows whose memory is not contiguous, beside a row of NaN, with results in memory full of NaN."""
    run(
        """
import itertools
import torch
import torch.utils.deterministic
from graphsrt import ops
from graphsrt.lowering.kernels.rms_norm.kernel import launch
from graphsrt.ops import REFERENCE
from graphsrt.ops_fp8 import FP8, fp8_scale, quantize_fp8

torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True
generator = torch.Generator().manual_seed(3)


def random(dtype, *shape):
    return torch.randn(shape, generator=generator).to(dtype)


def close(got, want, rounding):
    assert got.shape == want.shape and got.dtype == want.dtype, (got.dtype, want.dtype)
    torch.testing.assert_close(got, want, rtol=rounding, atol=rounding * float(want.abs().nan_to_num().max()),
                               equal_nan=True)


def as_reference(numbers, quotients, rounding):
    # Numbers that lie on the edge between two of FP8 may fall to either side; others are the same.
    apart = (numbers.float() - quotients.to(FP8).float()).abs()
    assert (apart <= quotients.abs() / 8 + 2**-9).all()
    assert (apart != 0).float().mean() <= rounding


for dtype, weights, (cast, offset), shape, adds in itertools.product(
    (torch.float32, torch.float16, torch.bfloat16), ("same", "float32"),
    (("before_weight", 0.0), ("after_weight", 1.0)), ((1, 128), (5, 200)), (False, True),
):
    if (dtype, weights) == (torch.float32, "float32") or (shape[0] == 1 and not adds):
        continue
    # float32 sums in another order; the interpreter cuts bf16 off where a GPU and the reference round
    rounding = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-6}[dtype]
    x, residual = random(dtype, shape[-1], shape[0]).T, random(dtype, *shape)
    if shape[0] > 1:
        x[1] = float("nan")
    w = (0.7 + 0.3 * random(torch.float32, shape[-1])).to(dtype if weights == "same" else torch.float32)
    how = {"eps": 1e-5, "cast": cast, "offset": offset}
    given = {"residual": residual} if adds else {}
    if adds:
        normed, total = ops.add_rms_norm(x, residual, w, **how)
    else:
        normed, total = ops.rms_norm(x, w, **how), None
    found, *rest = launch(x, w, **given, **how)
    close(found, normed, rounding)
    if adds:
        close(rest[0], total, rounding)
    real = [row for row in range(shape[0]) if row != 1]
    for block, largest in ((0, None), (32, None), (64, 1.5)):
        scale = REFERENCE[fp8_scale](normed, block=block)
        if largest is not None:
            scale = (scale * 448).clamp(max=largest) / 448
        quotients, scales, *rest = launch(x, w, **given, **how, block=block, largest=largest, numbers=torch.float32)
        close(scales[real], scale[real], rounding)
        numbers = REFERENCE[quantize_fp8](normed, scale, block=block or shape[-1])
        as_reference(numbers[real], quotients[real], 0.02 if dtype != torch.bfloat16 else 0.3)
        assert len(rest) == adds
    scale = torch.tensor([[0.01]])
    quotients, *rest = launch(x, w, **given, **how, static_scale=scale, numbers=torch.float32)
    as_reference(REFERENCE[quantize_fp8](normed, scale)[real], quotients[real],
                 0.02 if dtype != torch.bfloat16 else 0.3)
assert launch(torch.empty(0, 128), torch.ones(128), eps=1e-5, cast="before_weight")[0].shape == (0, 128)
for rows, weight, block, words in (
    (torch.ones(2, 8, dtype=torch.float64), torch.ones(8), 0, "float64"),
    (torch.ones(2, 8), torch.ones(8, dtype=torch.float16), 0, "weight is torch.float16"),
    (torch.ones(2, 8), torch.ones(8), 6, "no power of two"),
    (torch.ones(1, 40000), torch.ones(40000), 0, "more than 32768"),
):
    try:
        launch(rows, weight, eps=1e-5, cast="before_weight", block=block)
        raise SystemExit("it did not refuse " + words)
    except ValueError as error:
        assert words in str(error), error
""",
        TRITON_INTERPRET="1",
    )


def test_compiles_for_hopper_without_spilling(tmp_path: Path) -> None:
    """FP8 numbers are rounded to nearest by one instruction, which saturates."""
    out = run(
        """
from graphsrt.lowering.kernels.rms_norm.resources import variant
for quantised in ("none", "block"):
    made = variant(8192, True, quantised)
    print(".target sm_90" in made.ptx, made.spilled_bytes, made.registers <= 64,
          "cvt.rn.satfinite.e4m3x2.f32" in made.ptx)
""",
        TRITON_CACHE_DIR=str(tmp_path),
        TRITON_INTERPRET="0",
    )
    assert out.split() == ["True", "0", "True", "False", "True", "0", "True", "True"]


def test_runs_in_the_place_of_the_references() -> None:
    """Each operator's arguments reach the kernel, and rows that it does not serve go to the reference."""
    run(
        """
import torch
from unittest.mock import patch
from graphsrt import ops
from graphsrt.lowering.kernels.rms_norm import kernel

generator = torch.Generator().manual_seed(5)
x, residual = (torch.randn(3, 64, generator=generator) for _ in range(2))
w, scale = torch.rand(64, generator=generator), torch.tensor([[0.02]])
how = {"eps": 1e-5, "cast": "after_weight", "offset": 1.0}
launched = []


def launch(*args, **options):
    launched.append(options)
    return kernel_launch(*args, **options)


kernel_launch = kernel.launch
with patch.object(kernel, "launch", launch):
    for target, tensors, more in (
        (ops.rms_norm, (x, w), {}),
        (ops.add_rms_norm, (x, residual, w), {}),
        (ops.rms_norm_quant, (x, w), {"block": 16}),
        (ops.rms_norm_static_quant, (x, w, scale), {}),
        (ops.add_rms_norm_quant, (x, residual, w), {"largest": 1.5}),
        (ops.add_rms_norm_static_quant, (x, residual, w, scale), {}),
    ):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(target._schema.name, "CUDA")
        got, want = ops.KERNELS[target]["cuda"](*tensors, **how, **more), target(*tensors, **how, **more)
        got, want = (value if isinstance(value, tuple) else (value,) for value in (got, want))
        for one, other in zip(got, want, strict=True):
            assert one.shape == other.shape and one.dtype == other.dtype
            # float32 sums in another order; the interpreter rounds to FP8 wrongly where a carry changes the exponent
            apart = (one.double() - other.double()).abs() > 1e-5 * other.double().abs() + 1e-6
            assert apart.double().mean() <= (0.1 if one.dtype == torch.float8_e4m3fn else 0), target
    assert len(launched) == 6
    wide = [t.double() for t in (x, w)]
    assert torch.equal(ops.KERNELS[ops.rms_norm]["cuda"](*wide, **how), ops.rms_norm(*wide, **how))
    assert len(launched) == 6
""",
        TRITON_INTERPRET="1",
    )
