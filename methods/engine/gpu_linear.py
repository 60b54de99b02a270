"""Products with weights of 4 and 8 bits on a GPU, by torch's own kernels.

``int4``: blocks of 32 numbers along a weight's input, as ``methods.engine.linear`` has them on a CPU:
w = (n - 8) scale + zero. Rows stay in bfloat16, where the CPU's kernels round them to 8 bits. Capability 8.0 (Ampere)
and later.

``fp8``: numbers of 8 bits with an exponent of 4 (e4m3, Micikevicius et al. 2022, arXiv 2209.05433), with one scale for
each output of a weight and for each row, which is rounded when it comes. Capability 9.0 (Hopper) and later.

On a CPU both compute what the kernels are defined to: the twin that tests compare.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from methods.engine.cpu_kernels import BLOCK
from methods.engine.plain_linear import Linear, dequantised, quantised

_INNER_TILES = 2  # of 16 inputs, in the layout of torch's kernel: it fits every weight of whole blocks
_NEEDS = {"int4": (8, 0), "fp8": (9, 0)}
_MULTIPLE = {"int4": (8, BLOCK), "fp8": (16, 16)}  # of outputs and inputs
_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def require(form: str, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse weights of a form that this device has no kernel for.

    Raises:
        ValueError: no GPU, one that is too old, or another type than bfloat16.
    """
    needed = _NEEDS[form]
    found = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if found is None or found < needed or dtype != torch.bfloat16:
        kind = f"{device.type} of compute capability {found[0]}.{found[1]}" if found else device.type
        raise ValueError(
            f"model.weights={form} needs bfloat16 on an NVIDIA GPU of compute capability {needed[0]}.{needed[1]} or "
            f"later, got {str(dtype).removeprefix('torch.')} on {kind}. Set model.weights=full."
        )


def require_shape(form: str, weight: Float[Tensor, "O I"]) -> None:
    """Refuse a weight that the kernel cannot hold.

    Raises:
        ValueError: says of what its sizes must be multiples.
    """
    if any(size % multiple for size, multiple in zip(weight.shape, _MULTIPLE[form], strict=True)):
        outputs, inputs = _MULTIPLE[form]
        raise ValueError(
            f"model.weights={form} needs matrices whose outputs are a multiple of {outputs} and inputs of {inputs}, "
            f"got {weight.shape[0]} and {weight.shape[1]}. Set model.weights=full."
        )


class Int4Linear(Linear):
    """The product of rows with a weight in blocks of 4-bit numbers."""

    form = "int4"

    def __init__(self, weight: Float[Tensor, "O I"], bias: Float[Tensor, "O"] | None = None) -> None:
        require_shape(self.form, weight)
        blocks = quantised(weight, 4)
        self.bias, self._dtype = bias, weight.dtype
        self._blocks = blocks if weight.device.type != "cuda" else None
        if self._blocks is None:
            numbers = blocks.numbers.flatten(1)
            pairs = (numbers[:, ::2] << 4 | numbers[:, 1::2]).contiguous()
            self.weight = torch.ops.aten._convert_weight_to_int4pack(pairs, _INNER_TILES)
            self._scales = torch.stack([blocks.scale, blocks.zero], dim=2).transpose(0, 1).contiguous()
        self.nbytes = weight.numel() // 2 + 2 * blocks.scale.numel() * blocks.scale.element_size()

    def __call__(self, rows: Float[Tensor, "R I"]) -> Float[Tensor, "R O"]:
        if self._blocks is not None:
            found = F.linear(rows, self.dense)
        else:
            found = torch.ops.aten._weight_int4pack_mm(rows, self.weight, BLOCK, self._scales)
        return found if self.bias is None else found + self.bias

    @property
    def dense(self) -> Float[Tensor, "O I"]:
        """The rounded weight: on a GPU its products with the unit vectors."""
        if self._blocks is not None:
            return dequantised(self._blocks, 4).to(self._dtype)
        inputs = self._scales.shape[0] * BLOCK
        unit = torch.eye(inputs, dtype=self._dtype, device=self._scales.device)
        return torch.ops.aten._weight_int4pack_mm(unit, self.weight, BLOCK, self._scales).T.contiguous()


class Float8Linear(Linear):
    """The product of rows of 8 bits with a weight of 8 bits, both floating point."""

    form = "fp8"

    def __init__(self, weight: Float[Tensor, "O I"], bias: Float[Tensor, "O"] | None = None) -> None:
        require_shape(self.form, weight)
        self.bias, self._dtype = bias, weight.dtype
        self.weight, self._scale = in_float8(weight)
        self.nbytes = self.weight.numel() + self._scale.numel() * self._scale.element_size()

    def __call__(self, rows: Float[Tensor, "R I"]) -> Float[Tensor, "R O"]:
        own, scale = in_float8(rows)
        if rows.device.type == "cuda":
            found = torch._scaled_mm(
                own, self.weight.T, scale_a=scale, scale_b=self._scale.T, out_dtype=self._dtype, use_fast_accum=True
            )
        else:
            found = ((own.float() @ self.weight.float().T) * scale * self._scale.T).to(self._dtype)
        return found if self.bias is None else found + self.bias

    @property
    def dense(self) -> Float[Tensor, "O I"]:
        return (self.weight.float() * self._scale).to(self._dtype)


def in_float8(rows: Float[Tensor, "R I"]) -> tuple[Tensor, Float[Tensor, "R 1"]]:
    """Rows in e4m3, the largest number of each at the end of its range, and their scales in 32 bit."""
    wide = rows.float()
    scale = wide.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / _LARGEST
    return (wide / scale).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn), scale
