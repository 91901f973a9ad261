"""Everything that is asked of one architecture: captured once, then divided over each number of ranks and executed."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from graphsrt.api import with_checkpoint_names
from graphsrt.capture import capture
from graphsrt.coverage.architectures import kind
from graphsrt.coverage.audit import Audit, audit
from graphsrt.coverage.pieces import LENGTHS, PAGE, Feeder, run_pieces
from graphsrt.coverage.tiny_config import CONTEXT, SIZES
from graphsrt.coverage.tiny_model import eager_logits, tiny_model, tiny_tokens, worst
from graphsrt.errors import GraphsrtError
from graphsrt.models.on_meta import on_meta
from graphsrt.models.source import resolve
from graphsrt.models.stateful import check_stateless, is_stateful
from graphsrt.passes import PIPELINE
from graphsrt.passes.runner import run
from graphsrt.program import Program
from graphsrt.runtime.model_runner import EngineSizes, simulated_runner

TOKENS = (1, 2, 7, 37)
EAGER_TOLERANCE = 1e-5
"""transformers computes norms, rope and softmax in float32 whatever the model's dtype is: 24 bits, not 53."""
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
    row.kind = kind(model.config, is_stateful(model))
    try:
        check_stateless(model)
    except GraphsrtError as error:
        row.refused = " ".join(str(error).split())
        return row
    try:
        wanted = {count: eager_logits(model, tiny_tokens(count, seed=count)) for count in TOKENS}
        sequences = [tiny_tokens(count, seed=count + 50) for count in LENGTHS]
        wanted_pieces = [eager_logits(model, ids) for ids in sequences]
    except Exception as error:  # noqa: BLE001  (as above)
        row.refused = f"transformers cannot run it: {_first_line(error)}"
        return row
    try:
        source = resolve(model, dtype=torch.float64)
        program = capture(on_meta(source), context_length=CONTEXT, name=model_type)
    except GraphsrtError as error:
        row.refused = " ".join(str(error).split())
        row.seconds = time.monotonic() - start
        return row
    alone: dict[int, torch.Tensor] = {}
    for tp in tps:
        row.tp[tp] = _one(program, source, tp, wanted, sequences, wanted_pieces, alone)
    row.seconds = time.monotonic() - start
    return row


def _one(
    captured: Program, source: Any, tp: int, wanted: dict[int, torch.Tensor], sequences: list[list[int]],
    wanted_pieces: list[torch.Tensor], alone: dict[int, torch.Tensor],
) -> TpResult:  # fmt: skip
    program = captured.copy()
    program.mesh = {"tp": tp}
    try:
        stages = run(program, PIPELINE)
        final = with_checkpoint_names(stages, source)
    except GraphsrtError as error:
        return TpResult("refused", " ".join(str(error).split()))
    checkpoint = source.require_checkpoint()
    result = TpResult("ok", audit=audit(stages))
    logits = {}
    try:
        for count in wanted:
            feeder = Feeder(simulated_runner(final, checkpoint, ENGINE), ENGINE, [tiny_tokens(count, seed=count)])
            feeder.step({0: count})
            logits[count] = feeder.logits[0][0]
        pieces = run_pieces(simulated_runner(final, checkpoint, ENGINE), ENGINE, sequences)
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:
        return TpResult("wrong", f"does not run: {_first_line(error)}", audit=result.audit)
    result.error_eager = max(worst(logits[count], wanted[count]) for count in wanted)
    result.error_pieces = max((worst(got, want) for got, want in zip(pieces, wanted_pieces)), default=0.0)
    if not alone:
        alone.update(logits)
    result.error_ranks = max(worst(logits[count], alone[count]) for count in wanted)
    if not result.error_eager <= EAGER_TOLERANCE:
        result.status, result.reason = "wrong", f"logits differ from transformers by {result.error_eager:.1e}"
    elif not result.error_ranks <= RANKS_TOLERANCE:
        result.status, result.reason = "wrong", f"logits differ from those of one rank by {result.error_ranks:.1e}"
    elif not result.error_pieces <= EAGER_TOLERANCE:
        result.status, result.reason = "wrong", f"chunks and decode differ by {result.error_pieces:.1e}"
    elif result.audit is not None and result.audit.faults:
        result.status, result.reason = "partly", "; ".join(result.audit.faults)
    return result


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:300]
