from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphsrt.runtime.forward_batch import ForwardBatch, ForwardMode, PrefixUpdate

INT = st.integers(-(2**63), 2**63 - 1)


@st.composite
def batches(draw: st.DrawFn) -> ForwardBatch:
    mode = draw(st.sampled_from(ForwardMode))
    extend = draw(st.lists(st.just(1) if mode == ForwardMode.DECODE else st.integers(1, 4), max_size=4))
    real = sum(extend)
    total = real + draw(st.integers(0, 3))
    rows = draw(st.integers(0, total))
    edits, logprobs = draw(st.integers(0, 3)), draw(st.integers(0, 3))

    def ints(count: int) -> list[int]:
        return draw(st.lists(INT, min_size=count, max_size=count))

    def floats(count: int) -> list[float]:
        return draw(st.lists(st.floats(), min_size=count, max_size=count))

    updates = [
        PrefixUpdate(draw(INT), draw(INT), np.array(ints(n))) for n in draw(st.lists(st.integers(0, 3), max_size=3))
    ]
    return ForwardBatch(
        forward_mode=mode,
        tokens=np.array(ints(total)),
        positions=np.array(ints(total)),
        req_pool_indices=np.array(ints(len(extend))),
        seq_lens=np.array(draw(st.lists(st.integers(0, 2**40), min_size=len(extend), max_size=len(extend)))),
        extend_seq_lens=np.array(extend),
        out_cache_loc=np.array(ints(total)),
        logit_rows=np.array(ints(rows)),
        temperature=np.array(floats(rows)),
        top_p=np.array(floats(rows)),
        top_k=np.array(ints(rows)),
        min_p=np.array(floats(rows)),
        uniform=np.array(floats(rows)),
        edit_rows=np.array(ints(edits)),
        edit_tokens=np.array(ints(edits)),
        edit_bias=np.array(floats(edits)),
        edit_scale=np.array(floats(edits)),
        edit_shift=np.array(floats(edits)),
        logprob_rows=np.array(ints(logprobs)),
        logprob_targets=np.array(ints(logprobs)),
        logprob_top=np.array(ints(logprobs)),
        num_token_non_padded=real,
        save_kv_cache=draw(st.booleans()),
        return_logits=draw(st.booleans()),
        return_hidden=draw(st.booleans()),
        prefix_updates=updates,
    )


@given(batches(), st.lists(INT, max_size=3))
def test_encode_decode_round_trip(batch: ForwardBatch, trailing: list[int]) -> None:
    buffer = batch.encode()
    assert buffer.dtype == np.int64 and buffer.ndim == 1
    decoded = ForwardBatch.decode(np.concatenate([buffer, np.array(trailing, dtype=np.int64)]))
    for name, value in vars(batch).items():
        other = getattr(decoded, name)
        if isinstance(value, np.ndarray):
            assert other.dtype == value.dtype and other.tobytes() == value.tobytes(), name
        elif name != "prefix_updates":
            assert other == value and type(other) is type(value), name
    assert [(u.req, u.start, u.slots.tolist()) for u in decoded.prefix_updates] == [
        (u.req, u.start, u.slots.tolist()) for u in batch.prefix_updates
    ]
    assert decoded == batch
    decoded.forward_mode = ForwardMode((batch.forward_mode + 1) % 4)
    assert decoded != batch


def small(**changes: object) -> ForwardBatch:
    fields: dict[str, object] = dict(
        forward_mode=ForwardMode.MIXED,
        tokens=[5, 6, 7, 8],
        positions=[9, 0, 1, 2],
        req_pool_indices=[2, 0],
        seq_lens=[10, 3],
        extend_seq_lens=[1, 3],
        out_cache_loc=[41, 16, 17, 18],
        logit_rows=[0, 3],
        temperature=[0.0, 0.5],
        top_p=[1.0, 0.9],
        top_k=[0, 3],
        min_p=[0.0, 0.1],
        uniform=[0.25, 0.5],
    )
    return ForwardBatch(**(fields | changes))  # type: ignore[arg-type]


def test_counts_are_filled_in() -> None:
    batch = small()
    assert (batch.num_tokens, batch.batch_size, batch.num_token_non_padded, batch.key_value_num_tokens) == (4, 2, 4, 13)


def test_table_updates_are_implied_by_new_tokens_and_begin_with_prefixes() -> None:
    batch = small(prefix_updates=[PrefixUpdate(2, 0, np.array([80, 81])), PrefixUpdate(1, 4, np.array([90]))])
    rows, columns, slots = batch.req_to_token_updates()
    assert rows.tolist() == [2, 2, 1, 2, 0, 0, 0]
    assert columns.tolist() == [0, 1, 4, 9, 0, 1, 2]
    assert slots.tolist() == [80, 81, 90, 41, 16, 17, 18]


def test_padded_rows_are_in_no_sequence_and_write_nothing() -> None:
    batch = small().padded(6)
    assert batch.out_cache_loc.tolist() == [41, 16, 17, 18, -1, -1]
    assert (batch.num_tokens, batch.num_token_non_padded) == (6, 4)
    for padded, plain in zip(batch.req_to_token_updates(), small().req_to_token_updates()):
        assert padded.tolist() == plain.tolist()
    assert ForwardBatch.decode(batch.encode()) == batch
    with pytest.raises(ValueError, match="4 rows cannot be padded to 3"):
        small().padded(3)


def test_inconsistent_batches_and_foreign_buffers_are_refused() -> None:
    with pytest.raises(AssertionError, match="lengths differ"):
        small(positions=[0])
    with pytest.raises(AssertionError, match="key_value_num_tokens is 12, seq_lens sum to 13"):
        small(key_value_num_tokens=12)
    with pytest.raises(AssertionError, match="4 of 4 rows"):
        small(extend_seq_lens=[1, 2])
    with pytest.raises(ValueError, match="not a ForwardBatch"):
        ForwardBatch.decode(np.zeros(64, dtype=np.int64))
    with pytest.raises(ValueError, match="says"):
        ForwardBatch.decode(small().encode()[:-1])


def test_host_logic_does_not_import_torch() -> None:
    code = "import sys, graphsrt.runtime.engine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
