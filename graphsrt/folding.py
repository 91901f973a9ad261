"""A view of a program for people: identical layers folded into one, short layouts, aligned columns.

    # llama   {tp: 8}
    def step(tokens: i64[T], positions: i64[T]):

      # layers.0   (layers 1–31 identical)
      input_layernorm:  bf16[T, 4096] R       = rms_norm(embed_tokens, input_layernorm.weight, eps=1e-05)
      self_attn.q_proj: bf16[T, 4096/8] S(1)  = linear(input_layernorm, self_attn.q_proj.weight)

Names inside a layer are written without the layer's path. Two layers are identical when their text is the same after
the layer's number is taken out of it: names, weights with types and recipes, ``layer_id`` and ``kv_layer``. A value
that comes from the layer before stands for itself; anything else from outside must be the very same value, so that two
kinds of layers that differ only in a rope table are never folded. Layers may repeat in groups (sliding, full, sliding,
full). The view does not parse back; ``str(program)`` does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from graphsrt.placement import Run, Shard
from graphsrt.printer import call_text, recipe_text, returned_text, tensor_type_text, type_text
from graphsrt.program import Program, Weight, walk
from graphsrt.recipes import (
    BlockNumbers,
    Cat,
    Ckpt,
    DequantFp8,
    Mul,
    OnOwner,
    Quantized,
    Recipe,
    Repeat,
    ShardOf,
    ShardStart,
    Take,
    Transpose,
    span,
    within,
)

MAX_COLUMN = {"name": 44, "type": 40, "expression": 100}
"""Widest that a column is padded to; a longer entry pushes its own line only."""

_LAYER = re.compile(r"^((?:[^.]*[^.\d][^.]*\.)*)(\d+)(?=\.|$)")
_COLORS = {"header": "\x1b[1;36m", "type": "\x1b[33m", "comment": "\x1b[2m"}


@dataclass
class _Segment:
    """Consecutive operators of one layer, or (``layer`` None) of none."""

    layer: int | None
    prefix: str = ""
    nodes: list[fx.Node] = field(default_factory=list)

    @property
    def path(self) -> str:
        return f"{self.prefix}{self.layer}"


@dataclass
class _Row:
    name: str
    type: str
    expression: str
    comment: str = ""


def fold(
    program: Program,
    *,
    color: bool = False,
    width: int | None = None,
    layer: int | None = None,
    rank: int | None = None,
) -> str:
    """The folded view.

    ``layer`` shows that layer alone; ``rank`` shows local sizes and the parts of checkpoint tensors that this rank
    reads; ``width`` cuts longer lines; ``color`` adds ANSI colours. Raises ValueError for a layer or rank that the
    program does not have.
    """
    if rank is not None and not 0 <= rank < max(program.mesh.values(), default=1):
        raise ValueError(f"rank {rank} is not one of the {max(program.mesh.values(), default=1)} ranks")
    return _View(program, color, width, rank).text(layer)


class _View:
    def __init__(self, program: Program, color: bool, width: int | None, rank: int | None):
        self.program, self.color, self.width, self.rank = program, color, width, rank

    def text(self, layer: int | None) -> str:
        program = self.program
        segments = _segments(program)
        known = sorted({s.layer for s in segments if s.layer is not None})
        if layer is not None and layer not in known:
            raise ValueError(f"the program has no layer {layer}; its layers are {_span(known) if known else 'none'}")
        mesh = ", ".join(f"{axis}: {size}" for axis, size in program.mesh.items())
        after = program.history[-1].name if program.history else ""
        title = "   ".join(
            part for part in (f"after {after}" if after else "", program.name, f"{{{mesh}}}" if mesh else "",
                              "" if self.rank is None else f"rank {self.rank}") if part
        )  # fmt: skip
        inputs = ", ".join(f"{name}: {tensor_type_text(i.shape, i.dtype, None)}" for name, i in program.inputs.items())
        lines = [self._paint("header", f"# {title}"), f"def step({inputs}):"]
        if layer is not None:
            for chosen in (segment for segment in segments if segment.layer == layer):
                lines += self._segment(chosen, f"# {chosen.path}")
        else:
            texts = [_canonical(program, segments, index) for index in range(len(segments))]
            lines += self._block(segments, texts, 0, len(segments))
            lines += ["", f"  return {returned_text(program)}"]
        return "\n".join(self._cut(line) for line in lines) + "\n"

    def _cut(self, line: str) -> str:
        """At most ``width`` visible characters."""
        if not self.width or len(re.sub("\x1b\\[[0-9;]*m", "", line)) <= self.width:
            return line
        shown, left = "", self.width - 1
        for piece in re.split("(\x1b\\[[0-9;]*m)", line):
            if piece.startswith("\x1b"):
                shown += piece
            else:
                shown, left = shown + piece[:left], left - len(piece[:left])
        return shown + "…"

    def _block(self, segments: list[_Segment], texts: list[Any], start: int, end: int) -> list[str]:
        lines: list[str] = []
        at = start
        while at < end:
            period, times = _repetition(segments, texts, at, end)
            rest = segments[at + period : at + period * times]
            if times == 1:
                header = f"# {segments[at].path}" if segments[at].layer is not None else ""
                lines += self._segment(segments[at], header)
            elif period == 1:
                note = f"   ({_span([s.layer for s in rest])} identical)"
                lines += self._segment(segments[at], f"# {segments[at].path}{note}")
            else:
                group = [s.layer for s in segments[at : at + period]]
                note = f"# {_span(group)} repeat as {_span([s.layer for s in rest])}, {period} at a time"
                lines += ["", f"  {self._paint('header', note)}", *self._block(segments, texts, at, at + period)]
            at += period * times
        return lines

    def _segment(self, segment: _Segment, header: str) -> list[str]:
        names = _Names(segment)
        rows = [self._row(node, names) for node in segment.nodes]
        weights = _weights_of(self.program, segment.nodes)
        made = [self._weight_row(name, weight, names) for name, weight in weights.items()]
        lines = [""]
        if header:
            lines.append(f"  {self._paint('header', header)}")
        if made:
            lines += ["  weights:", *self._columns(made, "    ")]
        return lines + self._columns(rows, "  ")

    def _row(self, node: fx.Node, names: _Names) -> _Row:
        val, placement = node.meta.get("val"), node.meta.get("placement")
        if self.rank is not None and isinstance(placement, Shard) and isinstance(val, torch.Tensor):
            shown = tensor_type_text(self.program.shape(node), val.dtype, None)
        else:
            shown = type_text(self.program.shapes, val, placement, short=True)
        made_by = node.meta.get("made_by") or ("",)
        return _Row(names(node.name), shown, call_text(node, names=names.of_arguments(node), short=True), made_by[-1])

    def _weight_row(self, name: str, weight: Weight, names: _Names) -> _Row:
        if self.rank is None:
            shown = tensor_type_text(weight.shape, weight.dtype, weight.placement, short=True)
            return _Row(names(name), shown, _elide(recipe_text(weight.recipe, short=True), names))
        shown = tensor_type_text(weight.shape, weight.dtype, None)
        return _Row(names(name), shown, slices_text(weight.recipe, self.rank, len(weight.shape)))

    def _columns(self, rows: list[_Row], indent: str) -> list[str]:
        def widest(column: str) -> int:
            sizes = [len(getattr(row, column)) for row in rows]
            return max((size for size in sizes if size <= MAX_COLUMN[column]), default=0)

        name, kind, expression = widest("name") + 1, widest("type"), widest("expression")
        lines = []
        for row in rows:
            comment = f"  {self._paint('comment', f'# {row.comment}')}" if row.comment else ""
            body = row.expression.ljust(expression) if comment else row.expression
            label = f"{row.name}:".ljust(name)
            lines.append(f"{indent}{label} {self._paint('type', row.type.ljust(kind))} = {body}{comment}")
        return lines

    def _paint(self, what: str, text: str) -> str:
        return f"{_COLORS[what]}{text}\x1b[0m" if self.color else text


class _Names:
    """Names as a layer's text shows them: without the path of the layer."""

    def __init__(self, segment: _Segment):
        self.inside = re.compile(rf"^(?:.*\.)?{re.escape(segment.path)}\.(?=.)") if segment.layer is not None else None

    def __call__(self, name: str) -> str:
        return self.inside.sub("", name) if self.inside else name

    def of_arguments(self, node: fx.Node) -> dict[str, str]:
        return {used.name: self(used.name) for used in walk([list(node.args), list(node.kwargs.values())])}


