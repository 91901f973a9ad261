"""compile, trace and what they return, through real rank processes and real torchrun."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import graphsrt
from graphsrt.models.checkpoint import StateDictCheckpoint
from graphsrt.recipes import evaluate

CONFIG = dict(
    vocab_size=67, hidden_size=108, intermediate_size=41, num_hidden_layers=3, num_attention_heads=9,
    num_key_value_heads=3, head_dim=16, max_position_embeddings=96, attention_bias=True, tie_word_embeddings=False,
    bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
IDS = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32]


def _model(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).to(dtype).eval()
    for name, parameter in model.named_parameters():  # no zero biases, no unit norms: they hide faults
        torch.nn.init.normal_(parameter.data, 0.7 if "norm" in name else 0.0, 0.3 if parameter.dim() == 1 else 0.15)
    return model


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return _model()


@pytest.fixture(scope="module")
def folder(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("llama")
    model.save_pretrained(place, max_shard_size="100KB")  # several files and an index
    return place


def _expected(model: LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def _close(got: torch.Tensor, want: torch.Tensor) -> None:
    # float32 sums in another order over width 108 and three layers
    assert (got.double() - want.double()).abs().max() <= 1e-5 * want.abs().max()


# -- rank processes ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def in_ranks(folder: Path) -> Iterator[graphsrt.CompiledModel]:
    with graphsrt.compile(folder, tp=2, backend="eager", page_size=4) as compiled:
        yield compiled


def test_rank_processes_give_transformers_logits(in_ranks: graphsrt.CompiledModel, model: LlamaForCausalLM) -> None:
    single = in_ranks.logits(IDS)
    assert single.shape == (len(IDS), 67) and single.dtype == torch.float32
    _close(single, _expected(model, IDS))
    for got, ids in zip(in_ranks.logits([IDS[:1], IDS[3:], torch.tensor(IDS)]), [IDS[:1], IDS[3:], IDS]):
        _close(got, _expected(model, ids))


def test_a_model_in_memory_is_read_by_the_ranks(model: LlamaForCausalLM) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with graphsrt.compile(model, tp=3, backend="eager") as compiled:
        _close(compiled.logits(IDS), _expected(model, IDS))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.config._attn_implementation != "graphsrt"


def test_generation_is_the_same_alone_and_together(in_ranks: graphsrt.CompiledModel) -> None:
    params = graphsrt.SamplingParams(max_new_tokens=9, ignore_eos=True)
    prompts = [IDS[: 1 + n] for n in range(7)]
    together = in_ranks.generate(prompts, params)
    alone = [in_ranks.generate([prompt], params)[0] for prompt in prompts]
    assert [g.token_ids for g in together] == [g.token_ids for g in alone]
    streamed = [t for event in in_ranks.stream(prompts[3], params) for t in event.token_ids]
    assert streamed == together[3].token_ids


def test_coroutines_and_metrics(in_ranks: graphsrt.CompiledModel) -> None:
    params = graphsrt.SamplingParams(max_new_tokens=9, ignore_eos=True)
    want = [g.token_ids for g in in_ranks.generate([IDS, IDS[:3]], params)]
    before = in_ranks.metrics()

    async def main() -> tuple[list[int], list[graphsrt.Generation]]:
        streamed = [t async for event in in_ranks.astream(IDS, params) for t in event.token_ids]
        return streamed, await in_ranks.agenerate([IDS, IDS[:3]], params)

    streamed, generated = asyncio.run(main())
    assert streamed == want[0] and [g.token_ids for g in generated] == want
    after = in_ranks.metrics()
    assert after.generated_tokens - before.generated_tokens == 27
    assert after.num_finished - before.num_finished == 3 and after.pages_used == 0
    # both are measured by rank 0, within the step that the caller measures
    assert after.collectives_s > before.collectives_s and after.compute_s > before.compute_s
    assert after.compute_s + after.collectives_s < after.step_s


def test_a_prompt_longer_than_the_context_is_refused(in_ranks: graphsrt.CompiledModel) -> None:
    with pytest.raises(ValueError, match="96"):
        in_ranks.generate([[5] * 97], graphsrt.SamplingParams(max_new_tokens=1))
    assert in_ranks.generate([IDS], graphsrt.SamplingParams(max_new_tokens=1))  # and the engine goes on


def test_a_killed_rank_ends_generation_with_its_name(folder: Path) -> None:
    compiled = graphsrt.compile(folder, tp=2, backend="eager", max_running=4)
    pids = compiled._executor.pids
    threading.Timer(0.5, os.kill, (pids[1], signal.SIGKILL)).start()
    params = graphsrt.SamplingParams(max_new_tokens=60, ignore_eos=True)
    start = time.monotonic()
    with pytest.raises(graphsrt.RankError, match="rank 1") as caught:
        while True:
            compiled.generate([IDS] * 8, params)
    assert caught.value.rank == 1
    assert time.monotonic() - start < 60  # the promise is 10 s after the kill; this machine may be busy
    compiled.close()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_torchrun_uses_the_group_that_is_there(folder: Path, model: LlamaForCausalLM, tmp_path: Path) -> None:
    script = tmp_path / "serve.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, sys, torch, graphsrt
            model = graphsrt.compile({str(folder)!r}, backend="eager")
            rank = int(os.environ["RANK"])
            generations = model.generate([{IDS}, {IDS[:3]}], graphsrt.SamplingParams(max_new_tokens=5, ignore_eos=True))
            logits = model.logits({IDS})
            torch.save(([g.token_ids for g in generations], logits), {str(tmp_path)!r} + f"/{{rank}}.pt")
            model.close()
            """
        )
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert results[0][0] == results[1][0] and len(results[0][0]) == 2
    for _, logits in results:
        _close(logits, _expected(model, IDS))


