"""Compiles a kernel's C++ source into a Python extension once per machine, and loads it.

The compiler is called directly: one source file needs no ninja, and no helper process at start-up. Results are kept in
``$GRAPHSRT_CACHE/kernels/<name>-<hash>/`` (default ``~/.cache/graphsrt``), the hash covering everything that a build
depends on, with the headers beside the source and those of the folder above, which kernels share. The compiler is
``$CXX`` where set, else the first of g++, clang++, c++.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import filelock
import torch

from graphsrt.cache import cache_dir, writing
from graphsrt.errors import CompileError, explain


def load_extension(name: str, source: Path, extra_flags: Sequence[str] = ()) -> ModuleType:
    """The Python extension module ``name`` (its source defines ``PyInit_<name>``), compiled unless a build is cached.

    Several processes may ask at once: one compiles, the others wait for it. A cached file that is damaged is compiled
    anew. Raises ``CompileError`` where there is no compiler, or with the compiler's words where it fails.
    """
    return _load(name, build_library(name, source, extra_flags))


def load_for_all(name: str, source: Path) -> ctypes.CDLL:
    """The library of a C++ source, its C functions found by whatever is loaded later; as :func:`build_library`."""
    return ctypes.CDLL(str(build_library(name, source)), mode=ctypes.RTLD_GLOBAL)


def build_library(name: str, source: Path, extra_flags: Sequence[str] = ()) -> Path:
    """The shared library of a C++ source, compiled unless a build is cached; otherwise as :func:`load_extension`."""
    flags = [*_compile_flags(), *extra_flags]
    folder = cache_dir() / "kernels" / f"{name}-{_build_key(source, flags)}"
    library = folder / f"{name}.so"
    if not _intact(library):
        with writing("a compiled kernel", folder):
            folder.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(folder / "lock"):
                if not _intact(library):
                    _build(name, source, flags, library)
    return library


def _load(name: str, library: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(name, str(library))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _compile_flags() -> list[str]:
    """Flags as torch builds its own kernels for this processor: ATen's vector classes are chosen by these macros."""
    flags = ["-std=c++20", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-fopenmp", "-w"]
    # What torch itself dispatches to, so that ATEN_CPU_CAPABILITY limits this code as well.
    capability = torch.backends.cpu.get_cpu_capability()
    if capability in ("AVX2", "AVX512"):
        flags += ["-march=native", "-mavx2", "-mfma", "-mf16c"]
        flags += [f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}"]
        if capability == "AVX512":
            flags += ["-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw"]
    else:
        flags += ["-DCPU_CAPABILITY=DEFAULT", "-DCPU_CAPABILITY_DEFAULT"]
    return flags


def _build_key(source: Path, flags: Sequence[str]) -> str:
    headers = [*sorted(source.parent.glob("*.h")), *sorted(source.parent.parent.glob("*.h"))]
    facts = [
        *(hashlib.sha256(file.read_bytes()).hexdigest() for file in (source, *headers)),
        *flags,
        os.environ.get("CXX", ""),
        torch.__version__,
        sys.version,
        platform.machine(),
        _cpu_flags(),
    ]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:24]


def _cpu_flags() -> str:
    """What ``-march=native`` may use here; a home folder can be shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(("flags", "Features", "model name"))))


def _checksum_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _intact(library: Path) -> bool:
    """Whether the library is there and whole: loading a cut-off file can kill the process instead of raising."""
    try:
        return hashlib.sha256(library.read_bytes()).hexdigest() == _checksum_file(library).read_text()
    except FileNotFoundError:
        return False


def _compiler() -> list[str]:
    chosen = os.environ.get("CXX")
    candidates = [shlex.split(chosen)] if chosen else [["g++"], ["clang++"], ["c++"]]
    for command in candidates:
        if command and shutil.which(command[0]):
            return command
    raise CompileError(
        explain(
            "no C++ compiler found",
            expected="one of " + ", ".join(command[0] for command in candidates if command) + " on PATH",
            hint="install g++ or clang++, or name another compiler in CXX",
        )
    )


def _build(name: str, source: Path, flags: Sequence[str], library: Path) -> None:
    from torch.utils import cpp_extension  # it brings setuptools along

    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        built = Path(scratch) / library.name
        includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
        command = [*_compiler(), *flags, *(f"-I{path}" for path in includes), str(source), "-o", str(built)]
        # No run path: torch is loaded by now, and its libraries (OpenMP's too) are found under their names.
        command += [f"-L{path}" for path in cpp_extension.library_paths()] + ["-lc10", "-ltorch_cpu"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise CompileError(
                explain(
                    f"the C++ compiler failed on kernel {name}",
                    where=str(source),
                    got=f"exit status {done.returncode} of: {shlex.join(command)}\n{done.stderr.strip()}",
                    hint="a compiler with C++20 and OpenMP is needed (g++ 11 or newer); CXX names another one",
                )
            )
        checksum = Path(scratch) / "checksum"
        checksum.write_text(hashlib.sha256(built.read_bytes()).hexdigest())
        # Library first: in between, the old checksum marks it as damaged, which only means waiting for the lock.
        os.replace(built, library)
        os.replace(checksum, _checksum_file(library))
