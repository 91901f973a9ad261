"""What an operator needs of its arguments so that its result comes out sharded: the rules behind the sharding pass.

:func:`demand` answers for one operator: given that dimension ``d`` of its result is divided by a layout, how must each
argument be divided? Either a list of (argument, shard) or a :class:`Refusal`, in words, which may carry the layout that
would have been accepted. Arguments that are not listed stay whole on every rank. A rule is a function registered with
:func:`rule` for the operators that it speaks of; families of operators have files of their own beside this one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
class Ask:
    """One question: the result of ``node`` is to be divided along ``dim`` (from the front) by ``layout``."""

    program: Program
    node: fx.Node
    args: dict[str, Any]
    dim: int
    layout: Layout
    ranks: int

    @property
    def shard(self) -> Shard:
        return Shard(self.dim, self.layout)

    @property
    def last(self) -> int:
        """The result's last dimension."""
        return self.ndim(self.node) - 1

    def ndim(self, node: fx.Node) -> int:
        return node.meta["val"].dim()

    def shape(self, node: fx.Node) -> tuple[int | str, ...]:
        return self.program.shape(node)

    def refuse(self, reason: str, layout: Layout | None = None) -> Refusal:
        return Refusal(self.node, reason, layout)


Demands = list[tuple[fx.Node, Shard]]
Rule = Callable[[Ask], Demands]
RULES: dict[Any, Rule] = {}


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Register a function as the rule of these operators."""

    def register(function: Rule) -> Rule:
        for target in targets:
            assert target not in RULES, target
            RULES[target] = function
        return function

    return register


def demand(program: Program, node: fx.Node, shard: Shard, ranks: int) -> Demands:
    """What the arguments of ``node`` must be so that its result is ``shard``; raises :class:`Refusal`."""
    ask = Ask(program, node, arguments(node), shard.dim, shard.layout, ranks)
    known = RULES.get(node.target)
    if known is not None:
        return known(ask)
    if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags:
        return pointwise(ask)
    if node.target in ops.ROWWISE:
        if ask.dim == ask.last:
            raise ask.refuse(f"{target_name(node.target)} needs whole rows")
        return [wanted for wanted in pointwise(ask) if program.weight_of(wanted[0]) is None]
    raise ask.refuse(f"{target_name(node.target)} has no rule for a sharded result")


# -- elementwise ------------------------------------------------------------------------------------------------------


def pointwise(ask: Ask) -> Demands:
    """Every argument that has the dimension is divided as the result is; sizes of one are broadcast."""
    wanted: Demands = []
    for argument in ask.node.all_input_nodes:
        dim = ask.dim - (ask.ndim(ask.node) - ask.ndim(argument))
        if dim >= 0 and argument.meta["val"].shape[dim] != 1:
            wanted.append((argument, Shard(dim, ask.layout)))
    return wanted


@rule(aten.to.dtype, aten.clone.default)
def _same(ask: Ask) -> Demands:
    return [(ask.args["self"], ask.shard)]


@rule(ops.glu)
def _glu(ask: Ask) -> Demands:
    return [(ask.args["gate"], ask.shard), (ask.args["up"], ask.shard)]


CREATORS = (aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default)
"""Operators that read the dtype and the device of their argument, no value."""


@rule(*CREATORS)
def _creator(ask: Ask) -> Demands:
    return []


# -- views and permutations -------------------------------------------------------------------------------------------


@rule(aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.flatten.using_ints,
      aten.unflatten.int)  # fmt: skip
def _view(ask: Ask) -> Demands:
    """Follow a dimension through a view: a product of dimensions is divided where its first factor is."""
    x = ask.args["self"]
    old, new = ask.shape(x), ask.shape(ask.node)
    old_group, new_group = _group(old, new, ask.dim)
    if any(new[d] != 1 for d in new_group if d < ask.dim):
        raise ask.refuse(f"dimension {ask.dim} of {new} is not the first factor of {[old[d] for d in old_group]}")
    inner_new = math.prod(int(new[d]) for d in new_group if d > ask.dim)
    first = next((d for d in old_group if old[d] != 1), old_group[0])
    inner_old = math.prod(int(old[d]) for d in old_group if d > first)
    scaled = ask.layout.scale(inner_new)
    if scaled.granularity % inner_old:
        # accepted: whole units of the finer dimensions
        unit = math.lcm(inner_old, inner_new) // inner_new
        size = int(new[ask.dim])
        accepted = Layout.blocks(size, ask.ranks, unit) if size % unit == 0 else None
        raise ask.refuse(f"units of {inner_old} channels must stay whole", accepted)
    return [(x, Shard(first, scaled.divide(inner_old)))]


def _group(old: tuple, new: tuple, dim: int) -> tuple[list[int], list[int]]:
    """The dimensions of ``old`` and of ``new`` that a view regroups among themselves, those around ``new[dim]``."""
    for left, right in _groups(old, new):
        if dim in right:
            return left, right
    raise AssertionError(f"{old} -> {new} has no dimension {dim}")


def _groups(old: tuple, new: tuple) -> list[tuple[list[int], list[int]]]:
    """Smallest groups of neighbouring dimensions with equal products; ones at the end join the last group."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) and j < len(new):
        left, right = [i], [j]
        a, b = _product(old[i : i + 1]), _product(new[j : j + 1])
        while a != b:
            more_left = bool(b[1] - a[1]) or (not a[1] - b[1] and a[0] < b[0])
            if more_left:
                left.append(left[-1] + 1)
                a = _product(old[i : left[-1] + 1])
            else:
                right.append(right[-1] + 1)
                b = _product(new[j : right[-1] + 1])
        groups.append((left, right))
        i, j = left[-1] + 1, right[-1] + 1
    groups[-1][0].extend(range(i, len(old)))
    groups[-1][1].extend(range(j, len(new)))
    return groups


