"""Checkpoints: tensors by name, read in slices.

A rank reads only the bytes that it keeps, so everything here is about names and slices; nothing returns "the state
dict". Files are opened read-only and mapped, so several rank processes may read the same one, also through a path such
as ``/proc/self/fd/7``. What is wrong with a file is a ``CheckpointError`` that names the file.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from graphsrt.errors import CheckpointError, explain

Slices = tuple[slice, ...]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
# Metadata key under which `write_safetensors_memfd` records the names that share one stored tensor.
_ALIASES = "graphsrt.aliases"

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def bounds(slices: Slices | None, shape: Sequence[int]) -> list[tuple[int, int]]:
    """``slices`` as one (start, stop) per dim of ``shape``; dims that are not mentioned are taken whole.

    ``ValueError`` for more slices than dims, or a step other than 1.
    """
    slices = slices or ()
    if len(slices) > len(shape):
        raise ValueError(f"{len(slices)} slices for a tensor of {len(shape)} dims {tuple(shape)}")
    limits = []
    for dim, size in enumerate(shape):
        start, stop, step = (slices[dim] if dim < len(slices) else slice(None)).indices(size)
        if step != 1:
            raise ValueError(f"slices of a checkpoint tensor have step 1, not {step}")
        limits.append((start, max(start, stop)))
    return limits


class Checkpoint(ABC):
    """Named tensors that can be read in slices. ``bytes_read`` counts the bytes of what ``read`` has returned.

    A context manager; ``close`` may be called twice. What ``read`` returns stays valid after ``close``.
    """

    def __init__(self) -> None:
        self.bytes_read = 0

    @abstractmethod
    def names(self) -> list[str]:
        """All tensor names, in a stable order."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor. ``CheckpointError`` if there is none of that name."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """Dtype as stored. ``CheckpointError`` if there is no tensor of that name."""

    @abstractmethod
    def _read(self, name: str, slices: Slices | None) -> torch.Tensor: ...

    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """A JSON value from which ``open_spec`` opens the same checkpoint in another process."""

    @abstractmethod
    def where(self, name: str) -> str:
        """The file (or "memory") that holds a tensor, for messages."""

    def read(self, name: str, slices: Slices | None = None) -> torch.Tensor:
        """A tensor, or the block of it that ``slices`` (one per leading dim, step 1) names, in its stored dtype.

        The result may be a view of mapped or shared memory: copy it before writing to it.
        """
        tensor = self._read(name, slices)
        self.bytes_read += tensor.numel() * tensor.element_size()
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def close(self) -> None:  # noqa: B027 - most checkpoints hold no files
        """Release files."""

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SafetensorsCheckpoint(Checkpoint):
    """One safetensors file, a folder (``model.safetensors`` or an index with shards), or a list of files.

    All headers are checked when it is made; the data of a file is mapped at its first read.
    """

    def __init__(self, where_: str | os.PathLike | Sequence[str | os.PathLike]):
        super().__init__()
        promised: dict[str, list[str]] = {}
        if isinstance(where_, str | os.PathLike):
            self.root = os.fspath(where_)
            if os.path.isdir(self.root):
                files, promised = _folder_files(Path(self.root))
            elif str(self.root).endswith(".index.json"):
                files, promised = _index_files(Path(self.root))
            else:
                files = [str(self.root)]
        else:
            files = [os.fspath(file) for file in where_]
            self.root = os.path.dirname(files[0]) if files else ""
        if not files:
            raise CheckpointError("a checkpoint needs at least one file, and got none")
        self.files = files
        self._open: dict[str, Any] = {}
        self._file: dict[str, str] = {}  # name → file
        self._stored: dict[str, str] = {}  # name → name inside the file (differs for aliases)
        self._shape: dict[str, tuple[int, ...]] = {}
        self._dtype: dict[str, torch.dtype] = {}
        for file in files:
            self._read_header(file, promised.get(file))

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(file, framework="pt", device="cpu")
            except FileNotFoundError as error:
                raise CheckpointError(explain(f"no such checkpoint file: {file}")) from error
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    explain(
                        f"{file} is not a sound safetensors file",
                        got=str(error),
                        hint="the file is truncated or damaged: fetch or write it again",
                    )
                ) from error
        return self._open[file]

    def _read_header(self, file: str, promised: list[str] | None) -> None:
        # Opened and let go again: a folder of hundreds of shards must not keep hundreds of maps on every rank.
        already_open = file in self._open
        handle = self._handle(file)
        stored = list(handle.keys())
        absent = sorted(set(promised or ()) - set(stored))
        if absent:
            raise CheckpointError(
                explain(
                    "the index names tensors that the shard does not hold",
                    where=file,
                    expected=", ".join(absent[:20]) + (f" … {len(absent)} in all" if len(absent) > 20 else ""),
                    hint="index and shards are of different checkpoints: fetch or write both again",
                )
            )
        try:
            aliases = json.loads((handle.metadata() or {}).get(_ALIASES, "{}"))
        except ValueError as error:
            raise CheckpointError(explain(f"the alias table of {file} is not JSON", got=str(error))) from error
        for name, kept in [*((name, name) for name in stored), *aliases.items()]:
            if name in self._file:
                raise CheckpointError(
                    explain(
                        f"tensor {name} is stored twice",
                        where=f"{self._file[name]} and {file}",
                        expected="every tensor once",
                    )
                )
            part = handle.get_slice(kept)
            if part.get_dtype() not in _DTYPES:
                raise CheckpointError(
                    explain(f"tensor {name} has a dtype that torch does not know", where=file, got=part.get_dtype())
                )
            self._file[name], self._stored[name] = file, kept
            self._shape[name], self._dtype[name] = tuple(part.get_shape()), _DTYPES[part.get_dtype()]
        if not already_open:
            del self._open[file]

    def names(self) -> list[str]:
        return list(self._file)

    def __contains__(self, name: object) -> bool:
        return name in self._file

    def _known(self, name: str) -> str:
        if name not in self._file:
            raise CheckpointError(explain(f"no tensor named {name}", where=self.root or ", ".join(self.files)))
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shape[self._known(name)]

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype[self._known(name)]

    def where(self, name: str) -> str:
        return self._file[self._known(name)]

    def _read(self, name: str, slices: Slices | None) -> torch.Tensor:
        file = self.where(name)
        limits = bounds(slices, self._shape[name])
        handle = self._handle(file)
        try:
            if all(limit == (0, size) for limit, size in zip(limits, self._shape[name])):
                return handle.get_tensor(self._stored[name])
            if any(start == stop for start, stop in limits):
                return torch.empty([stop - start for start, stop in limits], dtype=self._dtype[name])
            return handle.get_slice(self._stored[name])[tuple(slice(start, stop) for start, stop in limits)]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(explain(f"tensor {name} cannot be read", where=file, got=str(error))) from error

    def spec(self) -> dict[str, Any]:
        return {"kind": "safetensors", "files": list(self.files)}

    def close(self) -> None:
        self._open.clear()


