"""A model's weights as a safetensors file that lies in memory, for rank processes to read their slices from."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from typing import Any

import torch

from graphsrt.errors import CheckpointError, explain
from graphsrt.models.checkpoint import ALIASES, StateDictCheckpoint, as_bytes
from graphsrt.models.safetensors_file import DTYPE_NAMES


def write_safetensors_memfd(state_dict: Mapping[str, torch.Tensor]) -> int:
    """Write tensors once, as a safetensors file that lies in memory, and return its file descriptor.

    N rank processes then read slices of this one copy, through ``/proc/<pid>/fd/<fd>`` or an inherited descriptor and
    ``/proc/self/fd/<fd>``. Tensors are written one after the other: beside the file, no more than one tensor is copied.
    Tensors that are the same memory are stored once, the other names go to an alias table in the file's metadata.
    Without ``memfd_create`` (not Linux) the file is an unlinked temporary one. The caller closes the descriptor.
    """
    kept: dict[tuple, str] = {}
    aliases: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in StateDictCheckpoint(state_dict)._tensors.items():
        memory = (
            tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape),
            tensor.stride(), tensor.dtype,
        )  # fmt: skip
        if memory in kept:
            aliases[name] = kept[memory]
        else:
            kept[memory], tensors[name] = name, tensor
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(explain(f"tensor {name} has a dtype that safetensors cannot hold: {tensor.dtype}"))
    # Wide dtypes first: every tensor then starts at a multiple of its element size, as mapped views need.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", ALIASES: json.dumps(aliases)}}
    offset = 0
    for name in order:
        tensor = tensors[name]
        size_bytes = math.prod(tensor.shape) * tensor.element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size_bytes],
        }
        offset += size_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("graphsrt-weights")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        _write_all(fd, memoryview(len(text).to_bytes(8, "little") + text))
        for name in order:
            flat = tensors[name].cpu().contiguous().reshape(-1)
            if flat.numel():
                _write_all(fd, as_bytes(flat))
    except OSError as error:
        os.close(fd)
        raise CheckpointError(explain("the weights cannot be shared between ranks", got=str(error))) from error
    except BaseException:
        os.close(fd)
        raise
    return fd


def _write_all(fd: int, data: memoryview) -> None:
    # One write() takes 2 GiB at most, and may take less.
    while data:
        data = data[os.write(fd, data[: 1 << 30]) :]
