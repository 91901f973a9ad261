"""One self-contained HTML page about a traced model: what ``graphsrt inspect --html FILE`` writes.

The page holds the pass table, the program after every pass with identical layers folded, the difference of any two
stages, a drawing of one layer, every weight with the slices that each rank reads, and figures. It opens from a file:
styles and script are inlined, and its content policy forbids any request.

Size does not grow with depth: a line of text is sent once however many layers and stages it stands in. Layer numbers
inside it are written relative to its own layer, and the script puts them back (:mod:`graphsrt.report.stages`).
"""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphsrt import ops
from graphsrt.dump import versions, weight_bytes
from graphsrt.program import NearMiss, PassReport
from graphsrt.report.figures import figures, size_text
from graphsrt.report.plan_figures import plan_figures
from graphsrt.report.stages import StageTexts
from graphsrt.report.weights import weights_data
from graphsrt.summary import kv_bytes, whole_bytes

if TYPE_CHECKING:
    from graphsrt.api import Traced

_LAYER_NUMBER = re.compile(r"(?<=[A-Za-z_]\.)\d+(?=\.|\b)")


def write_report(traced: Traced, path: str | Path) -> Path:
    """Write the page of a traced (or compiled) model into ``path``, overwriting it; returns the path.

    Raises ValueError if ``path`` is a folder or its folder does not exist.
    """
    path = Path(path).expanduser()
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"cannot write a report to {path}: name a file in a folder that exists")
    path.write_text(report_html(traced), encoding="utf-8")
    return path


def report_html(traced: Traced) -> str:
    """The page as text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("graphsrt.report", "")
    environment = Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    final = traced.stages.final
    texts = StageTexts()
    for name, program in traced.stages.programs:
        texts.add(name, program)
    data = {**texts.data(), "weights": weights_data(final), "ranks": final.mesh.get("tp", 1)}
    return environment.get_template("page.html").render(
        title=_title(traced),
        facts=_facts(traced),
        passes=[_pass_row(report) for report in final.history],
        slowest=max((report.milliseconds for report in final.history), default=0.0) or 1.0,
        total_ms=sum(report.milliseconds for report in final.history),
        stages=traced.stages.names,
        figures=figures(traced),
        plan=plan_figures(final),
        style=_asset("page.css"),
        script=_asset("page.js"),
        data=_json_for_script(data),
    )


def _asset(name: str) -> str:
    return resources.files("graphsrt.report").joinpath(name).read_text(encoding="utf-8")


def _json_for_script(data: Any) -> str:
    """JSON that cannot end the script element that it stands in."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _facts(traced: Traced) -> list[tuple[str, str]]:
    """What the header says: (term, text)."""
    final = traced.stages.final
    ranks = final.mesh.get("tp", 1)
    held, whole = sum(map(weight_bytes, final.weights.values())), whole_bytes(traced.stages)
    of_whole = f" of {size_text(whole)}" if ranks > 1 else ""
    facts = [
        ("model", traced.source.model_class.__name__),
        ("ranks", f"tp {ranks}"),
        ("dtype", str(final.dtype).removeprefix("torch.")),
        ("operators", f"{len(final.nodes):,}"),
        ("weights of a rank", f"{size_text(held)}{of_whole}"),
    ]
    if layers := final.constants.get("num_layers"):
        facts.insert(3, ("layers", str(layers)))
    if "kv_pool" in final.inputs:
        facts.append(("KV of a token", f"{size_text(kv_bytes(final))} on each rank"))
    if ranks > 1:
        reductions, gathers = ops.count_collectives(node.target for node in final.nodes)
        facts.append(("collectives of a step", f"{_count(reductions, 'reduction')}, {_count(gathers, 'gather')}"))
    if context := final.constants.get("context_length"):
        facts.append(("context", f"{context:,} tokens"))
    facts.append(("versions", ", ".join(f"{name} {version}" for name, version in versions().items())))
    return facts


def _title(traced: Traced) -> str:
    """The name that the model was given by; of a folder, its last part."""
    name = str(traced.source.name) or traced.stages.final.name
    return Path(name).expanduser().resolve().name if Path(name).expanduser().is_dir() else name


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _pass_row(report: PassReport) -> dict[str, Any]:
    """A pass with its near misses gathered by reason, layer numbers aside, the most frequent first."""
    by_reason: dict[str, list[NearMiss]] = {}
    for miss in report.near_misses:
        by_reason.setdefault(_LAYER_NUMBER.sub("*", miss.reason), []).append(miss)
    reasons = [
        (reason if len({miss.reason for miss in misses}) > 1 else misses[0].reason, misses)
        for reason, misses in sorted(by_reason.items(), key=lambda item: -len(item[1]))
    ]
    return {"report": report, "reasons": reasons}


__all__ = ["report_html", "write_report"]
