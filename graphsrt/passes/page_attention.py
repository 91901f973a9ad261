"""page_attention: attention over the tokens of one sequence becomes attention over a paged pool of cached keys.

    attention(q, k, v, layer_id=3, scale=…)
    → radix_attention(q, k, v, kv_pool, req_to_token, …, layer_id=3, scale=…)

The program gains the inputs of a ``ForwardBatch``: which sequences the tokens belong to, where their keys and values
are written, and the pool ``[layers, 2, slots, KV heads, D]`` itself, the only memory that a program writes. Where
values have another head size than keys, a row holds both: ``[layers, 1, slots, KV heads, D + Dv]``.

Layers whose keys and values have another shape get a pool of their own, ``kv_pool_1`` and so on, whose slots are the
same tokens. A layer that attends to the very keys and values of an earlier one (Gemma-3n's and Gemma-4's last layers)
reads them there and writes nothing. Then ``kv_layer`` says where in its pool a layer's keys lie:

    → radix_attention(q, None, None, kv_pool_1, req_to_token, …, layer_id=7, kv_layer=0, scale=…)

A pool in FP8 (``kv_dtype=torch.float8_e4m3fn``) takes two scales for each layer, ``k_scale`` and ``v_scale``, which
``kv_scales`` gives as recipes; a layer that reads another's keys reads them by that one's scales.

Needs: nothing; a program without attention is left alone.
Leaves: ``graphsrt::radix_attention``; steps may mix sequences, prefill chunks and decode rows.
Numerics: exact up to the kernel's order of summation.
Source: PagedAttention (Kwon et al. 2023); token-granular tables as in SGLang's RadixAttention (Zheng et al. 2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.fx as fx

from graphsrt import ops
from graphsrt.errors import CompileError, explain
from graphsrt.passes.kv_layers import KVLayer, kv_layers
from graphsrt.passes.page_latent import page_latent
from graphsrt.placement import R, Shard
from graphsrt.program import Input, Program, Weight, arguments, where
from graphsrt.recipes import FP8, Recipe

BATCH_INPUTS: dict[str, Input] = {
    "req_to_token": Input(("num_reqs", "max_context"), torch.int32, "forward_batch.req_to_token"),
    "req_pool_indices": Input(("B",), torch.int64, "forward_batch.req_pool_indices"),
    "seq_lens": Input(("B",), torch.int64, "forward_batch.seq_lens"),
    "query_start_loc": Input(("B1",), torch.int64, "forward_batch.query_start_loc"),
    "out_cache_loc": Input(("T",), torch.int64, "forward_batch.out_cache_loc"),
}
"""``num_reqs``, ``max_context``, ``slots``: sizes of the engine's tables; ``B`` sequences, ``B1`` = B + 1."""


def page_attention(
    program: Program,
    *,
    kv_dtype: torch.dtype | None = None,
    kv_scales: Mapping[int, tuple[Recipe, Recipe]] | None = None,
) -> int:
    """Turn every attention into its paged form; the count is of attention operators.

    ``kv_dtype``: of the pools. ``kv_scales``: layer -> the scales of its keys and values, for FP8.
    """
    nodes = program.calls(ops.attention, ops.latent_attention)
    if not nodes:
        return 0
    layers = kv_layers(nodes)
    scales = _scales(program, layers, kv_scales or {}) if kv_dtype == FP8 else {}
    sharded = any("placement" in node.meta for node in nodes)
    pools = _add_pools(program, layers, kv_dtype)
    batch = [program.add_input(name, item) for name, item in BATCH_INPUTS.items()]
    if sharded:
        for node in batch:
            node.meta["placement"] = R
    # where each layer of the model has its keys in the one pool, nothing needs to be said
    plain = all(layer.index == arguments(node)["layer_id"] for node, layer in layers.items())
    for node, layer in layers.items():
        place: dict[str, Any] = {} if plain else {"kv_layer": layer.index}
        place |= scales.get(layer.writer, {})
        if node.target is ops.attention:
            _page(program, node, layer, pools[layer.pool], batch, place)
        else:
            page_latent(program, node, pools[layer.pool], batch, writes=layer.writer is node, **place)
    program.infer()
    if len(pools) == 1 and nodes[0].target is ops.attention:
        _, _, _, kv_heads, head_size = program.inputs["kv_pool"].shape
        program.constants |= {"num_kv_heads": int(kv_heads), "head_size": int(head_size)}  # on one rank
    return len(nodes)


def _scales(
    program: Program, layers: dict[fx.Node, KVLayer], given: Mapping[int, tuple[Recipe, Recipe]]
) -> dict[fx.Node, dict[str, fx.Node]]:
    """For each attention that writes, the weights that are its scales. CompileError where one is missing."""
    found: dict[fx.Node, dict[str, fx.Node]] = {}
    for writer in dict.fromkeys(layer.writer for layer in layers.values()):
        layer_id = arguments(writer)["layer_id"]
        if writer.target is not ops.attention:
            raise CompileError(explain("latents are not cached in FP8", where=f"{writer.name} {where(writer)}".strip()))
        if layer_id not in given:
            raise CompileError(
                explain("an FP8 cache needs scales of keys and values", where=f"{writer.name} {where(writer)}".strip(),
                        expected=f"two numbers for layer {layer_id}", got=f"layers {sorted(given)}")
            )  # fmt: skip
        place = R if "placement" in writer.meta else None
        found[writer] = {
            name: program.add_weight(f"layers.{layer_id}.{name}", Weight((1, 1), torch.float32, recipe, place))
            for name, recipe in zip(("k_scale", "v_scale"), given[layer_id])
        }
    return found


def _add_pools(program: Program, layers: dict[fx.Node, KVLayer], kv_dtype: torch.dtype | None) -> list[fx.Node]:
    pools: list[fx.Node] = []
    for number in range(1 + max(layer.pool for layer in layers.values())):
        mine = [layer for layer in layers.values() if layer.pool == number]
        shape, written = mine[0].shape, mine[0].written
        pool = program.add_input(
            f"kv_pool_{number}" if number else "kv_pool",
            Input((1 + max(layer.index for layer in mine), *shape), kv_dtype or written.meta["val"].dtype, "kv_pool"),
        )
        place = written.meta.get("placement")
        if place is not None:
            pool.meta["placement"] = Shard(3, place.layout) if isinstance(place, Shard) else R
        pools.append(pool)
    return pools


def _page(
    program: Program, node: fx.Node, layer: KVLayer, pool: fx.Node, batch: list[fx.Node], place: dict[str, Any]
) -> None:
    args = arguments(node)
    written = (args["k"], args["v"]) if layer.writer is node else (None, None)
    keywords = {name: value for name, value in args.items() if name not in ("q", "k", "v") and value is not None}
    paged = program.call(
        ops.radix_attention, args["q"], *written, pool, *batch,
        name=f"{node.name}.paged", before=node, like=node, **{"layer_id": args["layer_id"], **place, **keywords},
    )  # fmt: skip
    paged.meta["made_by"] = (*paged.meta["made_by"], "page_attention")
    if "placement" in node.meta:
        paged.meta["placement"] = node.meta["placement"]
    program.replace(node, paged)


def _expected(program: Program) -> int:
    return len(program.calls(ops.attention, ops.latent_attention))


page_attention.expect = _expected  # type: ignore[attr-defined]
