"""From a config to the single-device class that is captured.

The default is the transformers class for causal language modelling. Where that cannot be captured, :data:`REFERENCES`
names a *reference model* that is captured in its place: a plain module ``(tokens [T], positions [T]) -> logits [T, V]``
of one sequence, built from the same config, with the checkpoint's parameter names and no parallel code. A parameter
that it keeps otherwise than the checkpoint is named by its static method ``layouts(config)``: name -> layout over the
names of the checkpoint, as in ``conversion.py``. A module is imported when its architecture is asked for, so one that
is broken breaks no other.

Models are added by :func:`register`, by a package named in ``GRAPHSRT_EXTERNAL_MODELS`` (several with commas between)
that has a dict ``MODELS`` like the one here, or by an installed package:

    [project.entry-points."graphsrt.models"]
    MyForCausalLM = "my_package.my_model:MyModel"

They come in this order, before our own. ``GRAPHSRT_DISABLED_ARCHS`` names architectures for which none of them is used;
``GRAPHSRT_REFERENCE_ARCHS`` names those for which one of :data:`READABLE` is.
"""

from __future__ import annotations

import copy
import importlib
import os
from importlib.metadata import entry_points
from typing import Any

from torch import nn
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from graphsrt.errors import CompileError, explain

GROUP = "graphsrt.models"
Target = str | type[nn.Module]
"""A class, or "module:Class" that is imported at first use."""

REFERENCES: dict[str, Target] = {
    "BloomForCausalLM": "graphsrt.models.bloom:Bloom",
    "DbrxForCausalLM": "graphsrt.models.dbrx:Dbrx",
    "FalconForCausalLM": "graphsrt.models.falcon:Falcon",
    "GPTNeoForCausalLM": "graphsrt.models.gpt_neo:GPTNeo",
    "GPTNeoXJapaneseForCausalLM": "graphsrt.models.gpt_neox_japanese:GPTNeoXJapanese",
    "JetMoeForCausalLM": "graphsrt.models.jetmoe:JetMoe",
    "Llama4ForCausalLM": "graphsrt.models.llama4:Llama4",
    "MptForCausalLM": "graphsrt.models.mpt:Mpt",
    "OpenAIGPTLMHeadModel": "graphsrt.models.openai_gpt:OpenAIGPT",
    "XGLMForCausalLM": "graphsrt.models.xglm:XGLM",
}
"""Architecture -> reference model, where the transformers class keeps attention, or its experts, to itself."""

READABLE: dict[str, Target] = {
    "LlamaForCausalLM": "graphsrt.models.llama:Llama",
    "Qwen3ForCausalLM": "graphsrt.models.qwen3:Qwen3",
}
"""Architecture -> reference model to read, where the transformers class can be captured as well and is by default."""

UNSERVABLE: dict[str, str] = {
    "BltForCausalLM": "it puts bytes together to patches, as many as the text decides, and bytes attend to patches",
    "CpmAntForCausalLM": "it puts a learned prompt first and adds a learned bias to the score of each pair of tokens",
    "DogeForCausalLM": "the values that its layers compute choose which earlier tokens are seen",
    "GitForCausalLM": "it describes an image, which a program here does not take",
}
"""Architecture -> what no program here can honour. A registered model goes before."""

_registered: dict[str, Target] = {}


def register(architecture: str, model_class: Target) -> None:
    """Capture ``model_class(config)`` for models whose ``architectures[0]``, or class, is ``architecture``."""
    _registered[architecture] = model_class


def reference(*architectures: str) -> type[nn.Module] | None:
    """The model to capture for the first of these architectures that has one; None if transformers' class is captured.

    ``CompileError`` if there is one but it cannot be loaded.
    """
    disabled = _listed("GRAPHSRT_DISABLED_ARCHS")
    for architecture in architectures:
        if architecture not in disabled:
            found = _find(architecture)
            if found is not None:
                return _load(architecture, *found)
    return None


