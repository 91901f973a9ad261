"""Registers, spills and shared memory of the silu_mul kernel, compiled for Hopper on a machine without a device.

python -m graphsrt.lowering.kernels.silu_mul.resources [WIDTH …]
"""

from __future__ import annotations

import sys
from itertools import product

from graphsrt.lowering.kernels.hopper import Resources, compile_for_hopper
from graphsrt.lowering.kernels.rows import DYNAMIC, NONE, STATIC, layout, num_warps
from graphsrt.lowering.kernels.silu_mul.kernel import silu_mul_kernel

WIDTHS = (1792, 3584, 14336)
"""A rank's share of Llama-3.1-8B's and 70B's gated units on eight ranks, and the whole of 8B's."""
QUANTISED = {"none": (NONE, 0), "static": (STATIC, 0), "token": (DYNAMIC, 0), "block": (DYNAMIC, 128)}


def variant(width: int, quantised: str) -> Resources:
    """Compile one variant for rows in bf16; ``quantised`` is a key of :data:`QUANTISED`."""
    quant, block = QUANTISED[quantised]
    columns, groups = layout(width, block)
    pointers = {"x_ptr": "bf16", "given_ptr": "fp32", "scale_ptr": "fp32", "out_ptr": "fp8e4nv" if quant else "bf16"}
    return compile_for_hopper(
        silu_mul_kernel, pointers=pointers, sizes=("width", "x_stride"), numbers=("largest",),
        constants={"QUANT": quant, "GROUPS": groups, "COLUMNS": columns}, warps=num_warps(width),
    )  # fmt: skip


def main(widths: list[int]) -> None:
    """Print a table of all variants."""
    print("| width | quantised | warps | registers | spilled bytes | shared bytes |")
    print("|---|---|---|---|---|---|")
    for width, quantised in product(widths, QUANTISED):
        r = variant(width, quantised)
        print(f"| {width} | {quantised} | {r.warps} | {r.registers} | {r.spilled_bytes} | {r.shared_bytes} |")


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or list(WIDTHS))
