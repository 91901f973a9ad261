"""Memory in huge pages holds what is put there, keeps tensors apart, and goes with them."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path

import pytest
import torch

from graphsrt import huge_pages
from graphsrt.huge_pages import _CHUNK, LARGE, PAGE, HugePages

SIZES = [0, 1, 63, 64, 65, LARGE - 1, LARGE, LARGE + 1, 3 * PAGE + 12345]


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float64], ids=str)
def test_tensors_do_not_meet(dtype: torch.dtype) -> None:
    pages = HugePages()
    made = [pages.empty([size // dtype.itemsize], dtype).fill_(number) for number, size in enumerate(SIZES * 3)]
    for number, value in enumerate(made):
        assert value.dtype == dtype and bool((value == number).all())
        assert value.untyped_storage().nbytes() == value.numel() * dtype.itemsize
        assert value.data_ptr() % 64 == 0


def test_more_than_a_chunk() -> None:
    pages = HugePages()
    count = 2 * _CHUNK // (LARGE - 64) + 1
    made = [pages.empty([LARGE // 8 - 8], torch.float64).fill_(number) for number in range(count)]
    assert all(bool((value == number).all()) for number, value in enumerate(made))


def test_large_ones_begin_with_a_page() -> None:
    assert huge_pages.empty([2, LARGE], torch.int8).data_ptr() % PAGE == 0
    assert HugePages().empty([5], torch.int8).data_ptr() % PAGE == 0


def test_take_copies_what_is_not_there_yet() -> None:
    pages = HugePages()
    there = huge_pages.empty([LARGE // 4, 2], torch.float32).normal_()
    assert pages.take(there) is there
    for given, copy in [(there, True), (there[1:], False), (there.t(), False), (torch.randn(LARGE), False),
                        (torch.randn(3, 5), False)]:  # fmt: skip
        taken = pages.take(given, copy=copy)
        assert torch.equal(taken, given) and taken.is_contiguous()
        assert taken.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a system without huge pages")
@pytest.mark.parametrize("size", [64, LARGE + 1])
def test_huge_pages_are_asked_for(size: int) -> None:
    """Of private memory: whether shared memory has any is another setting, which is off on most systems."""
    tensor = HugePages().empty([size], torch.int8)
    maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    (mine,) = (text for text in maps if text and _contains(text, tensor.data_ptr()))
    assert mine.split()[1] == "rw-p" and "hg" in re.findall(r"^VmFlags: (.*)$", mine, re.MULTILINE)[0].split()


def _contains(text: str, address: int) -> bool:
    start, stop = (int(part, 16) for part in text.split()[0].split("-"))
    return start <= address < stop


@pytest.mark.parametrize("size", [64, 2 * LARGE])
def test_memory_goes_with_its_tensors(size: int) -> None:
    pages = HugePages()
    value = pages.empty([size], torch.int8)
    memory = weakref.ref(pages._chunk if pages._chunk is not None else huge_pages._mappings[value.data_ptr()])
    view = value.view(2, -1)[1]
    del value, pages
    gc.collect()
    assert memory() is not None
    view.fill_(7)
    del view
    gc.collect()
    assert memory() is None
