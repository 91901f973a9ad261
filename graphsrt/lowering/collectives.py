"""The collectives of a rank process: shared memory (CPUs of one machine), gloo (of several) or NCCL (CUDA).

Results do not wander. On the CPU a reduction is not handed to gloo. It is an exchange of bytes followed by a sum *in
rank order*, because gloo's ring adds the ranks in an order that depends on where an element lies in the tensor: the
same token would round differently alone and in a batch. Rank order is also what the simulated ranks do, so both agree
bit for bit. The bytes moved are the same as in a ring (``2 (n-1)/n`` times the tensor), bf16 and fp16 travel as they
are and are summed in float32, and every dtype works, since the wire only sees bytes. Ranks of one machine do the same
through memory that they share (``kernels/shared_rounds``), with the same bits.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from graphsrt.errors import RankError, explain
from graphsrt.lowering.kernels import shared_rounds

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

ReduceOp = Literal["sum", "max"]

# Up to this size of one rank's tensor, a single gather beats an exchange and a gather: latency, not bytes, counts.
ONE_ROUND_BYTES = 64 * 1024
TIMEOUT_S = 1800.0
# A step of decoding fits in this many integers, so that its broadcast is one message and not a length and a body.
INLINE_WORDS = 1024

# Renamed in torch 2.13; the old names still work there, but warn on every call.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Meeting:
    """Counts collectives as they are entered and left: who has entered and not left waits for the others.

    ``failed``: one has raised, so a peer is gone or late.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(2, dtype=np.int64)
        self.failed = False

    def __enter__(self) -> None:
        self.counts[0] += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.counts[1] += 1
        self.failed |= kind is not None