def _elide(text: str, names: _Names) -> str:
    """A recipe whose checkpoint names are written without the layer's path."""

    def shorter(match: re.Match[str]) -> str:
        short = names(match.group(1))
        return f'"{short}"' if short == match.group(1) else f'"…{short}"'

    return re.sub(r'"([^"]+)"', shorter, text)


# -- layers -----------------------------------------------------------------------------------------------------------


def _layer(node: fx.Node) -> tuple[str, int] | None:
    """``("layers.", 3)`` for a value of ``layers.3``, by its name, else by its module."""
    match = _LAYER.match(node.name) or _LAYER.match(node.meta.get("module", ""))
    return (match.group(1), int(match.group(2))) if match else None


def _segments(program: Program) -> list[_Segment]:
    """The operators in order, cut where the layer changes.

    A value named after an earlier layer (a residual that a fusion returns) belongs to the layer that it stands in.
    """
    segments: list[_Segment] = []
    for node in program.nodes:
        found = _layer(node)
        last = segments[-1] if segments else None
        prefix, layer = found or ("", None)
        if last is not None and last.prefix == prefix and (layer == last.layer or (layer or 0) < (last.layer or 0)):
            last.nodes.append(node)
        else:
            segments.append(_Segment(layer, prefix, [node]))
    return segments


