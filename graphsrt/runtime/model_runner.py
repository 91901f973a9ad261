"""One rank's side of a step: the flat buffer in, the program run, and on rank 0 the sampled tokens out."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from graphsrt import huge_pages
from graphsrt.errors import CompileError
from graphsrt.lowering.captured_steps import Capture, CapturedSteps
from graphsrt.lowering.collectives import ProcessCollectives
from graphsrt.lowering.executable import Executable
from graphsrt.lowering.launches import Spent
from graphsrt.models.checkpoint import open_spec
from graphsrt.program import LOGITS, Program
from graphsrt.runtime.agreement import COMPARE_EVERY, Agreement
from graphsrt.runtime.forward_batch import ForwardBatch, ForwardMode
from graphsrt.runtime.load_plan import LoadReport
from graphsrt.runtime.logprobs import log_probabilities
from graphsrt.runtime.phases import Phases, RunText
from graphsrt.runtime.sampler import Sampling, sample
from graphsrt.runtime.split_logits import Columns, Gather, edit
from graphsrt.runtime.weights import load_weights
from graphsrt.runtime.wire import StepReply
from graphsrt.simulate import load, simulate_outputs


@dataclass(frozen=True)
class EngineSizes:
    """How large the engine's tables are: sequences at a time, tokens of a sequence, KV slots of a layer."""

    max_running: int
    context_length: int
    page_size: int
    num_pages: int

    @property
    def num_slots(self) -> int:
        """KV slots; page 0 is reserved and never used."""
        return self.num_pages * self.page_size


@dataclass(frozen=True)
class RankInit:
    """What a rank process is started with. ``texts``: of :meth:`Phases.texts`."""

    texts: tuple[RunText, ...]
    checkpoint: dict[str, Any]
    sizes: EngineSizes
    backend: str
    device: str
    compare_every: int = COMPARE_EVERY


_ZERO = np.zeros(1, dtype=np.int64)
Execute = Callable[[dict[str, Any]], dict[str, list[torch.Tensor]]]


