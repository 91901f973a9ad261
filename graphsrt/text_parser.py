"""Text → program: the inverse of :mod:`graphsrt.printer`, which shows the format.

Nothing is evaluated as Python. Shapes are inferred anew and must agree with what each line declares, so a text that was
edited or damaged is refused where it is wrong. Errors are CompileErrors with the number and the text of the line.
"""

from __future__ import annotations

import difflib
import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.fx as fx

from graphsrt.errors import CompileError, explain
from graphsrt.placement import TOKENS, Layout, Partial, Placement, R, Shard, ShardTokens
from graphsrt.printer import DTYPES, NAME, SEPARATOR, derived_module, type_text
from graphsrt.program import (
    LOGITS,
    Declared,
    DeclaredShapes,
    Input,
    NearMiss,
    PassReport,
    Program,
    Weight,
    target_from_name,
)
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
from graphsrt.text_line import Line, parse_layout

# recipe name -> its class, and (argument, type, default) in order; a default of ... means none
_RECIPES: dict[str, tuple[type[Recipe], tuple[tuple[str, type, Any], ...]]] = {
    "ckpt": (Ckpt, (("name", str, ...),)),
    "shard": (ShardOf, (("x", Recipe, ...), ("dim", int, ...), ("layout", Layout, ...), ("unowned", str, "copy"))),
    "take": (Take, (("x", Recipe, ...), ("dim", int, ...), ("addresses", list, ...), ("unowned", str, "copy"))),
    "cat": (Cat, (("parts", list, ...), ("dim", int, ...))),
    "transpose": (Transpose, (("x", Recipe, ...), ("dim0", int, ...), ("dim1", int, ...))),
    "mul": (Mul, (("x", Recipe, ...), ("by", Recipe, ...), ("dim", int, ...))),
    "dequant_fp8": (
        DequantFp8,
        (
            ("x", Recipe, ...),
            ("scale", Recipe, ...),
            ("shape", list, ...),
            ("block", list, ...),
            ("inputs", str, "plain"),
            ("input_scale", Recipe, None),
            ("largest", float, None),
        ),
    ),
    "quantized": (Quantized, (("x", Recipe, ...), ("part", str, ...))),
    "repeat": (Repeat, (("x", Recipe, ...), ("dim", int, ...), ("times", int, ...), ("size", int, ...))),
    "block_numbers": (BlockNumbers, (("size", int, ...), ("block", int, ...))),
    "fill": (Fill, (("shape", list, ...), ("value", float, ...))),
    "on_owner": (OnOwner, (("x", Recipe, ...),)),
    "shard_start": (ShardStart, (("layout", Layout, ...),)),
    "const": (Const, (("shape", list, ...), ("values", list, ...))),
    "rope_table": (RopeTable, (("inv_freq", list, ...), ("scaling", float, ...), ("max_positions", int, ...))),
}


# -- types ------------------------------------------------------------------------------------------------------------


def _split(text: str) -> Iterator[str]:
    """The items between top-level commas."""
    depth, start = 0, 0
    for index, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            yield text[start:index].strip()
            start = index + 1
    if text[start:].strip():
        yield text[start:].strip()


_TYPE_EXAMPLE = "a type such as bf16[T, 4096/8] S(1)"
_TOKEN_BLOCKS = re.compile(rf"{TOKENS}/([1-9]\d*)")
_TYPE = re.compile(r"(\w+)\[(.*)\]\s*(?:(R)|S\((\d+)\)|P\((sum|max)\))?$")


@lru_cache(maxsize=65536)
def _type(text: str) -> tuple[torch.dtype, tuple[int | str, ...], Placement | None]:
    """dtype, local shape and placement of one tensor's type. Raises ValueError."""
    match = _TYPE.fullmatch(text)
    if match is None or match.group(1) not in DTYPES:
        raise ValueError(f"{text!r} is no type")
    shape: list[int | str] = [int(item) if item.lstrip("-").isdigit() else item for item in _split(match.group(2))]
    placement: Placement | None = R if match.group(3) else Partial(match.group(5)) if match.group(5) else None
    if match.group(4):
        dim = int(match.group(4))
        if dim >= len(shape) or "/" not in str(shape[dim]):
            raise ValueError(f"{text!r} says S({dim}), but dimension {dim} is no layout")
        local, _, layout = str(shape[dim]).rpartition("?")
        tokens = _TOKEN_BLOCKS.fullmatch(layout)
        if tokens and dim == 0:
            placement = ShardTokens(int(tokens.group(1)))
            shape[0] = local or placement.local_size
        else:
            placement = Shard(dim, parse_layout(layout))
            shape[dim] = int(local) if local else placement.layout.local_size
    return DTYPES[match.group(1)], tuple(shape), placement


