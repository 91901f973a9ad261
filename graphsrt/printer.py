"""Program → text. The text is complete: :func:`graphsrt.text_parser.parse_program` makes the same program of it.

    program llama {tp: 8}
    constants context_length=64, vocab_size=128256

    inputs:
      tokens: i64[T] R = input("tokens")

    weights:
      lm_head.weight: bf16[128256/8, 4096] S(0) = shard(ckpt("lm_head.weight"), dim=0, layout=128256/8, unowned="copy")

    step:
      norm: bf16[T, 4096] R = graphsrt.rms_norm(h, norm.weight, eps=1e-05, cast="before_weight")  # by a · x.py:71
      return lm_head

    history:
      pass name="normalize", fired=12, expected=None, nodes_before=95, nodes_after=83, milliseconds=3.5

Every declaration is ``name: type = expression``. A type is a dtype, the shape of the *local* tensor and a placement; a
sharded dimension is written as its layout, ``4096/8`` or with every rank's runs, divided tokens as ``T/8``. Floats are
written by ``repr``, strings as JSON. A name that could be taken for something else stands in backticks. The comment of
an operator holds the passes that made it, its line in the model's code, and ``in`` its module path unless the name says
it.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.fx as fx

from graphsrt import ops
from graphsrt.placement import Layout, Partial, Placement, Replicate, Shard, ShardTokens
from graphsrt.program import Input, PassReport, Program, Shapes, Weight, aten, target_name
from graphsrt.recipes import (
    BlockNumbers,
    Cat,
    Ckpt,
    Const,
    DequantFp8,
    Fill,
    Mul,
    OnOwner,
    Quantized,
    Recipe,
    Repeat,
    RopeTable,
    ShardOf,
    ShardStart,
    Take,
    Transpose,
)

DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "f64": torch.float64,
    "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64,
    "u8": torch.uint8, "u16": torch.uint16, "u32": torch.uint32, "u64": torch.uint64,
    "bool": torch.bool, "c64": torch.complex64, "c128": torch.complex128,
    "f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2, "f8e8m0": torch.float8_e8m0fnu,
    "f8e4m3fnuz": torch.float8_e4m3fnuz, "f8e5m2fnuz": torch.float8_e5m2fnuz, "f4e2m1x2": torch.float4_e2m1fn_x2,
}  # fmt: skip
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
TORCH_LITERALS: dict[str, Any] = {
    "torch.strided": torch.strided,
    "torch.contiguous_format": torch.contiguous_format,
    "torch.preserve_format": torch.preserve_format,
    "torch.channels_last": torch.channels_last,
}
RESERVED = {*DTYPES, "None", "True", "False", "inf", "nan", "return", "device", "torch"}
NAME = r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*"
SEPARATOR = " · "
_NAME = re.compile(NAME)
_PLAIN_WORD = re.compile(r"[\w.:<>/+-]+", re.ASCII)


def dtype_text(dtype: torch.dtype) -> str:
    """``bf16`` for ``torch.bfloat16``; raises ValueError for a dtype that text has no word for."""
    if dtype not in _DTYPE_NAMES:
        raise ValueError(f"program text has no word for {dtype}")
    return _DTYPE_NAMES[dtype]


@lru_cache(maxsize=65536)
def name_text(name: str) -> str:
    """The name, in backticks if it could be taken for something else."""
    if _NAME.fullmatch(name) and name.partition(".")[0] not in RESERVED:
        return name
    if "`" in name or "\n" in name:
        raise ValueError(f"a value cannot be called {name!r}")
    return f"`{name}`"


@lru_cache(maxsize=4096)
def layout_text(layout: Layout) -> str:
    """The complete form of a layout; cached, since every layer repeats the same few."""
    return str(layout)


# -- types ------------------------------------------------------------------------------------------------------------


def type_text(shapes: Shapes, val: Any, placement: Any, *, short: bool = False) -> str:
    """``bf16[T, 4096/8] S(1)`` of a fake tensor, ``(a, b)`` of a tuple, ``none`` of None; ``short``: layout labels."""
    if val is None:
        return "none"
    if isinstance(val, (tuple, list)):
        own = placement if isinstance(placement, (tuple, list)) else [placement] * len(val)
        return f"({', '.join(type_text(shapes, v, p, short=short) for v, p in zip(val, own))})"
    return tensor_type_text([shapes.name(size) for size in val.shape], val.dtype, placement, short=short)


def tensor_type_text(
    shape: Sequence[int | str], dtype: torch.dtype, placement: Placement | None, *, short: bool = False
) -> str:
    """The type of a tensor of the given local shape."""
    sizes = [str(size) for size in shape]
    if isinstance(placement, Shard) and placement.dim < len(sizes):
        layout = placement.layout
        text = layout.label() if short else layout_text(layout)
        # A program that is broken must print as well: the local size stands before a layout that does not fit it.
        sizes[placement.dim] = text if shape[placement.dim] == layout.local_size else f"{sizes[placement.dim]}?{text}"
    if isinstance(placement, ShardTokens) and sizes[:1] not in ([], [placement.local_size]):
        sizes[0] = f"{sizes[0]}?{placement.local_size}"
    return f"{dtype_text(dtype)}[{', '.join(sizes)}]{placement_text(placement)}"


def placement_text(placement: Placement | None) -> str:
    """`` R``, `` S(1)``, `` P(sum)``, or nothing before sharding."""
    match placement:
        case None:
            return ""
        case Replicate() | Shard() | ShardTokens() | Partial():
            return f" {placement}"
    raise ValueError(f"{placement!r} is no placement")


# -- expressions ------------------------------------------------------------------------------------------------------


def literal_text(value: Any, *, names: dict[str, str] | None = None) -> str:
    """An argument as text; ``names`` replaces the names of nodes. Raises ValueError for what text cannot say."""
    if isinstance(value, fx.Node):
        return names[value.name] if names and value.name in names else name_text(value.name)
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return float.__repr__(value)
    if isinstance(value, list):
        return f"[{', '.join(literal_text(item, names=names) for item in value)}]"
    if isinstance(value, tuple):
        items = ", ".join(literal_text(item, names=names) for item in value)
        return f"({items},)" if len(value) == 1 else f"({items})"
    if isinstance(value, torch.dtype):
        return dtype_text(value)
    if isinstance(value, torch.device):
        return f"device({json.dumps(str(value))})"
    if str(value) in TORCH_LITERALS and isinstance(value, (torch.layout, torch.memory_format)):
        return str(value)
    raise ValueError(f"program text cannot say {value!r} ({type(value).__name__})")


def call_text(node: fx.Node, *, names: dict[str, str] | None = None, short: bool = False) -> str:
    """``op(args, kw=…)`` of an operator node; ``short`` leaves namespace and overload away."""
    target = target_name(node.target)
    if short and "." in target:
        target = target.split(".")[1]
    arguments = [literal_text(a, names=names) for a in node.args]
    arguments += [f"{key}={literal_text(value, names=names)}" for key, value in node.kwargs.items()]
    return f"{target}({', '.join(arguments)})"


def recipe_text(recipe: Recipe, *, short: bool = False) -> str:
    """A recipe as the call that makes it. ``short``: labels of layouts, defaults left away."""

    def layout_of(layout: Layout) -> str:
        return layout.label() if short else layout_text(layout)

    def text(recipe: Recipe) -> str:
        match recipe:
            case Ckpt(name):
                return f"ckpt({json.dumps(name)})"
            case ShardOf(x, dim, layout, unowned):
                last = "" if short and unowned == "copy" else f", unowned={json.dumps(unowned)}"
                return f"shard({text(x)}, dim={dim}, layout={layout_of(layout)}{last})"
            case Take(x, dim, addresses, unowned):
                spans = ", ".join(json.dumps(span) for span in addresses)
                return f"take({text(x)}, dim={dim}, addresses=[{spans}], unowned={json.dumps(unowned)})"
            case Cat(parts, dim):
                return f"cat([{', '.join(text(part) for part in parts)}], dim={dim})"
            case Transpose(x, dim0, dim1):
                return f"transpose({text(x)}, {dim0}, {dim1})"
            case Mul(x, by, dim):
                return f"mul({text(x)}, {text(by)}, dim={dim})"
            case DequantFp8(x, scale, shape, block, inputs, input_scale, largest):
                static = "" if input_scale is None else f", input_scale={text(input_scale)}"
                bound = "" if largest is None else f", largest={literal_text(float(largest))}"
                sizes = "" if short else f", shape={list(shape)}, block={list(block)}"
                return f"dequant_fp8({text(x)}, {text(scale)}{sizes}, inputs={json.dumps(inputs)}{static}{bound})"
            case Quantized(x, part):
                return f"quantized({text(x)}, {json.dumps(part)})"
            case Repeat(x, dim, times, size):
                return f"repeat({text(x)}, dim={dim}, times={times}, size={size})"
            case BlockNumbers(size, block):
                return f"block_numbers({size}, block={block})"
            case Fill(shape, number):
                return f"fill({list(shape)}, {literal_text(float(number))})"
            case OnOwner(x):
                return f"on_owner({text(x)})"
            case ShardStart(layout):
                return f"shard_start({layout_of(layout)})"
            case Const(shape, values):
                shown = values[:3] if short else values
                more = ", …" if len(shown) < len(values) else ""
                return f"const({list(shape)}, [{', '.join(float.__repr__(float(v)) for v in shown)}{more}])"
            case RopeTable(inv_freq, scaling, max_positions):
                shown = inv_freq[:3] if short else inv_freq
                more = ", …" if len(shown) < len(inv_freq) else ""
                frequencies = ", ".join(float.__repr__(float(v)) for v in shown)
                return (
                    f"rope_table(inv_freq=[{frequencies}{more}], scaling={literal_text(float(scaling))}, "
                    f"max_positions={max_positions})"
                )
        raise ValueError(f"program text cannot say the recipe {recipe!r}")

    return text(recipe)


# -- provenance -------------------------------------------------------------------------------------------------------


def derived_module(name: str, target: Any) -> str:
    """The module path that a value's name implies: a projection's name is its module, others add the operator."""
    if target in (aten.linear.default, aten.embedding.default, ops.fp8_linear, ops.int8_linear, ops.int4_linear):
        return name
    return name.rpartition(".")[0]


def provenance_text(node: fx.Node) -> str:
    """`` # by passes · file:line · in module``, as much of it as there is to say."""
    module = node.meta.get("module", "")
    parts = []
    if node.meta.get("made_by"):
        parts.append(f"by {', '.join(_word(name) for name in node.meta['made_by'])}")
    if node.meta.get("source"):
        parts.append(_word(node.meta["source"]))
    if module != derived_module(node.name, node.target):
        parts.append(f"in {_word(module)}")
    return f"  # {SEPARATOR.join(parts)}" if parts else ""


