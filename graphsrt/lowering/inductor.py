"""Compiles one region to a shared library with AOTInductor, and loads such libraries.

The library takes the region's inputs and weights as arguments, so every layer uses it with its own weights, and holds
for every token count from 1 up. Loading takes milliseconds and imports nothing of Inductor; the ranks of a machine map
the same file. Compiling happens in processes of its own (``python -m graphsrt.lowering.inductor``), which keeps
Inductor's state and memory away from the caller's and lets regions compile side by side.

Numerics: fused chains keep intermediate values in float32 where eager execution rounds them to bf16 or fp16, so
half-precision results differ from eager's by roundings that eager makes and the region does not. Explicit casts of the
model are part of the region.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from graphsrt import ops
from graphsrt.errors import CompileError, explain
from graphsrt.lowering.kernels import linear
from graphsrt.lowering.regions import Formal, Region

OPTIONS: dict[str, Any] = {
    # The number of threads is the running process's, not the compiling one's: ranks share a machine's cores.
    "cpp.dynamic_threads": True,
    # Intermediates are rounded to the dtype where the operators round them, as eager and transformers do: near ties of
    # bf16 logits then fall to the same token.
    "emulate_precision_casts": True,
    # The wrapper only calls kernels. A call takes 10 µs less than with O0, which compiles no faster.
    "aot_inductor.compile_wrapper_opt_level": "O1",
    # Inductor would compile and load a file for each set of instructions that the processor has, to see whether the
    # compiler knows it: 5 seconds. Our kernels are compiled for the same ones, and would fail as well.
    "cpp.vec_isa_ok": True,
}
"""Inductor's options; a part of every cache key."""


class Kernel(NamedTuple):
    """What regions call for an operator: the function that is traced, and what loads the library that has its code."""

    function: Callable[..., Any]
    load: Callable[[], Any]


INSTEAD = {
    "aten.linear": Kernel(linear.linear, linear.load),
    "graphsrt.int8_linear": Kernel(ops.int8_linear, linear.load_integers),
    "graphsrt.int4_linear": Kernel(ops.int4_linear, linear.load_integers),
}
"""Operators for which regions call a kernel of ours."""

LARGE = 1 << 60  # a bound for symbolic sizes, so that no symbolic expression of them overflows


class CompiledRegion:
    """A loaded region. ``run([*inputs, *weights])`` gives the list of outputs; it obeys ``torch.set_num_threads``.

    The library does not check shapes, dtypes or strides: :class:`Region` says what they must be.
    """

    def __init__(self, region: Region, library: Path):
        self.region, self.library = region, library
        for target in {call.target for call in region.calls} & INSTEAD.keys():
            INSTEAD[target].load()  # the library of the region asks for its functions
        self._runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(library), 1)  # type: ignore[call-arg]
        self.run: Callable[[list[torch.Tensor]], list[torch.Tensor]] = self._runner.run


class _Traced(nn.Module):
    """The region as a module for torch.export."""

    def __init__(self, region: Region):
        super().__init__()
        self.region = region

    def forward(self, *values: torch.Tensor) -> list[torch.Tensor]:
        results = self.region.run(values, {target: kernel.function for target, kernel in INSTEAD.items()})
        # An operator's shape function says "contiguous" where its reference, fed with transposed values, may not be.
        return [r.contiguous() if f.strides is None else r for r, (_, f) in zip(results, self.region.outputs)]


def compile_region(region: Region, library: Path) -> None:
    """Compile ``region`` for the CPU into the file ``library``. Raises whatever export, Inductor or g++ raise."""
    from torch._inductor import aoti_compile_and_package
    from torch.fx.experimental import _config as symbolic_config

    examples, dynamic = _examples(region)
    # "oblivious": sizes are not taken to be other than 1, so the code is right for a single token.
    oblivious = symbolic_config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    with torch.no_grad(), oblivious:
        exported = torch.export.export(_Traced(region), tuple(examples), dynamic_shapes=(tuple(dynamic),), strict=False)
        _check_outputs(region, exported)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            package = Path(scratch) / "region.pt2"
            # A copy: torch puts its own in, and the cache key must not change by that.
            options = {**OPTIONS, "aot_inductor.custom_ops_to_c_shims": linear.SHIMS}
            aoti_compile_and_package(exported, package_path=str(package), inductor_configs=options)
            with zipfile.ZipFile(package) as archive:
                (member,) = (name for name in archive.namelist() if name.endswith(".so"))
                library.write_bytes(archive.read(member))


