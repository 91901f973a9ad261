"""scatter_residual: between two linears each rank works on its own tokens instead of on all of them.

    h = all_reduce(o_proj) + residual;  n = rms_norm(h);  up = linear(n, w)
    → h = reduce_scatter(o_proj, dim=0) + residual;  n = rms_norm(h);  up = linear(all_gather(n, dim=0), w)

A reduce-scatter and a gather move as many bytes as the all-reduce did, but residual additions and norms run on ``T/n``
tokens, and what is gathered may be narrower than the sum was (8 bits after quantisation). The price is one more
collective, so it pays from a number of tokens on, which the pass computes from the device's figures, prints, and leaves
in the program. Where the tokens are divided is the minimum cut of a graph whose edges are bytes and launches
(``passes/token_cut.py``).

Needs: select_logit_rows (what wants all tokens is then settled), and it belongs to the prefill phase alone.
Leaves: values ``[T/n, …] S(0)``; a constant ``prefill_min_tokens``; padding rows at the end of the last ranks' blocks,
which nothing reads and no gather returns.
Numerics: exact; every token is computed as before, and its sum over ranks is taken in the same order.
Source: sequence parallelism (Korthikanti et al. 2022); the choice by minimum cut is ours.
"""

from __future__ import annotations

import torch.fx as fx

from graphsrt import ops
from graphsrt.devices import DEFAULT, DEVICES, Device
from graphsrt.passes.token_cut import Division, TokenGraph, divide
from graphsrt.placement import TOKENS, R, ShardTokens
from graphsrt.program import PREFILL_MIN_TOKENS, NearMiss, Program, arguments


def scatter_residual(
    program: Program,
    *,
    axis: str = "tp",
    device: str | Device = DEFAULT,
    max_tokens: int = 8192,
    min_tokens: int | None = None,
    near_misses: list[NearMiss] | None = None,
    notes: list[str] | None = None,
    sites: list[fx.Node] | None = None,
) -> int:
    """Divide tokens where that pays; returns the number of all-reduces that became reduce-scatters.

    ``device``: whose figures decide. ``max_tokens``: of the largest step; where it would take more, nothing is done.
    ``min_tokens``: from how many tokens on, whatever the figures say; collectives are then taken to be free of latency.
    """
    ranks = program.mesh.get(axis, 1)
    rows_of = next(
        (n for n in program.graph.nodes if n.op == "placeholder" and program.shape(n)[:1] == (TOKENS,)), None
    )
    if ranks == 1 or rows_of is None:
        return 0
    figures = DEVICES[device] if isinstance(device, str) else device
    if figures.name == "cpu" and min_tokens is None:
        # There an all-reduce is an exchange and a gather already, and a second program is compiled for minutes.
        if notes is not None:
            notes.append("off on CPUs; functools.partial(scatter_residual, min_tokens=512) in passes= turns it on")
        return 0
    graph = TokenGraph(program, ranks, figures, None if min_tokens is not None else max_tokens)
    division = divide(graph)
    least = min_tokens if min_tokens is not None else division.least_tokens(figures)
    worth = division.reductions and least is not None and least <= max_tokens
    if notes is not None and division.reductions:
        notes.append(division.told(figures, least if min_tokens is None else None, max_tokens))
    if near_misses is not None:
        near_misses += _left(program, graph, division, bool(worth))
    if not worth:
        return 0
    scattered = _rewrite(program, division, rows_of, axis, ranks)
    if sites is not None:
        sites += scattered
    assert least is not None
    program.constants[PREFILL_MIN_TOKENS] = max(least, 1)
    return len(division.reductions)


def _left(program: Program, graph: TokenGraph, division: Division, worth: bool) -> list[NearMiss]:
    """All-reduces that stay, and why."""
    found = []
    for node in program.calls(ops.all_reduce):
        if node in division.divided and worth:
            continue
        if node in division.divided:
            reason = "it would pay only in steps of more tokens than there are"
        elif node not in graph.candidates:
            reason = graph.reason_against(node)
        else:
            whole = [user.name for user in node.users if user not in division.divided]
            reason = f"to gather it again costs more than is saved: {', '.join(whole[:3])} needs all tokens"
        found.append(NearMiss(node.name, node.meta.get("module", ""), reason))
    return found


def _rewrite(program: Program, division: Division, rows_of: fx.Node, axis: str, ranks: int) -> list[fx.Node]:
    """Divide the tokens; returns the reduce-scatters."""
    part = ShardTokens(ranks)
    found: list[fx.Node] = []
    divided = division.divided
    own: dict[fx.Node, fx.Node] = {}
    order = {node: index for index, node in enumerate(program.graph.nodes)}

    def made(node: fx.Node) -> fx.Node:
        made_by = node.meta.get("made_by", ())
        node.meta["made_by"] = made_by if "scatter_residual" in made_by else (*made_by, "scatter_residual")
        return node

    def mine(value: fx.Node) -> fx.Node:
        """This rank's tokens of a value that all ranks have."""
        if value not in own:
            name = f"{value.name}.own_tokens"
            own[value] = made(
                program.call(
                    ops.take_own, value, dim=0, axis=axis, size=ranks, name=name, before=first(value), like=value
                )
            )
            own[value].meta["placement"] = part
        return own[value]

    def first(value: fx.Node) -> fx.Node:
        return min((user for user in value.users if user in divided), key=order.__getitem__)

    gathers = [(value, [user for user in value.users if user not in divided]) for value in divided]
    changed = sorted(divided, key=order.__getitem__)
    for node in changed:
        if node.target is ops.all_reduce:
            value = arguments(node)["x"]
            name = f"{node.name.removesuffix('.all_reduce')}.reduce_scatter"
            scattered = made(
                program.call(ops.reduce_scatter, value, dim=0, axis=axis, size=ranks, name=name, before=node, like=node)
            )
            scattered.meta["placement"] = part
            own[node] = scattered
            found.append(scattered)
            continue
        for used in node.all_input_nodes:
            if used in divided:
                if used in own:
                    node.replace_input_with(used, own[used])
            elif program.shape(used)[:1] == (TOKENS,):
                node.replace_input_with(used, mine(used))
        made(node).meta["placement"] = part
    for value, users in gathers:
        if not users:
            continue
        source = own.get(value, value)
        gathered = made(
            program.call(
                ops.all_gather, source, dim=0, axis=axis, size=ranks, rows_of=rows_of,
                name=f"{value.name}.all_tokens", before=min(users, key=lambda n: order.get(n, len(order))), like=value,
            )
        )  # fmt: skip
        gathered.meta["placement"] = R
        for user in users:
            user.replace_input_with(value, gathered)
    program.remove_dead()
    for node in program.nodes:
        if node in divided or "scatter_residual" in node.meta.get("made_by", ()):
            program.infer([node])
    return found


scatter_residual.phase = "prefill"  # type: ignore[attr-defined]
