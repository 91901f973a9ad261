"""Tensors that a model allocates and fills part by part are, in a program without writes, the parts side by side.

    out = x.new_empty(…, 192);  out[..., :128].copy_(a);  out[..., 128:].copy_(b)      → cat([a, b], -1)

Only what is covered along one dimension before anything reads it is rewritten. Anything else is left as it is, since
numbers that nobody wrote have no meaning.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.fx as fx

from graphsrt.program import arguments, aten, is_mutating

_EMPTY = {aten.new_empty.default, aten.empty.memory_format, aten.empty_like.default}


class _Write(NamedTuple):
    """``value`` was written to positions ``[start, end)`` of dimension ``dim``, by ``copy`` through ``view``."""

    start: int
    end: int
    dim: int
    value: fx.Node
    view: fx.Node
    copy: fx.Node


def join_written_parts(graph: fx.Graph) -> int:
    """Replace, in an exported graph, tensors that are filled part by part; returns how many there were."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    joined = 0
    for node in list(graph.nodes):
        writes = _writes(node) if node.target in _EMPTY else None
        if not writes:
            continue
        last = max((write.copy for write in writes), key=order.__getitem__)
        views = {write.view for write in writes}
        readers = [user for user in node.users if user not in views]
        if any(order[reader] < order[last] for reader in readers):
            continue
        with graph.inserting_after(last):
            cat = graph.call_function(aten.cat.default, ([write.value for write in writes], writes[0].dim))
        cat.meta = {**last.meta, "val": node.meta["val"]}
        for reader in readers:
            reader.replace_input_with(node, cat)
        for write in writes:
            graph.erase_node(write.copy)
            graph.erase_node(write.view)
        graph.erase_node(node)
        joined += 1
    return joined


def _writes(buffer: fx.Node) -> list[_Write] | None:
    """The writes that fill an empty tensor along one dimension, in its order; None if they do not."""
    writes = [_write(buffer, user) for user in buffer.users if user.target is aten.slice.Tensor]
    found = sorted(write for write in writes if write is not None)
    if len(found) != len(writes) or len({write.dim for write in found}) != 1:
        return None
    ends = [0, *(write.end for write in found)]
    whole = ends[-1] == buffer.meta["val"].shape[found[0].dim] and [write.start for write in found] == ends[:-1]
    return found if whole else None


def _write(buffer: fx.Node, view: fx.Node) -> _Write | None:
    copy = next(iter(view.users), None)
    if copy is None or len(view.users) > 1 or copy.target is not aten.copy_.default or copy.users:
        return None
    given: Any = copy.args[1]
    if copy.args[0] is not view or any(_writes_into(user, given) for user in given.users):
        return None
    args = arguments(view)
    value, part, whole = (node.meta["val"] for node in (given, view, buffer))
    dim = args["dim"] % whole.dim()
    size = whole.shape[dim]
    if args["step"] != 1 or not isinstance(size, int) or value.dtype != part.dtype or value.shape != part.shape:
        return None
    start = args["start"] or 0
    start = start + size if start < 0 else start
    return _Write(start, start + int(part.shape[dim]), dim, given, view, copy)


def _writes_into(user: fx.Node, value: fx.Node) -> bool:
    return isinstance(user.target, torch._ops.OpOverload) and is_mutating(user.target) and user.args[0] is value
