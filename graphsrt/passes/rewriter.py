"""Local rewrites: a pattern in plain torch, a replacement, and a condition that says yes or why not.

    @rewrite(shapes={"gate": ("T", "F"), "up": ("T", "F")})
    def fuse_silu_mul(gate, up):
        return F.silu(gate) * up

    @fuse_silu_mul.becomes
    def _(gate, up):
        return ops.glu(gate, up, act="silu")

    @fuse_silu_mul.where
    def _(gate, up):
        if gate.shape != up.shape:
            return f"gate {gate.shape} and up {up.shape} differ"

Positional parameters of a pattern stand for any value, keyword-only parameters for any number (``eps``). The pattern is
traced once per dtype and normalized like a captured model, so no-op casts never decide whether it matches. Additions
and multiplications match in either order. A value inside the pattern that something else uses too is no match.

Source of the idea: onnxscript's and torch.fx's pattern rewriters; a failed match is a value with a reason.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx

from graphsrt.errors import CompileError
from graphsrt.passes.behaviour import disagreement
from graphsrt.passes.normalize import normalize
from graphsrt.program import Input, NearMiss, Program, Weight, arguments, aten, map_arguments, target_name

_ROOT = Path(__file__).parents[2]
_COMMUTATIVE = {aten.add.Tensor, aten.mul.Tensor}
_SIZES = {"T": 5, "B": 3, "E": 34, "F": 46, "D": 38, "N": 58}
"""Sizes that patterns are traced with: distinct, even and unlikely as literals of a pattern."""


@dataclass(frozen=True)
class Matched:
    """What a condition sees of a value that a pattern's parameter stands for."""

    program: Program
    node: fx.Node

    @property
    def shape(self) -> tuple[int | str, ...]:
        """This rank's shape, symbols by name."""
        return self.program.shape(self.node)

    @property
    def dtype(self) -> torch.dtype:
        return self.node.meta["val"].dtype

    @property
    def weight(self) -> Weight | None:
        """The weight, if the value is one."""
        return self.program.weight_of(self.node)


@dataclass
class Match:
    """One place where a pattern matched: parameter values, literals, and the nodes that it covers."""

    values: dict[str, fx.Node]
    literals: dict[str, Any]
    covered: dict[fx.Node, fx.Node] = field(default_factory=dict)  # pattern node -> program node


@dataclass
class _Failure:
    """How far an attempt came, and why no further."""

    matched: int = 0
    node: fx.Node | None = None
    reason: str = ""


@dataclass(frozen=True)
class _Spelling:
    """One pattern function, with what the replacement is told when it is this one that matched."""

    function: Callable
    attributes: dict[str, Any]


@dataclass(frozen=True)
class _Pattern:
    graph: fx.Graph
    outputs: tuple[fx.Node, ...]
    size: int
    attributes: dict[str, Any]
    function: Callable


