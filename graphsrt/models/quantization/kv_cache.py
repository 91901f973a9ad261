"""Scales of cached keys and values: one number each for a layer, from the checkpoint or from a file of their own.

A cache in FP8 needs them: keys are stored divided by their scale. There is no default, since with a wrong one numbers
saturate, or vanish, and nothing but the accuracy tells. Files: ``{"0": [k, v], …}`` by layer, or the
``kv_cache_scales.json`` of other engines, ``{"kv_cache": {"scaling_factor": {"0": {"0": s, …}}}}``, with one number for
both and one rank.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.fx as fx

from graphsrt import ops
from graphsrt.errors import CheckpointError, CompileError, explain
from graphsrt.program import Program, arguments, aten
from graphsrt.recipes import Ckpt, Const, Recipe

if TYPE_CHECKING:
    from graphsrt.models.source import ModelSource

Scales = dict[int, tuple[Recipe, Recipe]]
"""Layer -> the scales of its keys and of its values, ``[1, 1]``."""


def cache_scales(source: ModelSource, captured: Program, file: str | os.PathLike | None) -> Scales:
    """The scales of every layer of a captured program. CompileError or CheckpointError where there are none."""
    nodes = captured.calls(ops.attention)
    if file is not None:
        return _from_file(Path(file), [arguments(node)["layer_id"] for node in nodes])
    quantization = source.quantization
    if quantization is None or not quantization.kv_cache:
        raise CompileError(
            explain(
                "an FP8 cache needs scales of keys and values, and the checkpoint has none",
                where="kv_cache_scheme in the quantization_config of the model's config",
                hint="pass a file of them as kv_scales, or write them with `graphsrt quantize MODEL --kv-cache`",
            )
        )
    paths = {arguments(node)["layer_id"]: attention_path(node) for node in nodes}
    return {layer: (Ckpt(f"{path}.k_scale"), Ckpt(f"{path}.v_scale")) for layer, path in paths.items()}


def attention_path(node: fx.Node) -> str:
    """The module of a captured attention under the checkpoint's names: that of the linear that makes its values."""
    value: Any = arguments(node)["v"]
    while value.target is not aten.linear.default:
        value = next(iter(value.all_input_nodes), None)
        if value is None:
            raise CompileError(
                explain(
                    "the values of an attention come from no linear, so there is no module whose scales they have",
                    where=node.name,
                    hint="pass scales by layer, in a file, as kv_scales",
                )
            )
    return str(arguments(value)["weight"].target).removesuffix(".weight").rpartition(".")[0]


def _from_file(path: Path, layers: list[int]) -> Scales:
    try:
        held = json.loads(path.read_text())
        if "kv_cache" in held:
            ranks = held["kv_cache"]["scaling_factor"]
            if len(ranks) != 1:
                raise ValueError(f"scales of {len(ranks)} ranks, expected one")
            held = {layer: [value, value] for layer, value in next(iter(ranks.values())).items()}
        values = {int(layer): (float(k), float(v)) for layer, (k, v) in held.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            explain("scales of keys and values cannot be read", where=str(path), got=str(error),
                    expected='{"0": [k, v], …}, two numbers for each layer')
        ) from error  # fmt: skip
    missing = [str(layer) for layer in layers if layer not in values]
    bad = [
        f"layer {layer}: {pair}" for layer, pair in values.items() if not all(math.isfinite(x) and x > 0 for x in pair)
    ]
    if missing or bad or len(values) != len(layers):
        raise CheckpointError(
            explain("scales of keys and values do not fit the model", where=str(path),
                    expected=f"two positive numbers for each of {len(layers)} layers",
                    got="; ".join([*bad, *([f"none for layers {', '.join(missing)}"] if missing else []),
                                   f"{len(values)} layers"]))
        )  # fmt: skip
    return {layer: (Const((1, 1), (k,)), Const((1, 1), (v,))) for layer, (k, v) in values.items()}
