"""OpenVINO GenAI with its paged attention; the model is a folder that optimum-intel exported."""

from __future__ import annotations

from typing import Any

from serve import serve

PAGE = 32  # tokens in a page of the cache, on CPUs


def load(model: str, *, threads: int, dtype: str, context: int, batch: int, **_: Any) -> Any:
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks = 1 + 2 * batch * -(-context // PAGE)
    scheduler.max_num_seqs = batch
    scheduler.enable_prefix_caching = True  # prompts that were timed before decoding come again
    names = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
    hints = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": names[dtype]}
    engine = genai.ContinuousBatchingPipeline(model, scheduler_config=scheduler, device="CPU", properties=hints)
    return engine, openvino.get_version()


def run(engine: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    import numpy
    import openvino
    import openvino_genai as genai

    config = genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = new
    config.ignore_eos, config.do_sample = True, False
    inputs = [openvino.Tensor(numpy.array([ids], dtype=numpy.int64)) for ids in prompts]
    results = engine.generate(inputs, [config] * len(prompts))
    return [list(result.m_generation_ids[0]) for result in results]


if __name__ == "__main__":
    serve(load, run)