def _product(sizes: tuple) -> tuple[int, Counter]:
    """The integer factor and the symbols of a product of sizes such as 3, "T" and "4*T"."""
    factor, symbols = 1, Counter[str]()
    for size in sizes:
        for part in str(size).split("*"):
            if part.isdigit():
                factor *= int(part)
            else:
                symbols[part] += 1
    return factor, symbols


@rule(aten.transpose.int)
def _transpose(ask: Ask) -> Demands:
    swap = {ask.args["dim0"]: ask.args["dim1"], ask.args["dim1"]: ask.args["dim0"]}
    return [(ask.args["self"], Shard(swap.get(ask.dim, ask.dim), ask.layout))]


@rule(aten.permute.default)
def _permute(ask: Ask) -> Demands:
    return [(ask.args["self"], Shard(ask.args["dims"][ask.dim], ask.layout))]


@rule(aten.expand.default)
def _expand(ask: Ask) -> Demands:
    x = ask.args["self"]
    dim = ask.dim - (ask.ndim(ask.node) - ask.ndim(x))
    if dim < 0 or x.meta["val"].shape[dim] == 1:
        return []  # repeated, not divided: every rank repeats as often as it has positions
    return [(x, Shard(dim, ask.layout))]


# -- parts and wholes -------------------------------------------------------------------------------------------------


@rule(aten.select.int)
def _select(ask: Ask) -> Demands:
    return [(ask.args["self"], Shard(ask.dim + (ask.dim >= ask.args["dim"]), ask.layout))]


@rule(aten.slice.Tensor)
def _slice(ask: Ask) -> Demands:
    if ask.dim == ask.args["dim"]:
        raise ask.refuse("a part of a dimension is asked for; split_linears gives each part a linear of its own")
    return [(ask.args["self"], ask.shard)]


@rule(aten.cat.default)
def _cat(ask: Ask) -> Demands:
    parts, dim = ask.args["tensors"], ask.args["dim"]
    if ask.dim != dim:
        return [(part, ask.shard) for part in parts]
    wanted: Demands = []
    offset = 0
    for part in parts:
        size = int(part.meta["val"].shape[dim])
        try:
            _, _, layout = ask.layout.window(offset, offset + size)
        except ValueError as error:
            raise ask.refuse(str(error)) from None
        wanted.append((part, Shard(dim, layout)))
        offset += size
    return wanted


@rule(aten.stack.default)
def _stack(ask: Ask) -> Demands:
    new = ask.args["dim"] % len(ask.shape(ask.node))
    if ask.dim == new:
        raise ask.refuse("values that are put beside each other would be divided among ranks")
    dim = ask.dim - (ask.dim > new)
    return [(part, Shard(dim, ask.layout)) for part in ask.args["tensors"]]


@rule(aten.repeat_interleave.self_int)
def _repeat_interleave(ask: Ask) -> Demands:
    if ask.args["dim"] % len(ask.shape(ask.node)) != ask.dim:
        return [(ask.args["self"], ask.shard)]
    if ask.layout.granularity % ask.args["repeats"]:
        size = int(ask.shape(ask.node)[ask.dim])
        raise ask.refuse("repeats must stay together", Layout.blocks(size, ask.ranks, ask.args["repeats"]))
    return [(ask.args["self"], Shard(ask.dim, ask.layout.divide(ask.args["repeats"])))]


