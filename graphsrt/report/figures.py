"""The figures of the page, as bars: bytes of weights and KV on each rank, bytes by kind of weight, time of passes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from graphsrt.costs import is_pool, slot_bytes
from graphsrt.dump import weight_bytes
from graphsrt.folding import _LAYER
from graphsrt.placement import Shard
from graphsrt.program import Program
from graphsrt.report.weights import unowned_share
from graphsrt.summary import kv_bytes, whole_bytes

if TYPE_CHECKING:
    from graphsrt.api import Traced

MOST_RANKS = 16
"""Of more ranks than this, only the first and the last are drawn."""
MOST_KINDS = 14


@dataclass
class Bar:
    """One bar: parts are (class of colour, what it is, amount)."""

    label: str
    parts: list[tuple[str, str, float]]
    text: str

    @property
    def total(self) -> float:
        return sum(amount for _, _, amount in self.parts)


@dataclass
class Figure:
    """Bars of one unit, with a legend (class of colour, words)."""

    title: str
    note: str
    bars: list[Bar]
    legend: list[tuple[str, str]] = field(default_factory=list)

    @property
    def shown_legend(self) -> list[tuple[str, str]]:
        """The entries that a bar has a part of; none for a single colour."""
        there = {kind for bar in self.bars for kind, _, amount in bar.parts if amount}
        found = [(kind, words) for kind, words in self.legend if kind in there]
        return found if len(there) > 1 else []

    @property
    def longest(self) -> float:
        return max((bar.total for bar in self.bars), default=0) or 1.0


def figures(traced: Traced) -> list[Figure]:
    """All figures that the program has data for."""
    final = traced.stages.final
    found = [_weights(traced), _kinds(final), _passes(final)]
    if "kv_pool" in final.inputs:
        found.insert(1, _kv(final))
    return found


def _weights(traced: Traced) -> Figure:
    final, whole = traced.stages.final, whole_bytes(traced.stages)
    ranks = final.mesh.get("tp", 1)
    bars = [Bar("whole model", [("whole", "captured", whole)], size_text(whole))]
    if ranks > 1:
        bars.append(Bar(f"1/{ranks} of it", [("whole", "captured", whole / ranks)], size_text(whole / ranks)))
    for rank in range(ranks) if ranks <= MOST_RANKS else (0, ranks - 1):
        divided = copied = kept = 0.0
        for weight in final.weights.values():
            size = weight_bytes(weight)
            if isinstance(weight.placement, Shard):
                share = unowned_share(weight, rank)
                copied += size * share
                divided += size * (1 - share)
            else:
                kept += size
        parts = [("S", "divided", divided), ("P", "copied or padding", copied), ("R", "whole on each rank", kept)]
        bars.append(Bar(f"rank {rank}", parts, size_text(divided + copied + kept)))
    legend = [("S", "divided"), ("P", "also on another rank, or padding"), ("R", "whole on each rank")]
    return Figure("Weights", "bytes", bars, legend)


def _kv(program: Program) -> Figure:
    pools = [node for node in program.graph.nodes if is_pool(program, node)]
    sizes = {node: slot_bytes(program, node.name) for node in pools}
    layouts = {n: n.meta["placement"].layout for n in pools if isinstance(n.meta.get("placement"), Shard)}
    mine, ranks = kv_bytes(program), program.mesh.get("tp", 1)
    if not layouts:
        bars = [Bar("each rank" if ranks > 1 else "the rank", [("R", "whole", mine)], size_text(mine))]
        return Figure("KV of a token", "bytes", bars)
    kept = sum(size for node, size in sizes.items() if node not in layouts)
    whole = kept + sum(sizes[node] * layout.size / layout.local_size for node, layout in layouts.items())
    bars = [Bar("all heads", [("whole", "all heads", whole)], size_text(whole))]
    for rank in range(ranks) if ranks <= MOST_RANKS else (0, ranks - 1):
        copied = 0.0
        for node, layout in layouts.items():
            copied += sizes[node] * sum(r.length for r in layout.runs[rank] if not r.owned) / layout.local_size
        divided = mine - kept - copied
        parts = [("S", "divided", divided), ("P", "copied or padding", copied), ("R", "whole on each rank", kept)]
        bars.append(Bar(f"rank {rank}", parts, size_text(mine)))
    legend = [("S", "divided"), ("P", "also on another rank, or padding"), ("R", "whole on each rank")]
    return Figure("KV of a token", "bytes", bars, legend)


def _kinds(program: Program) -> Figure:
    sums: dict[str, list[float]] = {}
    for name, weight in program.weights.items():
        kind = _LAYER.sub(lambda m: f"{m[1]}*", name)
        entry = sums.setdefault(kind, [0.0, 0.0])
        entry[isinstance(weight.placement, Shard)] += weight_bytes(weight)
    largest = sorted(sums.items(), key=lambda item: -sum(item[1]))
    bars = [
        Bar(kind, [("S", "divided", divided), ("R", "whole on each rank", whole)], size_text(whole + divided))
        for kind, (whole, divided) in largest[:MOST_KINDS]
    ]
    if rest := largest[MOST_KINDS:]:
        whole, divided = (sum(item[1][i] for item in rest) for i in (0, 1))
        parts = [("S", "divided", divided), ("R", "whole on each rank", whole)]
        bars.append(Bar(f"{len(rest)} smaller kinds", parts, size_text(whole + divided)))
    ranks = program.mesh.get("tp", 1)
    legend = [("S", "divided"), ("R", "whole on each rank")] if ranks > 1 else []
    return Figure("Weights by kind", "bytes on a rank, all layers together", bars, legend)


def _passes(program: Program) -> Figure:
    bars = [Bar(r.name, [("time", "time", r.milliseconds)], f"{r.milliseconds:,.1f} ms") for r in program.history]
    total = sum(report.milliseconds for report in program.history)
    return Figure("Time of each pass", f"milliseconds, {total:,.0f} in all, capture not counted", bars)


def size_text(count: float) -> str:
    """Bytes with a decimal unit, as the summary writes them."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:,.2f} {unit}"
        count /= 1000
    raise AssertionError
