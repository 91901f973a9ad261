"""Operators that fusions make, compiled: one region with all of them, against their references."""

from __future__ import annotations

from typing import Any

import torch

from graphsrt import ops
from graphsrt.lowering.region_cache import compile_regions, load
from graphsrt.lowering.regions import cut, distinct_regions
from graphsrt.testing import trace

NORM: dict[str, Any] = {"eps": 1e-5, "cast": "before_weight"}


def block(x: Any, residual: Any, q: Any, k: Any, positions: Any, w: Any, b: Any, qw: Any, kw: Any, table: Any) -> Any:
    numbers, scale, total = ops.add_rms_norm_quant(x, residual, w, **NORM, block=16)
    normed, total = ops.add_layer_norm(total, residual, w, b, eps=1e-5)
    gated, gated_scale = ops.silu_mul_quant(total)
    static, _ = ops.add_rms_norm_static_quant(normed, x, w, scale[:1, :1], **NORM)
    heads, keys = ops.qk_norm_rope(q, k, qw, kw, positions, table, **NORM)
    rows = [numbers, scale, normed, gated, gated_scale, static, heads.flatten(1), keys.flatten(1)]
    return torch.cat([row.to(torch.float32) for row in rows], 1)


def test_compiled_as_defined() -> None:
    """For one token and for several, bit for bit: every rounding of the references is there."""
    program = trace(
        block, dtype=torch.bfloat16,
        inputs={"x": ("T", 48), "residual": ("T", 48), "q": ("T", 3, 10), "k": ("T", 2, 10), "positions": ("T",)},
        weights={"w": (48,), "b": (48,), "qw": (10,), "kw": (10,), "table": (13, 8)},
    )  # fmt: skip
    (region,) = distinct_regions(cut(program))
    compile_regions(program)
    generator = torch.Generator().manual_seed(2)
    for tokens in (1, 5):
        values = []
        for formal in (*region.inputs, *region.weights):
            shape = [tokens if isinstance(size, str) else size for size in formal.shape]
            random = torch.randn(shape, generator=generator).to(formal.dtype)
            values.append(random if formal.dtype.is_floating_point else torch.arange(tokens))
        (got,), (want,) = load(region).run(values), region.run(values)
        # a product with an rsqrt or a sum over a row may be taken in another order before it is rounded
        assert (got != want).float().mean() <= 0.02 and torch.allclose(got, want, rtol=0.13, atol=0.02)
