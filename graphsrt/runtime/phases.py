"""The programs of a model: one for decoding, and perhaps another one for steps with many tokens."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from graphsrt.errors import CompileError, explain
from graphsrt.printer import print_program
from graphsrt.program import PREFILL_MIN_TOKENS, Program


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

    def texts(self) -> tuple[tuple[str, str], ...]:
        """Each program's text and the hash of what it says."""
        return tuple((str(program), text_hash(program)) for program in self.all())

    @staticmethod
    def from_texts(texts: tuple[tuple[str, str], ...], where: str) -> Phases:
        """The inverse. CompileError if a program is not what its text was made of."""
        programs = []
        for text, wanted in texts:
            program = Program.from_text(text)
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
