"""What FP8 and integers cost in accuracy: perplexity of a model and of its quantised forms on two short texts.

    python bench/perplexity.py [--model smollm2] [--tp 1]

The texts (beginnings of Carroll's "Alice's Adventures in Wonderland", 1865, and of Darwin's "On the Origin of Species",
1859) are in the public domain and lie beside this file. Each FP8 form is written to a temporary folder by
``graphsrt.quantize``, integers are made while the plain model is loaded; all run eagerly on simulated ranks, so nothing
is compiled. Beside the perplexity, the mean
Kullback-Leibler divergence from the unquantised model's next-token distribution, in nats: it tells apart what texts as
short as these cannot.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path

import torch

import graphsrt
from graphsrt.quantize import quantize

TEXTS = [path.read_text() for path in sorted((Path(__file__).parent / "texts").glob("*.txt"))]
FORMS = ["fp8", "fp8-dynamic", "fp8-block"]


def log_probabilities(
    model: str | Path, tp: int, kv_dtype: str | None = None, integers: str | None = None
) -> tuple[list[torch.Tensor], list[list[int]], int]:
    """Log-probabilities ``[T, V]`` of each text, its token ids, and bytes of weights on rank 0."""
    from graphsrt.dump import weight_bytes

    with graphsrt.compile(
        str(model), tp=tp, ranks="simulated", backend="eager", context_length=1024, max_total_tokens=2048,
        kv_dtype=kv_dtype, quantize=integers,
    ) as compiled:  # fmt: skip
        ids = [compiled.tokenizer(text)["input_ids"] for text in TEXTS]
        found = [torch.log_softmax(compiled.logits(one).double(), -1) for one in ids]
        size = sum(map(weight_bytes, compiled.program().weights.values()))
    return found, ids, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tp", type=int, default=1)
    given = parser.parse_args()
    plain, ids, size = log_probabilities(given.model, given.tp)
    tokens = sum(len(one) - 1 for one in ids)
    print(f"{given.model}, tp={given.tp}, {tokens} predicted tokens, torch {torch.__version__}\n")
    print("| weights and inputs | cache | perplexity | KL from plain, nats | weight MB a rank |\n|---|---|---|---|---|")

    def row(name: str, cache: str, found: list[torch.Tensor], size: int) -> None:
        nll = -sum(float(lp[:-1].gather(1, torch.tensor(one[1:])[:, None]).sum()) for lp, one in zip(found, ids))
        kl = sum(float((p.exp() * (p - q)).sum()) for p, q in zip(plain, found)) / sum(len(one) for one in ids)
        print(f"| {name} | {cache} | {math.exp(nll / tokens):.2f} | {kl:.4f} | {size / 1e6:.0f} |", flush=True)

    row("plain", "plain", plain, size)
    for form in ("int8", "int4"):
        found, _, size = log_probabilities(given.model, given.tp, integers=form)
        row(f"{form}, plain inputs", "plain", found, size)
    with tempfile.TemporaryDirectory() as scratch:
        for form in FORMS:
            folder = quantize(given.model, Path(scratch) / form, form, kv_cache=form == "fp8", progress=True)
            found, _, size = log_probabilities(folder, given.tp)
            row(form, "plain", found, size)
            if form == "fp8":
                found, _, size = log_probabilities(folder, given.tp, "fp8")
                row(form, "fp8", found, size)


if __name__ == "__main__":
    main()
