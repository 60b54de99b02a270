"""Notices, without an accelerator, code that would make one wait: reads of values, and shapes that depend on values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_VALUE_DEPENDENT = {"_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "equal", "is_nonzero"}


class HostRead(AssertionError):
    """A value had to come back to the host."""


class _Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        by_counts = name == "repeat_interleave" and "Tensor" in func._overloadname
        if name in _VALUE_DEPENDENT or by_mask or by_counts:
            raise HostRead(f"{func} reads values on the host")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Fail at the first operation that would wait for an accelerator."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise HostRead("a tensor was converted on the host")

    with (
        mock.patch.object(Tensor, "tolist", refuse),
        mock.patch.object(Tensor, "numpy", refuse),
        mock.patch.object(Tensor, "cpu", refuse),
        _Watch(),
    ):
        yield
