"""bisect: the first pass, and of a rewriting pass the single rewrite, after which a check of the program fails.

    graphsrt bisect MODEL --tp 8 --check SCRIPT     SCRIPT defines check(program): raises or returns False for "wrong"
    graphsrt bisect MODEL --tp 8 --verify           the numbers of all simulated ranks decide

Passes are tried from the first on. Within the guilty one, ``limit`` is halved between "no rewrite", after which the
check holds, and "all of them", after which it fails. A pass without ``limit`` is only named: ``normalize`` emits the
whole program anew, ``shard_tensor_parallel`` chooses for all of it at once, ``page_attention`` half done would mix
attention over one sequence with attention over a batch, and ``select_logit_rows`` makes one change in any case.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from graphsrt.dump import find_pass
from graphsrt.errors import CompileError, GraphsrtError, explain
from graphsrt.passes import PIPELINE
from graphsrt.passes.plugins import with_installed
from graphsrt.passes.runner import Pass, pass_name, run, select
from graphsrt.program import Program, Site

Check = Callable[[Program], object]
"""Raises, or returns False, if the program is wrong."""


@dataclass(frozen=True)
class Bisection:
    """What was found. ``name`` is None if the check holds after every pass, ``"capture"`` if it never does.

    ``rewrite``: the number, from 1, of the rewrite among ``fired`` (0 if unknown: the runner refuses the pass), or None
    where the pass cannot be cut short.
    """

    name: str | None
    reason: str = ""
    rewrite: int | None = None
    fired: int = 0
    site: Site | None = None
    num_checks: int = 0

    @property
    def ok(self) -> bool:
        return self.name is None

    def __str__(self) -> str:
        if self.name is None:
            return f"the check holds after every pass ({self.num_checks} checks)"
        if self.name == "capture":
            return f"the check fails on the captured program, before any pass: {self.reason}"
        head = self.name
        if self.rewrite is not None:
            head += f", rewrite {self.rewrite}" + (f" of {self.fired}" if self.fired else "")
        if self.site is None:
            return f"{head}\n  {self.reason}"
        where = ", ".join(part for part in (self.site.source, f"rule {self.site.rule}") if part)
        origins = f"\n  from   {', '.join(self.site.from_nodes)}" if self.site.from_nodes else ""
        return f"{head}: {self.site.node}\n  where  {where}{origins}\n  check  {self.reason}"


def bisect(
    model: Any,
    check: Check,
    *,
    tp: int = 1,
    passes: Sequence[Pass] | None = None,
    without: Iterable[str] = (),
    **options: Any,
) -> Bisection:
    """Find what makes ``check`` fail on a model's program. Other options are those of ``graphsrt.trace``."""
    from graphsrt.api import trace

    chosen = select(with_installed(PIPELINE) if passes is None else passes, without=without)
    captured = trace(model, tp=tp, passes=[], **options).stages.final
    return bisect_program(captured, chosen, lambda program, _: _told(check, program))


def bisect_numbers(
    model: Any, *, tp: int = 1, passes: Sequence[Pass] | None = None, without: Iterable[str] = ()
) -> Bisection:
    """Find what changes the numbers of a model (its miniature, as ``verify`` uses it) on simulated ranks."""
    from graphsrt.models.source import resolve
    from graphsrt.verification import small_program

    source = resolve(model)
    chosen = select(with_installed(PIPELINE) if passes is None else passes, without=without)
    captured = small_program(source, tp)
    return bisect_program(captured, chosen, _numbers)


