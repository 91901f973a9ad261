"""Each fusion on and off: the time of a step with it, as a share of the time without it.

    python bench/fusions.py [--tp 2] [--layers 8] [--width 576] [--rounds 7] [--dtype float32] [--only fuse_silu_mul …]

Random models on this machine's CPUs, compiled, through the engine. Both programs are open at once and measured
in turn, so that what else the machine does falls on both; the ratio is the median of the rounds' ratios, below 1 where
the fusion wins, and the spread is that between the quartiles. The first line of a family is the program against itself:
what lies between its quartiles is nothing. A fusion that does not fire in a family is left out;
"llama fp8" is the same model as "llama", rounded to FP8 with a scale for each token, and shows what rounds only.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import graphsrt
from graphsrt.passes.document_fusions import FUSIONS
from graphsrt.quantize import quantize

VOCAB = 8192
FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "qwen3": {"head_dim": 64}, "gpt_neox": {"hidden_act": "gelu"}}
IN_FP8 = "llama fp8"


def model_of(family: str, layers: int, width: int, dtype: str) -> Any:
    """A random model of a family, heads of 64 channels, three for each KV head."""
    if width % 192:
        raise ValueError(f"--width must be a multiple of 192, three heads of 64 channels, not {width}")
    heads = width // 64
    config = AutoConfig.for_model(
        family, vocab_size=VOCAB, hidden_size=width, intermediate_size=8 * width // 3 // 64 * 64,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads // 3,
        max_position_embeddings=2048, eos_token_id=None, pad_token_id=None, bos_token_id=None, **FAMILIES[family],
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()


def in_fp8(net: Any, folder: Path) -> Path:
    """A checkpoint of the model with FP8 weights, whose inputs are rounded with a scale for each token."""
    net.save_pretrained(folder / "plain")
    return quantize(folder / "plain", folder / "fp8", "fp8-dynamic")


def measure(model: graphsrt.CompiledModel, batch: int, prompt: int, new: int) -> float:
    """Milliseconds of a decoding step of ``batch`` sequences, or of a prefill where ``new`` is 1."""
    generator = torch.Generator().manual_seed(int(time.time() * 1e6) % 2**31)  # no prompt is in the prefix cache
    prompts = [torch.randint(3, VOCAB, (prompt,), generator=generator).tolist() for _ in range(batch)]
    params = graphsrt.SamplingParams(max_new_tokens=new, temperature=0.0)
    start = time.perf_counter()
    model.generate(prompts, params)
    return (time.perf_counter() - start) * 1e3 / new


def compare(fused: graphsrt.CompiledModel, plain: graphsrt.CompiledModel, rounds: int, **what: int) -> str:
    """``median (spread)`` of fused over plain."""
    for model in (fused, plain):
        measure(model, **what)
    ratios = []
    for number in range(rounds):
        order = [fused, plain] if number % 2 else [plain, fused]
        times = {id(model): measure(model, **what) for model in order}
        ratios.append(times[id(fused)] / times[id(plain)])
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f}–{high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--new", type=int, default=64, help="tokens of a sequence while decoding is timed")
    families = [*FAMILIES, IN_FP8]
    parser.add_argument("--families", nargs="+", default=families, choices=families)
    parser.add_argument("--only", nargs="+", default=FUSIONS, choices=FUSIONS)
    args = parser.parse_args()
    print("| family | fusion | fired | decode, batch 1 | decode, batch 8 | prefill 512 |\n|---|---|---|---|---|---|")
    for family in args.families:
        with tempfile.TemporaryDirectory() as folder:
            net = model_of(family.split()[0], args.layers, args.width, args.dtype)
            model = in_fp8(net, Path(folder)) if family == IN_FP8 else net
            rows(family, model, [name for name in args.only if family != IN_FP8 or name.endswith("quant")], args)


def rows(family: str, model: Any, names: list[str], args: argparse.Namespace) -> None:
    """Print a line for each of the fusions that fires."""
    with graphsrt.compile(model, tp=args.tp) as fused:
        fired = {report.name: report.fired for report in fused.program().history}
        for name in ("none", *(name for name in names if fired[name])):
            with graphsrt.compile(model, tp=args.tp, without=[name] if name != "none" else []) as plain:
                found = [
                    compare(fused, plain, args.rounds, batch=batch, prompt=prompt, new=new)
                    for batch, prompt, new in ((1, 16, args.new), (8, 16, args.new), (1, 512, 1))
                ]
            print(f"| {family} | {name} | {fired.get(name, 0)} | {' | '.join(found)} |", flush=True)


if __name__ == "__main__":
    main()
