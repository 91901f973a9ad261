"""Takes fused operators apart where the device has no kernel for the whole.

    n, h = all_reduce_add_rms_norm(x, residual, w, axis="tp")
    → total = all_reduce(x, axis="tp"); n, h = add_rms_norm(total, residual, w)

Here collectives are calls into a process group, so what follows the sum belongs to the region after it, where Inductor
joins it with its neighbours: the program runs as fast as if it had not been fused, and computes the same bits.
"""

from __future__ import annotations

from graphsrt import ops
from graphsrt.program import Program


def decompose(program: Program) -> Program:
    """The program with each sum over ranks by itself; the very program where there is nothing to take apart."""
    fused = [node for node in program.nodes if node.target in ops.AFTER_ALL_REDUCE]
    if not fused:
        return program
    program = program.copy()
    for node in program.calls(*ops.AFTER_ALL_REDUCE):
        (term, *args), kwargs = node.args, dict(node.kwargs)
        inner, axis = ops.AFTER_ALL_REDUCE[node.target], kwargs.pop("axis")  # type: ignore[index]
        total = program.call(ops.all_reduce, term, axis=axis, name=f"{node.name}.total", before=node, like=node)
        rest = program.call(inner, total, *args, name=node.name, before=node, like=node, **kwargs)
        program.infer([total, rest])
        program.replace(node, rest)
    return program
