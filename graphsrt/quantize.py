"""quantize: write an FP8 checkpoint of a plain one, a tensor at a time.

Every linear module but the head (and what ``ignore`` names) is stored in FP8 with scales by one of
:data:`~graphsrt.models.quantization.writers.SCHEMES`; all else is copied. Scales of inputs, and of cached keys and
values, are the largest magnitudes that a few prompts give, over 448: the model is run, in its own dtype, before
anything is written. Source: Micikevicius et al. 2022; the largest number is what LLM Compressor and ModelOpt take by
default.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from graphsrt import ops
from graphsrt.errors import CompileError, explain
from graphsrt.models.checkpoint import Checkpoint
from graphsrt.models.quantization.kv_cache import attention_path
from graphsrt.models.quantization.scheme import LinearScheme, Pattern, Quantization
from graphsrt.models.quantization.writers import LAYOUTS, SCHEMES, Layout
from graphsrt.models.safetensors_file import DTYPE_NAMES
from graphsrt.models.source import ModelSource, resolve
from graphsrt.ops_fp8 import FP8, FP8_MAX, SMALLEST_AMAX, over_columns, over_rows
from graphsrt.program import Program, arguments, aten
from graphsrt.runtime.start import Bar

SHARD_BYTES = 4 << 30
_COPIED = (".json", ".jinja", ".model", ".txt")

PROMPTS = (
    "The sun rose over the harbour, and the first boats were already far out on the grey water.",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a",
    "In 1687 Isaac Newton published the laws of motion, which held for more than two centuries.",
    "Q: What is 17 times 24? A: 17 times 24 is 408, since 17 times 20 is 340 and 17 times 4 is 68.",
    "Dear Sir or Madam, I am writing to ask about the order that I placed on the third of May.",
    "Zwei Dinge erfüllen das Gemüt mit immer neuer Bewunderung; je pense, donc je suis.",
    "| name | year | price |\n|---|---|---|\n| oak table | 1912 | 340.50 |\n| brass lamp | 1934 | 85.00 |",
)
"""What calibration runs unless told otherwise: prose, code, sums, a letter, other languages, a table."""


def quantize(
    model: str | os.PathLike,
    out: str | os.PathLike,
    scheme: str = "fp8",
    *,
    layout: str = "compressed-tensors",
    kv_cache: bool = False,
    ignore: Sequence[str] = (),
    prompts: Sequence[str | Sequence[int]] = PROMPTS,
    progress: bool = False,
) -> Path:
    """Write a checkpoint folder ``out`` of ``model`` (what ``resolve`` takes), quantised by ``scheme``; returns it.

    ``layout``: whose names and config, a key of ``LAYOUTS``. ``kv_cache``: also scales of cached keys and values, for
    ``kv_dtype="float8_e4m3fn"``. ``ignore``: more modules that stay plain, by name or ``re:`` pattern; the head always
    does. ``prompts``: text, or token ids; the "fp8" scheme and ``kv_cache`` run them.

    ValueError for an argument that cannot be, CompileError for a model that is quantised already.
    """
    target = Path(out)
    if scheme not in SCHEMES or layout not in LAYOUTS or scheme not in LAYOUTS[layout].schemes:
        known = "; ".join(f"{name}: {', '.join(form.schemes)}" for name, form in LAYOUTS.items())
        raise ValueError(explain("no such scheme in this layout", expected=known, got=f"{layout}: {scheme}"))
    if kv_cache and layout == "fbgemm_fp8":
        raise ValueError(explain("this layout has no scales of keys and values", got=layout))
    if target.exists() and any(target.iterdir()):
        raise ValueError(explain("the folder to write is not empty", where=str(target), hint="name another"))
    source = resolve(model)
    if source.quantization is not None or source.folder is None:
        raise CompileError(
            explain(
                f"{source.name} cannot be quantised",
                expected="a folder with a plain checkpoint",
                got="a model in memory" if source.folder is None else f"{source.quantization.method} weights",  # type: ignore[union-attr]
            )
        )
    how, form = SCHEMES[scheme], LAYOUTS[layout]
    names = ["lm_head", *ignore]
    chosen = Quantization(
        layout,
        (((Pattern("Linear", "exact"),), how),),
        tuple(Pattern(n, "path" if layout == "fp8" else "exact") for n in names),
    ).schemes(source.linear_modules())
    if not chosen:
        raise ValueError(explain("no module is left to quantise", got=f"ignored: {', '.join(names)}"))
    scales: dict[str, float] = {}
    if how.inputs == "static" or kv_cache:
        scales = calibrate(source, set(chosen) if how.inputs == "static" else set(), kv_cache, form, prompts, progress)
    target.mkdir(parents=True, exist_ok=True)
    _Writer(source.require_checkpoint(), set(chosen), how, form, scales).write(target, progress)
    _copy_rest(source.folder, target)
    config = json.loads((source.folder / "config.json").read_text())
    plain = [name for name in source.linear_modules() if name not in chosen]
    kept = list(dict.fromkeys([*names, *plain]))
    config["quantization_config"] = form.config(how, kept, kv_cache)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return target


# -- calibration -------------------------------------------------------------------------------------------------------


def calibrate(
    source: ModelSource, modules: set[str], kv_cache: bool, form: Layout, prompts: Sequence[Any], progress: bool
) -> dict[str, float]:
    """Scales by the names that they are stored under: of the inputs of ``modules``, and of keys and values."""
    from graphsrt.api import trace, with_checkpoint_names
    from graphsrt.simulate import load, simulate

    traced = trace(source.folder, stop_after="recognize_gated_mlp")
    program = with_checkpoint_names(traced.stages, source)
    watched = _watched(program, modules, kv_cache, form)
    largest = {name: 0.0 for names in watched.values() for name in names}

    def watch(node: Any, values: list[Any]) -> None:
        for name in watched.get(node, ()):
            largest[name] = max(largest[name], float(values[0].abs().max()))

    weights = load(program, source.require_checkpoint())
    limit = int(program.constants["context_length"])
    if not prompts:
        raise ValueError(explain("calibration needs prompts", expected="at least one"))
    with Bar("calibrate", progress) as tell, torch.no_grad():
        for number, prompt in enumerate(prompts):
            ids = source.require_tokenizer()(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
            tokens = torch.tensor(ids[:limit])
            inputs = {"tokens": tokens, "positions": torch.arange(len(tokens))}
            simulate(program, {name: inputs[name] for name in program.inputs}, weights, watch=watch)
            tell(number + 1, len(prompts), f"{len(tokens)} tokens")
    bad = [name for name, value in largest.items() if not math.isfinite(value)]
    if bad:
        raise CompileError(explain("calibration gave values that are not finite", where=", ".join(bad[:5])))
    return {name: max(value, SMALLEST_AMAX) / FP8_MAX for name, value in largest.items()}


def _watched(program: Program, modules: set[str], kv_cache: bool, form: Layout) -> dict[Any, list[str]]:
    """Value of the program -> the scales that it gives. CompileError for a module that the program runs nowhere."""
    watched: dict[Any, list[str]] = {}
    for linear in program.calls(aten.linear.default):
        args = arguments(linear)
        module = str(args["weight"].target).removesuffix(".weight") if program.weight_of(args["weight"]) else ""
        if module in modules:
            watched.setdefault(args["input"], []).append(f"{module}.{form.input_scale}")
    missing = modules - {name.removesuffix(f".{form.input_scale}") for names in watched.values() for name in names}
    if missing:
        raise CompileError(
            explain("no value of the program is the input of a linear module", got=", ".join(sorted(missing)[:5]))
        )
    for node in program.calls(ops.attention) if kv_cache else ():
        args = arguments(node)
        path = attention_path(node)
        watched.setdefault(args["k"], []).append(f"{path}.{form.key_scale}")
        watched.setdefault(args["v"], []).append(f"{path}.{form.value_scale}")
    return watched


# -- the checkpoint ----------------------------------------------------------------------------------------------------


@dataclass
class _Entry:
    """A tensor to write, and how to make it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    source: str = ""
    part: str = "copy"
    value: float = 0.0

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class _Writer:
    checkpoint: Checkpoint
    modules: set[str]
    scheme: LinearScheme
    form: Layout
    scales: dict[str, float]
    _made: tuple[str, torch.Tensor, torch.Tensor] | None = field(default=None, init=False)

    def write(self, target: Path, progress: bool) -> None:
        shards: list[list[_Entry]] = [[]]
        size = 0
        for entry in self._entries():
            if size and size + entry.num_bytes > SHARD_BYTES and entry.part != "scale":  # beside its numbers
                shards.append([])
                size = 0
            shards[-1].append(entry)
            size += entry.num_bytes
        names = ["model.safetensors"]
        if len(shards) > 1:
            names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
            where = {entry.name: name for shard, name in zip(shards, names) for entry in shard}
            total = sum(entry.num_bytes for shard in shards for entry in shard)
            index = {"metadata": {"total_size": total}, "weight_map": where}
            (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        done, count = 0, sum(map(len, shards))
        with Bar("quantize", progress) as tell:
            for shard, name in zip(shards, names):
                for entry in self._write_shard(target / name, shard):
                    done += 1
                    tell(done, count, entry.name)

    def _entries(self) -> Iterator[_Entry]:
        for name in self.checkpoint.names():
            module, _, leaf = name.rpartition(".")
            shape, dtype = self.checkpoint.shape(name), self.checkpoint.dtype(name)
            if leaf != "weight" or module not in self.modules:
                yield _Entry(name, dtype, shape, name)
                continue
            yield _Entry(name, FP8, shape, name, "numbers")
            scale = self.scheme.scale_shape(shape)
            stored = () if self.form.scalar and self.scheme.scales == "tensor" else scale
            yield _Entry(f"{module}.{self.form.weight_scale}", torch.float32, stored, name, "scale")
        for name, value in self.scales.items():
            yield _Entry(name, torch.float32, () if self.form.scalar else (1,), part="value", value=value)

    def _write_shard(self, path: Path, entries: Sequence[_Entry]) -> Iterator[_Entry]:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for entry in entries:
            offsets = [at, at + entry.num_bytes]
            header[entry.name] = {"dtype": DTYPE_NAMES[entry.dtype], "shape": entry.shape, "data_offsets": offsets}
            at += entry.num_bytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for entry in entries:
                value = self._value(entry).contiguous()
                file.write(value.reshape(-1).view(torch.uint8).numpy().data if value.numel() else b"")
                yield entry

    def _value(self, entry: _Entry) -> torch.Tensor:
        if entry.part == "value":
            return torch.tensor([entry.value], dtype=torch.float32)
        if entry.part == "copy":
            return self.checkpoint.read(entry.source)
        if self._made is None or self._made[0] != entry.source:
            self._made = (entry.source, *to_fp8(self.checkpoint.read(entry.source), self.scheme))
        return self._made[1] if entry.part == "numbers" else self._made[2]


def to_fp8(weight: torch.Tensor, scheme: LinearScheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers ``[O, E]`` and float32 scales of a matrix: the largest number that a scale counts for becomes 448."""
    rows, columns = scheme.block_of(weight.shape)
    wide = weight.float()
    high, wide_by = scheme.scale_shape(weight.shape)
    padded = torch.zeros(high * rows, wide_by * columns)
    padded[: weight.shape[0], : weight.shape[1]] = wide.abs()
    largest = padded.view(high, rows, wide_by, columns).amax((1, 3))
    scale = largest.clamp(min=SMALLEST_AMAX) / FP8_MAX
    both = over_columns(over_rows(scale, weight.shape[0], rows), weight.shape[1], columns, None)
    return (wide / both).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def _copy_rest(folder: Path, target: Path) -> None:
    """Tokenizer, generation config and the like."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in _COPIED and not path.name.endswith(".index.json"):
            shutil.copyfile(path, target / path.name)
