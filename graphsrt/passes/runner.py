"""Run passes over a program and do for all of them what none should do itself.

Around each pass: fake shapes of new values, lint, placements checked by ``check_placements``, what must not change
(``keeping.py``), timing, provenance, counting against the pass's own expectation, near misses, dumps, and a reproducer
when it fails. A pass is a callable that takes a program and returns how many rewrites it made; ``expect`` (a function
of the program before it, and of those options of the pass that it has parameters for) may be an attribute of it, and
``phase``: ``"prefill"`` or ``"decode"``, where it runs in that phase alone. Configuration is bound in the list with
``functools.partial``.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from graphsrt.check_placements import check_placements
from graphsrt.dump import DumpFolder, pass_reference
from graphsrt.errors import CompileError, explain
from graphsrt.passes.keeping import check_kept, record_provenance
from graphsrt.passes.rewriter import rule_of
from graphsrt.placement import global_shape
from graphsrt.program import PREFILL_MIN_TOKENS, PassReport, Program, Site, where

Pass = Callable[..., int]
PHASES = ("prefill", "decode")
MANY_TOKENS = 128
"""From so many tokens on a step is prefill's, where no pass says better: more than a step of decoding usually has."""


@dataclass
class Stages:
    """A program after capture and after each pass, in order. Stages are copies: looking costs a copy, not a run."""

    programs: list[tuple[str, Program]] = field(default_factory=list)
    prefill: Stages | None = None
    """The stages of the prefill program where it is another one; the first ones, before the parting, are the same."""

    @property
    def final(self) -> Program:
        return self.programs[-1][1]

    def everything(self) -> list[tuple[str, Program]]:
        """The stages, then those of prefill that are others, called ``NAME (prefill)``."""
        known = {id(program) for _, program in self.programs}
        more = self.prefill.programs if self.prefill else []
        return [*self.programs, *((f"{name} (prefill)", p) for name, p in more if id(p) not in known)]

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.programs]

    def after(self, name: str) -> Program:
        """The program after the named pass (``capture`` for the first); ValueError lists the names."""
        for stage, program in self.programs:
            if stage == name:
                return program
        raise ValueError(explain(f"no pass called {name!r} ran", expected=", ".join(self.names)))

    def around(self, name: str) -> tuple[Program, Program]:
        """The programs before and after the named pass."""
        after = self.after(name)
        index = self.names.index(name)
        return self.programs[max(index - 1, 0)][1], after


