"""The folder of a model that has a name. Imports next to nothing: a warm start begins here."""

from __future__ import annotations

import os
from pathlib import Path

from graphsrt.errors import CheckpointError, explain
from graphsrt.models import smollm2

# What is fetched from the hub: nothing that could be run, no second copy of the weights in another format.
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "tokenizer*")


def model_folder(model: str | os.PathLike, *, allow_pickle: bool = False) -> Path:
    """The folder of ``"smollm2"``, of a path, or of a hub id, whose files are fetched if need be.

    ``CheckpointError`` if it is none of these; raises as ``smollm2.model_folder`` does.
    """
    name = os.fspath(model)
    if name == "smollm2" and not Path(name).is_dir():
        return smollm2.model_folder()
    path = Path(name).expanduser()
    return path if path.is_dir() else _hub_folder(name, allow_pickle)


def _hub_folder(name: str, allow_pickle: bool) -> Path:
    """The local snapshot of a hub id: from the cache when it is there whole, fetched otherwise."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    patterns = [*_HUB_FILES, "*.bin"] if allow_pickle else list(_HUB_FILES)
    reason: Exception
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name
    if looks_like_path:
        reason = FileNotFoundError("no such folder")
    else:
        try:
            return Path(snapshot_download(name, allow_patterns=patterns))
        # httpx (and requests before it) errors are OSErrors or RuntimeErrors depending on the version.
        except (OSError, ValueError, RuntimeError, HFValidationError) as error:
            reason = error
        except Exception as error:
            if not type(error).__module__.startswith(("httpx", "httpcore", "requests", "huggingface_hub")):
                raise
            reason = error
    raise CheckpointError(
        explain(
            f"{name}: no such model folder, and not a hub id that could be fetched",
            expected="a folder with config.json, a hub id such as org/model, or 'smollm2'",
            got=f"{type(reason).__name__}: {str(reason).strip().splitlines()[0] if str(reason).strip() else ''}",
        )
    ) from reason
