"""Everything between the matrix products of a layer, compiled by ``torch.compile``: fewer kernels for the same sums.

Rotary embedding with the norms of the heads, and the gate of the feed-forward part, are several kernels each; compiled
they are one. Products and attention remain library calls in the form in which the weights are held, so the option does
not change memory or the comparison: baseline and methods use the same layers. CUDA graphs capture the compiled kernels
like any others.

The functions are compiled when the model is loaded, for one and for any number of rows and of nodes; ``counted`` shows
later compilations.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from methods.engine.causal_layers import SparseFeedForward

if TYPE_CHECKING:
    from methods.engine.causal_layers import Attention
    from methods.engine.causal_lm import CausalLM

_MOST_VARIANTS = 64  # of one function: shapes times models
_ROWS, _NODES = 2, 3  # any numbers but 1, for which there is code of its own


class Compiled:
    """Compiles parts of a model, for it and all views that are made of it afterwards.

    Args:
        lm: a model whose weights have been read.

    Attributes:
        seconds: time that compiling took when the model was loaded.

    Raises:
        ValueError: torch cannot compile here.
    """

    def __init__(self, lm: CausalLM) -> None:
        import torch._dynamo

        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_VARIANTS)
        turn = lm.turn

        def turned(attention: Attention, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            return turn(attention, heads.clone(), cos, sin)  # not in place: one kernel less

        self.turn: Callable[..., Tensor] = torch.compile(turned)
        self.gate: Callable[..., Tensor] = torch.compile(lm.gate)
        self._before = _graphs_so_far()
        begin = time.perf_counter()
        try:
            self._compile(lm)
        except Exception as error:
            if not _is_of_compiler(error):
                raise
            raise ValueError(_refusal(lm.device.type, error)) from error
        self.seconds = time.perf_counter() - begin
        lm.__dict__.update(turn=self.turn, gate=self.gate, _fused=None)

    @property
    def counted(self) -> int:
        """Functions compiled since this model was loaded."""
        return _graphs_so_far() - self._before

    @torch.inference_mode()
    def _compile(self, lm: CausalLM) -> None:
        layer = lm.layers[0]
        for batch in (1, _ROWS):
            for nodes in (1, _NODES):
                heads = _any(lm, batch, nodes, lm.heads + 2 * lm.kv_heads, lm.head_dim)
                shared = lm.reserve_positions(nodes)[:2]  # of rows that stand at the same positions
                for tables in (shared, [table.repeat(batch, 1, 1, 1) for table in shared]):
                    self.turn(layer.attention, _marked(heads), *map(_marked, tables))
        mlp = layer.mlp
        for rows in (1, _ROWS * _NODES):
            given = _any(lm, rows, lm.hidden_size)
            if isinstance(mlp, SparseFeedForward):
                mlp.mix(given, lambda activation, both: self.gate(activation, _marked(both, only=1)))
            else:
                self.gate(mlp.activation, _marked(mlp.gate_up(given), only=1))


def _any(lm: CausalLM, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=lm.dtype, device=lm.device)


def _marked(tensor: Tensor, only: int = 2) -> Tensor:
    """Let the numbers of rows and nodes vary where they are above 1."""
    import torch._dynamo

    for dim in range(only):
        if tensor.shape[dim] > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
    return tensor


def _graphs_so_far() -> int:
    import torch._dynamo.utils

    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _is_of_compiler(error: Exception) -> bool:
    """Whether torch.compile failed, in any of its parts."""
    return any(kind.__module__.startswith(("torch._dynamo", "torch._inductor")) for kind in type(error).__mro__)


def _refusal(device: str, error: Any) -> str:
    needs = "Triton" if device == "cuda" else "a C++ compiler (g++, or the one that CXX names) and Python's headers"
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return (
        f"hardware.compile must be false where torch.compile fails, got true ({said[:200]}). On {device} it needs "
        f"{needs}. Install that, or set hardware.compile=false."
    )
