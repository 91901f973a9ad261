"""recognize_spelled_silu: a gated MLP that writes SiLU out becomes the operator that the other passes know.

    gate * sigmoid(gate) * up  →  glu(gate, up, act="silu")

Needs: normalize.  Leaves: ``graphsrt::glu``, which shard_tensor_parallel, merge_gate_up and fuse_silu_mul understand.
Numerics: close; the sigmoid is rounded once less.  Source: ours.
"""

import torch

from graphsrt import ops, rewrite


@rewrite(shapes={"gate": ("T", "F"), "up": ("T", "F")}, numerics="close", before="shard_tensor_parallel")
def recognize_spelled_silu(gate, up):
    return gate * torch.sigmoid(gate) * up


@recognize_spelled_silu.becomes
def _(gate, up):
    return ops.glu(gate, up, act="silu")


@recognize_spelled_silu.where
def _(gate, up):
    if gate.shape != up.shape:
        return f"gate {gate.shape} and up {up.shape} differ"