class Rewrite:
    """A pass made of patterns and a replacement; call it with a program."""

    def __init__(self, pattern: Callable, *, shapes: dict[str, tuple], attributes: dict[str, Any], named: str,
                 confirm: bool, expect: Callable[[Program], int] | None, numerics: str, required: bool,
                 before: str | None = None, after: str | None = None):  # fmt: skip
        self.__name__ = pattern.__name__
        self.__doc__ = inspect.getdoc(inspect.getmodule(pattern)) if pattern.__doc__ is None else pattern.__doc__
        self.__module__ = pattern.__module__
        self.spellings = [_Spelling(pattern, attributes)]
        self.shapes = shapes
        self.named = named
        self.confirm = confirm
        self.expect = expect
        self.numerics = numerics
        self.required = required
        self.before = before
        self.after = after
        self.replacement: Callable = _no_replacement
        self.condition: Callable | None = None
        self.words: tuple[tuple[Any, ...], Callable[[Matched], str | None]] = ((), lambda _: None)

    def becomes(self, replacement: Callable) -> Callable:
        """Decorator: the replacement, with the pattern's parameters."""
        self.replacement = replacement
        return replacement

    def where(self, condition: Callable) -> Callable:
        """Decorator: the condition; returns None for yes, or the reason for no."""
        self.condition = condition
        return condition

    def otherwise(self, *targets: Any) -> Callable[[Callable], Callable]:
        """Decorator: why an operator of these kinds is left as it is, where no near miss says it (None: no reason is
        due). The function gets the operator's value."""

        def keep(words: Callable[[Matched], str | None]) -> Callable:
            self.words = (targets, words)
            return words

        return keep

    def also(self, **attributes: Any) -> Callable[[Callable], Callable]:
        """Decorator: one more spelling with the same parameters; ``attributes`` go to the replacement."""

        def add(pattern: Callable) -> Callable:
            self.spellings.append(_Spelling(pattern, attributes))
            return pattern

        return add

    def __call__(
        self,
        program: Program,
        *,
        limit: int | None = None,
        near_misses: list[NearMiss] | None = None,
        sites: list[fx.Node] | None = None,
    ) -> int:
        """Rewrite everywhere, first to last, at most ``limit`` times.

        Near misses are appended to the list given, and so is the first result of every rewrite made (``sites``).
        """
        fired = 0
        told: set[str] = set()
        patterns = self._patterns(program)
        anchors: set[Any] = {p.outputs[0].target for p in patterns}
        for anchor in program.calls(*anchors):
            if limit is not None and fired >= limit:
                break
            if anchor._erased:
                continue
            match, pattern, miss = self._find(program, patterns, anchor)
            if match is not None and pattern is not None:
                made = self._apply(program, pattern, match)
                fired += 1
                if sites is not None:
                    sites.append(made)
            elif miss is not None and near_misses is not None:
                near_misses.append(miss)
                told |= {anchor.name, miss.node}
        if near_misses is not None and limit is None:
            near_misses += self._left(program, told)
        return fired

    def _left(self, program: Program, told: set[str]) -> Iterator[NearMiss]:
        targets, words = self.words
        for node in program.calls(*targets):
            if node.name in told or self.__name__ in node.meta.get("made_by", ()):
                continue
            reason = words(Matched(program, node))
            if reason is not None:
                yield NearMiss(node.name, node.meta.get("module", ""), reason)

    def nearest(self, program: Program) -> list[NearMiss]:
        """Where the pattern comes closest, best first, however far that is from a match; the program is left alone.

        A near miss of :meth:`__call__` covers half of the pattern. This is for asking why there is not even one.
        """
        found: list[tuple[float, NearMiss]] = []
        for pattern in self._patterns(program):
            for anchor in program.calls(pattern.outputs[0].target):  # type: ignore[arg-type]
                failure = _Failure()
                match = _match(pattern, anchor, failure)
                if match is not None:
                    match.literals.update(pattern.attributes)
                    reason = self._refusal(program, pattern, match)
                    failure = _Failure(pattern.size, anchor, reason or "")
                if failure.node is not None and failure.reason:
                    found.append((failure.matched / pattern.size, _miss(failure)))
            found += _partial_matches(program, pattern)
        order = sorted(range(len(found)), key=lambda i: (-found[i][0], i))
        return list(dict.fromkeys(found[i][1] for i in order))

    def absent(self, program: Program) -> list[str]:
        """Operators that the first spelling of the pattern has, and the program nowhere."""
        wanted = {node.target: None for node in self._patterns(program)[0].graph.nodes if node.op == "call_function"}
        there = {node.target for node in program.nodes}
        return [target_name(target) for target in wanted if target not in there]

    def _patterns(self, program: Program) -> list[_Pattern]:
        return [_traced(s.function, program.dtype, self._frozen_shapes, _freeze(s.attributes)) for s in self.spellings]

    @property
    def _frozen_shapes(self) -> tuple:
        return tuple(sorted(self.shapes.items()))

    def _find(
        self, program: Program, patterns: list[_Pattern], anchor: fx.Node
    ) -> tuple[Match | None, _Pattern | None, NearMiss | None]:
        closest, miss = 0.0, None
        for pattern in patterns:
            failure = _Failure()
            match = _match(pattern, anchor, failure)
            if match is not None:
                match.literals.update(pattern.attributes)
                reason = self._refusal(program, pattern, match)
                if reason is None:
                    return match, pattern, None
                failure = _Failure(pattern.size, anchor, reason)
            share = failure.matched / pattern.size
            if share > closest and failure.matched >= max(2, math.ceil(pattern.size / 2)) and failure.node is not None:
                closest = share
                miss = _miss(failure)
        return None, None, miss

    def _refusal(self, program: Program, pattern: _Pattern, match: Match) -> str | None:
        early = _used_too_early([match.covered[out] for out in pattern.outputs], set(match.covered.values()))
        if early is not None:
            return early
        if self.condition is not None:
            views: dict[str, Any] = {name: Matched(program, node) for name, node in match.values.items()}
            offered = {**views, **match.literals, "match": match}
            reason = self.condition(
                **{k: v for k, v in offered.items() if k in inspect.signature(self.condition).parameters}
            )
            if reason is not None:
                return reason
        if self.confirm:
            outputs = [match.covered[out] for out in pattern.outputs]
            return disagreement(program, outputs, match.values, match.literals, self.replacement)
        return None

    def _apply(self, program: Program, pattern: _Pattern, match: Match) -> fx.Node:
        """Put the replacement where the first output is needed, and erase what it covers; returns the first result."""
        outputs = [match.covered[out] for out in pattern.outputs]
        covered = tuple(dict.fromkeys([*outputs, *match.covered.values()]))
        results = self._emit(
            program, match, before=outputs[0], like=outputs[0], origin=covered, rule=rule_of(pattern.function)
        )
        names = [out.name for out in outputs]
        for old, new in zip(outputs, results):
            if "placement" in old.meta:
                new.meta["placement"] = old.meta["placement"]
                source = new.args[0] if new.target is operator.getitem else None
                if isinstance(source, fx.Node):  # one of an operator's several results
                    source.meta["placement"] = tuple(o.meta["placement"] for o in outputs)
            old.replace_all_uses_with(new, propagate_meta=False)
        for node in _users_first(match.covered.values()):
            program.graph.erase_node(node)
        program.forget_names()
        if len(results) == 1 and self.named == "role":
            return results[0]
        for name, new in zip(names, results):
            if len(results) > 1:
                program.rename(new, name)
            else:
                program.rename(new, new.meta.get("module") or name)
        return results[0]

    def _emit(
        self, program: Program, match: Match, *, before: fx.Node, like: fx.Node, origin: tuple[fx.Node, ...], rule: str
    ) -> list[fx.Node]:
        """Run the replacement on recording stand-ins; every operator that it calls becomes a node."""
        this = self.__name__

        class Recorder(fx.Tracer):
            def create_node(self, kind: str, target: Any, args: tuple, kwargs: dict, *_: Any, **__: Any) -> fx.Node:
                if isinstance(target, torch._ops.OpOverloadPacket):
                    target = target.default
                role = target_name(target).split(".")[1] if "." in target_name(target) else "item"
                label = ".".join(part for part in (like.meta.get("module"), role) if part)
                node = program.call(target, *args, name=label, before=before, like=like, **kwargs)
                node.meta |= {"made_by": (*like.meta.get("made_by", ()), this), "origin": origin, "rule": rule}
                program.infer([node])
                return node

        tracer = Recorder()
        tracer.graph = program.graph
        stand_ins = {name: fx.Proxy(node, tracer) for name, node in match.values.items()}
        result = self.replacement(**stand_ins, **match.literals)
        return [item.node for item in (result if isinstance(result, tuple) else (result,))]


