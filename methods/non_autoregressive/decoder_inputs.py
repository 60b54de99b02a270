"""The decoder's input before anything is written: copies of source embeddings, or masks.

Any module can be used that maps the source, the lengths of the targets and the width of the batch to [B, T, D]. The
network adds positions, and masks everything after a row's length.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from methods.non_autoregressive.network import Memory, present_up_to

Copy = Literal["uniform", "soft"]


class UniformCopy(nn.Module):
    """Position t = 1..T copies source token Round(S t / T), of the S before the end (Gu et al. 2018, sec. 3.2)."""

    def forward(self, memory: Memory, lengths: Int[Tensor, "B"], width: int) -> Float[Tensor, "B T D"]:
        place = torch.arange(1, width + 1, device=lengths.device)
        source, target = memory.content[:, None], lengths[:, None]
        index = (2 * source * place + target) // (2 * target)
        return gather(memory, index.clamp(min=1) - 1)


class SoftCopy(nn.Module):
    """Position t mixes source tokens by the softmax over i of -(i - S t / T)^2 / tau; tau is learnt.

    Li et al. 2019, arXiv 1909.06708.
    """

    def __init__(self, tau: float = 0.3) -> None:
        super().__init__()
        self.log_tau = nn.Parameter(torch.tensor(tau).log())

    def forward(self, memory: Memory, lengths: Int[Tensor, "B"], width: int) -> Float[Tensor, "B T D"]:
        dtype, count = memory.embedded.dtype, memory.embedded.shape[1]
        middle = torch.arange(width, device=lengths.device, dtype=dtype) + 0.5
        aim = middle * (memory.content / lengths)[:, None].to(dtype) - 0.5
        distance = torch.arange(count, device=lengths.device, dtype=dtype) - aim[:, :, None]
        scores = -distance.square() / self.log_tau.exp()
        absent = ~present_up_to(memory.content, count)
        return scores.masked_fill(absent[:, None], -torch.inf).softmax(-1) @ memory.embedded


class Masks(nn.Module):
    """A vector at every position that is not written yet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.randn(width))

    def forward(self, memory: Memory, lengths: Int[Tensor, "B"], width: int) -> Float[Tensor, "B T D"]:
        return self.vector.expand(len(lengths), width, -1)


def copy_of(kind: Copy) -> nn.Module:
    """The copy of that name."""
    return SoftCopy() if kind == "soft" else UniformCopy()


def gather(memory: Memory, index: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
    """Embeddings of the source tokens at these places; places beyond the source give its last slot."""
    inside = index.clamp(max=memory.embedded.shape[1] - 1)
    return memory.embedded.gather(1, inside[:, :, None].expand(-1, -1, memory.embedded.shape[2]))
