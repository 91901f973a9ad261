"""The commands. torch and transformers are imported when a command runs, so that ``--help`` answers at once.

Text goes to stdout, progress and messages to stderr. Exit status: 0, 1 for an error that the message explains, 2 for a
command line that is wrong, 130 after an interrupt. ``--debug`` or ``GRAPHSRT_DEBUG=1`` shows tracebacks.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from graphsrt.errors import CheckpointError, GraphsrtError, explain

if TYPE_CHECKING:
    from graphsrt.api import CompiledModel
    from graphsrt.program import Program

DEFAULT_PROMPT = "What is the capital of France?"
CACHE_KINDS = {
    "models": "converted models",
    "programs": "traced programs",
    "regions": "compiled regions of programs",
    "kernels": "compiled C++ kernels",
}
_UsageError: Any = typer.BadParameter.__base__  # of click, or of the copy of click inside newer versions of typer


class Backend(StrEnum):
    inductor = "inductor"
    eager = "eager"


class Ranks(StrEnum):
    simulated = "simulated"


class Experts(StrEnum):
    tp = "tp"
    ep = "ep"


class Quantize(StrEnum):
    int8 = "int8"
    int4 = "int4"


class Phase(StrEnum):
    prefill = "prefill"
    decode = "decode"


class Dtype(StrEnum):
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"
    float64 = "float64"


class KvDtype(StrEnum):
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"
    float64 = "float64"
    fp8 = "fp8"


class _Commands(TyperGroup):
    """The commands in the order that they are written here; an unknown one is answered with their names."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            ctx.fail(f"there is no command {args[0]!r}; the commands are {', '.join(self.commands)}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Commands, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip

