"""The cache of traced programs, which makes the second start of a model a warm one: nothing is captured, no pass runs.

``$GRAPHSRT_CACHE/programs/<key>/entry`` holds the final programs as text, the same programs as ranks run them, the
summary, and where the weights are. The key covers what a program depends on: the model's JSON files, the headers, sizes
and times of its weights, every option of ``trace``, graphsrt's own source and that of installed packages that add
passes or models, and the versions of torch, transformers and Python. An entry begins with its checksum; one that is
damaged is said to be so and made anew. It appears whole (written aside, then renamed), so processes that want the same
one at once each write what the others would have written.

What no key can cover is not kept: models and configs in memory, passes and models that the caller brings along, code
that comes with a checkpoint, pickled weights. A start that is to dump or to verify stages traces them. Operators that
the caller defines matter only to those: a program of graphsrt's and of packages' passes has none of them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from graphsrt.cache import cache_dir
from graphsrt.errors import CheckpointError
from graphsrt.models.checkpoint import Checkpoint, SafetensorsCheckpoint, open_spec
from graphsrt.models.folder import model_folder
from graphsrt.models.tokenizer import LateTokenizer, load_tokenizer
from graphsrt.program import Program
from graphsrt.runtime.phases import Phases, RunText, text_hash

if TYPE_CHECKING:
    from graphsrt.models.source import ModelSource
    from graphsrt.passes.runner import Stages

FORMAT = 1
"""Counts changes of what an entry holds that graphsrt's own source, which the key covers, does not tell."""

_PLUGINS = ("graphsrt.passes", "graphsrt.models")
_VARIABLES = ("GRAPHSRT_DISABLED_ARCHS", "GRAPHSRT_REFERENCE_ARCHS", "GRAPHSRT_DISABLE_PLUGINS")
_OF_THE_CALLER = ("GRAPHSRT_DUMP", "GRAPHSRT_EXTERNAL_MODELS")


@dataclass(frozen=True)
class Kept:
    """What an earlier start left: all that running a model needs, and that was asked for most.

    ``programs``: text and hash of the final ones, decode first. ``running``: of ``Phases.texts``. ``inner``: of
    ``tokenizer.inner_text``; ``has_tokenizer`` says whether there is a tokenizer at all.
    """

    name: str
    folder: str
    programs: tuple[tuple[str, str], ...]
    running: tuple[RunText, ...]
    summary: str
    checkpoint_spec: dict[str, Any]
    eos_token_ids: tuple[int, ...]
    has_tokenizer: bool
    inner: str | None

    def phases(self, *, whole: bool = False) -> Phases:
        """The programs as ranks run them; ``whole``: as they were traced, which takes a second more."""
        if not whole:
            return Phases.from_texts(self.running, where="the cache of programs")
        return Phases(*map(self.program, ("decode", "prefill")[: len(self.programs)]))

    def program(self, phase: str | None = None) -> Program:
        """The final program of a phase, "decode" by default."""
        if phase not in self._parsed:
            text, wanted = self.programs[-1 if phase == "prefill" else 0]
            self._parsed[phase] = program = Program.from_text(text)
            assert text_hash(program) == wanted, "the program did not survive its text"
        return self._parsed[phase]

    @cached_property
    def _parsed(self) -> dict[str | None, Program]:
        return {}

    def checkpoint(self) -> Checkpoint:
        return open_spec(self.checkpoint_spec)

    def tokenizer(self) -> LateTokenizer | None:
        if not self.has_tokenizer:
            return None
        return LateTokenizer(self.inner, lambda: load_tokenizer(self.name, Path(self.folder)))


