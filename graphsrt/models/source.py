"""Anything that a user may call a model, resolved to one ``ModelSource``."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from graphsrt.errors import CheckpointError, CompileError, explain
from graphsrt.models import registry
from graphsrt.models.checkpoint import Checkpoint, StateDictCheckpoint, open_checkpoint
from graphsrt.models.conversion import convert, has_conversions, relaid
from graphsrt.models.folder import model_folder
from graphsrt.models.quantization import read_quantization, without_quantization
from graphsrt.models.quantization.scales import Stored, dequantized_others, find_scales, without_checkpoint
from graphsrt.models.quantization.scheme import Quantization
from graphsrt.models.tokenizer import load_tokenizer, no_tokenizer
from graphsrt.models.tying import (
    SCALE_RULES,
    SKIP_RULES,
    TEXT_ONLY_RULES,
    Accounting,
    SkipRule,
    accounting,
    effective_ties,
)

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass
class ModelSource:
    """A model before capture: its class and config, where its weights are, and what is needed to talk to it.

    ``reference`` is the class that is captured in place of ``model_class``, with the same parameter names, or None.
    ``checkpoint`` has the names and layouts of what is captured (experts stacked, old names changed), or is None when
    there is only a config. ``module`` is the model itself if it is in memory. ``dtype`` is the program's floating
    dtype; tensors stored in another one are cast by the loader. ``context_length`` is in tokens, None if the config
    sets no limit. ``eos_token_ids`` end a generation; empty if unknown. ``quantization``: how the checkpoint stores
    matrices, if not plainly (``config`` no longer says); ``stored``: of which modules, once there is a checkpoint.
    """

    name: str
    config: PretrainedConfig
    model_class: type
    dtype: torch.dtype
    context_length: int | None
    eos_token_ids: tuple[int, ...]
    reference: type[torch.nn.Module] | None = None
    module: torch.nn.Module | None = None
    checkpoint: Checkpoint | None = None
    folder: Path | None = None
    trust_remote_code: bool = False
    is_text_part: bool = False
    quantization: Quantization | None = None
    stored: dict[str, Stored] | None = None
    _skeleton: Any = field(default=None, repr=False)
    _is_tied_right: bool = field(default=False, repr=False)
    _declared_ties: dict[str, str] = field(default_factory=dict, repr=False)
    _effective_ties: dict[str, str] | None = field(default=None, repr=False)

    @cached_property
    def tokenizer(self) -> Any | None:
        """The tokenizer with its chat template, loaded at first use; None if there is none."""
        place = self.folder
        if place is None and self.module is not None and self.name and Path(self.name).is_dir():
            place = Path(self.name)
        return None if place is None else load_tokenizer(self.name, place, trust_remote_code=self.trust_remote_code)

    def require_tokenizer(self) -> Any:
        """The tokenizer; ``ValueError`` if there is none, for callers that were given text."""
        if self.tokenizer is None:
            raise no_tokenizer(self.name, self.folder)
        return self.tokenizer

    def skeleton(self) -> torch.nn.Module:
        """``module`` if there is one, else the model without weights, made once: parameters *and* buffers on meta.

        Parameters are shared between names exactly where ``ties()`` says so.
        """
        if self.module is not None:
            return self.module
        skeleton = self._bare_skeleton()
        if not self._is_tied_right and self.checkpoint is not None:
            for name in self._declared_ties.keys() - self.ties().keys():
                # Stored with two different values: transformers does not tie these, so neither does the skeleton.
                owner, _, leaf = name.rpartition(".")
                value = torch.empty_like(skeleton.get_parameter(name))
                setattr(skeleton.get_submodule(owner), leaf, torch.nn.Parameter(value, requires_grad=False))
                skeleton.all_tied_weights_keys.pop(name)
            self._is_tied_right = True
        return skeleton

    def _bare_skeleton(self) -> PreTrainedModel:
        """The model on meta, tied as the config says and not yet as the checkpoint is."""
        if self._skeleton is None:
            with torch.device("meta"):
                make = getattr(self.model_class, "_from_config", None)
                config = copy.deepcopy(self.config)
                model = make(config, dtype=self.dtype) if make else self.model_class(config)
            self._skeleton = model.eval().requires_grad_(False)
            # transformers' own answer: it depends on tie_word_embeddings of the config that the class was given.
            self._declared_ties = dict(getattr(model, "all_tied_weights_keys", None) or {})
        return self._skeleton

    def linear_modules(self) -> dict[str, tuple[str, ...]]:
        """Linear module -> the names of its class and of those that this derives from."""
        return {
            name: tuple(parent.__name__ for parent in type(module).__mro__)
            for name, module in self._bare_skeleton().named_modules()
            if isinstance(module, torch.nn.Linear)
        }

    def stored_modules(self) -> dict[str, Stored]:
        """Which modules' weights are stored in FP8, and how; of a config, as a checkpoint of it would store them."""
        if self.quantization is None:
            return {}
        if self.stored is not None:
            return self.stored
        return without_checkpoint(self.quantization.schemes(self.linear_modules()))

    def ties(self) -> dict[str, str]:
        """Parameter name → the name that it shares its tensor with. Of a model in memory, what it really shares."""
        if self.module is not None:
            first: dict[int, str] = {}
            ties = {}
            for name, value in self.module.named_parameters(remove_duplicate=False):
                kept = first.setdefault(id(value), name)
                if kept != name:
                    ties[name] = kept
            return ties
        self._bare_skeleton()
        declared = dict(self._declared_ties)
        if self.checkpoint is None:
            return declared
        if self._effective_ties is None:
            self._effective_ties = effective_ties(declared, self.checkpoint, base_prefix=self.base_prefix)
        return dict(self._effective_ties)

    @property
    def base_prefix(self) -> str:
        """The prefix of the base model inside the class (``model``, ``transformer``), which some checkpoints lack."""
        return getattr(self.model_class, "base_model_prefix", "") or ""

    def skip_rules(self) -> tuple[SkipRule, ...]:
        """Rules for checkpoint tensors that the program does not need: ours, and those that the class declares."""
        declared = getattr(self.model_class, "_keys_to_ignore_on_load_unexpected", None) or ()
        rules = tuple(SkipRule(pattern, f"{self.model_class.__name__} declares it unused") for pattern in declared)
        scales = SCALE_RULES if self.quantization is not None else ()
        return SKIP_RULES + rules + scales + (TEXT_ONLY_RULES if self.is_text_part else ())

    def require_checkpoint(self) -> Checkpoint:
        """The checkpoint; ``CheckpointError`` if there is only a config."""
        if self.checkpoint is None:
            raise CheckpointError(
                explain(
                    f"{self.name} has no weights",
                    got="a config",
                    hint="pass a checkpoint folder or a model to generate; a config is enough to look at the program",
                )
            )
        return self.checkpoint

    def account(self, expected: Mapping[str, Sequence[int]]) -> Accounting:
        """``tying.accounting`` of the parameters ``expected`` (name → shape) with this model's ties and skip rules."""
        checkpoint = self.require_checkpoint()
        if self.module is None:
            return accounting(expected, checkpoint, self.ties(), self.skip_rules(), base_prefix=self.base_prefix)
        # All that a module in memory holds is known; what the program does not use of it is no stray tensor.
        used = {**dict.fromkeys(expected), **self.ties()}
        rest = tuple(
            SkipRule(f"^{name.replace('.', r'[.]')}$", "in the module, but the program does not use it")
            for name in checkpoint.names()
            if name not in used
        )
        return accounting(expected, checkpoint, self.ties(), self.skip_rules() + rest, base_prefix="")


