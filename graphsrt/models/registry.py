"""From a config to the single-device class that is captured.

The default is the transformers class for causal language modelling. ``register`` adds a class for a name in
``config.architectures``: a plain reference model without any parallel code.
"""

from __future__ import annotations

import copy
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from graphsrt.errors import CompileError, explain

_REGISTERED: dict[str, type] = {}


def register(architecture: str, model_class: type) -> None:
    """Capture ``model_class(config)`` for checkpoints whose ``architectures[0]`` is ``architecture``."""
    _REGISTERED[architecture] = model_class


def _refuse(config: PretrainedConfig, why: str, hint: str | None = None) -> CompileError:
    names = ", ".join(getattr(config, "architectures", None) or []) or "no architectures"
    return CompileError(
        explain(
            f"{config.model_type} is not a causal language model that graphsrt can compile: {why}",
            where=f"config with model_type {config.model_type!r} ({names})",
            expected="a decoder-only causal LM",
            hint=hint,
        )
    )


def _causal_class(config: Any) -> type | None:
    if config is None or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return found[0] if isinstance(found, tuple) else found


def _text_config(config: PretrainedConfig) -> PretrainedConfig | None:
    return getattr(config, "text_config", None)


def lookup(config: PretrainedConfig) -> type:
    """The class to capture; of a multimodal config, the class of its text part.

    ``CompileError`` for encoder-decoder models, classes that are no causal LM, and multimodal models whose text part
    has no class of its own.
    """
    architecture = (getattr(config, "architectures", None) or [""])[0]
    if architecture in _REGISTERED:
        return _REGISTERED[architecture]
    if getattr(config, "is_encoder_decoder", False):
        raise _refuse(config, "it is an encoder-decoder")
    text = _text_config(config)
    found = _causal_class(config)
    if text is not None:
        if found is not None and found.config_class is type(text):  # type: ignore[attr-defined]
            return found
        found = _causal_class(text)
        if found is None:
            raise _refuse(config, "it is multimodal and its text part has no causal LM class of its own")
        return found
    if found is None:
        raise _refuse(config, "transformers has no causal LM class for it")
    # `XModel` is the base of `XForCausalLM`: whether its checkpoint has a head is for the accounting to say.
    other_head = "For" in architecture and not architecture.endswith("ForCausalLM") and architecture != found.__name__
    if other_head:
        raise _refuse(config, f"its weights are those of {architecture}")
    # A BERT-like class reads its text in both directions unless the config makes it a decoder.
    # (GPT-NeoX has the same field and never reads it.)
    if getattr(config, "is_decoder", True) is False and not config.model_type.startswith("gpt_neox"):
        raise _refuse(config, "it attends in both directions", "set is_decoder=True if it was trained as a decoder")
    return found


def model_config(config: PretrainedConfig, model_class: type) -> PretrainedConfig:
    """The config that ``model_class`` takes: ``config`` itself, or a copy of its text part.

    Where the class in transformers is the multimodal one, that one's ``tie_word_embeddings`` decides about the head,
    whatever the text config says.
    """
    text = _text_config(config)
    if text is None or getattr(model_class, "config_class", None) is not type(text):
        return config
    text = copy.deepcopy(text)
    whole = _causal_class(config)
    if whole is None or whole.config_class is not type(text):  # type: ignore[attr-defined]
        text.tie_word_embeddings = config.tie_word_embeddings
    if text.dtype is None:
        text.dtype = config.dtype
    return text