Model = Annotated[str, typer.Argument(help="A checkpoint folder, a hub id, or smollm2.", show_default=False)]
ModelOrConfig = Annotated[
    str, typer.Argument(help="A checkpoint folder, a config.json, a hub id, or smollm2.", show_default=False)
]
Without = Annotated[
    list[str],
    typer.Option(
        "--without", metavar="PASS", help="Leave this pass out, or PASS:prefill, PASS:decode; may be repeated."
    ),
]
DtypeOption = Annotated[Dtype | None, typer.Option("--dtype", help="Of weights and activations; default the model's.")]
Strict = Annotated[bool, typer.Option("--strict", help="A linear left whole on every rank is an error.")]
ExpertsOption = Annotated[Experts, typer.Option("--experts", help="ep: whole experts on each rank.")]
QuantizeOption = Annotated[
    Quantize | None, typer.Option("--quantize", help="Round weights of linears to integers as they are loaded.")
]
ContextLength = Annotated[
    int | None, typer.Option("--context-length", help="Most tokens of a sequence; default the model's.")
]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run the code that comes with the model.")]
AllowPickle = Annotated[bool, typer.Option("--allow-pickle", help="Read pickle checkpoints; they can run code.")]
UserPass = Annotated[
    list[str], typer.Option("--pass", metavar="FILE.py:NAME", help="Add a pass of your own; may be repeated.")
]
PassBefore = Annotated[
    str | None, typer.Option("--before", "--pass-before", metavar="PASS", help="Put --pass before this one.")
]
PassAfter = Annotated[
    str | None, typer.Option("--after", "--pass-after", metavar="PASS", help="Put --pass after this one.")
]
PassAfterOnly = Annotated[str | None, typer.Option("--pass-after", metavar="PASS", help="Put --pass after this one.")]
DumpDir = Annotated[Path | None, typer.Option("--dump", metavar="DIR", help="Write the program after every pass.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from graphsrt import __version__

        print(f"graphsrt {__version__}")
        raise typer.Exit()


@app.callback()
def _commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; GRAPHSRT_DEBUG=1 does it too.")] = False,
) -> None:
    """Serve a plain Hugging Face causal LM on several ranks, by rewriting one graph with passes that can be read."""


@app.command()
def run(
    model: Model,
    prompt: Annotated[list[str], typer.Option("--prompt", "-p", metavar="TEXT", help="May be repeated.")] = [],  # noqa: B006
    tp: Annotated[int | None, typer.Option("--tp", help="Ranks; default 1, under torchrun the world size.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="Most tokens to generate.")] = 64,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Probability mass to sample from.")] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Most probable tokens to sample from; 0 for all.")] = 0,
    seed: Annotated[int | None, typer.Option("--seed", help="Makes sampling repeatable.")] = None,
    stop: Annotated[list[str], typer.Option("--stop", metavar="TEXT", help="End before this; may be repeated.")] = [],  # noqa: B006
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message.")] = None,
    chat: Annotated[bool, typer.Option("--chat/--no-chat", help="Apply the chat template where there is one.")] = True,
    summary: Annotated[bool, typer.Option("--summary/--no-summary", help="Print the pass table at the end.")] = True,
    metrics: Annotated[bool, typer.Option("--metrics", help="Print tokens, pages and times at the end.")] = False,
    dtype: DtypeOption = None,
    kv_dtype: Annotated[KvDtype | None, typer.Option("--kv-dtype", help="Of cached keys and values.")] = None,
    kv_scales: Annotated[
        Path | None, typer.Option("--kv-scales", metavar="FILE", help="Their scales, for fp8; else the checkpoint's.")
    ] = None,
    backend: Annotated[Backend, typer.Option("--backend", help="eager: node by node.")] = Backend.inductor,
    ranks: Annotated[Ranks | None, typer.Option("--ranks", help="All ranks in this process, eagerly.")] = None,
    context_length: ContextLength = None,
    page_size: Annotated[int, typer.Option("--page-size", help="Tokens of a KV page.")] = 16,
    prefix_cache: Annotated[
        bool, typer.Option("--prefix-cache/--no-prefix-cache", help="Compute a common beginning of prompts once.")
    ] = True,
    without: Without = [],  # noqa: B006
    user_passes: UserPass = [],  # noqa: B006
    before: PassBefore = None,
    after: PassAfter = None,
    experts: ExpertsOption = Experts.tp,
    quantize: QuantizeOption = None,
    strict: Strict = False,
    verify: Annotated[bool, typer.Option("--verify", help="First compare every stage on simulated ranks.")] = False,
    dump: DumpDir = None,
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
) -> None:
    """Generate text, then print the pass table. Several prompts run as one batch."""
    if _is_config(model):
        hint = f"graphsrt inspect {model} shows its program"
        raise CheckpointError(explain("a config has no weights, so it generates nothing", where=model, hint=hint))
    from graphsrt.api import compile
    from graphsrt.runtime.sampling_params import SamplingParams

    params = SamplingParams(max_new_tokens, temperature, top_p, top_k, seed, tuple(stop))
    rank = _torchrun_rank()
    with compile(
        model, tp=tp, ranks=ranks and ranks.value, dtype=dtype and dtype.value, backend=backend.value,
        kv_dtype=kv_dtype and kv_dtype.value, kv_scales=kv_scales,
        passes=_pipeline(user_passes, before, after), without=without, experts=experts.value,
        quantize=quantize and quantize.value, strict=strict, dump=dump, verify=verify, context_length=context_length,
        page_size=page_size, prefix_cache=prefix_cache, progress=not rank, trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
    ) as compiled:  # fmt: skip
        texts = prompt or [DEFAULT_PROMPT]
        items = [_with_template(compiled, text, system, chat) for text in texts]
        if len(items) == 1 and rank is None:
            for event in compiled.stream(items[0], params):
                print(event.text, end="", flush=True)
            print()
        else:
            results = compiled.generate(items, params)
            if not rank:
                for text, result in zip(texts, results):
                    print(result.text if len(texts) == 1 else f"## {text}\n{result.text}\n")
        if summary and not rank:
            print(f"\n{compiled.summary()}")
        if metrics and not rank:
            print(f"\n{compiled.metrics()}")


@app.command()
def inspect(
    model: ModelOrConfig,
    tp: Annotated[int, typer.Option("--tp", help="Ranks.")] = 1,
    after: Annotated[str | None, typer.Option("--after", metavar="PASS", help="The program after this pass.")] = None,
    diff: Annotated[
        str | None, typer.Option("--diff", metavar="PASS", help="What this pass changed; A..B from A to B.")
    ] = None,
    phase: Annotated[
        Phase | None, typer.Option("--phase", help="The program of steps with many tokens, or few.")
    ] = None,
    layer: Annotated[int | None, typer.Option("--layer", metavar="N", help="This layer alone.")] = None,
    rank: Annotated[int | None, typer.Option("--rank", metavar="R", help="What this rank holds and reads.")] = None,
    full: Annotated[bool, typer.Option("--full", help="The complete text, which parses back.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Passes, facts and complete text as JSON.")] = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a page with all stages, for a browser."),
    ] = None,
    dtype: DtypeOption = None,
    context_length: ContextLength = None,
    without: Without = [],  # noqa: B006
    user_passes: UserPass = [],  # noqa: B006
    before: PassBefore = None,
    pass_after: PassAfterOnly = None,
    experts: ExpertsOption = Experts.tp,
    quantize: QuantizeOption = None,
    strict: Strict = False,
    dump: DumpDir = None,
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
) -> None:
    """Show the passes and the program of a model. Needs no weights, only the config."""
    if diff and (after or full or as_json or layer is not None or rank is not None):
        raise typer.BadParameter("--diff stands alone: it shows one pass's change of the complete text")
    if (full or as_json) and (layer is not None or rank is not None):
        raise typer.BadParameter("--full and --json show everything; --layer and --rank belong to the folded view")
    if html is not None and (diff or after or full or as_json or layer is not None or rank is not None):
        raise typer.BadParameter("--html stands alone: the page shows every stage, layer and rank")
    if html is not None and (html.is_dir() or not html.absolute().parent.is_dir()):
        raise typer.BadParameter(f"cannot write {html}: --html names a file in a folder that exists")
    from graphsrt.api import trace

    source = _model_or_config(model, trust_remote_code)
    traced = trace(
        source, tp=tp, dtype=dtype and dtype.value, passes=_pipeline(user_passes, before, pass_after),
        without=without, experts=experts.value, quantize=quantize and quantize.value, strict=strict, dump=dump,
        context_length=context_length, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle,
    )  # fmt: skip
    if html is not None:
        from graphsrt.report import write_report

        print(write_report(traced, html))
        return
    if diff:
        print(_colored_diff(traced.diff(diff, phase=phase and phase.value)) or f"{diff} changed nothing")
        return
    program = traced.program(after, phase=phase and phase.value)
    if as_json:
        print(json.dumps(_as_json(program, after), indent=2))
    elif full:
        print(program, end="")
    else:
        from graphsrt.folding import fold

        text = fold(program, color=_color(), layer=layer, rank=rank)
        print(f"{traced.summary()}\n\n{text}", end="")


