"""Common to tests of the engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Products of the kernels by two threads, whatever the number is otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
