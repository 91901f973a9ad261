"""explain: every place where a pass fired or nearly did, and where a value comes from.

    graphsrt explain MODEL fuse_silu_mul            the sites of a pass, and its nearest misses, in words
    graphsrt explain MODEL layers.3.mlp.silu_mul    the value's history: passes, rules, and the model's own lines

Sites of identical layers are one line, ``layers.0–29.mlp.silu_mul``. A pass that fired nowhere is asked again on
relaxed terms (``Rewrite.nearest``), so that there is an answer even where not half of its pattern is there.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from graphsrt.errors import explain as explained
from graphsrt.passes import PIPELINE, quantize_weights
from graphsrt.passes.plugins import with_installed
from graphsrt.passes.rewriter import Rewrite, rule_of
from graphsrt.passes.runner import Pass, Stages, bind, pass_name, run, select
from graphsrt.printer import call_text, recipe_text, type_text
from graphsrt.program import NearMiss, PassReport, Program, Site

_LAYER = re.compile(r"(?<![\w])((?:\w+\.)*?\w*layers?|\w*blocks?|\w*h)\.(\d+)(?=\.|\b)")
_SHOWN = 6
"""So many origins of a value, or nearest misses on relaxed terms, are shown at most."""


@dataclass(frozen=True)
class _Place:
    """A line of the report: a node, where it is, and what there is to say of it."""

    node: str
    module: str
    source: str
    words: str


def explain_model(
    model: Any,
    name: str,
    *,
    tp: int = 1,
    passes: Sequence[Pass] | None = None,
    without: Iterable[str] = (),
    every: bool = False,
    quantize: str | None = None,
    **options: Any,
) -> str:
    """What ``graphsrt explain`` prints: of a pass by that name, else of a value of the final program."""
    from graphsrt.api import trace

    pipeline = bind(with_installed(PIPELINE) if passes is None else passes, quantize_weights, to=quantize)
    names = [pass_name(function) for function in pipeline]
    if name in names:
        return explain_pass(model, name, tp=tp, passes=pipeline, without=without, every=every, **options)
    stages = trace(model, tp=tp, passes=pipeline, without=without, **options).stages
    values = [node.name for node in stages.final.graph.nodes if node.op != "output"]
    if name not in values:
        raise ValueError(unknown_name(name, names, values))
    return explain_node(stages, name, rules=pipeline)


def explain_pass(
    model: Any,
    name: str,
    *,
    tp: int = 1,
    passes: Sequence[Pass] | None = None,
    without: Iterable[str] = (),
    every: bool = False,
    **options: Any,
) -> str:
    """What the pass called ``name`` did on a model, as text: sites, nearest misses, and counts.

    ``every``: identical layers one by one. Other options are those of ``graphsrt.trace``. ValueError for a name that no
    pass bears; CompileError if an earlier pass fails, or this one for another reason than firing nowhere.
    """
    from graphsrt.api import trace

    pipeline = with_installed(PIPELINE) if passes is None else list(passes)
    chosen = select(pipeline, without=[w for w in without if w != name], stop_after=name)
    function = chosen[-1]
    before = trace(model, tp=tp, passes=chosen[:-1], **options).stages.final
    return pass_text(before, function, every=every)


def pass_text(before: Program, function: Pass, *, every: bool = False) -> str:
    """What a pass does to a program, as text; the program is left alone."""
    name = pass_name(function)
    after = run(before.copy(), [function], may_miss={name}).final
    report = after.history[-1]
    lines = [f"{name}   {rule_of(function)}", *(f"    {line}" for line in _about(function)), ""]
    if report.sites:
        lines += ["fired", *_listed([_fired(after, site) for site in report.sites], every), ""]
    misses = report.near_misses
    if misses:
        lines += ["nearly", *_listed([_missed(before, after, miss) for miss in misses], every), ""]
    elif not report.fired:
        nearest = _nearest(before, function)
        if nearest:
            lines += ["closest to the pattern", *_listed([_missed(before, after, m) for m in nearest], every), ""]
        else:
            absent = function.absent(before) if isinstance(function, Rewrite) else []
            why = f": it has no {' and no '.join(absent)}" if absent else ""
            lines += [f"nothing in this program resembles what it looks for{why}", ""]
    return "\n".join([*lines, *report.notes, _counts(report)])


def _about(function: Pass) -> list[str]:
    """The first paragraphs of the docstring of the pass's file: what it does, before → after."""
    while hasattr(function, "func"):
        function = function.func
    module = inspect.getmodule(function.spellings[0].function if isinstance(function, Rewrite) else function)
    text = inspect.getdoc(module) if module is not None and module.__name__.startswith("graphsrt.passes") else None
    text = text or function.__doc__ or ""
    parts = inspect.cleandoc(text).split("\n\n")
    shown = parts[:2] if len(parts) > 1 and ("→" in parts[1] or parts[1].startswith(" ")) else parts[:1]
    return [line for part in shown for line in part.splitlines()]


