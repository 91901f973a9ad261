"""The set of ``graphsrt::`` operators: schema, shape function and plain meaning of each.

A recognised or fused operator's *reference* below is its definition: the simulator and the eager runner execute it, and
lowering traces through it so that Inductor sees ordinary ATen code. Attention over the paged pool is the exception:
it runs a kernel from ``lowering/kernels``. Collectives have no single-process meaning and are executed by whoever runs
the program (``simulate.py`` for all ranks in one process, ``runtime/model_runner.py`` between processes).

Shape letters: ``T`` tokens in the step, ``B`` sequences, ``E`` model width, ``F`` MLP width, ``H`` query heads, ``K``
KV heads, ``D`` head size, ``V`` vocabulary.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

_library = torch.library.Library("graphsrt", "DEF")

REFERENCE: dict[torch._ops.OpOverload, Callable] = {}
"""Operator -> its plain meaning in ATen operators, for every operator that has one."""


def _define(schema: str, fake: Callable, *, traced: bool = True) -> Callable:
    """Register an operator under its reference's name; ``traced`` references are what lowering inlines."""

    def register(reference: Callable) -> torch._ops.OpOverload:
        name = reference.__name__
        _library.define(f"{name}{schema}")
        _library.impl(name, reference, "CompositeExplicitAutograd")
        torch.library.register_fake(f"graphsrt::{name}", fake, lib=_library)
        overload = getattr(torch.ops.graphsrt, name).default
        if traced:
            REFERENCE[overload] = reference
        return overload

    return register


# -- operators of other packages ------------------------------------------------------------------------------------

ROWWISE: set[torch._ops.OpOverload] = set()
"""Operators whose rows (the last dimension) are computed each by itself, from whole rows."""

KERNELS: dict[torch._ops.OpOverload, dict[str, Callable]] = {}
"""Operator -> device type -> the kernel that runs there instead of the reference."""

_FILES = "GRAPHSRT_OPERATORS"
_namespaces: dict[str, torch.library.Library] = {}
_defined: dict[str, tuple[str, str]] = {}  # operator -> file and schema


def define(
    schema: str,
    *,
    namespace: str,
    placement: str,
    kernels: Mapping[str, Callable] | None = None,
    fake: Callable | None = None,
) -> Callable[[Callable], torch._ops.OpOverload]:
    """Decorator that makes an operator ``<namespace>::<name>`` of a plain function, its *reference*.

        @ops.define("(Tensor x, *, float limit) -> Tensor", namespace="mine", placement="pointwise")
        def capped(x, *, limit):
            return limit * torch.tanh(x / limit)

    ``schema``: argument types and result as PyTorch writes them; nothing may be written in place. The reference, in
    ATen operators, is the operator's definition: it runs on every device that has no kernel, and compiled code is made
    from it. ``kernels``: device type (``"cuda"``) -> a function with the reference's parameters that runs there
    instead. ``fake``: shapes and dtypes of the result; by default those of the reference.

    ``placement`` says how the operator treats divided values: ``"pointwise"`` if each element of the result comes from
    the elements at its place (with broadcasting), ``"rowwise"`` if each row comes from the rows at its place, whole in
    the last dimension (a norm, a softmax); an argument with fewer dimensions than the result must be whole.

    Call it in a module that is imported, not in the script that is started: rank processes import that module to know
    the operator (``GRAPHSRT_OPERATORS`` tells them which). ValueError for a name or placement that cannot be.
    """
    if namespace in ("aten", "prim", "prims", "graphsrt") or not namespace.isidentifier():
        raise ValueError(f"an operator of your own needs a namespace of your own, not {namespace!r}")
    if placement not in ("pointwise", "rowwise"):
        raise ValueError(f'placement is "pointwise" or "rowwise", not {placement!r}')

    def register(reference: Callable) -> torch._ops.OpOverload:
        name = reference.__name__
        library = _namespaces.setdefault(namespace, torch.library.Library(namespace, "FRAGMENT"))
        origin = (str(Path(reference.__code__.co_filename).resolve()), schema)
        if _defined.get(f"{namespace}::{name}") == origin:  # the same file, loaded under another name
            return getattr(getattr(torch.ops, namespace), name).default
        if hasattr(getattr(torch.ops, namespace), name):
            raise ValueError(f"there is an operator {namespace}::{name} already")
        library.define(f"{name}{schema}", tags=(torch.Tag.pointwise,) if placement == "pointwise" else ())
        library.impl(name, reference, "CompositeExplicitAutograd")
        for device, kernel in (kernels or {}).items():
            library.impl(name, kernel, device.upper())
        torch.library.register_fake(f"{namespace}::{name}", fake or reference, lib=library)
        overload = getattr(getattr(torch.ops, namespace), name).default
        if overload._schema.is_mutable:
            raise ValueError(f"{namespace}::{name} writes its arguments; operators of a program do not")
        REFERENCE[overload] = reference
        KERNELS[overload] = dict(kernels or {})
        if placement == "rowwise":
            ROWWISE.add(overload)
        _defined[f"{namespace}::{name}"] = origin
        _tell_other_processes(reference)
        return overload

    return register


