"""Models whose attention reads only the tokens that an indexer picks (DeepSeek-V3.2 and its kin): refused by name.

Which tokens a query reads follows there from keys of the indexer's own, which every token would have to leave in the
cache beside its keys and values. Such a model run with attention to all tokens would give other numbers.
"""

from __future__ import annotations

from torch import nn

from graphsrt.errors import CompileError, explain


def check_dense(model: nn.Module) -> None:
    """Raise CompileError if an attention of the model has an indexer, naming it and how many tokens it picks."""
    found = [(path, module) for path, module in model.named_modules() if path.rpartition(".")[2] == "indexer"]
    if not found:
        return
    path, module = found[0]
    picked = getattr(module, "index_topk", None)
    raise CompileError(
        explain(
            f"{type(model).__name__} has sparse attention: an indexer picks the tokens that a query reads",
            where=f"{path} ({type(module).__name__})",
            expected="attention to all cached tokens, or to a window of them",
            got=f"the top {picked} tokens" if picked is not None else "tokens that the model chooses",
            hint="the indexer's own keys would have to be cached too; serve such a model with transformers",
        )
    )