def _fired(program: Program, site: Site) -> _Place:
    origins = list(site.from_nodes)
    more = f" and {len(origins) - _SHOWN} more" if len(origins) > _SHOWN else ""
    words = f"from {', '.join(origins[:_SHOWN])}{more}" if origins else ""
    return _Place(site.node, site.module, site.source, words)


def _missed(before: Program, after: Program, miss: NearMiss) -> _Place:
    for program in (before, after):
        for node in program.graph.nodes:
            if node.name == miss.node:
                return _Place(miss.node, miss.module, node.meta.get("source", ""), miss.reason)
    return _Place(miss.node, miss.module, "", miss.reason)


def _nearest(before: Program, function: Pass) -> list[NearMiss]:
    """The best partial matches on relaxed terms, of a rewrite; other passes say themselves what they nearly did."""
    while hasattr(function, "func"):
        function = function.func
    if not isinstance(function, Rewrite):
        return []
    found = function.nearest(before.copy())
    best: dict[tuple[str, str], list[NearMiss]] = {}
    for miss in found:
        best.setdefault((_relative(miss.node, None), _relative(miss.reason, None)), []).append(miss)
    return [miss for group in list(best.values())[:_SHOWN] for miss in group]


def _counts(report: PassReport) -> str:
    if report.expected is None:
        return f"{report.fired} fired, no expectation, {len(report.near_misses)} nearly"
    missed = max(report.expected - report.fired, 0)
    return f"{report.fired} fired, {report.expected} expected, {missed} missed"


# -- folding ----------------------------------------------------------------------------------------------------------


def _listed(places: list[_Place], every: bool) -> list[str]:
    """One line for each place, or for each set of places that differ in nothing but the layer."""
    groups: dict[Any, list[_Place]] = {}
    for index, place in enumerate(places):
        own = _layer(place.node)
        texts = [_relative(text, own) for text in (place.node, place.module, place.source, place.words)]
        groups.setdefault(index if every or own is None else tuple(texts), []).append(place)
    rows = []
    for group in groups.values():
        layers = [layer for layer in (_layer(place.node) for place in group) if layer is not None]
        span = _spans(layers) if len(group) > 1 else None
        first = group[0]
        rows.append([_spanned(first.node, span), _at(_spanned(first.module, span), first), _spanned_words(first, span)])
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return ["  " + "  ".join([row[0].ljust(widths[0]), row[1].ljust(widths[1]), row[2]]).rstrip() for row in rows]


def _at(module: str, place: _Place) -> str:
    inside = "" if place.module == place.node or not place.module else f"in {module}"
    return ", ".join(part for part in (place.source, inside) if part)


def _layer(name: str) -> int | None:
    found = _LAYER.search(name)
    return int(found.group(2)) if found else None


def _relative(text: str, own: int | None) -> str:
    """Layer numbers counted from a layer, or (None) left out."""
    return _LAYER.sub(lambda m: f"{m[1]}.<{'' if own is None else format(int(m[2]) - own, '+d')}>", text)


def _spanned(text: str, span: str | None) -> str:
    return text if span is None else _LAYER.sub(lambda m: f"{m[1]}.{span}", text, count=1)


def _spanned_words(place: _Place, span: str | None) -> str:
    """What is said of the first of several layers, its number written ``N`` and its neighbours' ``N-1``, ``N+1``."""
    own = _layer(place.node)
    if span is None or own is None:
        return place.words
    return _LAYER.sub(lambda m: f"{m[1]}.N" + (f"{int(m[2]) - own:+d}" if int(m[2]) != own else ""), place.words)


