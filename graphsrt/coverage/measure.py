"""Everything that is asked of one architecture: captured once, then divided over each number of ranks and executed."""

from __future__ import annotations

import functools
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from graphsrt.api import with_checkpoint_names
from graphsrt.capture import capture
from graphsrt.coverage.architectures import kind
from graphsrt.coverage.audit import Audit, audit
from graphsrt.coverage.mechanisms import mechanisms, without_effect
from graphsrt.coverage.pieces import LENGTHS, PAGE, Feeder, run_pieces
from graphsrt.coverage.tiny_config import CONTEXT, SIZES
from graphsrt.coverage.tiny_model import eager_logits, tiny_model, tiny_tokens, worst
from graphsrt.errors import CompileError, GraphsrtError
from graphsrt.models.on_meta import on_meta
from graphsrt.models.source import resolve
from graphsrt.models.stateful import check_stateless, is_stateful
from graphsrt.passes import PIPELINE, shard_tensor_parallel
from graphsrt.passes.runner import Stages, run, run_phases
from graphsrt.program import Program
from graphsrt.runtime.model_runner import EngineSizes, simulated_runner
from graphsrt.runtime.phases import Phases
from graphsrt.simulate import load
from graphsrt.verification import promoted

TOKENS = (1, 2, 7, 37)
EAGER_TOLERANCE = 1e-5
"""transformers computes norms, rope and softmax in float32 whatever the model's dtype is: 24 bits, not 53."""
FLOAT32_TOLERANCE = 1e-4
"""Where the class casts by itself and runs in float32 only: every product and sum has 24 bits."""
RANKS_TOLERANCE = 1e-10
"""Between numbers of ranks only the order of sums differs."""
ENGINE = EngineSizes(max_running=4, context_length=CONTEXT, page_size=PAGE, num_pages=24)


@dataclass
class TpResult:
    """One architecture on one number of ranks. ``status``: ok, partly, refused or wrong; ``reason`` for all but ok."""

    status: str
    reason: str = ""
    error_eager: float | None = None
    error_ranks: float | None = None
    error_pieces: float | None = None
    audit: Audit | None = None


@dataclass
class Row:
    """One line of the table."""

    model_type: str
    class_name: str
    sizes: str
    kind: str = "?"
    mechanisms: list[str] = field(default_factory=list)
    tp: dict[int, TpResult] = field(default_factory=dict)
    without_effect: list[str] = field(default_factory=list)
    """What could be lost without the comparison noticing: the tiny model is too weak a test of it."""
    refused: str = ""
    """Why there is no program at all; empty if there is one."""
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(model_type: str, sizes: str = "8/4", tps: tuple[int, ...] = (1, 2, 4, 8)) -> Row:
    """Run the whole comparison in this process. Errors that graphsrt raises on purpose become the row's reason."""
    start = time.monotonic()
    row, heads = Row(model_type, "", sizes), SIZES[sizes]
    try:
        model = tiny_model(model_type, heads)
    except Exception as error:  # noqa: BLE001  (transformers' own code raises anything; it is why there is no model)
        row.refused = f"transformers cannot build it: {_first_line(error)}"
        return row
    row.class_name = type(model).__name__
    row.kind = kind(model.config, row.class_name, is_stateful(model))
    try:
        check_stateless(model)
        reference = _reference(model)
        source = resolve(model, dtype=torch.float64)
        program = capture(on_meta(source), context_length=CONTEXT, name=model_type)
        whole = run(program, PIPELINE[:_SHARD])
        row.mechanisms = mechanisms(whole.programs[0][1], whole.final)
        row.without_effect = _without_effect(whole, source)
        served = _Served(model, source.name)
        for tp in tps:
            row.tp[tp] = _one(whole, source, tp, reference)
            _count_as_served(row.tp[tp], served, tp)
    except GraphsrtError as error:
        row.refused = " ".join(str(error).split())
    row.seconds = time.monotonic() - start
    return row


class _Served:
    """The same model in bfloat16, which is never executed here: captured when it is first asked for."""

    def __init__(self, model: Any, name: str):
        self._model, self._name = model, name

    @functools.cached_property
    def whole(self) -> Stages:
        source = resolve(self._model, dtype=torch.bfloat16)
        return run(capture(on_meta(source), context_length=CONTEXT, name=self._name), PIPELINE[:_SHARD])

    def audit(self, tp: int) -> Audit:
        """Of the program of ``tp`` ranks."""
        program = self.whole.final.copy()
        program.mesh = {"tp": tp}
        return audit(run(program, PIPELINE[_SHARD:]).final, self.whole.programs[0][1])