def pass_name(function: Pass) -> str:
    """The one name of a pass: of its function, its file, its test and its dump file."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def select(pipeline: Sequence[Pass], *, without: Iterable[str] = (), stop_after: str | None = None) -> list[Pass]:
    """The passes to run. ``without``: names of passes to leave out, ``NAME:PHASE`` in one phase only.

    An unknown name in ``without`` or ``stop_after`` is a ValueError that lists the known ones.
    """
    names = [pass_name(function) for function in pipeline]
    left_out: dict[str, set[str]] = {}
    for entry in without:
        name, colon, phase = entry.partition(":")
        if colon and phase not in PHASES:
            raise ValueError(explain(f"no phase is called {phase!r}", where=repr(entry), expected=", ".join(PHASES)))
        left_out.setdefault(name, set()).update([phase] if colon else PHASES)
    for name in [*left_out, *([stop_after] if stop_after else [])]:
        if name not in names and name != "capture":
            raise ValueError(explain(f"no pass is called {name!r}", expected=", ".join(names)))
    if stop_after == "capture":
        return []
    end = names.index(stop_after) + 1 if stop_after else len(names)
    chosen = []
    for function, name in zip(pipeline[:end], names[:end]):
        own = _phase(function)
        phases = {*PHASES} if own is None else {own}
        if rest := phases - left_out.get(name, set()):
            chosen.append(function if rest == phases else _in_phase(function, *rest))
    return chosen


def _phase(function: Pass) -> str | None:
    """The one phase that a pass runs in; None if it runs in both. ValueError if it names another one."""
    phase = _attribute(function, "phase", None)
    if phase is not None and phase not in PHASES:
        raise ValueError(explain(f"{pass_name(function)} is for no phase that there is", expected=" or ".join(PHASES),
                                 got=repr(phase)))  # fmt: skip
    return phase


def _in_phase(function: Pass, phase: str) -> Pass:
    bound = functools.partial(function)
    bound.phase = phase  # type: ignore[attr-defined]
    return bound


def bind(passes: Sequence[Pass], function: Pass, **options: Any) -> list[Pass]:
    """The passes with options given to one of them, where it is there and was given none."""
    return [_bind(one, options) if _is_unbound(one, function) else one for one in passes]


def _is_unbound(one: Pass, function: Pass) -> bool:
    if isinstance(one, functools.partial) and not one.args and not one.keywords:
        one = one.func
    return one is function


def _bind(function: Pass, options: dict[str, Any]) -> Pass:
    bound = functools.partial(function, **options)
    vars(bound).update(vars(function) if isinstance(function, functools.partial) else {})
    return bound


def insert(pipeline: Sequence[Pass], new: Pass, *, before: str | None = None, after: str | None = None) -> list[Pass]:
    """The pipeline with a pass put before or after another one.

    If neither is given, the pass's own attribute ``before`` or ``after`` counts, and without one it goes to the end.
    ValueError for both at once and for a name that is not in the pipeline.
    """
    names = [pass_name(function) for function in pipeline]
    if before is None and after is None:
        before, after = _attribute(new, "before", None), _attribute(new, "after", None)
    if before is not None and after is not None:
        raise ValueError(explain(f"{pass_name(new)} has one place", expected="before= or after=", got="both"))
    anchor = before or after
    if anchor is not None and anchor not in names:
        raise ValueError(explain(f"no pass is called {anchor!r}", expected=", ".join(names)))
    at = len(names) if anchor is None else names.index(anchor) + (after is not None)
    return [*pipeline[:at], new, *pipeline[at:]]


def run(
    program: Program,
    passes: Sequence[Pass],
    *,
    strict: bool = False,
    dump: DumpFolder | None = None,
    limits: dict[str, int] | None = None,
    may_miss: Container[str] = (),
) -> Stages:
    """Run ``passes`` on ``program`` (it is modified) and return every stage.

    ``strict``: a block that stays replicated over ranks is an error. ``limits``: pass name -> at most so many rewrites,
    for bisecting. ``may_miss``: passes that may fire nowhere. Raises CompileError naming the pass; a dump folder then
    has what re-runs the failing pass alone.
    """
    stages = Stages([("capture", program.copy())])
    if dump is not None:
        dump.stage(0, "capture", program)
    _run_all(program, passes, stages, strict, dump, limits or {}, may_miss)
    if dump is not None:
        dump.finish(program, program.history)
    return stages


def run_phases(
    program: Program,
    passes: Sequence[Pass],
    *,
    strict: bool = False,
    dump: DumpFolder | None = None,
    limits: dict[str, int] | None = None,
) -> Stages:
    """:func:`run` for a program that parts: a pass with an attribute ``phase`` runs for prefill, or decoding, only.

    The stages are those of decoding; ``prefill`` of them has the others, or is None where no such pass did anything.
    From the parting on, both programs have the same weights, so no pass after it may edit a recipe.
    """
    phases = [_phase(function) for function in passes]
    special = [index for index, phase in enumerate(phases) if phase is not None]
    parting, last = (special[0], special[-1] + 1) if special else (len(passes), len(passes))
    both, between, rest = passes[:parting], range(parting, last), passes[last:]
    stages = Stages([("capture", program.copy())])
    if dump is not None:
        dump.stage(0, "capture", program)
    _run_all(program, both, stages, strict, dump, limits or {})
    twin, prefill = program.copy(), Stages(list(stages.programs))

    def run_for(phase: str, mine: Program, to: Stages, some: Sequence[Pass], suffix: str = "") -> None:
        some = [function for function in some if _phase(function) in (None, phase)]
        _run_all(mine, some, to, strict, dump, limits or {}, suffix=suffix)

    run_for("prefill", twin, prefill, [passes[index] for index in between], ".prefill")
    if _has_fired(twin, passes, phases, "prefill") or "decode" in phases:
        run_for("prefill", twin, prefill, rest, ".prefill")
        if dump is not None:
            dump.go_back(parting, *stages.programs[-1])
        run_for("decode", program, stages, passes[parting:])
        if _has_fired(twin, passes, phases, "prefill") or _has_fired(program, passes, phases, "decode"):
            stages.prefill = prefill
            if PREFILL_MIN_TOKENS not in twin.constants:
                twin.constants[PREFILL_MIN_TOKENS] = MANY_TOKENS
                prefill.programs[-1] = (prefill.names[-1], twin.copy())
    else:  # one program, in whose history they say why they did nothing
        _run_all(program, passes[parting:], stages, strict, dump, limits or {})
    if stages.prefill is not None and set(twin.weights) != set(program.weights):
        raise CompileError(
            explain(
                "prefill and decode want different weights, which would then exist twice",
                got=", ".join(sorted(set(twin.weights) ^ set(program.weights))[:5]),
                hint="a pass that runs in one phase, and what comes after it, may not edit recipes",
            )
        )
    if dump is not None:
        parted = stages.prefill.final.history[parting:] if stages.prefill else []
        dump.finish(program, [*program.history, *parted])
    return stages


def _has_fired(program: Program, passes: Sequence[Pass], phases: Sequence[str | None], phase: str) -> bool:
    names = {pass_name(function) for function, its in zip(passes, phases) if its == phase}
    return any(report.fired for report in program.history if report.name in names)


def _run_all(
    program: Program,
    passes: Sequence[Pass],
    stages: Stages,
    strict: bool,
    dump: DumpFolder | None,
    limits: dict[str, int],
    may_miss: Container[str] = (),
    suffix: str = "",
) -> None:
    """Run passes and append what they leave to the stages. ``suffix``: of names in the dump."""
    for index, function in enumerate(passes, start=len(stages.programs)):
        before = stages.final
        name = pass_name(function)
        report, changed = _run_one(program, function, before, dump, limits.get(name), name in may_miss)
        if strict and report.name == "shard_tensor_parallel" and report.near_misses:
            _refuse_replicated(report)
        stages.programs.append((report.name, program.copy() if changed else before.with_history(program.history)))
        if dump is not None and report.fired:
            dump.stage(index, report.name + suffix, program)
            dump.diff(index, report.name + suffix, before, program)


def _run_one(
    program: Program, function: Pass, before: Program, dump: DumpFolder | None, limit: int | None, may_miss: bool
) -> tuple[PassReport, bool]:
    """What the pass did, and whether it changed anything."""
    name = pass_name(function)
    report = PassReport(name, nodes_before=len(program.nodes))
    wanted = _expectation(function)
    report.expected = wanted(program) if wanted is not None else None
    options: dict[str, Any] = {}
    accepted = _parameters(function)
    if "near_misses" in accepted:
        options["near_misses"] = report.near_misses
    if "notes" in accepted:
        options["notes"] = report.notes
    if limit is not None:
        if "limit" not in accepted:
            raise ValueError(f"{name} takes no limit; only rewrite passes can be cut short")
        options["limit"] = limit
    said: list[fx.Node] | None = None
    if "sites" in accepted:
        said = options["sites"] = []
    known = {node: node.name for node in program.graph.nodes}
    was = _fingerprint(program)
    for node in known:
        node.meta.pop("from_nodes", None)
        node.meta.pop("origin", None)
    required = not may_miss and _attribute(function, "required", True)
    start = time.perf_counter()
    try:
        report.fired = function(program, **options)
        if not report.fired and _fingerprint(program) == was and all("val" in node.meta for node in program.nodes):
            return _finish(report, program, limit, required, start), False
        made_up = [node for node in said or () if node not in known]
        program.remove_dead()
        _check_used(made_up, name)
        program.lint()
        program.infer()
        _mark(program, before, name)
        made = record_provenance(program, before, known, name, rule_of(function))
        _check_types(program, before, name)
        check_kept(program, before, made, _attribute(function, "numerics", "exact"))
        check_placements(program)
        report.sites = [_site(node) for node in (made if said is None else said)]
        return _finish(report, program, limit, required, start), True
    except Exception as error:
        if dump is not None:
            dump.failure(pass_reference(function), _bound(function), before, error)
        if isinstance(error, CompileError):
            message, _, rest = str(error).partition("\n")
            raise CompileError(f"{message}\n  {'pass:':10}{name}" + (f"\n{rest}" if rest else "")) from error
        raise CompileError(
            explain(f"{name} failed: {type(error).__name__}: {error}", where=f"pass {name}", hint=_reproduce(dump))
        ) from error


def _finish(report: PassReport, program: Program, limit: int | None, required: bool, start: float) -> PassReport:
    _check_count(report, limit, required)
    report.milliseconds = round((time.perf_counter() - start) * 1e3, 3)
    report.nodes_after = len(program.nodes)
    program.history.append(report)
    return report


def _fingerprint(program: Program) -> list:
    """Equal before and after a pass that changed nothing: such a pass needs no checks, which cost more than it does."""
    nodes = [
        (node, node.name, node.target, node.args, node.kwargs, [node.meta.get(key) for key in _MARKS],
         id(node.meta.get("val", node)))  # of a value without a type, its node: whoever makes it anew differs
        for node in program.graph.nodes
    ]  # fmt: skip
    weights = [(name, w.recipe, w.shape, w.dtype, w.placement) for name, w in program.weights.items()]
    return [nodes, weights, dict(program.inputs), dict(program.constants), dict(program.mesh)]


_MARKS = ("placement", "module", "source", "made_by")


def _site(node: fx.Node) -> Site:
    meta = node.meta
    return Site(node.name, meta["module"], meta.get("source", ""), meta.get("rule", ""), meta.get("from_nodes", ()))


def _check_used(sites: Iterable[fx.Node], name: str) -> None:
    """A pass that makes what nobody reads would report what it meant to do, not what it did."""
    for node in sites:
        if node._erased:
            raise CompileError(
                explain(f"{name} made {node.name}, which nothing reads", where=f"{node.name} {where(node)}".strip(),
                        expected="the new value in the place of the old one",
                        hint="program.replace(OLD, NEW) gives the readers of one value another")
            )  # fmt: skip


def _check_count(report: PassReport, limit: int | None, required: bool) -> None:
    """A pass that should have fired and did not is an error; a recognition (``required = False``) leaves a note."""
    if report.expected and report.fired < report.expected and not required:
        report.notes.append(f"{report.expected - report.fired} of {report.expected} places are left as they are")
    elif report.expected and report.fired == 0 and limit is None:
        nearest = report.near_misses[0] if report.near_misses else None
        raise CompileError(
            explain(
                f"{report.name} fired nowhere",
                expected=f"{report.expected} places",
                got=f"nearest miss: {nearest.node}: {nearest.reason}" if nearest else "no near miss",
                hint=f"leave the pass out with without=[{report.name!r}] if the model really has none",
            )
        )


def _check_types(program: Program, before: Program, name: str) -> None:
    """A pass may change how a result is computed, not what it is: same dtype, same global shape or fewer rows."""
    if list(before.outputs) != list(program.outputs):
        raise CompileError(
            explain(f"{name} changed what is returned", expected=", ".join(before.outputs),
                    got=", ".join(program.outputs))
        )  # fmt: skip
    for old, new in zip(before.outputs.values(), program.outputs.values()):
        (was, old_shape), (now, new_shape) = _global_type(before, old), _global_type(program, new)
        if was != now or old_shape[1:] != new_shape[1:]:
            raise CompileError(
                explain(
                    f"{name} changed the type of the result",
                    where=new.name,
                    expected=f"{was} {old_shape}",
                    got=f"{now} {new_shape}",
                )
            )


def _global_type(program: Program, node: fx.Node) -> tuple[torch.dtype, list[int | str]]:
    return node.meta["val"].dtype, global_shape(program.shape(node), node.meta.get("placement"))


def _mark(program: Program, before: Program, name: str) -> None:
    """Provenance of new values: the pass that made them, where the pass did not say itself."""
    known = {node.name for node in before.graph.nodes}
    for node in program.nodes:
        node.meta.setdefault("module", "")
        made_by = node.meta.setdefault("made_by", ())
        if node.name not in known and name not in made_by and name != "normalize":
            node.meta["made_by"] = (*made_by, name)


def _refuse_replicated(report: PassReport) -> None:
    first = report.near_misses[0]
    raise CompileError(
        explain(
            f"{len(report.near_misses)} linears stay whole on every rank",
            where=f"{first.node} ({first.module})",
            got=first.reason,
            hint="compile with strict=False to accept it",
        )
    )


def _expectation(function: Pass) -> Callable[[Program], int] | None:
    wanted, bound = _attribute(function, "expect", None), _bound(function)
    if wanted is None or not bound:
        return wanted
    accepted = _parameters(wanted)
    return functools.partial(wanted, **{name: value for name, value in bound.items() if name in accepted})


def _attribute(function: Pass, name: str, default: Any) -> Any:
    while isinstance(function, functools.partial) and name not in vars(function):
        function = function.func
    return getattr(function, name, default)


def _parameters(function: Pass) -> set[str]:
    return set(inspect.signature(function).parameters)


def _bound(function: Pass) -> dict[str, Any]:
    return dict(function.keywords) if isinstance(function, functools.partial) else {}


def _reproduce(dump: DumpFolder | None) -> str:
    return "see failure/ in the dump folder" if dump is not None else "run again with dump=DIR to get a reproducer"
