"""Random single mutations of sharded programs, and whether what a program's placements say of it is true.

:func:`untrue` knows no rule: it runs all ranks, puts every value together by its placement, runs each operator on the
values put together as if there were one rank, and compares. A program in which every operator passes is the program of
one rank, whatever that computes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.fx as fx

from graphsrt import ops
from graphsrt.placement import Layout, Run, Shard, ShardTokens
from graphsrt.program import Program, arguments, aten, map_arguments
from graphsrt.recipes import Ckpt, OnOwner, Recipe, ShardOf, Take, Transpose
from graphsrt.simulate import Values, simulate
from graphsrt.testing import whole

_SIZED = {aten.view.default: "size", aten.reshape.default: "shape", aten.expand.default: "size"}
_TOLERANCE = 1e-9
"""Float64 sums in another order: some 1e-15 times a few hundred terms; a wrong term is far above."""

Mutation = Callable[[Program, random.Random], "str | None"]


def mutate(program: Program, rng: random.Random) -> str:
    """Change one thing in ``program`` and say what; it may no longer be a program."""
    while True:
        told = rng.choice(MUTATIONS)(program, rng)
        if told is not None:
            return told


def _calls(program: Program) -> list[fx.Node]:
    return [node for node in program.nodes if node.op == "call_function"]


def _delete(program: Program, rng: random.Random) -> str | None:
    """Users of a node get one of its arguments instead."""
    node = rng.choice(_calls(program))
    instead = [a for a in node.all_input_nodes if _like(a, node)] or node.all_input_nodes
    if not instead or not node.users:
        return None
    argument = rng.choice(instead)
    node.replace_all_uses_with(argument, propagate_meta=False)
    return f"delete {node.name}, its users get {argument.name}"


def _duplicate(program: Program, rng: random.Random) -> str | None:
    """An operator is applied once more to its own result."""
    node = rng.choice(_calls(program))
    first = next((a for a in node.all_input_nodes if _like(a, node)), None)
    if first is None or not node.users:
        return None
    args, kwargs = map_arguments(node, lambda a: node if a is first else a)
    users = list(node.users)
    again = program.call(node.target, *args, name=f"{node.name}.again", before=node.next, like=node, **kwargs)
    for user in users:
        user.replace_input_with(node, again)
    return f"apply {node.name} twice"


def _swap(program: Program, rng: random.Random) -> str | None:
    """Two arguments of one node trade places."""
    node = rng.choice([n for n in _calls(program) if len(n.all_input_nodes) > 1] or _calls(program))
    if len(node.all_input_nodes) < 2:
        return None
    a, b = rng.sample(node.all_input_nodes, 2)
    node.args, node.kwargs = map_arguments(node, lambda x: b if x is a else a if x is b else x)
    return f"swap {a.name} and {b.name} in {node.name}"


def _rewire(program: Program, rng: random.Random) -> str | None:
    """An argument becomes another value of the same type that is known by then."""
    node = rng.choice(_calls(program))
    old = rng.choice(node.all_input_nodes)
    known = []
    for other in program.graph.nodes:
        if other is node:
            break
        if other is not old and _like(other, old):
            known.append(other)
    if not known:
        return None
    new = rng.choice(known)
    node.replace_input_with(old, new)
    return f"{node.name} reads {new.name}, not {old.name}"


def _attribute(program: Program, rng: random.Random) -> str | None:
    """A number, word or dimension changes."""
    node = rng.choice(_calls(program))
    places: list[tuple[str, Any, Any]] = [("args", i, a) for i, a in enumerate(node.args)]
    places += [("kwargs", k, v) for k, v in node.kwargs.items()]
    places = [p for p in places if isinstance(p[2], (int, float, str)) or _ints(p[2])]
    if not places:
        return None
    kind, key, value = rng.choice(places)
    new = _other(value, rng)
    if kind == "args":
        node.update_arg(key, new)
    else:
        node.update_kwarg(key, new)
    return f"{node.name}: {key} is {new!r}, not {value!r}"


def _move_collective(program: Program, rng: random.Random) -> str | None:
    """A collective is taken after the operator that uses it, or before the one that it follows."""
    found = [n for n in _calls(program) if n.target in ops.COLLECTIVES]
    if not found:
        return None
    node = rng.choice(found)
    x = arguments(node)["x"]
    if rng.random() < 0.5:
        user = rng.choice(list(node.users))
        if user.op == "output":
            return None
        user.replace_input_with(node, x)
        users = list(user.users)
        moved = program.call(node.target, user, name=f"{node.name}.later", before=user.next, like=node, **_rest(node))
        for other in users:
            other.replace_input_with(user, moved)
        return f"{node.name} after {user.name}"
    if x.op != "call_function" or not x.all_input_nodes:
        return None
    argument = rng.choice(x.all_input_nodes)
    moved = program.call(node.target, argument, name=f"{node.name}.earlier", before=x, like=node, **_rest(node))
    x.replace_input_with(argument, moved)
    node.replace_all_uses_with(x, propagate_meta=False)
    return f"{node.name} before {x.name}"


def _collective(program: Program, rng: random.Random) -> str | None:
    """A collective appears, or becomes another."""
    node = rng.choice(_calls(program))
    size = program.mesh["tp"]
    kind = rng.choice([ops.all_reduce, ops.all_gather, ops.take_own, ops.reduce_scatter])
    rest: dict[str, Any] = {"axis": "tp"}
    if kind is not ops.all_reduce:
        rest |= {"dim": rng.randrange(node.meta["val"].dim()), "size": size}
    if node.target in ops.COLLECTIVES:
        node.target, node.args, node.kwargs = kind, (arguments(node)["x"],), rest
        return f"{node.name} becomes {kind}"
    users = list(node.users)
    new = program.call(kind, node, name=f"{node.name}.collective", before=node.next, like=node, **rest)
    for user in users:
        user.replace_input_with(node, new)
    return f"{kind} of {node.name}"


def _recipe(program: Program, rng: random.Random) -> str | None:
    """A weight is read in another way."""
    name = rng.choice([n for n, w in program.weights.items() if isinstance(w.recipe, (ShardOf, OnOwner, Ckpt))])
    weight = program.weights[name]
    new = _other_recipe(weight.recipe, len(weight.shape), program, rng)
    if new is None or new == weight.recipe:
        return None
    program.weights[name] = replace(weight, recipe=new)
    return f"{name} = {new}, not {weight.recipe}"


MUTATIONS: list[Mutation] = [
    _delete, _duplicate, _swap, _rewire, _attribute, _move_collective, _collective, _recipe, _recipe,
]  # fmt: skip


def _like(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta.get("val"), b.meta.get("val")
    same = isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
    return same and x.dtype == y.dtype and [str(s) for s in x.shape] == [str(s) for s in y.shape]


def _ints(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(v, int) for v in value)


def _other(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + rng.choice([-1, 1, 2])
    if isinstance(value, float):
        return value * rng.choice([0.5, 3.0]) if value else 1.0
    if isinstance(value, str):
        return {"sum": "max", "tp": "other", "before_weight": "after_weight"}.get(value, value + "_")
    items = list(value)
    i, j = rng.randrange(len(items)), rng.randrange(len(items))
    items[i], items[j] = items[j], items[i]
    if items == list(value):
        items[i] += 1
    return items


def _rest(node: fx.Node) -> dict[str, Any]:
    return {k: v for k, v in arguments(node).items() if k != "x"}


def _other_recipe(recipe: Recipe, ndim: int, program: Program, rng: random.Random) -> Recipe | None:
    match recipe:
        case Ckpt(name):
            others = [n for n in _leaves(program) if n != name]
            return rng.choice([OnOwner(recipe), Ckpt(rng.choice(others)), Transpose(recipe, 0, ndim - 1)])
        case OnOwner(x):
            return x
        case ShardOf(x, dim, layout, unowned):
            return rng.choice(
                [
                    x,
                    ShardOf(x, (dim + 1) % ndim, layout, unowned),
                    ShardOf(x, dim, layout, "zero" if unowned == "copy" else "copy"),
                    ShardOf(x, dim, _other_layout(layout, rng), unowned),
                    ShardOf(x, dim, _other_layout(layout, rng), unowned),
                    ShardOf(Take(x, dim, (f"0:{layout.size}",)), dim, layout, unowned),
                ]
            )
    return None


def _leaves(program: Program) -> list[str]:
    from graphsrt.recipes import leaves

    return sorted({leaf for weight in program.weights.values() for leaf in leaves(weight.recipe)})


def _other_layout(layout: Layout, rng: random.Random) -> Layout:
    """As many elements a rank, but others: ranks trade parts, units change places, owners change."""
    runs = [list(rank) for rank in layout.runs]
    kind = rng.randrange(4)
    if kind == 0:
        rng.shuffle(runs)
    elif kind == 1:  # every rank's order changes
        half = layout.local_size // 2
        runs = [[*_cut(rank, half, layout.local_size), *_cut(rank, 0, half)] for rank in runs]
    elif kind == 2:  # two ranks trade one position
        a, b = rng.sample(range(len(runs)), 2)
        one, other = _cut(runs[a], 0, 1), _cut(runs[b], 0, 1)
        rest = [_cut(runs[r], 1, layout.local_size) for r in (a, b)]
        runs[a], runs[b] = [*other, *rest[0]], [*one, *rest[1]]
    else:  # what one rank holds becomes a copy, and a copy the owner
        a = rng.randrange(len(runs))
        runs[a] = [run._replace(owned=not run.owned) for run in runs[a]]
    return Layout(tuple(tuple(rank) for rank in runs))


def _cut(runs: list[Run], start: int, end: int) -> list[Run]:
    out, position = [], 0
    for run in runs:
        low, high = max(position, start), min(position + run.length, end)
        if low < high:
            out.append(Run(run.start + low - position, high - low, run.owned))
        position += run.length
    return out


# -- truth ------------------------------------------------------------------------------------------------------------


def untrue(program: Program, inputs: dict[str, torch.Tensor], weights: dict[str, Values]) -> str | None:
    """The first value that is not what its operator gives of its arguments, all put together; None if there is none."""
    seen: dict[fx.Node, Values] = {}
    simulate(program, inputs, weights, watch=lambda node, values: seen.__setitem__(node, values))
    put = partial(whole, tokens=len(inputs["positions"]))
    for node, values in seen.items():
        told = _untrue(program, node, seen, values, put)
        if told is not None:
            return f"{node.name}: {told}"
    return None


Put = Callable[..., torch.Tensor]


def _untrue(program: Program, node: fx.Node, seen: dict[fx.Node, Values], values: Values, put: Put) -> str | None:
    place = node.meta.get("placement")
    if _is_start(program, node):
        return None  # each rank its own
    if isinstance(values[0], tuple):
        if isinstance(place, tuple) and all(str(p) == "R" for p in place):
            same = all(torch.equal(a, b) for other in values for a, b in zip(values[0], other))
            return None if same else "ranks hold different values"
        return "a tuple that is not whole"
    try:
        got = put(values, place)
    except (AssertionError, RuntimeError) as error:
        return str(error)
    if isinstance(place, Shard):
        told = _untrue_copies(program, node, got, values, place)
        if told is not None:
            return told
    if node.op != "call_function" or node.target is aten.slice.Tensor:
        return None  # slices: of gathered logits, checked with the result
    if node.target in ops.COLLECTIVES:
        x = arguments(node)["x"]
        if node.target is ops.all_gather and not isinstance(x.meta["placement"], ShardTokens):
            return None  # in gathered order; checked with the result
        return _differs(put(seen[x], x.meta["placement"]), got)
    return _differs(_one_rank(program, node, seen, place, put), got)


def _untrue_copies(program: Program, node: fx.Node, got: torch.Tensor, values: Values, place: Shard) -> str | None:
    """Copies must be copies; zeros in their place are right in weights that are contracted."""
    recipe = program.weights[str(node.target)].recipe if node.op == "get_attr" else None
    zeros = isinstance(recipe, ShardOf) and recipe.unowned == "zero"
    for rank, value in enumerate(values):
        position = 0
        for run in place.layout.runs[rank]:
            mine = value.narrow(place.dim, position, run.length)
            want = got.narrow(place.dim, run.start, run.length)
            want = torch.zeros_like(want) if zeros and not run.owned else want
            if _differs(want, mine) is not None:
                return f"rank {rank} holds something else at {run}"
            position += run.length
    return None


def _one_rank(program: Program, node: fx.Node, seen: dict[fx.Node, Values], place: Any, put: Put) -> torch.Tensor:
    def put_together(argument: fx.Node) -> Any:
        if _is_start(program, argument):
            return None
        values = seen[argument]
        return values[0] if isinstance(values[0], tuple) else put(values, argument.meta["placement"])

    values = {argument: put_together(argument) for argument in node.all_input_nodes}
    if node.target is ops.vocab_embedding:
        tokens, table, _ = (values[a] for a in node.args)  # type: ignore[index]
        assert tokens is not None and table is not None
        return torch.nn.functional.embedding(tokens, table)
    args, kwargs = map_arguments(node, lambda a: values[a])
    size = _SIZED.get(node.target)
    if size is not None and isinstance(place, Shard) and args[1][place.dim] != -1:
        sizes = list(args[1])
        sizes[place.dim] = place.layout.size
        args = (args[0], sizes, *args[2:])
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _is_start(program: Program, node: fx.Node) -> bool:
    return node.op == "get_attr" and type(program.weights[str(node.target)].recipe).__name__ == "ShardStart"


def _differs(wanted: torch.Tensor, got: torch.Tensor) -> str | None:
    if wanted.shape != got.shape:
        return f"shape {list(got.shape)}, expected {list(wanted.shape)}"
    if not wanted.is_floating_point():
        return None if torch.equal(wanted, got) else "other integers"
    both = torch.isnan(wanted) & torch.isnan(got)
    scale = float(wanted[~both].abs().max()) if bool((~both).any()) else 1.0
    error = (wanted - got).abs()[~both]
    if len(error) and not float(error.max()) <= _TOLERANCE * max(scale, 1e-300):
        return f"differs by {float(error.max()):.3g} of {scale:.3g}"
    return None
