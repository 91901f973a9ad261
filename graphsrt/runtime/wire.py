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
from dataclasses import dataclass, field, fields
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
    """What a step gives back: ``token_ids`` int64 [R]; ``logits``, ``logprobs`` and ``hidden`` states where asked for.

    Times and ``captured_rows`` are those of ``StepResult``.
    """

    token_ids: np.ndarray
    logits: torch.Tensor | None = None
    logprobs: StepLogprobs | None = None
    compute_s: float = 0.0
    collectives_s: float = 0.0
    captured_rows: int = 0
    hidden: dict[str, torch.Tensor] = field(default_factory=dict)


def encode_reply(reply: StepReply | None) -> list[memoryview]:
    """The parts of a REPLY message. Tensors are not copied unless they lie on a device or are not contiguous."""
    if reply is None:
        reply = StepReply(np.empty(0, dtype=np.int64))
    arrays = [np.asarray(reply.token_ids, dtype=np.int64).reshape(-1)]
    if reply.logprobs is not None:
        arrays += [getattr(reply.logprobs, part.name) for part in fields(StepLogprobs)]
    given = reply.hidden if reply.logits is None else {"logits": reply.logits, **reply.hidden}
    tensors = {name: value.detach().cpu().contiguous() for name, value in given.items()}
    about = {
        "arrays": [[array.dtype.str, array.shape] for array in arrays],
        "about": [reply.compute_s, reply.collectives_s, reply.captured_rows],
        "tensors": [[name, str(x.dtype).removeprefix("torch."), list(x.shape)] for name, x in tensors.items()],
    }
    text = json.dumps(about).encode()
    front = b"".join(_padded(part) for part in (len(text).to_bytes(8, "little") + text, *(a.tobytes() for a in arrays)))
    parts = [memoryview(front)]
    for tensor in tensors.values():
        if tensor.numel():
            import torch

            parts.append(tensor.view(-1).view(torch.uint8).numpy().data)
            parts.append(memoryview(bytes(-parts[-1].nbytes % ALIGNMENT_BYTES)))
    return parts


def decode_reply(payload: np.ndarray) -> StepReply:
    """The inverse of ``encode_reply``. All arrays and tensors are views of ``payload`` (uint8)."""
    text_bytes = int.from_bytes(payload[:8].tobytes(), "little")
    about = json.loads(payload[8 : 8 + text_bytes].tobytes())
    at = _aligned(8 + text_bytes)
    arrays = []
    for dtype_name, shape in about["arrays"]:
        nbytes = math.prod(shape) * np.dtype(dtype_name).itemsize
        arrays.append(payload[at : at + nbytes].view(dtype_name).reshape(shape))
        at = _aligned(at + nbytes)
    reply = StepReply(arrays[0], None, StepLogprobs(*arrays[1:]) if len(arrays) > 1 else None, *about["about"])
    for name, dtype_name, shape in about["tensors"]:
        import torch

        dtype: torch.dtype = getattr(torch, dtype_name)
        data = payload[at : at + math.prod(shape) * dtype.itemsize]
        at = _aligned(at + len(data))
        flat = torch.from_numpy(data).view(dtype) if len(data) else torch.empty(0, dtype=dtype)
        reply.hidden[name] = flat.view(shape)
    reply.logits = reply.hidden.pop("logits", None)
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
