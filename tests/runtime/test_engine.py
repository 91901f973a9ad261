from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from memory_executor import EOS, VOCAB, MemoryExecutor, reference

from graphsrt.errors import GraphsrtError, RankError
from graphsrt.runtime.detokenizer import Detokenizer
from graphsrt.runtime.drafter import PromptLookup
from graphsrt.runtime.engine import Engine
from graphsrt.runtime.forward_batch import ForwardBatch, ForwardMode
from graphsrt.runtime.request import RequestState, seed_of_sample
from graphsrt.runtime.sampling_params import SamplingParams
from graphsrt.runtime.waiting_line import QueueFull

GREEDY = SamplingParams(max_new_tokens=6, ignore_eos=True)


class ByteTokenizer:
    """A token per byte, 256 is special: the least tokenizer that can cut a character in pieces."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        assert skip_special_tokens
        return bytes(token for token in ids if token < 256).decode(errors="replace")


def make(
    tokenizer: Any = None,
    script: Callable[[list[int]], int] | None = None,
    *,
    num_pages: int = 30,
    page_size: int = 4,
    context: int = 64,
    max_running: int = 4,
    budget: int = 8,
    vocab: int = VOCAB,
    eos: int | None = EOS,
    **more: Any,
) -> tuple[Engine, MemoryExecutor]:
    executor = MemoryExecutor(num_pages, page_size, max_running, context, script)
    engine = Engine(
        executor,
        tokenizer,
        eos,
        context,
        num_pages,
        page_size,
        vocab_size=vocab,
        max_running=max_running,
        max_tokens_per_step=budget,
        **more,
    )
    return engine, executor


def make_text(prompt: str, continuation: bytes | list[int], **more: Any) -> tuple[Engine, MemoryExecutor]:
    """An engine that answers ``prompt`` with these bytes and then token 256, its end of sequence."""
    answer, start = [*continuation, *[256] * 9], len(prompt.encode())  # more than one where drafts go past the end
    script = lambda history: answer[len(history) - start]  # noqa: E731
    return make(ByteTokenizer(), script, vocab=257, eos=256, num_pages=100, context=256, **more)


def assert_idle(engine: Engine) -> None:
    scheduler = engine.scheduler
    assert not scheduler.has_work
    assert scheduler.ledger.available_pages == scheduler.kv_pool.total_pages
    assert scheduler.req_to_token.available == scheduler.req_to_token.max_requests


# ---- generate ----


def test_generate_many_prompts_each_with_its_params() -> None:
    engine, executor = make(num_pages=9)
    prompts = [list(range(i, i + 1 + 3 * i % 11)) for i in range(10)]
    params = [SamplingParams(max_new_tokens=4 + i, temperature=i % 2, seed=i) for i in range(10)]
    results = engine.generate(prompts, params, progress=True)
    for prompt, own, result in zip(prompts, params, results):
        assert (result.token_ids, result.finish_reason) == reference(prompt, own, own.seed or 0)
        assert result.prompt_token_ids == prompt and result.text == ""
        assert (result.num_prompt_tokens, result.num_generated_tokens) == (len(prompt), len(result.token_ids))
    assert max(batch.batch_size for batch in executor.batches) > 1
    assert_idle(engine)


def test_a_seed_gives_the_same_tokens_in_any_batch_and_none_differs_each_time() -> None:
    params = SamplingParams(max_new_tokens=8, temperature=1.0, seed=-5, ignore_eos=True)
    alone = make()[0].generate([[1, 2, 3]], params)[0].token_ids
    engine, _ = make(num_pages=7, max_running=3, budget=5)
    crowd = engine.generate([[1, 2, 3], [4] * 9, [1, 2, 3], [5]], [params, GREEDY, params, GREEDY])
    assert crowd[0].token_ids == crowd[2].token_ids == alone
    fresh = SamplingParams(max_new_tokens=8, temperature=1.0, ignore_eos=True)
    first, second = engine.generate([[1, 2, 3]] * 2, fresh)
    assert first.token_ids != second.token_ids


def test_one_prompt_is_a_list_of_one() -> None:
    engine, _ = make(ByteTokenizer(), lambda history: 97, vocab=257, eos=256)
    assert [g.text for g in engine.generate("hi", GREEDY)] == ["aaaaaa"]
    assert [g.prompt_token_ids for g in engine.generate([104, 105], GREEDY)] == [[104, 105]]
    assert [g.prompt_token_ids for g in engine.generate(np.array([104, 105]), GREEDY)] == [[104, 105]]  # type: ignore[arg-type]
    assert engine.generate([], GREEDY) == []


def test_refusals_name_the_prompt_and_run_nothing() -> None:
    engine, executor = make()
    good = [1, 2]
    for prompts, params, message in (
        ([good, []], GREEDY, "prompt 1 is empty"),
        ([[3, 50, -1, 50]], GREEDY, r"prompt 0 has token ids outside the vocabulary \[0, 50\): -1, 50"),
        ([[1.5]], GREEDY, "flat list of token ids"),
        (["text"], GREEDY, "there is no tokenizer"),
        ([good, [1] * 65], GREEDY, "longer than the context"),
        ([good, [1] * 60], GREEDY, r"60 \+ 6 = 66(?s:.*)at most 4"),
        ([good], [GREEDY, GREEDY], "1 prompts but 2 SamplingParams"),
        ([good], SamplingParams(stop="x"), "stop strings need a tokenizer"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.generate(prompts, params)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the prompt is empty"):
        engine.stream([])  # at once, not at the first next()
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        make(ByteTokenizer())[0].generate("")
    assert not executor.batches
    assert_idle(engine)


# ---- many prompts, many samples, drafts ----


@pytest.mark.parametrize("cached", [True, False])
def test_samples_of_one_prompt_are_repeatable_and_compute_it_once(cached: bool) -> None:
    engine, executor = make(budget=40, prefix_cache=cached)
    prompt = list(range(17))
    params = SamplingParams(max_new_tokens=6, temperature=1.0, seed=3, n=3, ignore_eos=True)
    first, other = engine.generate([prompt, [1, 2]], [params, GREEDY])
    assert other.alternatives == [] and other.samples == [other] and len(first.alternatives) == 2
    tokens = [sample.token_ids for sample in first.samples]
    assert len({tuple(ids) for ids in tokens}) == 3
    assert tokens[0] == reference(prompt, params, 3)[0]  # as with n=1
    assert tokens == [reference(prompt, params, seed_of_sample(3, i))[0] for i in range(3)]
    # The prompts, of which whole pages are computed once, and 5 tokens of each request, as the last one never is.
    assert sum(batch.num_tokens for batch in executor.batches) == (17 + 1 + 1 if cached else 3 * 17) + 2 + 4 * 5
    assert [sample.num_cached_tokens for sample in first.samples] == [0, 16 * cached, 16 * cached]
    fresh = engine.generate([prompt], replace(params, seed=None))[0]
    assert len({tuple(sample.token_ids) for sample in fresh.samples}) == 3
    with pytest.raises(ValueError, match="n is 3"):
        engine.stream(prompt, params)
    assert_idle(engine)


def test_more_prompts_than_may_wait_are_fed_and_a_further_request_is_refused() -> None:
    engine, _ = make(num_pages=9, max_queue=3, budget=5)
    stream = engine.stream([9], SamplingParams(max_new_tokens=25, ignore_eos=True))
    tokens = next(stream).token_ids
    most = 0

    def look(batch: ForwardBatch) -> None:
        nonlocal most
        most = max(most, engine.scheduler.num_waiting)

    engine.executor.before_step = look  # type: ignore[attr-defined]
    prompts = [[i % VOCAB, i // VOCAB] for i in range(300)]
    results = engine.generate(prompts, SamplingParams(max_new_tokens=2, ignore_eos=True))
    assert [r.token_ids for r in results] == [
        reference(p, SamplingParams(max_new_tokens=2, ignore_eos=True))[0] for p in prompts
    ]
    assert 0 < most <= 3
    assert all(logits.shape == (2, 2) for logits in engine.logits(prompts[:20]))
    tokens += [token for event in stream for token in event.token_ids]
    assert tokens == reference([9], SamplingParams(max_new_tokens=25, ignore_eos=True))[0]
    requests = [engine.make_request([i], GREEDY) for i in range(4)]
    for request in requests[:3]:
        engine.add(request)
    added = engine.metrics().num_requests
    with pytest.raises(QueueFull, match="max_queue=3"):
        engine.add(requests[3])
    assert engine.metrics().num_requests == added and not requests[3].on_done
    engine.step()
    engine.add(requests[3])
    while engine.scheduler.has_work:
        engine.step()
    assert engine.result(requests[3]).token_ids == reference([3], GREEDY)[0]
    assert_idle(engine)


def test_an_interruption_while_prompts_are_still_outside_releases_all() -> None:
    engine, executor = make(num_pages=9, max_queue=2)

    def interrupt(batch: ForwardBatch) -> None:
        if len(executor.batches) == 3:
            raise ZeroDivisionError

    executor.before_step = interrupt
    with pytest.raises(ZeroDivisionError):
        engine.generate([[i] for i in range(30)], GREEDY)
    executor.before_step = None
    assert_idle(engine)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_new_tokens=20),
        SamplingParams(max_new_tokens=20, stop="cd"),
        SamplingParams(max_new_tokens=20, stop="f"),
        SamplingParams(max_new_tokens=4, stop="cd"),
        SamplingParams(max_new_tokens=5, stop="cd"),
        SamplingParams(max_new_tokens=20, stop="b", min_new_tokens=4),
        SamplingParams(max_new_tokens=20, stop="e", stop_token_ids=[102]),
        SamplingParams(max_new_tokens=20, stop="zz", stop_token_ids=[102]),
    ],
)
def test_a_stop_within_drafted_tokens_ends_the_text_where_plain_decoding_does(params: SamplingParams) -> None:
    answer = b"abcdefabc"
    plain = make_text("go", answer)[0].generate("go", params)[0]
    engine, executor = make_text("go", answer)
    whole = [*answer, 256, 0, 0, 0, 0, 0]
    drafted = engine.generate("go", params, drafter=lambda tokens: whole[len(tokens) - 2 :][:5])[0]
    assert drafted == plain
    assert any(batch.forward_mode is ForwardMode.TARGET_VERIFY for batch in executor.batches)
    assert len(executor.batches) < len(plain.token_ids)
    metrics = engine.metrics()
    assert metrics.generated_tokens == len(plain.token_ids) and metrics.accepted_tokens > 0
    assert_idle(engine)


def test_a_drafter_outside_the_vocabulary_is_named() -> None:
    engine, _ = make()
    with pytest.raises(ValueError, match=r"drafter gave no list of token ids(?s:.*)PromptBad"):

        def PromptBad(tokens: Any) -> list[int]:
            return [VOCAB]

        engine.generate([[1, 2]], GREEDY, drafter=PromptBad)
    assert_idle(engine)
    assert engine.generate([[1, 2]], GREEDY, drafter=PromptLookup())[0].token_ids == reference([1, 2], GREEDY)[0]


def test_flushing_leaves_what_is_in_use() -> None:
    engine, _ = make(budget=40)
    engine.generate([list(range(12))], GREEDY)
    stream = engine.stream([*range(8), 1], GREEDY)
    next(stream)
    assert engine.flush_cache() == 2 and engine.metrics().pages_cached == 0  # of 4 pages, 2 are read by the stream
    rest = [token for event in stream for token in event.token_ids]
    assert rest == reference([*range(8), 1], GREEDY)[0][1:]
    assert engine.flush_cache() > 0 and engine.flush_cache() == 0
    assert_idle(engine)


# ---- errors ----


def test_a_dead_rank_fails_everything_and_the_engine_says_so_from_then_on() -> None:
    engine, executor = make()
    stream = engine.stream([1, 2], GREEDY)
    next(stream)
    other = engine.scheduler.requests[0]

    def die(batch: ForwardBatch) -> None:
        raise RankError("rank 3 was killed by signal 9", rank=3)

    executor.before_step = die
    with pytest.raises(RankError, match="rank 3 was killed"):
        engine.generate([[3], [4], [5], [6], [7]], GREEDY)
    assert other.state is RequestState.FAILED
    with pytest.raises(RankError, match="rank 3 was killed"):
        next(stream)
    for call in (lambda: engine.generate([[1]]), lambda: engine.stream([1]), lambda: engine.logits([[1]]), engine.step):
        with pytest.raises(RankError, match=r"engine has stopped because a rank failed(?s:.*)signal 9") as caught:
            call()
        assert caught.value.rank == 3
    engine.close()
    engine.close()
    assert executor.num_closed == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_interruption_releases_everything_and_the_engine_goes_on(error: type[BaseException]) -> None:
    engine, executor = make(num_pages=9)
    stream = engine.stream([1, 2], SamplingParams(max_new_tokens=9, ignore_eos=True))
    seen = next(stream).token_ids

    def interrupt(batch: ForwardBatch) -> None:
        if len(executor.batches) == 4:
            raise error

    executor.before_step = interrupt
    with pytest.raises(error):
        engine.generate([[3], [4] * 9, [5], [6], [7]], GREEDY)
    executor.before_step = None
    # Only requests of this call are gone. One that shared the failing step has failed too, unless it was the keyboard.
    if error is KeyboardInterrupt:
        assert len(engine.scheduler.requests) == 1
        for event in stream:
            seen += event.token_ids
        assert seen == reference([1, 2], SamplingParams(max_new_tokens=9, ignore_eos=True))[0]
    else:
        with pytest.raises(error):
            next(stream)
    assert_idle(engine)
    assert engine.generate([[3, 4]], GREEDY)[0].token_ids == reference([3, 4], GREEDY)[0]


def test_close() -> None:
    engine, executor = make()
    with engine:
        next(engine.stream([1], GREEDY))
    assert executor.num_closed == 1
    with pytest.raises(GraphsrtError, match="engine is closed"):
        engine.generate([[1]])


# ---- logits ----


def test_logits_of_all_rows_in_chunks_beside_decoding_and_preemption() -> None:
    engine, executor = make(num_pages=9, budget=5)
    stream = engine.stream([1, 2], SamplingParams(max_new_tokens=25, ignore_eos=True))
    tokens = next(stream).token_ids
    sequences = [[3, 4, 5], list(range(12)), [6]]
    logits = engine.logits(sequences)
    for sequence, own in zip(sequences, logits):
        assert own.tolist() == [[i + 1.0, float(sum(sequence[: i + 1]))] for i in range(len(sequence))]
    tokens += [token for event in stream for token in event.token_ids]
    assert tokens == reference([1, 2], SamplingParams(max_new_tokens=25, ignore_eos=True))[0]
    assert any(batch.return_logits and batch.batch_size > 1 for batch in executor.batches)
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        engine.logits([[1], []])
    assert engine.logits([[1] * 28])[0].shape == (28, 2)
    with pytest.raises(ValueError, match="does not fit the KV pool"):
        engine.logits([[1] * 33])
    assert_idle(engine)


# ---- text ----

TEXT = "naïve 日本語 🙂!"


def test_stream_never_shows_half_a_character() -> None:
    engine, _ = make_text("go", TEXT.encode())
    events = list(engine.stream("go", SamplingParams(max_new_tokens=60)))
    assert "".join(str(event) for event in events) == TEXT
    assert all("\ufffd" not in event.text for event in events)
    assert [event.text for event in events][:4] == ["n", "a", "ï", "v"]
    assert [token for event in events for token in event.token_ids] == [*TEXT.encode(), 256]
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["stop"]
    result = engine.generate("go", SamplingParams(max_new_tokens=60))[0]
    assert (result.text, result.finish_reason, result.token_ids[-1]) == (TEXT, "stop", 256)
    cut = engine.generate("go", SamplingParams(max_new_tokens=3))[0]
    assert (cut.text, cut.finish_reason) == ("na\ufffd", "length")  # at the end, what was held back is shown
    assert "".join(str(event) for event in engine.stream("go", SamplingParams(max_new_tokens=3))) == "na\ufffd"


@pytest.mark.parametrize(
    ("stop", "text", "reason", "num_tokens"),
    [
        ("cd", "ab", "stop", 4),
        (["zz", "ef", "bc"], "a", "stop", 3),
        ("a", "", "stop", 1),
        ("dX", "abcdef", "stop", 7),  # held back, and shown as it was no stop string after all; 256 ends it
        ("fX", "abcdef", "stop", 7),
    ],
)
def test_stop_strings_are_cut_and_their_beginnings_held_back(
    stop: str | list[str], text: str, reason: str, num_tokens: int
) -> None:
    engine, _ = make_text("go", b"abcdef")
    params = SamplingParams(max_new_tokens=20, stop=stop)
    result = engine.generate("go", params)[0]
    assert (result.text, result.finish_reason, len(result.token_ids)) == (text, reason, num_tokens)
    events = list(engine.stream("go", params))
    shown = ""
    for event in events:
        shown += event.text
        assert text.startswith(shown)
    assert shown == text and events[-1].finish_reason == reason
    assert_idle(engine)


def test_ends() -> None:
    engine, _ = make_text("go", b"abcabc")

    def run(**params: Any) -> tuple[str, str, int]:
        result = engine.generate("go", SamplingParams(**params))[0]
        return result.text, result.finish_reason, len(result.token_ids)

    assert run(max_new_tokens=3) == ("abc", "length", 3)
    assert run(max_new_tokens=3, stop="c") == ("ab", "stop", 3)  # both at once: the text says stop
    assert run(stop_token_ids=[98]) == ("a", "stop", 2)
    assert run(stop_token_ids=[98], min_new_tokens=3) == ("abca", "stop", 5)
    assert run(stop="b", min_new_tokens=3) == ("abca", "stop", 5)
    assert run(stop="bc", min_new_tokens=3) == ("abca", "stop", 6)
    assert run(stop="c", min_new_tokens=3) == ("ab", "stop", 3)
    assert run(max_new_tokens=7, ignore_eos=True) == ("abcabc", "length", 7)


def test_dropping_a_stream_cancels_it_and_others_advance_along() -> None:
    engine, _ = make()
    first, second = engine.stream([1], GREEDY), engine.stream([2], GREEDY)
    assert not engine.scheduler.has_work  # nothing runs before it is asked for
    tokens = next(first).token_ids + next(second).token_ids
    assert engine.scheduler.num_active == 2
    first.close()  # type: ignore[attr-defined]
    assert engine.scheduler.num_active == 1
    tokens += [token for event in second for token in event.token_ids]
    assert tokens[1:] == reference([2], GREEDY)[0]
    assert_idle(engine)


def test_stepping_by_hand_and_cancelling() -> None:
    engine, _ = make_text("go", b"abcdef")
    request = engine.make_request("go", SamplingParams(max_new_tokens=20))
    engine.add(request)
    assert engine.take(request) is None
    assert engine.step() == [request] and engine.step() == [request]
    event = engine.take(request)
    assert event is not None and (event.text, event.token_ids, event.finish_reason) == ("ab", [97, 98], None)
    engine.step()
    engine.cancel(request)
    event = engine.take(request)
    assert event is not None and (event.text, event.token_ids, event.finish_reason) == ("c", [99], "cancelled")
    assert engine.take(request) is None
    assert engine.result(request).text == "abc" and engine.result(request).finish_reason == "cancelled"
    assert engine.step() == []
    assert_idle(engine)


@settings(max_examples=80, deadline=None)
@example(" aa", [], [1], ["a", " aa"])  # the longer one begins first, the shorter one is complete first
@example(" aa", [], [3], ["a", " aa"])
@example(" aa", [], [2], ["aa", " aa"])  # complete together
@given(
    st.text(alphabet="ab é日🙂\ufffd", max_size=25),
    st.lists(st.integers(0, 255), max_size=3),
    st.lists(st.integers(1, 9), min_size=1, max_size=60),
    st.lists(st.text(alphabet="ab é", min_size=1, max_size=3), max_size=3),
)
def test_detokenizer_in_any_portions(text: str, tail: list[int], portions: list[int], stop: list[str]) -> None:
    ids: list[int] = []
    for byte in text.encode():  # with special tokens strewn in, which give no text
        ids += [byte, 256] if byte % 3 == 0 else [byte]
    ids += tail
    whole = ByteTokenizer().decode(ids, skip_special_tokens=True)
    ends = ((whole.find(s) + len(s), whole.find(s)) for s in stop if s in whole)
    _, cut = min(ends, default=(len(whole), len(whole)))  # the first to be complete
    detokenizer = Detokenizer(ByteTokenizer(), stop)
    shown, at = "", 0
    for size in itertools.cycle(portions):
        if at >= len(ids) or detokenizer.push(ids[at : at + size]):
            break
        at += size
        shown += detokenizer.take()
        assert whole[:cut].startswith(shown)
    detokenizer.finish()
    shown += detokenizer.take()
    assert shown == detokenizer.text == whole[:cut]
    assert detokenizer.stopped == (cut < len(whole) or any(s in whole for s in stop))


def bpe() -> Any:
    """A byte-level BPE like SmolLM2's, trained here."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(["the cat sat on the mat. the end"] * 20, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>")


