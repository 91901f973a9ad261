"""The programs of a model: one for decoding, and perhaps another one for steps with many tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from graphsrt.errors import CompileError, explain
from graphsrt.lowering.decompose import decompose
from graphsrt.printer import print_program, strides_of
from graphsrt.program import PREFILL_MIN_TOKENS, Program
from graphsrt.text_parser import parse_to_run


class RunText(NamedTuple):
    """A program as ranks are sent it: text, what its types leave out (JSON), and the hash of what it says."""

    text: str
    strides: str
    hash: str


@dataclass(frozen=True)
class Phases:
    """``decode`` runs every step that is not ``prefill``'s. Both have the same inputs, results and weights.

    ``prefill``: None, or a program that says in its constant ``prefill_min_tokens`` from how many tokens on a step is
    its.
    """

    decode: Program
    prefill: Program | None = None

    @property
    def min_tokens(self) -> int | None:
        """From how many tokens on a step is prefill's; None if none is."""
        return None if self.prefill is None else self.prefill.constants[PREFILL_MIN_TOKENS]

    def all(self) -> list[Program]:
        return [self.decode] if self.prefill is None else [self.decode, self.prefill]

    def texts(self, device: str) -> tuple[RunText, ...]:
        """Each program as it runs on a type of device, with nothing left to infer or to take apart."""
        programs = [decompose(program, device) for program in self.all()]
        return tuple(RunText(str(p), json.dumps(strides_of(p)), text_hash(p)) for p in programs)

    @staticmethod
    def from_texts(texts: Sequence[RunText], where: str) -> Phases:
        """The inverse, to run and not to change. CompileError if a program is not what its text was made of."""
        programs = []
        for text, strides, wanted in texts:
            program = parse_to_run(text, json.loads(strides))
            if text_hash(program) != wanted:
                raise CompileError(
                    explain("the program did not survive its text", where=where, expected=wanted,
                            got=text_hash(program))
                )  # fmt: skip
            programs.append(program)
        return Phases(*programs)


def text_hash(program: Program) -> str:
    """Hash of a program's text without the history, which has times in it."""
    return hashlib.sha256(print_program(program, history=False).encode()).hexdigest()
