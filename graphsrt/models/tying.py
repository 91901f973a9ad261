"""Which parameter is filled from which checkpoint tensor.

The rule: every parameter is filled or an error; every checkpoint tensor is used, skipped by a named rule, or an error.
All problems are reported together. Ties follow transformers: they are symmetric (the name that exists fills the
others), and two different tensors under tied names are *not* tied, each is loaded under its own name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from graphsrt.errors import CheckpointError, explain
from graphsrt.models.checkpoint import Checkpoint

_MAX_LISTED = 20
# Tied candidates are compared in blocks of rows of this size, so that an embedding is never held twice.
_COMPARE_BYTES = 64 << 20


@dataclass(frozen=True)
class SkipRule:
    """Checkpoint tensors that no parameter needs. ``num_dims``: only tensors of that many dims match, if given."""

    pattern: str
    reason: str
    num_dims: int | None = None

    def matches(self, name: str, shape: tuple[int, ...]) -> bool:
        return re.search(self.pattern, name) is not None and self.num_dims in (None, len(shape))


# The masks say how many dims they have, because a real bias of a projection may end in the same words.
SKIP_RULES: tuple[SkipRule, ...] = (
    SkipRule(r"rotary_emb\.inv_freq$", "rotary frequencies are recomputed from the config"),
    SkipRule(r"rotary_emb\.(cos|sin)_cached$", "rotary tables are recomputed from the config"),
    SkipRule(r"(^|\.)position_ids$", "positions are counted by the engine"),
    SkipRule(r"(attn|attention)\.bias$", "a causal mask, which the attention operator makes itself", num_dims=4),
    SkipRule(r"(attn|attention)\.masked_bias$", "the masked value of old attention code", num_dims=0),
    SkipRule(r"(attn|attention)\.masked_bias$", "the masked value of old attention code", num_dims=1),
)

# For checkpoints of quantised weights, and only then.
SCALE_RULES: tuple[SkipRule, ...] = (
    SkipRule(r"\.(k|v|kv|q)_scale$", "of cached keys and values, which are kept in the model's dtype"),
    SkipRule(r"\.input_scale_ub$", "the bound of inputs' scales, which the config gives"),
)

# For the text part of a multimodal checkpoint, and only then.
TEXT_ONLY_RULES: tuple[SkipRule, ...] = (
    SkipRule(r"(^|\.)(vision_tower|vision_model|vision_embed\w*|visual|vqmodel|embed_vision)\.", "vision, not text"),
    SkipRule(r"(^|\.)(audio_tower|audio_model|embed_audio)\.", "audio, not text"),
    SkipRule(r"(^|\.)(multi_modal_projector|mm_projector|image_newline)(\.|$)", "projects images into text"),
)


class Accounting(dict[str, str]):
    """Parameter name → checkpoint name. ``skipped``: checkpoint name → why nothing needs it."""

    def __init__(self, mapping: Mapping[str, str], skipped: Mapping[str, str]):
        super().__init__(mapping)
        self.skipped = dict(skipped)


def with_base_prefix(name: str, known: Collection[str], base_prefix: str) -> str:
    """``name``, or the same with the base model's prefix added or removed where only that is ``known``.

    A checkpoint saved from the base model lacks the prefix (``model.``) that the class with a head has, or the reverse.
    """
    if not base_prefix or name in known:
        return name
    prefix = base_prefix + "."
    if name.startswith(prefix) and name.removeprefix(prefix) in known:
        return name.removeprefix(prefix)
    return prefix + name if prefix + name in known else name


def _found(wanted: Iterable[str], checkpoint: Checkpoint, base_prefix: str) -> dict[str, str]:
    """Wanted name → checkpoint name, for those that the checkpoint has. An exact name wins over a prefixed one."""
    wanted = set(wanted)
    names = checkpoint.names()
    found = {name: name for name in names if name in wanted}
    for name in names:
        found.setdefault(with_base_prefix(name, wanted, base_prefix), name)
    return {name: stored for name, stored in found.items() if name in wanted}


def _equal(checkpoint: Checkpoint, a: str, b: str) -> bool:
    """Whether two tensors hold the same values. Bitwise in the dtype of the first; NaNs at the same place are equal."""
    shape = checkpoint.shape(a)
    if shape != checkpoint.shape(b):
        return False
    if not shape:
        return bool(torch.equal(checkpoint.read(a), checkpoint.read(b)))
    row_bytes = max(1, checkpoint.dtype(a).itemsize * int(torch.Size(shape[1:]).numel()))
    step = max(1, _COMPARE_BYTES // row_bytes)
    for start in range(0, shape[0], step):
        rows = (slice(start, min(start + step, shape[0])),)
        x, y = checkpoint.read(a, rows), checkpoint.read(b, rows)
        if x.data_ptr() == y.data_ptr() and x.stride() == y.stride() and x.dtype == y.dtype:
            continue
        if not torch.equal(x, y.to(x.dtype)):
            return False
    return True


def _groups(tied: Mapping[str, str]) -> list[list[str]]:
    """Names that are to be one tensor, the tie's source first."""
    groups: dict[str, list[str]] = {}
    for target, source in tied.items():
        groups.setdefault(tied.get(source, source), [tied.get(source, source)]).append(target)
    return list(groups.values())


