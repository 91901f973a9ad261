"""shard_tensor_parallel: divide a model over the ranks of the ``tp`` axis, by dataflow alone.

    o = linear(attention(linear(x, wq), …), wo)
    → wq: S(0) by heads, wo: S(1), o: P(sum);  o_sum = all_reduce(o)

Each linear asks that its input be sharded; the demand walks back through the operators (rules in ``demand.py``) to the
linears before it, which become column-parallel, and this one row-parallel. A refusal that names the layout it would
accept is tried again with it, so head sizes and groups are found, never configured. A demand that reaches a norm over
the whole width has reached the residual stream and is refused. Then the logits ask the same of the vocabulary, and the
embedding is divided by vocabulary rows. Experts are divided by their width (``experts="tp"``), or whole
(``experts="ep"``); routers stay whole, since all ranks must agree where a token goes.

A row-parallel bias is kept by one rank. Pads copy real units; the rows of the weight that contracts them are zero.

Needs: recognize_* (norms, rope, attention and gated activations as operators).
Leaves: every value with a placement; weights as shards; collectives ``all_reduce`` and ``all_gather``.
Numerics: sums are associated differently.
Source: Megatron-LM (Shoeybi et al. 2019) for the column/row pairs; the search is ours.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from graphsrt import ops
from graphsrt.passes.demand import Part, Refusal, Requirement, demand
from graphsrt.passes.demand_experts import computed_weight, divide_experts, only_routes
from graphsrt.placement import Layout, Partial, R, Shard
from graphsrt.program import NearMiss, Program, Weight, arguments, aten
from graphsrt.recipes import OnOwner, ShardOf, ShardStart

_MAX_RETRIES = 4


@dataclass
class _Trial:
    """Placements that one demand would give, not yet applied."""

    values: dict[fx.Node, Shard] = field(default_factory=dict)
    columns: dict[fx.Node, Layout] = field(default_factory=dict)  # linears whose output dimension is divided
    weights: dict[tuple[fx.Node, fx.Node], Shard] = field(default_factory=dict)  # (user, weight) -> its shard


def shard_tensor_parallel(
    program: Program, *, axis: str = "tp", experts: str = "tp", near_misses: list[NearMiss] | None = None
) -> int:
    """Shard every linear, embedding and experts operator that can be; the count is of those. See the top of the file.

    ``experts``: "tp" divides each expert, "ep" gives each rank whole experts.
    """
    ranks = program.mesh.get(axis, 1)
    if ranks == 1 or any("placement" in node.meta for node in program.nodes):
        return 0
    return _Sharder(program, axis, ranks, experts, near_misses if near_misses is not None else []).run()


def _divisible(program: Program) -> int:
    """Linears, embeddings and experts over checkpoint matrices, where there is more than one rank."""
    if program.mesh.get("tp", 1) == 1 or any("placement" in node.meta for node in program.nodes):
        return 0
    linears = [node for node in program.calls(aten.linear.default) if not only_routes(program, node)]
    return len(linears) + len(program.calls(aten.embedding.default, ops.moe_experts))


shard_tensor_parallel.expect = _divisible  # type: ignore[attr-defined]


class _Sharder:
    def __init__(self, program: Program, axis: str, ranks: int, experts: str, near_misses: list[NearMiss]):
        self.program = program
        self.axis = axis
        self.ranks = ranks
        self.experts = experts
        self.near_misses = near_misses
        self.order = {node: index for index, node in enumerate(program.graph.nodes)}
        self.shards: dict[fx.Node, Shard] = {}
        self.columns: dict[fx.Node, Layout] = {}
        self.rows: dict[fx.Node, Layout] = {}
        self.weight_shards: dict[tuple[fx.Node, fx.Node], Shard] = {}
        self.refused: dict[fx.Node, str] = {}

    def run(self) -> int:
        linears = self.program.calls(aten.linear.default)
        fed_by_attention = [node for node in linears if self._reaches_attention(node)]
        for node in [*fed_by_attention, *(n for n in linears if n not in set(fed_by_attention))]:
            self._try_row(node)
        logits = self._try_logits()
        embeddings = [node for node in self.program.calls(aten.embedding.default) if self._vocab_parallel(node)]
        mixtures = [node for node in self.program.calls(ops.moe_experts) if self._dividable(node)]
        routers = {node for node in linears if only_routes(self.program, node)}
        self._apply(logits, embeddings, mixtures)
        for node in linears:
            if node not in self.columns and node not in self.rows and node not in routers:
                self.near_misses.append(
                    NearMiss(node.name, node.meta.get("module", ""), self.refused.get(node, "not asked for"))
                )
        return len(self.columns) + len(self.rows) + len(embeddings) + len(mixtures)

    # -- choosing ------------------------------------------------------------------------------------------------

    def _reaches_attention(self, linear: fx.Node) -> bool:
        """Whether the input comes from attention without another linear between."""
        stack, seen = [linear.args[0]], set()
        while stack:
            node = stack.pop()
            if not isinstance(node, fx.Node) or node in seen or node.target is aten.linear.default:
                continue
            seen.add(node)
            if node.target is ops.attention:
                return True
            stack += node.all_input_nodes
        return False

    def _try_row(self, linear: fx.Node) -> None:
        x = arguments(linear)["input"]
        if linear in self.columns:
            self.refused[linear] = "its output is sharded already"
            return
        if self.program.weight_of(arguments(linear)["weight"]) is None:
            self.refused[linear] = "its weight is computed"
            return
        dim = x.meta["val"].dim() - 1
        trial, layout = self._try(x, dim, linear)
        if trial is not None:
            self._accept(trial)
            self.rows[linear] = layout

    def _try_logits(self) -> Layout | None:
        output = self.program.output
        trial, layout = self._try(output, output.meta["val"].dim() - 1, None)
        if trial is None:
            return None
        self._accept(trial)
        return layout

    def _try(self, value: fx.Node, dim: int, user: fx.Node | None) -> tuple[_Trial | None, Layout]:
        """Ask for ``value`` divided along ``dim``, again with whatever layout a refusal offers."""
        size = int(value.meta["val"].shape[dim])
        layout = Layout.blocks(size, self.ranks)
        for _ in range(_MAX_RETRIES):
            try:
                return self._demand(value, Shard(dim, layout), user), layout
            except Refusal as refusal:
                self.refused[user if user is not None else value] = f"{refusal.node.name}: {refusal.reason}"
                better = refusal.layout
                if better is None or size % better.size:
                    break
                better = better.scale(size // better.size)
                if better == layout:
                    break
                layout = better
        return None, layout

    def _accept(self, trial: _Trial) -> None:
        self.shards.update(trial.values)
        self.columns.update(trial.columns)
        self.weight_shards.update(trial.weights)

    def _demand(self, value: fx.Node, shard: Shard, user: fx.Node | None) -> _Trial:
        """Walk back from ``value`` to column-parallel linears; raises Refusal where that is not possible."""
        trial = _Trial()
        wanted: dict[fx.Node, list[Requirement]] = {value: [shard]}
        askers: dict[fx.Node, set[fx.Node | None]] = {value: {user}}
        heap = [(-self.order[value], value)]
        while heap:
            _, node = heapq.heappop(heap)  # latest first: all users that ask have asked by now
            place = self._combine(node, wanted[node])
            for other in node.users:
                if other not in askers[node] and not (other.op == "output" and None in askers[node]):
                    raise Refusal(node, f"{other.name} needs the whole value")
            if node in self.shards and self.shards[node] != place:
                raise Refusal(node, f"is laid out as {self.shards[node].layout} already")
            trial.values[node] = place
            if node.target is aten.linear.default:
                self._column(node, place, trial)
                continue
            if node.op != "call_function":
                raise Refusal(node, "an input cannot be divided")
            for argument, requirement in demand(self.program, node, place, self.ranks):
                if self.program.weight_of(argument) is not None:
                    if not isinstance(requirement, Shard):
                        raise Refusal(node, "part of a weight is used")
                    trial.weights[node, argument] = requirement
                    continue
                if argument not in wanted:
                    wanted[argument], askers[argument] = [], set()
                    heapq.heappush(heap, (-self.order[argument], argument))
                wanted[argument].append(requirement)
                askers[argument].add(node)
        return trial

    def _combine(self, node: fx.Node, requirements: list[Requirement]) -> Shard:
        """One layout that satisfies all users: equal shards, or slices that cover a dimension as segments."""
        shards = {r for r in requirements if isinstance(r, Shard)}
        parts = sorted({r for r in requirements if isinstance(r, Part)}, key=lambda p: (p.dim, p.start, p.end))
        if len(shards) == 1 and not parts:
            return next(iter(shards))
        if shards or len({p.dim for p in parts}) != 1:
            raise Refusal(node, "is asked for in two ways at once")
        end = 0
        for part in parts:
            if part.start != end:
                raise Refusal(node, f"slices do not cover it once ({part.start}:{part.end} after {end})")
            end = part.end
        size = int(node.meta["val"].shape[parts[0].dim])
        if end != size:
            raise Refusal(node, f"slices cover {end} of {size}")
        return Shard(parts[0].dim, Layout.concat([part.layout for part in parts]))

    def _column(self, linear: fx.Node, place: Shard, trial: _Trial) -> None:
        args = arguments(linear)
        if place.dim != linear.meta["val"].dim() - 1:
            raise Refusal(linear, "a linear is divided along its output channels only")
        if linear in self.rows:
            raise Refusal(linear, "its input is sharded already")
        if self.program.weight_of(args["weight"]) is None or (
            args["bias"] is not None and self.program.weight_of(args["bias"]) is None
        ):
            raise Refusal(linear, "its weight is computed")
        trial.columns[linear] = place.layout

    def _vocab_parallel(self, embedding: fx.Node) -> bool:
        args = arguments(embedding)
        weight = self.program.weight_of(args["weight"])
        return weight is not None and isinstance(args["indices"], fx.Node) and args["indices"].op == "placeholder"

    def _dividable(self, experts: fx.Node) -> bool:
        computed = computed_weight(self.program, experts)
        if computed is not None:
            reason = f"its weight {computed} is computed"
            self.near_misses.append(NearMiss(experts.name, experts.meta.get("module", ""), reason))
        return computed is None

    # -- applying ------------------------------------------------------------------------------------------------

    def _apply(self, logits: Layout | None, embeddings: list[fx.Node], mixtures: list[fx.Node]) -> None:
        program = self.program
        partial = set(self.rows) | set(mixtures)
        for node in program.nodes:
            self._localize(node)
        self._divide_weights(embeddings, mixtures)
        if self.experts == "ep":
            for node in mixtures:
                self._first_expert(node)
        partial |= {self._vocab_embedding(embedding) for embedding in embeddings}
        for node in program.graph.nodes:
            val = node.meta.pop("val", None) if node.op == "call_function" else None
            place: Any = Partial() if node in partial else self.shards.get(node, R)
            if isinstance(val, (tuple, list)):
                place = (R,) * len(val)  # what routes tokens: top-k values and indices
            if node.op == "get_attr":
                place = program.weights[str(node.target)].placement or R
                program.weights[str(node.target)].placement = place
            if node.op != "output":
                node.meta["placement"] = place
        for node in partial:
            self._complete(node)
        if logits is not None:
            self._gather(program.output, logits)
        program.remove_dead()
        program.infer()

    def _divide_weights(self, embeddings: list[fx.Node], mixtures: list[fx.Node]) -> None:
        """Give every weight the shard that its users ask for; users that ask for different ones get one each."""
        claims: dict[fx.Node, dict[fx.Node, Weight]] = {}

        def claim(user: fx.Node, node: fx.Node | None, dim: int, layout: Layout, unowned: str = "copy") -> None:
            if node is None:
                return
            whole = self.program.weights[str(node.target)]
            shape = list(whole.shape)
            shape[dim] = layout.local_size
            recipe = ShardOf(whole.recipe, dim, layout, unowned)
            claims.setdefault(node, {})[user] = Weight(tuple(shape), whole.dtype, recipe, Shard(dim, layout))

        for linear, layout in self.columns.items():
            claim(linear, arguments(linear)["weight"], 0, layout)
            claim(linear, arguments(linear)["bias"], 0, layout)
        for linear, layout in self.rows.items():
            claim(linear, arguments(linear)["weight"], 1, layout, "zero")
            bias = arguments(linear)["bias"]
            if bias is not None:  # added before the sum over ranks, so only one of them may have it
                whole = self.program.weights[str(bias.target)]
                once = Weight(whole.shape, whole.dtype, OnOwner(whole.recipe), Partial())
                claims.setdefault(bias, {})[linear] = once
        for (user, weight), shard in self.weight_shards.items():
            claim(user, weight, shard.dim, shard.layout)
        for embedding in embeddings:
            table = arguments(embedding)["weight"]
            claim(embedding, table, 0, Layout.blocks(int(table.meta["val"].shape[0]), self.ranks))
        for experts in mixtures:
            for node, own in divide_experts(self.program, experts, self.ranks, self.experts).items():
                claims.setdefault(node, {})[experts] = own
        for node, wanted in claims.items():
            name = str(node.target)
            agreed = next(iter(wanted.values()))
            if all(wanted.get(user) == agreed for user in node.users):
                self.program.weights[name] = agreed
                node.meta["val"] = self.program.shapes.tensor(agreed.shape, agreed.dtype)
                continue
            for user, own in wanted.items():
                twin = f"{name}.dim{own.placement.dim}" if isinstance(own.placement, Shard) else f"{name}.once"
                if twin not in self.program.weights:
                    self.program.add_weight(twin, own)
                user.replace_input_with(node, self.program.weight_node(twin))

    def _localize(self, node: fx.Node) -> None:
        """Constants that speak of a sharded dimension: view and expand sizes, slice bounds."""
        place = self.shards.get(node)
        if place is None:
            return
        if node.target in (aten.view.default, aten.reshape.default, aten.expand.default):
            size = list(node.args[1])  # type: ignore[arg-type]
            if size[place.dim] != -1:
                size[place.dim] = place.layout.local_size
            node.update_arg(1, size)
        elif node.target is aten.slice.Tensor and arguments(node)["dim"] == place.dim:
            args = arguments(node)
            start, end, layout = self.shards[args["self"]].layout.window(args["start"], args["end"])
            assert layout == place.layout, node.name
            node.args = (args["self"], args["dim"], start, end)

    def _vocab_embedding(self, embedding: fx.Node) -> fx.Node:
        """Replace the look-up by one in this rank's rows, whose number comes from a weight that differs by rank."""
        args = arguments(embedding)
        table = args["weight"]
        start = self._start_of(table)
        new = self.program.call(
            ops.vocab_embedding, args["indices"], table, start, name="embedding", before=embedding, like=embedding
        )
        new.meta["made_by"] = (*new.meta["made_by"], "shard_tensor_parallel")
        self.program.replace(embedding, new)
        return new

    def _start_of(self, table: fx.Node) -> fx.Node:
        """A weight that is each rank's first row of ``table``."""
        place = self.program.weights[str(table.target)].placement
        assert isinstance(place, Shard)
        name = f"{table.target}.start"
        if name not in self.program.weights:
            one_each = Shard(0, Layout.blocks(self.ranks, self.ranks))
            self.program.add_weight(name, Weight((1,), torch.int64, ShardStart(place.layout), one_each))
        return self.program.weight_node(name)

    def _first_expert(self, experts: fx.Node) -> None:
        """Tell an experts operator which experts this rank has."""
        start = self._start_of(arguments(experts)["down"])
        experts.kwargs = {**experts.kwargs, "first_expert": start}

    def _complete(self, node: fx.Node) -> None:
        """Sum a partial value over the ranks, once, for all of its users."""
        users = list(node.users)
        following = node.next
        total = self.program.call(
            ops.all_reduce, node, axis=self.axis, name=f"{node.name}.all_reduce", before=following, like=node
        )
        made_by = node.meta.get("made_by", ())
        if "shard_tensor_parallel" not in made_by:
            made_by = (*made_by, "shard_tensor_parallel")
        total.meta.update(placement=R, made_by=made_by)
        for user in users:
            user.replace_input_with(node, total)

    def _gather(self, value: fx.Node, layout: Layout) -> None:
        """All logits on every rank; padded rows of the vocabulary come last and are cut off."""
        program = self.program
        result = next(node for node in reversed(program.graph.nodes) if node.op == "output")
        dim = self.shards[value].dim
        whole = program.call(
            ops.all_gather,
            value,
            dim=dim,
            axis=self.axis,
            size=self.ranks,
            name=f"{value.name}.all_gather",
            before=result,
            like=value,
        )
        whole.meta.update(placement=R, made_by=(*value.meta.get("made_by", ()), "shard_tensor_parallel"))
        last = whole
        if layout.local_size * self.ranks != layout.size:
            last = program.call(
                aten.slice.Tensor,
                whole,
                dim,
                0,
                layout.size,
                name=f"{value.name}.vocabulary",
                before=result,
                like=value,
            )
            last.meta.update(placement=R, made_by=whole.meta["made_by"])
        result.args = (last,)
