"""Paged attention on the CPU: checks the arguments and calls the compiled kernel (radix_attention.cpp)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from graphsrt.errors import explain
from graphsrt.lowering.kernels import team
from graphsrt.lowering.kernels.build import load_extension

LAYOUTS = "[L, 2, S, K, D] or [L, 1, S, K, D + Dv]"
_DTYPE_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}  # DType in the source
POOLS = {
    torch.float32: "float", torch.float64: "double", torch.bfloat16: "BFloat16", torch.float16: "Half",
    torch.float8_e4m3fn: "Float8",
}  # fmt: skip

_Layout = tuple[int, ...]
_Write = tuple[tuple[int, ...], _Layout, _Layout, int, tuple[float, ...]]
"""All but the addresses of k and v, in the order of ``read_write_args`` in the source: what comes before them, the
strides of each, their dtype, their scales."""


SOURCE = Path(__file__).with_name("radix_attention.cpp")


@cache
def kernel(pool: torch.dtype, wide: bool) -> ModuleType:
    """The kernel for pools of this dtype, which computes in float32 or, if ``wide``, in float64.

    The first call on a machine compiles it. Raises ``CompileError``.
    """
    team.load()
    return load_extension("radix_attention", SOURCE, flags(pool, wide))


def flags(pool: torch.dtype, wide: bool) -> list[str]:
    """The compiler's, for this kernel; see there."""
    return [f"-DPOOL={POOLS[pool]}", f"-DSUM={'double' if wide else 'float'}"]


def is_wide(*dtypes: torch.dtype) -> bool:
    """Whether attention of queries and pools of these dtypes is computed in float64."""
    return torch.float64 in dtypes


def kv_write(
    k: Tensor,
    v: Tensor,
    kv_pool: Tensor,
    out_cache_loc: Tensor,
    layer_id: int,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """As ``kv_write`` of this package, for CPU tensors. Raises ``ValueError``."""
    if k.dim() != 3:
        raise _wrong("kv_write", "k", "[T, K, D]", k)
    scales = (k_scale, v_scale)
    write, _ = _write_args("kv_write", k.shape[0], k.shape[2], k, v, kv_pool, out_cache_loc, layer_id, scales)
    before, k_layout, v_layout, dtype, given_scales = write
    code = kernel(kv_pool.dtype, is_wide(kv_pool.dtype))
    code.kv_write(*before, k.data_ptr(), *k_layout, v.data_ptr(), *v_layout, dtype, *given_scales)


def radix_attention(q: Tensor, k: Tensor | None, v: Tensor | None, *others: Tensor, **how: Any) -> Tensor:
    """As ``radix_attention`` of this package, for CPU tensors. Raises ``ValueError``."""
    return bind(q, k, v, *others, **how)(*(x for x in (q, k, v) if x is not None))


def bind(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    kv_pool: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    out_cache_loc: Tensor,
    *,
    layer_id: int,
    kv_layer: int | None = None,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    chunk_size: int | None = None,
    causal: bool = True,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Bound:
    """Check everything once: a function of q, k and v like these (of q alone if there are no others), in the layouts of
    these, that reads all other tensors as they are by then. The caller keeps them where they are. What it returns is
    the same tensor each time.

    Raises ``ValueError``.
    """
    op = "radix_attention"
    layer = layer_id if kv_layer is None else kv_layer
    if q.dim() != 3 or q.dtype not in _DTYPE_CODES or not q.is_cpu:
        raise _wrong(op, "q", "a [T, H, D] CPU tensor of " + _dtype_names(), q)
    num_tokens, num_heads, head_size = q.shape
    if num_tokens and q.stride(2) != 1:
        raise _wrong(op, "q", "last dimension of stride 1", q)
    scales = (k_scale, v_scale)
    write, value_size = _write_args(op, num_tokens, head_size, k, v, kv_pool, out_cache_loc, layer, scales)
    if num_heads == 0 or num_heads % kv_pool.shape[3]:
        raise _wrong(op, "q", f"[T, a multiple of {kv_pool.shape[3]} heads, D], as kv_pool has it", q)
    if {q.dtype, kv_pool.dtype} == {torch.float16, torch.float64}:
        raise _wrong(op, "kv_pool", f"a dtype that goes with q's {q.dtype}", kv_pool)
    if req_to_token.dim() != 2 or req_to_token.dtype != torch.int32 or not req_to_token.is_cpu:
        raise _wrong(op, "req_to_token", "an int32 [max_reqs, max_ctx] CPU tensor", req_to_token)
    if req_to_token.stride(1) != 1:
        raise _wrong(op, "req_to_token", "rows of stride 1", req_to_token)
    if seq_lens.dim() != 1:
        raise _wrong(op, "seq_lens", "an int64 [B] tensor", seq_lens)
    num_seqs = seq_lens.shape[0]
    _check_indices(op, "seq_lens", seq_lens, num_seqs)
    _check_indices(op, "req_pool_indices", req_pool_indices, num_seqs)
    _check_indices(op, "query_start_loc", query_start_loc, num_seqs + 1)
    if not causal:
        raise ValueError(f"{op} is causal only")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"{op}: sliding_window is {sliding_window}, expected at least 1, or None")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"{op}: chunk_size is {chunk_size}, expected at least 1, or None")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{op}: softcap is {softcap}, expected a positive number, or None")
    before, k_layout, v_layout, kv_dtype, given_scales = write
    q_layout = (_DTYPE_CODES[q.dtype], q.stride(0), q.stride(1), num_heads, num_seqs)
    between = (
        *q_layout,
        req_to_token.data_ptr(),
        req_to_token.shape[0],
        req_to_token.shape[1],
        req_to_token.stride(0),
        req_pool_indices.data_ptr(),
        seq_lens.data_ptr(),
        query_start_loc.data_ptr(),
        *_per_head(op, "sinks", sinks, num_heads),
        *_per_head(op, "alibi_slopes", alibi_slopes, num_heads),
    )
    after = (sliding_window or 0, chunk_size or 0, float(scale), float(softcap or 0.0))
    out = torch.empty(num_tokens, num_heads, value_size, dtype=q.dtype)
    k_at, v_at = (0, 0) if k is None or v is None else (k.data_ptr(), v.data_ptr())
    code = kernel(kv_pool.dtype, is_wide(q.dtype, kv_pool.dtype))
    bound = code.bind(
        *before, k_at, *k_layout, v_at, *v_layout, kv_dtype, *given_scales,
        q.data_ptr(), *between, out.data_ptr(), *after,
    )  # fmt: skip
    return Bound(code, bound, out)


