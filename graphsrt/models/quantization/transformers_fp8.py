"""transformers' own metadata: ``quant_method: fp8`` (DeepSeek, Qwen, Mistral, AutoFP8) and ``fbgemm_fp8`` (Meta).

``fp8``: ``weight_block_size`` or one scale for a matrix, stored as ``weight_scale_inv`` or ``weight_scale`` (which in
spite of its name multiplies); inputs by ``activation_scheme``. A dynamic scale of inputs of unblocked weights is taken
for each token, as engines do. ``fbgemm_fp8``: a scale for each row, tokens scaled up to ``activation_scale_ub``.
Modules that the lists leave out are stored in FP8; without a list, all but the head. Source: transformers'
``FineGrainedFP8Config`` and ``FbgemmFp8Config``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphsrt.models.quantization.compressed_tensors import square
from graphsrt.models.quantization.scheme import LinearScheme, Pattern, Quantization, is_fp8, patterns, refuse


def read_fp8(config: Mapping[str, Any]) -> Quantization:
    """CompileError names a variant that is not supported."""
    if config.get("fmt", "e4m3") not in ("e4m3", None):
        refuse("fp8", f"numbers of format {config['fmt']}", "e4m3")
    if config.get("scale_fmt") not in (None, "float", "fp32"):
        refuse("fp8", f"scales of inputs rounded to {config['scale_fmt']}", "float32 scales")
    activations, size = config.get("activation_scheme", "dynamic"), config.get("weight_block_size")
    if activations not in ("dynamic", "static"):
        refuse("fp8", f"activation_scheme {activations}", "dynamic or static")
    if size:
        block = square("fp8", size)
        scheme = LinearScheme("block", "block" if activations == "dynamic" else "static", block)
    else:
        scheme = LinearScheme("tensor", "token" if activations == "dynamic" else "static")
    cache = config.get("kv_cache_scheme")
    if cache and not is_fp8(cache if isinstance(cache, Mapping) else {}):
        refuse("fp8", f"kv_cache_scheme {cache}", "float8")
    return Quantization("fp8", (_linears(scheme),), _left_out(config), bool(cache))


def read_fbgemm(config: Mapping[str, Any]) -> Quantization:
    """All its checkpoints are of one scheme."""
    largest = config.get("activation_scale_ub")
    scheme = LinearScheme("row", "token", largest=None if largest is None else float(largest))
    return Quantization("fbgemm_fp8", (_linears(scheme),), _left_out(config))


def _linears(scheme: LinearScheme) -> tuple[tuple[Pattern, ...], LinearScheme]:
    return (Pattern("Linear", "exact"),), scheme


def _left_out(config: Mapping[str, Any]) -> tuple[Pattern, ...]:
    names = config.get("modules_to_not_convert")
    names = config.get("ignored_layers") if names is None else names
    return patterns(["lm_head"] if names is None else names, "path")
