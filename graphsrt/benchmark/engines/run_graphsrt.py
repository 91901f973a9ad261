"""This engine, measured through its own ``generate``."""

from __future__ import annotations

from typing import Any

from serve import serve


def load(model: str, *, threads: int, dtype: str, context: int, batch: int, tp: int = 1, **options: Any) -> Any:
    import torch

    import graphsrt

    torch.set_num_threads(threads)
    most = batch * (context + 1) + 64
    compiled = graphsrt.compile(
        model, tp=tp, dtype=dtype, context_length=context, max_running=batch, max_total_tokens=most, **options
    )
    return compiled, f"{graphsrt.__version__}, torch {torch.__version__}"


def run(engine: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    import graphsrt

    params = graphsrt.SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True)
    return [result.token_ids for result in engine.generate(prompts, params)]


def counters(engine: Any) -> dict[str, float]:
    now = engine.metrics()
    return {"steps": now.num_steps, "host_s": now.host_s}


if __name__ == "__main__":
    serve(load, run, counters)
