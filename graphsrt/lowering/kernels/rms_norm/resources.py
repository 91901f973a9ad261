"""Registers, spills and shared memory of the rms_norm kernel, compiled for Hopper on a machine without a device.

python -m graphsrt.lowering.kernels.rms_norm.resources [WIDTH …]
"""

from __future__ import annotations

import sys
from itertools import product

from graphsrt.lowering.kernels.hopper import Resources, compile_for_hopper
from graphsrt.lowering.kernels.rms_norm.kernel import rms_norm_kernel
from graphsrt.lowering.kernels.rows import DYNAMIC, NONE, STATIC, layout, num_warps

WIDTHS = (4096, 5120, 8192)
"""Of Llama-3.1-8B, Qwen3-32B and Llama-3.1-70B."""
QUANTISED = {"none": (NONE, 0), "static": (STATIC, 0), "token": (DYNAMIC, 0), "block": (DYNAMIC, 128)}


def variant(width: int, adds: bool, quantised: str) -> Resources:
    """Compile one variant, bf16 rows and weight; ``quantised`` is a key of :data:`QUANTISED`."""
    quant, block = QUANTISED[quantised]
    columns, groups = layout(width, block)
    pointers = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "total_ptr"), "bf16")
    pointers |= {"given_ptr": "fp32", "scale_ptr": "fp32", "out_ptr": "fp8e4nv" if quant else "bf16"}
    return compile_for_hopper(
        rms_norm_kernel, pointers=pointers, sizes=("width", "x_stride", "residual_stride"),
        numbers=("eps", "offset", "largest"), warps=num_warps(width),
        constants={"ADDS": adds, "AFTER_WEIGHT": False, "QUANT": quant, "GROUPS": groups, "COLUMNS": columns},
    )  # fmt: skip


def main(widths: list[int]) -> None:
    """Print a table of all variants."""
    print("| width | adds | quantised | warps | registers | spilled bytes | shared bytes |")
    print("|---|---|---|---|---|---|---|")
    for width, adds, quantised in product(widths, (False, True), QUANTISED):
        r = variant(width, adds, quantised)
        print(
            f"| {width} | {'yes' if adds else 'no'} | {quantised} | {r.warps} | {r.registers} | {r.spilled_bytes} "
            f"| {r.shared_bytes} |"
        )


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or list(WIDTHS))
