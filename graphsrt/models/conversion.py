"""A checkpoint under the names and layouts of the model class.

Published checkpoints of some architectures store what the class holds differently: other names, or one tensor per
expert where the class has one 3-D parameter. transformers keeps a table of these differences and applies it to whole
tensors while it loads. Here the same table gives a *view*: reading a slice of ``experts.gate_up_proj`` reads just
the parts of just those experts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from graphsrt.errors import CheckpointError, explain
from graphsrt.models.checkpoint import Checkpoint, Slices, bounds
from graphsrt.models.tying import with_base_prefix

# A name of the inner checkpoint, or ["stack", dim, [parts]], ["cat", dim, [parts]], ["swap", dim, dim, part],
# ["cut", dim, start, stop, part], ["item", dim, index, part], ["view", shape, part], ["same", 0, [parts]] (tensors of
# equal values, of which one is read), ["fp8", shape, [rows, columns], [numbers, scales]] (an FP8 matrix times its
# scales, one for each block). Plain lists, so that the view travels to rank processes as JSON.
Layout = Any


class ConvertedCheckpoint(Checkpoint):
    """``inner`` with some tensors replaced by layouts of others. Tensors that a layout uses are no longer listed."""

    def __init__(self, inner: Checkpoint, tensors: Mapping[str, Layout]):
        super().__init__()
        self.inner = inner
        self.tensors = dict(tensors)
        used = {leaf for layout in self.tensors.values() for leaf in _leaves(layout)}
        self._names = [*(n for n in inner.names() if n not in used and n not in self.tensors), *self.tensors]
        self._name_set = set(self._names)

    def names(self) -> list[str]:
        return list(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._name_set

    def _layout(self, name: str) -> Layout:
        return self.tensors.get(name, name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shape(self._layout(name), name)

    def dtype(self, name: str) -> torch.dtype:
        if _is_product(self._layout(name)):
            return torch.float32
        dtypes = {self.inner.dtype(leaf) for leaf in _leaves(self._layout(name))}
        if len(dtypes) != 1:
            raise CheckpointError(explain(f"the parts of {name} differ in dtype", got=", ".join(map(str, dtypes))))
        return dtypes.pop()

    def where(self, name: str) -> str:
        leaves = _leaves(self._layout(name))
        more = f" and {len(leaves) - 1} more" if len(leaves) > 1 else ""
        return f"{self.inner.where(leaves[0])}: {leaves[0]}{more}"

    def _shape(self, layout: Layout, name: str) -> tuple[int, ...]:
        if isinstance(layout, str):
            return self.inner.shape(layout)
        kind, dim = layout[0], layout[1]
        if kind in ("view", "fp8"):
            return tuple(dim)
        if kind == "same":
            return self._shape(layout[2][0], name)
        if kind in ("stack", "cat"):
            shapes = [self._shape(part, name) for part in layout[2]]
            rest = {shape if kind == "stack" else shape[:dim] + shape[dim + 1 :] for shape in shapes}
            if len(rest) != 1:
                raise CheckpointError(
                    explain(
                        f"the parts of {name} do not fit together",
                        where=f"{kind} along dim {dim}",
                        got=", ".join(map(str, sorted(set(shapes)))),
                        hint="a part (an expert?) is missing from the checkpoint, or has a wrong shape",
                    )
                )
            size = len(shapes) if kind == "stack" else sum(shape[dim] for shape in shapes)
            tail = dim if kind == "stack" else dim + 1
            return (*shapes[0][:dim], size, *shapes[0][tail:])
        shape = list(self._shape(layout[-1], name))
        if kind == "swap":
            shape[dim], shape[layout[2]] = shape[layout[2]], shape[dim]
        elif kind == "item":
            del shape[dim]
        else:
            shape[dim] = layout[3] - layout[2]
        return tuple(shape)

    def _read(self, name: str, slices: Slices | None) -> torch.Tensor:
        return self._block(self._layout(name), bounds(slices, self.shape(name)), name)

    def _block(self, layout: Layout, limits: list[tuple[int, int]], name: str) -> torch.Tensor:
        if isinstance(layout, str):
            return self.inner.read(layout, tuple(slice(start, stop) for start, stop in limits))
        kind, dim = layout[0], layout[1]
        if kind == "same":
            return self._block(layout[2][0], limits, name)
        if kind == "view":
            whole = self._block(layout[2], [(0, size) for size in self._shape(layout[2], name)], name)
            return whole.reshape(dim)[tuple(slice(*limit) for limit in limits)]
        if kind == "fp8":
            return self._product(layout, limits)
        if kind == "stack":
            start, stop = limits[dim]
            rest = limits[:dim] + limits[dim + 1 :]
            # An empty range still needs the shape and dtype of a part.
            parts = [self._block(part, rest, name) for part in layout[2][start : max(stop, start + 1)]]
            return torch.stack(parts, dim).narrow(dim, 0, stop - start)
        if kind == "cat":
            blocks: list[torch.Tensor] = []
            at = 0
            for part in layout[2]:
                size = self._shape(part, name)[dim]
                start, stop = max(limits[dim][0] - at, 0), min(limits[dim][1] - at, size)
                at += size
                if start < stop or not blocks:
                    inside = (min(start, size), max(min(start, size), stop))
                    blocks.append(self._block(part, [*limits[:dim], inside, *limits[dim + 1 :]], name))
            return torch.cat(blocks, dim)
        limits = list(limits)
        if kind == "item":
            limits.insert(dim, (layout[2], layout[2] + 1))
            return self._block(layout[3], limits, name).squeeze(dim)
        if kind == "swap":
            limits[dim], limits[layout[2]] = limits[layout[2]], limits[dim]
            return self._block(layout[3], limits, name).transpose(dim, layout[2])
        limits[dim] = (limits[dim][0] + layout[2], limits[dim][1] + layout[2])
        return self._block(layout[4], limits, name)

    def _product(self, layout: Layout, limits: list[tuple[int, int]]) -> torch.Tensor:
        """Float32 numbers of a matrix stored in FP8; all its scales are read, as they are few."""
        _, shape, block, (numbers, scales) = layout
        scale = self.inner.read(scales).float().reshape([-(-size // side) for size, side in zip(shape, block)])
        for dim, ((start, stop), side) in enumerate(zip(limits, block)):
            if scale.shape[dim] > 1:
                scale = scale.index_select(dim, torch.arange(start, stop) // side)
        return self.inner.read(numbers, tuple(slice(*limit) for limit in limits)).float() * scale

    def spec(self) -> dict[str, Any]:
        return {"kind": "converted", "inner": self.inner.spec(), "tensors": self.tensors}

    def bottom(self) -> Checkpoint:
        return self.inner.bottom()

    def over(self, bottom: Checkpoint) -> Checkpoint:
        return ConvertedCheckpoint(self.inner.over(bottom), self.tensors)

    def close(self) -> None:
        self.inner.close()


def _leaves(layout: Layout) -> list[str]:
    if isinstance(layout, str):
        return [layout]
    return [leaf for part in _parts(layout) for leaf in _leaves(part)]


def _parts(layout: Layout) -> list[Layout]:
    return layout[-1] if layout[0] in ("stack", "cat", "same", "fp8") else [layout[-1]]


def _is_product(layout: Layout) -> bool:
    return not isinstance(layout, str) and (layout[0] == "fp8" or any(_is_product(part) for part in _parts(layout)))


def relaid(checkpoint: Checkpoint, reference: type | None, config: Any) -> Checkpoint:
    """``checkpoint`` with the parameters that a reference model keeps in a layout of its own, ``layouts(config)``.

    Names in the layouts are those of the class; a checkpoint of the base model alone lacks their prefix.
    """
    layouts = getattr(reference, "layouts", None)
    if layouts is None:
        return checkpoint
    base = getattr(reference, "base_model_prefix", "")

    def stored(layout: Layout) -> Layout:
        if isinstance(layout, str):
            return with_base_prefix(layout, checkpoint, base)  # type: ignore[arg-type]
        if layout[0] in ("stack", "cat"):
            return [*layout[:2], [stored(part) for part in layout[2]]]
        return [*layout[:-1], stored(layout[-1])]

    view = ConvertedCheckpoint(checkpoint, {name: stored(layout) for name, layout in layouts(config).items()})
    for name in view.tensors:
        view.shape(name)  # what is missing is reported now
    return view


def has_conversions(model_class: type, config: Any, checkpoint: Checkpoint) -> bool:
    """Whether transformers' table has an entry that could touch this checkpoint, found without building the model."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    module = sys.modules[model_class.__module__]
    keys = [config.model_type, *(n for n, v in vars(module).items() if isinstance(v, type))]
    legacy = (".gamma", ".beta", ".weight_g", ".weight_v")
    return any(get_checkpoint_conversion_mapping(key) for key in keys) or any(
        name.endswith(legacy) for name in checkpoint.names()
    )


