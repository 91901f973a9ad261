"""verify: execute every stage of the pipeline on all simulated ranks and compare the numbers, node by node.

Everything runs in float64 with random weights, so that two programs that mean the same agree to about 1e-14 and the
tolerance has teeth. The reference is the program before it is sharded. A value of a later stage that bears a
reference's name is put together from the ranks by its placement and compared with it, so the first wrong node is named
and not only the logits. NaN is never equal to anything.
"""

from __future__ import annotations

import copy
import inspect
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.fx as fx

from graphsrt import ops
from graphsrt.errors import CompileError
from graphsrt.miniature import CONTEXT_LENGTH, miniature
from graphsrt.placement import Layout, Partial, Placement, Replicate, Shard, ShardTokens
from graphsrt.program import Input, Program, Weight, aten, where
from graphsrt.recipes import Ckpt, DequantFp8, Recipe, RopeTable, Transpose, evaluate, leaves
from graphsrt.simulate import Values, simulate

TOLERANCE = 1e-9
"""Largest difference allowed, relative to the largest magnitude of the value; float64 leaves about 1e-14."""
SMALL_PARAMETERS = 3_000_000
"""A model in memory of at most so many parameters is verified as it is, a larger one as a miniature."""
SMALL_BLOCK = 16
"""Side of a block of FP8 scales in a miniature: several blocks to a row, of which ranks hold parts."""
_PAD_ROWS = 3


@dataclass
class StageResult:
    """How one stage compares. ``max_error`` is relative; ``first_bad_node`` is None if everything agrees."""

    name: str
    max_error: float = 0.0
    first_bad_node: str | None = None
    reason: str | None = None
    num_compared: int = 0

    @property
    def ok(self) -> bool:
        return self.reason is None


@dataclass
class VerifyReport:
    """All stages in order."""

    stages: list[StageResult] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(stage.ok for stage in self.stages)

    def raise_if_bad(self) -> None:
        """Raise CompileError naming the first stage and node that differ."""
        for stage in self.stages:
            if not stage.ok:
                raise CompileError(f"{stage.name} changes what the program computes: {stage.reason}")

    def __str__(self) -> str:
        width = max((len(stage.name) for stage in self.stages), default=5)
        lines = [f"{'stage':{width}}  {'values':>6}  {'max error':>9}  result"]
        for stage in self.stages:
            result = "ok" if stage.ok else stage.reason
            lines.append(f"{stage.name:{width}}  {stage.num_compared:6}  {stage.max_error:9.1e}  {result}")
        return "\n".join(lines)


def verify(
    model: Any, tp: int = 1, *, passes: Sequence[Any] | None = None, strict: bool = False, seed: int = 0
) -> VerifyReport:
    """Trace a model (a ``ModelSource``, or what ``resolve`` takes) at ``tp`` and compare every stage.

    Weights are random in any case. A config, or a model above ``SMALL_PARAMETERS``, is replaced by its miniature.
    Raises CompileError where the passes themselves refuse the model.
    """
    from graphsrt.passes import PIPELINE, scatter_residual
    from graphsrt.passes.runner import bind, run_phases

    chosen = bind(PIPELINE if passes is None else passes, scatter_residual, min_tokens=1)  # so small, it never paid
    stages = run_phases(small_program(model, tp), chosen, strict=strict)
    return verify_stages(stages.everything(), seed=seed, passes=chosen)


def small_program(model: Any, tp: int) -> Program:
    """What :func:`verify` runs, captured in float64: the model itself if it is small, else its miniature."""
    from graphsrt.capture import capture, check_config
    from graphsrt.models.on_meta import on_meta
    from graphsrt.models.quantization.recipes import mark_stored
    from graphsrt.models.source import ModelSource, resolve

    source = model if isinstance(model, ModelSource) else resolve(model)
    module = source.module
    if module is None or sum(p.numel() for p in module.parameters()) > SMALL_PARAMETERS:
        check_config(source.config)
        quantization = None if source.quantization is None else source.quantization.with_block(SMALL_BLOCK)
        source = replace(
            source, config=miniature(source.config, tp), module=None, checkpoint=None, _skeleton=None,
            quantization=quantization, stored=None,
        )  # fmt: skip
    program = capture(on_meta(replace(source, dtype=torch.float64)), context_length=CONTEXT_LENGTH)
    mark_stored(program, source.stored_modules())
    program.mesh = {"tp": tp}
    return program


