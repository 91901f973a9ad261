"""Feed sequences to a runner piece by piece, as a scheduler would: chunks and single tokens, in scattered pages."""

from __future__ import annotations

import numpy as np
import torch

from graphsrt.runtime.forward_batch import ForwardBatch, ForwardMode
from graphsrt.runtime.model_runner import EngineSizes, ModelRunner

PAGE = 4
LENGTHS = (23, 17)
"""Tokens of the two sequences that :func:`run_pieces` wants."""


class Feeder:
    """Slots of our choosing: pages of different sequences alternate, in no order; page 0 stays unused."""

    def __init__(self, runner: ModelRunner, sizes: EngineSizes, sequences: list[list[int]]):
        self.runner = runner
        self.sequences = sequences
        self.done = [0] * len(sequences)
        self.rows = [3, 1, 2][: len(sequences)]
        pages = np.random.default_rng(0).permutation(np.arange(1, sizes.num_pages))
        within = np.arange(sizes.page_size)
        self.slots = [
            (pages[i :: len(sequences)][:, None] * sizes.page_size + within).reshape(-1) for i in range(len(sequences))
        ]
        self.logits: list[list[torch.Tensor]] = [[] for _ in sequences]

    def step(self, counts: dict[int, int], *, padded: int = 0) -> None:
        """One step with so many next tokens of each sequence; sequences that decode come first, as in MIXED steps."""
        order = list(counts)
        spans = {s: range(self.done[s], self.done[s] + counts[s]) for s in order}
        total = sum(counts.values())
        modes = {ForwardMode.DECODE if counts[s] == 1 else ForwardMode.EXTEND for s in order}
        batch = ForwardBatch(
            forward_mode=modes.pop() if len(modes) == 1 else ForwardMode.MIXED,
            tokens=np.array([self.sequences[s][i] for s in order for i in spans[s]]),
            positions=np.array([i for s in order for i in spans[s]]),
            req_pool_indices=np.array([self.rows[s] for s in order]),
            seq_lens=np.array([spans[s].stop for s in order]),
            extend_seq_lens=np.array([counts[s] for s in order]),
            out_cache_loc=np.array([self.slots[s][i] for s in order for i in spans[s]]),
            logit_rows=np.arange(total),
            temperature=np.zeros(total),
            top_p=np.ones(total),
            min_p=np.zeros(total),
            top_k=np.zeros(total, dtype=np.int64),
            uniform=np.zeros(total),
            return_logits=True,
        )
        reply = self.runner.step((batch.padded(total + padded) if padded else batch).encode())
        assert reply is not None and reply.logits is not None
        start = 0
        for s in order:
            self.logits[s].append(reply.logits[start : start + counts[s]].clone())
            start += counts[s]
            self.done[s] += counts[s]


def run_pieces(runner: ModelRunner, sizes: EngineSizes, sequences: list[list[int]]) -> list[torch.Tensor]:
    """Chunked prefill and decode of two sequences in the same steps; all logits ``[T, V]`` of each."""
    assert tuple(map(len, sequences)) == LENGTHS
    feeder = Feeder(runner, sizes, sequences)
    feeder.step({0: 9})  # a chunk of the first prompt, longer than a window of 5
    feeder.step({0: 6, 1: 4}, padded=3)  # positions begin at 9 in one sequence and at 0 in the other
    feeder.step({0: 1, 1: 7})  # decode beside a chunk
    feeder.step({1: 1, 0: 1})  # in the other order
    feeder.step({0: 1, 1: 1}, padded=5)
    for _ in range(4):
        feeder.step({0: 1, 1: 1})
    feeder.step({0: 1})
    assert tuple(feeder.done) == LENGTHS
    return [torch.cat(parts) for parts in feeder.logits]
