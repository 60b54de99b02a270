"""Memory for weights."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path

import pytest
import torch

from methods.engine import huge_pages
from methods.engine.linear import PanelLinear

linux = pytest.mark.skipif(sys.platform != "linux", reason="the system has no such pages")


@pytest.mark.parametrize("size", [1, 63, 64, 65, 2**20 + 1, 2**24, 2**24 + 1, 2**26 + 5])
def test_they_are_zeros_of_their_own(size: int) -> None:
    taken = [huge_pages.zeros(size) for _ in range(3)]
    for number, memory in enumerate(taken, 1):
        assert memory.shape == (size,) and memory.dtype == torch.uint8
        assert memory.data_ptr() % 64 == 0 and not memory.any()
        memory.fill_(number)
    assert [memory.unique().tolist() for memory in taken] == [[1], [2], [3]]


@linux
@pytest.mark.parametrize("size", [100, 2**25])
def test_huge_pages_are_asked_for(size: int) -> None:
    memory, found, inside = huge_pages.zeros(size), "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("VmFlags:"):
            found, inside = (line if inside else found), False
        elif "-" in line.split()[0]:
            first, last = (int(end, 16) for end in line.split()[0].split("-"))
            inside = first <= memory.data_ptr() < last
    assert " hg" in found


@linux
def test_a_chunk_is_freed_with_what_was_taken_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_chunk", None)
    first, second = huge_pages.zeros(100), huge_pages.zeros(100)
    chunk = huge_pages._chunk
    assert chunk is not None and second.data_ptr() - first.data_ptr() == 128
    freed = weakref.ref(chunk._memory)
    huge_pages._chunk = None
    del chunk, first
    gc.collect()
    assert freed() is not None and not second.any()
    del second
    gc.collect()
    assert freed() is None


def test_a_weight_of_many_is_as_it_was() -> None:
    weights = [torch.randn(size, 64) for size in (3, 500, 70_000, 8)]
    products = [PanelLinear(weight) for weight in weights]
    assert all(torch.equal(product.dense, weight) for product, weight in zip(products, weights, strict=True))
