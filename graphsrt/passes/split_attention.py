"""split_attention: an attention whose heads are cut into parts becomes one attention for each part.

    a = attention(rope(q), k, v);  y = a[:, :H/2] - λ · a[:, H/2:]
    → a_0 = attention(rope(q[:, :H/2]), k[:, :K/2], v[:, :K/2]);  a_1 = …;  y = a_0 - λ · a_1

Heads do not see each other, so a part of them is the attention of a part of the queries, and of their keys and values.
The cuts move up to the projections, and ``split_linears`` gives each part a linear of its own: what is subtracted lies
on one rank, however many ranks there are. Parts are whole groups of query heads; each keeps keys and values of its own,
as many as before together.

Needs: normalize, recognize_rope.
Leaves: no attention whose heads are cut, where the cuts are at groups of heads.
Numerics: exact.
Source: ours; Differential Transformer (Ye et al. 2024) subtracts one half of its heads from the other.
"""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from graphsrt import ops
from graphsrt.program import NearMiss, Program, arguments, aten

_ROWWISE = (ops.rope, ops.rms_norm)
"""Operators of one tensor that treat each head by itself."""


class _CannotCut(Exception):
    """Why a cut does not move up."""


def split_attention(
    program: Program,
    *,
    limit: int | None = None,
    near_misses: list[NearMiss] | None = None,
    sites: list[fx.Node] | None = None,
) -> int:
    """Move cuts of attention's heads above it, or the first ``limit`` of them; the count is of cuts."""
    cutter = _Cutter(program)
    fired = 0
    for cut in _cuts(program):
        if limit is not None and fired >= limit:
            break
        args = arguments(cut)
        try:
            cutter.check(args["self"], args["start"], args["end"])
        except _CannotCut as reason:
            if near_misses is not None:
                near_misses.append(NearMiss(cut.name, cut.meta.get("module", ""), str(reason)))
            continue
        made = cutter.part(args["self"], args["dim"], args["start"], args["end"], before=cut)
        program.replace(cut, made, keep_name=False)
        fired += 1
        if sites is not None:
            sites.append(made)
    program.remove_dead()
    _renumber(program)
    program.infer()
    return fired


def _cuts(program: Program) -> list[fx.Node]:
    """Slices along the heads of what attention made."""
    return [node for node in program.calls(aten.slice.Tensor) if _is_cut(node)]


def _is_cut(node: fx.Node) -> bool:
    args = arguments(node)
    return args["dim"] == 1 and args["step"] == 1 and bool(_attentions(args["self"]))


def _attentions(value: fx.Node) -> list[fx.Node]:
    """The attentions that ``value`` is put together from, side by side in the channels of a head; none for another."""
    if value.target is ops.attention:
        return [value]
    if value.target is aten.cat.default and arguments(value)["dim"] == 2:
        found = [_attentions(part) for part in arguments(value)["tensors"]]
        return [node for part in found for node in part] if all(found) else []
    return []


split_attention.expect = lambda program: len(_cuts(program))  # type: ignore[attr-defined]
split_attention.required = False  # type: ignore[attr-defined]


