"""Experts modules of transformers, as ``graphsrt::moe_experts`` operators.

transformers calls the experts of a mixture through an interface of its own, with the experts' weights as 3-D parameters
of a module that says how they lie. What such a module computes between its two products is found by running it on a few
numbers and comparing with what the operator can express; a module that agrees with nothing is refused by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from graphsrt import ops
from graphsrt.errors import CompileError, explain
from graphsrt.ops_experts import EXPERT_ACTIVATIONS, activate

_SETTING = "graphsrt_activation"
_LIMITS = ("limit", "swiglu_limit")
_ALPHAS = ("alpha", "swiglu_alpha")
_TOLERANCE = 1e-6
"""Between a module's activation and the operator's, in float64: some classes compute it in float32."""


def register(name: str) -> None:
    """Let transformers hand experts calls to us under ``name``; before transformers 5 there is no such interface."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(name, _experts)


def settle(model: nn.Module, name: str) -> None:
    """Make every experts module of ``model`` call us under ``name``, and find out what each computes.

    Raises CompileError for a module that the operator cannot express.
    """
    register(name)
    found: dict[tuple, dict[str, Any]] = {}
    for path, module in model.named_modules():
        forward = _OTHERS.get(type(module).__name__)
        if forward is not None:
            setattr(module, _SETTING, {"act": activation_name(module.act_fn)})  # type: ignore[arg-type]
            module.forward = functools.partial(forward, module)
        if not _uses_interface(module):
            continue
        module.config._experts_implementation_internal = name  # type: ignore[union-attr]
        if getattr(module, "has_post_expert_norm", False):
            raise _refuse(path, module, "a norm after each expert", "has_post_expert_norm=True")
        parameters = {key: getattr(module, key, None) for key in (*_LIMITS, *_ALPHAS)}
        key = (type(module), repr(getattr(module, "act_fn", None)), repr(parameters))
        if key not in found:
            found[key] = _activation(path, module)
        setattr(module, _SETTING, found[key])


def activation_name(function: nn.Module) -> str:
    """The key of :data:`EXPERT_ACTIVATIONS` that computes what ``function`` does; CompileError if none does."""
    sample = torch.linspace(-9, 9, 73, dtype=torch.float64, device="cpu")  # models are built on the meta device
    for name, known in EXPERT_ACTIVATIONS.items():
        if torch.allclose(known(sample), function(sample), rtol=_TOLERANCE, atol=_TOLERANCE):
            return name
    raise _refuse(
        "", function, "an activation of its own", f"{function}, unlike any of {', '.join(EXPERT_ACTIVATIONS)}"
    )


def _uses_interface(module: nn.Module) -> bool:
    return all(hasattr(module, flag) for flag in ("is_transposed", "is_concatenated", "has_bias", "has_gate"))


def _refuse(path: str, module: nn.Module, what: str, got: str) -> CompileError:
    return CompileError(
        explain(f"{type(module).__name__} needs {what}, which the experts operator does not carry", where=path, got=got)
    )


def _activation(path: str, module: nn.Module) -> dict[str, Any]:
    """The operator's attributes that give what the module computes between its two products."""
    gated = bool(module.has_gate)
    function: Any = module._apply_gate if gated else module.act_fn
    generator = torch.Generator().manual_seed(0)
    sample = 6 * torch.randn((5, 22), generator=generator, dtype=torch.float64)  # beyond the limits in use, 7 and 10
    sample[0] *= 4
    wanted = function(sample)
    limits = {None, *(getattr(module, n, None) for n in _LIMITS)} if gated else {None}
    alphas = {None, *(getattr(module, n, None) for n in _ALPHAS)} if gated else {None}
    for act in EXPERT_ACTIVATIONS:
        for limit in sorted(limits, key=str):
            for alpha in sorted(alphas, key=str) if act == "silu" else [None]:
                for offset in (0.0, 1.0) if gated else (0.0,):
                    given: dict[str, Any] = {
                        "act": act, "gated": gated, "interleaved": gated and not module.is_concatenated,
                        "limit": limit, "alpha": alpha, "up_offset": offset,
                    }  # fmt: skip
                    got = activate(sample, **given)
                    if got.shape == wanted.shape and torch.allclose(got, wanted, rtol=_TOLERANCE, atol=_TOLERANCE):
                        return given
    raise _refuse(
        path, module, "an activation of its own", f"{getattr(module, 'act_fn', '_apply_gate')}, unlike any of "
        f"{', '.join(EXPERT_ACTIVATIONS)}",
    )  # fmt: skip


def _experts(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """transformers' experts function: ``[T, E]``, ids and weights ``[T, k]`` -> ``[T, E]``."""

    def stored(name: str) -> torch.Tensor:
        weight = getattr(module, name)
        return weight.transpose(1, 2) if module.is_transposed else weight

    biases: dict[str, Any] = {}
    first = "gate_up_proj" if module.has_gate else "up_proj"
    if module.has_bias:
        biases = {"gate_up_bias": getattr(module, f"{first}_bias"), "down_bias": module.down_proj_bias}
    return ops.moe_experts(
        hidden_states, top_k_index, top_k_weights, stored(first), stored("down_proj"),
        **getattr(module, _SETTING), **biases,
    )  # fmt: skip


def _longcat_flash(module: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """LongCat-Flash loops over experts itself; ids beyond the real experts stand for the identity."""
    kept = (weights * (ids >= module.num_routed_experts)).sum(-1, keepdim=True)
    routed = ops.moe_experts(x, ids, weights, module.gate_up_proj, module.down_proj, **getattr(module, _SETTING))
    return routed + (x * kept).to(x.dtype)


_OTHERS: dict[str, Callable[..., torch.Tensor]] = {"LongcatFlashExperts": _longcat_flash}
"""Experts classes that do not use the interface -> what they compute, ``(module, x, ids, weights) -> [T, E]``."""
