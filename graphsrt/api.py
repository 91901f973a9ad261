"""``compile``, ``trace`` and ``verify``: the stages in order, on one screen each."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from graphsrt import program_cache
from graphsrt.compiled import CompiledModel, Traced
from graphsrt.devices import DEFAULT, Device, figures_of
from graphsrt.errors import CompileError, explain
from graphsrt.lowering.kernels.beforehand import start_building, start_building_attention
from graphsrt.lowering.region_cache import CompileStats, compile_regions
from graphsrt.program import Program
from graphsrt.recipes import FP8, rename
from graphsrt.runtime.agreement import COMPARE_EVERY
from graphsrt.runtime.engine import Engine
from graphsrt.runtime.executor import STALL_TIMEOUT_S
from graphsrt.runtime.model_runner import EngineSizes
from graphsrt.runtime.phases import Phases
from graphsrt.runtime.size_compiler import SizeCompiler
from graphsrt.runtime.start import Bar, RankOptions, group_size, start_ranks
from graphsrt.runtime.waiting_line import Policy, WaitingLine

# What captures models and rewrites programs is imported where it is called: it brings transformers, sympy and Dynamo,
# which a warm start has no use for.
if TYPE_CHECKING:
    from graphsrt.models.source import ModelSource
    from graphsrt.passes.runner import Pass, Stages
    from graphsrt.verification import VerifyReport

DTYPES = {
    "float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
}  # fmt: skip


def trace(
    model: Any,
    *,
    tp: int = 1,
    dtype: torch.dtype | str | None = None,
    kv_dtype: torch.dtype | str | None = None,
    kv_scales: str | os.PathLike | None = None,
    passes: Sequence[Pass] | None = None,
    without: Iterable[str] = (),
    stop_after: str | None = None,
    experts: str = "tp",
    quantize: str | None = None,
    strict: bool = False,
    dump: str | os.PathLike | None = None,
    context_length: int | None = None,
    capture_hidden: Sequence[int] = (),
    input_embeds: bool = False,
    max_tokens_per_step: int = 8192,
    device: Device | str = DEFAULT,
    limits: dict[str, int] | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
) -> Traced:
    """Capture a model and run the passes; no weights are read and nothing is lowered. See :func:`compile`.

    ``device``: whose figures decide from how many tokens on a fusion pays, by its name in ``graphsrt.devices``.
    """
    from graphsrt.dump import DumpFolder
    from graphsrt.models.source import resolve
    from graphsrt.passes import scatter_residual
    from graphsrt.passes.runner import bind, run_phases

    _check_tp(tp)
    chosen = chosen_passes(passes, without, experts, stop_after, quantize)
    chosen = bind(chosen, scatter_residual, device=device, max_tokens=max_tokens_per_step)
    cached = _kv_dtype(kv_dtype)
    if kv_scales is not None and cached != FP8:
        raise ValueError(explain("scales of keys and values are for an FP8 cache", got=f"kv_dtype={kv_dtype}"))
    source = resolve(model, dtype=_dtype(dtype), trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)
    if quantize is not None and source.dtype == torch.float64:
        raise ValueError(
            explain("quantised weights are multiplied in float32", expected="dtype float32, bfloat16 or float16",
                    got=str(source.dtype))
        )  # fmt: skip
    folder = dump if dump is not None else os.environ.get("GRAPHSRT_DUMP")
    dump_folder = DumpFolder(Path(folder)) if folder else None
    with _paused_collector():
        program = _capture(source, tp, context_length, capture_hidden, input_embeds)
        chosen = with_cache(chosen, source, program, cached, kv_scales)
        stages = run_phases(program, chosen, strict=strict, dump=dump_folder, limits=limits)
    return Traced(lambda: (source, stages))


def compile(
    model: Any,
    *,
    tp: int | None = None,
    ranks: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: str | None = None,
    kv_dtype: torch.dtype | str | None = None,
    kv_scales: str | os.PathLike | None = None,
    backend: str = "inductor",
    passes: Sequence[Pass] | None = None,
    without: Iterable[str] = (),
    stop_after: str | None = None,
    experts: str = "tp",
    quantize: str | None = None,
    strict: bool = False,
    dump: str | os.PathLike | None = None,
    verify: bool = False,
    context_length: int | None = None,
    capture_hidden: Sequence[int] = (),
    input_embeds: bool = False,
    page_size: int = 16,
    max_total_tokens: int | None = None,
    max_running: int = 64,
    max_tokens_per_step: int = 2048,
    prefix_cache: bool = True,
    policy: Policy = "lpm",
    max_queue: int | None = 4096,
    compile_effort: str = "fast",
    threads_per_rank: int | None = None,
    stall_timeout: float = STALL_TIMEOUT_S,
    compare_every: int = COMPARE_EVERY,
    progress: bool = False,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
) -> CompiledModel:
    """Turn a causal LM into a program that serves it on ``tp`` ranks.

    ``model``: a ``PreTrainedModel`` in memory, a checkpoint folder, a hub id, ``"smollm2"``, or a ``PretrainedConfig``
    (then there is a program but nothing to run).

    ``tp``: ranks that the model is divided over (default 1, under ``torchrun`` the world size).
    ``ranks``: None starts ``tp`` processes, or uses the process group of ``torchrun``; ``"simulated"`` runs all ranks
    in this process, eagerly. ``dtype``: of weights and activations (default the model's own); ``kv_dtype``: of cached
    keys and values (default ``dtype``); "fp8" needs their scales, in the checkpoint or in a file ``kv_scales``.
    ``quantize``: "int8" or "int4" rounds weights of linears to integers as they are loaded (with "int4", those of the
    head to 8 bits).
    ``backend``: "inductor", or "eager" to run the program node by node; neither stands in for the other.
    ``passes``: the pipeline (default ``graphsrt.passes.PIPELINE`` with the passes of installed packages);
    ``without``: names to leave out, ``NAME:prefill`` or ``NAME:decode`` in that phase only; ``stop_after``: the
    last pass to run. ``strict``: a linear left whole on every rank is an error. ``experts``: "tp" divides every
    expert of a mixture over the ranks, "ep" gives each rank whole experts. ``dump``: folder for the text after
    every pass (or ``GRAPHSRT_DUMP``). ``verify``: compare every stage on simulated ranks first, as :func:`verify`
    does.
    ``context_length``: most tokens of a sequence (default the model's). ``capture_hidden``: hidden states that
    ``logits(ids, hidden=True)`` gives beside the logits, by their index in transformers' ``output_hidden_states``: 0 is
    the embedding, -1 the last layer's after the final norm, which ``embed`` needs. ``input_embeds``: prompts may be
    embeddings, or have some among their tokens; steps cost a little more. ``page_size``: tokens of a KV page;
    ``max_total_tokens``: KV memory in tokens; ``max_running``: sequences at a time; ``max_tokens_per_step``: longer
    prompts are prefilled in chunks of this. ``prefix_cache``: keep computed KV for prompts that begin alike;
    ``policy``: ``"lpm"`` admits those with the longest cached prefix first, ``"fcfs"`` those that came first;
    ``max_queue``: how many may wait before a further request is refused (``generate`` feeds its own as there is room).
    ``compile_effort``: "fast" compiles each distinct piece once, for any number of tokens. "max" goes on while the
    model serves: a number of sequences that is often decoded gets code for just that number, up to a tenth faster, for
    about half a minute of otherwise idle processor time each; the cache keeps it. Not under ``torchrun``.
    ``stall_timeout``: seconds in which no rank gets from one collective to the next, after which the ranks are ended
    and the one that holds them up is named. ``compare_every``: steps between two comparisons of what ranks computed,
    0 for never.

    ValueError for an argument out of range, CompileError for a model that cannot be compiled, CheckpointError for
    weights that are missing, damaged or left over, RankError if a rank process fails.
    """
    group = group_size(device or "cpu")
    _check_options(ranks, backend, device, page_size, max_running, max_tokens_per_step)
    if compile_effort not in ("fast", "max") or (compile_effort == "max" and group):
        raise ValueError(
            explain("no such compile_effort", expected="'fast', or 'max' without torchrun", got=repr(compile_effort))
        )
    if not stall_timeout > 0 or compare_every < 0:
        raise ValueError(
            explain("stall_timeout is positive, compare_every is not negative", got=f"{stall_timeout}, {compare_every}")
        )
    WaitingLine(policy, max_queue, patience=0)  # checks them, before anything takes time
    tp = tp if tp is not None else (group if group and ranks is None else 1)
    with_kernels = backend == "inductor" and (device or "cpu") == "cpu" and ranks is None
    if with_kernels:
        start_building(tp, integers=quantize is not None)
    traced_with = dict(
        tp=tp, dtype=dtype, kv_dtype=kv_dtype, kv_scales=kv_scales, passes=passes, without=without,
        stop_after=stop_after, experts=experts, quantize=quantize, strict=strict, dump=dump,
        context_length=context_length, capture_hidden=capture_hidden, input_embeds=input_embeds,
        max_tokens_per_step=max_tokens_per_step, device=figures_of(device or "cpu"),
        trust_remote_code=trust_remote_code, allow_pickle=allow_pickle,
    )  # fmt: skip
    kind = torch.device(device or "cpu").type
    place = None if verify else program_cache.place_of(model, traced_with, kind)
    kept = None if place is None else program_cache.find(place)
    if kept is not None:
        traced = Traced(lambda: _traced_again(model, traced_with), kept)
        phases, checkpoint = kept.phases(whole=ranks == "simulated"), kept.checkpoint()
        tokenizer, eos_token_ids, in_memory = kept.tokenizer(), kept.eos_token_ids, False
    else:
        traced = trace(model, **traced_with)  # type: ignore[arg-type]
        source, stages = traced.source, traced.stages
        if verify:
            chosen = chosen_passes(passes, without, experts, stop_after, quantize)
            _verify(source, tp, chosen, strict).raise_if_bad()
        if source.checkpoint is None:
            return CompiledModel(traced, None, None, "a config has no weights")
        program = with_checkpoint_names(stages, source)
        if "logit_rows" not in program.inputs:
            return CompiledModel(traced, None, None, "page_attention and select_logit_rows did not run")
        if with_kernels:
            start_building_attention(program)
        phases, checkpoint = Phases(program, stages.prefill.final if stages.prefill else None), source.checkpoint
        tokenizer, eos_token_ids, in_memory = source.tokenizer, source.eos_token_ids, source.module is not None
        if place is not None:
            program_cache.keep(place, source, stages, phases, kind)
    program = phases.decode
    sizes = _sizes(program, page_size, max_total_tokens, max_running, max_tokens_per_step)
    stats = None
    if backend == "inductor" and ranks != "simulated":
        stats = _compile_once(phases, group, progress)
    options = RankOptions(backend, device or "cpu", group, threads_per_rank, stall_timeout, compare_every, progress)
    executor = start_ranks(
        checkpoint, phases, sizes, tp, options, in_memory=in_memory, simulated=ranks == "simulated"
    )  # fmt: skip
    engine = Engine(
        executor, tokenizer, eos_token_ids, sizes.context_length, sizes.num_pages, page_size,
        vocab_size=program.constants["vocab_size"], max_running=sizes.max_running,
        max_tokens_per_step=max_tokens_per_step, prefix_cache=prefix_cache, policy=policy, max_queue=max_queue,
        concat=torch.cat, embeds_width=_embeds_width(program),
        sizes=SizeCompiler.of(program, sizes.max_running) if compile_effort == "max" and stats is not None else None,
    )  # fmt: skip
    compiled = CompiledModel(traced, engine, executor)
    compiled.compile_stats = stats
    return compiled


def _embeds_width(program: Program) -> int | None:
    declared = program.inputs.get("input_embeds")
    return None if declared is None else int(declared.shape[1])


def verify(
    model: Any,
    *,
    tp: int = 1,
    passes: Sequence[Pass] | None = None,
    without: Iterable[str] = (),
    experts: str = "tp",
    quantize: str | None = None,
    strict: bool = True,
) -> VerifyReport:
    """Execute every stage on all simulated ranks, in float64, and compare; returns a ``VerifyReport``.

    A miniature of the model is used: its head counts and layer kinds with small widths and random weights.
    """
    from graphsrt.models.source import resolve

    _check_tp(tp)
    return _verify(resolve(model), tp, chosen_passes(passes, without, experts, quantize=quantize), strict)


def with_cache(
    chosen: Sequence[Pass], source: ModelSource, captured: Program, kv_dtype: torch.dtype | None, kv_scales: Any = None
) -> list[Pass]:
    """The passes, with what the cache is kept in bound to the one that makes it."""
    from graphsrt.models.quantization.kv_cache import cache_scales
    from graphsrt.passes import page_attention
    from graphsrt.passes.runner import bind

    if kv_dtype is None:
        return list(chosen)
    scales = cache_scales(source, captured, kv_scales) if kv_dtype == FP8 else None
    return bind(chosen, page_attention, kv_dtype=kv_dtype, kv_scales=scales)


def chosen_passes(
    passes: Sequence[Pass] | None, without: Iterable[str], experts: str, stop_after: str | None = None,
    quantize: str | None = None,
) -> list[Pass]:  # fmt: skip
    """The passes to run, with how experts are divided, and what weights become, bound to the passes that do it."""
    from graphsrt.passes import PIPELINE, shard_tensor_parallel
    from graphsrt.passes.plugins import with_installed
    from graphsrt.passes.runner import bind, select

    if experts not in ("tp", "ep"):
        raise ValueError(
            explain("experts are divided by width or by number", expected="'tp' or 'ep'", got=repr(experts))
        )
    chosen = select(with_installed(PIPELINE) if passes is None else passes, without=without, stop_after=stop_after)
    if experts != "tp":
        chosen = bind(chosen, shard_tensor_parallel, experts=experts)
    return chosen if quantize is None else _quantizing(chosen, quantize, stop_after)


def _quantizing(chosen: list[Pass], quantize: str, stop_after: str | None) -> list[Pass]:
    from graphsrt.passes import quantize_weights
    from graphsrt.passes.quantize_weights import FORMATS
    from graphsrt.passes.runner import bind, pass_name

    if quantize not in FORMATS:
        raise ValueError(explain("no such format of weights", expected=" or ".join(FORMATS), got=repr(quantize)))
    if stop_after is None and pass_name(quantize_weights) not in map(pass_name, chosen):
        raise ValueError(
            explain("weights are to be quantised and no pass does it", expected="quantize_weights among the passes")
        )
    return bind(chosen, quantize_weights, to=quantize)


# -- the stages --------------------------------------------------------------------------------------------------------


def _verify(source: ModelSource, tp: int, chosen: Sequence[Pass], strict: bool) -> VerifyReport:
    from graphsrt.verification import verify as verify_model

    return verify_model(source, tp, passes=chosen, strict=strict)


@contextmanager
def _paused_collector() -> Iterator[None]:
    """Hundreds of thousands of graph objects are made and kept: looking through them again and again costs a third."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _capture(
    source: ModelSource, tp: int, context_length: int | None, hidden: Sequence[int] = (), input_embeds: bool = False
) -> Program:
    from graphsrt.capture import capture, check_config, hidden_indices
    from graphsrt.models.on_meta import on_meta
    from graphsrt.models.quantization.recipes import mark_stored

    limit = source.context_length
    length = context_length if context_length is not None else limit
    if length is None:
        raise ValueError("the model's config sets no context length; pass context_length=")
    if length < 1:
        raise ValueError(explain("context_length must be positive", got=str(length)))
    check_config(source.config)
    indices = hidden_indices(hidden, source.config)
    program = capture(
        on_meta(source), context_length=length, name=source.config.model_type, hidden=indices, input_embeds=input_embeds
    )
    mark_stored(program, source.stored_modules())
    program.mesh = {"tp": tp}
    return program


def _traced_again(model: Any, options: dict[str, Any]) -> tuple[ModelSource, Stages]:
    """What a warm start did without, for somebody who wants to look at it."""
    traced = trace(model, **options)
    with_checkpoint_names(traced.stages, traced.source)
    return traced.source, traced.stages


def with_checkpoint_names(stages: Stages, source: ModelSource) -> Program:
    """Settle which checkpoint tensor every parameter comes from; all missing and left-over tensors are one error."""
    from graphsrt.check_placements import _leaf_shapes

    captured = stages.programs[0][1]
    expected: dict[str, tuple[int, ...]] = {
        leaf: tuple(size for size in shape if size is not None)
        for weight in captured.weights.values()
        for leaf, shape in _leaf_shapes(weight.recipe, list(weight.shape))
    }
    for weight in stages.final.weights.values():  # scales of a cache, which captured programs have not
        for leaf, sizes in _leaf_shapes(weight.recipe, list(weight.shape)):
            if leaf not in expected:
                expected[leaf] = tuple(size for size in sizes if size is not None)
    accounting = source.account(expected)
    weights = {id(weight): weight for _, program in stages.everything() for weight in program.weights.values()}
    for weight in weights.values():  # stages without a change share theirs
        weight.recipe = rename(weight.recipe, lambda name: accounting[name])
    return stages.final


def _sizes(
    program: Program, page_size: int, max_total_tokens: int | None, max_running: int, per_step: int
) -> EngineSizes:
    context = program.constants["context_length"]
    tokens = max_total_tokens if max_total_tokens is not None else max(context, 16384)
    if tokens < page_size:
        raise ValueError(
            explain("max_total_tokens is less than a page", expected=f"at least {page_size}", got=str(tokens))
        )
    pages = 1 + -(-tokens // page_size)  # page 0 is reserved
    return EngineSizes(min(max_running, per_step), context, page_size, pages)


def _compile_once(phases: Phases, group: int, progress: bool) -> CompileStats:
    """Compile regions before any rank starts; under torchrun rank 0 does it while the others wait."""
    if group > 1 and torch.distributed.get_rank() != 0:
        torch.distributed.barrier()
        return compile_regions(*phases.all())
    with Bar("compile", progress) as tell:
        stats = compile_regions(*phases.all(), progress=tell)
    if group > 1:
        torch.distributed.barrier()
    return stats


# -- arguments ---------------------------------------------------------------------------------------------------------


def _check_tp(tp: Any) -> None:
    if not isinstance(tp, int) or isinstance(tp, bool) or tp < 1:
        raise ValueError(explain("tp is the number of ranks", expected="an integer of at least 1", got=repr(tp)))


def _check_options(ranks: Any, backend: str, device: str | None, page: int, running: int, step: int) -> None:
    if ranks not in (None, "simulated"):
        raise ValueError(explain("ranks says where ranks run", expected="None or 'simulated'", got=repr(ranks)))
    if backend not in ("inductor", "eager"):
        raise ValueError(explain("no such backend", expected="'inductor' or 'eager'", got=repr(backend)))
    if device is not None and torch.device(device).type not in ("cpu", "cuda"):
        raise ValueError(explain("no such device", expected="'cpu' or 'cuda'", got=repr(device)))
    if device is not None and torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            explain("there is no CUDA device here", got=f"torch {torch.__version__}", hint="use device='cpu'")
        )
    for name, value in (("page_size", page), ("max_running", running), ("max_tokens_per_step", step)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(explain(f"{name} must be a positive integer", got=repr(value)))


def _kv_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype in ("fp8", "float8_e4m3fn", "torch.float8_e4m3fn"):
        return FP8
    if isinstance(dtype, torch.dtype) and dtype != FP8 and dtype not in DTYPES.values():
        raise ValueError(explain("no such dtype of a cache", expected=f"fp8, {', '.join(DTYPES)}", got=str(dtype)))
    return _dtype(dtype)


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if isinstance(dtype, str):
        if dtype.removeprefix("torch.") not in DTYPES:
            raise ValueError(explain("no such dtype", expected=", ".join(DTYPES), got=repr(dtype)))
        return DTYPES[dtype.removeprefix("torch.")]
    return dtype


__all__ = ["CompileError", "CompiledModel", "Traced", "compile", "trace", "verify"]
