"""What travels between the caller and its rank processes: length-prefixed messages over a socket pair.

The data is flat integers, raw tensor bytes and JSON, never pickles of ours: what a rank says is read, not executed.
"""

from __future__ import annotations

import json
import math
import signal
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from graphsrt.runtime.token_logprobs import StepLogprobs

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
    """What a step gives back: ``token_ids`` int64 [R]; ``logits`` and ``logprobs`` where the caller asked for them.

    The times are those of ``StepResult``.
    """

    token_ids: np.ndarray
    logits: torch.Tensor | None = None
    logprobs: StepLogprobs | None = None
    compute_s: float = 0.0
    collectives_s: float = 0.0


def encode_reply(reply: StepReply | None) -> list[memoryview]:
    """The parts of a REPLY message. The logits are not copied unless they lie on a device or are not contiguous."""
    if reply is None:
        reply = StepReply(np.empty(0, dtype=np.int64))
    arrays = [np.asarray(reply.token_ids, dtype=np.int64).reshape(-1)]
    if reply.logprobs is not None:
        arrays += [getattr(reply.logprobs, field.name) for field in fields(StepLogprobs)]
    about: dict[str, object] = {
        "arrays": [[array.dtype.str, array.shape] for array in arrays],
        "times": [reply.compute_s, reply.collectives_s],
    }
    if reply.logits is not None:
        logits = reply.logits.detach().cpu().contiguous()
        about |= {"dtype": str(logits.dtype).removeprefix("torch."), "shape": list(logits.shape)}
    text = json.dumps(about).encode()
    front = b"".join(_padded(part) for part in (len(text).to_bytes(8, "little") + text, *(a.tobytes() for a in arrays)))
    parts = [memoryview(front)]
    if reply.logits is not None and logits.numel():
        import torch

        parts.append(logits.view(-1).view(torch.uint8).numpy().data)
    return parts


def decode_reply(payload: np.ndarray) -> StepReply:
    """The inverse of ``encode_reply``. All arrays and the logits are views of ``payload`` (uint8)."""
    text_bytes = int.from_bytes(payload[:8].tobytes(), "little")
    about = json.loads(payload[8 : 8 + text_bytes].tobytes())
    at = _aligned(8 + text_bytes)
    arrays = []
    for dtype_name, shape in about["arrays"]:
        nbytes = math.prod(shape) * np.dtype(dtype_name).itemsize
        arrays.append(payload[at : at + nbytes].view(dtype_name).reshape(shape))
        at = _aligned(at + nbytes)
    reply = StepReply(arrays[0], None, StepLogprobs(*arrays[1:]) if len(arrays) > 1 else None, *about["times"])
    if "dtype" in about:
        import torch

        dtype: torch.dtype = getattr(torch, about["dtype"])
        data = payload[at:]
        whole = torch.from_numpy(data).view(dtype) if len(data) else torch.empty(0, dtype=dtype)
        reply.logits = whole.view(about["shape"])
    return reply


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


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNMENT_BYTES)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