class ModelRunner:
    """Owns one rank's KV pools and ``req_to_token`` table.

    execute: a step's inputs → what the program returns by name, each on this rank or, with ``pools`` of them, on all
    ranks: ``logits`` [R, V], or each rank's columns of them, which ``gather`` puts together where that is asked for;
    hidden states [R, E]. ``prefill``: from how many tokens on another function does the same, and that function.
    """

    load_report: LoadReport | None = None

    def __init__(
        self,
        program: Program,
        execute: Execute,
        sizes: EngineSizes,
        *,
        prefill: tuple[int, Execute] | None = None,
        capture: Capture | None = None,
        rank: int = 0,
        gather: Gather = torch.stack,
        device: str = "cpu",
        pools: int | None = None,
        spent: Spent | None = None,
        agreement: Agreement | None = None,
    ):
        """``capture``: of steps that decode, if they are to be captured. ``spent``: by ``execute`` and by what
        ``capture`` gives; timed here if they do not say. ``agreement``: of all ranks."""
        self._agreement = agreement or Agreement(None)
        self._spent = spent or Spent()
        self._execute = execute if spent is not None else self._timed(execute)
        self._prefill = prefill
        self._rank = rank
        self._device = device
        self._columns = Columns.of(program.output, rank, gather)
        self._logits_dtype = torch.float64 if program.dtype == torch.float64 else torch.float32
        self._req_to_token = torch.zeros(sizes.max_running, sizes.context_length, dtype=torch.int32, device=device)
        self._embeds = program.inputs.get("input_embeds")
        self._kv_pools: dict[str, list[torch.Tensor]] = {}  # on each rank; unwritten slots are never read
        for name, declared in program.kv_pools.items():
            shape = [sizes.num_slots if size == "slots" else int(size) for size in declared.shape]
            self._kv_pools[name] = [huge_pages.empty(shape, declared.dtype, device) for _ in range(pools or 1)]
        self._pool_inputs: dict[str, Any] = {n: pool if pools else pool[0] for n, pool in self._kv_pools.items()}
        lent = {"req_to_token": self._req_to_token, **self._pool_inputs}
        self._captured: CapturedSteps | None = None
        if capture is not None and CapturedSteps.serves(program, lent):
            self._captured = CapturedSteps(program, capture, lent, sizes.max_running)
        self._slots_dims = {name: declared.shape.index("slots") for name, declared in program.kv_pools.items()}

    def step(self, buffer: np.ndarray) -> StepReply | None:
        """Run one encoded :class:`ForwardBatch`. Rank 0 replies with a token for each logit row."""
        self._agreement.begin(buffer)
        return self.step_batch(ForwardBatch.decode(buffer))

    def step_batch(self, batch: ForwardBatch) -> StepReply | None:
        """The same of a batch that has not come from another process; ``step`` is for those that have."""
        before = replace(self._spent)
        with nullcontext() if batch.save_kv_cache else self._put_back(batch):
            reply = self._step(batch)
        if reply is not None:
            self._agreement.compare(reply.token_ids)
        if self._rank != 0:
            return None
        if reply is not None:
            reply.collectives_s = self._spent.collectives_s - before.collectives_s
            reply.compute_s = self._spent.kernels_s - before.kernels_s
        return reply

    @contextmanager
    def _put_back(self, batch: ForwardBatch) -> Iterator[None]:
        """Leave the pools and the table as they are. A step attends to its own keys in the slots that it writes, so
        these are lent to it and get back what was in them; no operator needs to know."""
        pools = [(pool, self._slots_dims[name]) for name, ranks in self._kv_pools.items() for pool in ranks]
        slots = self._tensor(batch.out_cache_loc[batch.out_cache_loc >= 0])
        rows, columns, _ = (self._tensor(part) for part in batch.req_to_token_updates())
        pools = [(pool.view(torch.uint8) if pool.itemsize == 1 else pool, dim) for pool, dim in pools]  # FP8 as bytes
        kept = [pool.index_select(dim, slots) for pool, dim in pools]
        table = self._req_to_token[rows, columns]
        try:
            yield
        finally:
            for (pool, dim), values in zip(pools, kept):
                pool.index_copy_(dim, slots, values)
            self._req_to_token[rows, columns] = table

    def _step(self, batch: ForwardBatch) -> StepReply | None:
        rows, columns, slots = batch.req_to_token_updates()
        if self._device == "cpu":
            self._req_to_token.numpy()[rows, columns] = slots
        else:
            self._req_to_token[self._tensor(rows), self._tensor(columns)] = self._tensor(slots).int()
        # a prefill chunk that ends no prompt wants no logits; one row keeps every shape at least one
        logit_rows = batch.logit_rows if len(batch.logit_rows) else _ZERO
        inputs = {
            "tokens": batch.tokens,
            "positions": batch.positions,
            "req_pool_indices": batch.req_pool_indices,
            "seq_lens": batch.seq_lens,
            "query_start_loc": batch.query_start_loc(),
            "out_cache_loc": batch.out_cache_loc,
            "logit_rows": logit_rows,
        }
        outputs, size = self._run(batch, inputs)
        num_rows = len(batch.logit_rows)
        given = {
            name: [part if part.shape[0] == num_rows else part[:num_rows] for part in parts]
            for name, parts in outputs.items()
        }
        local = given.pop(LOGITS)
        if self._rank != 0 and not self._columns.split and not self._agreement.due:
            return None
        # Every rank that holds a part of the vocabulary goes through all of this, in the same order.
        reply = self._sample(batch, local)
        reply.captured_rows = size
        if batch.return_logits:
            # A captured step's results are there until the next one.
            reply.logits = self._columns.whole(local).to(self._logits_dtype, copy=size > 0)
        if batch.return_hidden:
            reply.hidden = {name: parts[0].to(self._logits_dtype, copy=size > 0) for name, parts in given.items()}
        return reply

    def _run(self, batch: ForwardBatch, inputs: Mapping[str, np.ndarray]) -> tuple[dict[str, list[torch.Tensor]], int]:
        """What the program returns; and the rows of the captured step that ran, 0 if sizes were as they came."""
        is_prefill = self._prefill is not None and batch.num_tokens >= self._prefill[0]
        if self._captured is not None and batch.forward_mode == ForwardMode.DECODE and not is_prefill:
            rows = batch.batch_size
            size = self._captured.size(rows) if rows == batch.num_tokens == len(batch.logit_rows) else None
            if size is not None:
                results = self._captured.run(inputs, rows, compiled=batch.size_is_compiled)
                return {name: [value] for name, value in results.items()}, size
        given = {name: self._tensor(value) for name, value in inputs.items()}
        given |= {"req_to_token": self._req_to_token, **self._pool_inputs}
        if self._embeds is not None:
            given |= self._embeddings(batch)
        execute = self._prefill[1] if is_prefill else self._execute  # type: ignore[index]
        return execute(given), 0

    def _timed(self, execute: Execute) -> Execute:
        def timed(inputs: dict[str, Any]) -> dict[str, list[torch.Tensor]]:
            start = time.perf_counter()
            try:
                return execute(inputs)
            finally:
                self._spent.kernels_s += time.perf_counter() - start

        return timed

    def _sample(self, batch: ForwardBatch, local: list[torch.Tensor]) -> StepReply:
        if not len(batch.logit_rows):
            return StepReply(np.empty(0, dtype=np.int64))
        logits = self._columns.cut(local)
        edited = logits
        if len(batch.edit_rows):
            where = self._tensor(batch.edit_rows), self._tensor(batch.edit_tokens)
            edited = edit(logits, *where, *map(self._floats, (batch.edit_bias, batch.edit_scale, batch.edit_shift)))
        how = None
        if any(batch.temperature.tolist()):  # NumPy's own any takes longer for few numbers, and these are few
            # On the host: what is decided by these costs no synchronisation with a device.
            values = (batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.uniform)
            how = Sampling(*(torch.from_numpy(np.array(value)) for value in values))
        tokens = sample(edited, how)
        reply = StepReply((tokens if tokens.is_cpu else tokens.cpu()).numpy())
        if len(batch.logprob_rows):
            rows, targets = self._tensor(batch.logprob_rows), self._tensor(batch.logprob_targets)
            targets = torch.where(targets < 0, tokens[rows], targets)
            reply.logprobs = log_probabilities(logits, rows, targets, int(batch.logprob_top.max()))
        return reply

    def close(self) -> None:
        """Drop the pools and the program."""
        self._kv_pools, self._pool_inputs = {}, {}
        self._req_to_token = None  # type: ignore[assignment]
        self._execute, self._prefill, self._captured = _closed, None, None

    def _embeddings(self, batch: ForwardBatch) -> dict[str, torch.Tensor]:
        assert self._embeds is not None
        width, rows = int(self._embeds.shape[1]), self._tensor(batch.embeds_rows)
        embeds = torch.zeros(batch.num_tokens, width, dtype=self._embeds.dtype, device=self._device)
        is_embeds = torch.zeros(batch.num_tokens, 1, dtype=torch.bool, device=self._device)
        embeds[rows] = self._floats(batch.embeds).view(-1, width).to(embeds.dtype)
        is_embeds[rows] = True
        return {"input_embeds": embeds, "is_embeds": is_embeds}

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.array(values, dtype=np.int64)).to(self._device)

    def _floats(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.array(values, dtype=np.float64)).to(self._device)


