"""Where graphsrt keeps what it can make again: converted models, compiled regions."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """The cache folder: ``$GRAPHSRT_CACHE``, else ``~/.cache/graphsrt``. It is made when something is put into it."""
    override = os.environ.get("GRAPHSRT_CACHE")
    return Path(override).expanduser() if override else Path.home() / ".cache" / "graphsrt"
