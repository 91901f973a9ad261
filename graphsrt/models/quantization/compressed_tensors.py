"""``quant_method: compressed-tensors``: checkpoints of llm-compressor, and what ``graphsrt quantize`` writes.

Groups of modules, each with its numbers and strategies; scales are ``weight_scale`` and ``input_scale``. Source:
the schema of the compressed-tensors package (``QuantizationConfig``, ``QuantizationArgs``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from graphsrt.models.quantization.scheme import (
    LinearScheme,
    Quantization,
    describe_numbers,
    is_fp8,
    patterns,
    refuse,
)

METHOD = "compressed-tensors"


def read(config: Mapping[str, Any]) -> Quantization:
    """CompileError names a scheme that is not supported."""
    sparsity = config.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        refuse(METHOD, f"sparsity format {sparsity['format']}", "dense weights")
    groups = []
    for name, group in (config.get("config_groups") or {}).items():
        groups.append((patterns(group.get("targets"), "exact"), _scheme(name, group)))
    cache = config.get("kv_cache_scheme")
    if cache and not (is_fp8(cache) and cache.get("strategy", "tensor") == "tensor" and not cache.get("dynamic")):
        refuse(
            METHOD, f"kv_cache_scheme {describe_numbers(cache)}, {cache.get('strategy')}", "float8, one static scale"
        )
    return Quantization(METHOD, tuple(groups), patterns(config.get("ignore"), "exact"), bool(cache))


def _scheme(name: str, group: Mapping[str, Any]) -> LinearScheme:
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    supported = "float8 weights (tensor, channel or block) and float8 or plain inputs"
    if not is_fp8(weights) or not weights.get("symmetric", True):
        refuse(METHOD, f"{describe_numbers(weights)} weights ({group.get('format') or name})", supported)
    if group.get("output_activations"):
        refuse(METHOD, f"quantised outputs ({name})", supported)
    strategy = weights.get("strategy")
    scales = {"tensor": "tensor", "channel": "row", "block": "block"}.get(str(strategy))
    if scales is None:
        refuse(METHOD, f"scales of weights by {strategy} ({name})", supported)
    block = 128
    if scales == "block":
        block = square(METHOD, weights.get("block_structure"))
    return LinearScheme(scales, _inputs(name, inputs, scales, block), block)  # type: ignore[arg-type]


def _inputs(
    name: str, inputs: Mapping[str, Any] | None, scales: str, block: int
) -> Literal["plain", "static", "token", "block"]:
    if not inputs:
        return "plain"
    strategy, dynamic = inputs.get("strategy", "tensor"), inputs.get("dynamic", False)
    supported = "float8 inputs: one static scale, or dynamic ones for each token or each block"
    if not is_fp8(inputs) or not inputs.get("symmetric", True):
        refuse(METHOD, f"{describe_numbers(inputs)} inputs ({name})", supported)
    if dynamic is False and strategy == "tensor":
        return "static"
    if dynamic is True and strategy == "token":
        return "token"
    if dynamic is True and strategy == "group" and scales == "block" and inputs.get("group_size") == block:
        return "block"
    refuse(METHOD, f"{'dynamic' if dynamic else 'static'} scales of inputs by {strategy} ({name})", supported)


def square(method: str, structure: Any) -> int:
    """The side of a square block, from ``[128, 128]`` or ``"128x128"``."""
    sides = [int(side) for side in structure.split("x")] if isinstance(structure, str) else list(structure or ())
    if len(sides) != 2 or sides[0] != sides[1] or sides[0] < 1:
        refuse(method, f"blocks of {structure}", "square blocks, such as [128, 128]")
    return int(sides[0])
