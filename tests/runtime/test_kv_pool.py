from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphsrt.runtime.kv_pool import ReqToTokenPool, TokenToKVPool


@given(st.integers(2, 12), st.integers(1, 5), st.lists(st.tuples(st.booleans(), st.integers(0, 6))))
def test_pages_are_owned_once_and_all_accounted_for(
    num_pages: int, page_size: int, steps: list[tuple[bool, int]]
) -> None:
    pool = TokenToKVPool(num_pages, page_size)
    held: list[list[int]] = []
    for is_alloc, number in steps:
        if is_alloc:
            before = pool.available_pages
            pages = pool.alloc(number)
            assert (pages is None) == (number > before)
            if pages is None:
                assert pool.available_pages == before
            else:
                held.append(pages.tolist())
        elif held:
            pool.free(held.pop(number % len(held)))
        owned = [page for pages in held for page in pages]
        assert len(set(owned)) == len(owned) and 0 not in owned
        assert pool.available_pages == pool.total_pages - len(owned) == num_pages - 1 - len(owned)
    for pages in held:
        pool.free(pages)
    everything = pool.alloc(num_pages - 1)
    assert everything is not None
    assert sorted(pool.slots(everything).tolist()) == list(range(page_size, num_pages * page_size))


def test_pages_given_out_are_no_view_of_the_free_list() -> None:
    pool = TokenToKVPool(6, 2)
    first, second = pool.alloc(2), pool.alloc(3)
    assert first is not None and second is not None
    kept = first.tolist()
    pool.free(second)
    pool.free(first)
    assert first.tolist() == kept


def test_double_free_is_an_assertion() -> None:
    pool = TokenToKVPool(4, 2)
    pages = pool.alloc(2)
    assert pages is not None
    with pytest.raises(AssertionError, match="named twice"):
        pool.free([pages[0], pages[0]])
    pool = TokenToKVPool(4, 2)
    pages = pool.alloc(2)
    assert pages is not None
    pool.free(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(pages[:1])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([0])


def test_rows() -> None:
    pool = ReqToTokenPool(2, 8)
    assert pool.table.shape == (2, 8) and pool.table.dtype == "int32"
    first, second = pool.alloc(), pool.alloc()
    assert {first, second} == {0, 1} and pool.alloc() is None
    pool.free(1)
    with pytest.raises(AssertionError, match="row 1 is free already"):
        pool.free(1)
    assert pool.alloc() == 1 and pool.available == 0


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="page 0 is reserved"):
        TokenToKVPool(1, 16)
    with pytest.raises(ValueError, match="max_context"):
        ReqToTokenPool(1, 0)
