"""Where graphsrt keeps what it can make again: converted models, traced programs, compiled regions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from graphsrt.errors import CompileError, explain


def cache_dir() -> Path:
    """The cache folder: ``$GRAPHSRT_CACHE``, else ``~/.cache/graphsrt``. It is made when something is put into it."""
    override = os.environ.get("GRAPHSRT_CACHE")
    return Path(override).expanduser() if override else Path.home() / ".cache" / "graphsrt"


@contextmanager
def writing(what: str, place: Path) -> Iterator[None]:
    """Within it ``what`` is written to ``place``; that the system refuses (a full disk) is an error that says so."""
    try:
        yield
    except OSError as error:
        raise CompileError(
            explain(f"{what} cannot be kept", where=str(place), got=str(error),
                    hint="free some space, or set GRAPHSRT_CACHE to a folder on another disk")
        ) from error  # fmt: skip
