"""Passes of installed packages: the entry point group ``graphsrt.passes``.

    [project.entry-points."graphsrt.passes"]
    fold_norm_weight = "fold_norm.fold:fold_norm_weight"

Such a pass joins the pipeline that is used when none is given, at the place that its attributes ``before`` or ``after``
name (at the end without). ``without=["fold_norm_weight"]`` leaves one out, ``GRAPHSRT_DISABLE_PLUGINS=1`` all of them.
Packages are looked up and imported when a pipeline is first put together, never by ``import graphsrt``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points

from graphsrt.errors import CompileError, explain
from graphsrt.passes.runner import Pass, insert, pass_name

GROUP = "graphsrt.passes"


def with_installed(pipeline: Sequence[Pass]) -> list[Pass]:
    """``pipeline`` with the passes of installed packages, by name, where each says that it belongs.

    CompileError that names the package if one cannot be loaded, is no pass, bears a name that is taken, or wants a
    place beside a pass that does not exist.
    """
    result = list(pipeline)
    if os.environ.get("GRAPHSRT_DISABLE_PLUGINS", "") not in ("", "0"):
        return result
    waiting = [(entry, _load(entry)) for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name)]
    while waiting:  # one may stand beside another that is yet to come
        known = {pass_name(function) for function in result}
        entry, function = next((item for item in waiting if _beside(item[1]) in known | {None}), waiting[0])
        if pass_name(function) in known:
            raise _broken(entry, "has the name of a pass that is there already", got=pass_name(function))
        try:
            result = insert(result, function)
        except ValueError as error:
            raise _broken(
                entry, f"cannot be placed: {str(error).splitlines()[0]}", expected=", ".join(known)
            ) from error
        waiting.remove((entry, function))
    return result


def _beside(function: Pass) -> str | None:
    return getattr(function, "before", None) or getattr(function, "after", None)


def _load(entry: EntryPoint) -> Pass:
    try:
        function = entry.load()
    except Exception as error:
        raise _broken(entry, "cannot be loaded", got=f"{type(error).__name__}: {error}") from error
    if not callable(function):
        raise _broken(entry, "is no pass", expected="a function of a program, or a rewrite", got=repr(function))
    return function


def _broken(entry: EntryPoint, what: str, *, expected: str | None = None, got: str | None = None) -> CompileError:
    package = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "an unknown package"
    return CompileError(
        explain(
            f"the pass {entry.name} of {package} {what}",
            where=f"{entry.name} = {entry.value} in the entry points {GROUP}",
            expected=expected,
            got=got,
            hint="repair or uninstall that package, or set GRAPHSRT_DISABLE_PLUGINS=1",
        )
    )
