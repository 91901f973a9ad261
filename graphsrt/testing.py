"""For people who write passes: small programs, what a pass makes of them, and whether the numbers stay the same.

    program = trace(lambda x, gate, up: F.silu(F.linear(x, gate)) * F.linear(x, up),
                    inputs={"x": ("T", 34)}, weights={"gate": (46, 34), "up": (46, 34)})
    done = check(recognize_gated_mlp, program, fires=1)
    assert "glu(" in done.after                                      # the text of the step, before and after
    check(recognize_gated_mlp, other, fires=0, near_miss="gate and up differ")

:func:`check` runs a pass with all that the runner does around it, compares the numbers of all simulated ranks before
and after (:func:`check_ranks`), and applies the pass a second time, which must find nothing to do.
"""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from graphsrt.check_placements import _leaf_shapes as whole_shapes
from graphsrt.errors import CompileError
from graphsrt.passes.runner import Pass, pass_name, run
from graphsrt.placement import Partial, Placement, Shard, ShardTokens
from graphsrt.printer import diff_text, print_program
from graphsrt.program import Input, NearMiss, Program, Weight
from graphsrt.recipes import (
    Cat,
    Ckpt,
    DequantFp8,
    Mul,
    OnOwner,
    Quantized,
    Recipe,
    Repeat,
    ShardOf,
    Take,
    TensorSource,
    Transpose,
)
from graphsrt.simulate import Values, load, simulate

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.04, torch.float16: 0.01}
"""Largest difference between two programs that only associate sums differently, relative to the largest value."""


def trace(
    model: Any,
    *,
    tp: int = 1,
    dtype: torch.dtype | str | None = None,
    passes: Sequence[Pass] | None = None,
    without: Iterable[str] = (),
    stop_after: str | None = None,
    inputs: Mapping[str, tuple[int | str, ...]] | None = None,
    weights: Mapping[str, tuple[int, ...]] | None = None,
    **options: Any,
) -> Program:
    """The program of a model, or of a small function, after some passes.

    ``model``: what :func:`graphsrt.trace` takes (and then ``passes`` defaults to the pipeline), or a function of
    tensors. A function's parameters are named in ``inputs`` (sizes are ints or ``"T"``; names that begin with
    ``tokens`` or ``positions`` are int64) and ``weights`` (each a checkpoint tensor of that shape); no passes run
    unless given. A view in it must say -1 for the number of tokens.
    """
    if inputs is None and weights is None:
        from graphsrt.api import trace as trace_model

        traced = trace_model(
            model, tp=tp, dtype=dtype, passes=passes, without=without, stop_after=stop_after, **options
        )
        return traced.program()
    if without or stop_after or options:
        raise ValueError("a function is traced without a pipeline; give the passes to run with passes=[…]")
    from graphsrt.api import _dtype

    program = _of_function(model, dict(inputs or {}), dict(weights or {}), _dtype(dtype) or torch.float64)
    program.mesh = {"tp": tp}
    return run(program, passes or []).final


@dataclass(frozen=True)
class Checked:
    """What a pass did: the text of the step (its operators and result) before and after, and the program itself."""

    before: str
    after: str
    diff: str
    fired: int
    near_misses: list[NearMiss]
    program: Program


