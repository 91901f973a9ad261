"""split_linears: a linear whose output is cut into parts becomes one linear for each part.

    qkv = linear(x, w).view(T, H, 3·D);  q = qkv[…, :D];  k = qkv[…, D:2·D];  v = qkv[…, 2·D:]
    → q = linear(x, take(w, rows of q)).view(T, H, D);  k = …;  v = …

However a model fuses its projections (segments, interleaved by head, grouped with their KV head), each part is rows of
one weight, found by following the output's addresses through views, slices and selections. What comes after then sees
separate projections only; ``merge_qkv`` and ``merge_gate_up`` put them side by side again, rank by rank. Parts that are
joined again (the halves of a rotation within a head) are one part.

Needs: normalize, recognize_rope.
Leaves: linears whose output is used whole, or for one thing.
Numerics: exact, up to the order in which a matrix product is summed.
Source: ours; fused layouts are those of GPT-NeoX, Falcon, BLOOM, GPT-BigCode, CodeGen and Phi-3.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch.fx as fx
from numpy.typing import NDArray

from graphsrt import ops
from graphsrt.program import NearMiss, Program, Weight, arguments, aten
from graphsrt.recipes import Recipe, Take

_VIEWS = {aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim}
_CUTS = {aten.slice.Tensor, aten.select.int}
_JOINS = {aten.cat.default, aten.stack.default, ops.latent_attention}
_ENDS = {aten.linear.default, *ops.ATTENTIONS} - _JOINS
_MAX_RUNS = 1024
"""More runs of rows than this would make a program's text unreadable; such a weight stays as it is."""

Addresses = NDArray[np.int64]


@dataclass
class _Part:
    """A value that reads ``addresses`` of a linear's output, shaped as the value is after its token dimension."""

    node: fx.Node
    addresses: Addresses
    is_cut: bool
    parts: list[_Part] = field(default_factory=list)


def split_linears(
    program: Program,
    *,
    limit: int | None = None,
    near_misses: list[NearMiss] | None = None,
    sites: list[fx.Node] | None = None,
) -> int:
    """Split every linear that is cut into parts, or the first ``limit``; the count is of linears that are split."""
    fired = 0
    for linear in program.calls(aten.linear.default):
        if limit is not None and fired >= limit:
            break
        parts = _parts_of(program, linear)
        if len(parts) < 2:
            continue
        reason = _why_not(program, linear, parts)
        if reason is None:
            made = [_split(program, linear, part) for part in parts]
            program.remove_dead()
            fired += 1
            if sites is not None:
                sites += made
        elif near_misses is not None:
            near_misses.append(NearMiss(linear.name, linear.meta.get("module", ""), reason))
    program.remove_dead()
    program.infer()
    return fired


def _expected(program: Program) -> int:
    return sum(len(_parts_of(program, linear)) > 1 for linear in program.calls(aten.linear.default))


split_linears.expect = _expected  # type: ignore[attr-defined]
split_linears.required = False  # type: ignore[attr-defined]


def _parts_of(program: Program, linear: fx.Node) -> list[_Part]:
    """The parts that a linear's output is cut into; a single one, or none, where it is used whole."""
    shape = program.shape(linear)
    if len(shape) != 2 or shape[0] != "T":
        return []
    root = _Part(linear, np.arange(int(shape[1])), is_cut=False)
    _follow(program, root)
    return _leaves(root)


def _follow(program: Program, part: _Part) -> None:
    for user in part.node.users:
        addresses = _addresses(program, user, part)
        if addresses is not None:
            child = _Part(user, addresses, is_cut=part.is_cut or user.target in _CUTS)
            _follow(program, child)
            part.parts.append(child)


def _addresses(program: Program, user: fx.Node, part: _Part) -> Addresses | None:
    """What ``user`` reads of the linear's output; None if it is not a view or a cut, or touches the tokens."""
    shape = program.shape(user) if user.target in _VIEWS | _CUTS else ()
    before = program.shape(part.node)
    if shape.count("T") != 1 or any(size != "T" and not isinstance(size, int) for size in shape):
        return None
    args = arguments(user)
    if user.target in _VIEWS:
        if _ahead(shape) != _ahead(before):
            return None
        return part.addresses.reshape(_channels(shape))
    if before[args["dim"]] == "T":
        return None
    axis = args["dim"] - (args["dim"] > before.index("T"))
    if user.target is aten.select.int:
        return np.take(part.addresses, args["index"], axis)
    index = [slice(None)] * part.addresses.ndim
    index[axis] = slice(args["start"], args["end"], args["step"])
    return part.addresses[tuple(index)]


