"""Products of activations and weights on the CPU, with weights read as they are stored and summed in float32.

``dense_linear`` is ``torch.nn.functional.linear`` for matrices of float32, bfloat16 and float16. Regions call it
in place of ``aten.linear``, and ``int8_linear`` and ``int4_linear`` in place of their references, directly: compiled
code finds the C functions of the libraries that :func:`load` and :func:`load_integers` put into the process.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F

from graphsrt import ops
from graphsrt.lowering.kernels import team
from graphsrt.lowering.kernels.build import load_for_all
from graphsrt.ops import _library

SOURCE, INTEGERS = (Path(__file__).with_name(name) for name in ("linear.cpp", "integers.cpp"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_library.define("dense_linear(Tensor x, Tensor w, Tensor? bias=None) -> Tensor")
_library.impl("dense_linear", lambda x, w, bias=None: F.linear(x, w, bias), "CompositeExplicitAutograd")
torch.library.register_fake(
    "graphsrt::dense_linear", lambda x, w, bias=None: x.new_empty((*x.shape[:-1], w.shape[0])), lib=_library
)
dense_linear = torch.ops.graphsrt.dense_linear.default


def _shim(name: str, *tensors: str) -> list[str]:
    given = ", ".join(f"AtenTensorHandle {tensor}" for tensor in ("x", *tensors))
    return [f"AOTITorchError aoti_torch_cpu_{name}({given}, AtenTensorHandle* bias, AtenTensorHandle* result)"]


SHIMS = {
    dense_linear: _shim("dense_linear", "w"),
    ops.int8_linear: _shim("int8_linear", "q", "scales"),
    ops.int4_linear: _shim("int4_linear", "q", "pairs"),
}
"""Operator -> declaration of the C function that compiled regions call for it."""


@cache
def load() -> ctypes.CDLL:
    """Put ``dense_linear``'s library into this process, for all: compiled once a machine. Raises ``CompileError``."""
    team.load()
    library = load_for_all("linear", SOURCE)
    rows = rows_for_onednn()
    if rows is not None:
        library.graphsrt_rearrange_from(ctypes.c_int64(rows))
    return library


@cache
def load_integers() -> ctypes.CDLL:
    """The same for the library of ``int8_linear`` and ``int4_linear``."""
    team.load()
    return load_for_all("integers", INTEGERS)


def rows_for_onednn() -> int | None:
    """From so many rows of bfloat16 on, oneDNN is called instead: it has this processor's fastest products, of weights
    that it rearranges in each call. None: never. Where it does, a row's result depends on how many there are."""
    return 16 if torch.cpu._is_amx_tile_supported() else None


def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``aten.linear`` as it is traced into a region."""
    served = w.dtype in DTYPES and x.dtype == w.dtype and w.dim() == 2
    return dense_linear(x, w, bias) if served else F.linear(x, w, bias)
