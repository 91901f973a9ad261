"""What travels between the caller and its rank processes: length-prefixed messages over a socket pair.

The data is flat integers, raw tensor bytes and JSON, never pickles of ours: what a rank says is read, not executed.
"""

from __future__ import annotations

import json
import signal
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

HEADER = struct.Struct("<QQ")  # kind, bytes that follow
ALIGNMENT_BYTES = 64  # of tensor data within a reply, so that it is used where it arrived
STACK_SIGNAL = signal.SIGUSR1  # asks a rank for its stack: how a hang is explained


class Kind(IntEnum):
    # caller → rank
    HELLO = 1  # JSON: how to set this rank up
    INIT = 2  # the caller's payload for the factory
    STEP = 3  # int64 words of one step
    CLOSE = 4
    # rank → caller
    PROGRESS = 11  # JSON: done, total, label
    READY = 12  # JSON: load, the runner's LoadReport or null
    REPLY = 13  # a StepReply, from rank 0 only
    ERROR = 14  # JSON: type, message, traceback, when


@dataclass
class StepReply:
    """What one step gives back: ``token_ids`` int64 [B], and ``logits`` where the caller asked for them.

    The times are those of ``StepResult``.
    """

    token_ids: np.ndarray
    logits: torch.Tensor | None = None
    compute_s: float = 0.0
    collectives_s: float = 0.0


def encode_reply(reply: StepReply | None) -> list[memoryview]:
    """The parts of a REPLY message. The logits are not copied unless they lie on a device or are not contiguous."""
    if reply is None:
        reply = StepReply(np.empty(0, dtype=np.int64))
    tokens = np.ascontiguousarray(reply.token_ids, dtype=np.int64).reshape(-1)
    about: dict[str, object] = {"tokens": len(tokens), "times": [reply.compute_s, reply.collectives_s]}
    if reply.logits is not None:
        logits = reply.logits.detach().cpu().contiguous()
        about |= {"dtype": str(logits.dtype).removeprefix("torch."), "shape": list(logits.shape)}
    text = json.dumps(about).encode()
    head = len(text).to_bytes(8, "little") + text
    front = head + bytes(-len(head) % ALIGNMENT_BYTES) + tokens.tobytes()
    parts = [memoryview(front + bytes(-len(front) % ALIGNMENT_BYTES))]
    if reply.logits is not None and logits.numel():
        import torch

        parts.append(logits.view(-1).view(torch.uint8).numpy().data)
    return parts


def decode_reply(payload: np.ndarray) -> StepReply:
    """The inverse of ``encode_reply``. Token ids and logits are views of ``payload`` (uint8)."""
    text_bytes = int.from_bytes(payload[:8].tobytes(), "little")
    about = json.loads(payload[8 : 8 + text_bytes].tobytes())
    at = _aligned(8 + text_bytes)
    tokens = payload[at : at + 8 * about["tokens"]].view(np.int64)
    if "dtype" not in about:
        return StepReply(tokens, None, *about["times"])
    import torch

    data = payload[_aligned(at + tokens.nbytes) :]
    dtype: torch.dtype = getattr(torch, about["dtype"])
    if not len(data):
        return StepReply(tokens, torch.empty(about["shape"], dtype=dtype), *about["times"])
    return StepReply(tokens, torch.from_numpy(data).view(dtype).view(about["shape"]), *about["times"])


def send(sock: socket.socket, kind: Kind, parts: Iterable[memoryview] = ()) -> None:
    """Write one message to a blocking socket."""
    body = list(parts)
    sock.sendall(HEADER.pack(kind, sum(part.nbytes for part in body)))
    for part in body:
        sock.sendall(part)


def receive(sock: socket.socket) -> tuple[Kind, np.ndarray]:
    """Read one message from a blocking socket; ``EOFError`` once the other side has closed it."""
    header = np.empty(HEADER.size, dtype=np.uint8)
    _fill(sock, header)
    kind, nbytes = HEADER.unpack(header.tobytes())
    payload = np.empty(nbytes, dtype=np.uint8)
    _fill(sock, payload)
    return Kind(kind), payload


def _fill(sock: socket.socket, buffer: np.ndarray) -> None:
    view = buffer.data
    while view.nbytes:
        count = sock.recv_into(view)
        if not count:
            raise EOFError("the other side closed the connection")
        view = view[count:]


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
