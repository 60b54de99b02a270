"""Matrix products with the weights of a model: the plain form, two re-arranged ones for CPUs, and one of 4 bits.

On a CPU, ``F.linear`` hands oneDNN (16 bit) or the BLAS library (32 bit) a weight in its plain row-major layout, which
is re-arranged on every call; BLAS moreover changes its kernel between one row and two. Packing the weight once removes
both: into oneDNN's blocks (``packed``), or into the panels of ``methods.engine.cpu_kernels`` (``panels``), which give
the same bits for any number of rows, and with which one call runs whole layers. A decoding step multiplies a few rows
with every weight of the model, so this is most of the cost of a CPU step.

Which form is faster depends on the processor, so ``auto`` times them once per process and type, for the baseline and
all methods alike. Panels are taken unless another form is clearly faster, and blocks unless the plain one is: texts of
bfloat16 runs depend on the form, and must not change with timing noise.

``int4`` rounds a weight to blocks of 32 numbers of 4 bits along its input: w = (n - 8) scale + zero, n from 0 to 15, as
Q4_1 of GGUF files with scale = d and zero = m + 8 d. A product of one row reads a quarter of the bytes and takes a half
to a third of the time. torch's kernel multiplies four rows at a time, so from five rows on oneDNN's product is faster;
it gets the same rounded weights in bfloat16, as a second copy. Numbers of 8 bits, one scale per output, bring nothing
here: over the layers of SmolLM2-135M one row takes 0.9 of the time of bfloat16, three rows 1.1, eight rows 1.8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from time import perf_counter_ns
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from methods.engine.cpu_kernels import Panels, usable

LinearForm = Literal["auto", "plain", "packed", "panels", "int4"]
_TRIED, _TIMES, _WIDTH = (1, 8), 20, 1024  # rows that both forms are timed with, how often, and the size of the weight
_CLEARLY = 0.8  # of the time of the form that is taken otherwise
BLOCK, FEW_ROWS = 32, 4  # numbers of 4 bits that share a scale, and the most rows that are multiplied with them
_OUTPUTS = 16  # torch's kernel wants a multiple of so many
_PACK_ROWS = 8  # the number of rows oneDNN chooses its blocking for; 1 gives a layout that is slow for more rows


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


class PackedLinear(Linear):
    """The same product with the weight in oneDNN's blocked layout (CPU, 16 and 32 bit)."""

    form = "packed"

    def __init__(self, weight: Float[Tensor, "O I"], bias: Float[Tensor, "O"] | None = None) -> None:
        super().__init__(weight, bias)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)

    def __call__(self, rows: Float[Tensor, "R I"]) -> Float[Tensor, "R O"]:
        return torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")

    @property
    def dense(self) -> Float[Tensor, "O I"]:
        return self.weight.to_dense()


class PanelLinear(Linear):
    """The same product with the weight in panels (CPU, 16 and 32 bit); see ``methods.engine.cpu_kernels``.

    Attributes:
        panels: the weight.
    """

    form = "panels"

    def __init__(self, weight: Float[Tensor, "O I"], bias: Float[Tensor, "O"] | None = None) -> None:
        self.bias, self.panels = bias, Panels(weight, bias)
        self.nbytes = weight.numel() * weight.element_size()

    def __call__(self, rows: Float[Tensor, "R I"]) -> Float[Tensor, "R O"]:
        return self.panels.times(rows)

    @property
    def dense(self) -> Float[Tensor, "O I"]:
        return self.panels.plain()


class Int4Linear(PackedLinear):
    """The product with the weight rounded to blocks of 4-bit numbers (CPU, bfloat16); see the module.

    Attributes:
        int4_bytes: of ``nbytes`` those of the blocks; the others are the copy in bfloat16.
    """

    def __init__(self, weight: Float[Tensor, "O I"], bias: Float[Tensor, "O"] | None = None) -> None:
        numbers, scale, zero = quantised(weight)
        super().__init__(dequantised(numbers, scale, zero), bias)
        self._numbers = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.flatten(1), 1)
        self._scales_and_zeros = torch.stack([scale, zero], dim=-1).transpose(0, 1).contiguous()
        self.int4_bytes = self._numbers.nbytes + self._scales_and_zeros.nbytes
        self.nbytes += self.int4_bytes

    def __call__(self, rows: Float[Tensor, "R I"]) -> Float[Tensor, "R O"]:
        if rows.shape[0] > FEW_ROWS:
            return super().__call__(rows)
        found: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            rows.contiguous(), self._numbers, BLOCK, self._scales_and_zeros
        )
        return found if self.bias is None else found + self.bias


