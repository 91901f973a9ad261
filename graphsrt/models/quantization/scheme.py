"""How a checkpoint stores matrices in FP8: what all producers' configs are read into.

Integer formats and those of four bits will be further kinds of :class:`LinearScheme`; nothing else here is about FP8.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, NoReturn

from graphsrt.errors import CompileError, explain

MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Projections that engines put side by side, under the names that ignore lists use for them. Some models are published
with the parts, some with the whole; a list may name either."""

Modules = Mapping[str, Sequence[str]]
"""Name of a linear module -> the names of its class and of what that derives from."""


@dataclass(frozen=True)
class LinearScheme:
    """``scales`` of a weight: one in all ("tensor"), for each row, or for each ``block`` by ``block``. ``inputs``,
    ``largest``: as in :class:`~graphsrt.recipes.DequantFp8`."""

    scales: Literal["tensor", "row", "block"]
    inputs: Literal["plain", "static", "token", "block"]
    block: int = 128
    largest: float | None = None

    def block_of(self, shape: Sequence[int]) -> tuple[int, int]:
        """Rows and columns for which one scale counts, of a matrix ``[O, E]``."""
        rows, columns = shape
        return {"tensor": (rows, columns), "row": (1, columns), "block": (self.block, self.block)}[self.scales]

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """``[1, 1]``, ``[O, 1]`` or ``[ceil(O / block), ceil(E / block)]``."""
        rows, columns = self.block_of(shape)
        return -(-shape[0] // rows), -(-shape[1] // columns)


@dataclass(frozen=True)
class Pattern:
    """Names of modules as a producer writes them.

    ``re:…`` is a regular expression that a name begins with, for all. Else ``style`` says: "exact", the name or that of
    a class; "glob", with ``*``; "path", a module or all below it, from the front or from the back.
    """

    text: str
    style: Literal["exact", "glob", "path"]

    def matches(self, name: str, classes: Sequence[str] = ()) -> bool:
        if self.text.startswith("re:"):
            return re.match(self.text.removeprefix("re:"), name) is not None
        if name == self.text or self.text in classes:
            return True
        if self.style == "glob":
            return fnmatchcase(name, self.text)
        return self.style == "path" and f".{self.text}." in f".{name}."


@dataclass(frozen=True)
class Quantization:
    """``groups``: the first whose patterns match a module says how it is stored; modules that ``ignore`` names are
    plain. ``kv_cache``: there are scales of keys and values in the checkpoint."""

    method: str
    groups: tuple[tuple[tuple[Pattern, ...], LinearScheme], ...]
    ignore: tuple[Pattern, ...] = ()
    kv_cache: bool = False

    def scheme_of(self, name: str, classes: Sequence[str] = ("Linear",)) -> LinearScheme | None:
        """How a linear module is stored, None where it is plain. CompileError where a list names a part of it only."""
        if self._is_ignored(name, classes):
            return None
        for patterns, scheme in self.groups:
            if any(pattern.matches(name, classes) for pattern in patterns):
                return scheme
        return None

    def schemes(self, modules: Modules) -> dict[str, LinearScheme]:
        """The modules that are stored in FP8, and how."""
        return {name: scheme for name, classes in modules.items() if (scheme := self.scheme_of(name, classes))}

    def with_block(self, block: int) -> Quantization:
        """The same with other blocks: for a miniature of the model."""
        groups = tuple((patterns, replace(scheme, block=block)) for patterns, scheme in self.groups)
        return replace(self, groups=groups)

    def _is_ignored(self, name: str, classes: Sequence[str]) -> bool:
        if self._names(name, classes):
            return True
        path, dot, leaf = name.rpartition(".")
        if any(leaf in parts and self._names(path + dot + whole) for whole, parts in MERGED.items()):
            return True
        parts = [path + dot + part for part in MERGED.get(leaf, ())]
        named = [part for part in parts if self._names(part)]
        if named and len(named) < len(parts):
            raise CompileError(
                explain(
                    f"{name} is one matrix, and only a part of it is on the ignore list",
                    where="quantization_config of the model's config",
                    expected="all of its parts, or none",
                    got=", ".join(named),
                )
            )
        return bool(named)

    def _names(self, name: str, classes: Sequence[str] = ()) -> bool:
        return any(pattern.matches(name, classes) for pattern in self.ignore)


def patterns(names: Any, style: Literal["exact", "glob", "path"]) -> tuple[Pattern, ...]:
    """A list of names from a config, which may be absent."""
    return tuple(Pattern(str(name), style) for name in names or ())


def refuse(method: str, what: str, expected: str) -> NoReturn:
    """A scheme that is not supported, by its name."""
    raise CompileError(
        explain(
            f"quantization method {method} with {what} is not supported",
            where="quantization_config of the model's config",
            expected=expected,
            hint="use the unquantized checkpoint, and `graphsrt quantize` to write one of the supported schemes",
        )
    )


def is_fp8(numbers: Mapping[str, Any]) -> bool:
    """Whether a config's word for numbers (``num_bits``, ``type``) says eight-bit floats."""
    return numbers.get("type") == "float" and numbers.get("num_bits") == 8


def describe_numbers(numbers: Mapping[str, Any]) -> str:
    """``int4``, ``float8``."""
    return f"{numbers.get('type', 'unknown')}{numbers.get('num_bits', '')}"