def bisect_program(
    captured: Program, passes: Sequence[Pass], fails: Callable[[Program, list[tuple[str, Program]]], str | None]
) -> Bisection:
    """The search itself. ``fails(program, stages before it)`` returns None, or what is wrong with the program.

    A program that the runner refuses counts as wrong. The captured program is left alone.
    """
    stages = [("capture", captured.copy())]
    reason = fails(stages[0][1], [])
    num_checks = 1
    if reason is not None:
        return Bisection("capture", reason, num_checks=num_checks)
    for function in passes:
        name, before = pass_name(function), stages[-1][1]
        after, reason = _tried(before, function, None, stages, fails)
        num_checks += 1
        if reason is None:
            assert after is not None
            stages.append((name, after))
            continue
        if "limit" not in inspect.signature(function).parameters:
            return Bisection(name, reason, num_checks=num_checks)
        return _within(before, function, after, reason, stages, fails, num_checks)
    return Bisection(None, num_checks=num_checks)


def _within(
    before: Program, function: Pass, after: Program | None, reason: str, stages: list[tuple[str, Program]],
    fails: Callable[[Program, list[tuple[str, Program]]], str | None], num_checks: int,
) -> Bisection:  # fmt: skip
    """Halve the number of rewrites; without a finished run that says how many there are, double it first."""
    low, high, total = 0, 1, 0
    found: tuple[Program | None, str] = (after, reason)
    if after is not None:
        high = total = after.history[-1].fired
        if not total:
            return Bisection(pass_name(function), reason, num_checks=num_checks)
    else:
        while True:
            tried, why = _tried(before, function, high, stages, fails)
            num_checks += 1
            if why is not None:
                found = (tried, why)
                break
            assert tried is not None
            if tried.history[-1].fired < high:  # all were made, and it is not the rewrites
                return Bisection(pass_name(function), reason, num_checks=num_checks)
            low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        tried, why = _tried(before, function, middle, stages, fails)
        num_checks += 1
        if why is None:
            low = middle
        else:
            high, found = middle, (tried, why)
    program, why = found
    site = None
    if program is not None and len(program.history[-1].sites) >= high:
        site = program.history[-1].sites[high - 1]
    return Bisection(pass_name(function), why, high, total, site, num_checks)


def _tried(
    before: Program, function: Pass, limit: int | None, stages: list[tuple[str, Program]],
    fails: Callable[[Program, list[tuple[str, Program]]], str | None],
) -> tuple[Program | None, str | None]:  # fmt: skip
    """The program after at most ``limit`` rewrites (None if the runner refuses it), and what is wrong with it."""
    name = pass_name(function)
    try:
        after = run(before.copy(), [function], limits={name: limit} if limit is not None else None).final
    except CompileError as error:
        return None, f"the runner refuses it: {error}"
    return after, fails(after, [*stages, (name, after)])


def _told(check: Check, program: Program) -> str | None:
    """What a user's check says; it gets a copy, so that it may do with the program as it likes."""
    try:
        answer = check(program.copy())
    except Exception as error:  # noqa: BLE001  (whatever the check raises is its answer)
        return f"{type(error).__name__}: {str(error).strip()}".rstrip(": ")
    return "check returned False" if answer is False else None


def _numbers(program: Program, stages: list[tuple[str, Program]]) -> str | None:
    """Compare with the captured program, by way of the last whole stage; those in between have agreed already."""
    from graphsrt.verification import is_sharded, verify_stages

    if not stages:
        return None
    whole = [stage for stage in stages[1:-1] if not is_sharded(stage[1]) and "kv_pool" not in stage[1].inputs]
    report = verify_stages([stages[0], *whole[-1:], stages[-1]])
    return report.stages[-1].reason


def load_check(reference: str) -> Check:
    """The function of ``file.py`` (its ``check``), ``file.py:function`` or ``module:function``. ValueError if none."""
    written = reference if ":" in reference else f"{reference}:check"
    try:
        return find_pass(written)
    except (GraphsrtError, SyntaxError) as error:
        cause = error.__cause__ or error
        raise ValueError(
            explain(
                f"the check {reference} cannot be loaded: {cause}",
                expected="a Python file that defines check(program), file.py:function, or module:function",
            )
        ) from error


__all__ = ["Bisection", "bisect", "bisect_numbers", "bisect_program", "load_check"]
