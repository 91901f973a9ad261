"""Registers, spills and shared memory of the kernel of rotations, compiled for Hopper without a device.

python -m graphsrt.lowering.kernels.rope.resources
"""

from __future__ import annotations

from itertools import product

from graphsrt.lowering.kernels.hopper import Resources, compile_for_hopper
from graphsrt.lowering.kernels.rope.kernel import blocks, rope_kernel

SIZES = (64, 128, 256)
"""Of heads: small models, most others, Gemma."""


def variant(size: int, normed: bool, scaled: bool) -> Resources:
    """Compile one variant: bf16 heads, the pool in bf16 or, ``scaled``, in FP8."""
    pool = "fp8e4nv" if scaled else "bf16"
    in_bf16 = ("q_ptr", "k_ptr", "v_ptr", "out_ptr", "table_ptr", "q_weight_ptr", "k_weight_ptr")
    pointers = dict.fromkeys(in_bf16, "bf16")
    pointers |= {"key_pool_ptr": pool, "value_pool_ptr": pool, "positions_ptr": "i64", "slots_ptr": "i64"}
    pointers |= {"k_scale_ptr": "fp32", "v_scale_ptr": "fp32"}
    strides = ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "slot_stride", "head_stride")
    return compile_for_hopper(
        rope_kernel, pointers=pointers, numbers=("eps", "offset"), warps=1,
        sizes=(*strides, "table_stride", "heads", "half", "size", "value_size"),
        constants={"INTERLEAVED": False, "NORM": normed, "AFTER_WEIGHT": False, "SCALED": scaled,
                   **blocks(size // 2, size, size)},
    )  # fmt: skip


def main() -> None:
    """Print a table of all variants."""
    print("| head size | normed | pool | registers | spilled bytes | shared bytes |")
    print("|---|---|---|---|---|---|")
    for size, normed, scaled in product(SIZES, (False, True), (False, True)):
        r = variant(size, normed, scaled)
        print(f"| {size} | {'yes' if normed else 'no'} | {'FP8' if scaled else 'bf16'} | {r.registers} "
              f"| {r.spilled_bytes} | {r.shared_bytes} |")  # fmt: skip


if __name__ == "__main__":
    main()