class ProcessCollectives:
    """Collectives over ``group``; ``None`` is a group of one.

    Every method must be called by all ranks, in the same order, with the same shapes and dtypes. A result is a new
    contiguous tensor that the caller may write to, also in a group of one. If a peer dies, a call raises
    ``RuntimeError`` as soon as the connection closes; if a peer hangs, after the timeout of the process group.
    """

    def __init__(self, group: ProcessGroup | None, timeout: float = TIMEOUT_S):
        """``timeout``: seconds for one collective through shared memory; others have the group's own."""
        self._group, self._timeout = group, timeout
        self._rounds: shared_rounds.SharedRounds | None = None
        self._asked_for_rounds = False
        self.meeting = Meeting()
        self.size: int = 1 if group is None else dist.get_world_size(group)
        self.rank: int = 0 if group is None else dist.get_rank(group)
        # "cpu:gloo,cuda:nccl" and the like. A CUDA tensor in a group without NCCL goes through the host.
        self._has_nccl = group is not None and "nccl" in dist.get_backend_config(group)
        self._has_gloo = group is not None and "gloo" in dist.get_backend_config(group)
        self._host_group: ProcessGroup | None = group if self._has_gloo else None
        # Read now: it must outlive the group, to say why the group was abandoned.
        self._store: Any = group.get_group_store() if group is not None and hasattr(group, "get_group_store") else None

    @classmethod
    def over_world(cls, timeout: float | None = None) -> ProcessCollectives:
        """All ranks of the initialised process group, through a group of our own (so that ``abandon`` works).

        ``timeout``: seconds for one collective.
        """
        group = dist.new_group(timeout=None if timeout is None else timedelta(seconds=timeout))
        made = cls(group, TIMEOUT_S if timeout is None else timeout)
        made.prepare()
        return made

    def prepare(self) -> None:
        """Make what ranks of one machine share, and compile what it takes, before a step has to wait for that.

        Called by all ranks together.
        """
        if self.size > 1 and not self._has_nccl:
            self._shared()

    # ---- tensors ----------------------------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Sum or maximum over ranks, bitwise the same on all of them. NaN of any rank is NaN in the result (CPU)."""
        _check_op(x, op)
        if self.size == 1 or x.numel() == 0:
            return x.clone(memory_format=torch.contiguous_format)
        if x.is_cuda and self._has_nccl:
            out = x.clone(memory_format=torch.contiguous_format)
            with self.meeting:
                dist.all_reduce(out, _NCCL_OPS[op], group=self._group)
            return out
        rounds = self._shared()
        if rounds is not None and x.dtype in shared_rounds.DTYPES:
            with self.meeting:
                return rounds.all_reduce(x.cpu().contiguous(), op == "max", ONE_ROUND_BYTES).to(x.device)
        if x.numel() * x.element_size() <= ONE_ROUND_BYTES or x.numel() < self.size:
            return _combine(self._gather(x), op).to(x.device)
        chunk = math.ceil(x.numel() / self.size)
        # The tail is never read back, but it is summed: zeros, so that no stale NaN costs a slow path.
        padded = torch.zeros(self.size * chunk, dtype=x.dtype)
        padded[: x.numel()] = x.reshape(-1)
        mine = _combine(self._exchange(padded.view(self.size, chunk)), op)
        return self._gather(mine).view(-1)[: x.numel()].view(x.shape).to(x.device)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """The tensors of all ranks, one after the other along ``dim``."""
        dim = _check_dim(x, dim)
        if self.size == 1 or x.numel() == 0:
            return torch.cat([x] * self.size, dim)
        return torch.cat(self._gather(x).unbind(0), dim).to(x.device)

    def reduce_scatter(self, x: Tensor, dim: int, op: ReduceOp = "sum") -> Tensor:
        """This rank's block, of ``size`` equal ones along ``dim``, of ``all_reduce(x)``; the same bits on the CPU.

        Where ``dim`` does not divide, the last blocks end in zeros.
        """
        _check_op(x, op)
        dim = _check_dim(x, dim)
        x = padded(x, dim, self.size)
        if self.size == 1:
            return x.clone(memory_format=torch.contiguous_format)
        if x.numel() == 0:
            return x.new_empty(_replaced(x.shape, dim, x.shape[dim] // self.size))
        front = x.movedim(dim, 0).contiguous()
        blocks = front.view(self.size, front.shape[0] // self.size, *front.shape[1:])
        if x.is_cuda and self._has_nccl:
            out = torch.empty_like(blocks[0])
            with self.meeting:
                _reduce_scatter_single(out, front, _NCCL_OPS[op], group=self._group)
        elif (rounds := self._shared()) is not None and x.dtype in shared_rounds.DTYPES:
            with self.meeting:
                out = rounds.reduce_scatter(blocks.cpu(), op == "max").to(x.device)
        else:
            out = _combine(self._exchange(blocks.cpu()), op).to(x.device)
        return out.movedim(0, dim).contiguous()

    def _gather(self, x: Tensor) -> Tensor:
        """``[size, *x.shape]``, on the device of ``x`` with NCCL, otherwise on the host."""
        x = x.contiguous() if x.is_cuda and self._has_nccl else x.cpu().contiguous()
        if not x.is_cuda and (rounds := self._shared()) is not None:
            with self.meeting:
                return rounds.gather(x)
        out = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        with self.meeting:
            _all_gather_single(_as_bytes(out), _as_bytes(x), group=self._group if x.is_cuda else self._host())
        return out

    def _exchange(self, blocks: Tensor) -> Tensor:
        """Block ``r`` of each rank goes to rank ``r``; row ``s`` of the result came from rank ``s``."""
        if (rounds := self._shared()) is not None:
            with self.meeting:
                return rounds.exchange(blocks)
        out = torch.empty_like(blocks)
        with self.meeting:
            dist.all_to_all_single(_as_bytes(out), _as_bytes(blocks), group=self._host())
        return out

    # ---- host data --------------------------------------------------------------------------------------------------

    def broadcast_buffer(self, buffer: np.ndarray | None = None, src: int = 0) -> np.ndarray:
        """The flat int64 ``buffer`` of rank ``src``, whose length only that rank knows; the others pass ``None``."""
        if self.rank == src:
            assert buffer is not None and buffer.dtype == np.int64 and buffer.ndim == 1
        if self.size == 1:
            assert buffer is not None
            return buffer.copy()
        group = self._host()
        global_src = dist.get_global_rank(group, src)
        head = torch.zeros(1 + INLINE_WORDS, dtype=torch.int64)
        if self.rank == src:
            assert buffer is not None
            head[0] = len(buffer)
            if len(buffer) <= INLINE_WORDS:
                head[1 : 1 + len(buffer)] = torch.from_numpy(buffer.copy())
        with self.meeting:
            dist.broadcast(head, global_src, group=group)
        length = int(head[0])
        if length <= INLINE_WORDS:
            return head[1 : 1 + length].numpy()
        body = torch.empty(length, dtype=torch.int64)
        if self.rank == src:
            assert buffer is not None
            body.copy_(torch.from_numpy(buffer.copy()))
        with self.meeting:
            dist.broadcast(body, global_src, group=group)
        return body.numpy()

    def gather_objects(self, value: Any) -> list[Any]:
        """What each rank gives, by rank; must pickle. For set-up: it is slow."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.meeting:
            dist.all_gather_object(values, value, group=self._host())
        return values

    def barrier(self) -> None:
        """Wait until all ranks are here, asleep."""
        if self.size > 1:
            with self.meeting:
                dist.barrier(group=self._host())

    def subgroup(self, ranks: Sequence[int]) -> ProcessCollectives:
        """Collectives over some of the ranks, for host memory. Called by just these, with the same ``ranks``."""
        if len(ranks) == self.size:
            return self
        if len(ranks) == 1:
            return ProcessCollectives(None)
        members = dist.get_process_group_ranks(self._host())
        part = ProcessCollectives(
            dist.new_group([members[r] for r in ranks], backend="gloo", use_local_synchronization=True), self._timeout
        )
        part.meeting = self.meeting
        return part

    def _shared(self) -> shared_rounds.SharedRounds | None:
        """Rounds through shared memory, if all ranks are on one machine. All get here together, as they do below."""
        if not self._asked_for_rounds:
            self._asked_for_rounds = True
            self._rounds = shared_rounds.join(self, self._timeout)
        return self._rounds

    def _host(self) -> ProcessGroup:
        """The group for host memory. All ranks get here together, so that it can be made when first wanted."""
        if self._host_group is None:
            assert self._group is not None, "this group was abandoned"
            ranks = dist.get_process_group_ranks(self._group)
            self._host_group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        return self._host_group

    # ---- failure ----------------------------------------------------------------------------------------------------

    def abandon(self, reason: str) -> None:
        """Leave ``reason`` for the peers and close the connections, so that peers in a collective raise at once.

        The world group is left open: it belongs to the caller, whose exit closes it.
        """
        if self._group is None:
            return
        if self._store is not None:
            # A store that is gone means that its host is gone: then there is nobody to tell.
            with contextlib.suppress(RuntimeError):
                self._store.set("graphsrt_abandoned", f"{self.rank}\n{reason}")
        if self._rounds is not None:
            self._rounds.leave()
        groups = [self._group] if self._host_group in (None, self._group) else [self._group, self._host_group]
        self._group = self._host_group = None
        while groups:
            group = groups.pop()
            if group is not dist.group.WORLD:
                with contextlib.suppress(RuntimeError, ValueError):
                    dist.destroy_process_group(group)
            del group  # gloo closes its sockets when the last reference goes

    def abandoned_because(self) -> tuple[int, str] | None:
        """Rank and reason of the first peer that abandoned the group, ``None`` if none did."""
        if self._store is None:
            return None
        with contextlib.suppress(RuntimeError):
            if self._store.check(["graphsrt_abandoned"]):
                rank, reason = self._store.get("graphsrt_abandoned").decode().split("\n", 1)
                return int(rank), reason
        return None

    def absent(self) -> list[int]:
        """Ranks that do not say, within two seconds, that their collective has failed as ours has."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        if self._store is None:
            return []
        with contextlib.suppress(RuntimeError):
            self._store.set(f"graphsrt_failed/{self.rank}", "")
            until = time.monotonic() + 2.0
            while others and time.monotonic() < until:
                others = [rank for rank in others if not self._store.check([f"graphsrt_failed/{rank}"])]
                time.sleep(0.02)
        return others

    def lost(self, error: BaseException) -> RankError:
        """What a collective's ``error`` means: who has left, died or hangs."""
        reason = self.abandoned_because()
        if reason is not None:
            return RankError(explain(f"rank {reason[0]} failed", got=reason[1]), rank=reason[0])
        absent = self.absent()
        names = f"rank {', '.join(map(str, absent))}" if absent else "a rank"
        return RankError(
            explain(f"{names} died or hangs", got=str(error), hint="look at the output of that rank"),
            rank=absent[0] if absent else None,
        )


_NCCL_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def _combine(rows: Tensor, op: ReduceOp) -> Tensor:
    """Reduce ``rows`` over dim 0 in the order of ranks, half precision in float32 with one rounding at the end."""
    if op == "max":
        out = rows[0].clone()
        for row in rows[1:]:
            torch.maximum(out, row, out=out)
        return out
    half = rows.dtype in (torch.bfloat16, torch.float16)
    total = rows[0].to(torch.float32 if half else rows.dtype, copy=True)
    for row in rows[1:]:
        total += row
    return total.to(rows.dtype)


def _as_bytes(x: Tensor) -> Tensor:
    assert x.is_contiguous()
    return x.view(-1).view(torch.uint8)


def _check_op(x: Tensor, op: str) -> None:
    if op not in ("sum", "max"):
        raise ValueError(f"unknown reduction {op!r}: 'sum' or 'max'")
    if x.dtype == torch.bool or x.is_complex():
        raise ValueError(f"cannot reduce {x.dtype} over ranks: convert it first")


def _check_dim(x: Tensor, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim {dim} is not a dimension of {tuple(x.shape)}")
    return dim % x.ndim


def padded(x: Tensor, dim: int, ranks: int) -> Tensor:
    """``x``, or where ``dim`` does not divide over ``ranks``: with zeros at its end until it does."""
    missing = -x.shape[dim] % ranks
    if not missing:
        return x
    return torch.cat([x, x.new_zeros(_replaced(x.shape, dim, missing))], dim)


def _replaced(shape: torch.Size, dim: int, length: int) -> list[int]:
    return [length if d == dim else n for d, n in enumerate(shape)]
