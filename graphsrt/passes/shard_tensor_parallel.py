"""shard_tensor_parallel: divide a model over the ranks of the ``tp`` axis, by dataflow alone.

    o = linear(attention(linear(x, wq), …), wo)
    → wq: S(0) by heads, wo: S(1), o: P(sum);  o_sum = all_reduce(o)

Each linear asks that its input be sharded; the demand walks back through the operators (rules in ``demand.py``) to the
linears before it, which become column-parallel, and this one row-parallel. A refusal that names the layout it would
accept is tried again with it, so head sizes and groups are found, never configured. A demand that reaches the
embedding or a row-parallel linear has reached the residual stream and is refused. Then the logits ask the same of the
vocabulary, and embeddings are divided by rows. Experts are divided by their width (``experts="tp"``), or whole
(``experts="ep"``); routers stay whole, since all ranks must agree where a token goes. The search is in
``sharding_search.py``.

A row-parallel bias is kept by one rank. Pads copy real units; the rows of the weight that contracts them are zero. Sums
over ranks are taken late (``late_reduction.py``): once for parallel attention and MLP. A norm over a divided width
becomes a distributed one (``distributed_norm.py``).

Needs: recognize_* (norms, rope, attention and gated activations as operators), split_linears.
Leaves: every value with a placement; weights as shards; collectives ``all_reduce`` and ``all_gather``.
Numerics: sums are associated differently.
Source: Megatron-LM (Shoeybi et al. 2019) for the column/row pairs; the search is ours.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from graphsrt import ops
from graphsrt.passes import late_reduction
from graphsrt.passes.demand_experts import computed_weight, divide_experts, only_routes
from graphsrt.passes.distributed_norm import distribute_norm
from graphsrt.passes.sharding_search import Choice, Search, is_over_width, left_whole
from graphsrt.placement import Layout, Partial, R, Shard
from graphsrt.program import LOGITS, NearMiss, Program, Weight, arguments, aten
from graphsrt.recipes import OnOwner, ShardOf, ShardStart


def shard_tensor_parallel(
    program: Program, *, axis: str = "tp", experts: str = "tp", near_misses: list[NearMiss] | None = None
) -> int:
    """Shard every linear, embedding and experts operator that can be; the count is of those. See the top of the file.

    ``experts``: "tp" divides each expert, "ep" gives each rank whole experts.
    """
    ranks = program.mesh.get(axis, 1)
    if ranks == 1 or any("placement" in node.meta for node in program.nodes):
        return 0
    choice = Search(program, ranks).run()
    embeddings = [node for node in program.calls(aten.embedding.default) if _vocab_parallel(program, choice, node)]
    refused = {node: computed_weight(program, node) for node in program.calls(ops.moe_experts)}
    mixtures = [node for node, reason in refused.items() if reason is None]
    sums = late_reduction.flow([*choice.rows, *embeddings, *mixtures])
    for node in left_whole(program, choice, sums):
        refused[node] = choice.refused.get(node, "not asked for")
    if near_misses is not None:
        near_misses += [NearMiss(n.name, n.meta.get("module", ""), why) for n, why in refused.items() if why]
    _Writer(program, axis, ranks, choice, experts).write(embeddings, mixtures)
    return len(choice.columns) + len(choice.rows) + len(embeddings) + len(mixtures)


def _divisible(program: Program) -> int:
    """Linears, embeddings and experts over checkpoint matrices, where there is more than one rank."""
    if program.mesh.get("tp", 1) == 1 or any("placement" in node.meta for node in program.nodes):
        return 0
    linears = [node for node in program.calls(aten.linear.default) if not only_routes(program, node)]
    return len(linears) + len(program.calls(aten.embedding.default, ops.moe_experts))


shard_tensor_parallel.expect = _divisible  # type: ignore[attr-defined]


def _vocab_parallel(program: Program, choice: Choice, embedding: fx.Node) -> bool:
    """Rows of a table are divided where every rank knows all indices."""
    args = arguments(embedding)
    return program.weight_of(args["weight"]) is not None and args["indices"] not in choice.shards


class _Writer:
    """Writes a choice into the program."""

    def __init__(self, program: Program, axis: str, ranks: int, choice: Choice, experts: str):
        self.program = program
        self.axis = axis
        self.ranks = ranks
        self.choice = choice
        self.experts = experts

    def write(self, embeddings: list[fx.Node], mixtures: list[fx.Node]) -> None:
        """Weights first, then operators, placements and collectives."""
        program, choice = self.program, self.choice
        partial = set(choice.rows) | set(mixtures)
        norms = [(node, place) for node, place in choice.shards.items() if is_over_width(node, place)]
        for node in program.nodes:
            self._localize(node)
        self._divide_weights(embeddings, mixtures)
        if self.experts == "ep":
            for node in mixtures:
                self._first_expert(node)
        partial |= {self._vocab_embedding(embedding) for embedding in embeddings}
        for node in program.graph.nodes:
            val = node.meta.pop("val", None) if node.op == "call_function" else None
            place: Any = Partial() if node in partial else choice.shards.get(node, R)
            if isinstance(val, (tuple, list)):
                place = (R,) * len(val)  # what routes tokens: top-k values and indices
            if node.op == "get_attr":
                place = program.weights[str(node.target)].placement or R
                program.weights[str(node.target)].placement = place
            if node.op != "output":
                node.meta["placement"] = place
        for node, place in norms:
            partial |= set(distribute_norm(program, node, place))
        program.infer()
        late_reduction.complete(program, partial, self.axis)
        if choice.logits is not None:
            self._gather(program.output, choice.logits)
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

        for linear, layout in self.choice.columns.items():
            claim(linear, arguments(linear)["weight"], 0, layout)
            claim(linear, arguments(linear)["bias"], 0, layout)
        for linear, layout in self.choice.rows.items():
            claim(linear, arguments(linear)["weight"], 1, layout, "zero")
            bias = arguments(linear)["bias"]
            if bias is not None:  # added before the sum over ranks, so only one of them may have it
                whole = self.program.weights[str(bias.target)]
                once = Weight(whole.shape, whole.dtype, OnOwner(whole.recipe), Partial())
                claims.setdefault(bias, {})[linear] = once
        for (user, weight), shard in self.choice.weights.items():
            claim(user, weight, shard.dim, shard.layout)
        for embedding in embeddings:
            table = arguments(embedding)["weight"]
            claim(embedding, table, 0, Layout.blocks(int(table.meta["val"].shape[0]), self.ranks))
        for node in mixtures:
            for weight, own in divide_experts(self.program, node, self.ranks, self.experts).items():
                claims.setdefault(weight, {})[node] = own
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
        place = self.choice.shards.get(node)
        if place is None:
            return
        if node.target in (aten.view.default, aten.reshape.default, aten.expand.default):
            size = list(node.args[1])  # type: ignore[arg-type]
            if size[place.dim] != -1:
                size[place.dim] = place.layout.local_size
            node.update_arg(1, size)

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
        down = arguments(experts)["down"]
        place = self.program.weights[str(down.target)].placement
        if not isinstance(place, Shard) or place.dim != 0:
            return  # divided along its width
        start = self._start_of(down)
        experts.kwargs = {**experts.kwargs, "first_expert": start}

    def _gather(self, value: fx.Node, layout: Layout) -> None:
        """All logits on every rank; padded rows of the vocabulary come last and are cut off."""
        program = self.program
        result = next(node for node in reversed(program.graph.nodes) if node.op == "output")
        dim = value.meta["val"].dim() - 1
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
        program.set_outputs({**program.outputs, LOGITS: last})
