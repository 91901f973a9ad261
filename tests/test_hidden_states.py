"""Hidden states beside the logits, and embeddings: transformers' own, on one rank and on several."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedModel

import graphsrt
from graphsrt import ops
from graphsrt.program import aten
from tests.support import tiny
from tests.support.captures import shared

TOLERANCE = 1e-5  # of transformers in float64: it casts to float32 inside norms and softmax all the same
PROMPTS = [tiny.tokens(count, seed=count) for count in (11, 1, 6)]
ASKED = [1, -1, 0]  # in any order; the embedding, the first layer of three, and the last after its norm
PARAMS = graphsrt.SamplingParams(max_new_tokens=5, ignore_eos=True)


@cache
def model_of(family: str) -> PreTrainedModel:
    if family != "gpt_neox":
        return tiny.model(family, layers=3)
    config = GPTNeoXConfig(
        vocab_size=tiny.VOCAB, hidden_size=48, intermediate_size=tiny.INTERMEDIATE, num_hidden_layers=3,
        num_attention_heads=4, max_position_embeddings=tiny.CONTEXT, rotary_pct=0.5, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    made = GPTNeoXForCausalLM(config).double().eval()
    made.set_attn_implementation("eager")
    tiny.randomize(made)
    return made


@cache
def eager(family: str, prompt: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    with torch.no_grad():
        result = model_of(family)(torch.tensor([PROMPTS[prompt]]), output_hidden_states=True, use_cache=False)
    return result.logits[0], tuple(state[0] for state in result.hidden_states)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox"])
def test_they_are_those_of_transformers(family: str, tp: int) -> None:
    options = {"ranks": "simulated"} if tp > 1 else {"backend": "eager"}
    sizes = dict(page_size=4, max_tokens_per_step=8, max_running=4)
    with shared(), graphsrt.compile(model_of(family), tp=tp, capture_hidden=ASKED, **sizes, **options) as compiled:
        program = compiled.program()
        assert list(program.outputs) == ["logits", "hidden_0", "hidden_1", "hidden_3"]
        assert all(program.shape(value)[0] == "R" for value in program.outputs.values())
        results = compiled.logits(PROMPTS, hidden=True)  # 18 tokens in steps of 8: a prompt comes in parts
        for i, (logits, hidden) in enumerate(results):
            want_logits, want = eager(family, i)
            assert list(hidden) == [0, 1, 3] and logits.dtype == hidden[0].dtype == torch.float64
            assert tiny.worst(logits, want_logits) < TOLERANCE
            for index, state in hidden.items():
                assert state.shape == want[index].shape and tiny.worst(state, want[index]) < TOLERANCE, (i, index)
        one_logits, one_hidden = compiled.logits(PROMPTS[0], hidden=True)
        # the prompt is cut elsewhere, so products round differently
        assert tiny.worst(one_logits, results[0][0]) < 1e-12 and tiny.worst(one_hidden[1], results[0][1][1]) < 1e-12

        embedded = compiled.embed(PROMPTS)
        last = torch.stack([eager(family, i)[1][-1][-1] for i in range(len(PROMPTS))])
        assert embedded.shape == (3, 48) and embedded.dtype == torch.float64
        assert tiny.worst(embedded, last / last.norm(dim=1, keepdim=True)) < TOLERANCE

        # the same model generates as if nothing had been captured
        with shared(), graphsrt.compile(model_of(family), tp=tp, **options) as plain:
            want_tokens = [g.token_ids for g in plain.generate(PROMPTS, PARAMS)]
        assert [g.token_ids for g in compiled.generate(PROMPTS, PARAMS)] == want_tokens
        assert compiled.metrics().pages_used == 0


def test_rank_processes_send_them(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = tiny.build("llama", layers=3).float()
    with graphsrt.compile(model, tp=2, backend="eager", capture_hidden=[2, -1]) as compiled:
        logits, hidden = compiled.logits(PROMPTS[0], hidden=True)
        want_logits, want = eager("llama", 0)
        # float32 sums in another order, over width 48 and three layers
        assert tiny.worst(logits, want_logits) < 1e-4 and logits.dtype == hidden[2].dtype == torch.float32
        assert tiny.worst(hidden[2], want[2]) < 1e-4 and tiny.worst(hidden[3], want[3]) < 1e-4
        assert (compiled.embed(PROMPTS[0]).norm(dim=1) - 1).abs().max() < 1e-6


def test_a_captured_layer_costs_a_selection_of_rows_and_nothing_else() -> None:
    model = model_of("llama")
    with shared():
        plain = graphsrt.trace(model, tp=2).program()
        with_hidden = graphsrt.trace(model, tp=2, capture_hidden=[1, 2, 3]).program()
    # The last has its rows, and the one before it gives its rows to the last layer in any case.
    assert with_hidden.count("aten::index_select") == plain.count("aten::index_select") + 1
    for operator in (ops.all_reduce, ops.all_gather, ops.add_rms_norm, ops.rms_norm, aten.linear.default):
        assert len(with_hidden.calls(operator)) == len(plain.calls(operator)), operator
    text = str(with_hidden)
    assert "\n  return lm_head, hidden_1=layers.0.add_1.rows, hidden_2=layers.1.add_1.rows, hidden_3=norm\n" in text
    assert str(graphsrt.Program.from_text(text)) == text
    with pytest.raises(graphsrt.CompileError, match="two results are called hidden_2"):
        graphsrt.Program.from_text(text.replace("hidden_3=", "hidden_2="))


def test_a_divided_result_is_refused() -> None:
    with shared():
        program = graphsrt.trace(model_of("llama"), tp=2, stop_after="page_attention").program()
    divided = next(node for node in program.nodes if str(node.meta["placement"]).startswith("S("))
    program.set_outputs({**program.outputs, "hidden_9": divided})
    from graphsrt.check_placements import check_placements

    with pytest.raises(graphsrt.CompileError, match="the program's result hidden_9 is not whole"):
        check_placements(program)


@pytest.mark.parametrize("index", [4, -5, 1.0, True, "last"])
def test_an_index_that_there_is_not(index: object) -> None:
    with pytest.raises(ValueError, match=r"capture_hidden(?s:.*)from -4 to 3"):
        graphsrt.trace(model_of("llama"), capture_hidden=[index])  # type: ignore[list-item]


def test_without_capture_it_says_what_to_do() -> None:
    with shared(), graphsrt.compile(model_of("llama"), backend="eager") as compiled:
        with pytest.raises(ValueError, match=r"capture_hidden=\[2, -1\]"):
            compiled.logits(PROMPTS[0], hidden=True)
        with pytest.raises(ValueError, match=r"capture_hidden=\[-1\]"):
            compiled.embed(PROMPTS)
