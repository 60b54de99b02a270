"""The C++ kernels in the folder ``cpp`` for a CPU: how they are compiled, matrix products with weights as they are
read there (in panels, or in blocks of 4 or 8-bit numbers), and what rows alone need: norms, the largest scores, sums.

They are compiled at first use, with the compiler that torch's extensions use, for the processor at hand, and kept in
torch's folder for extensions. Where no compiler is found ``library`` is None, and torch's operators do the work.

Every sum runs in one order whatever the number of rows is, so a product gives a row the same bits beside any others.
``methods.engine.fused_layers`` runs whole layers with them.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import platform
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import BFloat16, Float, Int, UInt8
from torch import Tensor
from torch.utils.cpp_extension import _get_build_directory, get_cxx_compiler

from methods.engine import huge_pages

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).parent / "cpp" / "cpu_kernels.cpp"
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-std=c++17", "-shared", "-fPIC")
_QUIETLY: dict[str, Any] = {"check": True, "capture_output": True, "text": True, "timeout": 600}
BLOCK = 32  # inputs that share a scale
_FEW = 2**15  # numbers of all rows, which one thread goes through sooner than two can be called
_READ_WITH_WEIGHTS = 16  # tokens of prompts that take as long as reading the weights does
KINDS = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


class Matrix(Structure):
    """A weight as the kernels are given it."""

    _fields_ = [("panels", c_void_p), ("bias", c_void_p), *((name, c_int64) for name in ("inputs", "outputs", "bits"))]


class NormNumbers(Structure):
    """A norm as the kernels are given it: numbers of 32 bit; without a bias, root mean square."""

    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("eps", c_float)]


class Quantised(NamedTuple):
    """A weight rounded by blocks of its inputs; see ``Blocks``."""

    numbers: UInt8[Tensor, "O g 32"]
    scale: BFloat16[Tensor, "O g"]
    zero: BFloat16[Tensor, "O g"]


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where they cannot be compiled, with a warning that says why."""
    try:
        return _declared(ctypes.CDLL(str(_compiled())))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        reason = next((line for line in lines if "error" in line), lines[0] if lines else type(error).__name__)
        log.warning("The CPU kernels cannot be compiled (%s). Install a C++ compiler, or set CXX.", reason[:200])
        return None


def _compiled() -> Path:
    """Compile at first use. The file appears whole, so that processes may do it at the same time, and be killed."""
    path = Path(_get_build_directory(f"decodebench_cpu_{_digest()}", verbose=False)) / "kernels.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            subprocess.run([get_cxx_compiler(), *_FLAGS, str(_SOURCE), "-o", str(made)], **_QUIETLY)
            made.replace(path)
    return path


def _digest() -> str:
    """Of the source and of what it is compiled for, as a folder may be shared by different machines."""
    sources = [path.read_text() for path in sorted(_SOURCE.parent.glob("*.[hc]*"))]
    facts = [*sources, *_FLAGS, torch.__version__, platform.machine(), _instructions()]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]


