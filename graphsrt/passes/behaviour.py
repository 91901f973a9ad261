"""Structure proposes, behaviour confirms: run a matched region against its replacement on numbers.

Inputs are random at scales 1e-4, 1 and 1e3 with rows of zeros among them. In the dtypes that models are served in the
two must agree bitwise, since a difference means another cast order or another constant; in float64 a model's own
float32 casts make them differ by float32 rounding, which is allowed for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from graphsrt.dump import SEED
from graphsrt.program import Program, map_arguments, target_name

_ROWS = 5
SCALES = (1e-4, 1.0, 1e3)
_seen: dict[tuple, str | None] = {}


def disagreement(
    program: Program,
    outputs: list[fx.Node],
    values: dict[str, fx.Node],
    literals: dict[str, Any],
    replacement: Callable,
    scales: tuple[float, ...] = SCALES,
) -> str | None:
    """None if the region between ``values`` and ``outputs`` computes what ``replacement`` does, else the reason.

    ``scales``: of the first value; one is enough for what is linear in it.
    """
    region = _region(outputs, set(values.values()))
    key = (replacement, tuple(sorted(literals.items())), tuple(_signature(program, n, values) for n in region),
           tuple((k, program.shape(n), n.meta["val"].dtype) for k, n in values.items()))  # fmt: skip
    if key not in _seen:
        _seen[key] = _compare(program, region, outputs, values, literals, replacement, scales)
    return _seen[key]


def _signature(program: Program, node: fx.Node, values: dict[str, fx.Node]) -> tuple:
    return target_name(node.target), program.shape(node), str([a for a in node.args if not isinstance(a, fx.Node)])


def _region(outputs: list[fx.Node], stop: set[fx.Node]) -> list[fx.Node]:
    """Operators between the values and the outputs, producers first."""
    order: list[fx.Node] = []
    done: set[fx.Node] = set()

    def visit(node: fx.Node) -> None:
        if node in done or node in stop:
            return
        done.add(node)
        for argument in node.all_input_nodes:
            visit(argument)
        if node.op == "call_function":
            order.append(node)

    for out in outputs:
        visit(out)
    return order


def _compare(
    program: Program, region: list[fx.Node], outputs: list[fx.Node], values: dict[str, fx.Node],
    literals: dict[str, Any], replacement: Callable, scales: tuple[float, ...],
) -> str | None:  # fmt: skip
    generator = torch.Generator().manual_seed(SEED)
    for scale in scales:
        given = {}
        for name, node in values.items():
            given[name] = _sample(program, node, scale if name == next(iter(values)) else 1.0, generator)
        found = {values[name]: value for name, value in given.items()}
        for node in region:
            args, kwargs = map_arguments(node, found.__getitem__)
            found[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        wanted = replacement(**given, **literals)
        for out, want in zip(outputs, wanted if isinstance(wanted, tuple) else (wanted,)):
            got = found[out]
            if got.shape != want.shape or got.dtype != want.dtype:
                return f"gives {want.dtype} {list(want.shape)}, the model {got.dtype} {list(got.shape)}"
            # float64: the model casts to float32 inside (24 bits); the operator does not
            bound = 1e-5 * float(want.abs().max())
            same = (
                torch.equal(got, want) if got.dtype != torch.float64 else torch.allclose(got, want, rtol=0, atol=bound)
            )
            if not same:
                error = (got.double() - want.double()).abs().max().item()
                return f"same structure but other numbers: differs by {error:.3g} at input scale {scale:g}"
    return None


def _sample(program: Program, node: fx.Node, scale: float, generator: torch.Generator) -> torch.Tensor:
    shape = [_ROWS if isinstance(size, str) else size for size in program.shape(node)]
    dtype = node.meta["val"].dtype
    if not dtype.is_floating_point:
        return torch.randint(0, 7, shape, generator=generator, dtype=dtype)
    value = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    if value.dim() > 1:
        value[..., -1, :] = 0.0
    return value.to(dtype)
