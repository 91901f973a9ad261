"""Execute a program for all ranks at once, in this process, node by node.

Every value is a list with one local tensor for each rank; operators run on each rank's tensors, collectives combine the
list. Nothing here knows how a program was sharded: it does what the text says. Tensors are never shared between ranks,
so an operator that writes in place on one rank cannot repair another.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch
import torch.fx as fx

from graphsrt import ops
from graphsrt.program import Program, arguments, map_arguments
from graphsrt.recipes import TensorSource, evaluate

Values = list[Any]
"""One local value (tensor, or tuple of tensors) for each rank."""


def load(program: Program, source: TensorSource, axis: str = "tp") -> dict[str, Values]:
    """Every weight on every rank."""
    ranks = program.mesh.get(axis, 1)
    return {
        name: [evaluate(w.recipe, rank, source, w.dtype) for rank in range(ranks)]
        for name, w in program.weights.items()
    }


def simulate(
    program: Program,
    inputs: Mapping[str, torch.Tensor | Values],
    weights: Mapping[str, Values],
    *,
    axis: str = "tp",
    watch: Callable[[fx.Node, Values], None] | None = None,
) -> Values:
    """The program's result, its logits, on every rank; see :func:`simulate_outputs`."""
    return next(iter(simulate_outputs(program, inputs, weights, axis=axis, watch=watch).values()))


def simulate_outputs(
    program: Program,
    inputs: Mapping[str, torch.Tensor | Values],
    weights: Mapping[str, Values],
    *,
    axis: str = "tp",
    watch: Callable[[fx.Node, Values], None] | None = None,
) -> dict[str, Values]:
    """All that the program returns, by name, on every rank.

    ``inputs``: one tensor for all ranks (each gets its own copy), or a list with one for each rank, used as it is: a
    ``kv_pool`` is written in place. ``watch`` is called with every node and its values, weights and inputs included.
    """
    ranks = program.mesh.get(axis, 1)
    values: dict[fx.Node, Values] = {}
    last_use = _last_uses(program)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            given = inputs[node.name]
            values[node] = list(given) if isinstance(given, (list, tuple)) else [given.clone() for _ in range(ranks)]
        elif node.op == "get_attr":
            values[node] = list(weights[str(node.target)])
        elif node.op == "output":
            return {name: values[value] for name, value in program.outputs.items()}
        else:
            values[node] = _run(node, values, ranks)
        if watch is not None:
            watch(node, values[node])
        for done in last_use.get(node, ()):
            del values[done]
    raise AssertionError("a program ends with its output")


def _last_uses(program: Program) -> dict[fx.Node, list[fx.Node]]:
    """Node -> the values that nobody needs after it."""
    last: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        for argument in node.all_input_nodes:
            last[argument] = node
    ends: dict[fx.Node, list[fx.Node]] = {}
    for value, node in last.items():
        ends.setdefault(node, []).append(value)
    return ends


def _run(node: fx.Node, values: dict[fx.Node, Values], ranks: int) -> Values:
    if node.target in ops.COLLECTIVES:
        args = arguments(node)
        if args.get("rows_of") is not None:
            args["rows_of"] = values[args["rows_of"]]
        reduced = COLLECTIVE[ops.kind_of_collective(node.target)](values[args["x"]], args)
        if node.target not in ops.AFTER_ALL_REDUCE:
            return reduced
        return [_after_all_reduce(node, values, rank, reduced[rank]) for rank in range(ranks)]
    results: Values = []
    for rank in range(ranks):
        args, kwargs = map_arguments(node, lambda a: values[a][rank])  # noqa: B023
        if node.target is operator.getitem:
            results.append(args[0][args[1]])
        else:
            results.append(node.target(*args, **kwargs))  # type: ignore[operator]
    return results


def _after_all_reduce(node: fx.Node, values: dict[fx.Node, Values], rank: int, reduced: torch.Tensor) -> Any:
    """What a rank does with the sum that a fused operator begins with."""
    (_, *args), kwargs = map_arguments(node, lambda a: values[a][rank])
    rest = {name: value for name, value in kwargs.items() if name != "axis"}
    return ops.AFTER_ALL_REDUCE[node.target](reduced, *args, **rest)  # type: ignore[index]


def _all_reduce(local: Values, args: dict[str, Any]) -> Values:
    """Summed in rank order; half precision accumulates in float32 and rounds once, as the process collectives do."""
    dtype = local[0].dtype
    wide = [x.to(torch.float32) if dtype in (torch.bfloat16, torch.float16) else x for x in local]
    total = reduce(torch.add, wide) if args.get("op", "sum") == "sum" else reduce(torch.maximum, wide)
    return [total.to(dtype).clone() for _ in local]


def _all_gather(local: Values, args: dict[str, Any]) -> Values:
    whole = torch.cat(local, args["dim"])
    rows_of = args.get("rows_of")  # on every rank
    return [(whole if rows_of is None else whole[: rows_of[rank].shape[0]]).clone() for rank in range(len(local))]


def _reduce_scatter(local: Values, args: dict[str, Any]) -> Values:
    total = _all_reduce(local, {"op": "sum"})
    return [_block(total[0], args["dim"], rank, len(local)) for rank in range(len(local))]


def _take_own(local: Values, args: dict[str, Any]) -> Values:
    return [_block(x, args["dim"], rank, len(local)) for rank, x in enumerate(local)]


def _block(x: torch.Tensor, dim: int, rank: int, ranks: int) -> torch.Tensor:
    """Block ``rank`` of equal ones. Padding is NaN here, so that whoever looks at it is found out."""
    length = -(-x.shape[dim] // ranks)
    start = min(rank * length, x.shape[dim])
    own = x.narrow(dim, start, min(length, x.shape[dim] - start))
    shape = list(x.shape)
    shape[dim] = length - own.shape[dim]
    return torch.cat([own, x.new_full(shape, math.nan if x.is_floating_point() else 0)], dim)


COLLECTIVE: dict[torch._ops.OpOverload, Callable[[Values, dict[str, Any]], Values]] = {
    ops.all_reduce: _all_reduce,
    ops.all_gather: _all_gather,
    ops.reduce_scatter: _reduce_scatter,
    ops.take_own: _take_own,
}
