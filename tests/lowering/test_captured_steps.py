"""Captured decode steps: padding that touches nobody, sizes that come and go, and the same numbers as without."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from lowering_programs import paged, weights_of
from transformers import LlamaConfig, LlamaForCausalLM

import graphsrt
from graphsrt.lowering import captured_steps
from graphsrt.lowering.captured_steps import CapturedSteps, size_for, sizes
from graphsrt.lowering.executable import Executable
from graphsrt.lowering.inductor import Worker
from graphsrt.program import Program
from graphsrt.runtime.results import Generation

PAGE = 4


def test_sizes() -> None:
    for rows in range(1, 600):
        size = size_for(rows)
        assert rows <= size and size - rows <= size / 5 and size_for(size) == size
        assert size_for(rows) <= size_for(rows + 1)
    assert sizes(37) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 37]
    assert len(sizes(512)) == 8 + 4 * 6


# -- an executable -----------------------------------------------------------------------------------------------------


def batch(program: Program, rows: int, seed: int) -> dict[str, torch.Tensor]:
    """A step that decodes ``rows`` sequences of different lengths, whose older tokens are in the pool."""
    generator = torch.Generator().manual_seed(seed)
    slots, requests, columns = 64, 4, 64
    table = torch.stack([torch.randperm(slots - 1, generator=generator)[:slots] for _ in range(requests)]) + 1
    lens = torch.randint(1, 30, (rows,), generator=generator)
    owner = torch.arange(rows) % requests
    return {
        "tokens": torch.randint(1, 97, (rows,), generator=generator),
        "kv_pool": torch.randn(1, 2, slots, 2, 8, generator=generator).to(program.inputs["kv_pool"].dtype),
        "req_to_token": torch.nn.functional.pad(table, (0, columns - table.shape[1])).int(),
        "req_pool_indices": owner,
        "seq_lens": lens,
        "query_start_loc": torch.arange(rows + 1),
        "out_cache_loc": table[owner, lens - 1],
        "rows": torch.arange(rows),
    }


@pytest.mark.parametrize("summed", [False, True])  # with the interpreter between launches, and without
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_bound_step_reads_what_its_inputs_hold_by_then(backend: str, summed: bool) -> None:
    program = paged(torch.float32, ranks=1, summed=summed)
    executable = Executable(program, weights_of(program), backend=backend)  # type: ignore[arg-type]
    held = batch(program, 3, seed=0)
    first, replay = executable.bind(held)
    assert torch.equal(first["logits"], executable(batch(program, 3, seed=0)))
    for seed in range(4):
        fresh = batch(program, 3, seed)
        for name, value in held.items():
            value.copy_(fresh[name])
        for _ in range(2):  # it writes the same slots again
            assert torch.equal(replay()["logits"], executable(fresh))
        assert torch.equal(held["kv_pool"], fresh["kv_pool"])
    with pytest.raises(ValueError, match="seq_lens"):
        executable.bind({**held, "seq_lens": held["seq_lens"].int()})


@pytest.mark.parametrize("summed", [False, True])
def test_padding_touches_nobody(summed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of padding are NaN from the embedding on, and so is every slot that holds nothing."""
    monkeypatch.setitem(captured_steps.FILLINGS, "rows", 0)  # what this program calls its rows of logits
    program = paged(torch.float32, ranks=1, summed=summed)
    weights = weights_of(program)
    executable = Executable(program, weights, backend="inductor")
    poisoned = {**weights, "embed": weights["embed"].clone()}
    poisoned["embed"][0] = torch.nan
    pools = batch(program, 1, 0)["kv_pool"]
    lent = {"kv_pool": pools, "req_to_token": batch(program, 1, 0)["req_to_token"]}
    steps = CapturedSteps(program, Executable(program, poisoned, backend="inductor").bind, lent, limit=50)
    for seed, rows in enumerate([1, 8, 1, 9, 3, 17, 33, 9, 50, 2]):
        given = batch(program, rows, seed)
        for name in lent:
            lent[name].copy_(given[name])
        used = {int(s) for row, n in zip(given["req_pool_indices"], given["seq_lens"])
                for s in given["req_to_token"][row, :n]}  # fmt: skip
        pools[:, :, [s for s in range(64) if s not in used]] = torch.nan
        before = pools.clone()
        inputs = {name: value.numpy() for name, value in given.items() if name not in lent}
        got = steps.run(inputs, rows)["logits"]
        want = executable({**given, "kv_pool": before})
        assert got.shape == want.shape and not got.isnan().any()
        # compiled loops handle the last rows one by one, with other roundings of exp and rsqrt: units of 2**-24 each
        assert (got - want).abs().max() <= 1e-6 * want.abs().max()
        # what was written is what the step without padding writes, and nothing else
        assert torch.equal(pools.isnan(), before.isnan())
        assert (pools - before).nan_to_num().abs().max() <= 1e-6
    assert steps.size(50) == 50 and steps.size(51) is None


# -- an engine ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=67, hidden_size=108, intermediate_size=41, num_hidden_layers=3, num_attention_heads=9,
        num_key_value_heads=3, head_dim=16, max_position_embeddings=96, attention_bias=True, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    made = LlamaForCausalLM(config).eval()
    for name, parameter in made.named_parameters():  # no zero biases, no unit norms: they hide faults
        torch.nn.init.normal_(parameter.data, 0.7 if "norm" in name else 0.0, 0.3 if parameter.dim() == 1 else 0.15)
    made.model.embed_tokens.weight.data[0] = torch.nan  # what padding rows are made of; no prompt has this token
    made.lm_head.weight.data[0] = 0
    return made


