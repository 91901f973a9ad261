"""Models that carry more between tokens than keys and values: refused by what they keep, before any weight is read.

transformers says it itself. The cache that a config asks for has, for such a layer, a place for convolution or
recurrent states; a class that needs a cache of its own is marked ``_is_stateful``. What this misses, ``check_tokens``
finds in the captured graph.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from graphsrt.errors import CompileError, explain

_STATE_ARGUMENTS = {"cache", "cache_params", "state", "past_key_values", "past_states", "mems"}


def check_stateless(model: nn.Module) -> None:
    """Raise CompileError if the model keeps state between tokens besides keys and values, naming the module and why."""
    layers = _state_layers(model.config)  # type: ignore[arg-type]
    if not layers and not getattr(model, "_is_stateful", False):
        return
    path, module = _guilty(model, min(layers, default=0))
    kinds = (
        f"{len(layers)} of its layers keep convolution or recurrent states" if layers else "it needs a cache of its own"
    )
    raise CompileError(
        explain(
            f"{type(model).__name__} carries state between tokens besides keys and values: {_what(module)}",
            where=f"{path} ({type(module).__name__})",
            expected="attention over cached keys and values as the only thing that reads other tokens",
            got=kinds,
            hint="such a model would mix the sequences of a batch here; serve it with transformers",
        )
    )


def is_stateful(model: nn.Module) -> bool:
    """Whether :func:`check_stateless` refuses the model."""
    return bool(_state_layers(model.config)) or bool(getattr(model, "_is_stateful", False))  # type: ignore[arg-type]


def _state_layers(config: Any) -> list[int]:
    """Layers for which transformers' own cache has a place for convolution or recurrent states."""
    from transformers import DynamicCache, cache_utils

    mixin = getattr(cache_utils, "LinearAttentionCacheLayerMixin", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    if mixin is None or not hasattr(text, "num_hidden_layers"):
        return []
    try:
        layers = DynamicCache(config=text).layers
    except (AttributeError, KeyError, TypeError, ValueError):  # a config that this cache is not made for
        return []
    return [index for index, layer in enumerate(layers) if isinstance(layer, mixin)]


def _guilty(model: nn.Module, layer: int) -> tuple[str, nn.Module]:
    """The module that keeps the state: in the given layer the one that owns a convolution, or the innermost one that
    takes a state; the model itself if there is none."""
    inside = [(path, module) for path, module in model.named_modules() if f".{layer}." in f".{path}."]
    for path, module in inside:
        if any(isinstance(child, nn.Conv1d) for child in module.children()):
            return path, module
    takers = [
        (path, module)
        for path, module in inside
        if _STATE_ARGUMENTS & set(inspect.signature(module.forward).parameters)
    ]
    innermost = [(p, m) for p, m in takers if not any(q.startswith(f"{p}.") for q, _ in takers)]
    return innermost[0] if innermost else ("the whole model", model)


def _what(module: nn.Module) -> str:
    own = {name for name, _ in module.named_parameters(recurse=False)}
    convolution = next((child for child in module.children() if isinstance(child, nn.Conv1d)), None)
    found = []
    if convolution is not None:
        found.append(f"a convolution over {convolution.kernel_size[0]} tokens")
    if any(name.lower().startswith("a_log") for name in own):
        found.append("a scan, whose state goes from token to token")
    if not found:
        found.append("a state that every token updates")
    return " and ".join(found)