def register_kernel(target: torch._ops.OpOverload, device: str, kernel: Callable) -> None:
    """Let ``kernel`` run one of our own operators on a type of device, in place of the reference."""
    _library.impl(target._schema.name.removeprefix("graphsrt::"), kernel, device.upper())
    KERNELS.setdefault(target, {})[device] = kernel


def _tell_other_processes(reference: Callable) -> None:
    """Processes that we start inherit which modules define operators."""
    module, file = reference.__module__, str(Path(reference.__code__.co_filename).resolve())
    listed = json.loads(os.environ.get(_FILES) or "{}")
    if module != "__main__" and listed.get(module) != file:
        os.environ[_FILES] = json.dumps({**listed, module: file})


def import_operators() -> bool:
    """Import the modules whose operators the process that started this one has; True if any was new here."""
    found = False
    for module, file in json.loads(os.environ.get(_FILES) or "{}").items():
        if module in sys.modules or not os.path.exists(file):
            continue
        found = True
        try:
            spec = importlib.util.find_spec(module)
        except ImportError:
            spec = None
        if spec is not None and spec.origin is not None and str(Path(spec.origin).resolve()) == file:
            importlib.import_module(module)
            continue
        spec = importlib.util.spec_from_file_location(module, file)  # a file beside a script, not on our path
        assert spec is not None and spec.loader is not None, file
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
    return found


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which norms and softmax accumulate: float32, or float64 where the model is float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# -- attention ------------------------------------------------------------------------------------------------------


