"""llama.cpp through the C functions that llama-cpp-python binds; the model is a GGUF file, in the dtype that it has.

``Llama.generate`` of the binding takes one prompt; ``llama_decode`` beneath it takes tokens of many sequences at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from serve import serve

CHUNK = 2048  # tokens in one call, the default of llama.cpp's own programs
PART = 256  # a sequence's part of the cache is a multiple of this


def load(model: str, *, threads: int, context: int, batch: int, **_: Any) -> Any:
    import llama_cpp

    files = [Path(model)] if Path(model).is_file() else sorted(Path(model).glob("*.gguf"))
    if not files:
        raise FileNotFoundError(f"no .gguf file in {model}; --peer-model llamacpp=FILE names one")
    llama_cpp.llama_backend_init()
    weights = llama_cpp.llama_model_load_from_file(str(files[0]).encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_seq_max, params.n_ctx = batch, batch * -(-context // PART) * PART
    params.n_batch, params.n_threads, params.n_threads_batch = CHUNK, threads, threads
    engine = weights and llama_cpp.llama_init_from_model(weights, params)
    if not engine:
        raise RuntimeError(f"llama.cpp cannot load {files[0]}: its own words tell why")
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(weights))
    cached: list[list[int]] = []
    return (engine, llama_cpp.llama_batch_init(CHUNK, 0, 1), vocabulary, cached), llama_cpp.__version__


def run(engine: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    import llama_cpp

    memory, cached = llama_cpp.llama_get_memory(engine[0]), engine[3]
    known = prompts == cached  # the last run's prompts: their keys and values are there, but for the last token's
    if known:
        for number, ids in enumerate(prompts):
            llama_cpp.llama_memory_seq_rm(memory, number, len(ids) - 1, -1)
    else:
        llama_cpp.llama_memory_clear(memory, False)
        cached[:] = prompts
    fed = [
        (token, position, number, position == len(ids) - 1)
        for number, ids in enumerate(prompts)
        for position, token in enumerate(ids)
        if not known or position == len(ids) - 1
    ]
    rows: list[list[int]] = [[] for _ in prompts]
    for _ in range(new):
        for number, token in _next(engine, fed):
            rows[number].append(token)
        fed = [(row[-1], len(ids) + len(row) - 1, number, True) for number, (ids, row) in enumerate(zip(prompts, rows))]
    return rows


def _next(engine: Any, fed: list[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
    """Run (token, position, sequence, whether to predict); give (sequence, its likeliest next token)."""
    import llama_cpp
    import numpy

    context, batch, vocabulary, _ = engine
    found = []
    for start in range(0, len(fed), CHUNK):
        chunk = fed[start : start + CHUNK]
        batch.n_tokens = len(chunk)
        for i, (token, position, number, predict) in enumerate(chunk):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, predict
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, number
        if status := llama_cpp.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode of {len(chunk)} tokens gave status {status}")
        for i, (_, _, number, predict) in enumerate(chunk):
            if predict:
                logits = numpy.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), (vocabulary,))
                found.append((number, int(logits.argmax())))
    return found


if __name__ == "__main__":
    serve(load, run)
