"""The C++ kernels of ``cpu_kernels.cpp`` for a CPU: how they are compiled, and matrix products with weights in panels.

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
from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.cpp_extension import _get_build_directory, get_cxx_compiler

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_suffix(".cpp")
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-std=c++17", "-shared", "-fPIC")
_QUIETLY: dict[str, Any] = {"check": True, "capture_output": True, "text": True, "timeout": 600}
KINDS = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


class Matrix(Structure):
    """A weight in panels as the kernels are given it."""

    _fields_ = [("panels", c_void_p), ("bias", c_void_p), ("inputs", c_int64), ("outputs", c_int64)]


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where they cannot be compiled, with a warning that says why."""
    try:
        return _declared(ctypes.CDLL(str(_compiled())))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        reason = next((line.strip() for line in said.splitlines() if line.strip()), type(error).__name__)
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
    facts = [_SOURCE.read_text(), *_FLAGS, torch.__version__, platform.machine(), _instructions()]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]


def _instructions() -> str:
    """Instruction sets of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _declared(found: ctypes.CDLL) -> ctypes.CDLL:
    found.panel_outputs.restype = found.product_workspace.restype = c_int64
    found.product_workspace.argtypes = [POINTER(Matrix), c_int64, c_int64]
    for kind in KINDS.values():
        getattr(found, f"multiply_{kind}").argtypes = [POINTER(Matrix), *[c_void_p] * 2, c_int64, c_void_p, c_int64]
        getattr(found, f"pack_{kind}").argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_int64]
    return found


def usable(device: torch.device, dtype: torch.dtype, inputs: int) -> bool:
    """Whether there are kernels for weights of this type with so many inputs."""
    return device.type == "cpu" and dtype in KINDS and inputs % 2 == 0 and library() is not None


class Panels:
    """A weight in panels of some outputs, as the kernels read it.

    Args:
        weight: of type bfloat16 or float32, with an even number of inputs.
        bias: of its type.

    Attributes:
        matrix: addresses and sizes.
    """

    def __init__(self, weight: Float[Tensor, "O I"], bias: Float[Tensor, "O"] | None) -> None:
        found = library()
        assert found is not None, "no kernels"
        kind = KINDS[weight.dtype]
        outputs, inputs = weight.shape
        width = found.panel_outputs()
        whole = -(-outputs // width) * width
        self._weight = torch.zeros(whole * inputs, dtype=weight.dtype)
        self._bias = None if bias is None else torch.nn.functional.pad(bias.float(), (0, whole - outputs))
        self._pack, self._multiply = getattr(found, f"pack_{kind}"), getattr(found, f"multiply_{kind}")
        self._workspace: Callable[..., int] = found.product_workspace
        plain = weight.contiguous()
        self._pack(plain.data_ptr(), self._weight.data_ptr(), outputs, inputs, 0)
        bias_at = None if self._bias is None else self._bias.data_ptr()
        self.matrix = Matrix(self._weight.data_ptr(), bias_at, inputs, outputs)

    @property
    def dtype(self) -> torch.dtype:
        return self._weight.dtype

    def plain(self) -> Float[Tensor, "O I"]:
        """A copy of the weight as it was."""
        weight = torch.empty(self.matrix.outputs, self.matrix.inputs, dtype=self.dtype)
        self._pack(weight.data_ptr(), self._weight.data_ptr(), *weight.shape, 1)
        return weight

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