def _ahead(shape: tuple[int | str, ...]) -> list[int | str]:
    """The dimensions before that of the tokens; ones say nothing."""
    return [size for size in shape[: shape.index("T")] if size != 1]


def _channels(shape: tuple[int | str, ...]) -> list[int]:
    return [int(size) for size in shape if size != "T"]


def _leaves(part: _Part) -> list[_Part]:
    """The parts that are used as they are. Where a value is used whole, or its parts are joined again, it is one."""
    below = [leaf for child in part.parts for leaf in _leaves(child)]
    whole = len(part.parts) != len(part.node.users) or not any(leaf.is_cut for leaf in below)
    if whole or _joined_again(below):
        return [part]
    return below


def _joined_again(parts: list[_Part]) -> bool:
    """Whether two parts meet in one ``cat``, or one latent attention, before the next linear or attention."""
    seen: dict[fx.Node, int] = {}
    for index, part in enumerate(parts):
        stack, mine = [part.node], set()
        while stack:
            node = stack.pop()
            for user in node.users:
                if user in mine or user.target in _ENDS:
                    continue
                mine.add(user)
                if user.target in _JOINS:
                    if seen.setdefault(user, index) != index:
                        return True
                    continue
                if user.op == "call_function" and user.target is not operator.getitem:
                    stack.append(user)
    return False


def _why_not(program: Program, linear: fx.Node, parts: list[_Part]) -> str | None:
    """None if the linear can be split, else the reason."""
    args = arguments(linear)
    for name in ("weight", "bias"):
        if args[name] is None:
            continue
        if program.weight_of(args[name]) is None:
            return f"its {name} is computed"
        if len(args[name].users) > 1:
            return f"its {name} is used elsewhere too"
    rows = np.concatenate([part.addresses.reshape(-1) for part in parts])
    width = int(linear.meta["val"].shape[-1])
    if len(np.unique(rows)) != len(rows):
        return "two parts read the same channels"
    if len(rows) != width:
        return f"the parts read {len(rows)} of {width} channels"
    if max(len(_runs(part.addresses)) for part in parts) > _MAX_RUNS:
        return f"a part is in more than {_MAX_RUNS} pieces"
    return None


def _runs(addresses: Addresses) -> tuple[str, ...]:
    """Runs of consecutive addresses as recipes write them: ``("0:16", "48:64")``."""
    flat = addresses.reshape(-1)
    ends = np.flatnonzero(np.diff(flat) != 1) + 1
    return tuple(f"{run[0]}:{run[-1] + 1}" for run in np.split(flat, ends))


def _split(program: Program, linear: fx.Node, part: _Part) -> fx.Node:
    """A linear of its own for one part, in the part's place."""
    args = arguments(linear)
    runs = _runs(part.addresses)
    label = runs[0].partition(":")[0]

    def rows(node: fx.Node) -> fx.Node:
        whole = program.weights[str(node.target)]
        recipe: Recipe = Take(whole.recipe, 0, runs)
        shape = (part.addresses.size, *whole.shape[1:])
        path, _, last = str(node.target).rpartition(".")
        return program.add_weight(f"{path}_from_{label}.{last}", Weight(shape, whole.dtype, recipe))

    given: list[Any] = [args["input"], rows(args["weight"])]
    if args["bias"] is not None:
        given.append(rows(args["bias"]))
    new = program.call(aten.linear.default, *given, name=f"{linear.name}_from_{label}", before=part.node, like=linear)
    new.meta["made_by"] = (*linear.meta.get("made_by", ()), "split_linears")
    program.infer([new])
    value = new
    shape = [-1 if size == "T" else int(size) for size in program.shape(part.node)]
    if len(shape) != 2 or shape[0] != -1:
        value = program.call(
            aten.view.default,
            new,
            shape,
            name=f"{new.name}.view",
            before=part.node,
            like=part.node,
        )
        value.meta["made_by"] = (*part.node.meta.get("made_by", ()), "split_linears")
    program.replace(part.node, value, keep_name=False)
    return new
