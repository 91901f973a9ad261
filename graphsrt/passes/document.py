"""docs/passes.md: what each pass says of itself, and what it does to a small Llama on two ranks.

python -m graphsrt.passes.document > docs/passes.md
"""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Sequence
from typing import Any

from graphsrt.folding import fold
from graphsrt.passes import PIPELINE, scatter_residual
from graphsrt.passes.runner import Pass, Stages, bind, pass_name

_MOST_LINES = 8
_WIDTH = 160

HEADER = """\
# The passes

Written by `python -m graphsrt.passes.document > docs/passes.md` from the docstrings of the passes, in the order in
which they run. Below each stands what it changes in the second layer, or else around the layers, of a Llama with two
layers and a head of its own, on two ranks.
"""


def document(pipeline: Sequence[Pass] = PIPELINE) -> str:
    """The page for ``pipeline``: a heading for each pass, its docstring, and an excerpt of its diff."""
    both = _stages(pipeline)
    sections = [HEADER]
    for function in pipeline:
        name = pass_name(function)
        stages = both if name in both.names else both.prefill
        assert stages is not None, name
        before, after = stages.around(name)
        report = next(r for r in reversed(after.history) if r.name == name)
        shown = _excerpt(fold(before, layer=1), fold(after, layer=1)) or _excerpt(fold(before), fold(after))
        sections.append(f"## {name}\n\n{_docstring(function, name)}\n")
        fires = f"Fires {_times(report.fired)} in the small Llama"
        sections.append(f"{fires}:\n\n```diff\n{shown}\n```\n" if report.fired else f"{fires}.\n")
    return "\n".join(sections)


def _stages(pipeline: Sequence[Pass]) -> Stages:
    from transformers import LlamaConfig

    from graphsrt.api import trace

    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    # small as it is, dividing its tokens would never pay
    passes = bind(pipeline, scatter_residual, min_tokens=1)
    return trace(config, tp=2, dtype="bfloat16", passes=passes).stages


def _docstring(function: Any, name: str) -> str:
    """The module's docstring as Markdown: indented examples as they are, literals with one backquote."""
    text = inspect.cleandoc(sys.modules[function.__module__].__doc__ or function.__doc__ or "")
    text = text.removeprefix(f"{name}: ").replace("``", "`")
    for word in ("Needs", "Leaves", "Numerics", "Source"):
        text = text.replace(f"  {word}: ", f"\n{word}: ")
        text = text.replace(f"\n{word}: ", f"\n- *{word}*: ", 1)
    lines: list[str] = []
    for line in (text[:1].upper() + text[1:]).splitlines():
        if line.startswith("- *") and lines and lines[-1] and not lines[-1].startswith(("- *", "  ")):
            lines.append("")
        inside = bool(lines) and lines[-1].startswith(("- *", "  ")) and bool(line) and not line.startswith(("- ", " "))
        lines.append(f"  {line}" if inside else line)
    return "\n".join(lines)


def _excerpt(before: str, after: str) -> str:
    """The lines that differ, whatever their alignment; of many the first, and how many more there are."""
    compared = difflib.unified_diff(_lines(before), _lines(after), lineterm="", n=0)
    changed = [line for line in compared if not line.startswith(("---", "+++", "@@"))]
    lines = []
    for sign in "-+":
        part = [f"{sign} {line[1:]}" for line in changed if line[0] == sign]
        lines += [line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…" for line in part[:_MOST_LINES]]
        if len(part) > _MOST_LINES:
            lines.append(f"{sign} … and {len(part) - _MOST_LINES} more")
    return "\n".join(lines)


def _lines(text: str) -> list[str]:
    """The statements of a folded text without alignment and comments; each input is a line."""
    found: list[str] = []
    for line in text.splitlines():
        statement = " ".join(line.partition("  # ")[0].split())
        if statement.startswith("def step("):
            found += re.findall(r"\w+: \w+\[[^]]*\]", statement)
        elif statement and not statement.startswith("#"):
            found.append(statement)
    return found


def _times(count: int) -> str:
    return {0: "nowhere", 1: "once", 2: "twice"}.get(count, f"{count} times")


if __name__ == "__main__":
    print(document(), end="")
