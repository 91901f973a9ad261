"""Which architectures there are: every causal LM of the installed transformers; what is no decoder stands apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from graphsrt.errors import CompileError
from graphsrt.models.registry import UNSERVABLE, lookup, model_config

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok")
_BOTH_WAYS = {"causal": False, "attn_type": "bi"}
"""Fields by which XLM and XLNet say what BERT says with ``is_decoder``."""


@dataclass(frozen=True)
class Architecture:
    """A model type of transformers. ``apart`` says why it is no decoder-only model; None for one that is."""

    model_type: str
    class_name: str
    apart: str | None = None


def architectures() -> list[Architecture]:
    """All model types of transformers' causal-LM mapping, by name."""
    return [_architecture(name) for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)]


def _architecture(model_type: str) -> Architecture:
    declared = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    class_name = declared[0] if isinstance(declared, tuple) else declared
    config_class = CONFIG_MAPPING[model_type]
    if class_name.endswith("ForConditionalGeneration"):
        return Architecture(model_type, class_name, "multimodal; its text part is an architecture of its own")
    if "backbone_hidden_size" in _fields(config_class):
        return Architecture(model_type, class_name, "drafts for another model, whose keys and hidden states it reads")
    if getattr(config_class, "is_encoder_decoder", False):
        return Architecture(model_type, class_name, "encoder-decoder")
    if "is_decoder" in _fields(config_class) and not model_type.startswith("gpt_neox"):
        return Architecture(model_type, class_name, "an encoder that attends in both directions (is_decoder=False)")
    if "vision_config" in _fields(config_class) and class_name in UNSERVABLE:
        return Architecture(model_type, class_name, f"multimodal: {UNSERVABLE[class_name]}")
    try:
        config = config_class()
    except Exception:  # noqa: BLE001  (a class whose defaults it refuses itself is a row that says so)
        return Architecture(model_type, class_name)
    if getattr(config, "is_encoder_decoder", False):
        return Architecture(model_type, class_name, "encoder-decoder")
    for name, value in _BOTH_WAYS.items():
        if getattr(config, name, None) == value:
            both = f"attends in both directions unless its config says otherwise ({name}={value!r})"
            return Architecture(model_type, class_name, both)
    try:
        found = lookup(config)
    except CompileError as error:
        return Architecture(model_type, class_name, str(error).partition("\n")[0].partition(": ")[2])
    text = model_config(config, found)
    if text is not config and text.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return Architecture(model_type, class_name, f"multimodal; its text part is {text.model_type}")
    return Architecture(model_type, class_name)


def _fields(config_class: type) -> set[str]:
    return {name for base in config_class.__mro__ for name in getattr(base, "__annotations__", {})}


def model_class(model_type: str) -> Any:
    """The class that is captured for a config of this type."""
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(CONFIG_MAPPING[model_type]())]
    return found[0] if isinstance(found, tuple) else found


def kind(config: Any, class_name: str, stateful: bool) -> str:
    """``hybrid`` (state besides keys and values), ``MLA``, ``MoE`` or ``dense``, from what the config says.

    ``other``: no decoder of the plain kind, where a token sees the tokens before it, all or those in a window.
    """
    if stateful:
        return "hybrid"
    if class_name in UNSERVABLE:
        return "other"
    fields = vars(config)  # not getattr: what differs from layer to layer is no attribute of the whole config
    if fields.get("kv_lora_rank"):
        return "MLA"
    parts = [fields, *(vars(part) for part in fields.values() if hasattr(part, "to_dict"))]
    if any(part.get(name) for part in parts for name in _EXPERTS) and fields.get("is_moe", True):
        return "MoE"
    return "dense"