def check(
    function: Pass,
    model: Any,
    *,
    fires: int | None = None,
    near_miss: str | None = None,
    tolerance: float | None = None,
    tokens: Sequence[int] = (1, 2, 7),
    source: TensorSource | None = None,
    **options: Any,
) -> Checked:
    """Apply a pass and assert everything that must hold of any pass; returns the texts for closer looks.

    ``model``: a :class:`Program` (it is left as it is), or what :func:`trace` takes, with its options. ``fires``: how
    often the pass must fire (default: at least once). With ``fires=0`` the program must come out unchanged.
    ``near_miss``: words of the reason of some near miss. ``tolerance``: 0 for bitwise equality; by default
    :data:`TOLERANCE`. ``tokens``: how many tokens the programs are run with. ``source``: the checkpoint
    (default random).

    Raises AssertionError saying what failed, CompileError from the runner's own checks.
    """
    before = model if isinstance(model, Program) else trace(model, **options)
    program = before.copy()
    misses: list[NearMiss] = []
    name = pass_name(function)
    if fires == 0:
        fired = _apply(function, program, misses)
    else:
        report = run(program, [function]).final.history[-1]
        fired, misses = report.fired, report.near_misses
    text = print_program(program, history=False)
    if fires is None:
        assert fired > 0, f"{name} fired nowhere{_nearest(misses)}"
    else:
        assert fired == fires, f"{name} fired {fired} times, expected {fires}{_nearest(misses)}"
    if fires == 0:
        assert text == print_program(before, history=False), f"{name} says that it did nothing, but changed the program"
    if near_miss is not None:
        reasons = [miss.reason for miss in misses]
        assert any(near_miss in reason for reason in reasons), f"no near miss says {near_miss!r}; reasons: {reasons}"
    check_ranks(before, program, tolerance=tolerance, tokens=tokens, source=source)
    again = program.copy()
    assert (twice := _apply(function, again, [])) == 0, f"{name} fired {twice} times when applied a second time"
    second = diff_text(text, print_program(again, history=False), "first application", "second application")
    assert not second, f"{name} changed the program when applied a second time:\n{second}"
    return Checked(step_text(before), step_text(program), diff_text(before, program), fired, misses, program)


def check_ranks(
    before: Program,
    after: Program,
    *,
    tolerance: float | None = None,
    tokens: Sequence[int] = (1, 2, 7, 37),
    source: TensorSource | None = None,
    inputs: Mapping[str, torch.Tensor | Values] | None = None,
) -> float:
    """Run two programs on all their simulated ranks and assert that they compute the same.

    Both get the same checkpoint (``source``, default random) and the same inputs: one sequence of each number of
    ``tokens`` from position 0 on, or ``inputs``. A replicated result must be bitwise the same on every rank. A program
    that selects rows is asked for all of them. Returns the largest difference, relative to the largest value.
    """
    tolerance = TOLERANCE[before.output.meta["val"].dtype] if tolerance is None else tolerance
    source = source or RandomSource(checkpoint_shapes(before, after), _ckpt_dtypes(before))
    weights = load(before, source), load(after, source)
    largest = 0.0
    for count in tokens if inputs is None else (0,):
        wanted, got = (
            result(program, {**example_inputs(program, count), **(inputs or {})}, loaded)
            for program, loaded in zip((before, after), weights)
        )
        told = f"with {count} tokens" if inputs is None else "with the given inputs"
        assert got.shape == wanted.shape and got.dtype == wanted.dtype, (
            f"{told}: {got.dtype} {list(got.shape)}, expected {wanted.dtype} {list(wanted.shape)}"
        )
        assert torch.isfinite(got).all() and torch.isfinite(wanted).all(), f"{told}: values are not finite"
        difference = float((got.double() - wanted.double()).abs().max())
        scale = float(wanted.double().abs().max()) or 1.0
        largest = max(largest, difference / scale)
        assert difference <= tolerance * scale, f"{told}: differs by {difference / scale:.3g}, allowed {tolerance:.3g}"
    return largest


def result(
    program: Program, inputs: Mapping[str, torch.Tensor | Values], weights: Mapping[str, Values]
) -> torch.Tensor:
    """The global value that a program returns, put together from all simulated ranks by its placement."""
    return whole(simulate(program, inputs, weights), program.output.meta.get("placement"))


def whole(values: Values, placement: Placement | None, tokens: int | None = None) -> torch.Tensor:
    """The global value of one local tensor for each rank. AssertionError if replicas or copies of a shard differ.

    ``tokens``: of the step, where they are divided.
    """
    match placement:
        case ShardTokens():
            return torch.cat(list(values))[:tokens]
        case Partial(op):
            return torch.stack(values).sum(0) if op == "sum" else torch.stack(values).amax(0)
        case Shard(dim, layout):
            shape = list(values[0].shape)
            shape[dim] = layout.size
            joined = torch.full(shape, float("nan"), dtype=values[0].dtype)
            for rank, value in enumerate(values):
                position = 0
                for run_ in layout.runs[rank]:
                    if run_.owned:
                        joined.narrow(dim, run_.start, run_.length).copy_(value.narrow(dim, position, run_.length))
                    position += run_.length
            return joined
    for rank, value in enumerate(values):
        assert torch.equal(value, values[0]), f"rank {rank} holds another value than rank 0, though it is replicated"
    return values[0]


