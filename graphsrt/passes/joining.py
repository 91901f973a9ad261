"""One call in the place of several: what fusions that are no local pattern share."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.fx as fx

from graphsrt.program import NearMiss, Program, target_name


def join(
    program: Program,
    target: torch._ops.OpOverload,
    values: dict[str, Any],
    *,
    results: Sequence[fx.Node | None],
    covered: Iterable[fx.Node],
    before: fx.Node,
    made_by: str,
) -> fx.Node:
    """Call ``target`` with the ``values`` that its schema names, just before a node; returns its first result.

    A keyword that is not among the values has its default.
    ``results``: for each result of the call the value of before that it takes the place and the name of, None if
    nobody reads it. ``covered``: the operators that go, which nobody but one another and the results' users may read.
    """
    going = list(dict.fromkeys([*(value for value in results if value is not None), *covered]))
    arguments = target._schema.arguments
    positional = [values[a.name] for a in arguments if not a.kwarg_only]
    keywords = {a.name: values[a.name] for a in arguments if a.kwarg_only and a.name in values}
    like = before
    path = ".".join(part for part in (like.meta.get("module"), target_name(target).split(".")[1]) if part)
    fused = program.call(target, *positional, name=path, before=before, like=like, **keywords)
    made = [maker for node in going for maker in node.meta.get("made_by", ()) if maker != made_by]
    fused.meta |= {"made_by": (*dict.fromkeys(made), made_by), "origin": tuple(going)}
    program.infer([fused])
    places = [value.meta.get("placement") if value is not None else None for value in results]
    known = next((place for place in places if place is not None), None)
    if known is not None:  # a result that nobody reads is placed as the others are
        whole = tuple(place if place is not None else known for place in places)
        fused.meta["placement"] = whole if len(whole) > 1 else whole[0]
    renamed: list[tuple[fx.Node, str]] = []
    for index, value in enumerate(results):
        if value is None:
            continue
        new = fused
        if len(results) > 1:
            new = program.call(operator.getitem, fused, index, name="item", before=before, like=value)
            new.meta["made_by"] = (*value.meta.get("made_by", ()), made_by)
            program.infer([new])
            if known is not None:
                new.meta["placement"] = fused.meta["placement"][index]
        value.replace_all_uses_with(new, propagate_meta=False)
        renamed.append((new, value.name))
    _erase(program, going)
    for new, name in renamed:
        program.rename(new, name)
    return renamed[0][0]


def _erase(program: Program, nodes: Iterable[fx.Node]) -> None:
    left = dict.fromkeys(nodes)
    while left:
        free = [node for node in left if not node.users]
        assert free, f"{', '.join(node.name for node in left)}: used elsewhere"
        for node in free:
            program.graph.erase_node(node)
            del left[node]
    program.forget_names()


def miss(node: fx.Node, reason: str) -> NearMiss:
    """A near miss at a node."""
    return NearMiss(node.name, node.meta.get("module", ""), reason)


def fuse_each(
    places: Iterable[fx.Node],
    fuse: Callable[[fx.Node], fx.Node | str],
    limit: int | None,
    near_misses: list[NearMiss] | None,
    sites: list[fx.Node] | None,
) -> int:
    """Fuse at each place, or at the first ``limit``; ``fuse`` gives what it made, or the reason why it made nothing."""
    fired = 0
    for place in places:
        if limit is not None and fired >= limit:
            break
        made = fuse(place)
        if isinstance(made, str):
            if near_misses is not None:
                near_misses.append(miss(place, made))
            continue
        fired += 1
        if sites is not None:
            sites.append(made)
    return fired