def resolve(
    model: torch.nn.Module | PretrainedConfig | str | os.PathLike,
    *,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
) -> ModelSource:
    """Find out what ``model`` is: a model in memory, a config, a folder, the name ``smollm2``, or a hub id. A model in
    memory is one of transformers, or a plain module ``(tokens [T], positions [T]) -> logits [T, V]`` with a ``config``.

    ``dtype`` (float64, float32, float16, bfloat16) overrides the config's; without either it is float32. Reads headers
    and small files only.

    ``ValueError`` for an argument that is none of these, ``CompileError`` for a model that cannot be compiled,
    ``CheckpointError`` for a folder whose weights are missing or damaged.
    """
    if dtype is not None and dtype not in _FLOATS:
        raise ValueError(explain("dtype must be a floating one", expected=", ".join(map(str, _FLOATS)), got=str(dtype)))
    if isinstance(model, torch.nn.Module) and isinstance(getattr(model, "config", None), PretrainedConfig):
        return _from_module(model, dtype)
    if isinstance(model, PretrainedConfig):
        return _from_config(model, dtype, name=getattr(model, "_name_or_path", "") or model.model_type)
    if not isinstance(model, str | os.PathLike):
        raise ValueError(
            explain(
                "this is no model",
                expected="a transformers PreTrainedModel or PretrainedConfig, a module (tokens, positions) -> logits "
                "that has a config, a folder, a hub id, or 'smollm2'",
                got=type(model).__name__,
            )
        )
    name, folder = os.fspath(model), model_folder(model, allow_pickle=allow_pickle)
    return _from_folder(name, folder, dtype, trust_remote_code, allow_pickle)


