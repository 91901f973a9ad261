"""The Triton kernel of rotations: against the references, and compiled for Hopper."""

from __future__ import annotations

from pathlib import Path

from tests.support.interpreted import needs_triton, run

pytestmark = needs_triton


def test_agrees_with_the_reference() -> None:
    """Heads that are slices of one projection, partial rotations, norms, both layouts of a pool, padding rows."""
    run(
        """
import itertools
import torch
import torch.utils.deterministic
from graphsrt import ops
from graphsrt.lowering.kernels.rope.kernel import launch, launch_write

torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True
generator = torch.Generator().manual_seed(7)
T, H, K = 5, 3, 1


def random(dtype, *shape):
    return torch.randn(shape, generator=generator).to(dtype)


for dtype, normed, interleaved, (size, rotated, values), kv_layer in itertools.product(
    (torch.float32, torch.bfloat16), (None, "before_weight", "after_weight"), (False, True),
    ((16, 16, 16), (24, 12, 24), (12, 8, 20)), (None, 1),
):
    qkv = random(dtype, T, (H + K) * size + K * values)
    qkv[2] = float("nan")  # a padding row: its numbers reach no other and are not written
    q, k, v = qkv.split([H * size, K * size, K * values], 1)
    q, k, v = q.view(T, H, size), k.view(T, K, size), v.view(T, K, values)
    positions, table = torch.tensor([4, 0, 1, 9, 9]), random(dtype, 11, rotated)
    slots = torch.tensor([6, 2, -1, 0, 5])
    shape = (3, 2, 8, K, size) if values == size else (3, 1, 8, K, size + values)
    how = {"layer_id": 2, "kv_layer": kv_layer, "interleaved": interleaved}
    if normed:
        how |= {"q_weight": random(dtype, size), "k_weight": random(dtype, size), "eps": 1e-5, "cast": normed,
                "offset": float(normed == "after_weight")}
    pools = [torch.zeros(shape, dtype=dtype) for _ in range(2)]
    want = ops.REFERENCE[ops.rope_kv_write](q, k, v, positions, table, pools[0], slots, **how)
    got = launch_write(q, k, v, positions, table, pools[1], slots, **how)
    # float32 sums of norms in another order; the interpreter cuts bf16 off where a GPU and the reference round
    rounding = {torch.float32: 2e-6, torch.bfloat16: 2**-6}[dtype]
    real = [0, 1, 3, 4]
    largest = float(want[real].abs().max())
    torch.testing.assert_close(got[real], want[real], rtol=rounding, atol=rounding * largest)
    assert got[2].isnan().any()
    torch.testing.assert_close(pools[1], pools[0], rtol=rounding, atol=rounding * largest)
    turned, keys = launch(q, k, positions, table, **{n: x for n, x in how.items() if "layer" not in n})
    assert torch.equal(turned[real], got[real])
    wanted = ops.REFERENCE[ops.rope](k, positions, table, interleaved=interleaved) if not normed else (
        ops.REFERENCE[ops.qk_norm_rope](q, k, how["q_weight"], how["k_weight"], positions, table, eps=1e-5, cast=normed,
                                        offset=how["offset"], interleaved=interleaved)[1])
    torch.testing.assert_close(keys[real], wanted[real], rtol=rounding, atol=rounding * largest)
    written = pools[1][2 if kv_layer is None else 1].abs().sum((-1, -2)).squeeze()
    assert (written != 0).sum() == 4 * shape[1] and (pools[1] != 0).sum() <= 4 * K * (size + values)

# an FP8 pool: values are divided by the layer's scale, and saturate. The interpreter may round to a neighbour, and
# wrongly where a carry changes the exponent
q, k, v = (random(torch.float32, T, heads, 16) for heads in (H, K, K))
scales = {"k_scale": torch.full((1, 1), 0.001), "v_scale": torch.full((1, 1), 0.02)}
pools = [torch.zeros(1, 2, 8, K, 16).to(torch.float8_e4m3fn) for _ in range(2)]
for function, pool in zip((ops.REFERENCE[ops.rope_kv_write], launch_write), pools):
    function(q, k, v, positions, random(torch.float32, 11, 16) * 0 + 1, pool, slots, layer_id=0, **scales)
one, other = (pool.float() for pool in pools)
assert one.abs().max() == 448 and one.isfinite().all() and (one != 0).any()
assert ((one - other).abs() > one.abs() / 8 + 2**-9).float().mean() < 0.02 and (one != other).float().mean() < 0.05

none = [x[:0] for x in (q, k, v, positions)]
assert launch_write(*none, table.float(), pools[0], slots[:0], layer_id=0, **scales).shape == (0, H, 16)
for dtypes, words in (((torch.float64, torch.float64), "heads are torch.float64"),
                      ((torch.float32, torch.bfloat16), "the table torch.bfloat16")):
    try:
        launch_write(*(x.to(dtypes[0]) for x in (q, k, v)), positions, table.to(dtypes[1]), pools[0], slots, layer_id=0)
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
from graphsrt.lowering.kernels.rope.resources import variant
for normed, scaled in ((False, False), (True, True)):
    made = variant(256, normed, scaled)
    print(".target sm_90" in made.ptx, made.spilled_bytes, made.registers <= 64,
          "cvt.rn.satfinite.e4m3x2.f32" in made.ptx)
""",
        TRITON_CACHE_DIR=str(tmp_path),
        TRITON_INTERPRET="0",
    )
    assert out.split() == ["True", "0", "True", "False", "True", "0", "True", "True"]


