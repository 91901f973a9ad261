"""ModelOpt's checkpoints: ``quant_method: modelopt`` in the config, or ``hf_quant_config.json`` beside it.

Scales are ``weight_scale`` and ``input_scale``, those of keys and values ``k_proj.k_scale`` and ``v_proj.v_scale``.
Source: NVIDIA TensorRT Model Optimizer's unified Hugging Face export.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphsrt.models.quantization.scheme import LinearScheme, Pattern, Quantization, is_fp8, patterns, refuse

METHOD = "modelopt"
_ALGORITHMS = {
    "FP8": LinearScheme("tensor", "static"),
    "FP8_PER_CHANNEL_PER_TOKEN": LinearScheme("row", "token"),
    "FP8_PB_WO": LinearScheme("block", "plain"),
}


def read(config: Mapping[str, Any]) -> Quantization:
    """``config``: either file's contents. CompileError names an algorithm that is not supported."""
    inner = config.get("quantization") or config
    algorithm = inner.get("quant_algo")
    if algorithm not in _ALGORITHMS:
        refuse(METHOD, f"quant_algo {algorithm}", ", ".join(_ALGORITHMS))
    cache = inner.get("kv_cache_quant_algo")
    if cache not in (None, "", "FP8"):
        refuse(METHOD, f"kv_cache_quant_algo {cache}", "FP8")
    scheme = config.get("kv_cache_scheme")
    if scheme and not is_fp8(scheme):
        refuse(METHOD, f"kv_cache_scheme {scheme}", "float8")
    names = inner.get("exclude_modules") or inner.get("ignore")
    targets = ((Pattern("Linear", "exact"),), _ALGORITHMS[algorithm])
    return Quantization(METHOD, (targets,), patterns(names, "glob"), bool(cache or scheme))