def quantised(
    weight: Float[Tensor, "O I"],
) -> tuple[Int[Tensor, "O g 32"], Float[Tensor, "O g"], Float[Tensor, "O g"]]:
    """Numbers from 0 to 15, scales and zeros of the blocks of a weight: the nearest between smallest and largest.

    Weights that were read from blocks of this kind get the very numbers back, as both 0 and 15 occur in a block; so
    SmolLM2-135M, whose file has Q4_1, is not rounded a second time, but for scales and zeros in bfloat16.
    """
    blocks = weight.float().unflatten(1, (-1, BLOCK))
    least, most = blocks.aminmax(dim=2)
    scale = (most - least) / 15
    numbers = ((blocks - least[:, :, None]) / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, :, None]).round()
    return numbers.to(torch.int32), scale.to(torch.bfloat16), (least + 8 * scale).to(torch.bfloat16)


def dequantised(
    numbers: Int[Tensor, "O g 32"], scale: Float[Tensor, "O g"], zero: Float[Tensor, "O g"]
) -> Float[Tensor, "O I"]:
    """The weight that ``quantised`` describes, in bfloat16."""
    exact = (numbers - 8) * scale.float()[:, :, None] + zero.float()[:, :, None]
    return exact.flatten(1).to(torch.bfloat16)


def require_int4(device: torch.device, dtype: torch.dtype) -> None:
    """Refuse weights of 4 bits where the kernel was not measured.

    Raises:
        ValueError: another device than the CPU, another type than bfloat16, or no oneDNN for it.
    """
    if device.type != "cpu" or dtype != torch.bfloat16 or not packable(device, dtype):
        raise ValueError(
            f"model.weights=int4 needs bfloat16 on a CPU with oneDNN, got {str(dtype).removeprefix('torch.')} on "
            f"{device.type}. Set hardware=cpu_bf16, or model.weights=full."
        )


def packable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN can hold a packed weight of this type here."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def library_form(device: torch.device, dtype: torch.dtype) -> LinearForm:
    """The faster of the forms whose products are torch's own: for networks whose passes have hundreds of rows."""
    return faster_form(dtype, False) if packable(device, dtype) else "plain"


@cache
def faster_form(dtype: torch.dtype, panels: bool = True) -> LinearForm:
    """The form whose products are faster on this CPU, a step of one row and one of eight together.

    Args:
        panels: whether they are among the choices.
    """
    rows, weight = torch.ones(max(_TRIED), _WIDTH, dtype=dtype), torch.ones(_WIDTH, _WIDTH, dtype=dtype)
    forms: list[type[Linear]] = [Linear]
    forms += [PackedLinear] if packable(weight.device, dtype) else []
    forms += [PanelLinear] if panels and usable(weight.device, dtype, _WIDTH) else []
    spent = {form: sum(_fastest(partial(form(weight), rows[:n])) for n in _TRIED) for form in forms}
    chosen: type[Linear] = Linear
    for form in forms[1:]:
        if _CLEARLY * spent[form] <= spent[chosen]:
            chosen = form
    return chosen.form


def _fastest(product: Callable[[], object]) -> int:
    times = []
    for _ in range(_TIMES):
        begin = perf_counter_ns()
        product()
        times.append(perf_counter_ns() - begin)
    return min(times)


def make_linear(
    weights: Sequence[Float[Tensor, "_ I"]], biases: Sequence[Float[Tensor, "_"] | None], form: LinearForm = "auto"
) -> Linear:
    """One product for several weights with the same input (query, key and value; gate and up).

    Raises:
        ValueError: ``form="packed"`` or ``"int4"`` where the device, the type or the shape does not allow it.
    """
    weight = torch.cat(list(weights)) if len(weights) > 1 else weights[0].detach()
    bias = torch.cat([b for b in biases if b is not None]) if any(b is not None for b in biases) else None
    if form == "int4":
        require_int4(weight.device, weight.dtype)
        if weight.shape[1] % BLOCK or weight.shape[0] % _OUTPUTS:
            raise ValueError(
                f"model.weights=int4 needs matrices whose inputs are a multiple of {BLOCK} and outputs of {_OUTPUTS}, "
                f"got {weight.shape[1]} and {weight.shape[0]}. Set model.weights=full."
            )
        return Int4Linear(weight, bias)
    if form == "auto":
        form = faster_form(weight.dtype) if weight.device.type == "cpu" else "plain"
        if form == "panels" and not usable(weight.device, weight.dtype, weight.shape[1]):
            form = library_form(weight.device, weight.dtype)
    elif form == "packed" and not packable(weight.device, weight.dtype):
        raise ValueError(
            f"hardware.linear=packed needs bfloat16 or float32 on a CPU with oneDNN, got {weight.dtype} on "
            f"{weight.device.type}. Use hardware.linear=auto."
        )
    elif form == "panels" and not usable(weight.device, weight.dtype, weight.shape[1]):
        raise ValueError(
            "hardware.linear=panels needs bfloat16 or float32 on a CPU, even numbers of inputs, a C++ compiler, "
            f"got {weight.shape[1]} inputs of {weight.dtype} on {weight.device.type}. Use hardware.linear=auto."
        )
    return _CLASSES[form](weight, bias)


_CLASSES: dict[str, type[Linear]] = {form.form: form for form in (Linear, PackedLinear, PanelLinear)}