def _placements(text: str) -> Any:
    """The placement, or tuple of placements, in the type of an operator's result; None where there is none."""
    if text == "none":
        return None
    if text.startswith("("):
        parts = tuple(_placements(part) for part in _split(text[1:].removesuffix(")")))
        return None if all(part is None for part in parts) else parts
    return _type(text)[2]


def _declared(text: str, strides: Any) -> Any:
    """The value, or tuple of values, that a type and the strides beside it declare."""
    if text == "none":
        return None
    if text.startswith("("):
        parts = list(_split(text[1:].removesuffix(")")))
        return tuple(_declared(part, s) for part, s in zip(parts, strides or [None] * len(parts), strict=True))
    dtype, shape, _ = _type(text)
    return Declared(shape, dtype, None if strides is None else tuple(strides))


# -- statements -------------------------------------------------------------------------------------------------------


class _Parser:
    def __init__(self, text: str, strides: Mapping[str, Any] | None = None):
        """``strides``: of values that are not contiguous, in a program whose types are taken as they stand."""
        self.lines = [Line(number, line) for number, line in enumerate(text.split("\n"), 1)]
        self.lines = [line for line in self.lines if line.text and not line.text.startswith("#")]
        self.values: dict[str, fx.Node] = {}
        self.strides = strides
        self.program = Program("", shapes=None if strides is None else DeclaredShapes())

    def parse(self) -> Program:
        if not self.lines:
            raise CompileError(explain("an empty text is no program", expected="program <name> {<axis>: <size>}"))
        sections: dict[str, Callable[[Line], None]] = {
            "inputs:": self.input, "weights:": self.weight, "step:": self.operator, "history:": self.history,
        }  # fmt: skip
        read: Callable[[Line], None] = self.header
        returned = False
        for line in self.lines:
            if line.text in sections:
                read = sections[line.text]
            elif read == self.operator and line.text.startswith("return "):
                self.result(line)
                returned = True
            elif read == self.operator and returned:
                line.error("an operator stands after the program's return")
            else:
                read(line)
        if not returned:
            self.lines[-1].error("the program does not return anything", expected="return <value> at the end of step:")
        self.program.lint()
        return self.program

    def header(self, line: Line) -> None:
        line.tokenize()
        keyword = line.name("the header")
        if keyword == "program" and not self.program.name:
            self.program.name = line.name("the header")
            line.expect("{", "the mesh")
            for axis, size in line.items("}", lambda: self.axis(line), "the mesh"):
                self.program.mesh[axis] = size
        elif keyword == "constants" and self.program.name:
            args, self.program.constants = line.arguments("", line.literal, "the constants")
            if args:
                line.error("a constant without a name", expected="name=value")
        else:
            expected = "program <name> {<axis>: <size>}, then constants"
            line.error("this is not how a program begins", expected=expected, got=keyword)
        line.end()

    def axis(self, line: Line) -> tuple[str, int]:
        name = line.name("the mesh")
        line.expect(":", "the mesh")
        size = line.literal()
        if type(size) is not int or size < 1:
            line.error(f"mesh axis {name} has no size", expected="a positive integer", got=repr(size))
        return name, size

    def declaration(self, line: Line, what: str) -> tuple[str, str]:
        """``name: type = `` before the expression, which is tokenized; the name must be new."""
        match = re.match(rf"(?:`([^`]*)`|({NAME}))\s*:\s*", line.text)
        if match is None:
            line.error(f"syntax error in {what}", expected="name: type = expression", got=line.text.split(" ")[0])
        name = match.group(1) if match.group(2) is None else match.group(2)
        equals = line.text.find(" = ", match.end())
        if equals < 0:
            line.error(f"syntax error in {what}", expected="' = ' after the type", got="the end of the line")
        if name in self.values:
            line.error(f"two values are called {name}", hint="every input, weight and value needs a name of its own")
        line.tokenize(equals + 3)
        return name, line.text[match.end() : equals].strip()

    def type(self, line: Line, text: str) -> tuple[torch.dtype, tuple[int | str, ...], Placement | None]:
        try:
            return _type(text)
        except (ValueError, ZeroDivisionError) as error:
            line.error(f"a type that cannot be read: {error}", expected=_TYPE_EXAMPLE, got=text)

    def input(self, line: Line) -> None:
        name, declared = self.declaration(line, "an input")
        dtype, shape, placement = self.type(line, declared)
        if line.name("an input") != "input":
            line.error("syntax error in an input", expected='input("role")', got=line.tokens[0][1])
        args, kwargs = line.call(line.literal, "an input")
        if kwargs or len(args) != 1 or not isinstance(args[0], str):
            line.error("an input has one argument, its role", expected='input("role")')
        line.end()
        node = self.program.add_input(name, Input(shape, dtype, args[0]))
        if placement is not None:
            node.meta["placement"] = placement
        self.values[name] = node

    def weight(self, line: Line) -> None:
        name, declared = self.declaration(line, "a weight")
        dtype, shape, placement = self.type(line, declared)
        sizes = tuple(size for size in shape if isinstance(size, int))
        if len(sizes) != len(shape):
            line.error("a weight's shape is fixed", expected="integers and layouts", got=declared)
        recipe = self.recipe(line)
        line.end()
        self.values[name] = self.program.add_weight(name, Weight(sizes, dtype, recipe, placement))

    def recipe(self, line: Line) -> Any:
        """A recipe, or one of its arguments."""

        def named(name: str) -> Recipe:
            if name not in _RECIPES:
                line.error(f"unknown recipe {name}", expected=", ".join(_RECIPES), got=name)
            cls, parameters = _RECIPES[name]
            args, kwargs = line.call(lambda: line.value(named), name)
            found = dict(zip((p[0] for p in parameters), args)) | kwargs
            usage = f"{name}({', '.join(p[0] if p[2] is ... else f'{p[0]}={p[2]!r}' for p in parameters)})"
            known = {p[0] for p in parameters}
            if len(args) > len(parameters) or len(found) != len(args) + len(kwargs) or not found.keys() <= known:
                line.error(f"{name} does not have these arguments", expected=usage)
            bound: dict[str, Any] = {}
            for parameter, kind, default in parameters:
                value: Any = found.get(parameter, default)
                value = float(value) if kind is float and type(value) is int else value
                if value is ... or (value is not default and (not isinstance(value, kind) or isinstance(value, bool))):
                    got = "nothing" if value is ... else repr(value)
                    line.error(f"{parameter} of {name} is not {kind.__name__.lower()}", expected=usage, got=got)
                bound[parameter] = _tuple(line, name, value) if isinstance(value, list) else value
            return cls(**bound)

        result = line.value(named)
        if not isinstance(result, Recipe):
            line.error("a weight is made by a recipe", expected=", ".join(_RECIPES), got=repr(result))
        return result

    def operator(self, line: Line) -> None:
        name, declared = self.declaration(line, "an operator")
        context = line.name("an operator")
        target = self.target(line, context)
        args, kwargs = line.call(lambda: line.value(lambda used: self.node(line, used)), context)
        line.end()
        node = self.program.graph.create_node("call_function", target, tuple(args), kwargs)
        node.name = name
        node.meta = {"made_by": (), "source": "", "module": derived_module(name, target), **_provenance(line.comment)}
        try:
            placement = _placements(declared) if declared != "?" else None
        except (ValueError, ZeroDivisionError) as error:
            line.error(f"a type that cannot be read: {error}", expected=_TYPE_EXAMPLE, got=declared)
        if placement is not None:
            node.meta["placement"] = placement
        self.values[name] = node
        if self.strides is not None:
            node.meta["val"] = _declared(declared, self.strides.get(name))
            return
        try:
            self.program.infer([node])
        except CompileError as error:
            line.error(str(error))
        inferred = type_text(self.program.shapes, node.meta["val"], placement)
        if declared != "?" and inferred.replace(" ", "") != declared.replace(" ", ""):
            line.error(f"{name} is declared with another type than its operator gives", expected=inferred, got=declared)

    def target(self, line: Line, name: str) -> Callable[..., Any]:
        try:
            target = target_from_name(name)
        except CompileError:
            target = None
        if target is operator.getitem or isinstance(target, torch._ops.OpOverload):
            return target
        namespace, _, rest = name.partition(".")
        known = [f"{namespace}.{o}" for o in dir(getattr(torch.ops, namespace or "aten")) if not o.startswith("_")]
        packet = getattr(getattr(torch.ops, namespace), rest.partition(".")[0], None) if rest else None
        if isinstance(packet, torch._ops.OpOverloadPacket):
            known = [f"{namespace}.{rest.partition('.')[0]}.{o}" for o in packet.overloads()]
        close = difflib.get_close_matches(name, known, 3)
        line.error(f"unknown operator {name}", expected=" or ".join(close) or "namespace.operator.overload", got=name)

    def node(self, line: Line, name: str) -> fx.Node:
        if name not in self.values:
            close = difflib.get_close_matches(name, self.values, 1)
            hint = f"did you mean {close[0]}?" if close else None
            line.error(f"no value is called {name} before this line", got=name, hint=hint)
        return self.values[name]

    def result(self, line: Line) -> None:
        line.tokenize()
        line.name("return")
        if any(node.op == "output" for node in self.program.graph.nodes):
            line.error("the program returns twice")
        outputs = {LOGITS: self.node(line, line.name("return"))}
        while line.accept(","):
            name = line.name("the name of a result")
            line.expect("=", "the name of a result")
            if name in outputs:
                line.error(f"two results are called {name}")
            outputs[name] = self.node(line, line.name(f"result {name}"))
        self.program.set_outputs(outputs)
        line.end()

    def history(self, line: Line) -> None:
        line.tokenize()
        keyword = line.name("the history")
        reports = self.program.history
        if keyword != "pass" and not reports:
            line.error("the history begins with a pass", expected='pass name="…", …', got=keyword)
        if keyword == "note":
            reports[-1].notes.append(line.literal())
        elif keyword in ("pass", "near_miss"):
            _, kwargs = line.arguments("", line.literal, keyword)
            try:
                if keyword == "pass":
                    reports.append(PassReport(**kwargs))
                else:
                    reports[-1].near_misses.append(NearMiss(**kwargs))
            except TypeError as error:
                line.error(f"{keyword} does not have these fields: {error}")
        else:
            line.error("unknown entry of the history", expected="pass, near_miss or note", got=keyword)
        line.end()


