"""A weight as it is, and rounded to blocks: what every form of products in ``methods.engine.linear`` begins with."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from methods.engine.cpu_kernels import BLOCK, Quantised

LinearForm = Literal["auto", "plain", "packed", "panels", "int4", "int8", "fp8"]


class Linear:
    """``y = x W^T + b`` over rows ``x`` of shape [R, I].

    Attributes:
        form: how the weight is held.
    """

    form: LinearForm = "plain"

    def __init__(self, weight: Float[Tensor, "O I"], bias: Float[Tensor, "O"] | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.nbytes = weight.numel() * weight.element_size()

    def __call__(self, rows: Float[Tensor, "R I"]) -> Float[Tensor, "R O"]:
        return F.linear(rows, self.weight, self.bias)

    @property
    def dense(self) -> Float[Tensor, "O I"]:
        """The weight in its plain form; of a packed one a copy is made."""
        return self.weight


def quantised(weight: Float[Tensor, "O I"], bits: int) -> Quantised:
    """Numbers of 4 or 8 bits, scales and zeros of the blocks of a weight.

    Of 4 bits they are the nearest between smallest and largest, of 8 bits between the largest size and its negative.
    Weights that were read from blocks of this kind get the very numbers back, as the outermost occur in a block; so
    SmolLM2-135M, whose file has both kinds, is not rounded a second time, but for scales and zeros in bfloat16.
    """
    blocks = weight.float().unflatten(1, (-1, BLOCK))
    if bits == 4:
        least, most = blocks.aminmax(dim=2)
        scale, zero = (most - least) / 15, least + 8 * (most - least) / 15
    else:
        scale = blocks.abs().amax(dim=2) / 127
        least, zero = -128 * scale, torch.zeros_like(scale)
    steps = scale.clamp(min=torch.finfo(torch.float32).tiny)
    numbers = ((blocks - least[:, :, None]) / steps[:, :, None]).round()
    return Quantised(numbers.to(torch.uint8), scale.to(torch.bfloat16), zero.to(torch.bfloat16))


def dequantised(blocks: Quantised, bits: int) -> Float[Tensor, "O I"]:
    """The weight that ``quantised`` describes, in 32 bit."""
    centred = blocks.numbers.float() - 2 ** (bits - 1)
    return (centred * blocks.scale.float()[:, :, None] + blocks.zero.float()[:, :, None]).flatten(1)
