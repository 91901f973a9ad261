"""vLLM's CPU backend, offline."""

from __future__ import annotations

import os
import sys
from ctypes.util import find_library
from pathlib import Path
from typing import Any

from serve import serve

PAGE = 128  # tokens in a page of the cache


def load(model: str, *, threads: int, dtype: str, context: int, batch: int, **_: Any) -> Any:
    # the libraries that its guide wants preloaded; what computes is another process, which gets them
    openmp, malloc = Path(sys.prefix) / "lib/libiomp5.so", find_library("tcmalloc_minimal")
    os.environ |= {
        "LD_PRELOAD": ":".join(([str(openmp)] if openmp.exists() else []) + ([malloc] if malloc else [])),
        "OMP_NUM_THREADS": str(threads),
        # left to itself it computes on one core fewer than there are
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads])),
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; what counts is the number of pages below
        "HF_HUB_OFFLINE": "1",
    }
    import vllm

    engine = vllm.LLM(
        model=model, dtype=dtype, max_model_len=context, max_num_seqs=batch, enable_prefix_caching=True,
        skip_tokenizer_init=True, block_size=PAGE, num_gpu_blocks_override=1 + batch * -(-context // PAGE),
    )  # fmt: skip
    return engine, vllm.__version__


def run(engine: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    import vllm

    params = vllm.SamplingParams(temperature=0.0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False)
    results = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in results]


if __name__ == "__main__":
    serve(load, run)
