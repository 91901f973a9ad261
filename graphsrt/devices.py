"""What devices can do at best: the one table that ``graphsrt plan`` computes times from.

All figures are peaks, dense (no structured sparsity), of one device, in decimal units as vendors print them. Nothing is
taken off for what is lost in practice: the efficiency assumed is 1.0, so times are lower bounds. Where a data sheet
gives a rate for both directions of a link together, half of it is entered here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from graphsrt.errors import explain

TERA, GIGA = 1e12, 1e9
COLLECTIVE_LATENCY_S = 10e-6
"""Of one collective between the GPUs of a node, whatever its size. In no data sheet; the order of what a small NCCL
all-reduce takes. An assumption of ours, and for decoding an important one: give your own with ``--device-file``."""


@dataclass(frozen=True)
class Device:
    """One device, which holds one rank. Rates are per second; sizes are bytes.

    ``flops``: peak of matrix products, by ``bf16`` (and fp16), ``fp8``, ``fp32``, ``fp64``; a missing dtype runs at the
    rate of the next wider one that is there. ``link_bandwidth``: to all other ranks together, one direction.
    ``link_peers``: 0 if any rank can be given all of it (a switch), else the number of peers that it is divided among.
    ``max_ranks``: how many devices these links join.
    """

    name: str
    flops: dict[str, float]
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    link_latency_s: float
    link_peers: int = 0
    max_ranks: int = 8

    def peak(self, dtype: torch.dtype) -> float:
        """FLOP/s of matrix products in ``dtype``."""
        kind = _kind(dtype)
        wider = _WIDENING[_WIDENING.index(kind) :]
        for name in (*wider, *reversed(_WIDENING)):  # a device that lists narrow dtypes only: its widest
            if name in self.flops:
                return self.flops[name]
        raise ValueError(f"device {self.name} lists no FLOP/s")

    def link(self, ranks: int) -> float:
        """Bytes per second that a rank can send to ``ranks - 1`` others."""
        if not self.link_peers:
            return self.link_bandwidth
        # of a mesh, only the links to the ranks that take part carry anything
        return self.link_bandwidth * min(ranks - 1, self.link_peers) / self.link_peers


_WIDENING = ("fp8", "bf16", "fp32", "fp64")


def _kind(dtype: torch.dtype) -> str:
    return {1: "fp8", 2: "bf16", 4: "fp32", 8: "fp64"}[dtype.itemsize]


DEFAULT = "h200"
"""Whose figures count where no device is named."""

DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device(
            "h200",
            # "NVIDIA H200 Tensor Core GPU" data sheet, SXM. It prints 1,979 (bf16) and 3,958 (fp8) with sparsity, which
            # doubles them. fp32 is the rate outside tensor cores: PyTorch does not use TF32 unless it is told to.
            # fp64 is that of the tensor cores.
            {"bf16": 989.5 * TERA, "fp8": 1979 * TERA, "fp32": 67 * TERA, "fp64": 67 * TERA},
            memory_bytes=141 * GIGA,  # same data sheet: 141 GB HBM3e
            memory_bandwidth=4800 * GIGA,  # same: 4.8 TB/s
            link_bandwidth=450 * GIGA,  # same: NVLink 900 GB/s, both directions
            link_latency_s=COLLECTIVE_LATENCY_S,
        ),
        Device(
            "h100",
            # "NVIDIA H100 Tensor Core GPU" data sheet, SXM: compute as of the H200, printed with sparsity.
            {"bf16": 989.5 * TERA, "fp8": 1979 * TERA, "fp32": 67 * TERA, "fp64": 67 * TERA},
            memory_bytes=80 * GIGA,  # same data sheet: 80 GB
            memory_bandwidth=3350 * GIGA,  # same: 3.35 TB/s
            link_bandwidth=450 * GIGA,  # same: NVLink 900 GB/s, both directions
            link_latency_s=COLLECTIVE_LATENCY_S,
        ),
        Device(
            "a100",
            # "NVIDIA A100 Tensor Core GPU" data sheet, 80GB SXM: 312 bf16 (dense), 19.5 fp32, 19.5 fp64 tensor core.
            # There is no fp8.
            {"bf16": 312 * TERA, "fp32": 19.5 * TERA, "fp64": 19.5 * TERA},
            memory_bytes=80 * GIGA,  # same data sheet: 80 GB HBM2e
            memory_bandwidth=2039 * GIGA,  # same: 2,039 GB/s
            link_bandwidth=300 * GIGA,  # same: NVLink 600 GB/s, both directions
            link_latency_s=COLLECTIVE_LATENCY_S,
        ),
        Device(
            "mi300x",
            # "AMD Instinct MI300X Accelerator" data sheet: matrix peaks 1307.4 bf16, 2614.9 fp8, 163.4 fp32 and fp64.
            {"bf16": 1307.4 * TERA, "fp8": 2614.9 * TERA, "fp32": 163.4 * TERA, "fp64": 163.4 * TERA},
            memory_bytes=192 * GIGA,  # same data sheet: 192 GB HBM3
            memory_bandwidth=5300 * GIGA,  # same: 5.3 TB/s
            # "AMD Instinct MI300X Platform" data sheet: 7 Infinity Fabric links of 128 GB/s, both directions, one to
            # each of the 7 other GPUs, 896 GB/s in all
            link_bandwidth=448 * GIGA,
            link_latency_s=COLLECTIVE_LATENCY_S,
            link_peers=7,
        ),
        Device(
            "cpu",
            # No data sheet: the order of one socket of a current server with AVX-512, one rank on each. Processors
            # differ tenfold; give your own figures with --device-file.
            {"bf16": 4 * TERA, "fp32": 2 * TERA, "fp64": 1 * TERA},
            memory_bytes=256 * GIGA,
            memory_bandwidth=200 * GIGA,
            link_bandwidth=20 * GIGA,  # a copy through memory that other ranks read as well
            link_latency_s=20e-6,  # a few wake-ups of waiting processes
            max_ranks=64,
        ),
    )
}
"""The devices that ``graphsrt plan --device`` knows."""


def device(name: str) -> Device:
    """The device of that name. ValueError lists the known ones."""
    if name not in DEVICES:
        raise ValueError(explain(f"no device is called {name!r}", expected=", ".join(DEVICES),
                                 hint="give the figures of another one with --device-file"))  # fmt: skip
    return DEVICES[name]


def figures_of(name: str) -> Device:
    """The known device that a torch device (``"cpu"``, ``"cuda"``, ``"cuda:1"``) is, or the nearest that we know."""
    if torch.device(name).type == "cpu":
        return DEVICES["cpu"]
    model = torch.cuda.get_device_name(name).lower()
    return next((known for word, known in DEVICES.items() if word in model), DEVICES[DEFAULT])


def read_device(path: str | Path) -> Device:
    """A device from a JSON file with the fields of :class:`Device`.

    ``"like": "h100"`` takes what the file leaves out from a known device. ValueError says what is wrong with the file.
    """
    place = Path(path)
    try:
        given: Any = json.loads(place.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(explain("the device file cannot be read", where=str(path), got=str(error))) from error
    names = [field.name for field in fields(Device)]
    if not isinstance(given, dict) or not set(given) <= {*names, "like"}:
        unknown = sorted(set(given) - {*names, "like"}) if isinstance(given, dict) else [type(given).__name__]
        raise ValueError(
            explain("the device file has fields that a device has not", where=str(path),
                    expected=", ".join([*names, "like"]), got=", ".join(unknown))
        )  # fmt: skip
    given = dict(given)
    like = given.pop("like", None)
    base: dict[str, Any] = vars(device(like)) if like is not None else {"link_peers": 0, "max_ranks": 8}
    values = {**base, "name": place.stem, **given}
    if like is not None and isinstance(given.get("flops"), dict):
        values["flops"] = {**base["flops"], **given["flops"]}
    missing = [name for name in names if name not in values]
    if missing:
        raise ValueError(
            explain("the device file leaves figures out", where=str(path), expected=", ".join(missing),
                    hint='"like": "h100" takes them from a known device')
        )  # fmt: skip
    _check_numbers(values, str(path))
    return Device(**values)


def _check_numbers(values: dict[str, Any], place: str) -> None:
    rates = values["flops"]
    if not isinstance(rates, dict) or not rates or not set(rates) <= set(_WIDENING):
        raise ValueError(
            explain("flops must give FLOP/s by dtype", where=place, expected=f"some of {', '.join(_WIDENING)}",
                    got=repr(rates))
        )  # fmt: skip
    may_be_zero = ("link_latency_s", "link_peers")
    numbers = {**{f"flops.{kind}": rate for kind, rate in rates.items()}}
    numbers |= {name: value for name, value in values.items() if name not in ("name", "flops")}
    for name, value in numbers.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or value < 0 or (value == 0 and name not in may_be_zero):
            raise ValueError(explain(f"{name} must be a positive number", where=place, got=repr(value)))
