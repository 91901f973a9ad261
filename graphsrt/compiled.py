"""What ``trace`` and ``compile`` return: a model's program at every stage, and the engine that runs the last one."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from graphsrt.errors import explain
from graphsrt.lowering.region_cache import CompileStats
from graphsrt.models.tokenizer import LateTokenizer
from graphsrt.printer import diff_text
from graphsrt.program import Program
from graphsrt.program_cache import Kept
from graphsrt.runtime.background import BackgroundSteps
from graphsrt.runtime.drafter import Drafter
from graphsrt.runtime.engine import Engine
from graphsrt.runtime.executor import GroupExecutor
from graphsrt.runtime.load_plan import LoadReport
from graphsrt.runtime.metrics import Metrics
from graphsrt.runtime.prompts import Prompt, Timeouts, as_list
from graphsrt.runtime.results import Generation, StreamEvent
from graphsrt.runtime.sampling_params import SamplingParams
from graphsrt.runtime.stream import Stream

if TYPE_CHECKING:
    from graphsrt.models.source import ModelSource
    from graphsrt.passes.runner import Stages

T = TypeVar("T")


class Traced:
    """A model's program at every stage, without weights. ``compile`` returns a :class:`CompiledModel`, which is one."""

    def __init__(self, trace: Callable[[], tuple[ModelSource, Stages]], kept: Kept | None = None):
        """``trace``: called when first needed. ``kept``: what an earlier start left, so that it may not be needed."""
        self._trace, self._kept = trace, kept
        self.compile_stats: CompileStats | None = None

    @cached_property
    def _traced(self) -> tuple[ModelSource, Stages]:
        return self._trace()

    @property
    def source(self) -> ModelSource:
        """The model before capture."""
        return self._traced[0]

    @property
    def stages(self) -> Stages:
        """The programs after every pass; after a warm start they are traced now."""
        return self._traced[1]

    def program(self, after: str | None = None, *, phase: str | None = None, rank: int | None = None) -> Program:
        """The final program, or the one after the named pass (``"capture"`` for the first).

        ``phase``: "decode" (default) or "prefill", the program of steps with many tokens; the two are one where no pass
        is for prefill alone. ``rank``: a copy in that rank's own terms: local sizes, and recipes that name the very
        slices it reads. ValueError for an unknown pass, phase or rank.
        """
        _check_phase(phase)
        if after is None and self._kept is not None:
            program = self._kept.program(phase)
        else:
            stages = self.stages_of(phase)
            program = stages.final if after is None else stages.after(after)
        return program if rank is None else program.localized(rank)

    def stages_of(self, phase: str | None = None) -> Stages:
        """The stages of a phase, "decode" by default. ValueError for an unknown phase."""
        _check_phase(phase)
        return self.stages.prefill or self.stages if phase == "prefill" else self.stages

    def diff(self, name: str, *, phase: str | None = None) -> str:
        """Unified diff of the program's text across one pass, or with ``"first..last"`` from after the first to after
        the last; empty if nothing changed. ``phase``: by default the one in which the passes ran, "decode" if both."""
        first, dots, last = name.partition("..")
        stages = self.stages_of(phase)
        if phase is None and not {first, last or first} <= set(stages.names):
            stages = self.stages_of("prefill")
        if dots:
            return diff_text(stages.after(first), stages.after(last), f"after {first}", f"after {last}")
        before, after = stages.around(name)
        return diff_text(before, after, f"before {name}", f"after {name}")

    def summary(self) -> str:
        """The pass table, weight bytes of a rank, KV bytes of a token, and what was compiled."""
        if self._kept is not None:
            facts = self._kept.summary
        else:
            from graphsrt.summary import facts_text

            facts = facts_text(self.stages)
        return facts if self.compile_stats is None else f"{facts}\ncompiled            {self.compile_stats}"


def _check_phase(phase: str | None) -> None:
    if phase not in (None, "prefill", "decode"):
        raise ValueError(explain("no such phase", expected="'prefill' or 'decode'", got=repr(phase)))


