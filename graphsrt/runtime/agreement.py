"""Do all ranks still compute the same? A wrong bit in memory, a rank that missed a batch: caught within a few steps."""

from __future__ import annotations

import zlib
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import torch

from graphsrt.errors import RankError, explain

if TYPE_CHECKING:
    from graphsrt.lowering.collectives import ProcessCollectives

COMPARE_EVERY = 16
"""Steps between two comparisons. One costs a gather of 8 bytes, and that every rank samples: some 0.3 ms on CPUs."""


class Agreement:
    """Every ``every`` steps, compares all batches so far and the tokens of the last one between ranks.

    Ranks count alike, so that all of them compare in the same step. ``every=0`` never compares.
    """

    def __init__(self, collectives: ProcessCollectives | None, every: int = COMPARE_EVERY):
        self._collectives = collectives
        self._every = every if collectives is not None and collectives.size > 1 else 0
        self._steps = 0
        self._batches = 0

    @property
    def due(self) -> bool:
        """Whether the step that runs is compared; it then needs its tokens on every rank."""
        return bool(self._every) and self._steps % self._every == 0

    def begin(self, buffer: np.ndarray) -> None:
        """A step begins; ``buffer`` is its batch, int64."""
        self._steps += 1
        if self._every:
            self._batches = zlib.crc32(np.ascontiguousarray(buffer).data, self._batches)

    def compare(self, token_ids: np.ndarray) -> None:
        """RankError on every rank, naming those in the minority, unless all give the same after the same batches."""
        if not self.due:
            return
        assert self._collectives is not None
        tokens = zlib.crc32(np.ascontiguousarray(token_ids, dtype=np.int64).data)
        mine = torch.tensor([[self._batches, tokens]], dtype=torch.int64)
        seen = [tuple(row) for row in self._collectives.all_gather(mine, 0).tolist()]
        if len(set(seen)) == 1:
            return
        what = "sampled other tokens than" if len({batches for batches, _ in seen}) == 1 else "saw other batches than"
        (usual, count), *others = Counter(seen).most_common()
        hint = "look at the machine of that rank (memory, GPU) and restart the ranks"
        where = f"step {self._steps}, compared every {self._every}"
        if others and others[0][1] == count:  # two ranks, or two halves: nobody knows who is right
            sides = [[r for r, value in enumerate(seen) if value == side] for side in dict.fromkeys(seen)]
            headline = f"{' and '.join(_names(side) for side in sides)} disagree"
            raise RankError(explain(headline, where=where, got=f"one {what} the other", hint=hint))
        odd = [r for r, value in enumerate(seen) if value != usual]
        raise RankError(explain(f"{_names(odd)} {what} the others", where=where, hint=hint), rank=odd[0])


def _names(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