def verify_stages(
    stages: Sequence[tuple[str, Program]],
    *,
    axis: str = "tp",
    seed: int = 0,
    tokens: Iterable[int] | None = None,
    tolerance: float = TOLERANCE,
    passes: Sequence[Any] = (),
) -> VerifyReport:
    """Execute and compare (name, program) stages; the first must be whole on every rank, as captured.

    Until the first sharded stage each stage is the reference of the next; from then on the last whole one is. Token
    counts are 1, tp-1, tp, tp+1 and 37 unless given. ``passes``: those that made the stages; one that changes values on
    purpose (its attribute ``changes_values``) is applied to the reference as well, which stays whole.
    """
    programs = [(name, promoted(program)) for name, program in stages]
    ranks = max(program.mesh.get(axis, 1) for _, program in programs)
    limit = min((p.constants.get("context_length", 37) for _, p in programs), default=37)
    chosen = tokens if tokens is not None else (1, ranks - 1, ranks, ranks + 1, 37)
    counts = sorted({min(n, limit) for n in chosen if n >= 1})
    source = RandomSource(programs[0][1], seed)
    vocabulary = programs[0][1].constants.get("vocab_size", 2)
    report = VerifyReport()
    reference: Reference | None = None
    changing = _changing(passes)
    for name, program in programs:
        for done in [report for report in program.history if report.name in changing]:
            function = changing.pop(done.name)
            if "skip" in inspect.signature(function).parameters:  # what it left alone for how it is divided
                function = partial(function, skip=tuple(miss.node for miss in done.near_misses))
            reference = reference.after(function, source) if reference is not None else None
        sharded = is_sharded(program)
        if not sharded:
            program.mesh = {}  # the same on all ranks: once is enough
        result = StageResult(name)
        report.stages.append(result)
        weights = _load(program, source, axis, result)
        if weights is None:
            break
        stage = _Stage(program, weights, axis, tolerance, result)
        if reference is not None:
            _compare_stage(stage, reference, seed)
        elif "kv_pool" in program.inputs or sharded:
            raise ValueError("the first stage must be a whole program with plain attention, to compare with")
        if not sharded and "kv_pool" not in program.inputs and (reference is None or result.ok):
            reference = Reference(program, weights, axis, counts, vocabulary, seed)
        if not result.ok and not sharded:
            break  # a later stage would be compared with a wrong one
    return report


def _changing(passes: Sequence[Any]) -> dict[str, Any]:
    """The passes that change values on purpose, by name: of the pipeline, and of others that were run."""
    from graphsrt.passes import PIPELINE
    from graphsrt.passes.runner import _attribute, pass_name

    return {
        pass_name(function): function
        for function in [*PIPELINE, *passes]
        if _attribute(function, "changes_values", False)
    }


def _load(program: Program, source: RandomSource, axis: str, result: StageResult) -> dict[str, Values] | None:
    """Every weight on every rank; None, and the first operator that reads it named, if a recipe cannot be followed."""
    weights: dict[str, Values] = {}
    for name, weight in program.weights.items():
        reader = next(iter(program.weight_node(name).users), None)
        try:
            values = [evaluate(weight.recipe, rank, source, weight.dtype) for rank in range(program.mesh.get(axis, 1))]
        except (RuntimeError, ValueError, IndexError, KeyError) as error:
            _bad(result, reader, f"the weight {name} cannot be made: {str(error).splitlines()[0]}")
            return None
        wrong = next((list(value.shape) for value in values if value.shape != weight.shape), None)
        if wrong is not None:
            _bad(result, reader, f"the weight {name} is made with shape {wrong}, declared {list(weight.shape)}")
            return None
        weights[name] = values
    return weights


# -- programs and weights in float64 -----------------------------------------------------------------------------------