def _count_as_served(result: TpResult, served: _Served, tp: int) -> None:
    """Faults are those of the program that is served. Where a class adds in float32, a float64 program rounds on the
    way there and has to complete a sum first; one in bfloat16 does not."""
    if result.status != "partly":
        return
    found = served.audit(tp)
    if len(found.faults) < len(result.audit.faults if result.audit else ()):
        result.audit, result.reason = found, "; ".join(found.faults)
        result.status = "partly" if found.faults else "ok"


_SHARD = PIPELINE.index(shard_tensor_parallel)
"""What is before it is the same for all numbers of ranks and runs once."""


@dataclass
class _Reference:
    """What transformers computes: token count -> logits ``[T, V]``, and those of the sequences that come in pieces."""

    whole: dict[int, torch.Tensor]
    sequences: list[list[int]]
    pieces: list[torch.Tensor]
    tolerance: float = EAGER_TOLERANCE
    first: Program | None = None
    """The program of the first number of ranks that ran, and its logits: others are compared with them."""
    first_logits: dict[int, torch.Tensor] = field(default_factory=dict)


def _reference(model: Any) -> _Reference:
    """In float64; in float32 where the class cannot run in anything wider. The model is in float64 again afterwards."""
    sequences = [tiny_tokens(count, seed=count + 50) for count in LENGTHS]
    failure: Exception | None = None
    for dtype, tolerance in ((torch.float64, EAGER_TOLERANCE), (torch.float32, FLOAT32_TOLERANCE)):
        try:
            model.to(dtype)
            whole = {count: eager_logits(model, tiny_tokens(count, seed=count)) for count in TOKENS}
            pieces = [eager_logits(model, ids) for ids in sequences]
        except Exception as error:  # noqa: BLE001  (as above)
            failure = failure or error
            continue
        model.to(torch.float64)  # what was rounded to float32 stays as it is, so both have the same weights
        return _Reference(whole, sequences, pieces, tolerance)
    raise CompileError(f"transformers cannot run it: {_first_line(failure)}")


def _without_effect(whole: Stages, source: Any) -> list[str]:
    """What the tiny model is too weak a test of."""
    named = with_checkpoint_names(Stages([("capture", whole.programs[0][1].copy())]), source)
    return without_effect(named, load(named, source.require_checkpoint()), tiny_tokens(TOKENS[-1]))


def _one(whole: Stages, source: Any, tp: int, reference: _Reference) -> TpResult:
    """Divide over ``tp`` ranks, execute, compare."""
    program = whole.final.copy()
    program.mesh = {"tp": tp}
    try:
        stages = run_phases(program, PIPELINE[_SHARD:])
        # shapes of the checkpoint are those of the captured program: recipes have changed since
        captured = ("capture", whole.programs[0][1].copy())
        final = with_checkpoint_names(Stages([captured, *stages.programs]), source)
    except GraphsrtError as error:
        return TpResult("refused", " ".join(str(error).split()))
    checkpoint = source.require_checkpoint()
    result = TpResult("ok", audit=audit(final, whole.programs[0][1]))
    try:
        logits = _logits(final, checkpoint)
        pieces = run_pieces(simulated_runner(Phases(final), checkpoint, ENGINE), ENGINE, reference.sequences)
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:
        return TpResult("wrong", f"does not run: {_first_line(error)}", audit=result.audit)
    if reference.first is None:
        reference.first, reference.first_logits = final, logits
    result.error_eager = max(worst(logits[count], want) for count, want in reference.whole.items())
    result.error_pieces = max(worst(got, want) for got, want in zip(pieces, reference.pieces))
    result.error_ranks = max(worst(logits[count], want) for count, want in reference.first_logits.items())
    if result.error_ranks > RANKS_TOLERANCE:  # sums that the model itself takes in float32: compare without its casts
        wide, first = (_logits(promoted(program), checkpoint) for program in (final, reference.first))
        result.error_ranks = max(worst(wide[count], want) for count, want in first.items())
    if not result.error_eager <= reference.tolerance:
        result.status, result.reason = "wrong", f"logits differ from transformers by {result.error_eager:.1e}"
    elif not result.error_ranks <= RANKS_TOLERANCE:
        result.status, result.reason = "wrong", f"logits differ from those of one rank by {result.error_ranks:.1e}"
    elif not result.error_pieces <= reference.tolerance:
        result.status, result.reason = "wrong", f"chunks and decode differ by {result.error_pieces:.1e}"
    elif result.audit is not None and result.audit.faults:
        result.status, result.reason = "partly", "; ".join(result.audit.faults)
    return result


def _logits(program: Program, checkpoint: Any) -> dict[int, torch.Tensor]:
    """Of one sequence for each token count, in one step."""
    found = {}
    for count in TOKENS:
        feeder = Feeder(simulated_runner(Phases(program), checkpoint, ENGINE), ENGINE, [tiny_tokens(count, seed=count)])
        feeder.step({0: count})
        found[count] = feeder.logits[0][0]
    return found


def _first_line(error: BaseException | None) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:300]