def _word(text: str) -> str:
    return text if _PLAIN_WORD.fullmatch(text) else json.dumps(text)


# -- whole ------------------------------------------------------------------------------------------------------------


def print_program(program: Program, *, history: bool = True) -> str:
    """The complete text. Without ``history`` it holds nothing that differs between two runs (no times)."""
    mesh = ", ".join(f"{name_text(axis)}: {size}" for axis, size in program.mesh.items())
    constants = ", ".join(f"{name_text(name)}={literal_text(value)}" for name, value in program.constants.items())
    lines = [f"program {name_text(program.name)} {{{mesh}}}", f"constants {constants}".rstrip(), "", "inputs:"]
    placements = {node.name: node.meta.get("placement") for node in program.graph.nodes if node.op == "placeholder"}
    lines += [f"  {input_line(name, item, placements.get(name))}" for name, item in program.inputs.items()]
    lines += ["", "weights:"]
    lines += [f"  {weight_line(name, weight)}" for name, weight in program.weights.items()]
    lines += ["", "step:"]
    for node in program.graph.nodes:
        if node.op == "call_function":
            lines.append(f"  {operator_line(program, node)}")
        elif node.op == "output":
            lines.append(f"  return {returned_text(program)}")
    if history:
        lines += ["", "history:"]
        for report in program.history:
            lines += [f"  {line}" for line in history_lines(report)]
    return "\n".join(lines) + "\n"


