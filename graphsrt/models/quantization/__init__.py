"""Quantised checkpoints: a file for each producer's config, and one for what they have in common.

:func:`read_quantization` reads a config into a :class:`~graphsrt.models.quantization.scheme.Quantization`;
``scales.py`` finds the scales of a checkpoint; ``recipes.py`` tells a captured program how its weights are stored.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from graphsrt.errors import CheckpointError, CompileError, explain
from graphsrt.models.quantization import compressed_tensors, modelopt, transformers_fp8
from graphsrt.models.quantization.scheme import Quantization

READERS: dict[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "compressed-tensors": compressed_tensors.read,
    "modelopt": modelopt.read,
    "fp8": transformers_fp8.read_fp8,
    "fbgemm_fp8": transformers_fp8.read_fbgemm,
}
"""``quant_method`` -> how its config is read."""

_MODELOPT_FILE = "hf_quant_config.json"


def read_quantization(config: Any, folder: Path | None = None) -> Quantization | None:
    """The quantisation that a model's config names, or a file of ModelOpt's in ``folder``; None for plain weights.

    CompileError names a method or scheme that is not supported, before any weight is read.
    """
    for part in (config, getattr(config, "text_config", None)):
        found = getattr(part, "quantization_config", None) or getattr(part, "compression_config", None)
        if found:
            return _read(found if isinstance(found, dict) else found.to_dict())
    if folder is not None and (folder / _MODELOPT_FILE).exists():
        try:
            return modelopt.read(json.loads((folder / _MODELOPT_FILE).read_text()))
        except (OSError, ValueError, AttributeError) as error:
            raise CheckpointError(
                explain(f"{_MODELOPT_FILE} cannot be read", where=str(folder), got=str(error))
            ) from error
    return None


def _read(found: Mapping[str, Any]) -> Quantization:
    method = str(found.get("quant_method") or found.get("format") or "unnamed").lower()
    if method not in READERS:
        raise CompileError(
            explain(
                f"quantization method {method} is not supported",
                where="quantization_config of the model's config",
                expected=", ".join(READERS),
                got=json.dumps(dict(found), default=str)[:300],
                hint="use the unquantized checkpoint",
            )
        )
    return READERS[method](found)


def without_quantization(config: Any) -> Any:
    """The config without what says how weights are stored: that of the model that is captured."""
    plain = copy.deepcopy(config)
    for part in (plain, getattr(plain, "text_config", None)):
        for name in ("quantization_config", "compression_config"):
            if getattr(part, name, None) is not None:
                delattr(part, name)
    return plain
