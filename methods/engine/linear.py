"""Matrix products with the weights of a model: the plain form, and oneDNN's pre-packed one for CPUs.

On a CPU, ``F.linear`` hands oneDNN (16 bit) or the BLAS library (32 bit) a weight in its plain row-major layout, which
is re-arranged on every call; BLAS moreover changes its kernel between one row and two. Packing the weight once removes
both. A decoding step multiplies a few rows with every weight of the model, so this is most of the cost of a CPU step.

Which form is faster depends on the processor, so ``auto`` times both once per process and type, for the baseline and
all methods alike. The packed one is taken unless the plain one is clearly faster: texts of bfloat16 runs depend on the
form, and must not change with timing noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from time import perf_counter_ns
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

LinearForm = Literal["auto", "plain", "packed"]
_TRIED, _TIMES, _WIDTH = (1, 8), 20, 1024  # rows that both forms are timed with, how often, and the size of the weight
_CLEARLY = 0.8  # of the packed form's time
_PACK_ROWS = 8  # the number of rows oneDNN chooses its blocking for; 1 gives a layout that is slow for more rows


class Linear:
    """``y = x W^T + b`` over rows ``x`` of shape [R, I]."""

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

    def __init__(self, weight: Float[Tensor, "O I"], bias: Float[Tensor, "O"] | None = None) -> None:
        super().__init__(weight, bias)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)

    def __call__(self, rows: Float[Tensor, "R I"]) -> Float[Tensor, "R O"]:
        return torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")

    @property
    def dense(self) -> Float[Tensor, "O I"]:
        return self.weight.to_dense()


def packable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN can hold a packed weight of this type here."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


@cache
def faster_form(dtype: torch.dtype) -> LinearForm:
    """The form whose products are faster on this CPU, a step of one row and one of eight together."""
    rows, weight = torch.ones(max(_TRIED), _WIDTH, dtype=dtype), torch.ones(_WIDTH, _WIDTH, dtype=dtype)
    spent = {form: sum(_fastest(partial(form(weight), rows[:n])) for n in _TRIED) for form in (Linear, PackedLinear)}
    return "plain" if spent[Linear] < _CLEARLY * spent[PackedLinear] else "packed"


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
        ValueError: ``form="packed"`` where the device or the type does not allow it.
    """
    weight = torch.cat(list(weights)) if len(weights) > 1 else weights[0].detach()
    bias = torch.cat([b for b in biases if b is not None]) if any(b is not None for b in biases) else None
    able = packable(weight.device, weight.dtype)
    if form == "packed" and not able:
        raise ValueError(
            f"hardware.linear=packed needs bfloat16 or float32 on a CPU with oneDNN, got {weight.dtype} on "
            f"{weight.device.type}. Use hardware.linear=auto."
        )
    chosen = faster_form(weight.dtype) if form == "auto" and able else form
    return PackedLinear(weight, bias) if chosen == "packed" else Linear(weight, bias)
