"""Memory that the ranks of one machine share while they load: two slots, each holding one chunk of the checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from graphsrt.lowering.shared_memory import share_memory

if TYPE_CHECKING:
    from graphsrt.lowering.collectives import ProcessCollectives


def shared_slots(node: ProcessCollectives | None, slot_bytes: int) -> list[torch.Tensor]:
    """Two uint8 tensors ``[slot_bytes]``, the same memory on every rank of ``node``; private memory for one rank.

    Called by all of them together. RankError, on every rank, where there is no such memory to be had.
    """
    if node is None or node.size == 1:
        return list(torch.empty(2, slot_bytes, dtype=torch.uint8))
    memory = share_memory(node, 2 * slot_bytes, "load")
    return list(torch.frombuffer(memory, dtype=torch.uint8).view(2, slot_bytes))
