"""From what a step computes, request by request, to the arrays of its ``ForwardBatch``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphsrt.runtime.forward_batch import ForwardBatch, ForwardMode, Ints, PrefixUpdate
from graphsrt.runtime.kv_ledger import Moved
from graphsrt.runtime.kv_pool import ReqToTokenPool
from graphsrt.runtime.request import Request
from graphsrt.runtime.row_features import row_features
from graphsrt.runtime.sampling_params import SamplingParams, uniform_at


@dataclass(slots=True)
class Entry:
    """One sequence of a step: how many tokens are computed, and which of the step's logit rows are its own.

    ``drafts`` are the last of these tokens: they are not known to follow, and each has a logit row.
    """

    request: Request
    num_tokens: int
    drafts: Sequence[int] = ()
    first_logit_row: int = 0
    num_logit_rows: int = 0


@dataclass(frozen=True)
class ScheduledStep:
    """A batch to execute, and for whom. ``entries`` is in the order of the batch's sequences."""

    batch: ForwardBatch
    entries: list[Entry]


@dataclass(frozen=True)
class _Plain:
    """A step that only decodes, greedily and without anything else, and whose it is."""

    batch: ForwardBatch
    requests: list[Request]
    rows: list[int | None]
    lengths: list[int]

    def continues(self, requests: list[Request], rows: list[int | None], lengths: list[int]) -> bool:
        """Whether a step of these is the same one a token later."""
        same = requests == self.requests and rows == self.rows
        return same and lengths == [length + 1 for length in self.lengths]