@_define(
    "(Tensor q, Tensor k, Tensor v, *, int layer_id, float scale, int? sliding_window=None, float? softcap=None, "
    "Tensor? sinks=None, Tensor? alibi_slopes=None, int? chunk_size=None) -> Tensor",
    lambda q, k, v, **_: q.new_empty((q.shape[0], q.shape[1], v.shape[2])),
    traced=False,
)
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layer_id: int,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    chunk_size: int | None = None,
) -> torch.Tensor:
    """Causal attention of one sequence, ``q [T, H, D]``, ``k [T, K, D]``, ``v [T, K, Dv]`` -> ``[T, H, Dv]``.

    The softmax is in float32 or wider.
    ``sliding_window``: a token sees itself and the ``sliding_window - 1`` tokens before it. ``softcap``: scores become
    ``softcap·tanh(score / softcap)``. ``sinks [H]``: one more score per head that takes probability and has no value.
    ``alibi_slopes [H]``: ``slope · (key position - query position)`` joins a score after any cap (ALiBi, Press et al.
    2022). ``chunk_size``: a token sees only what is in its own chunk of positions ``[n·chunk_size, (n+1)·chunk_size)``.
    """
    tokens, heads, _ = q.shape
    group = heads // k.shape[1]
    wide = compute_dtype(q.dtype)
    queries, keys = q.to(wide), k.to(wide).repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    index = torch.arange(tokens, device=q.device)
    hidden = index[None, :] > index[:, None]
    if sliding_window is not None:
        hidden = hidden | (index[None, :] <= index[:, None] - sliding_window)
    if chunk_size is not None:
        hidden = hidden | (index[None, :] // chunk_size != index[:, None] // chunk_size)
    if alibi_slopes is not None:
        scores = scores + alibi_slopes.to(wide)[:, None, None] * (index[None, :] - index[:, None])
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        extra = sinks.to(wide)[:, None, None].expand(heads, tokens, 1)
        scores = torch.cat([scores, extra], -1)
    probabilities = scores.softmax(-1)[..., :tokens]
    out = torch.einsum("hqk,khd->qhd", probabilities, v.to(wide).repeat_interleave(group, 1))
    return out.to(q.dtype).contiguous()  # as the shape function promises


def value_size(kv_pool: torch.Tensor, head_size: int) -> int:
    """Head size of the values in a pool ``[L, 2, S, K, D]`` or ``[L, 1, S, K, D + Dv]``; ``head_size`` is D."""
    return kv_pool.shape[4] if kv_pool.shape[1] == 2 else kv_pool.shape[4] - head_size


@_define(
    "(Tensor q, Tensor? k, Tensor? v, Tensor(a!) kv_pool, Tensor req_to_token, Tensor req_pool_indices, "
    "Tensor seq_lens, Tensor query_start_loc, Tensor out_cache_loc, *, int layer_id, int? kv_layer=None, float scale, "
    "int? sliding_window=None, float? softcap=None, Tensor? sinks=None, Tensor? alibi_slopes=None, "
    "int? chunk_size=None, Tensor? k_scale=None, Tensor? v_scale=None) -> Tensor",
    lambda q, k, v, kv_pool, *batch, **_: q.new_empty((q.shape[0], q.shape[1], value_size(kv_pool, q.shape[2]))),
    traced=False,
)
def radix_attention(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    kv_pool: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    out_cache_loc: torch.Tensor,
    *,
    layer_id: int,
    kv_layer: int | None = None,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    chunk_size: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write ``k``, ``v`` into the paged pool, then attend every new token to its own sequence's cached keys.

    ``kv_layer`` is the place in the pool of the keys that layer ``layer_id`` reads, where these numbers differ: layers
    of another shape have a pool of their own, and a layer without ``k`` and ``v`` reads those of an earlier one.
    See :func:`graphsrt.lowering.kernels.radix_attention.radix_attention` for shapes; this is its operator form.
    """
    from graphsrt.lowering.kernels.radix_attention import radix_attention as kernel

    return kernel(
        q, k, v, kv_pool, req_to_token, req_pool_indices, seq_lens, query_start_loc, out_cache_loc,
        layer_id=layer_id, kv_layer=kv_layer, scale=scale, sliding_window=sliding_window, softcap=softcap,
        sinks=sinks, alibi_slopes=alibi_slopes, chunk_size=chunk_size, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip


@_define(
    "(Tensor k, Tensor v, Tensor(a!) kv_pool, Tensor out_cache_loc, *, int layer_id, int? kv_layer=None, "
    "Tensor? k_scale=None, Tensor? v_scale=None) -> ()",
    lambda k, v, kv_pool, out_cache_loc, **_: None,
    traced=False,
)
def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_pool: torch.Tensor,
    out_cache_loc: torch.Tensor,
    *,
    layer_id: int,
    kv_layer: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Write ``k [T, K, D]``, ``v [T, K, Dv]`` to the slots ``out_cache_loc [T]`` of the pool's layer ``kv_layer``; None
    is ``layer_id``. Slot -1 is skipped. An FP8 pool holds ``k / k_scale`` and ``v / v_scale``."""
    from graphsrt.lowering.kernels.radix_attention import kv_write as kernel

    kernel(k, v, kv_pool, out_cache_loc, layer_id, kv_layer, k_scale, v_scale)


ATTENTIONS: set[torch._ops.OpOverload] = {attention, radix_attention}
"""The operators through which tokens see each other."""


# -- norms, rope, gated activations ---------------------------------------------------------------------------------


def normed_like(x: torch.Tensor, weight: torch.Tensor, cast: str) -> torch.Tensor:
    """Shape and dtype of an RMS norm's result. ValueError if ``weight`` is not a vector as long as ``x`` is wide."""
    if weight.dim() != 1 or weight.shape[0] != x.shape[-1]:
        raise ValueError(f"a norm of {list(x.shape)} with a weight of {list(weight.shape)}")
    return x.new_empty(x.shape, dtype=x.dtype if cast == "after_weight" else torch.promote_types(x.dtype, weight.dtype))


@_define(
    "(Tensor x, Tensor weight, *, float eps, str cast, float offset=0.0) -> Tensor",
    lambda x, weight, *, eps, cast, offset=0.0: normed_like(x, weight, cast),
)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float, cast: str, offset: float = 0.0) -> torch.Tensor:
    """Root-mean-square norm over the last dimension (Zhang & Sennrich 2019), accumulated in float32 or wider.

    ``cast="before_weight"``: ``weight · normed.to(x.dtype)`` (LLaMA); ``"after_weight"``: ``(normed · (offset +
    weight)).to(x.dtype)`` (Gemma, with ``offset=1.0``). The two round differently in bf16.
    """
    wide = x.to(compute_dtype(x.dtype))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if cast == "before_weight":
        return weight * normed.to(x.dtype)
    scale = weight.to(wide.dtype)
    if offset:
        scale = scale + offset
    return (normed * scale).to(x.dtype)


@_define(
    "(Tensor x, Tensor residual, Tensor weight, *, float eps, str cast, float offset=0.0) -> (Tensor, Tensor)",
    lambda x, residual, weight, *, eps, cast, offset=0.0: (
        normed_like(x, weight, cast),
        residual.new_empty(residual.shape),
    ),
)
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float, cast: str, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """``total = residual + x``; returns ``(rms_norm(total), total)``. The sum is rounded to its dtype first."""
    total = residual + x
    return REFERENCE[rms_norm](total, weight, eps=eps, cast=cast, offset=offset), total


@_define(
    "(Tensor x, Tensor positions, Tensor table, *, bool interleaved=False) -> Tensor",
    lambda x, positions, table, *, interleaved=False: x.new_empty(x.shape),
)
def rope(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """Rotary position embedding (Su et al. 2021) of ``x [T, heads, D]`` at ``positions [T]``.

    ``table [max_positions, 2·n]`` holds cosines then sines; the first ``2·n`` channels of each head are rotated, the
    rest pass through. Pairs are channels ``(i, i + n)``, or ``(2i, 2i + 1)`` when ``interleaved``.
    """
    n = table.shape[1] // 2
    row = table[positions]
    cos, sin = row[:, None, :n], row[:, None, n:]
    if interleaved:
        a, b = x[..., 0 : 2 * n : 2], x[..., 1 : 2 * n : 2]
        rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = x[..., :n], x[..., n : 2 * n]
        rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return rotated if 2 * n == x.shape[-1] else torch.cat([rotated, x[..., 2 * n :]], -1)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def _gated_like(gate: torch.Tensor, up: torch.Tensor, *, act: str) -> torch.Tensor:
    if gate.shape != up.shape:
        raise ValueError(f"a gated unit of {list(gate.shape)} and {list(up.shape)}")
    return gate.new_empty(gate.shape)


@_define("(Tensor gate, Tensor up, *, str act) -> Tensor", _gated_like)
def glu(gate: torch.Tensor, up: torch.Tensor, *, act: str) -> torch.Tensor:
    """Gated linear unit: ``act(gate) · up`` (Shazeer 2020); ``act`` is a key of :data:`ACTIVATIONS`."""
    return ACTIVATIONS[act](gate) * up


@_define(
    "(Tensor gate_up) -> Tensor",
    lambda gate_up: gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2)),
)
def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) · up`` of the two halves of the last dimension: ``[T, 2F] -> [T, F]``."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


