"""Configs with the numbers of published models, at tp=8: traced strictly, their collectives counted, and verified.

    python bench/real_sizes.py [--only Gemma-2-9B …] [--no-verify]

No weights are read. ``strict`` refuses a program with a linear that stays whole. "Reductions" are those of a step,
beside the fewest there can be: one for the embedding, and for each layer two, or one where attention and MLP are
parallel. Verification executes every stage of a miniature, with the model's head counts and experts, on eight simulated
ranks. The status is 1 if anything is not as it should be.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from transformers import AutoConfig

import graphsrt
from graphsrt import ops

TP = 8
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "Llama-3.2-1B": (
        "llama",
        {"vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "tie_word_embeddings": True},
        2,
    ),
    "Qwen3-0.6B": (
        "qwen3",
        {"vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "tie_word_embeddings": True},
        2,
    ),
    "Qwen3-32B": (
        "qwen3",
        {"vocab_size": 151936, "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64,
         "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 25600},
        2,
    ),
    "Phi-4": (
        "phi3",
        {"vocab_size": 100352, "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40,
         "num_key_value_heads": 10, "intermediate_size": 17920, "pad_token_id": None, "bos_token_id": 1,
         "eos_token_id": 2},
        2,
    ),
    "Gemma-2-9B": (
        "gemma2",
        {"vocab_size": 256000, "hidden_size": 3584, "num_hidden_layers": 42, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 256, "intermediate_size": 14336},
        2,
    ),
    "Mixtral-8x7B": (
        "mixtral",
        {"vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "intermediate_size": 14336, "num_local_experts": 8},
        2,
    ),
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        {"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
         "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
         "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "norm_topk_prob": True},
        2,
    ),
    "gpt-oss-20b": ("gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}, 2),
    "DeepSeek-V3": ("deepseek_v3", {}, 2),
    "Command-R": (
        "cohere",
        {"vocab_size": 256000, "hidden_size": 8192, "num_hidden_layers": 40, "num_attention_heads": 64,
         "num_key_value_heads": 64, "intermediate_size": 22528},
        1,
    ),
}  # fmt: skip
"""Name -> model type, sizes that are not the config class's defaults, and reductions of a layer."""


def config(name: str) -> Any:
    """The config of a published model, in bfloat16."""
    model_type, sizes, _ = MODELS[name]
    return AutoConfig.for_model(model_type, dtype="bfloat16", **sizes)


def fewest(name: str) -> int:
    """Reductions of a step."""
    return MODELS[name][2] * config(name).num_hidden_layers + 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--no-verify", action="store_true")
    chosen = parser.parse_args()
    print("| model | layers | reductions, of | gathers | weights of a rank / share | trace s | verified | verify s |")
    print("|---|---|---|---|---|---|---|---|")
    is_good = True
    for name in chosen.only:
        start = time.perf_counter()
        traced = graphsrt.trace(config(name), tp=TP, strict=True)
        took = time.perf_counter() - start
        program = traced.program()
        counts = ops.count_collectives(node.target for node in program.nodes)
        share = _share(traced)
        verified, verify_took = "", 0.0
        if not chosen.no_verify:
            start = time.perf_counter()
            report = graphsrt.verify(config(name), tp=TP)
            verified, verify_took = "yes" if report.ok else "NO", time.perf_counter() - start
            is_good &= report.ok
        is_good &= counts == (fewest(name), 0)
        print(
            f"| {name} | {config(name).num_hidden_layers} | {counts[0]}, {fewest(name)} | {counts[1]} | {share:.3f} "
            f"| {took:.0f} | {verified} | {verify_took:.0f} |",
            flush=True,
        )
    return 0 if is_good else 1


def _share(traced: Any) -> float:
    """Bytes of a rank's weights, in units of an eighth of all."""
    from graphsrt.dump import weight_bytes

    def total(program: Any) -> int:
        return sum(map(weight_bytes, program.weights.values()))

    return TP * total(traced.program()) / total(traced.program(after="capture"))


if __name__ == "__main__":
    sys.exit(main())