def convert(
    checkpoint: Checkpoint, skeleton: PreTrainedModel, rename: Callable[[str], str] = lambda name: name
) -> Checkpoint:
    """``checkpoint`` under the names of ``skeleton`` (a model on the meta device), as transformers would load it.

    ``rename`` is applied to a name before the table. Names that lead to no parameter stay as they are, so that
    accounting can report them. Returns ``checkpoint`` itself if nothing differs. ``CheckpointError`` for a conversion
    that has no view here, or parts that do not fit together.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key

    table = get_model_conversion_mapping(skeleton)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    state = skeleton.state_dict()
    base = skeleton.base_model_prefix
    plain: dict[str, Layout] = {}
    groups: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    for stored in sorted(checkpoint.names(), key=dot_natural_key):
        name, converter, pattern = rename(stored), None, None
        start = name
        for renaming in renamings:
            name, _ = renaming.rename_source_key(name)
        for entry in converters:
            name, pattern = entry.rename_source_key(name)
            if pattern is not None:
                converter = entry
                break
        name = with_base_prefix(name, state, base)
        if name not in state and with_base_prefix(start, state, base) in state:
            # The checkpoint already has the class's layout (it was saved by this class): the table does not apply.
            name, converter = with_base_prefix(start, state, base), None
        if name not in state:
            continue
        if converter is None:
            if name in plain:
                raise CheckpointError(
                    explain(f"two checkpoint tensors are both {name}", got=f"{plain[name]} and {stored}")
                )
            plain[name] = stored
        else:
            groups.setdefault(name, (converter, {}))[1].setdefault(str(pattern), []).append(stored)
    tensors = {name: stored for name, stored in plain.items() if name != stored}
    for name, (converter, collected) in groups.items():
        tensors.update(_layouts(name, converter, collected, state))
    if not tensors:
        return checkpoint
    view = ConvertedCheckpoint(checkpoint, tensors)
    for name in tensors:
        view.shape(name)  # parts that do not fit are reported now, not in the middle of loading
    return view


def _layouts(
    name: str, converter: Any, collected: dict[str, list[str]], state: Mapping[str, torch.Tensor]
) -> dict[str, Layout]:
    """The layouts that one converter makes of the tensors collected for it; ``name`` is its first target."""
    values: dict[str, list[Layout]] = dict(collected)
    targets = list(converter.target_patterns)
    for operation in converter.operations:
        kind = type(operation).__name__
        if kind == "MergeModulelist":
            values = {key: [["stack", operation.dim, parts]] for key, parts in values.items()}
            if len(values) == 1:
                values = {targets[0]: next(iter(values.values()))}
        elif kind == "Concatenate":
            # In the order of the patterns, not of arrival: gate before up.
            parts = [part for key in converter.source_patterns for part in values.get(key, [])]
            values = {targets[0]: [["cat", operation.dim, parts]]}
        elif kind == "Transpose" and len(values) == 1 and not getattr(operation, "check_dims", False):
            part = next(iter(values.values()))[0]
            values = {targets[0]: [["swap", operation.dim0, operation.dim1, part]]}
        elif kind in ("Chunk", "Split") and len(values) == 1 and not getattr(operation, "num_shards_attribute", None):
            part, at = next(iter(values.values()))[0], 0
            values = {}
            for target in targets:
                size = state[name.replace(targets[0], target)].shape[operation.dim]
                values[target] = [["cut", operation.dim, at, at + size, part]]
                at += size
        else:
            raise CheckpointError(
                explain(
                    f"{name} is stored in a layout that graphsrt cannot read in slices",
                    got=f"transformers' conversion {kind}",
                    hint="load the model with transformers, save it with save_original_format=False, compile that",
                )
            )
    incomplete = [
        key for key in converter.source_patterns if len(converter.source_patterns) > 1 and not collected.get(key)
    ]
    if incomplete:
        raise CheckpointError(
            explain(f"parts of {name} are missing from the checkpoint", expected=", ".join(incomplete))
        )
    return {name.replace(targets[0], target): parts[0] for target, parts in values.items()}