# -- vocabulary -----------------------------------------------------------------------------------------------------


@_define(
    "(Tensor tokens, Tensor weight, Tensor start) -> Tensor",
    lambda tokens, weight, start: weight.new_empty((*tokens.shape, weight.shape[1])),
)
def vocab_embedding(tokens: torch.Tensor, weight: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Rows of a vocabulary slice: ``weight [V_local, E]`` holds ids from ``start`` (int64 ``[1]``) on.

    Tokens of other slices give zeros, so the sum over ranks is the embedding. Source: Megatron-LM (Shoeybi 2019).
    """
    local = tokens - start
    mine = (local >= 0) & (local < weight.shape[0])
    rows = F.embedding(torch.where(mine, local, 0), weight)
    return torch.where(mine[..., None], rows, 0.0)


# -- collectives ----------------------------------------------------------------------------------------------------


def _collective(name: str, schema: str, fake: Callable) -> torch._ops.OpOverload:
    def refuse(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError(f"graphsrt::{name} is executed by the runner of a program, not called directly")

    refuse.__name__ = name
    overload = _define(schema, fake, traced=False)(refuse)
    COLLECTIVES.add(overload)
    return overload


COLLECTIVES: set[torch._ops.OpOverload] = set()
"""The operators that move data between ranks. ``axis`` names a mesh axis; ``size`` is its number of ranks."""

all_reduce = _collective(
    "all_reduce", "(Tensor x, *, str axis, str op='sum') -> Tensor", lambda x, *, axis, op="sum": x.new_empty(x.shape)
)


def _resized(x: torch.Tensor, dim: int, length: Any) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] = length
    return x.new_empty(shape)


def _gathered(x: torch.Tensor, *, dim: int, axis: str, size: int, rows_of: torch.Tensor | None = None) -> torch.Tensor:
    return _resized(x, dim, x.shape[dim] * size if rows_of is None else rows_of.shape[0])


def _block(x: torch.Tensor, *, dim: int, axis: str, size: int) -> torch.Tensor:
    """Ranks get equal blocks; what is missing at the end is padded."""
    return _resized(x, dim, (x.shape[dim] + size - 1) // size)


all_gather = _collective(
    "all_gather", "(Tensor x, *, int dim, str axis, int size, Tensor? rows_of=None) -> Tensor", _gathered
)
"""All ranks' blocks, one after the other. ``rows_of``: as many of them as this has rows; the rest was padding."""
reduce_scatter = _collective("reduce_scatter", "(Tensor x, *, int dim, str axis, int size) -> Tensor", _block)
take_own = _collective("take_own", "(Tensor x, *, int dim, str axis, int size) -> Tensor", _block)

AFTER_ALL_REDUCE: dict[torch._ops.OpOverload, torch._ops.OpOverload] = {}
"""Collective that begins with an all_reduce of its first argument -> the operator that gets the sum in its place."""


def kind_of_collective(target: Any) -> Any:
    """What a collective does on the wire: all_reduce, all_gather, reduce_scatter or take_own."""
    return all_reduce if target in AFTER_ALL_REDUCE else target


def count_collectives(targets: Iterable[Any]) -> tuple[int, int]:
    """How many of these operators are reductions, and how many are gathers."""
    kinds = [kind_of_collective(target) for target in targets]
    return kinds.count(all_reduce) + kinds.count(reduce_scatter), kinds.count(all_gather)


# -- families in files of their own: they register themselves ---------------------------------------------------------

from graphsrt.ops_experts import moe_experts as moe_experts  # noqa: E402
from graphsrt.ops_fp8 import fp8_linear as fp8_linear  # noqa: E402
from graphsrt.ops_fp8 import fp8_scale as fp8_scale  # noqa: E402
from graphsrt.ops_fp8 import quantize_fp8 as quantize_fp8  # noqa: E402
from graphsrt.ops_fused import add_layer_norm as add_layer_norm  # noqa: E402
from graphsrt.ops_fused import all_reduce_add_layer_norm as all_reduce_add_layer_norm  # noqa: E402
from graphsrt.ops_fused import all_reduce_add_rms_norm as all_reduce_add_rms_norm  # noqa: E402
from graphsrt.ops_fused import qk_norm_rope as qk_norm_rope  # noqa: E402
from graphsrt.ops_fused import rope_kv_write as rope_kv_write  # noqa: E402
from graphsrt.ops_fused_fp8 import add_rms_norm_quant as add_rms_norm_quant  # noqa: E402
from graphsrt.ops_fused_fp8 import add_rms_norm_static_quant as add_rms_norm_static_quant  # noqa: E402
from graphsrt.ops_fused_fp8 import all_reduce_add_rms_norm_quant as all_reduce_add_rms_norm_quant  # noqa: E402
from graphsrt.ops_fused_fp8 import (  # noqa: E402
    all_reduce_add_rms_norm_static_quant as all_reduce_add_rms_norm_static_quant,
)
from graphsrt.ops_fused_fp8 import rms_norm_quant as rms_norm_quant  # noqa: E402
from graphsrt.ops_fused_fp8 import rms_norm_static_quant as rms_norm_static_quant  # noqa: E402
from graphsrt.ops_fused_fp8 import silu_mul_quant as silu_mul_quant  # noqa: E402
from graphsrt.ops_fused_fp8 import silu_mul_static_quant as silu_mul_static_quant  # noqa: E402
from graphsrt.ops_integer import int4_linear as int4_linear  # noqa: E402
from graphsrt.ops_integer import int8_linear as int8_linear  # noqa: E402
from graphsrt.ops_latent import latent_attention as latent_attention  # noqa: E402
from graphsrt.ops_latent import radix_latent_attention as radix_latent_attention  # noqa: E402
from graphsrt.ops_norms import l2_norm as l2_norm  # noqa: E402

ATTENTIONS |= {latent_attention, radix_latent_attention}

from graphsrt.lowering.kernels import rms_norm as _rms_norm_kernels  # noqa: E402, F401  (registers itself)
from graphsrt.lowering.kernels import rope as _rope_kernels  # noqa: E402, F401  (registers itself)
from graphsrt.lowering.kernels import silu_mul as _silu_mul_kernels  # noqa: E402, F401  (registers itself)
