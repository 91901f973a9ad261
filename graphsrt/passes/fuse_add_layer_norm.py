"""fuse_add_layer_norm: a residual addition and the layer norm that reads it become one operator with two results.

    h = add(residual, x); n = layer_norm(h, [E], weight, bias)  →  n, h = add_layer_norm(x, residual, weight, bias)

Needs: nothing; models with layer norms have them as ``aten.layer_norm``.
Leaves: ``graphsrt::add_layer_norm`` where x and the residual have one shape and dtype and the norm runs over the last
dimension alone; other layer norms stay, and a near miss says why.
Numerics: exact; the sum is rounded to its dtype before the norm, as the two operators do.
Source: ours; the twin of fuse_add_rms_norm.
"""

from __future__ import annotations

import torch.fx as fx

from graphsrt import ops
from graphsrt.passes.joining import miss
from graphsrt.passes.norm_forms import grow, residual_sum, taken, why_no_residual, why_no_sum
from graphsrt.program import NearMiss, Program, arguments, aten


def fuse_add_layer_norm(
    program: Program,
    *,
    limit: int | None = None,
    near_misses: list[NearMiss] | None = None,
    sites: list[fx.Node] | None = None,
) -> int:
    """Fuse wherever a layer norm reads a sum of two values."""
    fired, misses = 0, []
    for norm in program.calls(aten.layer_norm.default, ops.all_reduce_add_layer_norm):
        if limit is not None and fired >= limit:
            break
        total = residual_sum(norm) if norm.target is aten.layer_norm.default else None
        reason = taken(norm) if norm.target is not aten.layer_norm.default else why_no_sum(norm)
        if total is not None:
            reason = why_no_residual(program, total, norm)
        if total is None or reason is not None:
            misses += [miss(norm, reason)] if reason is not None else []
            continue
        args = {"x": arguments(total)["other"], "residual": arguments(total)["self"]}
        fused = grow(program, norm, args, "fuse_add_layer_norm", absorbed={"total": total}, adds=True)
        fired += 1
        if sites is not None:
            sites.append(fused)
    if near_misses is not None:
        near_misses += misses
    return fired


def _expected(program: Program) -> int:
    found = [(norm, residual_sum(norm)) for norm in program.calls(aten.layer_norm.default)]
    return sum(total is not None and why_no_residual(program, total, norm) is None for norm, total in found)


fuse_add_layer_norm.expect = _expected  # type: ignore[attr-defined]
