"""The tree against a set of prefixes: what is cached, what is locked, what is evicted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphsrt.runtime.radix_cache import Node, RadixCache

PAGE = 2


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


def put(cache: RadixCache, tokens: list[int], pages: list[int]) -> list[int]:
    """Insert from the root; the pages that were there before."""
    _, present = cache.extend(cache.root, ids(*tokens), ids(*pages))
    return present.tolist()


def found(cache: RadixCache, *tokens: int) -> list[int]:
    return cache.pages_to(cache.match(ids(*tokens))).tolist()


def test_edges_are_split_at_pages_and_never_inside_one() -> None:
    cache = RadixCache(PAGE)
    assert put(cache, [1, 2, 3, 4, 5, 6], [10, 11, 12]) == []
    assert found(cache, 1, 2, 3, 9, 5, 6) == [10]  # the second page differs in its second token
    assert put(cache, [1, 2, 3, 9, 5, 6], [20, 21, 22]) == [10]
    assert found(cache, 1, 2, 3, 4, 5, 6, 7) == [10, 11, 12]
    assert found(cache, 1, 2, 3, 9, 5, 6, 7) == [10, 21, 22]
    assert found(cache, 1, 2, 3) == [10] and found(cache, 1) == found(cache) == found(cache, 2, 2) == []
    assert cache.num_pages == 5
    assert put(cache, [1, 2, 3, 4], [30, 31]) == [10, 11]  # nothing new: both pages stay the caller's
    assert cache.num_pages == 5


def test_a_lock_stays_at_the_end_of_its_prefix_when_the_node_is_split() -> None:
    cache = RadixCache(PAGE)
    put(cache, [1, 2, 3, 4, 5, 6], [10, 11, 12])
    node = cache.match(ids(1, 2, 3, 4, 5, 6))
    cache.lock(node)
    assert found(cache, 1, 2, 8, 8) == [10]
    assert cache.pages_to(node).tolist() == [10, 11, 12]
    assert cache.evictable_pages == 0 and cache.evict(5).tolist() == []
    cache.unlock(node)
    assert cache.evictable_pages == 3
    with pytest.raises(AssertionError, match="unlocked more often"):
        cache.unlock(node)


def test_the_least_recently_used_end_goes_first_and_what_is_left_is_a_prefix() -> None:
    cache = RadixCache(PAGE)
    put(cache, [1, 1, 2, 2, 3, 3], [10, 11, 12])
    put(cache, [1, 1, 4, 4, 5, 5], [20, 21, 22])
    put(cache, [7, 7], [30])
    assert found(cache, 1, 1, 2, 2, 3, 3) == [10, 11, 12]  # used again: the other branch is now the oldest
    assert cache.evict(1).tolist() == [22]
    assert found(cache, 7, 7) == [30]
    assert sorted(cache.evict(2).tolist()) == [12, 21]
    assert cache.evict(9).tolist() == [11, 10, 30] and cache.num_pages == 0 and not list(cache.nodes())


def test_many_uses_do_not_pile_up() -> None:
    cache = RadixCache(PAGE)
    put(cache, [1, 2], [5])
    for _ in range(1000):
        cache.match(ids(1, 2))
    assert len(cache._leaves) < 100
    assert cache.evict(1).tolist() == [5]


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    return draw(st.lists(st.integers(0, 1), max_size=9))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_against_a_set_of_prefixes(data: st.DataObject) -> None:
    """The model: every cached prefix of whole pages -> its last page. A prefix is there only if all before it are."""
    page_size = data.draw(st.integers(1, 3))
    cache = RadixCache(page_size)
    model: dict[tuple[int, ...], int] = {}
    locked: list[tuple[Node, tuple[int, ...]]] = []
    next_page = 1
    for _ in range(data.draw(st.integers(1, 25))):
        kind = data.draw(st.sampled_from(["insert", "match", "lock", "unlock", "evict", "peek"]))
        tokens = tuple(data.draw(prompts()))
        full = len(tokens) // page_size
        prefixes = [tokens[: (i + 1) * page_size] for i in range(full)]
        cached = [model[prefix] for prefix in prefixes if prefix in model]
        if kind == "insert":
            pages = list(range(next_page, next_page + full))
            next_page += full
            node, present = cache.extend(cache.root, ids(*tokens[: full * page_size]), ids(*pages))
            assert present.tolist() == cached
            for prefix, page in zip(prefixes, pages):
                model.setdefault(prefix, page)
            assert cache.pages_to(node).tolist() == [model[prefix] for prefix in prefixes]
        elif kind == "match":
            assert cache.pages_to(cache.match(ids(*tokens))).tolist() == cached
        elif kind == "peek":
            node, length = cache.peek(ids(*tokens))
            assert length == len(cached) * page_size
            assert cache.pages_to(node).tolist()[: len(cached)] == cached
        elif kind == "lock":
            node = cache.match(ids(*tokens))
            cache.lock(node)
            locked.append((node, tokens[: len(cached) * page_size]))
        elif kind == "unlock" and locked:
            cache.unlock(locked.pop(data.draw(st.integers(0, len(locked) - 1)))[0])
        elif kind == "evict":
            number = data.draw(st.integers(0, 6))
            evictable = cache.evictable_pages
            gone = cache.evict(number).tolist()
            assert len(gone) == min(number, evictable) and set(gone) <= set(model.values())
            model = {prefix: page for prefix, page in model.items() if page not in gone}
        kept = {prefix[: (i + 1) * page_size] for _, prefix in locked for i in range(len(prefix) // page_size)}
        assert kept <= set(model)
        assert all(prefix[:-page_size] in model for prefix in model if len(prefix) > page_size)
        assert (cache.num_pages, cache.evictable_pages) == (len(model), len(model) - len(kept))
        for node, prefix in locked:
            assert cache.pages_to(node).tolist() == [
                model[prefix[: (i + 1) * page_size]] for i in range(len(prefix) // page_size)
            ]
    for node, _ in locked:
        cache.unlock(node)
    assert sorted(cache.evict(cache.num_pages).tolist()) == sorted(model.values())
    assert cache.num_pages == cache.evictable_pages == 0
