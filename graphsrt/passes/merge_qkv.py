"""merge_qkv: the three projections that feed an attention become one matrix.

    q = linear(x, wq); k = linear(x, wk); v = linear(x, wv)
    → qkv = linear(x, cat([wq, wk, wv])); q, k, v = slices of qkv

Which linears belong together is read off the attention operator's arguments, not off names.

Needs: shard_tensor_parallel (each part keeps its own shards: ``cat([shard(q), shard(k), shard(v)])``).
Leaves: one column-parallel linear per attention; slices are views.
Numerics: exact up to the matrix library's choice of blocks.  Source: ours; every serving engine does it.
"""

from __future__ import annotations

import torch.fx as fx

from graphsrt import ops
from graphsrt.passes.merge import is_shared, linear_behind, merge, why_not
from graphsrt.program import NearMiss, Program, arguments


def merge_qkv(
    program: Program,
    *,
    limit: int | None = None,
    near_misses: list[NearMiss] | None = None,
    sites: list[fx.Node] | None = None,
) -> int:
    """Merge wherever q, k and v come from three linears of one input, in at most ``limit`` places."""
    fired = 0
    for node, linears in _projections(program):
        if limit is not None and fired >= limit:
            break
        reason = None
        if any(linear is None for linear in linears):
            reason = "q, k or v does not come straight from a linear"
        elif len(set(linears)) == 1:
            continue  # the model has one projection already
        else:
            reason = why_not(program, linears)  # type: ignore[arg-type]
        if reason is None:
            made = merge(program, linears, "qkv_proj", "merge_qkv")  # type: ignore[arg-type]
            fired += 1
            if sites is not None:
                sites.append(made)
        elif near_misses is not None:
            near_misses.append(NearMiss(node.name, node.meta.get("module", ""), reason))
    program.remove_dead()
    program.infer()
    return fired


def _projections(program: Program) -> list[tuple[fx.Node, list[fx.Node | None]]]:
    """An attention and the linears behind its q, k and v; attentions that share some of theirs (on halves of the heads,
    or of the values) come together, as the first of them. One that reads the keys of an earlier layer is left out: its
    own q has another input."""
    found: list[tuple[fx.Node, list[fx.Node | None]]] = []
    for node in program.calls(ops.attention):
        behind = [linear_behind(arguments(node)[name]) for name in ("q", "k", "v")]
        mine = set(behind) - {None}
        together = next((linears for _, linears in found if len(mine) > 1 and mine & set(linears)), None)
        if together is None or None in behind or None in together:
            found.append((node, behind))
        else:
            together += [x for x in behind if x not in together and _input(x) is _input(together[0])]
    return found


def _input(linear: fx.Node | None) -> fx.Node | None:
    return None if linear is None else arguments(linear)["input"]


def _expected(program: Program) -> int:
    """Attention operators whose q, k and v have a linear each, whose weights no other run of the layer shares."""
    return sum(
        len(set(linears)) >= 3 and all(x is not None and not is_shared(x) for x in linears)
        for _, linears in _projections(program)
    )


merge_qkv.expect = _expected  # type: ignore[attr-defined]
