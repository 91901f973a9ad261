"""fuse_silu_mul: a SiLU gate over the two halves of one projection reads it in one go.

    glu(slice(gu, …, 0, F), slice(gu, …, F, 2F), act="silu")  →  silu_mul(gu)

Needs: merge_gate_up (or a model whose projection is fused already).
Leaves: ``graphsrt::silu_mul``; GELU gates stay ``graphsrt::glu``.
Numerics: exact.  Source: ours; SGLang's and vLLM's silu_and_mul.
"""

from __future__ import annotations

import torch.fx as fx

from graphsrt import ops
from graphsrt.program import NearMiss, Program, arguments, aten


def fuse_silu_mul(
    program: Program,
    *,
    limit: int | None = None,
    near_misses: list[NearMiss] | None = None,
    sites: list[fx.Node] | None = None,
) -> int:
    """Fuse wherever gate is the first half and up the second half of one value."""
    fired = 0
    for node in program.calls(ops.glu):
        if limit is not None and fired >= limit:
            break
        reason = _why_not(program, node)
        if reason is None:
            whole = arguments(node)["gate"].args[0]
            fused = program.call(ops.silu_mul, whole, name=f"{node.name}.fused", before=node, like=node)
            fused.meta["made_by"] = (*node.meta.get("made_by", ()), "fuse_silu_mul")
            if "placement" in node.meta:
                fused.meta["placement"] = node.meta["placement"]
            program.replace(node, fused, keep_name=False)
            program.rename(
                fused,
                fused.name.removesuffix(".glu.fused") + ".silu_mul"
                if fused.name.endswith(".glu.fused")
                else fused.name,
            )
            fired += 1
            if sites is not None:
                sites.append(fused)
        elif near_misses is not None:
            near_misses.append(NearMiss(node.name, node.meta.get("module", ""), reason))
    program.remove_dead()
    program.infer()
    return fired


def _why_not(program: Program, node) -> str | None:  # type: ignore[no-untyped-def]
    args = arguments(node)
    gate, up = args["gate"], args["up"]
    if args["act"] != "silu":
        return f"the activation is {args['act']}; only SiLU has a fused operator"
    if gate.target is not aten.slice.Tensor or up.target is not aten.slice.Tensor or gate.args[0] is not up.args[0]:
        return "gate and up are not slices of one value"
    whole = gate.args[0]
    last = whole.meta["val"].dim() - 1
    width = whole.meta["val"].shape[last]
    if tuple(gate.args[1:]) != (last, 0, width // 2) or tuple(up.args[1:]) != (last, width // 2, width):
        return f"gate and up are {gate.args[1:]} and {up.args[1:]} of {width} channels, not its first and second half"
    return None


def _expected(program: Program) -> int:
    """SiLU gates whose two arguments are slices of one value."""
    nodes = [arguments(n) for n in program.calls(ops.glu)]
    return sum(
        a["act"] == "silu" and a["gate"].target is aten.slice.Tensor and a["gate"].args[0] is a["up"].args[0]
        for a in nodes
    )


fuse_silu_mul.expect = _expected  # type: ignore[attr-defined]
