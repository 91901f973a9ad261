"""merge_gate_up: the two projections of a gated MLP become one matrix.

    glu(linear(x, wg), linear(x, wu))  →  gu = linear(x, cat([wg, wu])); glu(slice(gu), slice(gu))

Needs: recognize_gated_mlp, shard_tensor_parallel (``cat([shard(gate), shard(up)])``).
Leaves: one column-parallel linear per MLP, gate first.
Numerics: exact up to the matrix library's choice of blocks.  Source: ours; every serving engine does it.
"""

from __future__ import annotations

import torch.fx as fx

from graphsrt import ops
from graphsrt.passes.merge import is_shared, linear_behind, merge, why_not
from graphsrt.program import NearMiss, Program, arguments, aten


def merge_gate_up(
    program: Program,
    *,
    limit: int | None = None,
    near_misses: list[NearMiss] | None = None,
    sites: list[fx.Node] | None = None,
) -> int:
    """Merge wherever gate and up are two linears of one input, in at most ``limit`` places."""
    fired = 0
    for node in program.calls(ops.glu):
        if limit is not None and fired >= limit:
            break
        gate, up = arguments(node)["gate"], arguments(node)["up"]
        if linear_behind(gate) is not None and linear_behind(gate) is linear_behind(up):
            continue  # the model has one projection already
        direct = gate.target is aten.linear.default and up.target is aten.linear.default
        reason = why_not(program, [gate, up]) if direct else "gate or up is not a linear itself"
        if reason is None:
            made = merge(program, [gate, up], "gate_up_proj", "merge_gate_up")
            fired += 1
            if sites is not None:
                sites.append(made)
        elif near_misses is not None:
            near_misses.append(NearMiss(node.name, node.meta.get("module", ""), reason))
    program.remove_dead()
    program.infer()
    return fired


def _expected(program: Program) -> int:
    """Gated activations whose gate and up are two linears, whose weights no other run of the layer shares."""
    return sum(
        all(arguments(n)[x].target is aten.linear.default and not is_shared(arguments(n)[x]) for x in ("gate", "up"))
        and arguments(n)["gate"] is not arguments(n)["up"]
        for n in program.calls(ops.glu)
    )


merge_gate_up.expect = _expected  # type: ignore[attr-defined]