def promoted(program: Program) -> Program:
    """A copy that computes in float64: weights, pool and every cast of a float64 value to something narrower.

    float32 stays where it starts from integers or constants (rotary angles), since weights made from recipes, which
    the stages after recognition use in its place, are computed in float32 too.
    """
    wide = program.copy()
    model = wide.dtype
    for name, weight in wide.weights.items():
        if (
            weight.dtype.is_floating_point
            and weight.dtype.itemsize > 1
            and (weight.dtype == model or isinstance(weight.recipe, (Ckpt, RopeTable)) or weight.dtype.itemsize == 2)
        ):
            wide.weights[name] = Weight(weight.shape, torch.float64, weight.recipe, weight.placement)
    for name, item in wide.inputs.items():
        if item.dtype.is_floating_point:
            wide.inputs[name] = Input(item.shape, torch.float64, item.role)
    for node in list(wide.graph.nodes):
        if node.op == "get_attr":
            weight = wide.weights[str(node.target)]
            node.meta["val"] = wide.shapes.tensor(weight.shape, weight.dtype)
        elif node.op == "placeholder":
            item = wide.inputs[node.name]
            node.meta["val"] = wide.shapes.tensor(item.shape, item.dtype)
        elif node.op == "call_function":
            _promote(node, model)
            node.meta.pop("val", None)
            wide.infer([node])
    return wide


def _promote(node: fx.Node, model: torch.dtype) -> None:
    wide = any(getattr(a.meta["val"], "dtype", None) == torch.float64 for a in node.all_input_nodes)

    def widen(value: Any) -> Any:
        if not isinstance(value, torch.dtype) or not value.is_floating_point:
            return value
        return torch.float64 if wide or (value == model and value != torch.float32) else value

    node.args = tuple(widen(a) for a in node.args)
    node.kwargs = {key: widen(a) for key, a in node.kwargs.items()}


