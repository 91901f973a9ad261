"""Where the elements of a tensor live on the ranks of a mesh axis.

A placement says how a rank's local tensor relates to the global value:

* :class:`Replicate` - each rank holds the whole value, bitwise the same;
* :class:`Shard` - one dimension is divided among the ranks by a :class:`Layout`;
* :class:`ShardTokens` - the tokens of a step, however many, are divided in equal blocks;
* :class:`Partial` - the value is the sum (or maximum) over ranks of the local tensors.

A :class:`Layout` is, at bottom, a map from (rank, local position) to a global address. It is kept as runs of
consecutive addresses, so equal blocks, fused QKV segments, replicated KV heads and padding are all one thing.
Source of the idea: GSPMD/Shardy dimension shardings, generalised from equal blocks to arbitrary units.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

TOKENS = "T"
"""The symbol of the number of tokens in a step."""


class Run(NamedTuple):
    """``length`` consecutive global addresses from ``start``. ``owned`` is False for a copy: a replica of, or a pad
    that stands in for, addresses that another run owns; whatever contracts the dimension must count owned runs only."""

    start: int
    length: int
    owned: bool = True


def _merge(runs: Iterable[Run]) -> tuple[Run, ...]:
    merged: list[Run] = []
    for run in runs:
        if run.length == 0:
            continue
        last = merged[-1] if merged else None
        if last and last.start + last.length == run.start and last.owned == run.owned:
            merged[-1] = Run(last.start, last.length + run.length, last.owned)
        else:
            merged.append(run)
    return tuple(merged)


@dataclass(frozen=True)
class Layout:
    """``runs[rank]`` lists, in local order, the global addresses that the rank holds of one dimension.

    Canonical: neighbouring runs are merged, so equal layouts compare equal however they were built. Every rank holds
    the same number of elements (:attr:`local_size`); every address is owned exactly once.
    """

    runs: tuple[tuple[Run, ...], ...]

    @staticmethod
    def of(runs: Iterable[Iterable[Run]]) -> Layout:
        """Build from any runs; checks that ranks are equally long and that each address has one owner."""
        layout = Layout(tuple(_merge(rank) for rank in runs))
        sizes = {sum(run.length for run in rank) for rank in layout.runs}
        if len(sizes) != 1:
            raise ValueError(f"a layout must give every rank the same number of elements, got {sorted(sizes)}")
        owned = sorted((run.start, run.length) for rank in layout.runs for run in rank if run.owned)
        end = 0
        for start, length in owned:
            if start != end:
                raise ValueError(
                    f"address {min(start, end)} of a layout is owned {'twice' if start < end else 'by no rank'}"
                )
            end = start + length
        return layout

    @staticmethod
    def blocks(size: int, ranks: int, unit: int = 1) -> Layout:
        """Consecutive blocks of whole units; the last ranks are padded with copies of the last real units."""
        if size % unit:
            raise ValueError(f"{size} elements are not whole units of {unit}")
        per_rank = math.ceil(size // unit / ranks) * unit
        runs = []
        for rank in range(ranks):
            start = min(rank * per_rank, size)
            real = min(per_rank, size - start)
            mine = [Run(start, real)]
            missing = per_rank - real
            while missing > 0:  # a pad copies real units, whole ones, so that norms over a unit stay finite
                length = min(missing, size)
                mine.append(Run(size - length, length, owned=False))
                missing -= length
            runs.append(mine)
        return Layout.of(runs)

    @property
    def ranks(self) -> int:
        return len(self.runs)

    @cached_property
    def size(self) -> int:
        """Number of distinct global addresses."""
        return sum(run.length for rank in self.runs for run in rank if run.owned)

    @cached_property
    def local_size(self) -> int:
        """Elements that one rank holds, the same on every rank."""
        return sum(run.length for run in self.runs[0])

    @cached_property
    def is_even(self) -> bool:
        """Equal consecutive blocks, nothing replicated or padded."""
        return all(rank == (Run(i * self.local_size, self.local_size),) for i, rank in enumerate(self.runs))

    @cached_property
    def is_everywhere(self) -> bool:
        """Every rank holds every address in order: the value is whole, which is what placements call it."""
        return all(_merge(run._replace(owned=True) for run in rank) == (Run(0, self.size),) for rank in self.runs)

    @staticmethod
    def everywhere(size: int, ranks: int) -> Layout:
        """All addresses on every rank; the first owns them."""
        return Layout.of([[Run(0, size, owned=rank == 0)] for rank in range(ranks)])

    @cached_property
    def granularity(self) -> int:
        """The largest unit of which every run is made: what a view may still split off."""
        return math.gcd(*(n for rank in self.runs for run in rank for n in (run.start, run.length)), self.local_size)

    def scale(self, factor: int) -> Layout:
        """The layout after each address has become ``factor`` consecutive ones (heads -> channels)."""
        return Layout(
            tuple(tuple(Run(r.start * factor, r.length * factor, r.owned) for r in rank) for rank in self.runs)
        )

    def divide(self, unit: int) -> Layout:
        """The inverse of :meth:`scale` (channels -> heads). Raises ValueError if a run splits a unit."""
        if self.granularity % unit:
            raise ValueError(f"{self} does not hold whole units of {unit}")
        return Layout.of([[Run(r.start // unit, r.length // unit, r.owned) for r in rank] for rank in self.runs])

    def window(self, start: int, end: int) -> tuple[int, int, Layout]:
        """Restrict to the global addresses ``[start, end)``: local start, local end, and the layout of the slice.

        The local part must be contiguous and equal on all ranks, since one program text serves every rank.
        """
        bounds, runs = set(), []
        for rank in self.runs:
            position, first, last, mine = 0, None, 0, []
            for run in rank:
                low, high = max(run.start, start), min(run.start + run.length, end)
                if low < high:
                    begin = position + low - run.start
                    if first is not None and begin != last:
                        raise ValueError(f"[{start}:{end}] of {self} is not contiguous on every rank")
                    first = begin if first is None else first
                    last = begin + high - low
                    mine.append(Run(low - start, high - low, run.owned))
                position += run.length
            bounds.add((first or 0, last))
            runs.append(mine)
        if len(bounds) != 1:
            raise ValueError(f"[{start}:{end}] of {self} lies at different local positions on different ranks")
        ((first, last),) = bounds
        return first, last, Layout.of(runs)

    @staticmethod
    def concat(parts: Sequence[Layout]) -> Layout:
        """Segments one after the other, as the output of a fused projection holds them."""
        runs: list[list[Run]] = [[] for _ in range(parts[0].ranks)]
        offset = 0
        for part in parts:
            for rank, mine in enumerate(part.runs):
                runs[rank] += [Run(r.start + offset, r.length, r.owned) for r in mine]
            offset += part.size
        return Layout.of(runs)

    def addresses(self, rank: int) -> list[int]:
        """Global address of every local position."""
        return [a for run in self.runs[rank] for a in range(run.start, run.start + run.length)]

    def owned_block(self, rank: int) -> tuple[int, int]:
        """First address and number of those that the rank owns. ValueError unless they come first and in one piece."""
        first = self.runs[rank][0]
        if any(run.owned for run in self.runs[rank][1:]):
            raise ValueError(f"rank {rank} owns several pieces of {self}")
        return first.start, first.length if first.owned else 0

    def label(self) -> str:
        """Short form for folded views: ``4096/8``, ``768(576)/4`` when padded, ``2048×2/16`` when replicated."""
        total = self.local_size * self.ranks
        if self.is_even:
            return f"{self.size}/{self.ranks}"
        if total % self.size == 0 and total > self.size:
            return f"{self.size}×{total // self.size}/{self.ranks}"
        if total == self.size:
            return f"{self.size}/{self.ranks}"
        return f"{total}({self.size})/{self.ranks}"

    def __str__(self) -> str:
        """Complete form: ``4096/8`` for even blocks, else every rank's runs, ``~`` marking copies."""
        if self.is_even:
            return f"{self.size}/{self.ranks}"
        ranks = (
            ",".join(f"{'' if r.owned else '~'}{r.start}:{r.start + r.length}" for r in rank) for rank in self.runs
        )
        return f"{self.size}/{self.ranks}{{{'|'.join(ranks)}}}"

    @staticmethod
    def parse(text: str) -> Layout:
        """The inverse of ``str``."""
        head, _, body = text.partition("{")
        size, ranks = (int(n) for n in head.split("/"))
        if not body:
            return Layout.blocks(size, ranks)
        runs = []
        for rank in body.rstrip("}").split("|"):
            mine = []
            for item in rank.split(","):
                start, end = (int(n) for n in item.lstrip("~").split(":"))
                mine.append(Run(start, end - start, not item.startswith("~")))
            runs.append(mine)
        return Layout.of(runs)


