"""What one step of the model needs to know: plain numpy, and one flat integer buffer on the wire."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Recognises a buffer and its layout; the last digits are the version of the layout.
_MAGIC = 0x6772_6170_6803
_HEADER = 18

_PER_TOKEN = ("tokens", "positions", "out_cache_loc")
_PER_SEQUENCE = ("req_pool_indices", "seq_lens", "extend_seq_lens")
_PER_LOGIT_ROW = ("logit_rows", "top_k", "temperature", "top_p", "min_p", "uniform")
_PER_EDIT = ("edit_rows", "edit_tokens", "edit_bias", "edit_scale", "edit_shift")
_PER_LOGPROB = ("logprob_rows", "logprob_targets", "logprob_top")
_GROUPS = (_PER_TOKEN, _PER_SEQUENCE, _PER_LOGIT_ROW, _PER_EDIT, _PER_LOGPROB, ("embeds_rows",), ("embeds",))
_FLOATS = frozenset({"temperature", "top_p", "min_p", "uniform", "edit_bias", "edit_scale", "edit_shift", "embeds"})

_NO_INTS: Ints = np.empty(0, dtype=np.int64)
_ZERO: Ints = np.zeros(1, dtype=np.int64)
_NO_FLOATS: Floats = np.empty(0, dtype=np.float64)


class ForwardMode(IntEnum):
    """What a step computes.

    EXTEND: prompts or parts of prompts only. DECODE: one token for each sequence. TARGET_VERIFY: sequences that decode,
    some of them with drafted tokens after their last one, all of which have a logit row. MIXED: both kinds; the
    sequences that decode come first, with or without drafts.
    """

    EXTEND = 0
    DECODE = 1
    MIXED = 2
    TARGET_VERIFY = 3


@dataclass(frozen=True)
class PrefixUpdate:
    """Slots of a prefix whose KV exists already: ``req_to_token[req, start : start + len(slots)] = slots``."""

    req: int
    start: int
    slots: Ints

    def __post_init__(self) -> None:
        object.__setattr__(self, "slots", np.ascontiguousarray(self.slots, dtype=np.int64))


@dataclass(eq=False)
class ForwardBatch:
    """One step over T tokens of B sequences, with R rows whose logits are wanted. Arrays are numpy int64 or float64.

    tokens[T], positions[T]: ids, and places in their sequences. Tokens of one sequence are adjacent, in the order of B.
    req_pool_indices[B]: the sequence's row of ``req_to_token`` (int32[max_requests, max_context], kept by the workers).
    seq_lens[B]: KV length, with this step's tokens.
    extend_seq_lens[B]: this step's tokens; the sum is ``num_token_non_padded``.
    out_cache_loc[T]: KV slot that each token is written to; -1 is a padded row, never written.
    logit_rows[R]: rows in [0, T), ascending: the last token of each sequence that decodes or ends its prompt, or all.
    temperature[R], top_p[R], min_p[R], uniform[R] float64, top_k[R] int64: sampling of each of these rows; ``uniform``
        is in [0, 1), and means nothing where all temperatures are 0.
    edit_rows[M], edit_tokens[M] int64, edit_bias[M], edit_scale[M], edit_shift[M] float64: single logits that change
        before sampling, as ``logit_edits`` says; the row counts within R. No (row, token) is there twice.
    logprob_rows[L]: places in R whose log-probabilities are wanted, ascending; logprob_targets[L]: of this token, or of
        the one that is sampled where it is -1; logprob_top[L]: and of this many most probable tokens.
    embeds_rows[N]: rows of T that are embeddings and no tokens, ascending; embeds[N * E] float64: these embeddings.
    num_token_non_padded: real rows; they come first, padded rows after them. Filled with T when left at -1.
    save_kv_cache: if false, the KV pool and ``req_to_token`` are after the step what they were before; the slots of
        ``out_cache_loc`` are still needed while it runs, as a step attends to its own tokens in them.
    size_is_compiled: whether the cache of compiled regions has code for just this size, where a captured step runs.
    return_logits, return_hidden: whether the caller wants logits, and hidden states of the same rows, beside tokens.
    key_value_num_tokens: sum of ``seq_lens``: KV tokens that attention reads. Filled in when left at -1, else checked.
    prefix_updates: parts of ``req_to_token`` that this step's own tokens do not imply.
    """

    forward_mode: ForwardMode
    tokens: Ints
    positions: Ints
    req_pool_indices: Ints
    seq_lens: Ints
    extend_seq_lens: Ints
    out_cache_loc: Ints
    logit_rows: Ints
    temperature: Floats
    top_p: Floats
    top_k: Ints
    min_p: Floats
    uniform: Floats
    edit_rows: Ints = field(default_factory=lambda: _NO_INTS)
    edit_tokens: Ints = field(default_factory=lambda: _NO_INTS)
    edit_bias: Floats = field(default_factory=lambda: _NO_FLOATS)
    edit_scale: Floats = field(default_factory=lambda: _NO_FLOATS)
    edit_shift: Floats = field(default_factory=lambda: _NO_FLOATS)
    logprob_rows: Ints = field(default_factory=lambda: _NO_INTS)
    logprob_targets: Ints = field(default_factory=lambda: _NO_INTS)
    logprob_top: Ints = field(default_factory=lambda: _NO_INTS)
    embeds_rows: Ints = field(default_factory=lambda: _NO_INTS)
    embeds: Floats = field(default_factory=lambda: _NO_FLOATS)
    num_token_non_padded: int = -1
    save_kv_cache: bool = True
    return_logits: bool = False
    return_hidden: bool = False
    size_is_compiled: bool = False
    key_value_num_tokens: int = -1
    prefix_updates: list[PrefixUpdate] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.forward_mode = ForwardMode(self.forward_mode)
        for names in _GROUPS:
            given = [getattr(self, name) for name in names]
            if all(value is _NO_INTS or value is _NO_FLOATS for value in given):
                continue
            for i, name in enumerate(names):
                given[i] = np.ascontiguousarray(given[i], dtype=np.float64 if name in _FLOATS else np.int64)
                setattr(self, name, given[i])
            shape = given[0].shape
            assert len(shape) == 1 and all(value.shape == shape for value in given), (
                f"lengths differ: { {name: value.shape for name, value in zip(names, given)} }"
            )
        if self.num_token_non_padded < 0:
            self.num_token_non_padded = self.num_tokens
        kv_tokens, real = int(self.seq_lens.sum()), int(self.extend_seq_lens.sum())
        if self.key_value_num_tokens < 0:
            self.key_value_num_tokens = kv_tokens
        assert self.key_value_num_tokens == kv_tokens, (
            f"key_value_num_tokens is {self.key_value_num_tokens}, seq_lens sum to {kv_tokens}"
        )
        assert real == self.num_token_non_padded <= self.num_tokens, (
            f"extend_seq_lens sum to {real}, {self.num_token_non_padded} of {self.num_tokens} rows are real"
        )
        if self.forward_mode == ForwardMode.DECODE:
            assert (self.extend_seq_lens == 1).all(), f"extend_seq_lens of a decode step are {self.extend_seq_lens}"

    @property
    def num_tokens(self) -> int:
        """T, padded rows included."""
        return len(self.tokens)

    @property
    def batch_size(self) -> int:
        """B."""
        return len(self.req_pool_indices)

    def query_start_loc(self) -> Ints:
        """Where each sequence's tokens begin among the rows, int64[B + 1]; the last one is where they end."""
        return np.concatenate([_ZERO, self.extend_seq_lens.cumsum()])

    def req_to_token_updates(self) -> tuple[Ints, Ints, Ints]:
        """Rows, columns and slots, int64[U] each: ``req_to_token[rows, columns] = slots`` must run before the step.

        The reused prefixes first, then this step's real tokens, which lie at ``seq_len - extend_seq_len + i``.
        """
        real = slice(0, self.num_token_non_padded)
        if self.forward_mode == ForwardMode.DECODE and not self.prefix_updates:
            return self.req_pool_indices, self.seq_lens - 1, self.out_cache_loc[real]
        rows = [np.repeat(self.req_pool_indices, self.extend_seq_lens)]
        first = np.cumsum(self.extend_seq_lens) - self.extend_seq_lens  # where each sequence begins among the rows
        shift = np.repeat(self.seq_lens - self.extend_seq_lens - first, self.extend_seq_lens)
        columns = [np.arange(self.num_token_non_padded, dtype=np.int64) + shift]
        slots = [self.out_cache_loc[real]]
        for update in reversed(self.prefix_updates):
            rows.insert(0, np.full(len(update.slots), update.req, dtype=np.int64))
            columns.insert(0, np.arange(update.start, update.start + len(update.slots), dtype=np.int64))
            slots.insert(0, update.slots)
        return np.concatenate(rows), np.concatenate(columns), np.concatenate(slots)

    def following(self, tokens: Ints, out_cache_loc: Ints) -> ForwardBatch:
        """The step after this one, which decodes greedily, of the same sequences: their next tokens, in these slots."""
        after = object.__new__(ForwardBatch)  # what has been checked stays as it is
        after.__dict__.update(self.__dict__)
        after.tokens, after.out_cache_loc = tokens, out_cache_loc
        after.positions, after.seq_lens = self.positions + 1, self.seq_lens + 1
        after.key_value_num_tokens = self.key_value_num_tokens + len(tokens)
        after.prefix_updates, after.size_is_compiled = [], False
        return after

    def padded(self, num_tokens: int) -> ForwardBatch:
        """The same step with rows up to ``num_tokens``: token 0 at position 0, slot -1, in no sequence, no logits.

        Raises ValueError if there are more rows than that already.
        """
        extra = num_tokens - self.num_tokens
        if extra < 0:
            raise ValueError(f"{self.num_tokens} rows cannot be padded to {num_tokens}")
        return replace(
            self,
            tokens=np.pad(self.tokens, (0, extra)),
            positions=np.pad(self.positions, (0, extra)),
            out_cache_loc=np.pad(self.out_cache_loc, (0, extra), constant_values=-1),
        )

    def encode(self) -> Ints:
        """One flat int64 buffer for the wire; floats are carried by their bits."""
        prefix = self.prefix_updates
        header = np.array(
            [
                _MAGIC,
                0,  # the whole length, filled in below
                self.forward_mode,
                *(len(getattr(self, names[0])) for names in _GROUPS),
                self.num_token_non_padded,
                self.save_kv_cache,
                self.return_logits,
                self.return_hidden,
                self.size_is_compiled,
                self.key_value_num_tokens,
                len(prefix),
                sum(len(update.slots) for update in prefix),
            ],
            dtype=np.int64,
        )
        assert len(header) == _HEADER
        parts = [header]
        parts += [getattr(self, name).view(np.int64) for names in _GROUPS for name in names]
        if prefix:
            parts.append(np.array([(u.req, u.start, len(u.slots)) for u in prefix], dtype=np.int64).reshape(-1))
            parts += [update.slots for update in prefix]
        buffer = np.concatenate(parts)
        buffer[1] = len(buffer)
        return buffer

    @staticmethod
    def decode(buffer: Ints) -> ForwardBatch:
        """Read what ``encode`` wrote. ``buffer`` is int64 and may be longer than the message.

        The arrays are views of ``buffer``: copy it first if it will be written again while the batch is in use.
        Raises ValueError if it does not hold a batch of this layout.
        """
        if buffer.dtype != np.int64 or buffer.ndim != 1 or len(buffer) < _HEADER or buffer[0] != _MAGIC:
            raise ValueError(f"not a ForwardBatch buffer: {buffer.dtype}{list(buffer.shape)}, begins {buffer[:2]!r}")
        length, mode, *rest = (int(word) for word in buffer[1:_HEADER])
        counts, (non_padded, save_kv, logits, hidden, compiled, kv_tokens, num_prefix, num_slots) = (
            rest[: len(_GROUPS)],
            rest[-8:],
        )
        expected = _HEADER + sum(len(names) * count for names, count in zip(_GROUPS, counts))
        expected += 3 * num_prefix + num_slots
        if length != expected or len(buffer) < length:
            raise ValueError(f"ForwardBatch buffer of {len(buffer)} words says {length}, its counts say {expected}")
        at = _HEADER

        def read(count: int) -> Ints:
            nonlocal at
            at += count
            return buffer[at - count : at]

        arrays: dict[str, Any] = {}
        for names, count in zip(_GROUPS, counts):
            for name in names:
                words = read(count)
                arrays[name] = words.view(np.float64) if name in _FLOATS else words
        spans = read(3 * num_prefix).reshape(-1, 3).tolist()
        return ForwardBatch(
            forward_mode=ForwardMode(mode),
            num_token_non_padded=non_padded,
            save_kv_cache=bool(save_kv),
            return_logits=bool(logits),
            return_hidden=bool(hidden),
            size_is_compiled=bool(compiled),
            key_value_num_tokens=kv_tokens,
            prefix_updates=[PrefixUpdate(req, start, read(count)) for req, start, count in spans],
            **arrays,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ForwardBatch):
            return NotImplemented
        return np.array_equal(self.encode(), other.encode())  # bits, so that NaN equals itself

    __hash__ = None  # type: ignore[assignment]