def _from_module(module: torch.nn.Module, dtype: torch.dtype | None) -> ModelSource:
    config: Any = module.config
    _refuse_quantized(config)
    is_plain, headless = True, False
    if isinstance(module, PreTrainedModel):
        is_plain, headless = False, module.get_output_embeddings() is None
    if headless or getattr(config, "is_encoder_decoder", False):
        raise CompileError(
            explain(
                f"{type(module).__name__} is not a causal language model",
                expected="a decoder-only model with a language-model head",
                hint="load it with AutoModelForCausalLM",
            )
        )
    text = getattr(config, "text_config", None)
    if not is_plain and text is not None and module.config_class is not type(text):
        raise CompileError(
            explain(
                f"{type(module).__name__} is multimodal",
                expected="a text-only causal LM",
                hint="pass its checkpoint folder: the text part is compiled if transformers has a class for it",
            )
        )
    registry.check_servable(config, type(module).__name__)
    generation = getattr(module, "generation_config", None)
    reference = registry.reference_of_module(module)
    return ModelSource(
        name=config._name_or_path or type(module).__name__,
        config=config,
        model_class=type(module),
        dtype=dtype or next(p.dtype for p in module.parameters() if p.is_floating_point()),
        context_length=_context_length(config),
        eos_token_ids=_eos(generation, config),
        reference=reference,
        module=module,
        checkpoint=relaid(StateDictCheckpoint(module.state_dict()), reference, config),
    )


def _from_config(
    config: PretrainedConfig, dtype: torch.dtype | None, name: str, model_class: type | None = None
) -> ModelSource:
    quantization = read_quantization(config)
    config = config if quantization is None else without_quantization(config)
    reference = None
    if model_class is None:  # else it is the model's own code that the user trusts
        model_class = registry.lookup(config)
        registry.check_servable(config, model_class.__name__)
        reference = registry.reference(*(config.architectures or [])[:1], model_class.__name__)
    inner = registry.model_config(config, model_class)
    return ModelSource(
        name=name,
        config=inner,
        model_class=model_class,
        dtype=dtype or _config_dtype(inner),
        context_length=_context_length(inner),
        eos_token_ids=_eos(None, inner, config),
        reference=reference,
        is_text_part=inner is not config,
        quantization=quantization,
    )


def _from_folder(
    name: str, folder: Path, dtype: torch.dtype | None, trust_remote_code: bool, allow_pickle: bool
) -> ModelSource:
    config, model_class = _read_config(folder, trust_remote_code)
    source = _from_config(config, dtype, name, model_class)
    source.folder, source.trust_remote_code = folder, trust_remote_code
    if source.quantization is None:
        source.quantization = read_quantization(config, folder)
    generation = None
    if (folder / "generation_config.json").exists():
        try:
            generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                explain("generation_config.json cannot be read", where=str(folder), got=str(error))
            ) from error
    source.eos_token_ids = _eos(generation, source.config, config)
    if not source.eos_token_ids:
        # Loading a tokenizer takes a while, so it is asked last.
        eos = getattr(source.tokenizer, "eos_token_id", None)
        source.eos_token_ids = () if eos is None else (int(eos),)
    raw = open_checkpoint(folder, allow_pickle=allow_pickle)
    if source.quantization is not None:
        if hasattr(source.reference, "layouts"):
            raise CompileError(
                explain(
                    f"{source.quantization.method} weights of {source.model_class.__name__} are not supported",
                    where="its reference model keeps matrices in a layout of its own",
                    hint="use the unquantized checkpoint",
                )
            )
        raw = dequantized_others(raw, source.quantization, source.linear_modules())
    if source.is_text_part or has_conversions(source.model_class, source.config, raw):
        rename = _text_name if source.is_text_part else (lambda stored: stored)
        raw = convert(raw, source._bare_skeleton(), rename)
    if source.quantization is not None:
        modules = source.linear_modules()
        raw, source.stored = find_scales(raw, source.quantization, modules, source.base_prefix)
    source.checkpoint = relaid(raw, source.reference, source.config)
    return source