def _color() -> bool:
    """Colour in a terminal, plain text in a pipe."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _colored_diff(text: str) -> str:
    if not _color():
        return text
    codes = {"+": "32", "-": "31", "@": "36"}
    lines = (f"\033[{codes[line[0]]}m{line}\033[0m" if line[:1] in codes else line for line in text.split("\n"))
    return "\n".join(lines)


@app.command()
def verify(
    model: ModelOrConfig,
    tp: Annotated[int, typer.Option("--tp", help="Ranks.")] = 2,
    without: Without = [],  # noqa: B006
    user_passes: UserPass = [],  # noqa: B006
    before: PassBefore = None,
    after: PassAfter = None,
    experts: ExpertsOption = Experts.tp,
    quantize: QuantizeOption = None,
    strict: Annotated[bool, typer.Option(help="A linear left whole on every rank is an error.")] = True,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Run every stage on simulated ranks, and compare every value."""
    from graphsrt.api import verify

    passes = _pipeline(user_passes, before, after)
    report = verify(
        _model_or_config(model, trust_remote_code), tp=tp, passes=passes, without=without, experts=experts.value,
        quantize=quantize and quantize.value, strict=strict,
    )  # fmt: skip
    print(report)
    if not report.ok:
        raise typer.Exit(1)


@app.command("explain")
def explain_command(
    model: ModelOrConfig,
    name: Annotated[str, typer.Argument(metavar="PASS|VALUE", help="A pass, or a value of the final program.")],
    tp: Annotated[int, typer.Option("--tp", help="Ranks.")] = 1,
    every: Annotated[bool, typer.Option("--all", help="Identical layers one by one.")] = False,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    context_length: ContextLength = None,
    without: Without = [],  # noqa: B006
    user_passes: UserPass = [],  # noqa: B006
    before: PassBefore = None,
    after: PassAfter = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Where a pass fired, nearly fired and why not; or where a value comes from."""
    from graphsrt.explain import explain_model

    print(
        explain_model(
            _model_or_config(model, trust_remote_code), name, tp=tp, passes=_pipeline(user_passes, before, after),
            without=without, every=every, dtype=dtype and dtype.value, quantize=quantize and quantize.value,
            context_length=context_length,
            trust_remote_code=trust_remote_code,
        )
    )  # fmt: skip


@app.command()
def bisect(
    model: ModelOrConfig,
    tp: Annotated[int, typer.Option("--tp", help="Ranks.")] = 2,
    check: Annotated[
        str | None,
        typer.Option("--check", metavar="SCRIPT", help="A file with check(program), which raises or returns False."),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check the numbers of all simulated ranks.")] = False,
    dtype: DtypeOption = None,
    context_length: ContextLength = None,
    without: Without = [],  # noqa: B006
    user_passes: UserPass = [],  # noqa: B006
    before: PassBefore = None,
    after: PassAfter = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Find the pass, and the single rewrite, after which a check fails. Exit status 1 if there is one."""
    if bool(check) == verify:
        raise typer.BadParameter("give either --check SCRIPT or --verify")
    from graphsrt.bisect import bisect, bisect_numbers, load_check

    source, passes = _model_or_config(model, trust_remote_code), _pipeline(user_passes, before, after)
    if check is None:
        found = bisect_numbers(source, tp=tp, passes=passes, without=without)
    else:
        found = bisect(
            source, load_check(check), tp=tp, passes=passes, without=without, dtype=dtype and dtype.value,
            context_length=context_length, trust_remote_code=trust_remote_code,
        )  # fmt: skip
    print(found)
    if not found.ok:
        raise typer.Exit(1)


@app.command()
def plan(
    model: ModelOrConfig,
    tp: Annotated[int, typer.Option("--tp", help="Ranks.")] = 1,
    device: Annotated[str, typer.Option("--device", help="h200, h100, a100, mi300x or cpu.")] = "h200",
    device_file: Annotated[
        Path | None, typer.Option("--device-file", metavar="FILE", help="Figures of another device, as JSON.")
    ] = None,
    context: Annotated[
        int | None, typer.Option("--context", help="Tokens of a sequence; default 32768, or the model's if less.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", help="Sequences of a decode step.")] = 64,
    kv_dtype: Annotated[KvDtype | None, typer.Option("--kv-dtype", help="Of cached keys and values.")] = None,
    compare: Annotated[str, typer.Option("--compare", metavar="TP,…", help="Ranks side by side.")] = "1,2,4,8,16",
    as_json: Annotated[bool, typer.Option("--json", help="All figures as JSON.")] = False,
    dtype: DtypeOption = None,
    experts: ExpertsOption = Experts.tp,
    quantize: QuantizeOption = None,
    context_length: ContextLength = None,
    page_size: Annotated[int, typer.Option("--page-size", help="Tokens of a KV page.")] = 16,
    without: Without = [],  # noqa: B006
    user_passes: UserPass = [],  # noqa: B006
    before: PassBefore = None,
    after: PassAfter = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Memory, FLOPs, bytes and best times on a device, from the config alone; several tp side by side."""
    from graphsrt import devices
    from graphsrt.plan import plan

    others = _numbers("--compare", compare)
    made = plan(
        _model_or_config(model, trust_remote_code), tp=tp,
        device=devices.device(device) if device_file is None else devices.read_device(device_file), context=context,
        batch=batch, compare=others, page_size=page_size, passes=_pipeline(user_passes, before, after), without=without,
        dtype=dtype and dtype.value, kv_dtype=kv_dtype and kv_dtype.value, experts=experts.value,
        quantize=quantize and quantize.value, context_length=context_length, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    print(json.dumps(made.as_dict(), indent=2) if as_json else made)


@app.command()
def coverage(
    only: Annotated[str, typer.Option("--only", metavar="TYPE,…", help="Model types such as llama; default all.")] = "",
    tp: Annotated[
        str, typer.Option("--tp", metavar="N,…", help="Ranks, 1 first: others are compared with it.")
    ] = "1,2,4,8",
    heads: Annotated[str, typer.Option("--heads", metavar="H/K,…", help="Tiny head counts: 8/4, 9/3.")] = "8/4",
    jobs: Annotated[int, typer.Option("--jobs", help="Processes at a time.")] = 1,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds for one architecture.")] = 300.0,
    results: Annotated[
        Path | None, typer.Option("--results", metavar="FILE", help="Rows as JSON lines; default in the cache folder.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what this version has measured.")] = False,
    markdown: Annotated[Path | None, typer.Option("--markdown", metavar="FILE", help="Write the table there.")] = None,
    reasons: Annotated[bool, typer.Option("--reasons", help="Group what is not ok by its reason.")] = False,
) -> None:
    """Shard every causal LM of transformers as a tiny model, run it on simulated ranks and compare; a table."""
    from graphsrt.coverage.driver import cover

    numbers = [part.strip() for part in tp.split(",") if part.strip()]
    if not numbers or not all(part.isdecimal() and int(part) > 0 for part in numbers):
        raise typer.BadParameter(f"--tp takes numbers with commas between them, got {tp!r}")
    print(
        cover(
            only=[name.strip() for name in only.split(",") if name.strip()], tps=[int(part) for part in numbers],
            heads=[part.strip() for part in heads.split(",")], processes=jobs, timeout_s=timeout, results=results,
            fresh=fresh, markdown=markdown, reasons=reasons,
        )
    )  # fmt: skip


@app.command("quantize")
def quantize_command(
    model: Model,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="The folder to write.", show_default=False)],
    scheme: Annotated[
        str, typer.Option("--scheme", help="fp8 (static), fp8-dynamic (rows and tokens) or fp8-block (128 by 128).")
    ] = "fp8",
    layout: Annotated[
        str, typer.Option("--layout", help="Whose names: compressed-tensors, modelopt, fp8 or fbgemm_fp8.")
    ] = "compressed-tensors",
    kv_cache: Annotated[bool, typer.Option("--kv-cache", help="Scales of cached keys and values too.")] = False,
    ignore: Annotated[
        list[str], typer.Option("--ignore", metavar="NAME", help="A module that stays plain, or re:…; may be repeated.")
    ] = [],  # noqa: B006
    prompts: Annotated[
        Path | None, typer.Option("--prompts", metavar="FILE", help="Calibrate with these, one a line.")
    ] = None,
) -> None:
    """Write an FP8 checkpoint of a plain one."""
    from graphsrt.quantize import PROMPTS, quantize

    given = PROMPTS if prompts is None else tuple(line for line in prompts.read_text().splitlines() if line.strip())
    made = quantize(
        model, out, scheme, layout=layout, kv_cache=kv_cache, ignore=ignore, prompts=given, progress=sys.stderr.isatty()
    )
    print(f"{made}: {_bytes_in(made):,} bytes")


@app.command()
def bench(
    model: ModelOrConfig,
    peers: Annotated[str, typer.Option("--peers", metavar="NAME,…", help="hf, vllm, llamacpp, openvino.")] = "",
    peer_python: Annotated[
        list[str], typer.Option("--peer-python", metavar="NAME=PYTHON", help="Of the environment it is installed in.")
    ] = [],  # noqa: B006
    peer_model: Annotated[
        list[str], typer.Option("--peer-model", metavar="NAME=PATH", help="Its own form of the model, a GGUF file say.")
    ] = [],  # noqa: B006
    batches: Annotated[str, typer.Option("--batches", metavar="N,…", help="Sequences of decode steps.")] = "1,8,32",
    contexts: Annotated[str, typer.Option("--contexts", metavar="N,…", help="Tokens of each sequence.")] = "512",
    prefill: Annotated[str, typer.Option("--prefill", metavar="N,…", help="Tokens of prompts.")] = "512,2048",
    tp: Annotated[int, typer.Option("--tp", help="Ranks of this engine.")] = 1,
    threads: Annotated[int | None, typer.Option("--threads", help="Of each engine; default all cores.")] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="Each engine is measured so often.")] = 5,
    new: Annotated[int, typer.Option("--new", help="Tokens that a sequence decodes while it is timed.")] = 33,
    starts: Annotated[bool, typer.Option("--starts/--no-starts", help="Also time cold and warm starts.")] = True,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Of weights and activations.")] = Dtype.bfloat16,
    quantize: Annotated[
        Quantize | None, typer.Option("--quantize", help="This engine rounds weights of linears to integers.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="All figures as JSON.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="A picture, .png or .svg.")] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Decoding, prefill, starts and memory, beside the machine's ceilings and other engines, measured in turn."""
    from graphsrt.benchmark.command import bench
    from graphsrt.benchmark.engine_process import OURS
    from graphsrt.benchmark.measure import Case, Decode, Prefill
    from graphsrt.benchmark.show import check_plot, plot, text

    for option, file in (("--json", json_file), ("--plot", plot_file)):  # known before anything is measured
        if file is not None and not file.absolute().parent.is_dir():
            raise ValueError(explain(f"{option} names a file in a folder that is not there", got=str(file)))
    if plot_file is not None:
        check_plot(plot_file)
    cases: list[Case] = [
        Decode(batch, context)
        for context in _numbers("--contexts", contexts) for batch in _numbers("--batches", batches)
    ]  # fmt: skip
    cases += [Prefill(tokens) for tokens in _numbers("--prefill", prefill)]
    found = bench(
        _model_or_config(model, trust_remote_code), cases, peers=[name for name in peers.split(",") if name],
        pythons=_pairs("--peer-python", peer_python), models=_pairs("--peer-model", peer_model), dtype=dtype.value,
        threads=threads or len(os.sched_getaffinity(0)), tp=tp, quantize=quantize and quantize.value, rounds=rounds,
        new=new, starts=starts,
        told=lambda words: print(words, file=sys.stderr),
    )  # fmt: skip
    print(text(found))
    if json_file is not None:
        json_file.write_text(json.dumps(found.as_dict(), indent=2))
    if plot_file is not None:
        plot(found, plot_file)
    if OURS in found.failures or any(OURS in times.failures for times in found.cases):
        raise typer.Exit(1)


@app.command()
def cache(
    kinds: Annotated[list[str], typer.Argument(metavar="[KIND]...", help=f"{', '.join(CACHE_KINDS)}")] = [],  # noqa: B006
    clear: Annotated[bool, typer.Option("--clear", help="Remove what is listed.")] = False,
) -> None:
    """List or clear converted models, traced programs and compiled code."""
    from graphsrt.cache import cache_dir

    for kind in kinds:
        if kind not in CACHE_KINDS:
            raise typer.BadParameter(f"{kind!r} is none of {', '.join(CACHE_KINDS)}")
    place, total = cache_dir(), 0
    print(place)
    for kind in kinds or CACHE_KINDS:
        folder = place / kind
        entries = [entry for entry in folder.iterdir() if entry.is_dir()] if folder.is_dir() else []
        size = _bytes_in(folder)
        total += size
        print(f"  {kind:<8} {len(entries):>5} {size / 1e6:>10.1f} MB   {CACHE_KINDS[kind]}")
        if clear and folder.is_dir():
            shutil.rmtree(folder)
    print(f"{'removed' if clear else 'in all'} {total / 1e6:.1f} MB")


# -- arguments ------------------------------------------------------------------------------------------------------


def _numbers(option: str, text: str) -> list[int]:
    """Positive numbers with commas between them."""
    try:
        numbers = [int(number) for number in text.split(",") if number.strip()]
    except ValueError:
        raise typer.BadParameter(f"{option} takes numbers with commas between them, got {text!r}") from None
    if any(number < 1 for number in numbers):
        raise typer.BadParameter(f"{option} takes numbers from 1 on, got {text!r}")
    return numbers


def _pairs(option: str, given: list[str]) -> dict[str, str]:
    """``NAME=VALUE`` as given, each name once."""
    pairs = [entry.partition("=") for entry in given]
    if any(not equals or not value for _, equals, value in pairs):
        raise typer.BadParameter(f"{option} takes NAME=VALUE, got {', '.join(given)!r}")
    return {name: value for name, _, value in pairs}


def _is_config(model: str) -> bool:
    return model.endswith(".json") and not Path(model).is_dir()


def _model_or_config(model: str, trust_remote_code: bool) -> Any:
    """The name itself, or the config alone where there is nothing more: a .json file, or a folder without weights."""
    path = Path(model).expanduser()
    weights = ("*.safetensors", "*.bin", "*.index.json")
    if _is_config(model) or (path.is_dir() and not any(next(path.glob(pattern), None) for pattern in weights)):
        from graphsrt.models.source import read_config

        return read_config(path, trust_remote_code=trust_remote_code)
    return model


def _pipeline(references: list[str], before: str | None, after: str | None) -> list[Any] | None:
    """The pipeline with a user's passes in it, in the order given; None, for the default, if there are none."""
    if not references:
        if before or after:
            raise typer.BadParameter("--before and --after say where a --pass goes, and none is given")
        return None
    from graphsrt.dump import find_pass
    from graphsrt.passes import PIPELINE, insert
    from graphsrt.passes.plugins import with_installed
    from graphsrt.passes.runner import pass_name

    passes = with_installed(PIPELINE)
    for reference in references:
        function = find_pass(reference)
        passes = insert(passes, function, before=before, after=after)
        after = pass_name(function) if after else None  # the next one goes behind it
    return passes


def _with_template(compiled: CompiledModel, text: str, system: str | None, chat: bool) -> str | list[int]:
    """The prompt as token ids of a chat, or as it stands if the tokenizer has no template or none is wanted."""
    tokenizer = compiled.tokenizer
    if not chat or not getattr(tokenizer, "chat_template", None):
        if system is not None:
            raise ValueError(
                explain(
                    "a system message needs a chat template",
                    got="--no-chat" if not chat else "a tokenizer without a chat template",
                    hint="leave --system out, or write it into the prompt",
                )
            )
        return text
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": text})
    ids = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    return [int(token) for token in ids]


def _as_json(program: Program, after: str | None) -> dict[str, Any]:
    from dataclasses import asdict

    from graphsrt.dump import weight_bytes

    return {
        "model": program.name,
        "after": after or (program.history[-1].name if program.history else "capture"),
        "mesh": program.mesh,
        "constants": program.constants,
        "passes": [asdict(report) for report in program.history],
        "operators": len(program.nodes),
        "weight_bytes_per_rank": sum(map(weight_bytes, program.weights.values())),
        "program": str(program),
    }


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


# -- the way in and out -----------------------------------------------------------------------------------------------


def _torchrun_rank() -> int | None:
    """This process's rank under ``torchrun``, else None."""
    return int(os.environ.get("RANK", "0")) if "TORCHELASTIC_RUN_ID" in os.environ else None


def _leave_group() -> None:
    """End the process group that ``compile`` joined under ``torchrun``."""
    distributed = sys.modules.get("torch.distributed")
    if _torchrun_rank() is not None and distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


def _fail(error: BaseException, debug: bool, status: int) -> int:
    if debug:
        traceback.print_exception(error)
    rank = _torchrun_rank()
    print(f"graphsrt: {f'rank {rank}: ' if rank else ''}{error}", file=sys.stderr)
    return status


def main(arguments: list[str] | None = None) -> int:
    """Run a command line (default ``sys.argv[1:]``) and return the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    if not given:
        app(args=["--help"], prog_name="graphsrt", standalone_mode=False)
        return 2
    debug = "--debug" in given or os.environ.get("GRAPHSRT_DEBUG", "") not in ("", "0")
    given = [argument for argument in given if argument != "--debug"]  # it may stand anywhere
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a model may say what the terminal cannot show
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        status = app(args=given, prog_name="graphsrt", standalone_mode=False)
        _leave_group()
        return status if isinstance(status, int) else 0
    except _UsageError as error:
        path = getattr(getattr(error, "ctx", None), "command_path", "graphsrt")
        return _fail(ValueError(f"{error.format_message()}\n  try {path} --help"), debug, 2)
    except (GraphsrtError, ValueError) as error:
        return _fail(error, debug, 1)
    except MemoryError as error:
        return _fail(MemoryError(f"out of memory {error}"), debug, 1)
    except KeyboardInterrupt:
        return 130
