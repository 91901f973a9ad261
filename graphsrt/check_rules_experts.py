"""How placements pass through the experts of a mixture: one more rule of :mod:`graphsrt.check_rules`.

An experts operator's result may be a sum over ranks, since all that follows its down products is linear: routing
weights, which all ranks must hold alike, and sums.
"""

from __future__ import annotations

import torch.fx as fx

from graphsrt import ops
from graphsrt.check_rules import SUM, WHOLE, Call, Held, Refused, addresses, describe, rule
from graphsrt.check_rules_products import starts
from graphsrt.check_rules_views import window_of
from graphsrt.placement import Layout, Shard

_BIASES = ("gate_up_bias", "down_bias")


@rule(ops.moe_experts)
def _moe_experts(call: Call) -> Held:
    for name in ("x", "expert_ids", "expert_weights"):
        if call.of(name) != WHOLE:
            raise Refused(f"the {name} of experts differ from rank to rank", "R", str(call.of(name)))
    place = call.of("down").placement
    dim = place.dim if isinstance(place, Shard) else None
    if dim == 2:
        return _by_width(call)
    if dim == 0:
        return _by_expert(call)
    raise Refused(
        "experts are divided by their width or by their number",
        "S(2) or S(0) for the down weight",
        str(call.of("down")),
    )


def _sharded(call: Call, name: str, dim: int) -> Layout:
    held = call.of(name)
    if not isinstance(held.placement, Shard) or held.placement.dim != dim:
        raise Refused(f"the {name} does not follow the down weight", f"S({dim})", str(held))
    if held.zeroed and name != "down":
        raise Refused(f"rows of the {name} that claim to be copies are zeros", "copies where not owned", str(held))
    return held.placement.layout


def _by_width(call: Call) -> Held:
    """Each rank adds its channels of every expert."""
    width = _sharded(call, "down", 2)
    if not call.of("down").zeroed and not all(run.owned for rank in width.runs for run in rank):
        raise Refused(
            "channels held twice are counted twice", "zeros in the down weight where not owned", str(call.of("down"))
        )
    for name in ("gate_up", "gate_up_bias"):
        if isinstance(call.args[name], fx.Node):
            rows = _sharded(call, name, 1)
            for kind, part in _channels(call, rows):
                if addresses(part) != addresses(width):
                    raise Refused(
                        f"a rank's {kind} channels of the {name} are not those of its down weight",
                        f"{width}", f"{part} ({rows})",
                    )  # fmt: skip
    if call.args["first_expert"] is not None:
        raise Refused("every rank has all experts, but a first one is given", "no first_expert")
    if isinstance(call.args["down_bias"], fx.Node) and call.of("down_bias") != SUM:
        raise Refused(
            "the down bias would be added once on every rank", "P(sum), on one rank only", str(call.of("down_bias"))
        )
    return SUM


def _channels(call: Call, rows: Layout) -> list[tuple[str, Layout]]:
    """The layouts of an expert's channels that its first product makes, from the layout of its rows."""
    if not call.args["gated"]:
        return [("up", rows)]
    if call.args["interleaved"]:
        if rows.granularity % 2:
            raise Refused("a gate and its up are on different ranks", "whole pairs of rows", str(rows))
        return [("gate and up", rows.divide(2))]
    half = rows.local_size // 2
    low, middle, gate = window_of(rows, 0, half)
    also_middle, high, up = window_of(rows, half, 2 * half)
    if (low, high) != (0, rows.size) or middle != also_middle or gate.size != up.size:
        raise Refused("a rank's rows are not its gates, then its ups", "segments [gate | up]", str(rows))
    return [("gate", gate), ("up", up)]


def _by_expert(call: Call) -> Held:
    """Each rank adds what its experts give; ids tell whose an expert is."""
    layout = _sharded(call, "down", 0)
    for name in ("gate_up", *_BIASES):
        if isinstance(call.args[name], fx.Node) and addresses(_sharded(call, name, 0)) != addresses(layout):
            raise Refused(f"the {name} belongs to other experts", describe(Shard(0, layout)), str(call.of(name)))
    first = call.of("first_expert").starts
    if first is None:
        raise Refused("a rank that has some experts needs the first one's id", "shard_start", "none")
    end = 0
    for rank, (runs, start) in enumerate(zip(addresses(layout), starts(first))):
        if start >= layout.size and end == layout.size:
            continue  # pads only: no id reaches them
        real = min(layout.local_size, layout.size - start)
        if start != end or not runs or runs[0][0] != start or runs[0][1] < real:
            raise Refused(
                f"rank {rank} takes experts from {start} on, but does not hold them in order", f"experts {end} on",
                f"experts {runs}",
            )  # fmt: skip
        end = start + real
    if end != layout.size:
        raise Refused("some experts are on no rank", f"experts up to {layout.size}", f"up to {end}")
    return SUM
