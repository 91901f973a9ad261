"""The Triton kernel of silu_mul and its quantised forms: against the references, and compiled for Hopper."""

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
from graphsrt.lowering.kernels.silu_mul.kernel import launch
from graphsrt.ops import REFERENCE
from graphsrt.ops_fp8 import FP8, fp8_scale, quantize_fp8

torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True
generator = torch.Generator().manual_seed(3)

for dtype, (rows, width) in itertools.product((torch.float32, torch.float16, torch.bfloat16), ((1, 128), (5, 200))):
    # the exponential may be another by a rounding; the interpreter cuts bf16 off where a GPU and the reference round
    rounding = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-6}[dtype]
    x = (3 * torch.randn(2 * width, rows, generator=generator)).to(dtype).T
    if rows > 1:
        x[1] = float("nan")
    real = [row for row in range(rows) if row != 1]
    want = ops.silu_mul(x)
    (got,) = launch(x)
    assert got.shape == want.shape and got.dtype == want.dtype
    largest = float(want[real].abs().max())
    torch.testing.assert_close(got[real], want[real], rtol=rounding, atol=rounding * largest)
    assert rows == 1 or got[1].isnan().all()

    def near(quotients, numbers):
        # numbers on the edge between two of FP8 may fall to either side; others are the same
        apart = (numbers.float() - quotients.to(FP8).float()).abs()
        assert (apart <= quotients.abs() / 8 + 2**-9).all()
        assert (apart != 0).float().mean() <= (0.02 if dtype != torch.bfloat16 else 0.3)

    for block, bound in ((0, None), (32, None), (64, 1.5)):
        scale = REFERENCE[fp8_scale](want, block=block, largest=bound)
        quotients, scales = launch(x, block=block, largest=bound, numbers=torch.float32)
        torch.testing.assert_close(scales[real], scale[real], rtol=rounding, atol=rounding * float(scale[real].max()))
        near(quotients[real], REFERENCE[quantize_fp8](want, scale, block=block or width)[real])
    scale = torch.tensor([[0.02]])
    (quotients,) = launch(x, static_scale=scale, numbers=torch.float32)
    near(quotients[real], REFERENCE[quantize_fp8](want, scale)[real])
assert launch(torch.empty(0, 128))[0].shape == (0, 64)
for rows, block, words in ((torch.ones(2, 8, dtype=torch.float64), 0, "float64"), (torch.ones(2, 8), 6, "power of two"),
                           (torch.ones(1, 70000), 0, "35000 columns, more than 32768")):
    try:
        launch(rows, block=block)
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
from graphsrt.lowering.kernels.silu_mul.resources import variant
for quantised in ("none", "block"):
    made = variant(14336, quantised)
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
from graphsrt.lowering.kernels.silu_mul import kernel

x = torch.randn(3, 64, generator=torch.Generator().manual_seed(5))
scale = torch.tensor([[0.02]])
launched = []
original = kernel.launch


def launch(*args, **options):
    # rounded here: the interpreter rounds to FP8 wrongly where a carry changes the exponent
    launched.append(options)
    numbers, *scales = original(*args, **options, numbers=torch.float32)
    rounds = options["block"] is not None or options["static_scale"] is not None
    return (numbers.to(torch.float8_e4m3fn) if rounds else numbers, *scales)


with patch.object(kernel, "launch", launch):
    for dtype, times in ((torch.float32, 3), (torch.float64, 3)):
        rows = x.to(dtype)
        for target, args, how in ((ops.silu_mul, (rows,), {}), (ops.silu_mul_static_quant, (rows, scale), {}),
                                  (ops.silu_mul_quant, (rows,), {"block": 16, "largest": 0.5})):
            got, want = ops.KERNELS[target]["cuda"](*args, **how), target(*args, **how)
            for one, other in zip(*((r if isinstance(r, tuple) else (r,)) for r in (got, want))):
                assert one.dtype == other.dtype
                # a number of FP8 may be the neighbour of what the reference rounds to
                rounding = 0.13 if one.itemsize == 1 else 1e-5
                torch.testing.assert_close(one.float(), other.float(), rtol=rounding, atol=1e-3)
        assert len(launched) == times, dtype
""",
        TRITON_INTERPRET="1",
    )
