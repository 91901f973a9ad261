"""transformers' own ``generate``, eager, with its dynamic cache."""

from __future__ import annotations

from typing import Any

from serve import serve


def load(model: str, *, threads: int, dtype: str, **_: Any) -> Any:
    import torch
    import transformers

    torch.set_num_threads(threads)
    net = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    net.generation_config.pad_token_id = net.generation_config.eos_token_id = None
    return net, f"{transformers.__version__}, torch {torch.__version__}"


def run(engine: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    import torch

    ids = torch.tensor(prompts)  # prompts of one length: nothing is padded
    with torch.no_grad():
        out = engine.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False
        )
    return out[:, ids.shape[1] :].tolist()


if __name__ == "__main__":
    serve(load, run)
