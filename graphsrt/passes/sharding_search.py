"""Which linears are divided, and how: the choice behind ``shard_tensor_parallel``, made before anything is changed.

Each linear asks that its input be divided; the demand walks back (rules in ``demand.py``) to the linears before it,
which become column-parallel, and this one row-parallel. A refusal that names the layout it would accept is tried again
with it. Linears behind attentions that read the same keys ask together, since these can only be divided in one way for
all of them. Then the logits ask the same of the vocabulary.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import torch.fx as fx

from graphsrt import ops
from graphsrt.passes import demand_latent  # noqa: F401  (its rule registers itself)
from graphsrt.passes.demand import CREATORS, Refusal, demand
from graphsrt.passes.distributed_norm import NORMS
from graphsrt.passes.kv_layers import kv_identity
from graphsrt.placement import Layout, Shard
from graphsrt.program import Program, arguments, aten

_MAX_RETRIES = 4


@dataclass
class Choice:
    """What is divided. ``shards``: values; ``columns``, ``rows``: linears by the layout of their output or input
    channels; ``weights``: (user, weight) -> its shard, of vectors that follow a value; ``refused``: linear -> why."""

    shards: dict[fx.Node, Shard] = field(default_factory=dict)
    columns: dict[fx.Node, Layout] = field(default_factory=dict)
    rows: dict[fx.Node, Layout] = field(default_factory=dict)
    weights: dict[tuple[fx.Node, fx.Node], Shard] = field(default_factory=dict)
    logits: Layout | None = None
    refused: dict[fx.Node, str] = field(default_factory=dict)

    def add(self, trial: Choice) -> None:
        """Accept what one demand would divide."""
        self.shards.update(trial.shards)
        self.columns.update(trial.columns)
        self.weights.update(trial.weights)


class Search:
    """Makes the choice for one program and one number of ranks."""

    def __init__(self, program: Program, ranks: int):
        self.program = program
        self.ranks = ranks
        self.choice = Choice()
        self.order = {node: index for index, node in enumerate(program.graph.nodes)}

    def run(self) -> Choice:
        """Linears fed by attention first, as their inputs are divided by heads; then the others; then the logits."""
        linears = self.program.calls(aten.linear.default)
        first = {node: found for node in linears if (found := self._attention_behind(node)) is not None}
        together: dict[Hashable, list[fx.Node]] = {}
        for node, attention in first.items():
            size = node.args[0].meta["val"].shape[-1]  # type: ignore[union-attr]
            together.setdefault((kv_identity(attention), size), []).append(node)
        for group in together.values():
            if not self._try_rows(group) and len(group) > 1:
                for node in group:
                    self._try_rows([node])
        for node in linears:
            if node not in first:
                self._try_rows([node])
        output = self.program.output
        trial, layout = self._try({output: None})
        if trial is not None:
            self.choice.add(trial)
            self.choice.logits = layout
        return self.choice

    def _attention_behind(self, linear: fx.Node) -> fx.Node | None:
        """An attention that the input comes from without another linear between."""
        stack, seen = [linear.args[0]], set()
        while stack:
            node = stack.pop()
            if not isinstance(node, fx.Node) or node in seen or node.target is aten.linear.default:
                continue
            seen.add(node)
            if node.target in ops.ATTENTIONS:
                return node
            stack += node.all_input_nodes
        return None

    def _try_rows(self, linears: list[fx.Node]) -> bool:
        """Divide the inputs of linears, all in one way; whether that is possible."""
        asked: dict[fx.Node, fx.Node | None] = {}
        for linear in linears:
            if linear in self.choice.columns:
                self.choice.refused[linear] = "its output is sharded already"
            elif self.program.weight_of(arguments(linear)["weight"]) is None:
                self.choice.refused[linear] = "its weight is computed"
            else:
                asked[arguments(linear)["input"]] = linear
        if not asked or len(asked) < len(linears):
            return False
        trial, layout = self._try(asked)
        if trial is not None:
            self.choice.add(trial)
            self.choice.rows.update(dict.fromkeys(linears, layout))
        return trial is not None

    def _try(self, asked: Mapping[fx.Node, fx.Node | None]) -> tuple[Choice | None, Layout]:
        """Ask for values of one size (and who asks) divided along the last dimension, again with whatever layout a
        refusal offers."""
        first = next(iter(asked))
        size = int(first.meta["val"].shape[-1])
        layout = Layout.blocks(size, self.ranks)
        losers = [user if user is not None else value for value, user in asked.items()]
        for _ in range(_MAX_RETRIES):
            if layout.is_everywhere:
                self.choice.refused.update(dict.fromkeys(losers, f"{first.name}: it is one unit, not several"))
                break
            try:
                return self._demand(asked, layout), layout
            except Refusal as refusal:
                self.choice.refused.update(dict.fromkeys(losers, f"{refusal.node.name}: {refusal.reason}"))
                better = refusal.layout
                if better is None or size % better.size:
                    break
                better = better.scale(size // better.size)
                if better == layout:
                    break
                layout = better
        return None, layout

    def _demand(self, asked: Mapping[fx.Node, fx.Node | None], layout: Layout) -> Choice:
        """Walk back from values to column-parallel linears; raises Refusal where that is not possible."""
        trial = Choice()
        wanted: dict[fx.Node, list[Shard]] = {v: [Shard(v.meta["val"].dim() - 1, layout)] for v in asked}
        askers: dict[fx.Node, set[fx.Node | None]] = {value: {user} for value, user in asked.items()}
        heap = [(-self.order[value], value) for value in asked]
        heapq.heapify(heap)
        while heap:
            _, node = heapq.heappop(heap)  # latest first: all users that ask have asked by now
            if len(set(wanted[node])) != 1:
                raise Refusal(node, "is asked for in two ways at once")
            place = wanted[node][0]
            for other in node.users:
                if other not in askers[node] and not (other.op == "output" and None in askers[node]):
                    raise Refusal(node, f"{other.name} needs the whole value")
            if node in self.choice.shards and self.choice.shards[node] != place:
                raise Refusal(node, f"is laid out as {self.choice.shards[node].layout} already")
            trial.shards[node] = place
            if node.target is aten.linear.default:
                self._column(node, place, trial)
                continue
            if node.op != "call_function":
                raise Refusal(node, "an input cannot be divided")
            if None in asked.values() and is_over_width(node, place):
                raise Refusal(node, "a norm of the result needs all of it")
            demands = demand(self.program, node, place, self.ranks)
            divided = {argument for argument, _ in demands}
            for argument in node.all_input_nodes:
                if argument in self.choice.shards and argument not in divided and node.target not in CREATORS:
                    raise Refusal(node, f"{argument.name} is divided already and is needed whole")
            for argument, requirement in demands:
                if self.program.weight_of(argument) is not None:
                    trial.weights[node, argument] = requirement
                    continue
                if argument not in wanted:
                    wanted[argument], askers[argument] = [], set()
                    heapq.heappush(heap, (-self.order[argument], argument))
                wanted[argument].append(requirement)
                askers[argument].add(node)
        return trial

    def _column(self, linear: fx.Node, place: Shard, trial: Choice) -> None:
        args = arguments(linear)
        if place.dim != linear.meta["val"].dim() - 1:
            raise Refusal(linear, "a linear is divided along its output channels only")
        if linear in self.choice.rows:
            raise Refusal(linear, "its input is sharded already")
        if self.program.weight_of(args["weight"]) is None or (
            args["bias"] is not None and self.program.weight_of(args["bias"]) is None
        ):
            raise Refusal(linear, "its weight is computed")
        trial.columns[linear] = place.layout


def is_over_width(node: fx.Node, place: Shard) -> bool:
    """Whether ``place`` divides the width that a norm runs over."""
    return node.target in NORMS and place.dim == node.meta["val"].dim() - 1


def left_whole(program: Program, choice: Choice, sums: set[fx.Node]) -> list[fx.Node]:
    """The linears that should have been divided and are not; ``sums`` are the values that partial sums flow into.

    A linear that stays whole is no failure where all that reads its result is divided and needs it whole: a router, or
    a projection to a latent that divided projections read. Dividing it would cost a collective of its own. But one that
    reads what another failure left whole is its partner, and a failure as well. Neither is a bottleneck: the sum of the
    whole width that would complete it costs more than its few numbers.
    """
    failed: dict[fx.Node, None] = {}
    for linear in program.calls(aten.linear.default):
        if linear in choice.columns or linear in choice.rows or _is_bottleneck(linear):
            continue
        if not _is_needed_whole(choice, linear, sums) or any(node in failed for node in _linears_behind(linear)):
            failed[linear] = None
    return list(failed)


_NARROW = 4
"""A bottleneck is at most so many times narrower than what it reads and gives back."""


def _is_bottleneck(linear: fx.Node) -> bool:
    """Whether a linear goes to a much smaller width, or comes back from one to the width that it had before."""
    wide, narrow = (int(x.meta["val"].shape[-1]) for x in (linear.args[0], linear))  # type: ignore[union-attr]
    if narrow * _NARROW <= wide:
        return True
    return wide * _NARROW <= narrow and any(
        behind.args[0].meta["val"].shape[-1] == narrow and behind.meta["val"].shape[-1] == wide  # type: ignore[union-attr]
        for behind in _linears_behind(linear)
    )


def _is_needed_whole(choice: Choice, linear: fx.Node, sums: set[fx.Node]) -> bool:
    stack, seen = list(linear.users), {linear}
    while stack:
        node = stack.pop()
        if node in seen or node in choice.columns or node in choice.shards or node in sums:
            continue
        seen.add(node)
        if node.op == "output" or node.target is aten.linear.default or node.target in ops.ATTENTIONS:
            return False
        stack += node.users
    return True


def _linears_behind(linear: fx.Node) -> list[fx.Node]:
    """The linears whose results a linear's input is computed from without another addition to the residual."""
    found, stack, seen = [], [linear.args[0]], set()
    while stack:
        node = stack.pop()
        if not isinstance(node, fx.Node) or node in seen:
            continue
        seen.add(node)
        if node.target is aten.linear.default:
            found.append(node)
        elif node.target is not aten.add.Tensor:
            stack += node.all_input_nodes
    return found
