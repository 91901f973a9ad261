"""The model of a :class:`~graphsrt.models.source.ModelSource` on the meta device, ready to be captured."""

from __future__ import annotations

import torch
from torch import nn

from graphsrt.capture import meta_model, meta_twin
from graphsrt.errors import CompileError, explain
from graphsrt.models.checkpoint import StateDictCheckpoint
from graphsrt.models.conversion import relaid
from graphsrt.models.source import ModelSource


def on_meta(source: ModelSource) -> nn.Module:
    """A reference model where the registry has one, else a twin of the model in memory, else the class of the config.

    Parameters are in the source's dtype, have the checkpoint's names, and are shared as the checkpoint shares them.
    ``CompileError`` where a reference model has other parameters than the class that it stands for.
    """
    if source.reference is None and source.module is not None:
        return meta_twin(source.module, source.dtype)
    model = meta_model(source.config, source.reference or source.model_class, source.dtype)
    if source.reference is not None:
        _compare(model, source)
    _share(model, source.ties())
    return model


def _compare(model: nn.Module, source: ModelSource) -> None:
    """Checkpoints are read by name: a reference has the names and shapes of the class that wrote them, but for what it
    says itself of parameters that it keeps in another way."""
    mine, theirs = (
        {name: list(p.shape) for name, p in net.named_parameters(remove_duplicate=False)}
        for net in (model, source.skeleton())
    )
    layouts = getattr(type(model), "layouts", None)
    if layouts is not None:
        as_stored = {n: torch.empty(()).expand(shape) for n, shape in theirs.items()}
        view = relaid(StateDictCheckpoint(as_stored), type(model), source.config)
        theirs = {name: list(view.shape(name)) for name in view.names()}
    if mine != theirs:
        left, right = ({f"{name} {shape}" for name, shape in own.items()} for own in (mine, theirs))
        shown = {"only in the model": sorted(right - left), "only in the reference": sorted(left - right)}
        raise CompileError(
            explain(
                f"the parameters of {source.model_class.__name__} and its reference model differ",
                where=f"{type(model).__module__}:{type(model).__name__}",
                got="; ".join(f"{where}: {', '.join(names[:5])}" for where, names in shown.items() if names),
                hint="a changed model needs a class of its own, which is then captured itself",
            )
        )


def _share(model: nn.Module, ties: dict[str, str]) -> None:
    """Share parameters exactly where ``ties`` says: a head stored apart from the embedding is its own weight."""
    seen: set[nn.Parameter] = set()
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if parameter in seen:
            owner, _, leaf = name.rpartition(".")
            own = nn.Parameter(torch.empty_like(parameter), requires_grad=False)
            setattr(model.get_submodule(owner), leaf, own)
        seen.add(parameter)
    for name, kept in ties.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, model.get_parameter(kept))
