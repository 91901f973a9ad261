"""Which values should have their tokens divided over the ranks: the cheapest division, as a minimum cut.

Every value with a row for each token is either whole on all ranks or divided. What it costs is local: an all-reduce for
a sum that is whole or a reduce-scatter for one that is divided; memory traffic of an operator on all tokens or on one
rank's; a gather where a divided value is wanted whole, once for all that want it; a copy where a whole one is wanted
divided. The cheapest of all divisions is the minimum cut between "divided" and "whole" of a graph that has these costs
as edges. Source of the method: Greig, Porteous & Seheult (1989).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import networkx as nx
import torch
import torch.fx as fx

from graphsrt import ops
from graphsrt.devices import Device
from graphsrt.placement import TOKENS, R
from graphsrt.program import Program, arguments, aten

PER_TOKEN = {
    ops.rms_norm, ops.l2_norm, ops.glu, ops.silu_mul, ops.fp8_scale, ops.quantize_fp8, aten.layer_norm.default,
    aten.to.dtype,
}  # fmt: skip
"""Operators, besides pointwise and rowwise ones, that compute each token from that token alone, if it is a row."""


@dataclass
class Work:
    """What a program's candidates do in a step of ``T`` tokens: seconds for each token, bytes of each, launches."""

    seconds: float = 0.0
    sent_bytes: float = 0.0
    memory_bytes: float = 0.0
    collectives: int = 0

    def __sub__(self, other: Work) -> Work:
        return Work(
            self.seconds - other.seconds, self.sent_bytes - other.sent_bytes, self.memory_bytes - other.memory_bytes,
            self.collectives - other.collectives,
        )  # fmt: skip


class TokenGraph:
    """The values of a program that can be whole or divided, and what each costs."""

    def __init__(self, program: Program, ranks: int, device: Device, tokens: int | None):
        """``tokens``: of a step, over which the latency of a collective is spread; None if it counts for nothing."""
        self.program, self.ranks, self.device = program, ranks, device
        self.latency_s = 0.0 if tokens is None else device.link_latency_s / tokens
        self.candidates = {node for node in program.nodes if not self.reason_against(node)}

    def reason_against(self, node: fx.Node) -> str:
        """Why a value must be whole; empty if it may be divided."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not self._has_tokens(node):
            return "its rows are not the tokens of the step"
        if node.meta.get("placement") != R:
            return "it is divided otherwise"
        if node.target is ops.all_reduce:
            return "" if arguments(node)["op"] == "sum" else "a maximum over ranks has no reduce-scatter here"
        target = node.target
        tags = target.tags if isinstance(target, torch._ops.OpOverload) else ()
        if target not in PER_TOKEN and torch.Tag.pointwise not in tags and target not in ops.ROWWISE:
            return "it is not known to compute each token from that token alone"
        if any(self._has_tokens(a) and a.meta["val"].dim() != value.dim() for a in node.all_input_nodes):
            return "its arguments have their tokens in another dim"
        return ""

    def _has_tokens(self, node: fx.Node) -> bool:
        return isinstance(node.meta.get("val"), torch.Tensor) and self.program.shape(node)[:1] == (TOKENS,)

    def inputs(self, node: fx.Node) -> list[fx.Node]:
        """The arguments with a row for each token."""
        return [a for a in node.all_input_nodes if self._has_tokens(a)]

    # -- costs of one token -------------------------------------------------------------------------------------------

    def bytes(self, node: fx.Node) -> int:
        """Of one token's row."""
        value = node.meta["val"]
        return math.prod(value.shape[1:]) * value.dtype.itemsize

    def share(self, node: fx.Node) -> float:
        """Bytes that a rank sends for a reduce-scatter or a gather: all parts but its own."""
        return self.bytes(node) * (self.ranks - 1) / self.ranks

    def traffic(self, node: fx.Node) -> int:
        """Bytes read and written by an operator for one token."""
        return self.bytes(node) + sum(self.bytes(a) for a in self.inputs(node))

    def link_s(self, sent_bytes: float) -> float:
        return sent_bytes / self.device.link(self.ranks)

    def memory_s(self, num_bytes: float) -> float:
        return num_bytes / self.device.memory_bandwidth


