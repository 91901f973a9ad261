"""Registers, spills and shared memory of the rms_norm kernel, compiled for Hopper on a machine without a device.

python -m graphsrt.lowering.kernels.rms_norm.resources [WIDTH …]
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from graphsrt.lowering.kernels.rms_norm.kernel import DYNAMIC, NONE, STATIC, layout, num_warps, rms_norm_kernel

WIDTHS = (4096, 5120, 8192)
"""Of Llama-3.1-8B, Qwen3-32B and Llama-3.1-70B."""
QUANTISED = {"none": (NONE, 0), "static": (STATIC, 0), "token": (DYNAMIC, 0), "block": (DYNAMIC, 128)}


@dataclass(frozen=True)
class Resources:
    """What one variant of the kernel takes of a streaming multiprocessor."""

    width: int
    adds: bool
    quantised: str
    warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    ptx: str


def compile_for_hopper(width: int, adds: bool, quantised: str) -> Resources:
    """Compile one variant, bf16 rows and weight; ``quantised`` is a key of :data:`QUANTISED`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    quant, block = QUANTISED[quantised]
    columns, groups = layout(width, block)
    pointers = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "total_ptr"), "*bf16")
    pointers |= {"given_ptr": "*fp32", "scale_ptr": "*fp32", "out_ptr": "*fp8e4nv" if quant else "*bf16"}
    sizes = dict.fromkeys(("width", "x_stride", "residual_stride"), "i32")
    numbers = dict.fromkeys(("eps", "offset", "largest"), "fp32")
    constants = {"ADDS": adds, "AFTER_WEIGHT": False, "QUANT": quant, "GROUPS": groups, "COLUMNS": columns}
    kinds = {**pointers, **sizes, **numbers, **dict.fromkeys(constants, "constexpr")}
    signature = {name: kinds[name] for name in rms_norm_kernel.arg_names}
    # what the runtime finds by itself: pointers and sizes that are multiples of 16 can be read in pieces of 16 bytes
    even = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(signature) if name in pointers | sizes}
    warps = num_warps(width)
    source = ASTSource(rms_norm_kernel, signature=signature, constexprs=constants, attrs=even)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = {
        key: int(number) for key, number in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", said.stdout + said.stderr)
    }
    return Resources(
        width, adds, quantised, warps, found["REG"], found["STACK"] + found["LOCAL"], made.metadata.shared,
        made.asm["ptx"],
    )  # fmt: skip


def main(widths: list[int]) -> None:
    """Print a table of all variants."""
    print("| width | adds | quantised | warps | registers | spilled bytes | shared bytes |")
    print("|---|---|---|---|---|---|---|")
    for width, adds, quantised in product(widths, (False, True), QUANTISED):
        r = compile_for_hopper(width, adds, quantised)
        print(
            f"| {r.width} | {'yes' if adds else 'no'} | {quantised} | {r.warps} | {r.registers} | {r.spilled_bytes} "
            f"| {r.shared_bytes} |"
        )


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or list(WIDTHS))
