"""What latent attention asks of its arguments: heads are divided, the latent that they share is whole on every rank."""

from __future__ import annotations

from graphsrt import ops
from graphsrt.passes.demand import Ask, Demands, rule
from graphsrt.placement import Shard


@rule(ops.latent_attention)
def _latent_attention(ask: Ask) -> Demands:
    """Every head has its own queries and its own rows of ``w_kv_b``, so any layout of heads will do."""
    if ask.dim != 1:
        raise ask.refuse("attention is divided by heads only")
    rows = int(ask.shape(ask.args["w_kv_b"])[0]) // ask.layout.size
    demands: Demands = [(ask.args[name], Shard(1, ask.layout)) for name in ("q_nope", "q_rope")]
    demands.append((ask.args["w_kv_b"], Shard(0, ask.layout.scale(rows))))
    if ask.args["sinks"] is not None:
        demands.append((ask.args["sinks"], Shard(0, ask.layout)))
    return demands
