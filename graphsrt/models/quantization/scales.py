"""The scales of a checkpoint under one name and in one shape, whoever wrote it.

Each matrix that is stored in FP8 gets ``<module>.weight_scale`` (``[1, 1]``, ``[O, 1]``, or one for each block) and,
where inputs are rounded by a scale found beforehand, an ``input_scale [1, 1]``: the same for modules beside each other
that are given the same number, so that they may be merged. Done before anything is stacked. A scale that is missing, of
another shape, stored twice, or no number is an error that lists all such.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from graphsrt.errors import CheckpointError, explain
from graphsrt.models.checkpoint import Checkpoint
from graphsrt.models.conversion import ConvertedCheckpoint, Layout
from graphsrt.models.quantization.scheme import MERGED, LinearScheme, Modules, Quantization
from graphsrt.models.tying import with_base_prefix
from graphsrt.recipes import FP8

WEIGHT_SCALES = ("weight_scale", "weight_scale_inv", "scale_inv", "scale")
INPUT_SCALES = ("input_scale", "activation_scale", "input_activation_scale", "act_scale")
_CACHE_SCALE = re.compile(r"(.*?)(?:\.attn|\.[kv]_proj|\.qkv_proj)?\.(k_scale|v_scale|kv_scale)")
_BOUND = "input_scale_ub"  # FBGEMM's, which the config gives as well
_MAX_LISTED = 20


@dataclass(frozen=True)
class Stored:
    """How one module's weight is stored, and the name of its inputs' scale where they have one beforehand."""

    scheme: LinearScheme
    input_scale: str | None = None


def without_checkpoint(schemes: Mapping[str, LinearScheme]) -> dict[str, Stored]:
    """What a checkpoint would hold: projections of one input are taken to round it by one scale."""
    found = {}
    for module, scheme in schemes.items():
        path, dot, leaf = module.rpartition(".")
        first = next((parts[0] for parts in MERGED.values() if leaf in parts), leaf)
        found[module] = Stored(scheme, f"{path}{dot}{first}.input_scale" if scheme.inputs == "static" else None)
    return found


def find_scales(
    checkpoint: Checkpoint, quantization: Quantization, modules: Modules, base_prefix: str
) -> tuple[Checkpoint, dict[str, Stored]]:
    """A view of ``checkpoint`` with the scales of all stored modules, and how each module is stored.

    Reads scales that are one number, no weight. CheckpointError lists what does not fit.
    """
    finder = _Finder(checkpoint, base_prefix)
    schemes = quantization.schemes(modules)
    bottom = checkpoint.bottom()
    if not schemes and not any(bottom.dtype(name) == FP8 for name in bottom.names()):
        raise CheckpointError(
            explain(
                f"nothing is stored in FP8, though there is a quantization_config ({quantization.method})",
                expected="targets that name modules of the model, and weights of them",
                got=", ".join(pattern.text for patterns, _ in quantization.groups for pattern in patterns),
            )
        )
    for module in modules:
        if module not in schemes:
            finder.check_plain(module)
    if quantization.kv_cache:
        finder.add_cache()
    stored = {module: finder.add(module, scheme) for module, scheme in schemes.items()}
    finder.raise_problems(quantization.method)
    stored = finder.share_input_scales(stored)
    return ConvertedCheckpoint(checkpoint, finder.tensors), stored


class _Finder:
    def __init__(self, checkpoint: Checkpoint, base_prefix: str):
        self.checkpoint, self.base_prefix = checkpoint, base_prefix
        self.names = set(checkpoint.names())
        self.tensors: dict[str, Layout] = {}
        self.input_values: dict[str, float] = {}
        self.problems: list[str] = []

    def stored_name(self, name: str) -> str | None:
        found = with_base_prefix(name, self.names, self.base_prefix)
        return found if found in self.names else None

    def check_plain(self, module: str) -> None:
        weight = self.stored_name(f"{module}.weight")
        if weight is not None and self.checkpoint.dtype(weight).itemsize == 1:
            self.problems.append(f"{module}.weight is stored as {self.checkpoint.dtype(weight)}, but is to be plain")

    def add(self, module: str, scheme: LinearScheme) -> Stored:
        weight = self.stored_name(f"{module}.weight")
        if weight is None:
            return Stored(scheme, f"{module}.input_scale" if scheme.inputs == "static" else None)  # accounting tells
        dtype, shape = self.checkpoint.dtype(weight), self.checkpoint.shape(weight)
        if dtype != FP8:
            self.problems.append(f"{module}.weight is stored as {dtype}, expected {FP8}, or on the ignore list")
            return Stored(scheme)
        if len(shape) != 2:
            self.problems.append(f"{module}.weight has shape {shape}, expected a matrix")
            return Stored(scheme)
        self._scale(module, WEIGHT_SCALES, "weight_scale", scheme.scale_shape(shape))
        if scheme.largest is not None:
            self._bound(module, scheme.largest)
        if scheme.inputs != "static":
            return Stored(scheme)
        self._scale(module, INPUT_SCALES, "input_scale", (1, 1))
        return Stored(scheme, f"{module}.input_scale")

    def _scale(self, module: str, spellings: Iterable[str], name: str, shape: tuple[int, int]) -> None:
        found = [s for spelling in spellings if (s := self.stored_name(f"{module}.{spelling}")) is not None]
        if len(found) != 1:
            near = ", ".join(sorted(n for n in self.names if n.startswith(f"{module}.") and "scale" in n)) or "none"
            told = f"is stored {len(found)} times: {', '.join(found)}" if found else f"is missing; scales there: {near}"
            self.problems.append(f"{module}.{name} {told}")
            return
        (stored,) = found
        have, dtype = self.checkpoint.shape(stored), self.checkpoint.dtype(stored)
        one = shape == (1, 1) and math.prod(have) == 1
        if not dtype.is_floating_point or not (one or have == shape or (shape[1] == 1 and have == shape[:1])):
            self.problems.append(f"{stored} is {dtype} {list(have)}, expected one number for each of {list(shape)}")
            return
        if one:
            value = float(self.checkpoint.read(stored).float())
            if not (math.isfinite(value) and value > 0):
                self.problems.append(f"{stored} is {value}, expected a positive number")
                return
            if name == "input_scale":
                self.input_values[module] = value
        canonical = f"{module}.{name}"
        if stored != canonical or have != shape:
            self.tensors[canonical] = stored if have == shape else ["view", list(shape), stored]

    def _bound(self, module: str, largest: float) -> None:
        stored = self.stored_name(f"{module}.{_BOUND}")
        if stored is not None:
            value = float(self.checkpoint.read(stored).float())
            if value != largest:
                self.problems.append(f"{stored} is {value}, but the config's activation_scale_ub is {largest}")

    def add_cache(self) -> None:
        """Scales of cached keys and values, as ``<attention>.k_scale`` and ``.v_scale``; one number may be both."""
        for stored in sorted(self.names):
            match = _CACHE_SCALE.fullmatch(stored)
            if match is None:
                continue
            have = self.checkpoint.shape(stored)
            if math.prod(have) != 1:
                self.problems.append(f"{stored} has shape {list(have)}, expected one number")
                continue
            value = float(self.checkpoint.read(stored).float())
            if not (math.isfinite(value) and value > 0):
                self.problems.append(f"{stored} is {value}, expected a positive number")
            for kind in match[2].removesuffix("_scale"):
                name = f"{match[1]}.{kind}_scale"
                if stored != name or have != (1, 1):
                    self.tensors[name] = ["view", [1, 1], stored]

    def share_input_scales(self, stored: Mapping[str, Stored]) -> dict[str, Stored]:
        """Modules of one parent whose inputs have the same scale share its name."""
        groups: dict[tuple[str, float], list[str]] = {}
        for module, value in self.input_values.items():
            groups.setdefault((module.rpartition(".")[0], value), []).append(module)
        shared = dict(stored)
        for modules in groups.values():
            name = f"{modules[0]}.input_scale"
            parts = [self.tensors.pop(f"{m}.input_scale", self.stored_name(f"{m}.input_scale")) for m in modules]
            if len(parts) > 1 or parts[0] != name:
                self.tensors[name] = ["same", 0, parts]
            for module in modules:
                shared[module] = Stored(stored[module].scheme, name)
        return shared

    def raise_problems(self, method: str) -> None:
        if self.problems:
            more = len(self.problems) - _MAX_LISTED
            lines = [f"    {line}" for line in self.problems[:_MAX_LISTED]]
            lines += [f"    … and {more} more"] if more > 0 else []
            raise CheckpointError(
                "\n".join(
                    [
                        f"the checkpoint is not what its quantization_config ({method}) says",
                        *lines,
                        explain("", hint="is this the checkpoint of this config?").lstrip("\n"),
                    ]
                )
            )


def dequantized_others(checkpoint: Checkpoint, quantization: Quantization, modules: Modules) -> Checkpoint:
    """A view in which FP8 matrices that are no linear module of the model are multiplied by their scales.

    Experts that a model holds as one parameter are stored one by one: they are multiplied where they are read, before
    they are stacked. CheckpointError for a matrix whose scale is missing or of another shape.
    """
    known = {f"{module}.weight" for module in modules}
    finder = _Finder(checkpoint, "")
    for weight in checkpoint.names():
        module, _, leaf = weight.rpartition(".")
        if leaf != "weight" or checkpoint.dtype(weight) != FP8 or any(name.endswith(weight) for name in known):
            continue
        shape, scheme = checkpoint.shape(weight), quantization.scheme_of(module)
        if scheme is None or len(shape) != 2:
            continue  # accounting knows no such tensor, or it is refused as one that is to be plain
        finder._scale(module, WEIGHT_SCALES, "weight_scale", scheme.scale_shape(shape))
        scale = finder.tensors.pop(f"{module}.weight_scale", f"{module}.weight_scale")
        scale = scale if isinstance(scale, str) else scale[-1]
        finder.tensors[weight] = ["fp8", list(shape), list(scheme.block_of(shape)), [weight, scale]]
    finder.raise_problems(quantization.method)
    return ConvertedCheckpoint(checkpoint, finder.tensors) if finder.tensors else checkpoint