def step_text(program: Program) -> str:
    """The operators and the result of a program as text, one a line, without the comments that follow them."""
    lines = print_program(program, history=False).partition("\nstep:\n")[2].splitlines()
    return "\n".join(line.partition("  # ")[0].strip() for line in lines)


def example_inputs(program: Program, tokens: int, *, seed: int = 0) -> dict[str, torch.Tensor | Values]:
    """Inputs of a program for one sequence of ``tokens`` tokens, all rows wanted, its KV in slots out of order."""
    generator = torch.Generator().manual_seed(seed + tokens)
    ranks = program.mesh.get("tp", 1)
    context = max(tokens, 1)
    slots = torch.randperm(context, generator=generator) + 1
    sizes = {"T": tokens, "B": 1, "B1": 2, "R": tokens, "num_reqs": 2, "max_context": context, "slots": context + 1}
    known: dict[str, torch.Tensor] = {
        "positions": torch.arange(tokens),
        "forward_batch.req_to_token": torch.stack([torch.zeros_like(slots), slots]).to(torch.int32),
        "forward_batch.req_pool_indices": torch.tensor([1]),
        "forward_batch.seq_lens": torch.tensor([tokens]),
        "forward_batch.query_start_loc": torch.tensor([0, tokens]),
        "forward_batch.out_cache_loc": slots[:tokens],
        "forward_batch.logit_rows": torch.arange(tokens),
    }
    made: dict[str, torch.Tensor | Values] = {}
    for name, item in program.inputs.items():
        shape = [sizes.get(size, 3) if isinstance(size, str) else size for size in item.shape]
        if item.role in known:
            made[name] = known[item.role]
        elif item.role == "kv_pool":
            made[name] = [torch.full(shape, float("nan"), dtype=item.dtype) for _ in range(ranks)]
        elif item.dtype.is_floating_point:
            made[name] = torch.randn(shape, generator=generator, dtype=torch.float64).to(item.dtype)
        else:
            bound = program.constants.get("vocab_size", 5)
            made[name] = torch.randint(0, bound, shape, generator=generator, dtype=item.dtype)
    return made


class RandomSource:
    """A checkpoint of random tensors, the same for the same name; matrices are scaled to keep the size of values."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype] | None = None):
        self.shapes = dict(shapes)
        self.dtypes = dict(dtypes or {})
        self._tensors: dict[str, torch.Tensor] = {}

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's whole shape."""
        return self.shapes[name]

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> torch.Tensor:
        """The tensor, or the given part of it."""
        if name not in self._tensors:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            value = torch.randn(self.shapes[name], generator=generator, dtype=torch.float64)
            value = value / math.sqrt(value.shape[-1]) if value.dim() > 1 else value * 0.3 + 0.7
            self._tensors[name] = value.to(self.dtypes.get(name, torch.float64))
        return self._tensors[name] if slices is None else self._tensors[name][slices]


def checkpoint_shapes(*programs: Program) -> dict[str, tuple[int, ...]]:
    """The whole shapes of the checkpoint tensors that programs read, from their weights' shapes and recipes."""
    found: dict[str, tuple[int, ...]] = {}
    for program in programs:
        for weight in program.weights.values():
            _leaf_shapes(weight.recipe, list(weight.shape), found)
    return found


# -- helpers -----------------------------------------------------------------------------------------------------------


