"""An executor that is a model of the memory: its tokens are hashes of what can be read back through the page tables.

A slot given to two requests, a lost or doubled token, a stale table entry, a rejected draft that is read or a wrong
position all change the tokens; ``forget`` makes the slots of pages that nobody owns unreadable.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from graphsrt.runtime.forward_batch import ForwardBatch, ForwardMode
from graphsrt.runtime.results import StepResult
from graphsrt.runtime.sampling_params import SamplingParams, uniform_at

VOCAB = 50
EOS = 7


def next_token(history: Sequence[int], temperature: float, uniform: float) -> int:
    """The double's language model: a hash of the whole history, and of the random number unless greedy."""
    seed = repr(list(history)) + (repr(uniform) if temperature > 0 else "")
    return int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=4).digest(), "little") % VOCAB


def reference(prompt: Sequence[int], params: SamplingParams, seed: int = 0) -> tuple[list[int], str]:
    """The tokens and finish reason of one request at a time, without pages, batches or steps."""
    tokens = list(prompt)
    output: list[int] = []
    while True:
        uniform = float(uniform_at(seed, len(output))[0])
        output.append(next_token(tokens + output, params.temperature, uniform))
        if len(output) >= params.min_new_tokens and (
            output[-1] in params.stop_token_ids or (output[-1] == EOS and not params.ignore_eos)
        ):
            return output, "stop"
        if len(output) == params.max_new_tokens:
            return output, "length"


class MemoryExecutor:
    """See the module. ``script`` replaces the hash by a function of the history; ``before_step`` may raise."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_requests: int,
        max_context: int,
        script: Callable[[list[int]], int] | None = None,
    ):
        self.page_size = page_size
        self.kv = np.full((num_pages * page_size, 2), -1, dtype=np.int64)
        self.table = np.full((max_requests, max_context), -1, dtype=np.int64)
        self.script = script
        self.before_step: Callable[[ForwardBatch], None] | None = None
        self.batches: list[ForwardBatch] = []
        self.num_closed = 0

    def step(self, batch: ForwardBatch) -> StepResult:
        if self.before_step is not None:
            self.before_step(batch)
        batch = ForwardBatch.decode(batch.encode())
        self.batches.append(batch)
        assert batch.num_tokens > 0
        assert (batch.out_cache_loc >= self.page_size).all(), "page 0 is reserved"
        assert len(set(batch.out_cache_loc.tolist())) == batch.num_tokens, "one slot written twice"
        assert len(set(batch.req_pool_indices.tolist())) == batch.batch_size
        rows, columns, slots = batch.req_to_token_updates()
        self.table[rows, columns] = slots
        row = 0
        owner: list[tuple[int, int]] = []
        for req, seq_len, count in zip(batch.req_pool_indices, batch.seq_lens, batch.extend_seq_lens):
            assert count > 0
            for i in range(count):
                position = seq_len - count + i
                assert batch.positions[row] == position
                assert self.table[req, position] == batch.out_cache_loc[row]
                self.kv[batch.out_cache_loc[row]] = (batch.tokens[row], position)
                owner.append((req, position))
                row += 1
        assert row == batch.num_tokens
        if batch.forward_mode is ForwardMode.DECODE:
            assert (batch.extend_seq_lens == 1).all() and len(batch.logit_rows) == batch.batch_size
        assert (np.diff(batch.logit_rows) > 0).all()
        tokens, logits = [], []
        for i, wanted in enumerate(batch.logit_rows):
            req, position = owner[wanted]
            read = self.kv[self.table[req, : position + 1]]
            assert read[:, 1].tolist() == list(range(position + 1)), "KV of another place"
            history = read[:, 0].tolist()
            logits.append([float(len(history)), float(sum(history))])
            if self.script is not None:
                tokens.append(self.script(history))
            else:
                tokens.append(next_token(history, float(batch.temperature[i]), float(batch.uniform[i])))
        return StepResult(tokens, np.array(logits).reshape(-1, 2) if batch.return_logits else None)

    def forget(self, pages: Sequence[int]) -> None:
        """Nobody may read these pages before they are written again."""
        self.kv.reshape(-1, self.page_size, 2)[pages] = -1

    def close(self) -> None:
        self.num_closed += 1
