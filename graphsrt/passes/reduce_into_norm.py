"""What the fuse_all_reduce_add passes share: a sum over ranks joins the norm that reads it and a residual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from graphsrt import ops
from graphsrt.passes.joining import miss
from graphsrt.passes.norm_forms import FORMS, given, grow, norms, residual_sum, why_no_residual
from graphsrt.program import NearMiss, Program, arguments, aten, target_name


@dataclass(frozen=True)
class _Site:
    """A sum over ranks that can join ``norm``; ``total`` is the addition, where that is still by itself."""

    summed: fx.Node
    norm: fx.Node
    residual: fx.Node
    total: fx.Node | None


def fuse(
    program: Program,
    kind: str,
    made_by: str,
    limit: int | None,
    near_misses: list[NearMiss] | None,
    sites: list[fx.Node] | None,
) -> int:
    """Join every sum over ranks with the norm of one kind that reads it, where nobody else does."""
    fired, misses = 0, []
    if not norms(program, kind):
        return 0
    for summed in program.calls(ops.all_reduce, ops.reduce_scatter):
        if limit is not None and fired >= limit:
            break
        found = _look(program, summed, kind)
        if isinstance(found, str):
            misses.append(miss(summed, found))
        elif found is not None:
            fused = _apply(program, found, made_by)
            fired += 1
            if sites is not None:
                sites.append(fused)
    if near_misses is not None:
        near_misses += misses
    return fired


def expected(program: Program, kind: str) -> int:
    """Sums over ranks that nothing keeps from joining a norm of this kind."""
    found = [_look(program, summed, kind) for summed in program.calls(ops.all_reduce)]
    return sum(isinstance(item, _Site) for item in found)


def _look(program: Program, summed: fx.Node, kind: str) -> _Site | str | None:
    """Where a sum can join a norm; or why not, in words; or None if no norm of this kind is near."""
    readers = list(summed.users)
    near = [norm for user in readers for norm in _norms_near(user)]
    if not any(FORMS[norm.target].kind == kind for norm in near):
        return None if near else _nowhere(readers)
    if summed.target is ops.reduce_scatter:
        return "each rank gets its own tokens of the sum (reduce_scatter), and an all_reduce gives all of them"
    if arguments(summed)["op"] != "sum":
        return f"it is the {arguments(summed)['op']} over ranks, not the sum"
    if len(readers) > 1:
        return f"{' and '.join(reader.name for reader in readers)} read the sum over ranks"
    (user,) = readers
    if user.target is aten.add.Tensor:
        return _before_addition(program, summed, user, near)
    if not FORMS[user.target].adds:
        return f"{user.name} norms the sum over ranks itself, no residual is added to it"
    args = given(user)
    residual = args["residual"] if args["x"] is summed else args["x"]
    return _Site(summed, user, residual, None)


def _before_addition(program: Program, summed: fx.Node, total: fx.Node, near: list[fx.Node]) -> _Site | str:
    norm = near[0]
    if len(near) > 1:
        return f"{norm.name} and {near[1].name} both read {total.name}"
    if residual_sum(norm) is not total:
        return f"{norm.name} does not norm {total.name} itself"
    reason = why_no_residual(program, total, norm)
    if reason is not None:
        return reason
    return _Site(summed, norm, next(node for node in total.all_input_nodes if node is not summed), total)


def _apply(program: Program, site: _Site, made_by: str) -> fx.Node:
    args: dict[str, Any] = {
        "x": arguments(site.summed)["x"], "residual": site.residual, "axis": arguments(site.summed)["axis"],
    }  # fmt: skip
    absorbed = {} if site.total is None else {"total": site.total}
    return grow(program, site.norm, args, made_by, absorbed=absorbed, covered=[site.summed], adds=True, reduces=True)


def _norms_near(reader: fx.Node) -> list[fx.Node]:
    """The norms that a reader of a sum over ranks is, or that read the addition which it is."""
    if reader.target is aten.add.Tensor:
        return [user for user in reader.users if user.target in FORMS]
    return [reader] if reader.target in FORMS else []


def _nowhere(readers: list[fx.Node]) -> str:
    """Words for a sum that no norm reads, with or without a residual."""
    what = "it"
    if len(readers) == 1 and readers[0].target is aten.add.Tensor:
        what, readers = f"{readers[0].name}, the sum with the residual", list(readers[0].users)
    kinds = [target_name(reader.target) if reader.op == "call_function" else "the result" for reader in readers]
    return f"no norm reads {what}, but {' and '.join(dict.fromkeys(kinds))}"