class BatchBuilder:
    """Keeps what does not change between the steps of a request in arrays by row, so that a step gathers it at once."""

    def __init__(self, req_to_token: ReqToTokenPool, eos_token_ids: Collection[int] = ()):
        self._table = req_to_token.table
        self._eos_token_ids = eos_token_ids
        rows = req_to_token.max_requests
        self._seed = np.zeros(rows, dtype=np.uint64)
        self._sampling: dict[str, Any] = {
            "temperature": np.zeros(rows, dtype=np.float64),
            "top_p": np.zeros(rows, dtype=np.float64),
            "top_k": np.zeros(rows, dtype=np.int64),
            "min_p": np.zeros(rows, dtype=np.float64),
        }
        self._has_features = np.zeros(rows, dtype=np.bool_)
        self._last: _Plain | None = None

    def set_row(self, request: Request) -> None:
        """Take in a request that was given its row."""
        self._seed[request.row] = request.seed
        params = request.params or _FOR_LOGITS
        for name, column in self._sampling.items():
            column[request.row] = getattr(params, name)
        self._has_features[request.row] = params.has_row_features

    def build(self, entries: list[Entry], num_decoding: int, moved: list[Moved]) -> ForwardBatch:
        """The batch of these entries, of which the first ``num_decoding`` decode; their logit rows are filled in.

        ``moved``: columns of the table that the ranks do not know yet.
        """
        requests = [entry.request for entry in entries]
        if num_decoding == len(entries) and not any(entry.drafts for entry in entries):
            return self._decode_step(entries, requests, moved)
        rows = np.array([request.row for request in requests], dtype=np.int64)
        extend = np.array([entry.num_tokens for entry in entries], dtype=np.int64)
        before = np.array([request.num_computed for request in requests], dtype=np.int64)
        known = np.array([request.num_tokens for request in requests], dtype=np.int64)
        after_last = np.cumsum(extend)  # one past each sequence's last row
        sequence = np.repeat(np.arange(len(entries)), extend)  # of each row
        positions = np.arange(len(sequence)) + np.repeat(before - (after_last - extend), extend)

        # A sequence's logit rows are its last ones: of its last token, of each draft as well, or from some token on.
        num_rows = (before + extend >= known).astype(np.int64)
        is_draft_step = after_last[num_decoding - 1] > num_decoding if num_decoding else False
        if is_draft_step:
            num_rows[:num_decoding] = extend[:num_decoding]
        wants_logits = wants_hidden = False
        for i in range(num_decoding, len(entries)):
            request = requests[i]
            wants_logits |= request.every_row
            wants_hidden |= request.wants_hidden
            skippable = request.num_skippable_tokens
            if skippable < request.num_tokens - 1:
                num_rows[i] = min(before[i] + extend[i] - skippable, extend[i])
        first_row = np.cumsum(num_rows) - num_rows
        owner = np.repeat(np.arange(len(entries)), num_rows)  # the sequence of each logit row
        place = np.arange(len(owner)) - first_row[owner]  # among the logit rows of its sequence
        logit_rows = (after_last - num_rows)[owner] + place
        position = positions[logit_rows]
        sampling = self._sampled(entries, requests, rows, owner, position)
        if self._has_features[rows].any():
            sampling["temperature"][position < known[owner] - 1] = 0  # nobody looks at these tokens
        for entry, first, count in zip(entries, first_row.tolist(), num_rows.tolist()):
            entry.first_logit_row, entry.num_logit_rows = first, count

        mode = ForwardMode.TARGET_VERIFY if num_decoding else ForwardMode.EXTEND
        if 0 < num_decoding < len(entries):
            mode = ForwardMode.MIXED
        return ForwardBatch(
            forward_mode=mode,
            tokens=_tokens(entries),
            positions=positions,
            req_pool_indices=rows,
            seq_lens=before + extend,
            extend_seq_lens=extend,
            out_cache_loc=self._table[rows[sequence], positions].astype(np.int64),
            logit_rows=logit_rows,
            return_logits=wants_logits,
            **_embeds(entries, after_last - extend),
            return_hidden=wants_hidden,
            prefix_updates=self._updates(moved),
            **sampling,
        )

    def _decode_step(self, entries: list[Entry], requests: list[Request], moved: list[Moved]) -> ForwardBatch:
        """The same where every sequence computes its last known token, and that is all: most steps are such."""
        for i, entry in enumerate(entries):
            entry.first_logit_row, entry.num_logit_rows = i, 1
        of_rows = [request.row for request in requests]
        lengths = [request.num_tokens for request in requests]
        tokens = np.array([request.tokens[length - 1] for request, length in zip(requests, lengths)], dtype=np.int64)
        last, self._last = self._last, None
        if last is not None and not moved and last.continues(requests, of_rows, lengths):
            slots = self._table[last.batch.req_pool_indices, last.batch.seq_lens].astype(np.int64)
            batch = last.batch.following(tokens, slots)
        else:
            rows, known = np.array(of_rows, dtype=np.int64), np.array(lengths, dtype=np.int64)
            order, positions = np.arange(len(entries)), known - 1
            batch = ForwardBatch(
                forward_mode=ForwardMode.DECODE,
                tokens=tokens,
                positions=positions,
                req_pool_indices=rows,
                seq_lens=known,
                extend_seq_lens=np.ones_like(known),
                out_cache_loc=self._table[rows, positions].astype(np.int64),
                logit_rows=order,
                prefix_updates=self._updates(moved),
                **self._sampled(entries, requests, rows, order, positions),
            )
            if self._has_features[rows].any() or batch.temperature.any():
                return batch
        self._last = _Plain(batch, requests, of_rows, lengths)
        return batch

    def _sampled(
        self, entries: list[Entry], requests: list[Request], rows: Ints, owner: Ints, position: Ints
    ) -> dict[str, Any]:
        """How logit rows are sampled, by the names of a ``ForwardBatch``; whose they are, and where in its sequence."""
        row_of = rows[owner]
        sampling = {name: column[row_of] for name, column in self._sampling.items()}
        if self._has_features[rows].any():
            drafts = [entry.drafts for entry in entries]
            sampling |= row_features(requests, drafts, owner, position, self._eos_token_ids)
        if sampling["temperature"].any():
            num_prompt = np.array([request.num_prompt_tokens for request in requests], dtype=np.int64)
            sampling["uniform"] = uniform_at(self._seed[row_of], np.maximum(position + 1 - num_prompt[owner], 0))
        else:
            sampling["uniform"] = np.zeros(len(owner))
        return sampling

    def _updates(self, moved: list[Moved]) -> list[PrefixUpdate]:
        return [
            PrefixUpdate(row, start, self._table[row, start:stop].astype(np.int64))
            for request, row, start, stop in moved
            if request.row == row  # or it has left since
        ]


def _embeds(entries: list[Entry], first: Ints) -> dict[str, Any]:
    """The embeddings among the rows; ``first`` is each entry's first row."""
    found: list[tuple[Ints, Any]] = []
    for entry, row in zip(entries, first.tolist()):
        embeds, at = entry.request.embeds, entry.request.num_computed
        if embeds is not None:
            start, stop = np.searchsorted(embeds.positions, [at, at + entry.num_tokens])
            found.append((embeds.positions[start:stop] - at + row, embeds.values[start:stop].reshape(-1)))
    if not found:
        return {}
    rows, values = zip(*found)
    return {"embeds_rows": np.concatenate(rows), "embeds": np.concatenate(values)}


def _tokens(entries: list[Entry]) -> Ints:
    parts: list[Ints | Sequence[int]] = []
    for entry in entries:
        at = entry.request.num_computed
        parts.append(entry.request.tokens[at : at + entry.num_tokens - len(entry.drafts)])
        if entry.drafts:
            parts.append(entry.drafts)
    return np.concatenate(parts, dtype=np.int64)


# Rows of a request for logits are in the batch like any other; the greedy tokens that they give are dropped.
_FOR_LOGITS = SamplingParams(max_new_tokens=1)
