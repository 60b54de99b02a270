"""Matrix products with the weights of a model: the plain form, two re-arranged ones for CPUs, and ones of 4 and 8 bits.

On a CPU, ``F.linear`` hands oneDNN (16 bit) or the BLAS library (32 bit) a weight in its plain row-major layout, which
is re-arranged on every call; BLAS moreover changes its kernel between one row and two. Packing the weight once removes
both: into oneDNN's blocks (``packed``), or into the panels of ``methods.engine.cpu_kernels`` (``panels``), which give
the same bits for any number of rows, and with which one call runs whole layers. A decoding step multiplies a few rows
with every weight of the model, so this is most of the cost of a CPU step.

Which form is faster depends on the processor, so ``auto`` times them once per process and type, for the baseline and
all methods alike. Panels are taken unless another form is clearly faster, and blocks unless the plain one is: texts of
bfloat16 runs depend on the form, and must not change with timing noise.

``int4`` and ``int8`` round a weight to blocks of 32 numbers along its input: of 4 bits as Q4_1 of GGUF files,
w = (n - 8) scale + zero with scale = d and zero = m + 8 d; of 8 bits as Q8_0, w = (n - 128) scale. The kernels round
rows to 8 bits by such blocks too, as llama.cpp does, and multiply integers. A pass of SmolLM2-135M over one token then
takes 0.41 of the time that it takes with panels of bfloat16, over eight 0.52, over 64 0.78 (Ice Lake, two cores);
on a processor with AVX2 alone 0.37, and 0.80 over eight.

What a network that only drafts loses by such rounding is some acceptance, never the text of an exact method: where
there are kernels for them, ``draft_form`` takes blocks of 8 bits for it.

On a GPU ``int4``, and ``fp8``, are products of ``methods.engine.gpu_linear``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from time import perf_counter_ns
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from methods.engine import gpu_linear
from methods.engine.cpu_kernels import BLOCK, Blocks, Packed, Panels, blocks_usable, largest, usable
from methods.engine.plain_linear import Linear as Linear
from methods.engine.plain_linear import LinearForm as LinearForm
from methods.engine.plain_linear import dequantised as dequantised
from methods.engine.plain_linear import quantised as quantised

_TRIED, _TIMES, _WIDTH = (1, 8), 20, 1024  # rows that both forms are timed with, how often, and the size of the weight
_CLEARLY = 0.8  # of the time of the form that is taken otherwise
_BITS: dict[str, int] = {"int4": 4, "int8": 8}
_DRAFTS: Literal["int8"] = "int8"  # of networks that draft, unless hardware.draft_weights says otherwise
_PACK_ROWS = 8  # the number of rows oneDNN chooses its blocking for; 1 gives a layout that is slow for more rows


DraftWeights = Literal["auto", "full", "int8", "int4"]
"""Weights of networks that only draft: of the target's type, or rounded to blocks; ``auto`` rounds them for a target of
16 bit on a CPU."""


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


class KernelLinear(Linear):
    """The product by the C++ kernels (CPU), see ``methods.engine.cpu_kernels``.

    Attributes:
        panels: the weight.
    """

    panels: Packed

    def __call__(self, rows: Float[Tensor, "R I"]) -> Float[Tensor, "R O"]:
        return self.panels.times(rows)


class PanelLinear(KernelLinear):
    """The same product with the weight in panels (16 and 32 bit)."""

    form = "panels"
    panels: Panels

    def __init__(self, weight: Float[Tensor, "O I"], bias: Float[Tensor, "O"] | None = None) -> None:
        self.bias, self.panels = bias, Panels(weight, bias)
        self.nbytes = weight.numel() * weight.element_size()

    @property
    def dense(self) -> Float[Tensor, "O I"]:
        return self.panels.plain()


class BlockLinear(KernelLinear):
    """The product of rows of 8 bits with the weight rounded to blocks of 4 or 8-bit numbers; see the module."""

    panels: Blocks

    def __init__(self, weight: Float[Tensor, "O I"], bias: Float[Tensor, "O"] | None, form: LinearForm) -> None:
        self.form, self.bias, self._bits = form, bias, _BITS[form]
        self.panels = Blocks(quantised(weight, self._bits), bias, weight.dtype, self._bits)
        self.nbytes = self.panels.nbytes

    @property
    def dense(self) -> Float[Tensor, "O I"]:
        """The rounded weight, in the type of the model."""
        return dequantised(self.panels.plain(), self._bits).to(self.panels.dtype)


class ScreenedLinear(BlockLinear):
    """The product with a weight of 4 bits, whose largest outputs are replaced by those of the full weight.

    Of an output matrix it reads less than a third, and its largest output is nearly always that of the full weight:
    after the copied layers of SmolLM2-135M the best of 8 is the target's token for 97.3 of 100 tokens; by the whole
    matrix it is for 97.6, and by 4 bits alone for 91.1. Drawn at temperature 1, with 64 outputs 97.0 of 100 tokens are
    kept, with the whole matrix 98.1, and with 4 bits alone 88.5.

    Args:
        full: the weight, whose inputs are a multiple of ``BLOCK``.
        count: outputs of each row that are replaced.
    """

    def __init__(self, full: PanelLinear, count: int) -> None:
        super().__init__(full.dense, full.bias, "int4")
        self.full, self.count = full, count

    def __call__(self, rows: Float[Tensor, "R I"]) -> Float[Tensor, "R O"]:
        screened = super().__call__(rows)
        places = largest(screened, self.count)
        return screened.scatter(-1, places, self.full(rows).gather(-1, places))


def require_blocks(
    device: torch.device,
    dtype: torch.dtype,
    what: str = "model.weights=int4 needs",
    otherwise: str = "model.weights=full",
) -> None:
    """Refuse weights of 4 bits where there are no kernels for them.

    Args:
        what: wants them, for the message; ``otherwise``: what else to set.

    Raises:
        ValueError: another device than the CPU, another type than bfloat16 and float32, or no compiler.
    """
    if not blocks_usable(device, dtype, BLOCK):
        raise ValueError(
            f"{what} bfloat16 or float32 on a CPU, and a C++ compiler, or bfloat16 on an NVIDIA GPU, got "
            f"{str(dtype).removeprefix('torch.')} on {device.type}. Set hardware=cpu_bf16, or {otherwise}."
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
    products = {form: [partial(form(weight), rows[:n]) for n in _TRIED] for form in forms}
    times = {form: [_time(product) for product in products[form]] for form in forms}
    for _ in range(_TIMES):  # in turn, so that what else runs meanwhile hinders all of them
        for form in forms:
            times[form] = [min(best, _time(product)) for best, product in zip(times[form], products[form], strict=True)]
    spent = {form: sum(times[form]) for form in forms}
    chosen: type[Linear] = Linear
    for form in forms[1:]:
        if _CLEARLY * spent[form] <= spent[chosen]:
            chosen = form
    return chosen.form


def _time(product: Callable[[], object]) -> int:
    begin = perf_counter_ns()
    product()
    return perf_counter_ns() - begin


def make_linear(
    weights: Sequence[Float[Tensor, "_ I"]], biases: Sequence[Float[Tensor, "_"] | None], form: LinearForm = "auto"
) -> Linear:
    """One product for several weights with the same input (query, key and value; gate and up).

    Raises:
        ValueError: a form that the device, the type or the shape does not allow.
    """
    weight = torch.cat(list(weights)) if len(weights) > 1 else weights[0].detach()
    bias = torch.cat([b for b in biases if b is not None]) if any(b is not None for b in biases) else None
    if form == "fp8" or (form == "int4" and weight.device.type == "cuda"):
        gpu_linear.require(form, weight.device, weight.dtype)
        return gpu_linear.Float8Linear(weight, bias) if form == "fp8" else gpu_linear.Int4Linear(weight, bias)
    if form in _BITS:
        require_blocks(weight.device, weight.dtype)
        if weight.shape[1] % BLOCK:
            raise ValueError(
                f"model.weights=int4 needs matrices whose inputs are a multiple of {BLOCK}, got {weight.shape[1]}. "
                "Set model.weights=full."
            )
        return BlockLinear(weight, bias, form)
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


def draft_form(wanted: DraftWeights, target: LinearForm, weight: Float[Tensor, "O I"]) -> LinearForm:
    """The form of a product of a network that only drafts; a matrix that makes no whole blocks is not rounded.

    Args:
        wanted: ``hardware.draft_weights``.
        target: form of the products of the model that it drafts for.
        weight: of the product.

    Raises:
        ValueError: no blocks for this device or type.
    """
    fits = target != "panels" or usable(weight.device, weight.dtype, weight.shape[1])
    own = target if target in ("plain", "packed", "panels") and fits else "auto"
    if wanted == "full":
        return own
    kernels = blocks_usable(weight.device, weight.dtype, BLOCK)
    if wanted == "auto":
        wanted = _DRAFTS if kernels and own in ("auto", "panels") and weight.dtype == torch.bfloat16 else "full"
    elif not kernels:
        raise ValueError(
            f"hardware.draft_weights={wanted} needs bfloat16 or float32 on a CPU, and a C++ compiler, got "
            f"{str(weight.dtype).removeprefix('torch.')} on {weight.device.type}. Set hardware.draft_weights=full."
        )
    return own if wanted == "full" or weight.shape[1] % BLOCK else wanted


_CLASSES: dict[str, type[Linear]] = {form.form: form for form in (Linear, PackedLinear, PanelLinear)}