# -- along one dimension ----------------------------------------------------------------------------------------------


@rule(aten.softmax.int, aten._softmax.default, aten.cumsum.default, aten.flip.default)
def _along_dim(ask: Ask) -> Demands:
    dims = ask.args["dims"] if "dims" in ask.args else [ask.args["dim"]]
    if ask.dim in {d % (ask.last + 1) for d in dims}:
        raise ask.refuse(f"{target_name(ask.node.target)} needs all of the dimension that it runs along")
    return [(ask.args["self"], ask.shard)]


@rule(aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.var.correction,
      aten.linalg_vector_norm.default)  # fmt: skip
def _reduce(ask: Ask) -> Demands:
    x, dims = ask.args["self"], ask.args["dim"]
    if dims is None or dims == []:
        raise ask.refuse("a reduction over everything has nothing to divide")
    over = {d % ask.ndim(x) for d in ([dims] if isinstance(dims, int) else dims)}
    kept = list(range(ask.ndim(x))) if ask.args["keepdim"] else [d for d in range(ask.ndim(x)) if d not in over]
    if kept[ask.dim] in over:
        raise ask.refuse("a reduced dimension has one position")
    return [(x, Shard(kept[ask.dim], ask.layout))]


# -- norms, rope, attention -------------------------------------------------------------------------------------------


@rule(ops.rms_norm)
def _rms_norm(ask: Ask) -> Demands:
    return _norm(ask, ask.args["x"], [ask.args["weight"]], 1)


@rule(ops.l2_norm)
def _l2_norm(ask: Ask) -> Demands:
    return _norm(ask, ask.args["x"], [], 1)


@rule(aten.layer_norm.default)
def _layer_norm(ask: Ask) -> Demands:
    vectors = [ask.args[name] for name in ("weight", "bias") if isinstance(ask.args[name], fx.Node)]
    return _norm(ask, ask.args["input"], vectors, len(ask.args["normalized_shape"]))


@rule(aten.rms_norm.default)
def _plain_rms_norm(ask: Ask) -> Demands:
    width = len(ask.args["normalized_shape"])
    if ask.args["weight"] is not None or ask.dim > ask.last - width:
        raise ask.refuse("a norm that was not recognised needs whole rows")
    return [(ask.args["input"], ask.shard)]


def _norm(ask: Ask, x: fx.Node, vectors: list[fx.Node], width: int) -> Demands:
    """Rows go as they come. Over a divided width the norm becomes a distributed one, which the pass writes out."""
    if ask.dim <= ask.last - width:
        return [(x, ask.shard)]
    if width != 1:
        raise ask.refuse("a norm over several dimensions, one of them divided, needs all of them")
    return [(x, ask.shard), *((vector, Shard(0, ask.layout)) for vector in vectors)]


@rule(ops.rope)
def _rope(ask: Ask) -> Demands:
    if ask.dim == ask.last:
        raise ask.refuse("rope pairs channels within a head; heads must stay whole")
    return [(ask.args["x"], ask.shard)]


@rule(ops.attention)
def _attention(ask: Ask) -> Demands:
    if ask.dim != 1:
        raise ask.refuse("attention is divided by heads only")
    args = ask.args
    heads, kv_heads = int(ask.shape(args["q"])[1]), int(ask.shape(args["k"])[1])
    wanted = Heads.choose(heads, kv_heads, ask.ranks)
    group = heads // kv_heads
    query, kv = wanted.query, wanted.kv
    if ask.layout != query and kv_heads < ask.ranks and ask.layout.granularity % group == 0:
        query, kv = ask.layout, ask.layout.divide(group)  # what reads the result keeps the heads of a group together
    if ask.layout != query:
        raise ask.refuse(
            f"{heads} query and {kv_heads} KV heads over {ask.ranks} ranks are laid out as {wanted.query}",
            wanted.query,
        )
    demands: Demands = [(args["q"], Shard(1, query))]
    if not kv.is_everywhere:  # else every rank computes the one head that all share
        demands += [(args["k"], Shard(1, kv)), (args["v"], Shard(1, kv))]
    per_head = [args[name] for name in ("sinks", "alibi_slopes") if args[name] is not None]
    return [*demands, *((node, Shard(0, query)) for node in per_head)]