class Bound:
    """Attention whose arguments are settled but for where q, k and v lie; see :func:`bind`."""

    def __init__(self, code: ModuleType, bound: Any, out: Tensor):
        self._code, self._bound, self.out, self._call = code, bound, out, code.call

    def __call__(self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        self._call(self._bound, q.data_ptr(), 0 if k is None else k.data_ptr(), 0 if v is None else v.data_ptr())
        return self.out

    def native(self) -> tuple[int, int]:
        """For ``kernels.replay.Replay.add_kernel``, for as long as this object is there."""
        return self._code.native(self._bound)


def _write_args(
    op: str,
    num_tokens: int,
    head_size: int,
    k: Tensor | None,
    v: Tensor | None,
    kv_pool: Tensor,
    out_cache_loc: Tensor,
    layer_id: int,
    scales: tuple[Tensor | None, Tensor | None],
) -> tuple[_Write, int]:
    """Checked; and the head size of values."""
    if kv_pool.dim() != 5 or kv_pool.dtype not in POOLS or not kv_pool.is_cpu or kv_pool.shape[1] not in (1, 2):
        raise _wrong(op, "kv_pool", f"an {LAYOUTS} CPU tensor of " + _dtype_names(POOLS), kv_pool)
    num_layers, parts, num_slots, num_kv_heads, width = kv_pool.shape
    layer_stride, kv_stride, slot_stride, head_stride, last_stride = kv_pool.stride()
    if last_stride != 1 or num_kv_heads == 0 or width == 0:
        raise _wrong(op, "kv_pool", "K and D above 0, last dimension of stride 1", kv_pool)
    if head_size != width if parts == 2 else not 0 < head_size < width:
        raise _wrong(op, "kv_pool", f"an {LAYOUTS} tensor with keys of D = {head_size}", kv_pool)
    value_size = width if parts == 2 else width - head_size
    if not 0 <= layer_id < num_layers:
        raise ValueError(f"{op}: layer_id is {layer_id}, expected 0 to {num_layers - 1} (kv_pool's layers)")
    _check_indices(op, "out_cache_loc", out_cache_loc, num_tokens)
    size = kv_pool.element_size()
    pool_k = kv_pool.data_ptr() + layer_id * layer_stride * size
    pool_v = pool_k + (kv_stride if parts == 2 else head_size) * size
    where: tuple[int, ...] = (num_tokens, num_kv_heads, head_size, value_size, num_slots, pool_k, pool_v)
    where += (slot_stride, head_stride, out_cache_loc.data_ptr())
    given = tuple(1.0 if scale is None else float(scale) for scale in scales)
    if k is None and v is None:
        return (where, (0, 0), (0, 0), 0, given), value_size
    if k is None or v is None:
        raise ValueError(f"{op}: k and v must be given together, or neither")
    for name, x, last in (("k", k, head_size), ("v", v, value_size)):
        if x.shape != (num_tokens, num_kv_heads, last):
            raise _wrong(op, name, f"[{num_tokens}, {num_kv_heads}, {last}]", x)
        if x.dtype not in _DTYPE_CODES or x.dtype != k.dtype or not x.is_cpu or (num_tokens and x.stride(2) != 1):
            raise _wrong(op, name, "a CPU tensor, k and v of one dtype, last dimension of stride 1", x)
    return (where, k.stride()[:2], v.stride()[:2], _DTYPE_CODES[k.dtype], given), value_size


def _per_head(op: str, name: str, x: Tensor | None, num_heads: int) -> tuple[int, int]:
    """Address and dtype code of one number per query head; 0, 0 for None."""
    if x is None:
        return 0, 0
    if x.shape != (num_heads,) or x.dtype not in _DTYPE_CODES or not x.is_contiguous() or not x.is_cpu:
        raise _wrong(op, name, f"a contiguous [{num_heads}] CPU tensor of " + _dtype_names(), x)
    return x.data_ptr(), _DTYPE_CODES[x.dtype]


def _check_indices(op: str, name: str, x: Tensor, length: int) -> None:
    if x.dtype != torch.int64 or x.shape != (length,) or not x.is_contiguous() or not x.is_cpu:
        raise _wrong(op, name, f"a contiguous int64 [{length}] CPU tensor", x)


def _dtype_names(codes: Iterable[torch.dtype] = _DTYPE_CODES) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in codes)


def _wrong(op: str, name: str, expected: str, x: Tensor) -> ValueError:
    got = f"{x.dtype} {list(x.shape)}, strides {list(x.stride())}, on {x.device}"
    return ValueError(explain(f"{op} cannot use {name}", expected=expected, got=got))
