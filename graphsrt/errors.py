"""Errors that graphsrt raises on purpose, and how a message is laid out.

Every message names what was wrong, where, what was expected, what was found and what to do about it.
``ValueError`` is for a caller's argument, the classes below for everything else; ``assert`` is for our own bugs.
"""

from __future__ import annotations


def explain(
    what: str, *, where: str | None = None, expected: str | None = None, got: str | None = None, hint: str | None = None
) -> str:
    """Lay out an error message: one headline, then one indented line for each fact that is known."""
    lines = [what]
    for label, fact in (("where", where), ("expected", expected), ("got", got), ("to fix", hint)):
        if fact:
            lines.append(f"  {label + ':':10}{fact}")
    return "\n".join(lines)


class GraphsrtError(Exception):
    """Base of every error raised on purpose; the command line prints its message without a traceback."""


class CompileError(GraphsrtError):
    """A model or program cannot be compiled: refused operator, failed check, wrong pass."""


class CheckpointError(GraphsrtError):
    """A checkpoint is missing, damaged, incomplete, or holds tensors that nothing accounts for."""


class RankError(GraphsrtError):
    """A rank process died, hung, or disagreed with its peers. ``rank`` is its number."""

    def __init__(self, message: str, rank: int | None = None):
        super().__init__(message)
        self.rank = rank