@dataclass(frozen=True)
class Heads:
    """How H query heads and K key/value heads are given to ``ranks`` ranks.

    ``query`` and ``kv`` are layouts over head numbers. On a rank, local query head ``i`` belongs to local KV head
    ``i // (query.local_size // kv.local_size)``, which is what an attention operator assumes.
    """

    query: Layout
    kv: Layout

    @staticmethod
    def choose(num_heads: int, num_kv_heads: int, ranks: int) -> Heads:
        """Divide, replicate or pad so that each rank holds as few KV heads, then as few query heads, as possible.

        With replication ``r`` (a divisor of ``ranks``), ``ranks / r`` groups of ranks share the K heads,
        ``k = ceil(K·r / ranks)`` each, and the ``H/K`` query heads of a KV head are divided over the ``r`` ranks of
        its group. Source: ours; for dividing heads it is what Megatron-style engines do.
        """
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads")
        group = num_heads // num_kv_heads
        options = []
        for replicas in (r for r in range(1, ranks + 1) if ranks % r == 0):
            kv_local = math.ceil(num_kv_heads * replicas / ranks)
            options.append((kv_local, math.ceil(group / replicas), replicas))
        kv_local, group_local, replicas = min(options)
        query, kv = [], []
        seen_kv: set[int] = set()
        for rank in range(ranks):
            part, share = divmod(rank, replicas)
            my_query, my_kv = [], []
            for local in range(kv_local):
                head = part * kv_local + local
                real = head < num_kv_heads
                head = min(head, num_kv_heads - 1)  # a padded KV head copies a real one
                my_kv.append(Run(head, 1, owned=real and head not in seen_kv))
                if real:
                    seen_kv.add(head)
                for member in range(group_local):
                    index = share * group_local + member
                    owned = real and index < group
                    my_query.append(Run(head * group + min(index, group - 1), 1, owned))
            query.append(my_query)
            kv.append(my_kv)
        return Heads(Layout.of(query), Layout.of(kv))


