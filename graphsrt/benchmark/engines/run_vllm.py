"""vLLM's CPU backend, offline."""

from __future__ import annotations

import os
from typing import Any

from serve import serve


def load(model: str, *, threads: int, dtype: str, context: int, batch: int, **_: Any) -> Any:
    os.environ |= {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_KVCACHE_SPACE": "4", "HF_HUB_OFFLINE": "1"}
    import vllm

    engine = vllm.LLM(
        model=model, dtype=dtype, max_model_len=context, max_num_seqs=batch, enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )  # fmt: skip
    return engine, vllm.__version__


def run(engine: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    import vllm

    params = vllm.SamplingParams(temperature=0.0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False)
    results = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in results]


if __name__ == "__main__":
    serve(load, run)