def _weights_of(program: Program, nodes: Iterable[fx.Node]) -> dict[str, Weight]:
    """The weights that the operators read, in order of first use."""
    found = {}
    for node in nodes:
        for used in walk([list(node.args), list(node.kwargs.values())]):
            if used.op == "get_attr":
                found[str(used.target)] = program.weights[str(used.target)]
    return found


def _canonical(program: Program, segments: list[_Segment], index: int) -> Any:
    """What two layers must have in common to be identical."""
    segment = segments[index]
    if segment.layer is None:
        return object()
    own = set(segment.nodes)
    is_first = all(other.layer is None for other in segments[:index])
    before = set(segments[index - 1].nodes) if index and segments[index - 1].layer is not None else set()
    number = re.compile(rf"(^|\.){segment.layer}(?=\.|$)")
    path = re.compile(rf"(^|\.)({re.escape(segment.prefix)})(\d+)(?=\.|$)")
    formals: dict[str, str] = {}
    own_layer = segment.layer

    def relative(name: str) -> str:
        """Layer numbers counted from this layer; a checkpoint may call the path of the layers otherwise."""
        counted, found = path.subn(lambda m: f"{m[1]}{m[2]}<n{int(m[3]) - own_layer:+d}>", name, count=1)
        return counted if found else number.sub(r"\1<n+0>", name, count=1)

    def named(used: fx.Node) -> str:
        if used in own:
            return relative(used.name)
        if used.op == "get_attr":
            weight = program.weights[str(used.target)]
            made = re.sub(r'"([^"]+)"', lambda m: f'"{relative(m.group(1))}"', recipe_text(weight.recipe))
            declared = tensor_type_text(weight.shape, weight.dtype, weight.placement)
            return f"{relative(used.name)}:{declared}={made}"
        first = is_first and all(user in own for user in used.users) and used.op == "call_function"
        if used in before or first:  # the value that layers hand on; the first layer has it from the embedding
            declared = type_text(program.shapes, used.meta.get("val"), used.meta.get("placement"))
            return formals.setdefault(used.name, f"<in{len(formals)}: {declared}>")
        return used.name

    rows = []
    for node in segment.nodes:
        names = {used.name: named(used) for used in walk([list(node.args), list(node.kwargs.values())])}
        text = re.sub(rf"\blayer_id={segment.layer}\b", "layer_id=<n>", call_text(node, names=names))
        text = re.sub(r"\bkv_layer=\d+\b", "kv_layer=<m>", text)  # counts the layers of one kind
        declared = type_text(program.shapes, node.meta.get("val"), node.meta.get("placement"))
        rows.append((relative(node.name), declared, text, node.meta.get("made_by", ())[-1:]))
    return tuple(rows)


def _repetition(segments: list[_Segment], texts: list[Any], start: int, end: int) -> tuple[int, int]:
    """(period, times): the group of layers from ``start`` that, repeated, covers most; (1, 1) if nothing repeats."""
    best = (1, 1)
    if segments[start].layer is None:
        return best
    run = start  # layers count up without a gap as far as this
    while run + 1 < end and _follows(segments[run], segments[run + 1]):
        run += 1
    length = run - start + 1
    for period in range(1, length // 2 + 1):
        same = 0
        while period + same < length and texts[start + same] == texts[start + period + same]:
            same += 1
        times = 1 + same // period
        if times > 1 and period * times > best[0] * best[1]:
            best = (period, times)
    return best


def _follows(one: _Segment, other: _Segment) -> bool:
    return one.layer is not None and other.layer == one.layer + 1 and other.prefix == one.prefix


def _span(layers: list[Any]) -> str:
    """``layer 1`` or ``layers 1–31``."""
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}–{layers[-1]}"


