"""The C++ kernels of ``cpu_kernels.cpp``: matrix products and whole decoder layers on a CPU.

They are compiled at first use, with the compiler that torch's extensions use, for the processor at hand, and kept in
torch's folder for extensions. Where no compiler is found ``library`` is None, and torch's operators do the work.

A decoding step on a CPU reads every weight once, and the rest (norms, rotary positions, cache writes, the softmax,
residuals) is small; but as torch operators these are forty calls a layer. Here one call runs all
layers on one team of threads. Every sum runs in one order whatever the number of rows is, so passes over one token and
over many, batches of any size and trees give the same bits.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import platform
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterable
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_uint8, c_void_p
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.cpp_extension import _get_build_directory, get_cxx_compiler

if TYPE_CHECKING:
    from methods.engine.causal_layers import FeedForward, Layer
    from methods.engine.causal_lm import CausalLM, Pass

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_suffix(".cpp")
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-std=c++17", "-shared", "-fPIC")
_QUIETLY: dict[str, Any] = {"check": True, "capture_output": True, "text": True, "timeout": 600}
_KINDS = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
_LANES = 16  # a head and a feed-forward layer must be multiples of as many numbers


class _Matrix(Structure):
    _fields_ = [("panels", c_void_p), ("bias", c_void_p), ("inputs", c_int64), ("outputs", c_int64)]


class _Norm(Structure):
    _fields_ = [("weight", c_void_p), ("eps", c_float)]


class _Layer(Structure):
    _fields_ = [
        *((name, _Matrix) for name in ("qkv", "out", "gate_up", "down")),
        *((name, _Norm) for name in ("before_attention", "after_attention", "before_mlp", "after_mlp", "query", "key")),
        ("norm_heads", c_int64),
        ("rotary", c_int64),
    ]


class _Model(Structure):
    _fields_ = [
        ("layers", c_void_p),
        *((name, c_int64) for name in ("hidden", "heads", "kv_heads", "dim", "mlp")),
        ("scale", c_float),
        ("residual", c_float),
    ]


class _Pass(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("hidden", "result", "cos", "sin")),
        ("table", c_int64),
        ("rotary", c_int64),
        *((name, c_void_p) for name in ("reach", "lengths", "cache")),
        *((name, c_int64) for name in ("batch", "nodes", "capacity")),
        *((name, c_void_p) for name in ("layers", "places", "parts", "taps")),
        ("count", c_int64),
        ("work", c_void_p),
        ("threads", c_int64),
    ]


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where they cannot be compiled, with a warning that says why."""
    try:
        return _declared(ctypes.CDLL(str(_compiled())))
    except (OSError, subprocess.CalledProcessError) as error:
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
    for name in ("panel_outputs", "workspace", "product_workspace"):
        getattr(found, name).restype = c_int64
    found.product_workspace.argtypes = [POINTER(_Matrix), c_int64, c_int64]
    found.workspace.argtypes = [POINTER(_Model), c_int64, c_int64, c_int64]
    for kind in _KINDS.values():
        getattr(found, f"run_{kind}").argtypes = [POINTER(_Model), POINTER(_Pass)]
        getattr(found, f"multiply_{kind}").argtypes = [POINTER(_Matrix), *[c_void_p] * 2, c_int64, c_void_p, c_int64]
        getattr(found, f"pack_{kind}").argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_int64]
    return found


def usable(device: torch.device, dtype: torch.dtype, inputs: int) -> bool:
    """Whether there are kernels for weights of this type with so many inputs."""
    return device.type == "cpu" and dtype in _KINDS and inputs % 2 == 0 and library() is not None


class Panels:
    """A weight in panels of some outputs, as the kernels read it.

    Args:
        weight: of type bfloat16 or float32, with an even number of inputs.
        bias: of its type.
    """

    def __init__(self, weight: Float[Tensor, "O I"], bias: Float[Tensor, "O"] | None) -> None:
        found = library()
        assert found is not None, "no kernels"
        kind = _KINDS[weight.dtype]
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
        self.matrix = _Matrix(self._weight.data_ptr(), bias_at, inputs, outputs)

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


