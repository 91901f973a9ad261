"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): its operators, part of :mod:`graphsrt.ops`.

Keys and values of all heads are linear in one *latent* vector for each token, and each key has a second part, with the
rotary embedding, that all heads share. So the latent and the shared part are all that must be remembered of a token.

Shape letters: ``L`` latent width, ``N`` size of a head's own (unrotated) key part, ``R`` size of the shared rotary
part, ``V`` size of a head's value; the others as in :mod:`graphsrt.ops`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from graphsrt.ops import _define, attention


def expand_latent(
    latent: torch.Tensor, k_rope: torch.Tensor, w_kv_b: torch.Tensor, heads: int, own_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys ``[T, H, N + R]`` and values ``[T, H, V]`` of all heads; arguments as in :func:`latent_attention`."""
    expanded = F.linear(latent, w_kv_b).unflatten(1, (heads, -1))
    keys = torch.cat([expanded[..., :own_size], k_rope[:, None].expand(-1, heads, -1)], -1)
    return keys, expanded[..., own_size:]


@_define(
    "(Tensor q_nope, Tensor q_rope, Tensor latent, Tensor k_rope, Tensor w_kv_b, *, int layer_id, float scale, "
    "int? sliding_window=None, float? softcap=None, Tensor? sinks=None) -> Tensor",
    lambda q_nope, q_rope, latent, k_rope, w_kv_b, **_: q_nope.new_empty(
        (q_nope.shape[0], q_nope.shape[1], w_kv_b.shape[0] // q_nope.shape[1] - q_nope.shape[2])
    ),
    traced=False,
)
def latent_attention(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    w_kv_b: torch.Tensor,
    *,
    layer_id: int,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of one sequence to keys and values that are expanded from latents -> ``[T, H, V]``.

    ``q_nope [T, H, N]``, ``q_rope [T, H, R]``; ``latent [T, L]`` (normed), ``k_rope [T, R]`` (rotated) are the same for
    all heads. ``w_kv_b [H·(N + V), L]`` holds, for each head, N rows that make its key's own part and V that make its
    value. Keys are ``[own part | k_rope]``; the rest is :func:`graphsrt.ops.attention`.
    """
    keys, values = expand_latent(latent, k_rope, w_kv_b, q_nope.shape[1], q_nope.shape[2])
    return attention(
        torch.cat([q_nope, q_rope], -1), keys, values,
        layer_id=layer_id, scale=scale, sliding_window=sliding_window, softcap=softcap, sinks=sinks,
    )  # fmt: skip


@_define(
    "(Tensor q_latent, Tensor q_rope, Tensor? latent, Tensor? k_rope, Tensor(a!) kv_pool, Tensor req_to_token, "
    "Tensor req_pool_indices, Tensor seq_lens, Tensor query_start_loc, Tensor out_cache_loc, *, int layer_id, "
    "int? kv_layer=None, float scale, int? sliding_window=None, float? softcap=None, Tensor? sinks=None) -> Tensor",
    lambda q_latent, q_rope, latent, k_rope, kv_pool, *batch, **_: q_latent.new_empty(q_latent.shape),
    traced=False,
)
def radix_latent_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor | None,
    k_rope: torch.Tensor | None,
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
) -> torch.Tensor:
    """Write latents into the paged pool, then attend every new token to its own sequence's cached latents.

    See :func:`graphsrt.lowering.kernels.radix_latent_attention.radix_latent_attention` for shapes; this is its
    operator form.
    """
    from graphsrt.lowering.kernels.radix_latent_attention import radix_latent_attention as kernel

    return kernel(
        q_latent, q_rope, latent, k_rope, kv_pool, req_to_token, req_pool_indices, seq_lens, query_start_loc,
        out_cache_loc, layer_id=layer_id, kv_layer=kv_layer, scale=scale, sliding_window=sliding_window,
        softcap=softcap, sinks=sinks,
    )  # fmt: skip
