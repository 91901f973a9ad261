"""The configs and scale names of FP8 checkpoints as their producers write them: what ``graphsrt quantize`` can write.

The inverse of the readers beside this file; what one writes, the other reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from graphsrt.models.quantization.scheme import LinearScheme

SCHEMES = {
    "fp8": LinearScheme("tensor", "static"),
    "fp8-dynamic": LinearScheme("row", "token"),
    "fp8-block": LinearScheme("block", "block"),
}
"""Name of a scheme -> it. "fp8": one scale for a matrix and one, found by calibration, for its inputs. "fp8-dynamic": a
scale for each row, and for each token. "fp8-block": a scale for each block of 128 by 128, and of 128 channels."""


@dataclass(frozen=True)
class Layout:
    """``weight_scale``, ``input_scale``: names behind a module's. ``scalar``: one number is stored without dimensions.
    ``row``: a scale for each row is stored as ``[O]``. ``config``: (scheme, ignored modules, KV scales) -> the config's
    ``quantization_config``; ``key_scale``, ``value_scale``: names behind an attention's."""

    schemes: tuple[str, ...]
    config: Callable[[LinearScheme, Sequence[str], bool], dict[str, Any]]
    weight_scale: str = "weight_scale"
    input_scale: str = "input_scale"
    key_scale: str = "k_scale"
    value_scale: str = "v_scale"
    scalar: bool = False


def _compressed_tensors(scheme: LinearScheme, ignore: Sequence[str], kv_cache: bool) -> dict[str, Any]:
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = number | {"dynamic": False, "strategy": {"row": "channel"}.get(scheme.scales, scheme.scales)}
    if scheme.scales == "block":
        weights["block_structure"] = [scheme.block, scheme.block]
    strategy = {"static": "tensor", "token": "token", "block": "group"}[scheme.inputs]
    inputs = number | {"dynamic": scheme.inputs != "static", "strategy": strategy}
    if scheme.inputs == "block":
        inputs["group_size"] = scheme.block
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    config: dict[str, Any] = {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": list(ignore), "kv_cache_scheme": None,
    }  # fmt: skip
    if kv_cache:
        config["kv_cache_scheme"] = number | {"dynamic": False, "strategy": "tensor"}
    return config


def _modelopt(scheme: LinearScheme, ignore: Sequence[str], kv_cache: bool) -> dict[str, Any]:
    algorithm = "FP8" if scheme.scales == "tensor" else "FP8_PER_CHANNEL_PER_TOKEN"
    config: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": list(ignore)}
    if kv_cache:
        config["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "dynamic": False}
    return config


def _fp8(scheme: LinearScheme, ignore: Sequence[str], kv_cache: bool) -> dict[str, Any]:
    static = scheme.inputs == "static"
    size = [scheme.block, scheme.block] if scheme.scales == "block" else None
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "static" if static else "dynamic",
              "weight_block_size": size, "modules_to_not_convert": list(ignore)}  # fmt: skip
    return config | ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}} if kv_cache else {})


def _fbgemm(scheme: LinearScheme, ignore: Sequence[str], kv_cache: bool) -> dict[str, Any]:
    return {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": list(ignore)}


LAYOUTS = {
    "compressed-tensors": Layout(tuple(SCHEMES), _compressed_tensors),
    "modelopt": Layout(
        ("fp8", "fp8-dynamic"), _modelopt, key_scale="k_proj.k_scale", value_scale="v_proj.v_scale", scalar=True
    ),
    "fp8": Layout(("fp8", "fp8-block"), _fp8, "weight_scale_inv", "activation_scale", scalar=True),
    "fbgemm_fp8": Layout(("fp8-dynamic",), _fbgemm),
}
"""``quant_method`` -> how its producer writes."""
