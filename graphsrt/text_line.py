"""One line of program text as tokens, and the grammar below statements: names, literals, lists and calls.

Names hold dots and numbers (``layers.0.mlp``), and a layout such as ``4096/8`` is one token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NoReturn

import torch

from graphsrt.errors import CompileError, explain
from graphsrt.placement import Layout
from graphsrt.printer import DTYPES, NAME, TORCH_LITERALS

_TOKEN = re.compile(
    rf"""\s*(?:
      (?P<string>"(?:[^"\\]|\\.)*")
    | `(?P<quoted>[^`]*)`
    | (?P<layout>\d+/\d+(?:\{{[^}}]*\}})?)
    | (?P<number>-?(?:inf\b|nan\b|\d+(?:\.\d*)?(?:[eE][-+]?\d+)?))
    | (?P<name>{NAME})
    | (?P<comment>\#.*)
    | (?P<sign>\S)
    )""",
    re.VERBOSE,
)
_WORDS: dict[str, Any] = {"None": None, "True": True, "False": False, **DTYPES, **TORCH_LITERALS}
_END = ("end", "")


@lru_cache(maxsize=4096)
def parse_layout(text: str) -> Layout:
    """``Layout.parse``, cached: every layer repeats the same few."""
    return Layout.parse(text)


class Line:
    """One line's tokens and where the parser stands among them."""

    def __init__(self, number: int, text: str):
        self.number = number
        self.text = text.strip()
        self.comment = ""
        self.tokens: list[tuple[str, str]] = []
        self.at = 0

    def error(
        self, what: str, *, expected: str | None = None, got: str | None = None, hint: str | None = None
    ) -> NoReturn:
        """Raise CompileError for this line."""
        shown = self.text if len(self.text) <= 300 else self.text[:300] + "…"
        raise CompileError(explain(what, where=f"line {self.number}: {shown}", expected=expected, got=got, hint=hint))

    def tokenize(self, start: int = 0) -> None:
        self.at, self.tokens, self.comment = 0, [], ""
        for match in _TOKEN.finditer(self.text, start):
            kind = match.lastgroup or ""
            if kind == "comment":
                self.comment = match.group(kind)[1:].strip()
                return
            self.tokens.append((kind, match.group(kind)))

    def peek(self) -> tuple[str, str]:
        return self.tokens[self.at] if self.at < len(self.tokens) else _END

    def take(self) -> tuple[str, str]:
        token = self.peek()
        self.at += 1
        return token

    def accept(self, sign: str) -> bool:
        if self.peek() == ("sign", sign):
            self.at += 1
            return True
        return False

    def expect(self, sign: str, context: str) -> None:
        if not self.accept(sign):
            self.error(f"syntax error in {context}", expected=repr(sign), got=self.found())

    def found(self) -> str:
        return "the end of the line" if self.peek() == _END else repr(self.peek()[1])

    def end(self) -> None:
        if self.peek() != _END:
            self.error("syntax error after the statement", expected="the end of the line", got=self.found())

    def name(self, context: str) -> str:
        kind, text = self.peek()
        if kind not in ("name", "quoted"):
            self.error(f"syntax error in {context}", expected="a name", got=self.found())
        self.at += 1
        return text

    def items(self, close: str, read: Callable[[], Any], context: str) -> list[Any]:
        """Comma-separated items up to and with ``close``."""
        result = []
        while not self.accept(close):
            result.append(read())
            if not self.accept(","):
                self.expect(close, context)
                break
        return result

    def call(self, read: Callable[[], Any], context: str) -> tuple[list[Any], dict[str, Any]]:
        """``(a, b, key=c)``"""
        self.expect("(", context)
        return self.arguments(")", read, context)

    def arguments(self, close: str, read: Callable[[], Any], context: str) -> tuple[list[Any], dict[str, Any]]:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}

        def argument() -> None:
            after = self.tokens[self.at + 1] if self.at + 1 < len(self.tokens) else _END
            if after == ("sign", "="):
                key = self.name(context)
                self.expect("=", context)
                if key in kwargs:
                    self.error(f"{key}= is given twice in {context}")
                kwargs[key] = read()
            elif kwargs:
                self.error(f"syntax error in {context}: a positional argument follows {next(reversed(kwargs))}=")
            else:
                args.append(read())

        if close:
            self.items(close, argument, context)
        elif self.peek() != _END:
            argument()
            while self.accept(","):
                argument()
        return args, kwargs

    def value(self, named: Callable[[str], Any]) -> Any:
        """A literal, or what ``named`` makes of a name."""
        kind, text = self.take()
        if kind == "number":
            return int(text) if text.lstrip("-").isdigit() else float(text)
        if kind == "name":
            if text in _WORDS:
                return _WORDS[text]
            if text in ("inf", "nan"):
                return float(text)
            if text == "device":
                args, _ = self.call(lambda: self.value(named), "device")
                return torch.device(*args)
            return named(text)
        if kind == "quoted":
            return named(text)
        if kind == "string":
            try:
                return json.loads(text)
            except json.JSONDecodeError as error:
                self.error(f"syntax error in a string: {error.msg}", got=text)
        if kind == "layout":
            return self.layout(text)
        if (kind, text) == ("sign", "["):
            return self.items("]", lambda: self.value(named), "a list")
        if (kind, text) == ("sign", "("):
            return tuple(self.items(")", lambda: self.value(named), "a tuple"))
        self.at -= 1
        self.error("syntax error", expected="a value", got=self.found())

    def layout(self, text: str) -> Layout:
        try:
            return parse_layout(text)
        except (ValueError, ZeroDivisionError) as error:
            self.error(f"a layout that cannot be: {error}", got=text)

    def literal(self) -> Any:
        """A value without names in it."""
        return self.value(lambda name: self.error("syntax error", expected="a literal", got=repr(name)))