@dataclass(frozen=True)
class Replicate:
    """Every rank holds the whole value, bitwise the same."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Shard:
    """Dimension ``dim`` (counted from the front) is divided among the ranks by ``layout``."""

    dim: int
    layout: Layout

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True)
class Partial:
    """The value is the ``op`` ("sum" or "max") over ranks of the local tensors."""

    op: str = "sum"

    def __str__(self) -> str:
        return f"P({self.op})"


@dataclass(frozen=True)
class ShardTokens:
    """The rows of a value, its tokens ``T``, are divided: of ``c = ceil(T / ranks)`` rows on every rank, rank ``r``
    holds the tokens from ``r·c`` on. Rows beyond the last token are padding: anything, and nobody may look at them.

    ``T`` changes with every step, so there is no :class:`Layout`; the local size is written ``T/8``.
    """

    ranks: int
    dim: ClassVar[int] = 0

    @property
    def local_size(self) -> str:
        """What the local dimension is called in shapes."""
        return f"{TOKENS}/{self.ranks}"

    def __str__(self) -> str:
        return "S(0)"


Placement = Replicate | Shard | ShardTokens | Partial
R = Replicate()


def global_shape(local_shape: Sequence, placement: Placement | None) -> list:
    """The global shape of a tensor whose local shape and placement are given."""
    shape = list(local_shape)
    if isinstance(placement, Shard):
        shape[placement.dim] = placement.layout.size
    if isinstance(placement, ShardTokens):
        shape[0] = TOKENS
    return shape