def _no_replacement(**_: Any) -> Any:
    raise CompileError("a rewrite has no replacement; define one with @<name>.becomes")


def rule_of(function: Callable) -> str:
    """``file:line`` of a pass or of a spelling of a rewrite, from the folder of the package if it is ours."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, Rewrite):
        function = function.spellings[0].function
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return type(function).__name__
    path = Path(code.co_filename)
    return f"{path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else path.name}:{code.co_firstlineno}"


def _miss(failure: _Failure) -> NearMiss:
    assert failure.node is not None
    return NearMiss(failure.node.name, failure.node.meta.get("module", ""), failure.reason)


def _partial_matches(program: Program, pattern: _Pattern) -> list[tuple[float, NearMiss]]:
    """Places where the first operators of a pattern are there, but not what follows them."""
    found = []
    for inner in pattern.graph.nodes:
        if inner.op != "call_function" or inner is pattern.outputs[0]:
            continue
        wanted = sorted({target_name(user.target) for user in inner.users if user.op == "call_function"})
        for node in program.calls(inner.target):
            match = next(_matches(inner, node, Match({}, {}), _Failure()), None)
            if match is None:
                continue
            users = sorted({target_name(u.target) if u.op == "call_function" else "the result" for u in node.users})
            if set(wanted) <= set(users):
                continue  # the mismatch is further on
            reason = f"expected {' and '.join(wanted)} to follow, found {' and '.join(users) or 'nothing'}"
            found.append((len(match.covered) / pattern.size, NearMiss(node.name, node.meta.get("module", ""), reason)))
    return found


def _freeze(attributes: dict[str, Any]) -> tuple:
    return tuple(sorted(attributes.items()))


def _used_too_early(outputs: list[fx.Node], covered: set[fx.Node]) -> str | None:
    """The replacement stands where the pattern's anchor does; other results must not be needed before."""
    for out in outputs[1:]:
        node = out.next
        while node is not outputs[0] and node.op != "output" and node.op != "root":
            if node in out.users and node not in covered:
                return f"{node.name} uses {out.name} before {outputs[0].name} is computed"
            node = node.next
    return None