def _tuple(line: Line, recipe: str, items: list[Any]) -> tuple[Any, ...]:
    """A list in a recipe: sizes, numbers (as floats) or parts."""
    if recipe == "cat":
        if not items or not all(isinstance(item, Recipe) for item in items):
            line.error("cat puts recipes side by side", expected="cat([recipe, …], dim=…)")
        return tuple(items)
    if recipe == "take":
        if not all(isinstance(item, str) and re.fullmatch(r"~?\d+:\d+", item) for item in items):
            line.error("take lists spans of addresses", expected='addresses=["0:192", "~192:256"]')
        return tuple(items)
    if not all(isinstance(item, (int, float)) for item in items):
        line.error(f"a list in {recipe} holds something that is no number")
    return tuple(items)


def _provenance(comment: str) -> dict[str, Any]:
    """Meta entries out of an operator's comment; what a person wrote there instead is left alone."""

    def word(text: str) -> str:
        return json.loads(text) if text.startswith('"') else text

    found: dict[str, Any] = {}
    for part in comment.split(SEPARATOR) if comment else ():
        if part.startswith("by "):
            found["made_by"] = tuple(word(name) for name in part[3:].split(", "))
        elif part.startswith("in "):
            found["module"] = word(part[3:])
        elif part.startswith('"') or " " not in part:
            found["source"] = word(part)
    return found


def parse_program(text: str) -> Program:
    """The program that :func:`graphsrt.printer.print_program` printed. Raises CompileError naming the wrong line."""
    return _Parser(text).parse()


def parse_to_run(text: str, strides: Mapping[str, Any]) -> Program:
    """The program as far as running it goes: its types are taken as they stand, since they were inferred when it was
    printed, and it cannot be changed. ``strides``: of :func:`graphsrt.printer.strides_of`.

    Raises CompileError naming the wrong line. Inference would import much (sympy, Dynamo) and take seconds.
    """
    return _Parser(text, strides).parse()


def parse_literal(text: str) -> Any:
    """One literal, the inverse of :func:`graphsrt.printer.literal_text`. Raises CompileError."""
    line = Line(1, text)
    line.tokenize()
    value = line.literal()
    line.end()
    return value