class CompiledModel(Traced):
    """A program with an engine that runs it. Close it, or use it as a context manager.

    Its methods may be called from several threads, and from coroutines at the same time: all share the steps. Under
    ``torchrun``, where all ranks must make the same calls, one thread at a time, and no streams and coroutines.
    """

    def __init__(self, traced: Traced, engine: Engine | None, executor: Any, why_no_engine: str = ""):
        super().__init__(lambda: traced._traced, traced._kept)
        self.engine = engine
        self._executor = executor
        self._why_no_engine = why_no_engine
        self._background = BackgroundSteps(engine) if engine is not None else None
        self._serving = threading.Lock()

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer; ValueError if it has none."""
        tokenizer = None if self.engine is None else self.engine.intake.tokenizer
        if isinstance(tokenizer, LateTokenizer):
            return tokenizer.whole
        return self.source.require_tokenizer() if tokenizer is None else tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        timeout_s: Timeouts = None,
        drafter: Drafter | None = None,
    ) -> list[Generation]:
        """Continue prompts (text, or lists of token ids), many at a time; results in the order of the prompts.

        ``params``: one for all, or one for each. ``progress`` shows a bar. ``timeout_s``: seconds, one for all or one
        for each, after which a prompt ends with what it has by then and the finish reason "deadline". ``drafter``, for
        example ``graphsrt.PromptLookup()``, guesses what follows, so that a step may give several tokens; they are the
        same without it.
        """
        engine = self._require_engine()
        return self._serve(
            lambda: engine.generate(prompts, params, progress=progress, timeout_s=timeout_s, drafter=drafter)
        )

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, timeout_s: float | None = None) -> Stream:
        """Continue one prompt and iterate over its text piece by piece; ``cancel()`` of the result ends it early.

        Not under ``torchrun``.
        """
        return self._require_driver("stream").stream(prompt, params, timeout_s=timeout_s)

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout_s: Timeouts = None,
        drafter: Drafter | None = None,
    ) -> list[Generation]:
        """:meth:`generate` for coroutines. All that run at a time share steps; cancelling the task ends its requests.

        Not under ``torchrun``.
        """
        self._require_driver("agenerate")
        assert self._background is not None
        return await self._background.generate(prompts, params, timeout_s, drafter)

    def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, timeout_s: float | None = None
    ) -> AsyncIterator[StreamEvent]:
        """:meth:`stream` for coroutines: ``async for event in model.astream(prompt)``. Leaving the loop cancels it.

        ValueError at once if the prompt cannot be served. Not under ``torchrun``.
        """
        self._require_driver("astream")
        assert self._background is not None
        return self._background.stream(prompt, params, timeout_s)

    def cancel(self, stream: Stream | None = None) -> None:
        """End one stream, or everything that is running or waiting; from any thread.

        Whoever waits gets what there is by then, with the finish reason "cancelled".
        """
        engine = self._require_driver("cancel")
        if stream is None:
            engine.cancel_all()
        else:
            stream.cancel()

    def metrics(self) -> Metrics:
        """Requests, tokens, pages, and where the time went, so far; ``print`` it, or give its ``prometheus()`` away."""
        return self._require_engine().metrics()

    def logits(self, input_ids: Any, *, hidden: bool = False) -> Any:
        """Logits of every position: ``[T]`` ids give ``[T, V]``; a list of sequences gives a list, run as one batch.

        With ``input_embeds`` of ``compile``, embeddings ``[T, E]`` stand for ids.
        ``hidden``: pairs instead, of the logits and a dict of the hidden states that ``capture_hidden`` of ``compile``
        named: their index (never negative) → ``[T, E]``. float64 if the model's dtype is float64, else float32.
        """
        engine = self._require_engine()
        single = isinstance(input_ids, torch.Tensor) and input_ids.dim() == 1
        single = single or (
            not isinstance(input_ids, torch.Tensor) and len(input_ids) > 0 and isinstance(input_ids[0], int)
        )
        single = single or (isinstance(input_ids, torch.Tensor) and input_ids.is_floating_point())
        sequences = [input_ids] if single else list(input_ids)
        lists = [s.tolist() if isinstance(s, torch.Tensor) and not s.is_floating_point() else s for s in sequences]
        if not hidden:
            results = self._serve(lambda: engine.logits(lists))
            return results[0] if single else results
        names = {name: int(name.removeprefix("hidden_")) for name in list(self.program().outputs)[1:]}
        if not names:
            raise ValueError(
                explain("this program returns no hidden states", hint="compile(..., capture_hidden=[2, -1]) names some")
            )
        given = self._serve(lambda: engine.forward(lists, hidden=True))
        results = [(one["logits"], {index: one[name] for name, index in names.items()}) for one in given]
        return results[0] if single else results

    def restart(self) -> None:
        """Start the ranks again after a RankError, from the same program and weights; then the model is as new.

        What was running has failed with that error, or fails now. Not under ``torchrun``, which starts ranks itself.
        """
        self._require_driver("restart").restart()

    @property
    def load_reports(self) -> list[LoadReport]:
        """By rank: bytes read from files by it and by its machine, bytes that it keeps, and seconds."""
        self._require_engine()
        return list(self._executor.load_reports)

    def embed(self, prompts: Prompt | Sequence[Prompt]) -> torch.Tensor:
        """An embedding of each prompt, ``[N, E]``: the last token's final hidden state, of length 1.

        The final hidden state is transformers' ``last_hidden_state``, after the last norm. It shares weights, ranks, KV
        pool and steps with whatever else runs. float64 if the model's dtype is float64, else float32.
        Needs ``capture_hidden=[-1]`` of ``compile``; ValueError without.
        """
        engine = self._require_engine()
        name = f"hidden_{self.program().constants['num_layers']}"
        if name not in self.program().outputs:
            raise ValueError(
                explain(
                    "this program does not return its final hidden state",
                    expected=f"a result {name}",
                    got=", ".join(self.program().outputs),
                    hint="compile the model with capture_hidden=[-1]: it then embeds, and generates as before",
                )
            )
        items = as_list(prompts)
        if not items:
            raise ValueError("there are no prompts to embed")
        given = self._serve(lambda: engine.forward(items, last_row=True, hidden=True))
        return torch.nn.functional.normalize(torch.cat([one[name] for one in given]), dim=-1)

    def close(self) -> None:
        """End rank processes and free memory. May be called again."""
        if self.engine is not None:
            self.engine.close()
        if self._background is not None:
            self._background.join()

    def __enter__(self) -> CompiledModel:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _serve(self, call: Callable[[], T]) -> T:
        """The result of a call that makes steps: on every rank under ``torchrun``, where one thread at a time may."""
        if not isinstance(self._executor, GroupExecutor):
            return call()
        if not self._serving.acquire(blocking=False):
            raise ValueError("another thread is generating: under torchrun all ranks make the same calls in turn")
        try:
            return self._executor.run(call)
        finally:
            self._serving.release()

    def _require_driver(self, call: str) -> Engine:
        engine = self._require_engine()
        if isinstance(self._executor, GroupExecutor):
            raise ValueError(f"{call} works with one driving process; under torchrun use generate")
        return engine

    def _require_engine(self) -> Engine:
        if self.engine is None:
            self.source.require_checkpoint()
            raise ValueError(explain("this program cannot run", got=self._why_no_engine))
        return self.engine
