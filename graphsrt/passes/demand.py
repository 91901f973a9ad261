"""What an operator needs of its arguments so that its result comes out sharded: the rules behind the sharding pass.

:func:`demand` answers for one operator: given that dimension ``d`` of its result is divided by a layout, how must each
argument be divided? Either a list of (argument, requirement) or a :class:`Refusal`, in words, which may carry the
layout that would have been accepted. Arguments that are not listed stay whole on every rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.fx as fx

from graphsrt import ops
from graphsrt.placement import Heads, Layout, Shard
from graphsrt.program import Program, arguments, aten, target_name


class Refusal(Exception):
    """An operator cannot have its result sharded as asked. ``layout`` (over ``size`` addresses of the refused
    dimension) is one that it would accept, where there is one."""

    def __init__(self, node: fx.Node, reason: str, layout: Layout | None = None):
        super().__init__(reason)
        self.node = node
        self.reason = reason
        self.layout = layout


@dataclass(frozen=True)
class Part:
    """A requirement on addresses ``[start, end)`` of a dimension only: what a slice asks of its argument."""

    dim: int
    start: int
    end: int
    layout: Layout


Requirement = Shard | Part
Demands = list[tuple[fx.Node, Requirement]]

_VIEWS = {aten.view.default, aten.reshape.default}
_TOKENWISE = {aten.to.dtype, aten.clone.default}


def demand(program: Program, node: fx.Node, shard: Shard, ranks: int) -> Demands:
    """Requirements on the arguments of ``node`` so that its result is ``shard``; raises :class:`Refusal`."""
    target, args = node.target, arguments(node)
    dim, layout = shard.dim, shard.layout
    last = node.meta["val"].dim() - 1
    if target in _TOKENWISE:
        return [(args["self"], shard)]
    if target in (ops.glu,):
        return [(args["gate"], shard), (args["up"], shard)]
    if isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags:
        return _pointwise(node, shard)
    if target in ops.ROWWISE:
        if dim == last:
            raise Refusal(node, f"{target_name(target)} needs whole rows")
        return [wanted for wanted in _pointwise(node, shard) if program.weight_of(wanted[0]) is None]
    if target in _VIEWS:
        return _view(program, node, args["self"], dim, layout, ranks)
    if target is aten.transpose.int:
        swap = {args["dim0"]: args["dim1"], args["dim1"]: args["dim0"]}
        return [(args["self"], Shard(swap.get(dim, dim), layout))]
    if target is aten.permute.default:
        return [(args["self"], Shard(args["dims"][dim], layout))]
    if target is aten.unsqueeze.default:
        if dim == args["dim"]:
            raise Refusal(node, "a dimension of size one cannot be divided")
        return [(args["self"], Shard(dim - (dim > args["dim"]), layout))]
    if target is aten.select.int:
        return [(args["self"], Shard(dim + (dim >= args["dim"]), layout))]
    if target is aten.slice.Tensor:
        if dim != args["dim"]:
            return [(args["self"], shard)]
        if args["step"] != 1:
            raise Refusal(node, "a strided slice of a sharded dimension is not divided equally")
        return [(args["self"], Part(dim, args["start"], args["end"], layout))]
    if target is aten.cat.default:
        return _cat(node, args["tensors"], args["dim"], shard)
    if target is ops.rms_norm:
        if dim == last:
            raise Refusal(node, "a norm over the sharded width needs all of it")
        return [(args["x"], shard)]
    if target is ops.rope:
        if dim == last:
            raise Refusal(node, "rope pairs channels within a head; heads must stay whole",
                          None)  # fmt: skip
        return [(args["x"], shard)]
    if target is ops.attention:
        return _attention(program, node, shard, ranks)
    raise Refusal(node, f"{target_name(target)} has no rule for a sharded result")


def _pointwise(node: fx.Node, shard: Shard) -> Demands:
    rank = node.meta["val"].dim()
    wanted: Demands = []
    for argument in node.all_input_nodes:
        value = argument.meta["val"]
        dim = shard.dim - (rank - value.dim())
        if dim >= 0 and value.shape[dim] != 1:
            wanted.append((argument, Shard(dim, shard.layout)))
    return wanted


def _view(program: Program, node: fx.Node, x: fx.Node, dim: int, layout: Layout, ranks: int) -> Demands:
    """Follow a dimension through a view: a product of dimensions is divided where its first factor is."""
    old, new = program.shape(x), program.shape(node)
    old_group, new_group = _group(old, new, dim)
    if [d for d in new_group if new[d] != 1][:1] != [dim]:
        raise Refusal(node, f"dimension {dim} of {new} is not the first factor of {[old[d] for d in old_group]}")
    inner_new = math.prod(int(new[d]) for d in new_group if d > dim)
    first = next(d for d in old_group if old[d] != 1)
    inner_old = math.prod(int(old[d]) for d in old_group if d > first)
    scaled = layout.scale(inner_new)
    if scaled.granularity % inner_old:
        # accepted: whole units of the finer dimensions
        unit = math.lcm(inner_old, inner_new) // inner_new
        size = int(new[dim])
        accepted = Layout.blocks(size, ranks, unit) if size % unit == 0 else None
        raise Refusal(node, f"units of {inner_old} channels must stay whole", accepted)
    return [(x, Shard(first, scaled.divide(inner_old)))]


def _group(old: tuple, new: tuple, dim: int) -> tuple[list[int], list[int]]:
    """The dimensions of ``old`` and of ``new`` that a view regroups among themselves, those around ``new[dim]``."""
    i = j = 0
    while i < len(old) and j < len(new):
        left, right = [i], [j]
        a, b = old[i], new[j]
        while a != b:
            if isinstance(a, str) or isinstance(b, str):
                # a symbolic size only ever equals itself here; take in neighbours of size one
                if isinstance(a, int) and a == 1:
                    i += 1
                    left.append(i)
                    a = old[i]
                    continue
                j += 1
                right.append(j)
                b = new[j] if b == 1 else b
                continue
            if a < b:
                i += 1
                left.append(i)
                a = a * old[i]
            else:
                j += 1
                right.append(j)
                b = b * new[j]
        i, j = i + 1, j + 1
        if dim in right:
            return left, right
    return [i], [dim]


def _cat(node: fx.Node, parts: list[fx.Node], dim: int, shard: Shard) -> Demands:
    if shard.dim != dim:
        return [(part, shard) for part in parts]
    wanted: Demands = []
    offset = 0
    for part in parts:
        size = int(part.meta["val"].shape[dim])
        try:
            _, _, layout = shard.layout.window(offset, offset + size)
        except ValueError as error:
            raise Refusal(node, str(error)) from None
        wanted.append((part, Shard(dim, layout)))
        offset += size
    return wanted


def _attention(program: Program, node: fx.Node, shard: Shard, ranks: int) -> Demands:
    if shard.dim != 1:
        raise Refusal(node, "attention is divided by heads only")
    args = arguments(node)
    heads, kv_heads = int(program.shape(args["q"])[1]), int(program.shape(args["k"])[1])
    wanted = Heads.choose(heads, kv_heads, ranks)
    if shard.layout != wanted.query:
        raise Refusal(
            node,
            f"{heads} query and {kv_heads} KV heads over {ranks} ranks are laid out as {wanted.query}",
            wanted.query,
        )
    demands: Demands = [
        (args["q"], Shard(1, wanted.query)),
        (args["k"], Shard(1, wanted.kv)),
        (args["v"], Shard(1, wanted.kv)),
    ]
    per_head = [args[name] for name in ("sinks", "alibi_slopes") if args[name] is not None]
    return [*demands, *((node, Shard(0, wanted.query)) for node in per_head)]
