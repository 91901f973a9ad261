"""fuse_all_reduce_add_layer_norm: a sum over ranks, the residual that it is added to, and the layer norm of the two.

    s = all_reduce(x, axis="tp"); n, h = add_layer_norm(s, residual, weight, bias)
    → n, h = all_reduce_add_layer_norm(x, residual, weight, bias, axis="tp")

Needs: shard_tensor_parallel.
Leaves: ``graphsrt::all_reduce_add_layer_norm``, which lowering takes apart again where no kernel does all of it.
Numerics: exact; the sum is rounded to its dtype before the residual is added, as the operators by themselves do.
Source: ours; the twin of fuse_all_reduce_add_rms_norm.
"""

from __future__ import annotations

import torch.fx as fx

from graphsrt.passes.reduce_into_norm import expected, fuse
from graphsrt.program import NearMiss, Program


def fuse_all_reduce_add_layer_norm(
    program: Program,
    *,
    limit: int | None = None,
    near_misses: list[NearMiss] | None = None,
    sites: list[fx.Node] | None = None,
) -> int:
    """Fuse wherever a sum over ranks is added to a residual that a layer norm reads."""
    return fuse(program, "layer_norm", "fuse_all_reduce_add_layer_norm", limit, near_misses, sites)


fuse_all_reduce_add_layer_norm.expect = lambda program: expected(program, "layer_norm")  # type: ignore[attr-defined]
