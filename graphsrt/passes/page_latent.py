"""The part of :mod:`graphsrt.passes.page_attention` that pages latent attention, with its up-projections absorbed.

    latent_attention(q_nope, q_rope, latent, k_rope, w_kv_b, layer_id=3, scale=…)
    → q_latent = q_nope @ w_uk                                          [T, H, N] @ [H, N, L]
      attended = radix_latent_attention(q_latent, q_rope, latent, k_rope, kv_pool, …, layer_id=3, scale=…)
      attended @ w_uv                                                   [T, H, L] @ [H, L, V]

``q · (w_uk c) = (w_ukᵀ q) · c``: queries are taken to the latent once, instead of all cached latents to the heads. So a
step reads, of each cached token, the ``L + R`` numbers that all heads share, as one KV head whose values are the first
``L`` numbers of its keys. Prefill does the same: it costs more products there, but no memory for expanded keys.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from graphsrt import ops
from graphsrt.placement import Shard
from graphsrt.program import Program, arguments, aten


def page_latent(
    program: Program, node: fx.Node, pool: fx.Node, batch: list[fx.Node], *, writes: bool, **place: int
) -> None:
    """Replace one latent attention by its absorbed and paged form; one that ``writes`` nothing reads what is there.
    ``place``: ``kv_layer``, where it is not the layer's number."""
    args = arguments(node)
    sharding = node.meta.get("placement")
    module = node.meta.get("module", "")

    def call(target: Any, *given: Any, role: str, dim: int, **keywords: Any) -> fx.Node:
        """``dim``: where the result has its heads."""
        made = program.call(
            target, *given, name=f"{module}.{role}" if module else role, before=node, like=node, **keywords
        )
        made.meta["made_by"] = (*made.meta["made_by"], "page_attention")
        if sharding is not None:
            made.meta["placement"] = Shard(dim, sharding.layout) if isinstance(sharding, Shard) else sharding
        program.infer([made])
        return made

    _, heads, own = program.shape(args["q_nope"])
    rows, width = program.shape(args["w_kv_b"])
    both = int(rows) // int(heads)
    w_kv_b = call(aten.view.default, args["w_kv_b"], [heads, both, width], role="w_kv_b", dim=0)
    w_uk = call(aten.slice.Tensor, w_kv_b, 1, 0, own, role="w_uk", dim=0)
    w_uv = call(aten.slice.Tensor, w_kv_b, 1, own, both, role="w_uv", dim=0)

    q = call(aten.transpose.int, args["q_nope"], 0, 1, role="q_heads", dim=0)
    q = call(aten.bmm.default, q, w_uk, role="q_absorbed", dim=0)
    q = call(aten.transpose.int, q, 0, 1, role="q_latent", dim=1)
    keywords = {k: args[k] for k in ("scale", "sliding_window", "softcap", "sinks") if args[k] is not None}
    written = (args["latent"], args["k_rope"]) if writes else (None, None)
    out = call(
        ops.radix_latent_attention, q, args["q_rope"], *written, pool, *batch,
        role="attended", dim=1, layer_id=args["layer_id"], **place, **keywords,
    )  # fmt: skip
    out = call(aten.transpose.int, out, 0, 1, role="attended_heads", dim=0)
    w_uv = call(aten.transpose.int, w_uv, 1, 2, role="w_uv_transposed", dim=0)
    out = call(aten.bmm.default, out, w_uv, role="value_heads", dim=0)
    out = call(aten.transpose.int, out, 0, 1, role="values", dim=1)
    program.replace(node, call(aten.clone.default, out, memory_format=torch.contiguous_format, role="value", dim=1))