def _spans(layers: Sequence[int]) -> str:
    """``0–29``, ``0,2,4`` or ``0–3,5``."""
    parts: list[list[int]] = []
    for layer in sorted(set(layers)):
        if parts and layer == parts[-1][-1] + 1:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    return ",".join(f"{p[0]}–{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


# -- one value --------------------------------------------------------------------------------------------------------


def explain_node(stages: Stages, name: str, *, rules: Sequence[Pass] = ()) -> str:
    """Where a value or weight of the final program comes from, stage by stage back to the model's own lines.

    ValueError, with the closest names, if the final program has no such value.
    """
    final = stages.final
    nodes = {node.name: node for node in final.graph.nodes if node.op != "output"}
    if name not in nodes:
        raise ValueError(unknown_name(name, [], list(nodes)))
    written = {pass_name(function): rule_of(function) for function in rules}
    node = nodes[name]
    lines = [name, f"    {_line(final, node)}"]
    lines += [f"    weight {_weight_line(final, used)}" for used in node.all_input_nodes if used.op == "get_attr"]
    if meaning := _meaning(node):
        lines.append(f"    {meaning}")
    place = ", in ".join(part for part in (node.meta.get("source"), node.meta.get("module")) if part)
    if place:
        lines.append(f"    the model's {place}")
    lines.append("")
    return "\n".join([*lines, *_history(stages, name, written)])


def unknown_name(name: str, passes: Iterable[str], values: Iterable[str]) -> str:
    """The message for a word that is neither a pass nor a value."""
    passes, values = list(passes), list(values)
    close = difflib.get_close_matches(name, [*passes, *values], n=4, cutoff=0.5)
    close += [v for v in values if v.endswith(f".{name}") and v not in close][:4]
    what = f"no pass and no value is called {name!r}" if passes else f"the program has no value {name!r}"
    expected = f"a pass ({', '.join(passes)}), or a value of the final program" if passes else None
    return explained(what, expected=expected, hint=f"did you mean {' or '.join(close)}?" if close else None)


def _history(stages: Stages, name: str, rules: dict[str, str]) -> list[str]:
    """Backwards through the stages: at each, what the values followed so far were made from or changed into."""
    lines: list[str] = []
    following = [name]
    for index in range(len(stages.programs) - 1, 0, -1):
        stage, after = stages.programs[index]
        before = stages.programs[index - 1][1]
        if before.graph is after.graph:  # it changed nothing; what its program remembers is of an earlier stage
            continue
        old = {node.name: node for node in before.graph.nodes}
        new = {node.name: node for node in after.graph.nodes}
        told: list[str] = []
        kept: list[str] = []
        rule = rules.get(stage, "")
        earlier: dict[str, None] = {}
        for value in following:
            node = new[value]
            origins = [origin for origin in node.meta.get("from_nodes", ()) if origin in old]
            if origins:
                made = stage in node.meta.get("made_by", ())
                rule = node.meta.get("rule", rule) if made else rule
                told.append(f"    {value} {'was made from' if made else 'was'}")
                shown = origins if len(origins) <= _SHOWN else origins[: _SHOWN - 1]
                told += [f"        {_line(before, old[origin])}{_source(old[origin])}" for origin in shown]
                if len(origins) > len(shown):
                    told.append(f"        and {len(origins) - len(shown)} more")
                earlier |= dict.fromkeys(origins)
            elif value in old:
                kept += _changes(before, old[value], after, node)
                earlier[value] = None
            else:
                told.append(f"    {value} is new")
        told += kept if len(kept) <= _SHOWN else [*kept[:3], f"    and {len(kept) - 3} more lines like these"]
        if told:
            lines += [f"{stage}   {rule}".rstrip(), *told]
        following = list(earlier)
    captured = stages.programs[0][1]
    nodes = {node.name: node for node in captured.graph.nodes}
    lines.append("captured")
    found = [nodes[value] for value in nodes if value in set(following)]
    shown_nodes = found if len(found) <= 2 * _SHOWN else found[-2 * _SHOWN :]
    if len(found) > len(shown_nodes):
        lines.append(f"    {len(found) - len(shown_nodes)} operators before")
    lines += [f"    {_line(captured, node)}{_source(node)}" for node in shown_nodes]
    return lines


def _changes(before: Program, old: fx.Node, after: Program, new: fx.Node) -> list[str]:
    """What a pass changed of a value that it kept: its type, its operator, its weights' recipes."""
    lines = []
    one, other = _type(before, old), _type(after, new)
    if one != other:
        lines.append(f"    {new.name}: {one} became {other}")
    if old.op == "call_function":
        one, other = call_text(old, short=True), call_text(new, short=True)
        if old.target is not new.target or old.kwargs.keys() != new.kwargs.keys():
            lines.append(f"    {new.name} = {one} became {other}")
        recipes = {u.name: _weight_line(before, u) for u in old.all_input_nodes if u.op == "get_attr"}
        for used in new.all_input_nodes:
            if used.op == "get_attr" and recipes.get(used.name) not in (None, _weight_line(after, used)):
                lines.append(f"    weight {_weight_line(after, used)}")
    return lines


def _line(program: Program, node: fx.Node) -> str:
    if node.op == "placeholder":
        return f"{node.name}: {_type(program, node)} = input"
    if node.op == "get_attr":
        return _weight_line(program, node)
    return f"{node.name}: {_type(program, node)} = {call_text(node, short=True)}"


def _weight_line(program: Program, node: fx.Node) -> str:
    return f"{node.name}: {_type(program, node)} = {recipe_text(program.weights[str(node.target)].recipe, short=True)}"


def _type(program: Program, node: fx.Node) -> str:
    return type_text(program.shapes, node.meta.get("val"), node.meta.get("placement"), short=True)


def _source(node: fx.Node) -> str:
    return f"   {node.meta['source']}" if node.meta.get("source") else ""


def _meaning(node: fx.Node) -> str:
    """The first line of the operator's plain definition, if it is one of ours."""
    from graphsrt import ops

    reference: Callable | None = ops.REFERENCE.get(node.target) if node.op == "call_function" else None  # type: ignore[call-overload]
    return inspect.getdoc(reference).splitlines()[0] if reference and inspect.getdoc(reference) else ""  # type: ignore[union-attr]


__all__ = ["explain_model", "explain_node", "explain_pass", "pass_text", "unknown_name"]