def _closed(_: dict[str, Any]) -> dict[str, list[torch.Tensor]]:
    raise ValueError("this runner is closed")


def rank_runner(
    phases: Phases,
    rank: int,
    collectives: ProcessCollectives | None,
    checkpoint: Any,
    sizes: EngineSizes,
    *,
    backend: str,
    device: str = "cpu",
    progress: Callable[[int, int, str], None] | None = None,
    compare_every: int = COMPARE_EVERY,
) -> ModelRunner:
    """A runner with its own rank's weights, which are read here, once for all phases."""
    program = phases.decode
    weights, report = load_weights(program, rank, checkpoint, device=device, progress=progress, collectives=collectives)
    spent = Spent()
    executables = [
        Executable(one, weights, backend=backend, collectives=collectives, spent=spent)  # type: ignore[arg-type]
        for one in phases.all()
    ]

    def gather(own: list[torch.Tensor]) -> torch.Tensor:
        if collectives is None:
            return torch.stack(own)
        start = time.perf_counter()
        gathered = collectives.all_gather(own[0][None], 0)
        spent.collectives_s += time.perf_counter() - start
        return gathered

    def run(executable: Executable, inputs: dict[str, Any]) -> dict[str, list[torch.Tensor]]:
        return {name: [value] for name, value in executable.run(inputs).items()}

    execute, *others = (partial(run, executable) for executable in executables)
    runner = ModelRunner(
        program, execute, sizes, prefill=_with_least(phases, others), rank=rank, gather=gather, device=device,
        capture=executables[0].bind if backend == "inductor" else None, spent=spent,
        agreement=Agreement(collectives, compare_every),
    )  # fmt: skip
    runner.load_report = report
    return runner


def _with_least(phases: Phases, others: Sequence[Execute]) -> tuple[int, Execute] | None:
    least = phases.min_tokens
    return None if least is None else (least, others[0])


def simulated_runner(phases: Phases, checkpoint: Any, sizes: EngineSizes) -> ModelRunner:
    """A runner of all ranks in this process, eagerly, node by node."""
    weights = load(phases.decode, checkpoint)
    ranks = max(phases.decode.mesh.get("tp", 1), 1)

    def run(program: Program, inputs: dict[str, Any]) -> dict[str, list[torch.Tensor]]:
        return simulate_outputs(program, inputs, weights)

    execute, *others = (partial(run, program) for program in phases.all())
    return ModelRunner(phases.decode, execute, sizes, prefill=_with_least(phases, others), pools=ranks)


def create(rank: int, size: int, collectives: ProcessCollectives, init: bytes) -> ModelRunner:
    """Factory for a rank process: parse the text, check that it is what the caller sent, load, get ready."""
    from graphsrt.runtime.workers import report_progress

    given: RankInit = pickle.loads(init)  # from our own parent process, over an inherited socket
    phases = Phases.from_texts(given.texts, where=f"rank {rank}")
    if phases.decode.mesh.get("tp", 1) != size:
        raise CompileError(f"the program is for {phases.decode.mesh.get('tp', 1)} ranks, the group has {size}")
    checkpoint = open_spec(given.checkpoint)
    device = given.device if given.device == "cpu" else f"{given.device}:{rank}"
    last = [-1]

    def progress(done: int, total: int, label: str) -> None:
        percent = done * 50 // total
        if percent != last[0]:  # a message for each weight of a large model would be noise
            last[0] = percent
            report_progress(done, total, label)

    return rank_runner(
        phases, rank, collectives, checkpoint, given.sizes, backend=given.backend, device=device, progress=progress,
        compare_every=given.compare_every,
    )  # fmt: skip
