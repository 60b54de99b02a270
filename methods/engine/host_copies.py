"""Numbers of the host on a device and back, without waiting longer than needed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Nested = Sequence[int] | Sequence[Sequence[int]]


def from_host(values: Nested, device: torch.device) -> Tensor:
    """Integers as a tensor. The copy to a GPU starts from pinned memory, so the host does not wait for it.

    The allocator of pinned memory does not reuse it before the copy has ended.
    """
    if device.type == "cpu":
        return torch.tensor(values, dtype=torch.long)
    return torch.tensor(values, dtype=torch.long, pin_memory=True).to(device, non_blocking=True)


class Reading:
    """Integers on their way from a device to the host.

    The copy starts at once, into pinned memory on a GPU, and what is launched after it does not delay it. The tensor
    may be overwritten by then.
    """

    def __init__(self, values: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if values.device.type != "cuda":
            self._values = values.clone()
            return
        self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._values.copy_(values, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def read(self) -> list[list[int]]:
        """Wait for the copy alone."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.tolist()
