"""fuse_squared_relu: the activation of Nemotron and Arcee, one operator with a Triton kernel of its own.

    pow(relu(x), 2)  →  examples.squared_relu(x)

Needs: normalize.  Leaves: ``examples::squared_relu``, which is pointwise, so it is divided as its input is.
Numerics: exact.  Source: So et al. 2021 (Primer) for the activation; the kernel is ours.
"""

import torch

from graphsrt import ops, rewrite


def _on_cuda(x):
    from examples.squared_relu.kernel import squared_relu  # Triton is needed only where there is a GPU

    return squared_relu(x)


@ops.define("(Tensor x) -> Tensor", namespace="examples", placement="pointwise", kernels={"cuda": _on_cuda})
def squared_relu(x):
    """``max(x, 0)²``: the definition. It runs where there is no kernel, and compiled code is made from it."""
    return torch.relu(x).square()


@rewrite(shapes={"x": ("T", "F")}, confirm=True, before="shard_tensor_parallel")
def fuse_squared_relu(x):
    return torch.relu(x).pow(2)


@fuse_squared_relu.becomes
def _(x):
    return squared_relu(x)


@fuse_squared_relu.also()
def _(x):
    return torch.square(torch.relu(x))
