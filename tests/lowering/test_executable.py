"""Compiled programs against eager ones, and the cache of compiled regions."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from lowering_programs import captured, environment, inputs_of, paged, weights_of

from graphsrt.errors import CompileError
from graphsrt.lowering import inductor, region_cache
from graphsrt.lowering.executable import Executable
from graphsrt.lowering.kernels import radix_attention
from graphsrt.lowering.region_cache import compile_regions, load
from graphsrt.lowering.regions import Call, Formal, Ref, Region, cut, distinct_regions
from graphsrt.program import Input, Program, aten

TOKENS = (1, 2, 7, 37, 300)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of its own, filled at once: starting the processes that compile takes as long as a region does."""
    place = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAPHSRT_CACHE", str(place))
        told: list[bool] = []
        regions = [middle("gemma2", torch.bfloat16), middle("phi3", torch.float64)]
        for program in (captured("llama", 2, torch.float32), paged(torch.float32)):
            regions += distinct_regions(cut(program))
        inductor.compile_all(regions, done=lambda region, compiled: told.append(compiled))
        assert told == [True] * 7
        yield place


def middle(kind: str, dtype: torch.dtype) -> Region:
    """The region from one layer's attention to the next one's."""
    return list(distinct_regions(cut(captured(kind, 2, dtype))))[1]


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
    lowered, eager = both(captured("llama", 2, torch.float32))
    assert (lowered.stats.distinct, lowered.stats.compiled, lowered.stats.reused) == (3, 0, 3)
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


def values_of(region: Region, tokens: int) -> list[torch.Tensor]:
    """Random inputs and weights; int64 inputs are positions."""
    generator = torch.Generator().manual_seed(tokens)
    values = []
    for formal in (*region.inputs, *region.weights):
        shape = [tokens if isinstance(size, str) else size for size in formal.shape]
        if formal.dtype == torch.int64:
            values.append(torch.arange(tokens))
        else:
            value = torch.randn(shape, generator=generator, dtype=torch.float64)
            # rounded to bf16: the same numbers in every dtype
            values.append((value * (shape[-1] ** -0.5 if len(shape) == 2 else 1.0)).bfloat16().to(formal.dtype))
    return values


def test_phi3_in_float64_with_strided_values() -> None:
    region = middle("phi3", torch.float64)
    assert any(formal.strides for _, formal in region.outputs)  # q, k, v are slices of one projection
    run = load(region).run
    for tokens in TOKENS:
        values = values_of(region, tokens)
        for got, want, (_, formal) in zip(run(values), region.run(values), region.outputs):
            close(got, want, 1e-13)  # 80 * 2**-53 = 9e-15 for each of a handful of sums
            assert tokens == 1 or formal.strides is None or got.stride() == formal.strides


def test_gemma2_in_bfloat16_is_no_worse_than_eager() -> None:
    region = middle("gemma2", torch.bfloat16)
    run = load(region).run
    for tokens in TOKENS:
        values = values_of(region, tokens)
        exact = region.run([v.double() if v.is_floating_point() else v for v in values])
        for got, eager, truth in zip(run(values), region.run(values), exact):
            assert got.dtype == torch.bfloat16
            errors = [(x.double() - truth).pow(2).mean().sqrt().item() for x in (got, eager)]
            # The region rounds at a subset of the places where eager does, each time by up to 2**-9 of the value: its
            # error is smaller or, by chance, somewhat larger, but not twice. What is only copied has none.
            assert errors[0] <= 2 * errors[1], errors


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


@pytest.fixture
def plain_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's reference in its place: the kernel has tests of its own, and would be compiled into this cache."""
    monkeypatch.setattr(radix_attention, "radix_attention", radix_attention.reference.radix_attention)


def test_paged_attention_and_collectives_between_regions(plain_attention: None) -> None:
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


def test_collectives_need_their_ranks(plain_attention: None) -> None:
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
    program = Program("one")
    x = program.add_input("x", Input(("T", 16), torch.float32, "tokens"))
    program.graph.output(program.call(aten.neg.default, x, name="y"))
    program.infer()
    return program


def write_library(region: Region, library: Path) -> None:
    """Stands for the compiler."""
    time.sleep(1.0)
    library.write_bytes(b"code of " + region.text.encode())


def compile_here(regions: Sequence[Region], *, max_workers: int | None, done: Callable[[Region, bool], None]) -> None:
    for region in regions:
        done(region, region_cache.build(region))


def test_two_processes_that_want_one_region_compile_it_once(tmp_path: Path) -> None:
    code = (
        "from test_executable import *\n"
        "inductor.compile_region, inductor.compile_all = write_library, compile_here\n"
        "stats = compile_regions(one_region_program())\n"
        "print(stats.compiled, stats.reused)"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code], env=environment(tmp_path), stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    ends = [process.communicate()[0].split() for process in running]
    assert sorted(ends) == [["0", "1"], ["1", "0"]]
    assert len([p for p in (tmp_path / "regions").iterdir() if p.is_dir()]) == 1  # nothing half done stays


@pytest.mark.parametrize("damage", ["cut off", "other bytes", "no meta", "empty meta"])
def test_a_damaged_entry_is_rebuilt(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHSRT_CACHE", str(tmp_path))
    monkeypatch.setattr(inductor, "compile_region", write_library)
    monkeypatch.setattr(inductor, "compile_all", compile_here)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    program, region = one_region_program(), one_region()
    told: list[tuple[int, int, str]] = []
    stats = compile_regions(program, progress=lambda *item: told.append(item))
    assert (stats.distinct, stats.compiled, stats.reused) == (1, 1, 0)
    assert told == [(0, 1, ""), (1, 1, "y")]
    place = region_cache.folder(region)
    whole = (place / "region.so").read_bytes()
    if damage in ("cut off", "other bytes"):
        (place / "region.so").write_bytes(whole[:-1] + (b"!" if damage == "other bytes" else b""))
    elif damage == "no meta":
        (place / "meta.json").unlink()
    else:
        (place / "meta.json").write_text("")
    with pytest.raises(CompileError, match="damaged"):
        load(region)
    with pytest.warns(UserWarning, match="is damaged and is compiled again"):
        assert compile_regions(program).compiled == 1
    assert (place / "region.so").read_bytes() == whole and region_cache.is_intact(region)
    assert compile_regions(program).reused == 1


def test_a_failure_to_compile_tells_why(monkeypatch: pytest.MonkeyPatch) -> None:
    formal = Formal(("T", 16), torch.float32)
    wrong = Region((formal,), (), (Call("aten.neg", (Ref(0),), ()),), ((Ref(1), Formal(("T", 16), torch.float64)),))
    with pytest.raises(CompileError, match=r"(?s)does not compile.*aten\.neg.*shape function disagree"):
        inductor.compile_all([wrong])