def _instructions() -> str:
    """Instruction sets of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _declared(found: ctypes.CDLL) -> ctypes.CDLL:
    found.panel_outputs.restype = found.product_workspace.restype = found.block_bytes.restype = c_int64
    found.guess.restype, found.guess.argtypes = c_int64, [c_void_p] * 5
    found.product_workspace.argtypes = [POINTER(Matrix), c_int64, c_int64]
    found.block_bytes.argtypes = [c_int64] * 3
    found.pack_blocks.argtypes = [c_int64, *[c_void_p] * 4, *[c_int64] * 3]
    for kind in KINDS.values():
        getattr(found, f"multiply_{kind}").argtypes = [POINTER(Matrix), *[c_void_p] * 2, c_int64, c_void_p, c_int64]
        getattr(found, f"pack_{kind}").argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_int64]
        getattr(found, f"largest_{kind}").argtypes = [c_void_p, *[c_int64] * 3, c_void_p, c_int64]
        getattr(found, f"log_totals_{kind}").argtypes = [c_void_p, *[c_int64] * 2, c_void_p, c_int64]
        getattr(found, f"probabilities_{kind}").argtypes = [c_void_p, *[c_int64] * 2, c_float, c_void_p, c_int64]
        getattr(found, f"norm_{kind}").argtypes = [c_void_p, *[c_int64] * 2, c_void_p, POINTER(NormNumbers), c_int64]
    return found


def usable(device: torch.device, dtype: torch.dtype, inputs: int) -> bool:
    """Whether there are kernels for weights of this type with so many inputs."""
    return device.type == "cpu" and dtype in KINDS and inputs % 2 == 0 and library() is not None


def blocks_usable(device: torch.device, dtype: torch.dtype, inputs: int) -> bool:
    """Whether there are kernels for weights in blocks, of a model of this type, with so many inputs."""
    return usable(device, dtype, inputs) and inputs % BLOCK == 0


def reads(rows: Tensor) -> bool:
    """Whether the functions of rows take them; nothing is differentiated or traced there."""
    traced = torch.compiler.is_compiling() or (rows.requires_grad and torch.is_grad_enabled())
    return rows.device.type == "cpu" and rows.dtype in KINDS and not traced and library() is not None


def reading_groups(lengths: Sequence[int]) -> list[list[int]]:
    """Rows whose prompts are best read together, by length: those that pad least for the passes that they save.

    Of all partitions of the sorted rows it is the one with the least sum of places and of ``_READ_WITH_WEIGHTS`` a
    group, a place being a token or padding.

    Args:
        lengths: tokens of each row's prompt.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    ends = [end for end in range(1, len(order)) if lengths[order[end - 1]] < lengths[order[end]]]  # not among equals
    ends += [len(order)] if order else []
    least, begins = {0: 0}, {0: 0}
    for end in ends:
        longest = lengths[order[end - 1]]
        cost, begins[end] = min((least[begin] + (end - begin) * longest, begin) for begin in least)
        least[end] = cost + _READ_WITH_WEIGHTS
    groups, end = list[list[int]](), len(order)
    while end:
        groups.append(order[begins[end] : end])
        end = begins[end]
    return groups[::-1]


def largest(rows: Float[Tensor, "*b V"], count: int) -> Int[Tensor, "*b k"]:
    """Places of the largest numbers of each row, the largest first, and of equal ones the first; ``count <= V``."""
    rows = rows.contiguous()
    places = torch.empty(*rows.shape[:-1], count, dtype=torch.long)
    _call("largest", rows, count, places.data_ptr())
    return places


def log_totals(rows: Float[Tensor, "*b V"]) -> Float[Tensor, "*b"]:
    """log sum e^x of each row, in 32 bit."""
    rows = rows.contiguous()
    totals = torch.empty(rows.shape[:-1])
    _call("log_totals", rows, totals.data_ptr())
    return totals


def probabilities(logits: Float[Tensor, "*b V"], temperature: float) -> Float[Tensor, "*b V"]:
    """softmax(logits / temperature) of each row, in 32 bit; 0 where it is below e^-87 of the largest."""
    logits = logits.contiguous()
    probs = torch.empty(logits.shape)
    _call("probabilities", logits, c_float(temperature), probs.data_ptr())
    return probs


def norm(
    rows: Float[Tensor, "*b D"], weight: Float[Tensor, "D"], bias: Float[Tensor, "D"] | None, eps: float
) -> Float[Tensor, "*b D"]:
    """x / rms(x) * w of each row, or with a bias b, (x - mean) / deviation * w + b, in 32 bit and rounded once.

    Weight and bias are of 32 bit.
    """
    rows = rows.contiguous()
    normed = torch.empty_like(rows)
    numbers = NormNumbers(weight.data_ptr(), None if bias is None else bias.data_ptr(), eps)
    _call("norm", rows, normed.data_ptr(), byref(numbers))
    return normed


