"""A model's tokenizer: loaded through transformers, and where that is too slow for a start, what is inside it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from graphsrt.errors import GraphsrtError, explain

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")


def load_tokenizer(name: str, folder: Path, *, trust_remote_code: bool = False) -> Any | None:
    """transformers' tokenizer of a folder with its chat template; None if there is none.

    ``GraphsrtError`` if it cannot be loaded. ``name``: the model's, for the message.
    """
    if not any((folder / file).exists() for file in _FILES):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        raise GraphsrtError(
            explain(f"the tokenizer of {name} cannot be loaded", where=str(folder), got=str(error))
        ) from error


def no_tokenizer(name: str, folder: Path | None) -> ValueError:
    """What is raised where text is given to a model without a tokenizer."""
    return ValueError(
        explain(
            f"{name} has no tokenizer, so it takes no text",
            where=str(folder or "a model in memory"),
            expected="lists of token ids as prompts",
            hint="pass token ids, or put the tokenizer's files beside config.json",
        )
    )


def inner_text(tokenizer: Any) -> str | None:
    """The Rust tokenizer inside transformers' as JSON, all that transformers changed on loading included; None where
    transformers' does more than to call it, so that it would not stand for the whole."""
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    if not isinstance(tokenizer, TokenizersBackend):
        return None
    kind = type(tokenizer)
    same = all(getattr(kind, name) is getattr(TokenizersBackend, name) for name in ("_decode", "_encode_plus"))
    same = same and all(
        getattr(kind, name) is getattr(PreTrainedTokenizerBase, name) for name in ("decode", "__call__")
    )
    asks = tokenizer.clean_up_tokenization_spaces or tokenizer.split_special_tokens
    if not same or asks or hasattr(kind, "_switch_to_input_mode"):
        return None
    inner = json.loads(tokenizer.backend_tokenizer.to_str())
    return json.dumps({**inner, "truncation": None, "padding": None})  # as for every call of transformers' own


class LateTokenizer:
    """A tokenizer that loads what it is asked for: token ids of a text and text of token ids from the Rust tokenizer
    (tens of milliseconds), everything else from transformers' (a second or more with its imports). Safe in threads.
    """

    def __init__(self, inner: str | None, load: Callable[[], Any]):
        """``inner``: of :func:`inner_text`; None if only transformers' gives right answers. ``load`` gives that."""
        self._inner_text, self._load = inner, load
        self._loading = threading.RLock()

    def __call__(self, text: str) -> dict[str, list[int]]:
        """``{"input_ids": …}`` of a text, special tokens of the tokenizer's own template included."""
        return {"input_ids": list(self._inner.encode(text).ids if self._inner else self.whole(text)["input_ids"])}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids."""
        return (self._inner or self.whole).decode(token_ids, skip_special_tokens=skip_special_tokens)

    @cached_property
    def _inner(self) -> Any | None:
        from tokenizers import Tokenizer

        with self._loading:
            return None if self._inner_text is None else Tokenizer.from_str(self._inner_text)

    @cached_property
    def whole(self) -> Any:
        """transformers' tokenizer."""
        with self._loading:
            return self._load()
