"""Compiled programs against eager ones, and the cache of compiled regions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lowering_programs import captured, environment, inputs_of, paged, weights_of

from graphsrt.errors import CompileError
from graphsrt.lowering import inductor
from graphsrt.lowering.executable import Executable
from graphsrt.lowering.region_cache import compile_regions, folder, is_intact, load
from graphsrt.lowering.regions import Call, Formal, Ref, Region, cut, distinct_regions
from graphsrt.program import Program

TOKENS = (1, 2, 7, 37, 300)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAPHSRT_CACHE", str(place))
        yield place


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def both(program: Program, **more: object) -> tuple[Executable, Executable]:
    weights = weights_of(program)
    return tuple(Executable(program, weights, backend=b, **more) for b in ("inductor", "eager"))  # type: ignore


def close(got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    error = (got - want).abs().max() / want.abs().max()
    assert error <= bound, float(error)  # (NaN is not <= anything)


class TwoRanks:
    """Two ranks of which the other holds the same tensors as this one."""

    rank, size = 0, 2

    def all_reduce(self, x: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return x + x if op == "sum" else x.clone()

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat([x, x], dim)

    def reduce_scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return (x + x).chunk(2, dim)[0].contiguous()


def test_llama_in_float32_and_compiled_once_for_any_depth(cache: Path) -> None:
    program = captured("llama", 2, torch.float32)
    told: list[tuple[int, int, str]] = []
    stats = compile_regions(program, progress=lambda *item: told.append(item))
    assert (stats.distinct, stats.compiled, stats.reused) == (3, 3, 0) and stats.seconds > 0
    assert [t[:2] for t in told] == [(0, 3), (1, 3), (2, 3), (3, 3)]
    lowered, eager = both(program)
    assert (lowered.stats.compiled, lowered.stats.reused) == (0, 3)
    for tokens in TOKENS:
        # sums of at most 80 float32 terms in another order: 80 * 2**-24 = 5e-6, and two layers of them
        close(lowered(inputs_of(tokens)), eager(inputs_of(tokens)), 1e-5)

    deep = captured("llama", 5, torch.float32)
    lowered, eager = both(deep)
    assert (lowered.stats.distinct, lowered.stats.compiled) == (3, 0)
    for tokens in (1, 37):
        close(lowered(inputs_of(tokens)), eager(inputs_of(tokens)), 2e-5)

    code = """
import sys, torch
from lowering_programs import captured, inputs_of, weights_of
from graphsrt.lowering.executable import Executable
program = captured("llama", 5, torch.float32)
before = "torch._inductor.compile_fx" in sys.modules
lowered = Executable(program, weights_of(program), backend="inductor")
lowered(inputs_of(3))
print(lowered.stats.distinct, lowered.stats.compiled, before or "torch._inductor.compile_fx" not in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(cache), capture_output=True, text=True)
    assert done.stdout.split() == ["3", "0", "True"], done.stderr


def test_phi3_in_float64_with_strided_values() -> None:
    lowered, eager = both(captured("phi3", 1, torch.float64))
    assert any(f.strides for r in distinct_regions(cut(lowered.program)) for _, f in r.outputs)
    for tokens in TOKENS:
        # 80 * 2**-53 = 9e-15 for each of a handful of sums
        close(lowered(inputs_of(tokens)), eager(inputs_of(tokens)), 1e-13)


def test_gemma2_in_bfloat16_is_no_worse_than_eager() -> None:
    lowered, eager = both(captured("gemma2", 1, torch.bfloat16))
    exact_program = captured("gemma2", 1, torch.float64)
    exact = Executable(exact_program, weights_of(exact_program), backend="eager")
    for tokens in TOKENS:
        truth = exact(inputs_of(tokens))
        errors = [(run(inputs_of(tokens)).double() - truth).pow(2).mean().sqrt() for run in (lowered, eager)]
        # The region rounds at a subset of the places where eager does, each time by up to 2**-9: its error is smaller
        # or, by chance, somewhat larger, but not twice.
        assert 0 < errors[0] <= 2 * errors[1], errors