def sentencepiece_like() -> Any:
    """Words with a leading space that is dropped from the first, and single bytes for what is not in the vocabulary."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for word in ("▁", "▁the", "▁cat", "s", "a", "t", "▁on"):
        vocab[word] = len(vocab)
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    decoders = tokenizers.decoders
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


@pytest.mark.parametrize("build", [bpe, sentencepiece_like])
def test_streamed_text_is_what_a_real_tokenizer_decodes(build: Callable[[], Any]) -> None:
    tokenizer = build()
    if build is bpe:
        ids = tokenizer("the cat sat on the 日本語 mat 🙂 and naïve end.")["input_ids"]
        ids = [*ids[:9], tokenizer.eos_token_id, *ids[9:]]
    else:
        words = tokenizer.get_vocab()
        ids = [
            words["▁the"],
            words["▁cat"],
            words["s"],
            words["▁"],
            *(byte + 1 for byte in "日本🙂".encode()),
            words["▁on"],
        ]
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    for size in (1, 2, 5, len(ids)):
        detokenizer, pieces = Detokenizer(tokenizer), []
        for at in range(0, len(ids), size):
            detokenizer.push(ids[at : at + size])
            pieces.append(detokenizer.take())
        detokenizer.finish()
        assert "".join(pieces) + detokenizer.take() == whole
        assert not any("\ufffd" in piece for piece in pieces)