def test_runs_in_the_place_of_the_references() -> None:
    """Arguments reach the kernel as the operators have them; what it does not serve goes to the references."""
    run(
        """
import torch
from unittest.mock import patch
from graphsrt import ops
from graphsrt.lowering.kernels.rope import kernel

generator = torch.Generator().manual_seed(5)
q, k, v = (torch.randn(3, heads, 8, generator=generator) for heads in (4, 2, 2))
weights = [torch.rand(8, generator=generator) for _ in range(2)]
table, positions, slots = torch.randn(5, 6, generator=generator), torch.tensor([1, 0, 4]), torch.tensor([3, 0, -1])
launched = []
original = kernel._run


def counted(*args, **options):
    launched.append(options)
    return original(*args, **options)


with patch.object(kernel, "_run", counted):
    for dtype, times in ((torch.float32, 3), (torch.float64, 3)):
        heads, given, rest = [x.to(dtype) for x in (q, k, v)], [w.to(dtype) for w in weights], table.to(dtype)
        norm = {"eps": 1e-6, "cast": "after_weight", "offset": 1.0, "interleaved": True}
        got = ops.KERNELS[ops.rope]["cuda"](heads[0], positions, rest, interleaved=True)
        torch.testing.assert_close(got, ops.rope(heads[0], positions, rest, interleaved=True))
        got = ops.KERNELS[ops.qk_norm_rope]["cuda"](*heads[:2], *given, positions, rest, **norm)
        for one, other in zip(got, ops.qk_norm_rope(*heads[:2], *given, positions, rest, **norm)):
            torch.testing.assert_close(one, other)
        pools = [torch.zeros(2, 2, 6, 2, 8, dtype=dtype) for _ in range(2)]
        how = {"layer_id": 1, **dict(zip(("q_weight", "k_weight"), given)), **norm}
        got = ops.KERNELS[ops.rope_kv_write]["cuda"](*heads, positions, rest, pools[0], slots, **how)
        torch.testing.assert_close(got, ops.rope_kv_write(*heads, positions, rest, pools[1], slots, **how))
        torch.testing.assert_close(pools[0], pools[1])
        assert len(launched) == times, (dtype, launched)
""",
        TRITON_INTERPRET="1",
    )
