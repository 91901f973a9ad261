"""What merge_qkv and merge_gate_up share: linears over one input, side by side, become one linear and slices of it."""

from __future__ import annotations

import torch.fx as fx

from graphsrt.passes.fp8_weights import format_of
from graphsrt.placement import Layout, Placement, Shard
from graphsrt.program import Program, Weight, arguments, aten
from graphsrt.recipes import Cat, Recipe, ShardOf


def linear_behind(node: fx.Node) -> fx.Node | None:
    """The linear that a value comes from through operators with one tensor argument (views, norms, rope)."""
    while isinstance(node, fx.Node) and node.op == "call_function":
        if node.target is aten.linear.default:
            return node
        node = node.args[0]  # type: ignore[assignment]
    return None


def is_shared(linear: fx.Node) -> bool:
    """Whether another linear has the same weight: a layer that is run again."""
    return len(arguments(linear)["weight"].users) > 1


def why_not(program: Program, linears: list[fx.Node]) -> str | None:
    """None if the linears can become one, else the reason."""
    if len(set(linears)) != len(linears):
        return "they are one projection already"
    first = arguments(linears[0])
    for linear in linears:
        args = arguments(linear)
        weight = program.weight_of(args["weight"])
        if args["input"] is not first["input"]:
            return f"{linear.name} has another input than {linears[0].name}"
        if weight is None:
            return f"the weight of {linear.name} is computed"
        if is_shared(linear):
            return f"the weight of {linear.name} is used elsewhere too"
        if (args["bias"] is None) != (first["bias"] is None):
            return f"{linear.name} and {linears[0].name} do not both have a bias"
        if weight.dtype != program.weights[str(first["weight"].target)].dtype:
            return f"{linear.name} has another dtype than {linears[0].name}"
        if format_of(weight.recipe) != format_of(program.weights[str(first["weight"].target)].recipe):
            return f"{linear.name} and {linears[0].name} are stored in two formats, or round their input differently"
        if isinstance(weight.placement, Shard) and weight.placement.dim != 0:
            return f"{linear.name} is divided along its input"
    return None


def merge(program: Program, linears: list[fx.Node], role: str, made_by: str) -> fx.Node:
    """Replace linears of one input by one, named ``role`` beside them, and a slice for each; returns the new one."""
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    first = min(linears, key=lambda n: order[n])
    path = first.name.rsplit(".", 1)[0] + "." if "." in first.name else ""
    parts = [arguments(linear) for linear in linears]
    weight_path = str(parts[0]["weight"].target).rsplit(".", 2)[0]
    base, count = f"{weight_path}.{role}", 0
    while f"{base}.weight" in program.weights:  # a layer that attends more than once
        count += 1
        base = f"{weight_path}.{role}_{count}"
    weight = _beside(program, [p["weight"] for p in parts], f"{base}.weight")
    bias = [] if parts[0]["bias"] is None else [_beside(program, [p["bias"] for p in parts], f"{base}.bias")]
    merged = program.call(
        aten.linear.default, parts[0]["input"], weight, *bias, name=f"{path}{role}", before=first, like=first
    )
    merged.meta["made_by"] = (*first.meta.get("made_by", ()), made_by)
    merged.meta["module"] = f"{path}{role}"
    merged.meta["origin"] = (first, *(linear for linear in linears if linear is not first))
    last = first.meta["val"].dim() - 1
    places = [linear.meta.get("placement") for linear in linears]
    layouts = _layouts(places, [int(linear.meta["val"].shape[last]) for linear in linears])
    if layouts:
        merged.meta["placement"] = Shard(last, Layout.concat(layouts))
    elif places[0] is not None:
        merged.meta["placement"] = places[0]
    start = 0
    pieces = []
    for linear in linears:
        width = int(linear.meta["val"].shape[last])
        piece = program.call(
            aten.slice.Tensor,
            merged,
            last,
            start,
            start + width,
            name=f"{linear.name}.slice",
            before=first,
            like=linear,
        )
        piece.meta["made_by"] = (*linear.meta.get("made_by", ()), made_by)
        if "placement" in linear.meta:
            piece.meta["placement"] = linear.meta["placement"]
        pieces.append(piece)
        start += width
    for linear, piece in zip(linears, pieces):
        program.replace(linear, piece)
    return merged


def _layouts(places: list[Placement | None], sizes: list[int]) -> list[Layout]:
    """The layouts of parts that become one, none if no part is divided: what is whole is on every rank."""
    ranks = next((place.layout.ranks for place in places if isinstance(place, Shard)), 0)
    return [
        place.layout if isinstance(place, Shard) else Layout.everywhere(size, ranks)
        for place, size in zip(places, sizes)
        if ranks
    ]


def _beside(program: Program, nodes: list[fx.Node], name: str) -> fx.Node:
    weights = [program.weights[str(node.target)] for node in nodes]
    shape = (sum(w.shape[0] for w in weights), *weights[0].shape[1:])
    layouts = _layouts([w.placement for w in weights], [w.shape[0] for w in weights])
    recipe: Recipe = Cat(tuple(w.recipe for w in weights), 0)
    place: Placement | None = weights[0].placement
    if layouts:
        pairs = zip(weights, layouts)
        recipe = Cat(
            tuple(w.recipe if isinstance(w.placement, Shard) else ShardOf(w.recipe, 0, n) for w, n in pairs), 0
        )
        place = Shard(0, Layout.concat(layouts))
    return program.add_weight(name, Weight(shape, weights[0].dtype, recipe, place))
