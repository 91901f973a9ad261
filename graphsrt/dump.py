"""The dump folder: every stage as complete text, the diffs between them, and a failing pass that can be run again.

    00_capture.txt  01_normalize.txt  01_normalize.diff  …     after each pass that changed something
    weights.txt     every weight with recipe and bytes on each rank
    near_misses.txt where a pass almost fired, and why it did not
    summary.txt     the pass table
    failure/        before.txt, options.json: ``python -m graphsrt.dump FOLDER/failure`` runs the failing pass alone

A folder with anything else in it is refused: only what a dump wrote itself, as its marker file lists, is ever removed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import platform
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from graphsrt.errors import CompileError, GraphsrtError, explain
from graphsrt.printer import diff_text, literal_text, print_program, recipe_text, tensor_type_text
from graphsrt.program import PassReport, Program, Weight
from graphsrt.text_parser import parse_literal, parse_program

SEED = 0
"""Of the random numbers that recognitions are confirmed with; part of a reproducer."""
MARKER = ".graphsrt-dump"
_BUILT_IN = "graphsrt.passes."


class DumpFolder:
    """Writes one compilation into a folder, which is created, or emptied of an earlier dump.

    Raises ValueError, and removes nothing, if the folder holds files that no dump wrote.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._written: list[str] = []
        self._last: tuple[str, str] | None = None  # name and text of the stage before
        self._claim()

    def _claim(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(explain("the dump folder is a file", where=str(self.path), hint="name a folder"))
        self.path.mkdir(parents=True, exist_ok=True)
        marker = self.path / MARKER
        listed = marker.read_text().splitlines() if marker.is_file() else []
        own = {name for name in listed if name and not Path(name).is_absolute() and ".." not in Path(name).parts}
        present = {str(p.relative_to(self.path)) for p in self.path.rglob("*") if p.is_symlink() or not p.is_dir()}
        foreign = sorted(present - own - {MARKER})
        if foreign:
            shown = ", ".join(foreign[:5]) + (f" and {len(foreign) - 5} more" if len(foreign) > 5 else "")
            raise ValueError(
                explain(
                    "the dump folder holds files that no dump wrote; nothing was removed",
                    where=str(self.path),
                    expected="a new or empty folder, or one that holds a dump",
                    got=shown,
                    hint="choose another folder, or move these files away",
                )
            )
        for name in sorted(own & present):
            (self.path / name).unlink()
        if (self.path / "failure").is_dir() and not any((self.path / "failure").iterdir()):
            (self.path / "failure").rmdir()
        marker.write_text("")

    def _write(self, name: str, text: str) -> Path:
        """Write a file; the marker lists it first, so that an interrupted dump can still be cleared."""
        if name not in self._written:
            self._written.append(name)
            (self.path / MARKER).write_text("".join(f"{item}\n" for item in self._written))
        target = self.path / name
        target.parent.mkdir(exist_ok=True)
        target.write_text(text, encoding="utf-8")
        return target

    def stage(self, index: int, name: str, program: Program) -> bool:
        """Write a stage's text and its diff to the stage before; nothing, and False, if nothing changed."""
        plain = print_program(program, history=False)
        if self._last is not None and self._last[1] == plain:
            return False
        label = f"{index:02d}_{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}"
        self._write(f"{label}.txt", str(program))
        if self._last is not None:
            self.diff(index, name, self._last[1], plain, name_before=self._last[0])
        self._last = (label, plain)
        return True

    def diff(
        self, index: int, name: str, before: Program | str, after: Program | str, *, name_before: str = "before"
    ) -> None:
        """Write ``NN_name.diff``, the unified diff across a pass. :meth:`stage` does it for consecutive stages."""
        label = f"{index:02d}_{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}"
        self._write(f"{label}.diff", diff_text(before, after, name_before, label))

    def go_back(self, index: int, name: str, program: Program) -> None:
        """The next stage follows this one, which was written before others: where two programs part."""
        label = f"{index:02d}_{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}"
        self._last = (label, print_program(program, history=False))

    def finish(self, program: Program, history: Iterable[PassReport] | None = None) -> None:
        """Write ``weights.txt``, ``near_misses.txt`` and ``summary.txt``. ``history`` defaults to the program's."""
        reports = list(program.history if history is None else history)
        self._write("weights.txt", weights_text(program))
        self._write("near_misses.txt", near_misses_text(reports))
        total = sum(weight_bytes(weight) for weight in program.weights.values())
        operators = f"{len(program.nodes)} operators, {len(program.weights)} weights, {total:,} weight bytes per rank"
        self._write("summary.txt", f"{program.name} {program.mesh}\n{operators}\n\n{pass_table(reports)}")

    def failure(self, pass_name: str, pass_kwargs: dict[str, Any], before: Program | str, error: BaseException) -> Path:
        """Write what is needed to run a failing pass again, and return its folder.

        ``pass_name`` is the name of a built-in pass, or ``module:function`` as :func:`pass_reference` gives it;
        ``before`` is the program as the pass got it, or its text.
        """
        program_text = before if isinstance(before, str) else str(before)
        options = {
            "pass": pass_name,
            "kwargs": {name: _to_json(value) for name, value in pass_kwargs.items()},
            "seed": SEED,
            "error": f"{type(error).__name__}: {error}",
            "versions": versions(),
            "rerun": f"{Path(sys.executable).name} -m graphsrt.dump {self.path / 'failure'}",
        }
        if not isinstance(before, str):
            options["mesh"] = before.mesh
        self._write("failure/before.txt", program_text)
        return self._write("failure/options.json", json.dumps(options, indent=2) + "\n").parent


# -- texts ------------------------------------------------------------------------------------------------------------


def weight_bytes(weight: Weight) -> int:
    """Bytes of a weight on one rank: elements of the local shape times the dtype's size."""
    return torch.Size(weight.shape).numel() * weight.dtype.itemsize


def weights_text(program: Program) -> str:
    """One line per weight: bytes on each rank, name, type and recipe; then the sum."""
    rows = [
        f"{weight_bytes(weight):>15,}  {name}: {tensor_type_text(weight.shape, weight.dtype, weight.placement)}"
        f" = {recipe_text(weight.recipe)}"
        for name, weight in program.weights.items()
    ]
    total = sum(weight_bytes(weight) for weight in program.weights.values())
    return "\n".join([f"{'bytes per rank':>15}", *rows, f"{total:>15,}  in all"]) + "\n"


def near_misses_text(history: Iterable[PassReport]) -> str:
    """Every near miss, by pass."""
    lines = []
    for report in history:
        for miss in report.near_misses:
            place = f" ({miss.module})" if miss.module and miss.module != miss.node else ""
            lines.append(f"{report.name}: {miss.node}{place}: {miss.reason}")
    return "\n".join(lines or ["none"]) + "\n"


def pass_table(history: Iterable[PassReport]) -> str:
    """The passes in order: how often each fired and should have, operators before and after, time, near misses."""
    history = list(history)
    width = max([28, *(len(report.name) for report in history)])
    lines = [f"{'pass':<{width}} {'fired':>6} {'expected':>8} {'operators':>14} {'ms':>9} {'near misses':>11}"]
    for report in history:
        expected = "" if report.expected is None else str(report.expected)
        operators = f"{report.nodes_before} → {report.nodes_after}"
        misses = str(len(report.near_misses)) if report.near_misses else ""
        counts = f"{report.name:<{width}} {report.fired:>6} {expected:>8} {operators:>14}"
        lines.append(f"{counts} {report.milliseconds:>9.1f} {misses:>11}".rstrip())
        lines += [f"    {note}" for note in report.notes]
    return "\n".join(lines) + "\n"


def versions() -> dict[str, str]:
    """The versions that decide whether a failure can be seen again."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for package in ("graphsrt", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


# -- running a pass again ---------------------------------------------------------------------------------------------


def pass_reference(function: Callable[..., Any]) -> str:
    """How a pass is named so that another process finds it.

    ``name`` for ``graphsrt.passes.name``, ``module:function`` for another module, ``/path/file.py:function`` for a
    script or a file outside any package.
    """
    while isinstance(function, functools.partial):
        function = function.func
    name, module = function.__name__, function.__module__
    if module == _BUILT_IN + name:
        return name
    loaded = sys.modules.get(module)
    file = getattr(loaded, "__file__", None)
    if file and (module == "__main__" or "." not in module):
        return f"{Path(file).resolve()}:{name}"
    return f"{module}:{name}"


def find_pass(reference: str) -> Callable[..., Any]:
    """The inverse of :func:`pass_reference`. Raises CompileError if there is no such pass."""
    place, colon, name = reference.rpartition(":")
    if not colon:
        place, name = _BUILT_IN + reference, reference
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        function = getattr(module, name)
    except (ImportError, FileNotFoundError, AttributeError) as error:
        raise CompileError(
            explain(
                f"the pass {reference} cannot be found: {error}",
                expected="the name of a built-in pass, module:function or file.py:function",
                hint="run where the module can be imported, or add its folder to PYTHONPATH",
            )
        ) from error
    return function


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and rewrites look their module up by name
    spec.loader.exec_module(module)
    return module


def _to_json(value: Any) -> Any:
    """A keyword argument for ``options.json``: itself where JSON has it, else its text in program notation."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    try:
        return {"literal": literal_text(value)}
    except ValueError:
        return {"unprintable": repr(value)}


def _from_json(name: str, value: Any) -> Any:
    if isinstance(value, dict) and "literal" in value:
        return parse_literal(value["literal"])
    if isinstance(value, dict):
        got = value.get("unprintable")
        raise CompileError(explain(f"the argument {name} of the pass cannot be made again", got=got))
    return value


def rerun(folder: str | Path) -> Program:
    """Run the failing pass of a ``failure`` folder on the program that it got; returns what it makes of it.

    Raises what the pass raises, ValueError if the folder is none.
    """
    from graphsrt.passes.runner import run

    folder = Path(folder)
    missing = [name for name in ("before.txt", "options.json") if not (folder / name).is_file()]
    if missing:
        what = f"no {' and no '.join(missing)}"
        raise ValueError(explain(what, where=str(folder), expected="the failure folder of a dump"))
    options = json.loads((folder / "options.json").read_text(encoding="utf-8"))
    program = parse_program((folder / "before.txt").read_text(encoding="utf-8"))
    function = find_pass(options["pass"])
    bound = {name: _from_json(name, value) for name, value in options["kwargs"].items()}
    # by way of the runner, since what failed may have been one of its checks
    return run(program, [functools.partial(function, **bound) if bound else function]).final


def main(arguments: list[str]) -> int:
    """``python -m graphsrt.dump FOLDER/failure``: status 1 and the error if the pass still fails, else the diff."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m graphsrt.dump FOLDER/failure\n\nRuns the failing pass alone, on the program it got.")
        return 0 if arguments in (["-h"], ["--help"]) else 2
    try:
        program = rerun(arguments[0])
    except (GraphsrtError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    before = parse_program((Path(arguments[0]) / "before.txt").read_text(encoding="utf-8"))
    print(diff_text(before, program, "before", "after"), end="")
    print("the pass succeeds now", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
