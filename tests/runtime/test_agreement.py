"""Ranks that disagree are found at the next comparison, and the odd one is named."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphsrt.errors import RankError
from graphsrt.runtime.agreement import Agreement


class Told:
    """A group whose other ranks say what they are told to: a rank's own row is ``x``."""

    def __init__(self, size: int, others: dict[int, tuple[int, int]] | None = None):
        self.size, self.others, self.gathered = size, others or {}, 0

    def all_gather(self, x, dim):
        assert dim == 0 and x.shape == (1, 2)
        self.gathered += 1
        return torch.cat([x + torch.tensor([self.others.get(rank, (0, 0))]) for rank in range(self.size)])


def run(group, steps, every):
    agreement = Agreement(group, every)
    for step in range(steps):
        agreement.begin(np.arange(step, step + 5))
        agreement.compare(np.array([step, 7]))
    return agreement


def test_compares_every_so_often():
    for every, expected in ((1, 10), (3, 3), (0, 0)):
        group = Told(3)
        run(group, 10, every)
        assert group.gathered == expected
    agreement = Agreement(Told(2), 3)
    due = []
    for _ in range(7):
        agreement.begin(np.arange(3))
        due.append(agreement.due)
    assert due == [False, False, True, False, False, True, False]
    assert not Agreement(None).due and not run(Told(1), 20, 1).due


@pytest.mark.parametrize(
    "size, others, message, rank",
    [
        (3, {2: (0, 1)}, r"^rank 2 sampled other tokens than the others\n +where: +step 2, compared every 2", 2),
        (3, {1: (5, 0)}, r"^rank 1 saw other batches than the others", 1),
        (5, {1: (0, 1), 3: (0, 2)}, r"^ranks 1, 3 sampled other tokens than the others", 1),
        (2, {1: (0, 1)}, r"^rank 0 and rank 1 disagree(?s:.*)one sampled other tokens than the other", None),
        (4, {2: (0, 1), 3: (0, 1)}, r"^ranks 0, 1 and ranks 2, 3 disagree", None),
    ],
)
def test_odd_ranks_are_named(size, others, message, rank):
    with pytest.raises(RankError, match=message) as caught:
        run(Told(size, others), 2, 2)
    assert caught.value.rank == rank


def test_all_batches_count_and_only_the_last_tokens():
    def state(batches, tokens):
        agreement = Agreement(Told(2), 100)
        for batch in batches:
            agreement.begin(np.array(batch))
        return agreement._batches

    assert state([[1, 2], [3]], [1]) != state([[1, 9], [3]], [1])
    assert state([[1, 2], [3]], [1]) == state([[1, 2], [3]], [2])