class StateDictCheckpoint(Checkpoint):
    """A state dict in memory: tensors are shared with it, never copied. Tied parameters are there under all names."""

    def __init__(self, state_dict: Mapping[str, torch.Tensor]):
        super().__init__()
        self._tensors: dict[str, torch.Tensor] = {}
        for name, value in state_dict.items():
            if not isinstance(value, torch.Tensor):
                # Modules may put extra state (any object) there; it is no weight.
                continue
            if value.is_meta:
                raise CheckpointError(
                    explain(
                        f"parameter {name} is on the meta device: the model has no weights",
                        hint="pass the config itself for a program without weights, or load the model's weights first",
                    )
                )
            self._tensors[name] = value.detach()

    def names(self) -> list[str]:
        return list(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def _tensor(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise CheckpointError(explain(f"no tensor named {name}", where=self.where(name)))
        return self._tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensor(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensor(name).dtype

    def where(self, name: str) -> str:
        return "memory"

    def _read(self, name: str, slices: Slices | None) -> torch.Tensor:
        tensor = self._tensor(name)
        for dim, (start, stop) in enumerate(bounds(slices, tensor.shape)):
            tensor = tensor.narrow(dim, start, stop - start)
        return tensor

    def spec(self) -> dict[str, Any]:
        raise CheckpointError(
            explain(
                "a state dict in memory cannot be opened from another process",
                hint="write it once with write_safetensors_memfd and open that file in each process",
            )
        )


class PickleCheckpoint(StateDictCheckpoint):
    """Files written by ``torch.save``, mapped and unpickled with ``weights_only=True``."""

    def __init__(self, files: Sequence[str | os.PathLike]):
        self.files = [os.fspath(file) for file in files]
        tensors: dict[str, torch.Tensor] = {}
        for file in self.files:
            try:
                part = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
                raise CheckpointError(explain(f"{file} cannot be loaded", got=str(error).split("\n")[0])) from error
            if not isinstance(part, dict):
                raise CheckpointError(explain(f"{file} holds no state dict", got=type(part).__name__))
            twice = sorted(tensors.keys() & part.keys())
            if twice:
                raise CheckpointError(explain(f"tensor {twice[0]} is stored twice", where=file))
            tensors.update(part)
        super().__init__(tensors)

    def where(self, name: str) -> str:
        return ", ".join(self.files)

    def spec(self) -> dict[str, Any]:
        return {"kind": "pickle", "files": list(self.files)}


def _index_files(index: Path) -> tuple[list[str], dict[str, list[str]]]:
    """Shards that an index names, and the tensors that each is said to hold."""
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        promised: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            # A shard lies beside its index: an index must not be able to point at any file of the machine.
            if Path(file).is_absolute() or ".." in Path(file).parts:
                raise CheckpointError(explain("the index names a file outside its folder", where=str(index), got=file))
            promised.setdefault(str(index.parent / file), []).append(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            explain(
                f"{index} is not a checkpoint index",
                expected='JSON with "weight_map": {tensor: file}',
                got=f"{type(error).__name__}: {error}",
            )
        ) from error
    missing = [file for file in promised if not os.path.exists(file)]
    if missing:
        names = ", ".join(os.path.basename(file) for file in missing[:20])
        raise CheckpointError(
            explain(
                f"{len(missing)} of {len(promised)} checkpoint files are missing",
                where=str(index),
                expected=names + (" …" if len(missing) > 20 else ""),
                hint="fetch the missing files",
            )
        )
    return list(promised), promised


def _folder_files(folder: Path) -> tuple[list[str], dict[str, list[str]]]:
    # The order of preference is transformers': a single file wins over an index beside it.
    if (folder / _SINGLE).exists():
        return [str(folder / _SINGLE)], {}
    if (folder / _INDEX).exists():
        return _index_files(folder / _INDEX)
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".pt", ".pth"))
    raise CheckpointError(
        explain(
            f"no checkpoint in {folder}",
            expected=f"{_SINGLE}, or {_INDEX} with its shards",
            got=", ".join(others[:20]) or "no weight files",
        )
    )


def open_checkpoint(path: str | os.PathLike, *, allow_pickle: bool = False) -> Checkpoint:
    """Open a folder or a file.

    Safetensors come first; pickle files (``pytorch_model.bin``, ``.pt``, ``.pth``) are opened only with
    ``allow_pickle=True``. ``CheckpointError`` for anything missing, damaged or refused.
    """
    path = Path(path)
    pickles: list[str] = []
    if path.is_dir():
        if not (path / _SINGLE).exists() and not (path / _INDEX).exists():
            if (path / _PICKLES[0]).exists():
                pickles = [str(path / _PICKLES[0])]
            elif (path / _PICKLES[1]).exists():
                pickles = _index_files(path / _PICKLES[1])[0]
    elif path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
        pickles = [str(path)]
    if not pickles:
        return SafetensorsCheckpoint(path)
    if not allow_pickle:
        raise CheckpointError(
            explain(
                "only a pickle checkpoint was found, and pickle files can run code",
                where=", ".join(pickles[:4]),
                expected="safetensors",
                hint="convert it (load with transformers, save_pretrained), or pass allow_pickle=True if you trust it",
            )
        )
    return PickleCheckpoint(pickles)


def open_spec(spec: Mapping[str, Any]) -> Checkpoint:
    """Open what ``Checkpoint.spec()`` described, in this or another process."""
    if spec["kind"] == "safetensors":
        return SafetensorsCheckpoint(spec["files"])
    if spec["kind"] == "pickle":
        return PickleCheckpoint(spec["files"])
    if spec["kind"] == "converted":
        from graphsrt.models.conversion import ConvertedCheckpoint

        return ConvertedCheckpoint(open_spec(spec["inner"]), spec["tensors"])
    raise ValueError(f"unknown kind of checkpoint: {spec['kind']}")


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
        if tensor.dtype not in _DTYPE_NAMES:
            raise CheckpointError(explain(f"tensor {name} has a dtype that safetensors cannot hold: {tensor.dtype}"))
    # Wide dtypes first: every tensor then starts at a multiple of its element size, as mapped views need.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", _ALIASES: json.dumps(aliases)}}
    offset = 0
    for name in order:
        tensor = tensors[name]
        size_bytes = math.prod(tensor.shape) * tensor.element_size()
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
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
                _write_all(fd, flat.view(torch.uint8).numpy().data)
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