def _text_name(stored: str) -> str:
    """Name of a tensor of a multimodal checkpoint inside the text model: the wrapper's prefixes are dropped."""
    for prefix, instead in (
        ("model.language_model.model.", "model."),
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ):
        if stored.startswith(prefix):
            return instead + stored.removeprefix(prefix)
    return stored


def read_config(path: str | os.PathLike, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The config in a ``.json`` file, or of a folder that may have no weights. Raises as ``resolve`` does."""
    return _read_config(Path(path), trust_remote_code)[0]


def _read_config(folder: Path, trust_remote_code: bool) -> tuple[PretrainedConfig, type | None]:
    """The config of a folder or file, and the class from its own code if that is trusted and there is one."""
    path = folder / "config.json" if folder.is_dir() else folder
    if not path.exists() and not folder.is_dir():
        raise CheckpointError(explain(f"{folder}: no such file", expected="a config.json or a folder that has one"))
    if not path.exists():
        raise CheckpointError(
            explain(
                f"{folder} is not a model folder",
                expected="config.json with the weights beside it",
                got=", ".join(sorted(p.name for p in folder.iterdir())[:10]) or "an empty folder",
            )
        )
    try:
        raw = json.loads(path.read_text())
        model_type = raw.get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(explain("config.json cannot be read", where=str(path), got=str(error))) from error
    auto_map = raw.get("auto_map") or {}
    if trust_remote_code and "AutoModelForCausalLM" in auto_map:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        config = AutoConfig.from_pretrained(folder, trust_remote_code=True, local_files_only=True)
        return config, get_class_from_dynamic_module(auto_map["AutoModelForCausalLM"], str(folder))
    if model_type not in CONFIG_MAPPING:
        if auto_map:
            raise CompileError(
                explain(
                    f"the model needs the code that comes with it (model_type {model_type!r})",
                    where=str(path),
                    got=f"auto_map: {', '.join(map(str, auto_map.values()))}",
                    hint="pass trust_remote_code=True after reading that code",
                )
            )
        architectures = ", ".join(raw.get("architectures") or []) or "none named"
        raise CompileError(
            explain(
                f"unknown architecture: model_type {model_type!r}, architectures {architectures}",
                where=str(path),
                expected="a model_type that the installed transformers knows",
                hint="a newer transformers may know it",
            )
        )
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True), None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(explain("config.json is not valid", where=str(path), got=str(error))) from error


def _refuse_quantized(config: PretrainedConfig) -> None:
    """A module in memory runs transformers' own quantised layers, which are not what is captured."""
    if read_quantization(config) is not None:
        raise CompileError(
            explain(
                "a quantised model in memory is not supported",
                where="quantization_config of the model's config",
                hint="pass its checkpoint folder instead",
            )
        )


def _config_dtype(config: PretrainedConfig) -> torch.dtype:
    dtype: Any = getattr(config, "dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), None)
    return dtype if dtype in _FLOATS else torch.float32


def _context_length(config: PretrainedConfig) -> int | None:
    # GPT-2's n_positions and the like are mapped to the common name by the config classes.
    length = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    return int(length) if length else None


def _eos(generation: Any, *configs: PretrainedConfig) -> tuple[int, ...]:
    """The first place that names any: the generation config, then the configs from the inside out."""
    for place in (generation, *configs):
        eos = getattr(place, "eos_token_id", None)
        if eos is not None:
            return tuple(int(token) for token in (eos if isinstance(eos, list | tuple) else [eos]))
    return ()
