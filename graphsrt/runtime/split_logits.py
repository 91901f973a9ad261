"""Logits whose columns may lie on several ranks, and the one way in which ranks tell each other about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.fx as fx
from torch import Tensor

from graphsrt.placement import Replicate, Shard

Gather = Callable[[list[Tensor]], Tensor]
"""One tensor for each rank that is computed here → those of all ranks, ``[ranks, ...]``, the same bits everywhere."""


@dataclass(frozen=True)
class Columns:
    """Where the columns of the logits lie: on rank r the tokens ``[starts[r], starts[r] + counts[r])``, then pads.

    A rank computes its own part; a process that simulates the ranks computes all. ``first_rank`` is the rank of the
    first part here. Everything that is decided from gathered values is decided alike on every rank, so that all of them
    gather equally often.
    """

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    first_rank: int = 0
    gather: Gather = torch.stack

    @staticmethod
    def of(value: fx.Node, first_rank: int = 0, gather: Gather = torch.stack) -> Columns:
        """From a program's result. A replicated one is a single part, and every rank has it."""
        placement = value.meta.get("placement")
        if placement is None or isinstance(placement, Replicate):
            return Columns((0,), (int(value.meta["val"].shape[1]),))
        assert isinstance(placement, Shard) and placement.dim == 1, f"logits are {placement}"
        owned = [placement.layout.owned_block(rank) for rank in range(placement.layout.ranks)]
        return Columns(tuple(start for start, _ in owned), tuple(count for _, count in owned), first_rank, gather)

    @property
    def split(self) -> bool:
        """Whether ranks hold different columns."""
        return len(self.counts) > 1

    @property
    def vocab_size(self) -> int:
        return sum(self.counts)

    def cut(self, local: Sequence[Tensor]) -> SplitLogits:
        """The logits without pads, from what each rank here computed: ``[R, local size]``.

        A rank that holds nothing but pads gets one column of ``-inf``, which no token is.
        """
        parts, starts = [], []
        for rank, part in enumerate(local if self.split else local[:1], self.first_rank):
            count = self.counts[rank]
            none = count == 0
            own = part if part.shape[1] == count else part[:, :count]
            parts.append(part.new_full((len(part), 1), -torch.inf) if none else own)
            starts.append(self.vocab_size if none else self.starts[rank])
        return SplitLogits(self, parts, starts)

    def whole(self, local: Sequence[Tensor]) -> Tensor:
        """All columns on every rank, ``[R, vocab_size]``: R · V · element size bytes arrive at each of them."""
        if not self.split:
            return local[0][:, : self.vocab_size]
        return torch.cat([part[:, :count] for part, count in zip(self.gather(list(local)), self.counts)], dim=1)


@dataclass(frozen=True)
class SplitLogits:
    """``parts``: the columns of each rank that is computed here, [R, n] with n > 0; ``starts``: their first token."""

    columns: Columns
    parts: list[Tensor]
    starts: list[int]

    @staticmethod
    def of(logits: Tensor) -> SplitLogits:
        """Logits [R, V] that lie in one piece."""
        return Columns((0,), (logits.shape[1],)).cut([logits])

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        """Each part and its first token."""
        return zip(self.parts, self.starts)

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def rows(self, rows: Tensor) -> SplitLogits:
        """Some of the rows; a copy."""
        return replace(self, parts=[part[rows] for part in self.parts])

    def exchange(self, *values: list[Tensor]) -> list[Tensor]:
        """Each list, one tensor for each part, as ``[ranks, ...]``; together in one gather. int64 or float64."""
        flat = [torch.cat([tensor.reshape(-1).view(torch.int64) for tensor in own]) for own in zip(*values)]
        gathered = self.columns.gather(flat)
        result, at = [], 0
        for first in (own[0] for own in values):
            piece = gathered[:, at : at + first.numel()]
            at += first.numel()
            result.append(piece.contiguous().view(first.dtype).view(len(gathered), *first.shape))
        return result


def edit(logits: SplitLogits, rows: Tensor, tokens: Tensor, bias: Tensor, scale: Tensor, shift: Tensor) -> SplitLogits:
    """A copy with single logits changed, as :mod:`graphsrt.runtime.logit_edits` says.

    rows, tokens int64[M], no pair twice; bias, scale, shift float64[M]. The copy is float64 where the logits are, else
    float32: half precision cannot hold a small penalty of a large logit.
    """
    parts = []
    for part, start in logits:
        edited = part.to(torch.promote_types(part.dtype, torch.float32), copy=True)
        here = ((tokens >= start) & (tokens < start + part.shape[-1])).nonzero()[:, 0]
        at = (rows[here], tokens[here] - start)
        x = edited[at].double() + bias[here]
        x = torch.where(x > 0, x / scale[here], x * scale[here]) + shift[here]
        edited[at] = x.to(edited.dtype)
        parts.append(edited)
    return replace(logits, parts=parts)