def paged_inputs(lengths: list[int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tokens = sum(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    req_to_token = torch.zeros(4, 64, dtype=torch.int32)
    for i, length in enumerate(lengths):
        req_to_token[i, :length] = torch.arange(length) + starts[i]
    return {
        "tokens": inputs_of(tokens)["tokens"], "kv_pool": torch.zeros(1, 2, 64, 2, 8, dtype=dtype),
        "req_to_token": req_to_token, "req_pool_indices": torch.arange(len(lengths)),
        "seq_lens": torch.tensor(lengths), "query_start_loc": starts, "out_cache_loc": torch.arange(tokens),
        "rows": starts[1:] - 1,
    }  # fmt: skip


def test_paged_attention_and_collectives_between_regions() -> None:
    lowered, eager = both(paged(torch.float32), collectives=TwoRanks())
    assert lowered.num_steps == 5
    for lengths in ([1], [1, 1], [7], [30, 5, 1]):
        mine, its = paged_inputs(lengths, torch.float32), paged_inputs(lengths, torch.float32)
        close(lowered(mine), eager(its), 1e-5)
        close(mine["kv_pool"], its["kv_pool"], 1e-5)
        assert mine["kv_pool"].abs().max() > 0
    one, two = paged_inputs([7], torch.float32), paged_inputs([7], torch.float32)
    two["rows"] = two["rows"].int()
    fresh = Executable(lowered.program, weights_of(lowered.program), backend="inductor", collectives=TwoRanks())
    with pytest.raises(ValueError, match="input rows has another layout"):
        fresh(two)
    del one["seq_lens"]
    with pytest.raises(ValueError, match="seq_lens"):
        fresh(one)


def test_collectives_need_their_ranks() -> None:
    program = paged(torch.float32)
    with pytest.raises(CompileError, match="the 2 ranks of axis tp"):
        Executable(program, weights_of(program), backend="eager")
    alone = Executable(paged(torch.float32, ranks=1), weights_of(program), backend="eager")
    assert alone(paged_inputs([3], torch.float32)).shape == (1, 97)


def test_weights_are_checked() -> None:
    program = captured("llama", 1, torch.float32)
    weights = weights_of(program)
    name = next(iter(weights))
    with pytest.raises(ValueError, match="has another layout"):
        Executable(program, {**weights, name: weights[name].double()}, backend="eager")
    del weights[name]
    with pytest.raises(ValueError, match="is missing"):
        Executable(program, weights, backend="eager")
    with pytest.raises(ValueError, match="unknown backend"):
        Executable(program, weights, backend="other")  # type: ignore[arg-type]


def one_region() -> Region:
    formal = Formal(("T", 16), torch.float32)
    return Region((formal,), (), (Call("aten.neg", (Ref(0),), ()),), ((Ref(1), formal),))


def one_region_program() -> Program:
    from graphsrt.program import Input, aten

    program = Program("one")
    x = program.add_input("x", Input(("T", 16), torch.float32, "tokens"))
    program.graph.output(program.call(aten.neg.default, x, name="y"))
    program.infer()
    return program


def test_two_processes_compile_once_and_a_damaged_entry_is_rebuilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "from test_executable import *\n"
        "stats = compile_regions(one_region_program(), max_workers=1)\n"
        "print(stats.compiled, stats.reused)"
    )
    command = [sys.executable, "-c", code]
    running = [
        subprocess.Popen(command, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    ends = [process.communicate() for process in running]
    assert sorted(out.split() for out, _ in ends) == [["0", "1"], ["1", "0"]], ends

    monkeypatch.setenv("GRAPHSRT_CACHE", str(tmp_path))
    program, region = one_region_program(), one_region()
    assert list(distinct_regions(cut(program))) == [region]
    place = folder(region)
    assert is_intact(region) and not list(place.parent.glob("*.tmp-*"))
    library = place / "region.so"
    whole = library.read_bytes()
    library.write_bytes(whole[:1000])
    assert not is_intact(region)
    with pytest.raises(CompileError, match="damaged"):
        load(region)
    library.write_bytes(whole)
    (place / "meta.json").unlink()
    with pytest.warns(UserWarning, match="is damaged and is compiled again"):
        lowered = Executable(program, {}, backend="inductor")
    assert lowered.stats.compiled == 1 and is_intact(region)
    x = torch.randn(3, 16)
    assert torch.equal(lowered({"x": x}), -x)


def test_a_failure_to_compile_tells_why(monkeypatch: pytest.MonkeyPatch) -> None:
    formal = Formal(("T", 16), torch.float32)
    wrong = Region((formal,), (), (Call("aten.neg", (Ref(0),), ()),), ((Ref(1), Formal(("T", 16), torch.float64)),))
    with pytest.raises(CompileError, match=r"(?s)does not compile.*aten\.neg.*shape function disagree"):
        inductor.compile_all([wrong])
