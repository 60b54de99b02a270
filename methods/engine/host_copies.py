"""Numbers of the host on a device, without waiting for it."""

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