class FusedLayers:
    """The layers of a model as one call runs them.

    Args:
        lm: a model whose weights are in panels and whose layers ``expressible`` accepts.
    """

    def __init__(self, lm: CausalLM) -> None:
        found = library()
        assert found is not None, "no kernels"
        self._kept: list[Tensor] = []
        self._layers = (_Layer * lm.n_layers)(*(self._layer(layer) for layer in lm.layers))
        sizes = (lm.hidden_size, lm.heads, lm.kv_heads, lm.head_dim, _width(lm))
        self._model = _Model(ctypes.addressof(self._layers), *sizes, lm._scale, lm._residual)
        self._run: Callable[..., Any] = getattr(found, f"run_{_KINDS[lm.dtype]}")
        self._workspace: Callable[..., int] = found.workspace

    def _layer(self, layer: Layer) -> _Layer:
        attention, mlp = layer.attention, cast("FeedForward", layer.mlp)
        products: list[Any] = [attention.qkv, attention.out, mlp.gate_up, mlp.down]
        norms = (
            attention.norm, attention.post_norm, mlp.norm, mlp.post_norm, attention.query_norm, attention.key_norm
        )  # fmt: skip
        return _Layer(
            *(product.panels.matrix for product in products),
            *(self._norm(norm) for norm in norms),
            attention.norm_heads,
            attention.rotary,
        )

    def _norm(self, norm: Any) -> _Norm:
        if norm is None:
            return _Norm(None, 0.0)
        self._kept.append(norm.factor.float().contiguous())
        return _Norm(self._kept[-1].data_ptr(), norm.eps)

    def run(
        self, lm: CausalLM, state: Pass, layers: Iterable[int], wanted: Collection[int]
    ) -> dict[int, Float[Tensor, "B M D"]]:
        """Run a pass through some layers of this model or of a view of it; states after those ``wanted``."""
        order, kv = list(layers), state.cache
        assert state.slots is None or kv.batch == len(state.hidden)
        hidden = state.hidden.contiguous()
        batch, nodes, _ = hidden.shape
        taps = {layer: torch.empty_like(hidden) for layer in order if layer in wanted}
        result, threads, count = torch.empty_like(hidden), torch.get_num_threads(), len(order)
        slots = max(kv.lengths) + nodes
        work = torch.empty(self._workspace(byref(self._model), batch * nodes, slots, threads))
        parts = [(i not in lm.skipped_attention) + 2 * (i not in lm.skipped_mlp) for i in order]
        places = [kv.place[layer] if part & 1 else 0 for layer, part in zip(order, parts, strict=True)]
        arrays = (
            (c_int32 * count)(*order),
            (c_int32 * count)(*places),
            (c_uint8 * count)(*parts),
            (c_void_p * count)(*(taps[i].data_ptr() if i in taps else None for i in order)),
        )
        lengths = (c_int64 * batch)(*kv.lengths)
        reach = state.reach
        turning = state.cos.shape[-1]
        described = _Pass(
            hidden.data_ptr(), result.data_ptr(), state.cos.data_ptr(), state.sin.data_ptr(),
            0 if len(state.cos) == 1 else nodes * turning, turning,
            None if reach is None else reach.data_ptr(), ctypes.addressof(lengths), kv.store.data_ptr(),
            batch, nodes, kv.capacity, *(ctypes.addressof(array) for array in arrays), count, work.data_ptr(), threads,
        )  # fmt: skip
        self._run(byref(self._model), byref(described))
        state.hidden = result
        return taps


def expressible(lm: CausalLM) -> bool:
    """Whether the kernels have all that this model's layers do, with its weights in panels."""
    from methods.engine.causal_layers import FeedForward, RMSNorm
    from methods.engine.linear import PanelLinear

    def known(layer: Layer) -> bool:
        attention, mlp = layer.attention, layer.mlp
        sees_all = attention.window is None or attention.window >= lm.max_positions
        if not isinstance(mlp, FeedForward) or not sees_all or (attention.soft_cap, attention.sinks) != (None, None):
            return False
        norms = (
            attention.norm, attention.post_norm, mlp.norm, mlp.post_norm, attention.query_norm, attention.key_norm
        )  # fmt: skip
        products = (attention.qkv, attention.out, mlp.gate_up, mlp.down)
        return (
            all(norm is None or isinstance(norm, RMSNorm) for norm in norms)
            and all(isinstance(product, PanelLinear) for product in products)
            and type(mlp.activation).__name__.startswith("SiLU")
        )

    known_all = lm.dtype in _KINDS and lm.head_dim % _LANES == 0 and all(map(known, lm.layers))
    return known_all and _width(lm) % _LANES == 0


def _width(lm: CausalLM) -> int:
    """Numbers between the two matrices of a feed-forward layer."""
    down: Any = cast("FeedForward", lm.layers[0].mlp).down
    return int(down.panels.matrix.inputs)
