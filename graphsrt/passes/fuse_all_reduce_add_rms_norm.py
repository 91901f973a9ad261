"""fuse_all_reduce_add_rms_norm: a sum over ranks, the residual that it is added to, and the norm of the two in one.

    s = all_reduce(x, axis="tp"); n, h = add_rms_norm(s, residual, weight)
    → n, h = all_reduce_add_rms_norm(x, residual, weight, axis="tp")

The addition and the norm may still be two operators, and the norm may be quantized already: every form of the norm is
known. A sum that goes elsewhere (to the norm of a branch, to rows that are selected) stays, and a near miss says where.

Needs: shard_tensor_parallel, recognize_rms_norm.
Leaves: ``graphsrt::all_reduce_add_rms_norm``, which lowering takes apart again where no kernel does all of it.
Numerics: exact; the sum is rounded to its dtype before the residual is added, as the operators by themselves do.
Source: ours; FlashInfer's and TensorRT-LLM's all-reduce fusion.
"""

from __future__ import annotations

import torch.fx as fx

from graphsrt.passes.reduce_into_norm import expected, fuse
from graphsrt.program import NearMiss, Program


def fuse_all_reduce_add_rms_norm(
    program: Program,
    *,
    limit: int | None = None,
    near_misses: list[NearMiss] | None = None,
    sites: list[fx.Node] | None = None,
) -> int:
    """Fuse wherever a sum over ranks is added to a residual that an RMS norm reads."""
    return fuse(program, "rms_norm", "fuse_all_reduce_add_rms_norm", limit, near_misses, sites)


fuse_all_reduce_add_rms_norm.expect = lambda program: expected(program, "rms_norm")  # type: ignore[attr-defined]