class RandomSource:
    """A checkpoint of random float64 tensors, the same for the same name, none of them zero or all alike."""

    def __init__(self, program: Program, seed: int = 0):
        self.seed = seed
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._embeddings: set[str] = set()
        self._scales: set[str] = set()
        self._tensors: dict[str, torch.Tensor] = {}
        for name, weight in program.weights.items():
            self._note(weight.recipe, weight.shape)
            users = program.weight_node(name).users
            if isinstance(weight.recipe, Ckpt) and any(user.target is aten.embedding.default for user in users):
                self._embeddings.add(weight.recipe.name)

    def _note(self, recipe: Recipe, shape: tuple[int, ...]) -> None:
        match recipe:
            case Ckpt(name):
                self._shapes[name] = shape
            case DequantFp8(x, scale, whole, block, input_scale=input_scale):
                self._note(x, whole)
                self._note(scale, tuple(-(-n // size) for n, size in zip(whole, block)))
                self._scales.update(leaves(scale))
                if input_scale is not None:
                    self._note(input_scale, (1, 1))
                    self._scales.update(leaves(input_scale))
            case Transpose(x, a, b):
                order = list(shape)
                order[a], order[b] = order[b], order[a]
                self._note(x, tuple(order))

    def shape(self, name: str) -> tuple[int, ...]:
        """Its whole shape."""
        return self._shapes[name]

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> torch.Tensor:
        """The tensor, or the given part of it."""
        if name not in self._tensors:
            self._tensors[name] = self._make(name)
        # a copy, since ranks must not share memory
        return (self._tensors[name] if slices is None else self._tensors[name][slices]).clone()

    def _make(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        value = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name in self._scales:  # what is stored times it, or divided by it, keeps its size, and no number saturates
            return ((0.5 + value.sigmoid()) * (0.05 if "input" in name else 1.0)).float().double()
        if len(shape) < 2:
            return 0.5 * value if name.endswith("bias") else 0.7 + 0.3 * value
        # a product with a matrix keeps the size of its input; an embedding has entries of about one
        return value if name in self._embeddings else value / math.sqrt(shape[-1])


def is_sharded(program: Program) -> bool:
    return any(node.target in ops.COLLECTIVES for node in program.nodes) or any(
        isinstance(weight.placement, (Shard, Partial)) for weight in program.weights.values()
    )


# -- the reference -----------------------------------------------------------------------------------------------------


class Reference:
    """Values of every node of a whole program, for a sequence of each token count, computed when asked for."""

    def __init__(
        self, program: Program, weights: dict[str, Values], axis: str, counts: list[int], vocabulary: int, seed: int
    ):
        self.program, self.weights, self.axis, self.counts = program, weights, axis, counts
        self.targets = {node.name: node.target for node in program.nodes}
        generator = torch.Generator().manual_seed(seed + 1)
        self.tokens = {n: torch.randint(0, vocabulary, (n,), generator=generator) for n in counts}
        self._values: dict[int, dict[str, Any]] = {}

    def after(self, function: Any, source: RandomSource) -> Reference:
        """The same sequences in this program as a pass changes it, by itself."""
        program = self.program.copy()
        if function(program) == 0:
            return self
        made = copy.copy(self)
        made.program, made._values = program, {}
        made.targets = {node.name: node.target for node in program.nodes}
        made.weights = {
            name: [evaluate(weight.recipe, 0, source, weight.dtype)] for name, weight in program.weights.items()
        }
        return made

    def values(self, count: int) -> dict[str, Any]:
        """Node name -> value for the sequence of ``count`` tokens."""
        if count not in self._values:
            found: dict[str, Any] = {}
            inputs: dict[str, torch.Tensor | Values] = {"tokens": self.tokens[count], "positions": torch.arange(count)}
            simulate(
                self.program, {n: inputs[n] for n in self.program.inputs}, self.weights, axis=self.axis,
                watch=lambda node, values: found.update({node.name: values[0]}) if node.op == "call_function" else None,
            )  # fmt: skip
            self._values[count] = found
        return self._values[count]

    def logits(self, count: int) -> torch.Tensor:
        return self.values(count)[self.program.output.name]


@dataclass
class _Stage:
    program: Program
    weights: dict[str, Values]
    axis: str
    tolerance: float
    result: StageResult

    @property
    def ranks(self) -> int:
        return self.program.mesh.get(self.axis, 1)


def _compare_stage(stage: _Stage, reference: Reference, seed: int) -> None:
    for count in reference.counts:
        watch = _Watch(stage, reference.values(count), reference.targets, f"T = {count}")
        try:
            if "kv_pool" in stage.program.inputs:
                out = _paged_once(stage, reference.tokens[count], watch, seed)
            else:
                given = {"tokens": reference.tokens[count], "positions": torch.arange(count)}
                inputs = {name: given[name] for name in stage.program.inputs}
                out = _whole(stage, simulate(stage.program, inputs, stage.weights, axis=stage.axis, watch=watch))
        except (RuntimeError, IndexError, ValueError) as error:
            _bad(stage.result, watch.last, f"{type(error).__name__} at T = {count}: {str(error).splitlines()[0]}")
            return
        if stage.result.ok:
            _compare_logits(stage, out, reference.logits(count), f"T = {count}")
        if not stage.result.ok:
            return
    if "kv_pool" in stage.program.inputs:
        _paged_steps(stage, reference, seed)


def _whole(stage: _Stage, out: Values) -> Values:
    """The results to look at: that of every rank, or the one that ranks hold parts of."""
    place = stage.program.output.meta.get("placement")
    return [gather(out, place)] if isinstance(place, Shard) else out


def _compare_logits(stage: _Stage, out: Values, wanted: torch.Tensor, told: str) -> None:
    node = stage.program.output
    for rank, value in enumerate(out):
        error, reason = _difference(value, wanted)
        stage.result.max_error = max(stage.result.max_error, error)
        if reason or not error <= stage.tolerance:
            _bad(stage.result, node, f"the result of rank {rank} {reason or f'is off by {error:.1e}'} ({told})")
            return


def _bad(result: StageResult, node: fx.Node | None, reason: str) -> None:
    if not result.ok:
        return
    if node is None:
        result.reason = reason
        return
    made = node.meta.get("made_by") or ()
    history = f", made by {', '.join(made)}" if made else ""
    result.first_bad_node = node.name
    result.reason = f"{node.name} {where(node)}{history}: {reason}".replace(" :", ":")


def _difference(value: torch.Tensor, wanted: torch.Tensor) -> tuple[float, str | None]:
    """Largest difference relative to the largest magnitude; a reason where there is no such number."""
    if value.shape != wanted.shape:
        return math.inf, f"has shape {list(value.shape)}, expected {list(wanted.shape)}"
    if not value.is_floating_point():
        return (0.0, None) if torch.equal(value, wanted.to(value.dtype)) else (math.inf, "holds other numbers")
    if value.numel() == 0:
        return 0.0, None
    if torch.isnan(value).any():
        return math.inf, "is NaN"
    same_infinities = torch.equal(torch.isinf(value), torch.isinf(wanted))
    finite = torch.isfinite(wanted)
    if not same_infinities or not torch.equal(value[~finite], wanted.to(value.dtype)[~finite]):
        return math.inf, "is infinite elsewhere"
    gap = (value.double() - wanted.double())[finite].abs()
    scale = float(wanted.double()[finite].abs().max()) if finite.any() else 1.0
    return (float(gap.max()) / (scale or 1.0) if gap.numel() else 0.0), None


class _Watch:
    """Looks at every value of a simulated run: replicas, storage, copies, and the reference's value of that name."""

    def __init__(self, stage: _Stage, values: Mapping[str, Any], targets: Mapping[str, Any], told: str):
        self.stage, self.values, self.targets, self.told = stage, values, targets, told
        self.last: fx.Node | None = None
        self.num_tokens = 0

    def __call__(self, node: fx.Node, values: Values) -> None:
        self.last = node
        if node.op == "placeholder" and node.name in ("tokens", "positions"):  # a program need not read both
            self.num_tokens = len(values[0])
        result = self.stage.result
        if not result.ok or values[0] is None:
            return
        wanted = self.values.get(node.name) if node.op == "call_function" else None
        placement = node.meta.get("placement")
        parts = list(zip(*values)) if isinstance(values[0], (tuple, list)) else [values]
        places = placement if isinstance(placement, (tuple, list)) else [placement] * len(parts)
        targets = wanted if isinstance(wanted, (tuple, list)) else [wanted] * len(parts)
        if len(targets) != len(parts) or (isinstance(wanted, torch.Tensor) and len(parts) > 1):
            targets = [None] * len(parts)  # the name now belongs to several values
        for mine, place, target in zip(parts, places, targets):
            self._one(node, list(mine), place, target)

    def _one(
        self, node: fx.Node, values: list[torch.Tensor], place: Placement | None, wanted: torch.Tensor | None
    ) -> None:
        result, told = self.stage.result, self.told
        storages = [value.untyped_storage().data_ptr() for value in values if value.numel()]
        if len(set(storages)) != len(storages):
            _bad(result, node, "two ranks share one tensor")
            return
        if values[0].is_floating_point() and values[0].itemsize == 1:  # few operators know eight-bit floats
            values = [value.float() for value in values]
            wanted = None if wanted is None else wanted.float()
        if place is None or isinstance(place, Replicate):
            for rank, value in enumerate(values[1:], start=1):
                if not torch.equal(torch.nan_to_num(value), torch.nan_to_num(values[0])):
                    _bad(result, node, f"is R, but rank {rank} and rank 0 hold other numbers ({told})")
                    return
        shape = list(values[0].shape)
        if isinstance(place, Shard) and shape[place.dim : place.dim + 1] != [place.layout.local_size]:
            _bad(result, node, f"has shape {shape} on a rank, its placement is {place} of {place.layout}")
            return
        value = gather(values, place)
        if isinstance(place, ShardTokens):
            value = value[: self.num_tokens]  # the rest pads
        if isinstance(place, Shard) and node.op == "call_function":
            wrong = _wrong_copy(values, value, place, self.stage.tolerance)
            if wrong is not None:
                _bad(result, node, f"rank {wrong} holds copies that differ from what they copy ({told})")
                return
        if wanted is None or not isinstance(wanted, torch.Tensor):
            return
        if wanted.shape != value.shape:
            # Dims of size 1 come and go with normalisation; a name may also pass to another value.
            sizes = [[size for size in tensor.shape if size != 1] for tensor in (value, wanted)]
            if sizes[0] == sizes[1]:
                wanted = wanted.reshape(value.shape)
            elif node.target is not self.targets.get(node.name) or not is_sharded(self.stage.program):
                return
        error, reason = _difference(value, wanted)
        result.num_compared += 1
        if reason or not error <= self.stage.tolerance:
            _bad(result, node, f"{reason or f'is off by {error:.1e}'} ({told}){self._new_above(node)}")
        else:
            result.max_error = max(result.max_error, error)

    def _new_above(self, node: fx.Node) -> str:
        """The values that go into a wrong one and that the reference has not: it may be one of these that is wrong."""
        found: dict[str, None] = {}
        stack = [node]
        while stack:
            for used in stack.pop().all_input_nodes:
                if used.op == "call_function" and used.name not in self.values and used.name not in found:
                    found[used.name] = None
                    stack.append(used)
        return f"; what goes into it that is new: {', '.join(list(found)[:4])}" if found else ""


def gather(values: Values, place: Placement | None) -> torch.Tensor:
    """The global value, put together from every rank's owned positions; of divided tokens with the padding."""
    if isinstance(place, ShardTokens):
        return torch.cat(list(values))
    if isinstance(place, Partial):
        stacked = torch.stack(list(values))
        return stacked.sum(0) if place.op == "sum" else stacked.amax(0)
    if not isinstance(place, Shard):
        return values[0]
    shape = list(values[0].shape)
    shape[place.dim] = place.layout.size
    whole = values[0].new_empty(shape)
    for value, (local, address) in zip(values, _positions(place.layout, owned=True)):
        whole.index_copy_(place.dim, address, value.index_select(place.dim, local))
    return whole


def _wrong_copy(values: Values, whole: torch.Tensor, place: Shard, tolerance: float) -> int | None:
    """The first rank that holds a copy, a pad included, that is not what it claims to copy."""
    for rank, (local, address) in enumerate(_positions(place.layout, owned=False)):
        if len(local):
            copies = values[rank].index_select(place.dim, local)
            error, reason = _difference(copies, whole.index_select(place.dim, address))
            if reason or not error <= tolerance:
                return rank
    return None


def _positions(layout: Layout, *, owned: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each rank: local positions and their global addresses, of the runs that are owned or not."""
    found = []
    for rank in layout.runs:
        local: list[int] = []
        address: list[int] = []
        position = 0
        for run in rank:
            if run.owned == owned:
                local += range(position, position + run.length)
                address += range(run.start, run.start + run.length)
            position += run.length
        found.append((torch.tensor(local, dtype=torch.int64), torch.tensor(address, dtype=torch.int64)))
    return found


# -- paged programs ----------------------------------------------------------------------------------------------------


class _Memory:
    """Pools of NaN and the table of two sequences whose slots lie in random order."""

    def __init__(self, stage: _Stage, lengths: Sequence[int], seed: int):
        generator = torch.Generator().manual_seed(seed + 2)
        slots = sum(lengths) + 5
        order = torch.randperm(slots, generator=generator)
        self.table = torch.zeros((len(lengths) + 2, max(lengths) + 1), dtype=torch.int32)
        self.rows = torch.randperm(len(lengths) + 2, generator=generator)[: len(lengths)]
        start = 0
        for row, length in zip(self.rows.tolist(), lengths):
            self.table[row, :length] = order[start : start + length].to(torch.int32)
            start += length
        self.pools: dict[str, Values] = {}
        for name, item in stage.program.kv_pools.items():
            shape = [slots if isinstance(size, str) else size for size in item.shape]
            self.pools[name] = [torch.full(shape, math.nan, dtype=item.dtype) for _ in range(stage.ranks)]

    def step(
        self,
        stage: _Stage,
        tokens: Sequence[torch.Tensor],
        start: Sequence[int],
        pad_token: int | None = None,
        watch: Any = None,
    ) -> Values:
        """Run the new ``tokens`` of every sequence, which has ``start`` tokens in the pool; all logits are wanted."""
        lengths = [len(t) for t in tokens]
        places = [self.table[row, s : s + n] for row, s, n in zip(self.rows.tolist(), start, lengths)]
        given: dict[str, Any] = {
            "tokens": torch.cat(list(tokens)),
            "positions": torch.cat([torch.arange(s, s + n) for s, n in zip(start, lengths)]),
            "req_to_token": self.table,
            "req_pool_indices": self.rows,
            "seq_lens": torch.tensor([s + n for s, n in zip(start, lengths)]),
            "query_start_loc": torch.tensor([0, *lengths]).cumsum(0),
            "out_cache_loc": torch.cat(places).to(torch.int64),
            **self.pools,
            "logit_rows": torch.arange(sum(lengths)),
        }
        if pad_token is not None:
            given["tokens"] = torch.cat([given["tokens"], torch.full((_PAD_ROWS,), pad_token)])
            given["positions"] = torch.cat([given["positions"], torch.full((_PAD_ROWS,), pad_token % 7)])
            given["out_cache_loc"] = torch.cat([given["out_cache_loc"], torch.full((_PAD_ROWS,), -1)])
        inputs = {name: given[name] for name in stage.program.inputs}
        out = simulate(stage.program, inputs, stage.weights, axis=stage.axis, watch=watch)
        return [value[: sum(lengths)] for value in _whole(stage, out)]


def _paged_once(stage: _Stage, tokens: torch.Tensor, watch: _Watch, seed: int) -> Values:
    """The whole sequence in one step, in a fresh pool; twice more with padded rows of different contents."""
    out = _Memory(stage, [len(tokens)], seed).step(stage, [tokens], [0], watch=watch)
    padded = [_Memory(stage, [len(tokens)], seed).step(stage, [tokens], [0], pad_token=pad) for pad in (0, 1)]
    # An expert multiplies all rows routed to it at once: pads among them may change how the others are rounded.
    allowed = stage.tolerance if stage.program.calls(ops.moe_experts) else 0.0
    for first, second in zip(*padded):
        if stage.result.ok and not (torch.equal(first, second) or _difference(first, second)[0] <= allowed):
            _bad(stage.result, stage.program.output, f"depends on what padded rows hold (T = {len(tokens)})")
    if stage.result.ok:
        _compare_logits(stage, padded[0], out[0], f"T = {len(tokens)} and {_PAD_ROWS} padded rows")
    return out


def _paged_steps(stage: _Stage, reference: Reference, seed: int) -> None:
    """Two sequences in one batch: prefill in chunks, then token by token, against their logits in one go."""
    counts = [reference.counts[-1], reference.counts[len(reference.counts) // 2]]
    memory = _Memory(stage, counts, seed + 3)
    done = [0, 0]
    chunks = [_chunks(count) for count in counts]
    for step in range(max(map(len, chunks))):
        sizes = [chunk[step] if step < len(chunk) else 0 for chunk in chunks]
        tokens = [reference.tokens[c][s : s + n] for c, s, n in zip(counts, done, sizes)]
        told = f"step {step}: {sizes[0]} and {sizes[1]} new tokens after {done[0]} and {done[1]}"
        try:
            out = memory.step(stage, tokens, done)
        except (RuntimeError, IndexError, ValueError) as error:
            _bad(stage.result, stage.program.output, f"{type(error).__name__} in {told}: {str(error).splitlines()[0]}")
            return
        wanted = torch.cat([reference.logits(c)[s : s + n] for c, s, n in zip(counts, done, sizes)])
        _compare_logits(stage, out, wanted, told)
        if not stage.result.ok:
            return
        done = [s + n for s, n in zip(done, sizes)]


def _chunks(count: int) -> list[int]:
    """Two prefill chunks, then up to three single tokens."""
    singles = min(3, count - 1)
    first = (count - singles + 1) // 2
    return [n for n in (first, count - singles - first, *[1] * singles) if n]
