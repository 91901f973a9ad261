"""Every stage's text, each distinct line and each distinct layer once.

A *row* is one declaration or operator as separate fields. A *text* is the rows of a segment: a layer, or the operators
between layers. Inside a layer, its own number and its neighbours' are written as one character that says how far they
are from the layer (``chr(0xE400 + distance)``, of Unicode's private area), so that ``layers.2.mlp.up_proj`` in layer 2
and ``layers.3.mlp.up_proj`` in layer 3 are the same row. Nothing is lost: the page shows each layer exactly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import torch.fx as fx

from graphsrt import folding
from graphsrt.placement import Placement, Shard
from graphsrt.printer import call_text, name_text, recipe_text, tensor_type_text, type_text
from graphsrt.program import Input, Program, Weight, walk

RELATIVE = 0xE400
FARTHEST = 1000
"""A number farther from the layer's own than this is written out."""

NAME, TYPE, EXPRESSION, MADE_BY, SOURCE, MODULE, USES, COMPLETE = range(8)
"""Fields of a row. ``COMPLETE`` is the type with whole layouts where the short one hides them."""
_SEPARATOR = "\x1f"


class StageTexts:
    """Collects stages with :meth:`add`; :meth:`data` is what the page's script reads."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._texts: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        self._stages: list[dict[str, Any]] = []

    def add(self, name: str, program: Program) -> None:
        """The program as it is after the pass ``name``."""
        segments = folding._segments(program)
        found: list[tuple[int | None, str, int]] = []
        for segment in segments:
            prefix, layer = last_part(segment.prefix), segment.layer
            weights = folding._weights_of(program, segment.nodes)
            declared = tuple(self._row(_weight_fields(n, w), prefix, layer) for n, w in weights.items())
            operators = tuple(self._row(_operator_fields(program, node), prefix, layer) for node in segment.nodes)
            text = self._texts.setdefault((declared, operators), len(self._texts))
            found.append((layer, prefix, text))
        placements = {node.name: node.meta.get("placement") for node in program.graph.nodes if node.op == "placeholder"}
        inputs = [self._row(_input_fields(n, i, placements.get(n)), "", None) for n, i in program.inputs.items()]
        self._stages.append(
            {
                "name": name,
                "inputs": inputs,
                "segments": found,
                "blocks": _blocks(segments, [text for _, _, text in found]),
                "output": program.output.name,
                "operators": len(program.nodes),
            }
        )

    def data(self) -> dict[str, Any]:
        """``rows`` (fields as above), ``texts`` (weight rows, operator rows) and ``stages``."""
        return {
            "rows": [row.split(_SEPARATOR) for row in self._rows],
            "texts": list(self._texts),
            "stages": self._stages,
        }

    def _row(self, fields: tuple[str, ...], prefix: str, layer: int | None) -> int:
        text = _SEPARATOR.join(fields)
        if layer is not None:
            text = relative(text, prefix, layer)
        return self._rows.setdefault(text, len(self._rows))


def relative(text: str, prefix: str, layer: int) -> str:
    """``text`` with the numbers of layers as distances from ``layer``."""

    def mark(match: re.Match[str]) -> str:
        distance = int(match[1]) - layer
        return f"{prefix}{chr(RELATIVE + distance)}" if abs(distance) <= FARTHEST else match[0]

    text = re.sub(rf"(?<![\w]){re.escape(prefix)}(\d+)(?!\w)", mark, text)
    text = re.sub(rf"\blayer_id={layer}\b", f"layer_id={chr(RELATIVE)}", text)
    if '"' not in text:
        return text
    # A checkpoint may call the path of the layers otherwise than the model's code does.
    number = re.compile(rf"(?<=\.){layer}(?=\.)")
    return re.sub(
        r'"([^"]+)"', lambda m: m[0] if prefix in m[1] else f'"{number.sub(chr(RELATIVE), m[1], count=1)}"', text
    )


def last_part(prefix: str) -> str:
    """``layers.`` of ``model.layers.``: what checkpoint and module paths have in common."""
    return f"{prefix.rstrip('.').rpartition('.')[2]}." if prefix else ""


def _operator_fields(program: Program, node: fx.Node) -> tuple[str, ...]:
    val, placement = node.meta.get("val"), node.meta.get("placement")
    short = type_text(program.shapes, val, placement, short=True)
    complete = type_text(program.shapes, val, placement) if _is_uneven(placement) else ""
    uses = dict.fromkeys(name_text(used.name) for used in walk([list(node.args), list(node.kwargs.values())]))
    return (
        name_text(node.name), short, call_text(node, short=True), ", ".join(node.meta.get("made_by", ())),
        node.meta.get("source") or "", node.meta.get("module") or "", "\n".join(uses), complete,
    )  # fmt: skip


def _input_fields(name: str, item: Input, placement: Placement | None) -> tuple[str, ...]:
    declared = tensor_type_text(item.shape, item.dtype, placement, short=True)
    complete = tensor_type_text(item.shape, item.dtype, placement) if _is_uneven(placement) else ""
    return (name_text(name), declared, f"input({json.dumps(item.role)})", "", "", "", "", complete)


def _weight_fields(name: str, weight: Weight) -> tuple[str, ...]:
    declared = tensor_type_text(weight.shape, weight.dtype, weight.placement, short=True)
    uneven = _is_uneven(weight.placement)
    complete = tensor_type_text(weight.shape, weight.dtype, weight.placement) if uneven else ""
    return (name_text(name), declared, recipe_text(weight.recipe, short=True), "", "", "", "", complete)


def _is_uneven(placement: Placement | Iterable[Placement | None] | None) -> bool:
    """Whether the short form of a type hides how ranks divide it."""
    if isinstance(placement, (tuple, list)):
        return any(_is_uneven(item) for item in placement)
    return isinstance(placement, Shard) and not placement.layout.is_even


def _blocks(segments: list[folding._Segment], texts: list[int]) -> list[tuple[int, int, int]]:
    """(first segment, period, times): consecutive layers, or groups of ``period`` layers, with the same text."""
    blocks, at = [], 0
    while at < len(segments):
        period, times = folding._repetition(segments, texts, at, len(segments))
        blocks.append((at, period, times))
        at += period * times
    return blocks