def returned_text(program: Program) -> str:
    """What a program returns: a value, and others by name."""
    logits, *others = program.outputs.items()
    return ", ".join([name_text(logits[1].name), *(f"{name}={name_text(value.name)}" for name, value in others)])


def input_line(name: str, item: Input, placement: Placement | None) -> str:
    """The declaration of an input."""
    return f"{name_text(name)}: {tensor_type_text(item.shape, item.dtype, placement)} = input({json.dumps(item.role)})"


def weight_line(name: str, weight: Weight) -> str:
    """The declaration of a weight."""
    declared = tensor_type_text(weight.shape, weight.dtype, weight.placement)
    return f"{name_text(name)}: {declared} = {recipe_text(weight.recipe)}"


def operator_line(program: Program, node: fx.Node) -> str:
    """One operator with its type and provenance. A value without inferred type (inside a pass) shows ``?``."""
    known = "val" in node.meta
    declared = type_text(program.shapes, node.meta["val"], node.meta.get("placement")) if known else "?"
    return f"{name_text(node.name)}: {declared} = {call_text(node)}{provenance_text(node)}"


def history_lines(report: PassReport) -> list[str]:
    """One line for the pass, one for each of its near misses and notes."""

    def fields(**values: Any) -> str:
        return ", ".join(f"{key}={literal_text(value)}" for key, value in values.items())

    counts = fields(
        name=report.name, fired=report.fired, expected=report.expected, nodes_before=report.nodes_before,
        nodes_after=report.nodes_after, milliseconds=float(report.milliseconds),
    )  # fmt: skip
    lines = [f"pass {counts}"]
    lines += ["near_miss " + fields(node=m.node, module=m.module, reason=m.reason) for m in report.near_misses]
    lines += ["note " + literal_text(note) for note in report.notes]
    return lines


def diff_text(
    before: Program | str,
    after: Program | str,
    name_before: str = "before",
    name_after: str = "after",
    *,
    context: int = 3,
) -> str:
    """Unified diff of two programs' text without history; empty if they are the same."""

    def lines(program: Program | str) -> list[str]:
        text = program if isinstance(program, str) else print_program(program, history=False)
        return text.splitlines(keepends=True)

    return "".join(difflib.unified_diff(lines(before), lines(after), name_before, name_after, n=context))


def strides_of(program: Program) -> dict[str, Any]:
    """What a program's types do not say: strides of values that are not contiguous, symbols by name; of a tuple, a
    list with None for the contiguous ones."""

    def strides(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            found = [strides(item) for item in value]
            return found if any(item is not None for item in found) else None
        if value is None or value.is_contiguous():
            return None
        return [program.shapes.name(stride) for stride in value.stride()]

    found = {node.name: strides(node.meta["val"]) for node in program.nodes}
    return {name: item for name, item in found.items() if item is not None}


def parse_program(text: str) -> Program:
    """The inverse of :func:`print_program`; see :mod:`graphsrt.text_parser`."""
    from graphsrt.text_parser import parse_program as parse

    return parse(text)