def effective_ties(tied: Mapping[str, str], checkpoint: Checkpoint, *, base_prefix: str = "model") -> dict[str, str]:
    """The ties that hold for this checkpoint: ``tied`` (target → source) without pairs stored with different values."""
    found = _found({*tied, *tied.values()}, checkpoint, base_prefix)
    ties: dict[str, str] = {}
    for group in _groups(tied):
        root = group[0]
        keeper = next((name for name in group if name in found), root)
        for name in group[1:]:
            if name in found and name != keeper and not _equal(checkpoint, found[keeper], found[name]):
                continue
            ties[name] = root
    return ties


def accounting(
    expected: Mapping[str, Sequence[int]],
    checkpoint: Checkpoint,
    tied: Mapping[str, str] | None = None,
    skip_rules: Sequence[SkipRule] = SKIP_RULES,
    *,
    base_prefix: str = "model",
) -> Accounting:
    """Find the checkpoint tensor of every parameter, and an excuse for every other checkpoint tensor.

    ``expected``: parameter name → shape, for all that the program needs. ``tied``: target → source, empty where the
    config says that nothing is tied. Two tied parameters map to one checkpoint name, so the loader reads it once.

    ``CheckpointError`` lists, in one message: parameters that are missing, tensors that nothing accounts for, shapes
    that differ, and ties that the program has but the checkpoint contradicts.
    """
    tied = tied or {}
    found = _found({*expected, *tied, *tied.values()}, checkpoint, base_prefix)
    skipped: dict[str, str] = {}
    contradicted: list[str] = []
    for group in _groups(tied):
        present = [name for name in group if name in found]
        if not present:
            continue
        keeper = found[present[0]]
        for name in group:
            stored = found.get(name)
            if stored is None or stored == keeper:
                found[name] = keeper
            elif _equal(checkpoint, keeper, stored):
                found[name] = keeper
                skipped[stored] = f"the same values as {keeper}, to which it is tied"
            elif name not in expected or present[0] not in expected:
                contradicted.append(f"{keeper} and {stored}")
                skipped[stored] = skipped[keeper] = "reported as a contradicted tie"

    mapping = {name: found[name] for name in expected if name in found}
    missing = [name for name in expected if name not in found]
    wrong = [
        f"{name}: expected {tuple(expected[name])}, got {checkpoint.shape(stored)} ({checkpoint.where(stored)})"
        for name, stored in mapping.items()
        if tuple(expected[name]) != checkpoint.shape(stored)
    ]
    used = set(mapping.values())
    unexpected = []
    for name in checkpoint.names():
        if name in used or name in skipped:
            continue
        rule = next((rule for rule in skip_rules if rule.matches(name, checkpoint.shape(name))), None)
        if rule is None:
            unexpected.append(name)
        else:
            skipped[name] = rule.reason
    problems = (
        ("missing from the checkpoint, so they would stay random", missing),
        ("in the checkpoint, but no parameter and no skip rule knows them", unexpected),
        ("have another shape", wrong),
        ("are one tensor in the program, but differ in the checkpoint", contradicted),
    )
    if any(names for _, names in problems):
        lines = []
        for what, names in problems:
            if names:
                more = [f"… and {len(names) - _MAX_LISTED} more"] if len(names) > _MAX_LISTED else []
                lines.append(f"  {len(names)} {what}:")
                lines += [f"    {line}" for line in [*names[:_MAX_LISTED], *more]]
        hint = "is this the checkpoint of this config? A tensor that is truly not needed wants a SkipRule"
        if "lm_head.weight" in missing and not tied:
            hint = "the config says that the head is not tied (tie_word_embeddings is false), so it must be stored"
        raise CheckpointError(
            "\n".join(["the checkpoint and the model do not match", *lines, explain("", hint=hint).lstrip("\n")])
        )
    return Accounting(mapping, skipped)