# -- what a rank reads ------------------------------------------------------------------------------------------------


def slices_text(recipe: Recipe, rank: int, ndim: int) -> str:
    """The parts of checkpoint tensors that a rank's weight is made of: ``q_proj.weight[0:512, :]``."""
    return _slices(recipe, rank, ndim, {})


def _slices(recipe: Recipe, rank: int, ndim: int, window: dict[int, list[tuple[int, int, bool]]]) -> str:
    """``window``: for a dimension, the parts (start, end, whether kept) that whoever asks wants of it."""
    match recipe:
        case Ckpt(name):
            return _taken(name, ndim, window)
        case ShardOf(x, dim, layout, unowned):
            mine = [(r.start, r.start + r.length, r.owned or unowned != "zero") for r in layout.runs[rank]]
            if dim in window or not isinstance(
                x, (Ckpt, Transpose, Mul, DequantFp8, Quantized, Repeat, BlockNumbers, ShardOf, Take)
            ):
                return _taken(f"({_slices(recipe.x, rank, ndim, {})})", ndim, {**window, dim: mine})
            return _slices(x, rank, ndim, {**window, dim: mine})
        case Take(x, dim, addresses):
            mine = [(r.start, r.start + r.length, r.owned or recipe.unowned != "zero") for r in map(span, addresses)]
            if dim in window:
                wanted = [Run(start, end - start, kept) for start, end, kept in window[dim]]
                mine = [(r.start, r.start + r.length, r.owned) for r in within(addresses, wanted)]
            return _slices(x, rank, ndim, {**window, dim: mine})
        case Transpose(x, dim0, dim1):
            swapped = {{dim0: dim1, dim1: dim0}.get(dim, dim): parts for dim, parts in window.items()}
            return f"transpose({_slices(x, rank, ndim, swapped)}, {dim0}, {dim1})"
        case Mul(x, by, dim):
            along = {0: window[dim]} if dim in window else {}
            return f"mul({_slices(x, rank, ndim, window)}, {_slices(by, rank, 1, along)}, dim={dim})"
        case DequantFp8(x, scale):
            return f"dequant_fp8({_slices(x, rank, ndim, window)}, {recipe_text(scale, short=True)})"
        case Quantized(x, part):
            inside = {} if 1 in window else window  # columns are cut from whole rows
            inner = f'quantized({_slices(x, rank, 2, inside)}, "{part}")'
            return inner if inside else _taken(inner, ndim, window)
        case Repeat(x, dim, times):
            inner = f"repeat({_slices(x, rank, ndim, {})}, dim={dim}, times={times})"
            return _taken(inner, ndim, window)
        case BlockNumbers(size, block):
            return _taken(f"block_numbers({size}, block={block})", ndim, window)
        case Cat(parts, dim):
            inner = ", ".join(_slices(part, rank, ndim, {}) for part in parts)
            return _taken(f"cat([{inner}], dim={dim})", ndim, window)
        case OnOwner(x):
            inner = _slices(x, rank, ndim, window)
            return inner if rank == 0 else f"0 · {inner}"
        case ShardStart(layout):
            first = layout.runs[rank][0]
            return str(first.start if first.owned else layout.size)
    return recipe_text(recipe, short=True)


def _taken(name: str, ndim: int, window: dict[int, list[tuple[int, int, bool]]]) -> str:
    if not window:
        return name
    several = [dim for dim, parts in window.items() if len(parts) > 1]

    def one(choice: Callable[[int], tuple[int, int, bool]]) -> str:
        index, kept = [], True
        for dim in range(ndim):
            if dim in window:
                start, end, keep = choice(dim)
                index.append(f"{start}:{end}")
                kept = kept and keep
            else:
                index.append(":")
        return f"{'' if kept else '0 · '}{name}[{', '.join(index)}]"

    if not several:
        return one(lambda dim: window[dim][0])
    if len(several) > 1:
        whole = ", ".join("+".join(f"{a}:{b}" for a, b, _ in window[d]) if d in window else ":" for d in range(ndim))
        return f"{name}[{whole}]"
    (dim,) = several
    pieces = [one(lambda d, part=part: part if d == dim else window[d][0]) for part in window[dim]]  # type: ignore[misc]
    return f"cat([{', '.join(pieces)}], dim={dim})"


__all__ = ["fold", "slices_text"]