# -- without processes -------------------------------------------------------------------------------------------------


def test_a_second_start_compiles_nothing(folder: Path, model: LlamaForCausalLM, tmp_path: Path,
                                         monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setenv("GRAPHSRT_CACHE", str(tmp_path / "cache"))
    counts = []
    for _ in range(2):
        with graphsrt.compile(folder) as compiled:
            _close(compiled.logits(IDS), _expected(model, IDS))
            _close(compiled.logits(IDS[:1]), _expected(model, IDS[:1]))
            stats = compiled.compile_stats
            assert stats is not None
            counts.append((stats.compiled, stats.reused))
            assert f"{stats.compiled} compiled" in compiled.summary()
    assert counts[0][0] > 0 and counts[0][1] == 0
    assert counts[1] == (0, counts[0][0])


def test_float64_is_float64_throughout() -> None:
    model = _model(torch.float64)
    with graphsrt.compile(model, tp=2, ranks="simulated") as compiled:
        logits = compiled.logits(IDS)
        assert logits.dtype == torch.float64 and compiled.program().dtype == torch.float64
        with graphsrt.compile(model, backend="eager") as single:
            assert (logits - single.logits(IDS)).abs().max() <= 1e-12


def test_keys_and_values_in_another_dtype(model: LlamaForCausalLM) -> None:
    with graphsrt.compile(model, backend="eager", kv_dtype="bfloat16") as compiled:
        assert compiled.program().inputs["kv_pool"].dtype == torch.bfloat16
        error = (compiled.logits(IDS) - _expected(model, IDS)).abs().max() / _expected(model, IDS).abs().max()
    assert 1e-6 < error < 3e-2  # keys and values are rounded to 8 bits of mantissa, nothing else is


def test_one_rank_in_its_own_terms(model: LlamaForCausalLM) -> None:
    traced = graphsrt.trace(model, tp=4)
    for rank in range(4):
        local = traced.program(rank=rank)
        assert "shard(" not in str(local)
        again = graphsrt.Program.from_text(str(local))
        source = StateDictCheckpoint(model.state_dict())
        for name, weight in traced.program().weights.items():
            mine = evaluate(weight.recipe, rank, source, weight.dtype)
            assert torch.equal(evaluate(again.weights[name].recipe, 0, source, weight.dtype), mine), name
    with pytest.raises(ValueError, match="0 to 3"):
        traced.program(rank=4)


def test_a_config_gives_a_program_and_nothing_to_run() -> None:
    compiled = graphsrt.compile(LlamaConfig(**CONFIG), tp=4)
    assert compiled.program().count("graphsrt::radix_attention") == 3
    assert "shard_tensor_parallel" in compiled.summary()
    assert compiled.diff("merge_qkv").startswith("---")
    with pytest.raises(graphsrt.CheckpointError, match="no weights"):
        compiled.generate([IDS])


def test_looking_at_stages() -> None:
    traced = graphsrt.trace(
        LlamaConfig(**CONFIG), tp=2, stop_after="shard_tensor_parallel", without=["recognize_gated_mlp"]
    )
    assert traced.program().count("graphsrt::glu") == 0
    assert traced.program(after="normalize").count("graphsrt::all_reduce") == 0
    assert traced.program(phase="decode") is traced.program()
    with pytest.raises(ValueError, match="no pass called 'merge_qkv'"):
        traced.diff("merge_qkv")
    with pytest.raises(ValueError, match="phase"):
        traced.program(phase="draft")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 0}, "tp"),
        ({"tp": True}, "tp"),
        ({"ranks": "threads"}, "ranks"),
        ({"backend": "tensorrt"}, "backend"),
        ({"dtype": "int8"}, "dtype"),
        ({"device": "tpu"}, "device|tpu"),
        ({"experts": "dp"}, "experts"),
        ({"page_size": 0}, "page_size"),
        ({"policy": "sjf"}, "no such policy"),
        ({"max_queue": 0}, "max_queue is too small"),
        ({"without": ["fuse_everything"]}, "fuse_everything"),
        ({"stop_after": "lower"}, "lower"),
        ({"context_length": 0}, "context_length"),
    ],
)
def test_an_argument_out_of_range_is_named(options: dict, message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        graphsrt.compile(LlamaConfig(**CONFIG), **options)
