"""Compiles a Triton kernel for Hopper on a machine without a device, and says what it takes of a multiprocessor."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Resources:
    """What one variant of a kernel takes of a streaming multiprocessor: registers of a thread, and bytes."""

    warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    ptx: str


def compile_for_hopper(
    kernel: Any,
    *,
    pointers: Mapping[str, str],
    sizes: Iterable[str],
    numbers: Iterable[str],
    constants: Mapping[str, Any],
    warps: int,
) -> Resources:
    """Compile a ``triton.jit`` function for ``sm_90``.

    ``pointers``: parameter -> Triton's name of its elements, such as ``bf16``. ``sizes`` are int32 and, like pointers,
    multiples of 16, as the runtime finds by itself: then 16 bytes are read at a time. ``numbers`` are float32.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    sizes = list(sizes)
    kinds = {**{name: f"*{kind}" for name, kind in pointers.items()}, **dict.fromkeys(sizes, "i32")}
    kinds |= {**dict.fromkeys(numbers, "fp32"), **dict.fromkeys(constants, "constexpr")}
    signature = {name: kinds[name] for name in kernel.arg_names}
    even = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(signature) if name in {*pointers, *sizes}}
    source = ASTSource(kernel, signature=signature, constexprs=dict(constants), attrs=even)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = {
        key: int(number) for key, number in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", said.stdout + said.stderr)
    }
    return Resources(warps, found["REG"], found["STACK"] + found["LOCAL"], made.metadata.shared, made.asm["ptx"])