def _examples(region: Region) -> tuple[list[torch.Tensor], list[dict[int, Any]]]:
    """Fake tensors (no memory is taken), and which of their dimensions are symbolic.

    Sizes that differ in name are independent here: nothing in a region relates ``T`` to ``T//2``.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    dims: dict[str, tuple[int, Any]] = {}

    def size(item: int | str) -> int:
        # Distinct, larger than thread counts, so that loops over tokens are made parallel.
        return item if isinstance(item, int) else dims.setdefault(item, (1009 + 2 * len(dims), _dim(len(dims))))[0]

    examples, dynamic = [], []
    with FakeTensorMode():
        for formal in (*region.inputs, *region.weights):
            shape = [size(item) for item in formal.shape]
            examples.append(_empty(formal, shape, {name: hint for name, (hint, _) in dims.items()}))
            dynamic.append({i: dims[item][1] for i, item in enumerate(formal.shape) if isinstance(item, str)})
    return examples, dynamic


def _dim(number: int) -> Any:
    return torch.export.Dim(f"d{number}", min=1, max=LARGE)


def _empty(formal: Formal, shape: list[int], hints: dict[str, int]) -> torch.Tensor:
    if formal.strides is None:
        return torch.empty(shape, dtype=formal.dtype)
    return torch.empty_strided(shape, [int(s) for s in formal.at(hints).strides or ()], dtype=formal.dtype)


def _check_outputs(region: Region, exported: torch.export.ExportedProgram) -> None:
    """The later steps were cut for the program's strides: whatever is not contiguous must come out just so."""
    (output,) = (node for node in exported.graph.nodes if node.op == "output")
    for result, (ref, formal) in zip(output.args[0], region.outputs):
        value = result.meta["val"]
        # How far apart the only element of a dimension would be from a second one says nothing.
        strides = [(s, want) for s, want, size in zip(value.stride(), formal.strides or (), formal.shape) if size != 1]
        same = all(not isinstance(s, int) if isinstance(want, str) else s == want for s, want in strides)
        same = same if formal.strides is not None else value.is_contiguous()
        if value.dtype != formal.dtype or not same:
            raise CompileError(
                explain(
                    f"the reference behind {ref} and the operator's shape function disagree",
                    where=region.text,
                    expected=str(formal),
                    got=f"{value.dtype} {tuple(value.shape)}, strides {value.stride()}",
                )
            )


# -- compile processes ------------------------------------------------------------------------------------------------


def compile_all(
    regions: Sequence[Region], *, max_workers: int | None = None, done: Callable[[Region, bool], None] = lambda *_: None
) -> None:
    """Put all ``regions`` into the cache, several at a time; ``done(region, compiled here)`` after each.

    At most ``max_workers`` processes (default: as many as this process may use cores, but no more than 4, since each
    takes about 1 GiB). Raises ``CompileError`` with the compiler's words for the first region that fails.
    """
    limit = max_workers or min(4, len(os.sched_getaffinity(0)))
    pending = list(reversed(regions))
    guard = threading.Lock()
    failures: list[CompileError] = []
    workers = [Worker() for _ in range(min(limit, len(pending)))]

    def serve(worker: Worker) -> None:
        while True:
            with guard:
                if failures or not pending:
                    return
                region = pending.pop()
            try:
                compiled = worker.compile(region)
            except CompileError as error:
                failures.append(error)
                return
            with guard:
                done(region, compiled)

    threads = [threading.Thread(target=serve, args=(worker,), daemon=True) for worker in workers]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:  # also on Ctrl-C
        for worker in workers:
            worker.close()
    if failures:
        raise failures[0]


class Worker:
    """A process that compiles one region after the other; it ends when its standard input closes.

    ``idle``: it and its compilers run only while nobody else wants the processor (Linux; elsewhere at low priority).
    """

    def __init__(self, *, idle: bool = False) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed in close)
        # The caller's import path: the package may be importable only through it.
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "graphsrt.lowering.inductor", *(["idle"] if idle else [])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=env, start_new_session=True,
        )  # fmt: skip

    def compile(self, region: Region) -> bool:
        """Have the region built; True if it was not in the cache. Raises ``CompileError``."""
        from graphsrt.lowering import region_cache

        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            pickle.dump((region, region_cache.region_key(region)), self._process.stdin)
            self._process.stdin.flush()
            compiled, failure = pickle.load(self._process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            self._log.seek(0)
            words = self._log.read().decode(errors="replace")[-4000:].strip()
            failure, compiled = f"the compiling process ended (status {self._process.poll()})\n{words}", False
        if failure:
            raise CompileError(
                explain(
                    "a region of the program does not compile",
                    where=region.text,
                    got=failure,
                    hint='a C++ compiler (g++) is needed; backend="eager" runs the same program without one',
                )
            )
        return compiled

    def kill(self) -> None:
        """End it and its compilers in the middle of whatever they do; from any thread. ``compile`` then raises."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdout.close()
        with contextlib.suppress(OSError):  # it is gone already, with the last region half sent
            self._process.stdin.close()
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self.kill()  # in the middle of a region that nobody waits for any more
            self._process.wait()
        self._log.close()


def _serve() -> None:
    """The compile process: regions come in as pickles, ``(compiled, failure or "")`` goes out for each."""
    import traceback

    from graphsrt.lowering import region_cache

    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not get between the answers
    while True:
        try:
            region, key = pickle.load(requests)
        except EOFError:
            return
        try:
            if region_cache.region_key(region) != key:
                raise CompileError("the source of an operator changed since this program was started: start it again")
            answer = (region_cache.build(region), "")
        except Exception as error:  # noqa: BLE001  (Inductor and g++ raise many kinds; all are told to the caller)
            short = str(error).strip() or type(error).__name__
            answer = (False, f"{short[:4000]}\n{''.join(traceback.format_exc(limit=-4))[-4000:]}")
        pickle.dump(answer, answers)
        answers.flush()


def _yield_to_others() -> None:
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)


if __name__ == "__main__":
    if "idle" in sys.argv[1:]:
        _yield_to_others()
    _serve()
