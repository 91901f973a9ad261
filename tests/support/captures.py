"""Captures take seconds and tests only read them: each distinct one is made once in a test process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch

import graphsrt
from graphsrt.api import CompiledModel, Traced
from graphsrt.capture import capture
from graphsrt.program import Program
from tests.support import tiny

_captures: dict[tuple[str, str, int, str], Program] = {}


def _capture_once(model: Any, *, context_length: int, name: str | None = None, **more: Any) -> Program:
    parameter = next(model.parameters())
    tied = len(list(model.named_parameters())) != len(list(model.named_parameters(remove_duplicate=False)))
    key = (f"{type(model)}{model.config.to_json_string()}{tied}", str(parameter.dtype), context_length, repr(more))
    if key not in _captures:
        _captures[key] = capture(model, context_length=context_length, name=name, **more)
    return _captures[key].copy()


@contextmanager
def shared() -> Iterator[None]:
    """Inside, ``graphsrt.trace`` and ``graphsrt.compile`` get a copy of an equal capture where there is one."""
    with patch("graphsrt.capture.capture", _capture_once):
        yield


@cache
def traced(
    family: str, heads: int = 4, kv_heads: int = 2, tp: int = 2, dtype: torch.dtype = torch.float64, layers: int = 1
) -> Traced:
    """All stages of a tiny model. Programs in it are shared: copy one before changing it."""
    with shared():
        return graphsrt.trace(tiny.config(family, heads, kv_heads, layers), tp=tp, dtype=dtype)


def stage(name: str, family: str = "llama", **options: Any) -> Program:
    """A copy of the program after the named pass."""
    return traced(family, **options).program(after=name).copy()


def before(name: str, family: str = "llama", **options: Any) -> Program:
    """A copy of the program that the named pass gets."""
    return traced(family, **options).stages.around(name)[0].copy()


@cache
def compiled(
    family: str, heads: int, kv_heads: int, tp: int, layers: int = 2, options: tuple[tuple[str, Any], ...] = ()
) -> CompiledModel:
    """A tiny model in float64 on simulated ranks, through the whole pipeline."""
    model = tiny.model(family, heads, kv_heads, layers)
    with shared():
        return graphsrt.compile(model, tp=tp, ranks="simulated", dtype=torch.float64, **dict(options))