class _Cutter:
    """Makes parts of values, each once."""

    def __init__(self, program: Program):
        self.program = program
        self.made: dict[tuple[fx.Node, int, int, int], fx.Node] = {}

    def check(self, value: fx.Node, start: int, end: int) -> None:
        """Raise :class:`_CannotCut` where heads ``start`` to ``end`` of ``value`` are no attention of their own."""
        for node in _attentions(value):
            args = arguments(node)
            heads, kv_heads = (int(self.program.shape(args[name])[1]) for name in "qk")
            group = heads // kv_heads
            if start % group or end % group:
                raise _CannotCut(f"heads {start} to {end} are no whole groups of {group}")
            if args["sinks"] is not None or args["alibi_slopes"] is not None:
                raise _CannotCut("heads have sinks or slopes of their own")

    def part(self, value: fx.Node, dim: int, start: int, end: int, before: fx.Node) -> fx.Node:
        """Positions ``start`` to ``end`` of ``value`` along ``dim``, cut as far up as can be."""
        if (start, end) == (0, int(value.meta["val"].shape[dim])):
            return value
        key = (value, dim, start, end)
        if key not in self.made:
            self.made[key] = self._part(value, dim, start, end, before)
        return self.made[key]

    def _part(self, value: fx.Node, dim: int, start: int, end: int, before: fx.Node) -> fx.Node:
        args: dict[str, Any] = arguments(value) if value.op == "call_function" else {}

        def up(node: fx.Node, dim: int = dim, start: int = start, end: int = end) -> fx.Node:
            return self.part(node, dim, start, end, before)

        if value.target is ops.attention:
            group = int(value.meta["val"].shape[1]) // int(args["k"].meta["val"].shape[1])
            keys = [up(args[name], 1, start // group, end // group) for name in "kv"]
            return self._call(value, up(args["q"]), *keys, before=before, **value.kwargs)
        if value.target in _ROWWISE and dim < value.meta["val"].dim() - 1:
            return self._call(value, up(args["x"]), *value.args[1:], before=before, **value.kwargs)
        if value.target is aten.cat.default and args["dim"] != dim:
            return self._call(value, [up(part) for part in args["tensors"]], args["dim"], before=before)
        if value.target is aten.cat.default:
            at = 0
            for part in args["tensors"]:
                size = int(part.meta["val"].shape[dim])
                if at <= start and end <= at + size:
                    return up(part, dim, start - at, end - at)
                at += size
        if value.target is aten.transpose.int:
            return self._transposed(value, dim, start, end, before)
        if value.target is aten.slice.Tensor and args["dim"] == dim and args["step"] == 1:
            return up(args["self"], dim, args["start"] + start, args["start"] + end)
        return self._call(value, value, dim, start, end, before=before, target=aten.slice.Tensor)

    def _transposed(self, value: fx.Node, dim: int, start: int, end: int, before: fx.Node) -> fx.Node:
        """Part of a transposed value. One that was transposed and cut before, as models do to repeat values for groups
        of heads, is a cut of what was there first."""
        args = arguments(value)
        swap = {args["dim0"]: args["dim1"], args["dim1"]: args["dim0"]}
        inner = self.part(args["self"], swap.get(dim, dim), start, end, before)
        if inner.target is aten.slice.Tensor and (cut := arguments(inner))["step"] == 1:
            first = cut["self"]
            if first.target is aten.transpose.int and set(first.args[1:]) == set(swap) and cut["dim"] == swap.get(dim):
                return self.part(first.args[0], dim, cut["start"], cut["end"], before)
        return self._call(value, inner, args["dim0"], args["dim1"], before=before)

    def _call(self, like: fx.Node, *given: Any, before: fx.Node, target: Any = None, **keywords: Any) -> fx.Node:
        operator: Any = target or like.target
        node = self.program.call(
            operator, *given, name=f"{like.name}.part", before=before, like=like, **keywords
        )  # fmt: skip
        node.meta["made_by"] = (*like.meta.get("made_by", ()), "split_attention")
        self.program.infer([node])
        return node


def _renumber(program: Program) -> None:
    """Each attention keeps keys and values of its own: new ones get the numbers of those that went, then new ones."""
    nodes = program.calls(ops.attention)
    is_new = {node: "split_attention" in node.meta.get("made_by", ()) for node in nodes}
    taken = {arguments(node)["layer_id"] for node in nodes if not is_new[node]}
    free = iter(number for number in range(len(nodes)) if number not in taken)
    for node in nodes:
        if is_new[node]:
            node.kwargs = {**node.kwargs, "layer_id": next(free)}
    if "num_layers" in program.constants:
        program.constants["num_layers"] = len(nodes)
