"""llama.cpp through llama-cpp-python; the model is a GGUF file. One prompt at a time: its binding has no batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from serve import serve


def load(model: str, *, threads: int, context: int, batch: int, **_: Any) -> Any:
    import llama_cpp

    if batch > 1:
        raise RuntimeError("llama-cpp-python generates for one prompt at a time: measure it at batch 1")
    files = [Path(model)] if Path(model).is_file() else sorted(Path(model).glob("*.gguf"))
    if not files:
        raise FileNotFoundError(f"no .gguf file in {model}; --peer-model llamacpp=FILE names one")
    engine = llama_cpp.Llama(
        str(files[0]), n_ctx=context, n_threads=threads, n_threads_batch=threads, n_batch=2048, verbose=False
    )
    return engine, llama_cpp.__version__


def run(engine: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    rows = []
    for ids in prompts:
        engine.reset()
        tokens = engine.generate(ids, temp=0.0, reset=True)
        rows.append([next(tokens) for _ in range(new)])
    return rows


if __name__ == "__main__":
    serve(load, run)
