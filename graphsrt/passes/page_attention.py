"""page_attention: attention over the tokens of one sequence becomes attention over a paged pool of cached keys.

    attention(q, k, v, layer_id=3, scale=…)
    → radix_attention(q, k, v, kv_pool, req_to_token, …, layer_id=3, scale=…)

The program gains the inputs of a ``ForwardBatch``: which sequences the tokens belong to, where their keys and values
are written, and the pool ``[layers, 2, slots, KV heads, D]`` itself, the only memory that a program writes.

Needs: attention operators with one KV head count and head size in all layers.
Leaves: ``graphsrt::radix_attention``; steps may mix sequences, prefill chunks and decode rows.
Numerics: exact up to the kernel's order of summation.
Source: PagedAttention (Kwon et al. 2023); token-granular tables as in SGLang's RadixAttention (Zheng et al. 2024).
"""

from __future__ import annotations

import torch
import torch.fx as fx

from graphsrt import ops
from graphsrt.errors import CompileError, explain
from graphsrt.passes.page_latent import page_latent, pool_size
from graphsrt.placement import R, Shard
from graphsrt.program import Input, NearMiss, Program, arguments

BATCH_INPUTS: dict[str, Input] = {
    "req_to_token": Input(("num_reqs", "max_context"), torch.int32, "forward_batch.req_to_token"),
    "req_pool_indices": Input(("B",), torch.int64, "forward_batch.req_pool_indices"),
    "seq_lens": Input(("B",), torch.int64, "forward_batch.seq_lens"),
    "query_start_loc": Input(("B1",), torch.int64, "forward_batch.query_start_loc"),
    "out_cache_loc": Input(("T",), torch.int64, "forward_batch.out_cache_loc"),
}
"""``num_reqs``, ``max_context``, ``slots``: sizes of the engine's tables; ``B`` sequences, ``B1`` = B + 1."""


def page_attention(
    program: Program, *, kv_dtype: torch.dtype | None = None, near_misses: list[NearMiss] | None = None
) -> int:
    """Turn every attention into its paged form; the count is of attention operators. ``kv_dtype``: of the pool."""
    nodes, latents = program.calls(ops.attention), program.calls(ops.latent_attention)
    if not nodes:
        return _page_latents(program, latents, kv_dtype) if latents else 0
    if latents:
        raise CompileError(
            explain(
                "some layers remember keys and values, others latents; one pool cannot hold both",
                where=f"{nodes[0].name} and {latents[0].name}",
                hint='compile with without=["recognize_latent_attention"], or see why that pass left layers out',
            )
        )
    shapes = {(tuple(program.shape(arguments(n)["k"])[1:]), tuple(program.shape(arguments(n)["v"])[1:])) for n in nodes}
    if len(shapes) != 1 or len({s for pair in shapes for s in pair}) != 1:
        raise CompileError(
            explain(
                "layers differ in KV heads or head size, or keys from values; one pool cannot hold them",
                where=program.name,
                expected="[T, K, D] of the same K and D for keys and values of all layers",
                got=", ".join(sorted(f"k {list(k)} v {list(v)}" for k, v in shapes)),
            )
        )
    ((kv_heads, head_size),) = {pair[0] for pair in shapes}
    layers = 1 + max(arguments(node)["layer_id"] for node in nodes)
    first = arguments(nodes[0])["k"]
    place = first.meta.get("placement")
    pool_shape = (layers, 2, "slots", kv_heads, head_size)
    pool, batch = _add_inputs(program, pool_shape, kv_dtype or first.meta["val"].dtype, place is not None)
    if isinstance(place, Shard):
        pool.meta["placement"] = Shard(3, place.layout)
    for node in nodes:
        args = arguments(node)
        keywords = {name: value for name, value in args.items() if name not in ("q", "k", "v") and value is not None}
        paged = program.call(
            ops.radix_attention, args["q"], args["k"], args["v"], pool, *batch,
            name=f"{node.name}.paged", before=node, like=node, **keywords,
        )  # fmt: skip
        paged.meta["made_by"] = (*paged.meta["made_by"], "page_attention")
        if "placement" in node.meta:
            paged.meta["placement"] = node.meta["placement"]
        program.replace(node, paged)
    program.constants |= {"num_kv_heads": int(kv_heads), "head_size": int(head_size)}  # on one rank
    program.infer()
    return len(nodes)


def _page_latents(program: Program, nodes: list[fx.Node], kv_dtype: torch.dtype | None) -> int:
    """Every rank remembers all latents: heads share them, whichever rank they are on."""
    layers = 1 + max(arguments(node)["layer_id"] for node in nodes)
    latent = arguments(nodes[0])["latent"]
    shape = (layers, "slots", pool_size(program, nodes))
    pool, batch = _add_inputs(program, shape, kv_dtype or latent.meta["val"].dtype, "placement" in latent.meta)
    for node in nodes:
        page_latent(program, node, pool, batch)
    program.infer()
    return len(nodes)


def _add_inputs(
    program: Program, pool_shape: tuple[int | str, ...], dtype: torch.dtype, sharded: bool
) -> tuple[fx.Node, list[fx.Node]]:
    pool = program.add_input("kv_pool", Input(pool_shape, dtype, "kv_pool"))
    batch = [program.add_input(name, item) for name, item in BATCH_INPUTS.items()]
    if sharded:
        for node in (pool, *batch):
            node.meta["placement"] = R
    return pool, batch


def _expected(program: Program) -> int:
    return len(program.calls(ops.attention, ops.latent_attention))


page_attention.expect = _expected  # type: ignore[attr-defined]
