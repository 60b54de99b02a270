"""Fixed positions of a Transformer (Vaswani et al. 2017, arXiv 1706.03762, sec. 3.5)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

_PERIOD = 10_000.0  # of the slowest sinusoid


def sinusoids(count: int, width: int) -> Float[Tensor, "P D"]:
    """Marian's form: sines in the first half of the channels, cosines in the second."""
    rate = _PERIOD ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.arange(count)[:, None] * rate
    return torch.cat([angle.sin(), angle.cos()], dim=1)[:, :width].float()