@dataclass
class Division:
    """``divided``: the values with divided tokens. ``saved``: of each token, against all of them whole."""

    divided: set[fx.Node] = field(default_factory=set)
    reductions: list[fx.Node] = field(default_factory=list)
    saved: Work = field(default_factory=Work)

    def least_tokens(self, device: Device) -> int | None:
        """The number of tokens from which the time saved is more than the launches added; None if there is none."""
        if self.saved.seconds <= 0:
            return None
        return max(1, math.ceil(-self.saved.collectives * device.link_latency_s / self.saved.seconds))

    def told(self, device: Device, least: int | None, most: int) -> str:
        """The reckoning in words."""
        more, saved = -self.saved.collectives, self.saved
        latency = device.link_latency_s * 1e6
        text = (
            f"{len(self.reductions)} reductions scattered: {more} more collectives × {latency:g} µs = "
            f"{more * latency:,.0f} µs a step, against {saved.seconds * 1e9:,.0f} ns a token saved "
            f"({saved.sent_bytes:,.0f} B sent, {saved.memory_bytes:,.0f} B of memory) on {device.name}"
        )
        if least is None:
            return text
        return f"{text}: pays from {least} tokens on" + (f", steps have {most} at most" if least > most else "")


def divide(graph: TokenGraph) -> Division:
    """The cheapest division of a program's tokens."""
    flow = nx.DiGraph()
    flow.add_nodes_from(("divided", "whole"))

    def cost(start: object, end: object, seconds: float) -> None:
        """Paid where ``start`` is divided and ``end`` is whole."""
        flow.add_edge(
            start, end, capacity=flow.edges[start, end]["capacity"] + seconds if flow.has_edge(start, end) else seconds
        )

    for node in graph.candidates:
        for start, end, seconds in _own_costs(graph, node):
            cost(start, end, seconds)
        whole_users = [user for user in node.users if user not in graph.candidates]
        if node.users:
            cost(node, ("gather", node), graph.link_s(graph.share(node)) + graph.latency_s)
        for user in node.users:
            flow.add_edge(("gather", node), "whole" if user in whole_users else user)  # no capacity: infinite
    for value in {a for node in graph.candidates if node.target is not ops.all_reduce for a in graph.inputs(node)}:
        # a copy of one rank's tokens, where one of its users is divided and it is not
        cost(
            ("own", value),
            value if value in graph.candidates else "whole",
            graph.memory_s(2 * graph.bytes(value) / graph.ranks),
        )
        for user in value.users:
            if user in graph.candidates and user.target is not ops.all_reduce:
                flow.add_edge(user, ("own", value))
    if not graph.candidates:
        return Division()
    _, (divided, _) = nx.minimum_cut(flow, "divided", "whole")
    chosen = {node for node in divided if isinstance(node, fx.Node) and node in graph.candidates}
    reductions = [node for node in graph.program.calls(ops.all_reduce) if node in chosen]
    if not reductions:
        return Division()
    return Division(chosen, reductions, _work(graph, set()) - _work(graph, chosen))


def _own_costs(graph: TokenGraph, node: fx.Node) -> Iterator[tuple[object, object, float]]:
    if node.target is ops.all_reduce:
        once = graph.link_s(graph.share(node))
        yield "divided", node, 2 * once + graph.latency_s
        yield node, "whole", once + graph.latency_s
    else:
        whole = graph.memory_s(graph.traffic(node))
        yield "divided", node, whole
        yield node, "whole", whole / graph.ranks


def _work(graph: TokenGraph, divided: set[fx.Node]) -> Work:
    """What the candidates and the movements between them cost, when these are divided."""
    work = Work()
    for node in graph.candidates:
        if node.target is ops.all_reduce:
            work.collectives += 1
            work.sent_bytes += graph.share(node) * (1 if node in divided else 2)
        else:
            work.memory_bytes += graph.traffic(node) / (graph.ranks if node in divided else 1)
        if node in divided and any(user not in divided for user in node.users):
            work.collectives += 1
            work.sent_bytes += graph.share(node)
    taken = {a for node in divided if node.target is not ops.all_reduce for a in graph.inputs(node)} - divided
    work.memory_bytes += sum(2 * graph.bytes(value) / graph.ranks for value in taken)
    work.seconds = graph.link_s(work.sent_bytes) + graph.memory_s(work.memory_bytes)
    return work