def _call(name: str, rows: Tensor, *rest: Any) -> None:
    found, width = getattr(library(), f"{name}_{KINDS[rows.dtype]}"), rows.shape[-1]
    threads = torch.get_num_threads() if rows.numel() >= _FEW else 1
    found(rows.data_ptr(), rows.numel() // width, width, *rest, threads)


class Packed:
    """A weight as the kernels read it, in memory that they are given the address of.

    Attributes:
        dtype: of rows and products.
        matrix: addresses and sizes.
        nbytes: of the weight, in whole panels.
    """

    def __init__(self, shape: torch.Size, bias: Float[Tensor, "O"] | None, dtype: torch.dtype, bits: int = 0) -> None:
        found = library()
        assert found is not None, "no kernels"
        self.dtype, (outputs, inputs), width = dtype, shape, found.panel_outputs()
        whole = -(-outputs // width) * width
        size = found.block_bytes(bits, whole, inputs) if bits else whole * inputs * dtype.itemsize
        self._weight, self.nbytes = huge_pages.zeros(size), size
        self._bias = None if bias is None else torch.nn.functional.pad(bias.float(), (0, whole - outputs))
        self._multiply, self._workspace = getattr(found, f"multiply_{KINDS[dtype]}"), found.product_workspace
        bias_at = None if self._bias is None else self._bias.data_ptr()
        self.matrix = Matrix(self._weight.data_ptr(), bias_at, inputs, outputs, bits)

    def times(self, rows: Float[Tensor, "*b I"]) -> Float[Tensor, "*b O"]:
        """The product with some rows."""
        rows = rows.contiguous()
        result = torch.empty(*rows.shape[:-1], self.matrix.outputs, dtype=self.dtype)
        count = rows.numel() // self.matrix.inputs
        if not count:
            return result
        matrix, threads = byref(self.matrix), torch.get_num_threads()
        work = torch.empty(self._workspace(matrix, count, threads))
        self._multiply(matrix, rows.data_ptr(), result.data_ptr(), count, work.data_ptr(), threads)
        return result


class Panels(Packed):
    """A weight in panels of some outputs.

    Args:
        weight: of type bfloat16 or float32, with an even number of inputs.
        bias: of its type.
    """

    def __init__(self, weight: Float[Tensor, "O I"], bias: Float[Tensor, "O"] | None) -> None:
        super().__init__(weight.shape, bias, weight.dtype)
        self._pack: Callable[..., object] = getattr(library(), f"pack_{KINDS[weight.dtype]}")
        plain = weight.contiguous()
        self._pack(plain.data_ptr(), self._weight.data_ptr(), *weight.shape, 0)

    def plain(self) -> Float[Tensor, "O I"]:
        """A copy of the weight as it was."""
        weight = torch.empty(self.matrix.outputs, self.matrix.inputs, dtype=self.dtype)
        self._pack(weight.data_ptr(), self._weight.data_ptr(), *weight.shape, 1)
        return weight


class Blocks(Packed):
    """A weight in blocks of ``BLOCK`` inputs, w = (n - 2^(bits-1)) scale + zero, for rows that are rounded to 8 bits.

    A row is rounded by blocks too, to q = x / s from -127 to 127, ties to even, where s is the largest size of a block
    over 127. A block's sum of n q is exact, and blocks are added in 32 bit in their order.

    Args:
        quantised: numbers from 0 to 2^bits - 1, and scales and zeros of the blocks.
        bias: of any type.
        dtype: of rows and products, bfloat16 or float32.
        bits: 4 or 8.
    """

    def __init__(self, quantised: Quantised, bias: Float[Tensor, "O"] | None, dtype: torch.dtype, bits: int) -> None:
        numbers = quantised.numbers.flatten(1)
        super().__init__(numbers.shape, bias, dtype, bits)
        parts = [part.contiguous() for part in (numbers, quantised.scale, quantised.zero)]
        self._pack(parts, back=False)

    def plain(self) -> Quantised:
        """A copy of what the blocks hold."""
        outputs, inputs = self.matrix.outputs, self.matrix.inputs
        shapes = ((outputs, inputs), *[(outputs, inputs // BLOCK)] * 2)
        types = (torch.uint8, torch.bfloat16, torch.bfloat16)
        parts = [torch.empty(shape, dtype=dtype) for shape, dtype in zip(shapes, types, strict=True)]
        self._pack(parts, back=True)
        return Quantised(parts[0].unflatten(1, (-1, BLOCK)), *parts[1:])

    def _pack(self, parts: Sequence[Tensor], back: bool) -> None:
        found, matrix = library(), self.matrix
        assert found is not None
        places = (part.data_ptr() for part in parts)
        found.pack_blocks(matrix.bits, *places, self._weight.data_ptr(), matrix.outputs, matrix.inputs, back)
