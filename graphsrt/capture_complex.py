"""Complex numbers of a model's code as pairs of real ones: rotary embeddings written as a product of complex numbers.

    view_as_real(view_as_complex(view(x, […, n, 2])) * polar(1, angle))
    → stack([x0·cos - x1·sin, x0·sin + x1·cos], -1)

Programs hold real numbers only: no collective, kernel or compiler here knows others. A complex value that is used in a
way that is not known here is an error that names the operator.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from graphsrt.errors import CompileError, explain
from graphsrt.program import aten, map_arguments, target_name

Pair = tuple[Any, Any]
"""Real and imaginary part."""

_MOVES = {
    aten.unsqueeze.default, aten.squeeze.dim, aten.select.int, aten.slice.Tensor, aten.view.default, aten.clone.default,
    aten.transpose.int, aten.permute.default, aten.expand.default, aten.reshape.default, aten.alias.default,
    aten.detach.default, aten.contiguous.default,
}  # fmt: skip
"""Operators that treat both parts alike."""
_CASTS = {aten._to_copy.default, aten.to.dtype, aten.to.dtype_layout}


def split_complex(graph: fx.Graph) -> int:
    """Rewrite an exported graph so that no value in it is complex; returns how many operators gave one."""
    pairs: dict[fx.Node, Pair] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten._assert_tensor_metadata.default and _is_complex(node.all_input_nodes[0]):
            graph.erase_node(node)
        elif node.target is aten.view_as_real.default:
            with graph.inserting_before(node):
                make = _Maker(graph, node)
                parts = [make(aten.unsqueeze.default, part, -1) for part in pairs[node.args[0]]]
                real = make(aten.cat.default, parts, -1)
            node.replace_all_uses_with(real, propagate_meta=False)
        elif _is_complex(node) or any(used in pairs for used in node.all_input_nodes):
            with graph.inserting_before(node):
                pairs[node] = _pair(_Maker(graph, node), node, pairs)
    if pairs:
        graph.eliminate_dead_code(lambda node: node not in pairs and node.target is not aten.view_as_real.default)
    return len(pairs)


def _is_complex(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype.is_complex


def _changes_dtype(node: fx.Node) -> bool:
    return node.meta["val"].dtype != node.all_input_nodes[0].meta["val"].dtype


class _Maker:
    """Adds operators that take the place of ``like`` and computes what they give."""

    def __init__(self, graph: fx.Graph, like: fx.Node):
        self.graph, self.like = graph, like

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        given, named = map_arguments(node, lambda a: a.meta["val"])
        node.meta = {**self.like.meta, "val": target(*given, **named)}
        return node


def _pair(make: _Maker, node: fx.Node, pairs: dict[fx.Node, Pair]) -> Pair:
    target, args = node.target, node.args
    if target is aten.view_as_complex.default:
        return make(aten.select.int, args[0], -1, 0), make(aten.select.int, args[0], -1, 1)
    if target is aten.polar.default:
        length, angle = args
        return tuple(_scaled(make, make(part, angle), length) for part in (aten.cos.default, aten.sin.default))  # type: ignore[return-value]
    if target in _MOVES or (target in _CASTS and not _changes_dtype(node)):
        x: Any = args[0]
        if target in _CASTS:
            return pairs[x]
        re, im = (make(target, part, *args[1:], **node.kwargs) for part in pairs[x])
        return re, im
    if target is aten.mul.Tensor:
        a, b = args
        if b not in pairs:
            a, b = b, a
        if a in pairs and b in pairs:
            return _product(make, pairs[a], pairs[b])  # type: ignore[index]
        if b in pairs and not isinstance(a, complex):
            re, im = (_scaled(make, part, a) for part in pairs[b])  # type: ignore[index]
            return re, im
    raise CompileError(
        explain(
            f"{target_name(target)} of complex numbers cannot be part of a program",
            where=node.name,
            expected="products, views and polar, as rotary embeddings have them",
        )
    )


def _product(make: _Maker, a: Pair, b: Pair) -> Pair:
    def times(x: Any, y: Any) -> fx.Node:
        return make(aten.mul.Tensor, x, y)

    real = make(aten.sub.Tensor, times(a[0], b[0]), times(a[1], b[1]))
    return real, make(aten.add.Tensor, times(a[0], b[1]), times(a[1], b[0]))


def _scaled(make: _Maker, part: Any, factor: Any) -> fx.Node:
    ones = isinstance(factor, fx.Node) and factor.target is aten.ones_like.default
    return part if ones or factor == 1.0 else make(aten.mul.Tensor, part, factor)