def place_of(model: Any, options: Mapping[str, Any], device: str) -> Path | None:
    """Where the programs of ``trace(model, **options)`` are kept; None if they cannot be.

    ``device``: a type of device. Raises as ``model_folder`` does.
    """
    registry = sys.modules.get("graphsrt.models.registry")
    of_the_caller = (
        options["passes"] is not None, options["dump"], options["trust_remote_code"], options["allow_pickle"],
        registry is not None and registry._registered, *map(os.environ.get, _OF_THE_CALLER),
    )  # fmt: skip
    if not isinstance(model, str | os.PathLike) or any(of_the_caller):
        return None
    folder = model_folder(model).resolve()
    try:
        facts = [
            f"format {FORMAT}", sys.version, torch.__version__, version("transformers"), device, os.fspath(model),
            *(f"{name}={_words(value)}" for name, value in sorted(options.items())),
            *(f"{name}={os.environ.get(name)}" for name in _VARIABLES),
            *_model_facts(folder), _own_source(), *_plugin_facts(),
        ]  # fmt: skip
    except (OSError, CheckpointError):  # tracing says what is wrong with the model
        return None
    return cache_dir() / "programs" / hashlib.sha256("\0".join(facts).encode()).hexdigest()[:32]


def find(place: Path) -> Kept | None:
    """What is kept there, if it is there and whole."""
    try:
        told, _, body = (place / "entry").read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    if hashlib.sha256(body).hexdigest().encode() != told:
        warnings.warn(f"the kept program in {place} is damaged: the model is traced again", stacklevel=3)
        return None
    if os.environ.get(_VARIABLES[-1], "") in ("", "0"):
        for entry in (entry for group in _PLUGINS for entry in entry_points(group=group)):
            entry.load()  # its operators may be in the program
    fields = json.loads(body)
    for name in ("programs", "running", "eos_token_ids"):
        fields[name] = tuple(tuple(item) if isinstance(item, list) else item for item in fields[name])
    return Kept(**fields | {"running": tuple(RunText(*text) for text in fields["running"])})


def keep(place: Path, source: ModelSource, stages: Stages, phases: Phases, device: str) -> None:
    """Keep what was traced. ``phases``: with the names of the checkpoint. A disk that is full is a warning."""
    from graphsrt.models.tokenizer import inner_text
    from graphsrt.summary import facts_text

    tokenizer = source.tokenizer
    kept = Kept(
        source.name, str(source.folder), tuple((str(p), text_hash(p)) for p in phases.all()), phases.texts(device),
        facts_text(stages), source.require_checkpoint().spec(), source.eos_token_ids, tokenizer is not None,
        None if tokenizer is None else inner_text(tokenizer),
    )  # fmt: skip
    body = json.dumps(asdict(kept)).encode()
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place, prefix=".entry-", delete=False) as file:
            file.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        os.replace(file.name, place / "entry")
    except OSError as error:  # this start does without; the next one will be slow again
        warnings.warn(f"the traced program cannot be kept in {place}: {error}", stacklevel=3)


# -- the key -----------------------------------------------------------------------------------------------------------


def _words(value: Any) -> str:
    """An option as text that is the same in every process."""
    if isinstance(value, os.PathLike | str) and Path(value).is_file():  # scales of a cache
        return f"{value} {hashlib.sha256(Path(value).read_bytes()).hexdigest()}"
    return repr(list(value) if isinstance(value, tuple | set) else value)


def _model_facts(folder: Path) -> Iterator[str]:
    yield str(folder)
    for file in sorted(folder.glob("*.json")):
        yield f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}"
    checkpoint = SafetensorsCheckpoint(folder)
    yield checkpoint.digest
    for part in checkpoint.files:  # in place of the bytes, which decide ties and scales: nobody hashes gigabytes
        yield f"{part.path} {os.stat(part.path).st_mtime_ns}"
    checkpoint.close()


@cache
def _own_source() -> str:
    return _source_hash(Path(__file__).parent)


def _source_hash(folder: Path) -> str:
    found = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        found.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
    return found.hexdigest()


def _plugin_facts() -> Iterator[str]:
    for entry in sorted((entry for group in _PLUGINS for entry in entry_points(group=group)), key=str):
        yield f"{entry} {entry.dist.version if entry.dist is not None else ''}"
        spec = importlib.util.find_spec(entry.module.partition(".")[0])  # of the package alone: nothing is imported
        for place in (spec and spec.submodule_search_locations) or ():
            yield _source_hash(Path(place))
        if spec is not None and spec.origin and spec.origin.endswith(".py"):
            yield hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