def _leaf_shapes(
    recipe: Recipe, shape: list[int], found: dict[str, tuple[int, ...]], *, at_least: bool = False
) -> None:
    """``at_least``: the tensor is as large as ``shape``, or larger, where other weights read more of it."""
    match recipe:
        case Ckpt(name) if at_least and name in found:
            found[name] = tuple(map(max, found[name], shape))
        case Ckpt(name):
            if found.setdefault(name, tuple(shape)) != tuple(shape):
                raise CompileError(f"{name} is read as {tuple(shape)} and as {found[name]}")
        case ShardOf(x, dim, layout):
            _leaf_shapes(
                x, [layout.size if d == dim else size for d, size in enumerate(shape)], found, at_least=at_least
            )
        case Take(x, dim, addresses):
            end = max(int(text.lstrip("~").split(":")[1]) for text in addresses)
            _leaf_shapes(x, [end if d == dim else size for d, size in enumerate(shape)], found, at_least=True)
        case Transpose(x, dim0, dim1):
            swapped = list(shape)
            swapped[dim0], swapped[dim1] = shape[dim1], shape[dim0]
            _leaf_shapes(x, swapped, found, at_least=at_least)
        case OnOwner(x):
            _leaf_shapes(x, shape, found)
        case DequantFp8() | Repeat() | Quantized():
            for name, sizes in whole_shapes(recipe, list(shape)):
                if None not in sizes:
                    found[name] = tuple(size for size in sizes if size is not None)
        case Mul(x, by, dim):
            _leaf_shapes(x, shape, found)
            _leaf_shapes(by, [shape[dim]], found)
        case Cat(parts, dim):
            for part in parts:
                size = _size_along(part, dim, found)
                if size is not None:
                    _leaf_shapes(part, [size if d == dim else s for d, s in enumerate(shape)], found)


def _size_along(part: Recipe, dim: int, found: Mapping[str, tuple[int, ...]]) -> int | None:
    """Local size of one part of a concatenation; None if only another weight or program can tell."""
    while isinstance(part, (Mul, Quantized)):
        part = part.x
    if isinstance(part, ShardOf) and part.dim == dim:
        return part.layout.local_size
    if isinstance(part, Repeat) and part.dim == dim:
        return part.size
    if isinstance(part, DequantFp8):
        return part.shape[dim]
    while isinstance(part, (ShardOf, OnOwner)):
        part = part.x
    return found[part.name][dim] if isinstance(part, Ckpt) and part.name in found else None


def _ckpt_dtypes(program: Program) -> dict[str, torch.dtype]:
    return {w.recipe.name: w.dtype for w in program.weights.values() if isinstance(w.recipe, Ckpt)}


def _apply(function: Pass, program: Program, misses: list[NearMiss]) -> int:
    """The pass alone, so that firing nowhere is no error."""
    options = {"near_misses": misses} if "near_misses" in inspect.signature(function).parameters else {}
    fired = function(program, **options)
    program.remove_dead()
    program.infer()
    program.lint()
    return fired


def _nearest(misses: list[NearMiss]) -> str:
    return f"; nearest miss: {misses[0].node}: {misses[0].reason}" if misses else ""


def _of_function(
    function: Callable[..., Any],
    inputs: dict[str, tuple[int | str, ...]],
    weights: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
) -> Program:
    """A function of tensors as a program; the operators are traced, and no values computed."""
    from torch.fx.experimental.proxy_tensor import make_fx

    names = list(inspect.signature(function).parameters)
    if set(names) != {*inputs, *weights}:
        raise ValueError(f"the function takes {names}; inputs and weights name {[*inputs, *weights]}")
    sizes = {"T": 1009, "B": 1013, "R": 1019}
    program = Program(getattr(function, "__name__", "function").strip("<>"))
    values: dict[fx.Node, fx.Node] = {}
    declared: dict[str, fx.Node] = {}
    for name, shape in inputs.items():
        integer = name.startswith(("tokens", "positions"))
        role = name if name in ("tokens", "positions") else f"input.{name}"
        declared[name] = program.add_input(name, Input(tuple(shape), torch.int64 if integer else dtype, role))
    for name, shape in weights.items():
        declared[name] = program.add_weight(name, Weight(tuple(shape), dtype, Ckpt(name)))
    example = [
        torch.zeros(
            [sizes.get(s, 3) if isinstance(s, str) else s for s in (inputs | weights)[name]],  # type: ignore[operator]
            dtype=declared[name].meta["val"].dtype,
        )
        for name in names
    ]
    graph = make_fx(function, tracing_mode="fake", pre_dispatch=True)(*example).graph
    for node, name in zip([n for n in graph.nodes if n.op == "placeholder"], names):
        values[node] = declared[name]
    for node in graph.nodes:
        if node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda a: values[a])
            values[node] = program.call(node.target, *args, name=node.name, **kwargs)
        elif node.op == "output":
            program.graph.output(values[node.args[0]])
    program.infer()
    return program


__all__ = [
    "Checked", "RandomSource", "check", "check_ranks", "checkpoint_shapes", "example_inputs", "result", "step_text",
    "trace", "whole",
]  # fmt: skip
