"""Which attentions read the same keys and values; which pool, and which of its layers, holds them.

Layers of one shape share a pool. An attention to the very keys and values that an earlier one attended to reads what
that one has written.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch.fx as fx

from graphsrt import ops
from graphsrt.program import arguments, aten

_REMEMBERED = {ops.attention: ("k", "v"), ops.latent_attention: ("latent", "k_rope")}
_VIEWS = {
    aten.view.default, aten.reshape.default, aten.transpose.int, aten.permute.default, aten.select.int,
    aten.slice.Tensor, aten.squeeze.dim, aten.unsqueeze.default,
}  # fmt: skip


@dataclass(frozen=True)
class KVLayer:
    """A place in a pool: layer ``index`` of the pool number ``pool``.

    ``shape``: the pool's without its layers. ``writer``: the attention that writes there, the first that reads it.
    ``written``: what the writer writes first, its keys or latents.
    """

    pool: int
    index: int
    shape: tuple[int | str, ...]
    writer: fx.Node
    written: fx.Node


def kv_layers(nodes: Sequence[fx.Node]) -> dict[fx.Node, KVLayer]:
    """The place of each attention, given in the order of the program. Pools are numbered by the first layer that they
    hold, and layers in a pool follow the model's."""
    writers: dict[Hashable, fx.Node] = {}
    reads = {node: writers.setdefault(kv_identity(node), node) for node in nodes}
    pools: dict[Hashable, list[fx.Node]] = {}
    for node in sorted(writers.values(), key=lambda n: arguments(n)["layer_id"]):
        pools.setdefault(_kind(node), []).append(node)
    places = {
        writer: KVLayer(number, index, _shape(writer), writer, _remembered(writer)[0])
        for number, members in enumerate(pools.values())
        for index, writer in enumerate(members)
    }
    return {node: places[writer] for node, writer in reads.items()}


def _remembered(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    args = arguments(node)
    first, second = _REMEMBERED[node.target]  # type: ignore[index]
    return args[first], args[second]


def kv_identity(node: fx.Node) -> Hashable:
    """The same for two attentions if they attend to the same values, each through views of its own; a paged one is
    like no other."""
    if node.target not in _REMEMBERED:
        return node
    return tuple(_value(used) for used in _remembered(node))


def _value(node: fx.Node) -> Hashable:
    if node.target not in _VIEWS:
        return node
    args = arguments(node)
    return (node.target, *(_value(a) if isinstance(a, fx.Node) else str(a) for a in args.values()))


def _shape(node: fx.Node) -> tuple[int | str, ...]:
    """Of the pool, on a rank, without its layers."""
    first, second = (used.meta["val"].shape for used in _remembered(node))
    if node.target is ops.latent_attention:
        return "slots", int(first[1]) + int(second[1])
    heads, keys, values = int(first[1]), int(first[2]), int(second[2])
    return (2, "slots", heads, keys) if keys == values else (1, "slots", heads, keys + values)


def _kind(node: fx.Node) -> Hashable:
    """Layers of the same kind share a pool."""
    first, _ = _remembered(node)
    return _shape(node), first.meta["val"].dtype, first.meta.get("placement")