def reference_of_module(module: nn.Module) -> type[nn.Module] | None:
    """As :func:`reference`, for a model in memory: only if it is transformers' own throughout. What holds a module of
    somebody else is no longer the model that a reference stands for."""
    packages = {type(part).__module__.partition(".")[0] for part in module.modules()}
    return reference(type(module).__name__) if packages <= {"transformers", "torch"} else None


def check_servable(config: PretrainedConfig, architecture: str) -> None:
    """``CompileError`` with the reason for an architecture, or a setting of one, that no program can honour."""
    reason = UNSERVABLE.get(architecture)
    if getattr(config, "recurrent_kv_cache_mode", None) == "last_loop":
        reason = "its earlier loops read keys of the last one (recurrent_kv_cache_mode='last_loop')"
    if reason is not None and reference(architecture) is None:
        raise _refuse(config, reason, expected="attention to cached keys and values, by the order of tokens alone")


def _listed(variable: str) -> list[str]:
    return [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]


def _find(architecture: str) -> tuple[Target, str] | None:
    """The target of an architecture, and in words who says so."""
    if architecture in _registered:
        return _registered[architecture], "graphsrt.models.registry.register"
    for package in _listed("GRAPHSRT_EXTERNAL_MODELS"):
        if architecture in (models := _external(package)):
            return models[architecture], f"MODELS of {package} (GRAPHSRT_EXTERNAL_MODELS)"
    if os.environ.get("GRAPHSRT_DISABLE_PLUGINS", "") in ("", "0"):
        for entry in entry_points(group=GROUP, name=architecture):
            owner = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "an unknown package"
            return entry.value, f"the entry points {GROUP} of {owner}"
    if architecture in REFERENCES:
        return REFERENCES[architecture], "graphsrt"
    if architecture in READABLE and architecture in _listed("GRAPHSRT_REFERENCE_ARCHS"):
        return READABLE[architecture], "graphsrt"
    return None


def _external(package: str) -> dict[str, Target]:
    """``MODELS`` of a package that the user named."""

    def broken(got: str) -> CompileError:
        return CompileError(
            explain(
                f"the models of {package} cannot be loaded",
                where="GRAPHSRT_EXTERNAL_MODELS",
                expected='a package with MODELS = {"Architecture": "module:Class"}',
                got=got,
                hint="repair it, or take it out of GRAPHSRT_EXTERNAL_MODELS",
            )
        )

    try:
        models = getattr(importlib.import_module(package), "MODELS", None)
    except Exception as error:  # another's code raises whatever it likes
        raise broken(f"{type(error).__name__}: {error}") from error
    if not isinstance(models, dict):
        raise broken(f"MODELS = {models!r}")
    return models


def _load(architecture: str, target: Target, origin: str) -> type[nn.Module]:
    def broken(got: str) -> CompileError:
        return CompileError(
            explain(
                f"the model that is registered for {architecture} cannot be loaded",
                where=f"{target} in {origin}",
                expected="a class of torch modules",
                got=got,
                hint=f"repair it, or set GRAPHSRT_DISABLED_ARCHS={architecture} to do without",
            )
        )

    found: Any = target
    if isinstance(target, str):
        module, _, name = target.partition(":")
        try:
            found = getattr(importlib.import_module(module), name)
        except Exception as error:  # another's code raises whatever it likes
            raise broken(f"{type(error).__name__}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise broken(repr(found))
    return found


def _refuse(
    config: PretrainedConfig, why: str, hint: str | None = None, expected: str = "a decoder-only causal LM"
) -> CompileError:
    names = ", ".join(getattr(config, "architectures", None) or []) or "no architectures"
    return CompileError(
        explain(
            f"{config.model_type} is not a causal language model that graphsrt can compile: {why}",
            where=f"config with model_type {config.model_type!r} ({names})",
            expected=expected,
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
    """The class whose checkpoint the config's is; of a multimodal config, the class of its text part.

    It is transformers' class, or where transformers has none, the one that is registered for the architecture.
    ``CompileError`` for encoder-decoder models, classes that are no causal LM, and multimodal models whose text part
    has no class of its own.
    """
    architecture = (getattr(config, "architectures", None) or [""])[0]
    own = reference(architecture) if architecture else None
    if own is not None:
        return _causal_class(config) or own
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
