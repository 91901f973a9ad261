"""Checkpoints: tensors by name, read in slices.

A rank reads only the bytes that it keeps, so everything here is about names and slices; nothing returns "the state
dict". Files are opened read-only, so several rank processes may read the same one, also through a path such as
``/proc/self/fd/7``. What is wrong with a file is a ``CheckpointError`` that names the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from graphsrt.errors import CheckpointError, explain
from graphsrt.models.safetensors_file import SafetensorsFile, StoredTensor

Slices = tuple[slice, ...]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
# Metadata key under which `write_safetensors_memfd` records the names that share one stored tensor.
ALIASES = "graphsrt.aliases"
# Of a tensor of which only columns are wanted, this much at a time is read to cut them out.
_PIECE_BYTES = 16 << 20


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
    """Named tensors that can be read in slices. ``bytes_read`` counts the bytes that ``read`` has taken.

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

        The result may be a view of memory that others use: copy it before writing to it.
        """
        tensor = self._read(name, slices)
        self.bytes_read += tensor.numel() * tensor.element_size()
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def bottom(self) -> Checkpoint:
        """The checkpoint that holds the bytes, below all views."""
        return self

    def over(self, bottom: Checkpoint) -> Checkpoint:
        """The same view over another ``bottom`` with the same tensors."""
        return bottom

    def close(self) -> None:  # noqa: B027 - most checkpoints hold no files
        """Release files."""

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SafetensorsCheckpoint(Checkpoint):
    """One safetensors file, a folder (``model.safetensors`` or an index with shards), or a list of files.

    All headers are checked when it is made. ``digests``: what another process saw of each file, which must be the same
    here. ``bytes_read`` counts what was read from the files, headers included.
    """

    def __init__(
        self, where_: str | os.PathLike | Sequence[str | os.PathLike], *, digests: Sequence[str] | None = None
    ):
        super().__init__()
        promised: dict[str, list[str]] = {}
        if isinstance(where_, str | os.PathLike):
            self.root = os.fspath(where_)
            if os.path.isdir(self.root):
                names, promised = _folder_files(Path(self.root))
            elif str(self.root).endswith(".index.json"):
                names, promised = _index_files(Path(self.root))
            else:
                names = [str(self.root)]
        else:
            names = [os.fspath(file) for file in where_]
            self.root = os.path.dirname(names[0]) if names else ""
        if not names:
            raise CheckpointError("a checkpoint needs at least one file, and got none")
        self._holders: dict[str, SafetensorsFile] = {}
        self._stored: dict[str, StoredTensor] = {}
        self.files = [SafetensorsFile(name) for name in names]
        for number, file in enumerate(self.files):
            self.bytes_read += file.header_bytes
            if digests is not None and file.digest != digests[number]:
                raise CheckpointError(
                    explain("a checkpoint file is not the one that the model was compiled from", where=file.path,
                            hint="it was written again since, or this machine has another copy: make them the same")
                )  # fmt: skip
            self._add(file, promised.get(file.path))

    def _add(self, file: SafetensorsFile, promised: list[str] | None) -> None:
        absent = sorted(set(promised or ()) - set(file.tensors))
        if absent:
            raise CheckpointError(
                explain(
                    "the index names tensors that the shard does not hold",
                    where=file.path,
                    expected=", ".join(absent[:20]) + (f" … {len(absent)} in all" if len(absent) > 20 else ""),
                    hint="index and shards are of different checkpoints: fetch or write both again",
                )
            )
        try:
            aliases = dict(json.loads(file.metadata.get(ALIASES, "{}")))
            stored = file.tensors | {name: file.tensors[kept] for name, kept in aliases.items()}
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(explain(f"the alias table of {file.path} is damaged", got=str(error))) from error
        for name in [*file.tensors, *aliases]:
            if name in self._holders:
                raise CheckpointError(
                    explain(
                        f"tensor {name} is stored twice",
                        where=f"{self._holders[name].path} and {file.path}",
                        expected="every tensor once",
                    )
                )
            self._holders[name], self._stored[name] = file, stored[name]

    def names(self) -> list[str]:
        return list(self._holders)

    def __contains__(self, name: object) -> bool:
        return name in self._holders

    def stored(self, name: str) -> tuple[SafetensorsFile, StoredTensor]:
        """The file that holds a tensor, and where in it. ``CheckpointError`` if there is none of that name."""
        if name not in self._holders:
            where = self.root or ", ".join(file.path for file in self.files)
            raise CheckpointError(explain(f"no tensor named {name}", where=where))
        return self._holders[name], self._stored[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.stored(name)[1].shape

    def dtype(self, name: str) -> torch.dtype:
        return self.stored(name)[1].dtype

    def where(self, name: str) -> str:
        return self.stored(name)[0].path

    @property
    def digest(self) -> str:
        """One hash of all files' headers and sizes: equal where the same checkpoint is seen."""
        return hashlib.sha256("\n".join(file.digest for file in self.files).encode()).hexdigest()

    def read(self, name: str, slices: Slices | None = None) -> torch.Tensor:
        return self._read(name, slices)  # which counts by itself: columns cost more than they are

    def _read(self, name: str, slices: Slices | None) -> torch.Tensor:
        file, stored = self.stored(name)
        limits = bounds(slices, stored.shape)
        out = torch.empty([stop - start for start, stop in limits], dtype=stored.dtype)
        if not out.numel():
            return out
        first, last = limits[0] if limits else (0, 1)
        if all(limit == (0, size) for limit, size in zip(limits[1:], stored.shape[1:])):
            self.bytes_read += file.read_into(stored.start + first * stored.row_bytes, as_bytes(out))
            return out
        step = max(1, _PIECE_BYTES // stored.row_bytes)
        for start in range(first, last, step):
            stop = min(start + step, last)
            rows = torch.empty((stop - start, *stored.shape[1:]), dtype=stored.dtype)
            self.bytes_read += file.read_into(stored.start + start * stored.row_bytes, as_bytes(rows))
            out[start - first : stop - first] = rows[(slice(None), *(slice(*limit) for limit in limits[1:]))]
        return out

    def spec(self) -> dict[str, Any]:
        digests = [file.digest for file in self.files]
        return {"kind": "safetensors", "files": [file.path for file in self.files], "digests": digests}

    def close(self) -> None:
        for file in self.files:
            file.close()


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor in host memory."""
    return tensor.view(-1).view(torch.uint8).numpy().data


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
        return SafetensorsCheckpoint(spec["files"], digests=spec["digests"])
    if spec["kind"] == "pickle":
        return PickleCheckpoint(spec["files"])
    if spec["kind"] == "converted":
        from graphsrt.models.conversion import ConvertedCheckpoint

        return ConvertedCheckpoint(open_spec(spec["inner"]), spec["tensors"])
    raise ValueError(f"unknown kind of checkpoint: {spec['kind']}")