def _users_first(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes in an order in which each can be erased: users before producers."""
    left, order = set(nodes), []
    while left:
        free = [node for node in left if not any(user in left for user in node.users)]
        order += free
        left -= set(free)
    return order


@cache
def _traced(pattern: Callable, dtype: torch.dtype, shapes: tuple, attributes: tuple) -> _Pattern:
    """The pattern as a normalized graph; parameters are placeholders, keyword-only ones are :class:`_Literal`."""
    from torch.fx.experimental.proxy_tensor import make_fx

    sizes = dict(shapes)
    parameters = list(inspect.signature(pattern).parameters.values())
    tensors = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    literals = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    strings = {p.name for p in parameters if p.annotation in ("str", str)}
    marks: dict[str, Any] = {n: f"<{n}>" if n in strings else 0.0321 + 0.0117 * i for i, n in enumerate(literals)}
    example = [torch.ones([_SIZES.get(s, s) for s in sizes[name]], dtype=dtype) for name in tensors]

    def closed(*args: torch.Tensor) -> Any:
        return pattern(*args, **marks)

    module = make_fx(closed, tracing_mode="fake", pre_dispatch=True)(*example)  # marks are no real arguments
    program = Program(pattern.__name__)
    values: dict[fx.Node, fx.Node] = {}
    names = iter(tensors)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            name = next(names)
            shape = tuple(_SIZES.get(s, s) for s in sizes[name])
            values[node] = program.add_input(name, Input(shape, dtype, name))
        elif node.op == "call_function":
            args, kwargs = map_arguments(node, lambda a: values[a])
            values[node] = program.call(node.target, *args, name=node.name, **kwargs)
        elif node.op == "output":
            outs = node.args[0] if isinstance(node.args[0], (tuple, list)) else (node.args[0],)
            roots = [values[o] for o in outs]
            program.graph.output(roots[0])
    program.infer()
    extra = [node.name for node in roots[1:]]
    keep = {node.name: node for node in program.nodes}
    normalize(program)
    by_name = {node.name: node for node in program.graph.nodes}
    outputs = (program.output, *(by_name[name] for name in extra))
    assert all(name in keep for name in extra)
    for node in program.nodes:
        swap = {value: _Literal(name) for name, value in marks.items()}
        node.args = tuple(swap.get(a, a) if isinstance(a, (float, str)) else a for a in node.args)
        node.kwargs = {k: swap.get(a, a) if isinstance(a, (float, str)) else a for k, a in node.kwargs.items()}
    return _Pattern(program.graph, outputs, len(program.nodes), dict(attributes), pattern)


class _Literal(str):
    """A place in a pattern where any number may stand; the string is the parameter's name."""


def _match(pattern: _Pattern, anchor: fx.Node, failure: _Failure) -> Match | None:
    """The first way in which ``anchor`` is the pattern's first output, or None with ``failure`` filled in."""
    for match in _matches(pattern.outputs[0], anchor, Match({}, {}), failure):
        inner = set(match.covered.values())
        outputs = {match.covered[o] for o in pattern.outputs if o in match.covered}
        if len(outputs) != len(pattern.outputs):
            continue
        leaks = [(n, u) for n in inner - outputs for u in n.users if u not in inner]
        if not leaks:
            return match
        node, user = leaks[0]
        failure.matched, failure.node = len(match.covered), node
        failure.reason = f"{node.name} has another user: {user.name}"
    return None


def _matches(pattern: fx.Node, node: Any, match: Match, failure: _Failure) -> Iterator[Match]:
    if pattern.op == "placeholder":
        if not isinstance(node, fx.Node):
            return
        bound = match.values.get(pattern.name)
        if bound is None:
            yield Match({**match.values, pattern.name: node}, match.literals, match.covered)
        elif bound is node:
            yield match
        else:
            _fail(failure, match, node, f"{pattern.name} is {bound.name} in one place and {node.name} in another")
        return
    if not isinstance(node, fx.Node) or node.op != "call_function" or node.target is not pattern.target:
        got = target_name(node.target) if isinstance(node, fx.Node) and node.op == "call_function" else f"{node}"
        _fail(failure, match, node, f"expected {target_name(pattern.target)}, found {got}")
        return
    if pattern in match.covered:
        if match.covered[pattern] is node:
            yield match
        return
    here = Match(match.values, match.literals, {**match.covered, pattern: node})
    wanted, found = _from_the_end(pattern), _from_the_end(node)
    orders = [list(wanted)]
    if pattern.target in _COMMUTATIVE:
        orders.append([{"self": "other", "other": "self"}.get(name, name) for name in wanted])
    for order in orders:
        pairs = [(wanted[name], found.get(other)) for name, other in zip(wanted, order)]
        yield from _match_all(pairs, here, failure, node)


def _from_the_end(node: fx.Node) -> dict[str, Any]:
    """Arguments by name, dimensions counted from the end: ``[T, E]`` in a pattern also means ``[T, heads, D]``."""
    bound = arguments(node)
    rank = max(
        (a.meta["val"].dim() for a in node.all_input_nodes if isinstance(a.meta["val"], torch.Tensor)), default=0
    )
    for name in bound.keys() & {"dim", "dims", "dim0", "dim1"}:
        dim = bound[name]
        bound[name] = (
            [d - rank for d in dim] if isinstance(dim, (list, tuple)) else dim - rank if isinstance(dim, int) else dim
        )
    return bound


def _match_all(pairs: list[tuple[Any, Any]], match: Match, failure: _Failure, node: fx.Node) -> Iterator[Match]:
    if not pairs:
        yield match
        return
    (wanted, found), rest = pairs[0], pairs[1:]
    if isinstance(wanted, fx.Node):
        for partial in _matches(wanted, found, match, failure):
            yield from _match_all(rest, partial, failure, node)
    elif isinstance(wanted, (list, tuple)) and isinstance(found, (list, tuple)):
        if len(wanted) == len(found):
            yield from _match_all([*zip(wanted, found), *rest], match, failure, node)
    elif isinstance(wanted, _Literal):
        if isinstance(found, (int, float, str)) and match.literals.get(wanted, found) == found:
            yield from _match_all(
                rest, Match(match.values, {**match.literals, str(wanted): found}, match.covered), failure, node
            )
    elif wanted == found and not isinstance(found, fx.Node):
        yield from _match_all(rest, match, failure, node)
    else:
        _fail(failure, match, node, f"{target_name(node.target)} has {found} where {wanted} is expected")


def _fail(failure: _Failure, match: Match, node: Any, reason: str) -> None:
    if len(match.covered) > failure.matched:
        failure.matched, failure.reason = len(match.covered), reason
        failure.node = node if isinstance(node, fx.Node) else next(iter(match.covered.values()), None)


def rewrite(
    *,
    shapes: dict[str, tuple],
    attributes: dict[str, Any] | None = None,
    named: str = "role",
    confirm: bool = False,
    expect: Callable[[Program], int] | None = None,
    numerics: str = "exact",
    required: bool = True,
    before: str | None = None,
    after: str | None = None,
) -> Callable[[Callable], Rewrite]:
    """Make a pass of a pattern function; see the module's docstring.

    ``shapes``: for every positional parameter a shape to trace with, letters (``T B E F D N``) or ints.
    ``attributes``: literals handed to the replacement along with the captured ones (other spellings have their own).
    ``named``: what the new value is called: "role" (module path and operator) or "module" (the module's path alone).
    ``confirm``: run what matched against the replacement, on numbers, before believing it.
    ``expect``: how often the pass should fire, from the program before it; None for no expectation.
    ``numerics``: "exact" if results are bitwise the same, "close" if they may round differently.
    ``required``: whether firing nowhere, where something is expected, is an error or only noted.
    ``before``, ``after``: the pass beside which it belongs, for :func:`graphsrt.passes.insert` and installed packages.
    """
    return lambda pattern: Rewrite(
        pattern,
        shapes=shapes,
        attributes=attributes or {},
        named=named,
        confirm=confirm,
        expect=expect,
        numerics=numerics,
        required=required,
        before=before,
        after=after,
    )