@pytest.fixture(scope="module")
def engines(model: LlamaForCausalLM) -> Iterator[tuple[graphsrt.CompiledModel, graphsrt.CompiledModel]]:
    """Captured steps for up to 9 sequences, and the program node by node."""
    options = {"page_size": PAGE, "max_total_tokens": 600, "max_running": 9, "prefix_cache": False}
    with (
        graphsrt.compile(model, backend="inductor", **options) as captured,
        graphsrt.compile(model, backend="eager", **options) as eager,
    ):
        for pool in captured._executor._runner._kv_pools.values():
            pool[0].fill_(torch.nan)
        yield captured, eager


def prompts_of(count: int) -> list[list[int]]:
    """Prompts of 1 to 13 tokens, so that sequences cross pages at different times."""
    generator = np.random.default_rng(count)
    return [generator.integers(3, 67, 1 + (5 * i) % 13).tolist() for i in range(count)]


def params_of(new: int) -> graphsrt.SamplingParams:
    return graphsrt.SamplingParams(max_new_tokens=new, ignore_eos=True, logprobs=3)


def same(got: list[Generation], want: list[Generation]) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.token_ids == b.token_ids
        for one, other in zip(a.logprobs or [], b.logprobs or [], strict=True):
            ours = np.array([one.logprob, *(value for _, value in one.top)])
            # float32 sums of width 108 in another order, three layers: a hundred units of 2**-24 at most
            assert np.abs(ours - np.array([other.logprob, *(value for _, value in other.top)])).max() < 1e-4


def test_batches_that_grow_and_shrink_give_what_eager_gives(
    engines: tuple[graphsrt.CompiledModel, graphsrt.CompiledModel],
) -> None:
    captured, eager = engines
    lengths = [40, 3, 9, 9, 17, 2, 30, 5]  # one sequence, then eight, then one again, and all sizes between
    prompts, params = prompts_of(8), [params_of(n) for n in lengths]
    before = captured.metrics()
    got = captured.generate(prompts, params)
    after = captured.metrics()
    same(got, eager.generate(prompts, params))
    same(captured.generate(prompts[:1], params[:1]), got[:1])
    assert after.num_captured_steps - before.num_captured_steps == 39  # all but the one with the prompts
    assert after.num_decode_steps - before.num_decode_steps == 39
    assert eager.metrics().num_captured_steps == 0


def test_steps_that_fit_no_size_are_counted_and_right(model: LlamaForCausalLM) -> None:
    """Nothing is captured for a program whose inputs have no padding; steps with prompts are as long as they are."""
    options = {"page_size": PAGE, "max_total_tokens": 400, "max_running": 12}
    with graphsrt.compile(model, backend="inductor", input_embeds=True, **options) as dynamic:
        got = dynamic.generate(prompts_of(3), params_of(6))
        now = dynamic.metrics()
        assert (now.num_captured_steps, now.num_decode_steps, now.padding_rows) == (0, 5, 0)
        assert "0 of 5 steps" in str(now) and "graphsrt_captured_steps_total 0" in now.prometheus()
    with graphsrt.compile(model, backend="inductor", **options) as captured:
        same(captured.generate(prompts_of(3), params_of(6)), got)
        captured.generate(prompts_of(11), params_of(3))
        now = captured.metrics()
        assert (now.num_captured_steps, now.num_decode_steps) == (5 + 2, 5 + 2)
        assert now.padding_rows == 2 * (12 - 11)


def test_sizes_that_decode_a_lot_get_code_of_their_own(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphsrt.runtime.size_compiler.OFTEN", 3)
    # Here somebody waits for it, perhaps on a machine that is never idle; and whatever the cache has, it comes late.
    monkeypatch.setattr("graphsrt.runtime.size_compiler.Worker", lambda idle: Worker())
    may_begin = threading.Event()
    monkeypatch.setattr("graphsrt.runtime.size_compiler.is_intact", lambda region: not may_begin.wait())
    options = {"page_size": PAGE, "max_total_tokens": 400, "max_running": 12}
    with graphsrt.compile(model, backend="inductor", compile_effort="max", **options) as compiled:
        got = compiled.generate(prompts_of(11), params_of(2))  # of 12 rows, one step: not often
        sizes = compiled.engine._sizes
        assert sizes is not None and sizes._thread is None
        want = compiled.generate(prompts_of(3), params_of(9))
        runner = compiled._executor._runner
        assert {key for key in runner._captured._steps if key[0] == 3} == {(3, False)}
        may_begin.set()
        wait_for(lambda: 3 in sizes._ready)
        same(compiled.generate(prompts_of(3), params_of(9)), want)
        assert {key for key in runner._captured._steps if key[0] == 3} == {(3, True)}
        same(compiled.generate(prompts_of(11), params_of(2)), got)
    monkeypatch.setattr("graphsrt.runtime.size_compiler.Worker", Worker)
    with graphsrt.compile(model, tp=3, backend="inductor", compile_effort="max", **options) as ranks:
        same(ranks.generate(prompts_of(3), params_of(5)), [g for g in ranks.generate(prompts_of(3), params_of(5))])
        sizes = ranks.engine._sizes
        assert sizes is not None
    assert sizes._thread is not None and not sizes._thread.is_alive()  # in the middle of compiling
    with pytest.raises(ValueError, match="'fast', or 'max'"):
        graphsrt.compile(model, compile_effort="most")


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)
