"""Takes fused operators apart where the device has no kernel for the whole.

    n, h = all_reduce_add_rms_norm(x, residual, w, axis="tp")
    → total = all_reduce(x, axis="tp"); n, h = add_rms_norm(total, residual, w)

Here collectives are calls into a process group, so what follows the sum belongs to the region after it, where Inductor
joins it with its neighbours: the program runs as fast as if it had not been fused, and computes the same bits.

    q = rope_kv_write(q, k, v, …); radix_attention(q, None, None, kv_pool, …)
    → q = rope(q, …); k = rope(k, …); radix_attention(q, k, v, kv_pool, …)

On devices without a kernel that rotates and writes, rotations are compiled with what makes q and k, and the attention's
kernel writes the keys before it reads them.
"""

from __future__ import annotations

import operator
from typing import Any

import torch.fx as fx

from graphsrt import ops
from graphsrt.program import Program, arguments


def decompose(program: Program, device: str) -> Program:
    """The program as it runs on a type of device; the very program where there is nothing to take apart."""
    kernels = ops.KERNELS.get(ops.rope_kv_write, {})
    apart = {*ops.AFTER_ALL_REDUCE, *([] if device in kernels else [ops.rope_kv_write])}
    if not any(node.target in apart for node in program.nodes):
        return program
    program = program.copy()
    for node in program.calls(*apart):
        new = _sum_first(program, node) if node.target in ops.AFTER_ALL_REDUCE else _write_last(program, node)
        program.replace(node, new)
    return program


def _sum_first(program: Program, node: fx.Node) -> fx.Node:
    (term, *args), kwargs = node.args, dict(node.kwargs)
    inner, axis = ops.AFTER_ALL_REDUCE[node.target], kwargs.pop("axis")  # type: ignore[index]
    total = program.call(ops.all_reduce, term, axis=axis, name=f"{node.name}.total", before=node, like=node)
    rest = program.call(inner, total, *args, name=node.name, before=node, like=node, **kwargs)
    program.infer([total, rest])
    return rest


def _write_last(program: Program, node: fx.Node) -> fx.Node:
    args = arguments(node)
    rotation = {"interleaved": args["interleaved"]}
    if args["q_weight"] is None:
        q, k = (
            program.call(ops.rope, args[name], args["positions"], args["table"], name=f"{node.name}.{name}",
                         before=node, like=node, **rotation)
            for name in "qk"
        )  # fmt: skip
        program.infer([q, k])
    else:
        how = {key: args[key] for key in ("eps", "cast", "offset")} | rotation
        operands = [args[key] for key in ("q", "k", "q_weight", "k_weight", "positions", "table")]
        pair = program.call(ops.qk_norm_rope, *operands, name=f"{node.name}.qk", before=node, like=node, **how)
        program.infer([pair])
        q, k = (
            program.call(operator.getitem, pair, i, name=f"{node.name}.{name}", before=node, like=node)
            for i, name in enumerate("qk")
        )
        program.infer([q, k])
    reader = _first_reader(program, node)
    if reader is not None:
        reader.args = (reader.args[0], k, args["v"], *reader.args[3:])
    else:
        place: dict[str, Any] = {key: args[key] for key in ("layer_id", "kv_layer", "k_scale", "v_scale")}
        program.call(ops.kv_write, k, args["v"], args["kv_pool"], args["out_cache_loc"], name=f"{node.name}.write",
                     before=node, like=node, **place)  # fmt: skip
    return q


def _first_reader(program: Program, node: fx.Node) -> fx.Node | None:
    """The attention that is the next to touch what the node writes, and so may write it itself."""
    args = arguments(node)
    nodes = list(program.graph.nodes)
    for later in nodes[nodes.index(node) + 1 :]:
        if args["kv_pool"] not in later.all_input_nodes:
            continue
        if later.target is not ops.radix_attention:
            return None
        given = arguments(later)
        keys = ("kv_pool", "out_cache_loc", "layer_id", "kv_layer", "k_scale", "v_scale")
        return later if given["k"] is None and all(given[key] is args[key] or given[key] == args[key] for key in keys) \
            else None  # fmt: skip
    return None
