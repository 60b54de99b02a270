"""Whole decoder layers by Triton's kernels, in passes over few nodes, see ``methods.engine.triton_kernels``.

A layer is four products and seven kernels or fewer: sum and norm, rotary embedding and cache, attention in two, sum and
norm, gate. No mask is made, and nothing depends on the length of a row but what the kernels read on the device.

Larger passes (prompts) stay with torch. The option is on by default where passes are CUDA graphs of 16 bit.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from methods.engine.causal_layers import FeedForward, Layer, RMSNorm, Rows, SparseFeedForward, norm_heads
from methods.engine.fused_layers import Portion
from methods.engine.kv_cache import Cache

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TritonLayers:
    """The layers of a model. Build it with ``of``.

    Attributes:
        rounds: kernels of what is around the layers.
    """

    def __init__(self, layers: Sequence[Layer], kv_heads: int, scale: float, residual: float) -> None:
        from methods.engine import triton_kernels, triton_rounds

        self._kernels: Any = triton_kernels
        self.rounds: Any = triton_rounds
        self._layers, self._kv_heads, self._scale, self._residual = layers, kv_heads, scale, residual
        self._factors: dict[int, Tensor] = {}  # of norms, by their addresses: an attribute of some computes it anew
        for layer in layers:
            for norm in (layer.attention.norm, layer.mlp.norm):
                if isinstance(norm, RMSNorm):
                    self._factors[id(norm)] = norm.factor.contiguous()

    @classmethod
    def of(
        cls,
        layers: Sequence[Layer],
        kv_heads: int,
        scale: float,
        residual: float,
        name: str,
        dtype: torch.dtype,
        device: torch.device,
        longest: int,
    ) -> TritonLayers:
        """The layers of a model.

        Args:
            kv_heads: of each layer.
            scale: of attention scores.
            residual: factor of what a sub-layer adds.
            name: of the model, for messages.
            longest: context, in tokens.

        Raises:
            ValueError: Triton cannot run here, or its kernels lack something that the layers have.
        """
        _require_triton(device)
        if dtype not in _DTYPES or not all(_sees_all(layer, longest) for layer in layers):
            raise ValueError(
                "hardware.kernels=triton needs a model in float32, bfloat16 or float16 whose layers see all tokens, "
                f"without a sliding window, a soft cap or sinks, got {name} in {str(dtype).removeprefix('torch.')}. "
                "Set hardware.kernels=torch."
            )
        return cls(layers, kv_heads, scale, residual)

    def takes(self, nodes: int, fixed: bool) -> bool:
        """Whether the kernels run a pass over so many nodes, whether or not its shapes are ``fixed``."""
        return nodes <= int(self._kernels.MOST_NODES)

    def run(
        self,
        hidden: Float[Tensor, "B M D"],
        cos: Float[Tensor, "b M 1 r"],
        sin: Float[Tensor, "b M 1 r"],
        reach: Bool[Tensor, "B M G"] | Int[Tensor, "B M"] | None,
        cache: Cache,
        portions: Sequence[Portion],
        wanted: Collection[int] = (),
        *,
        earlier: int = 0,
        beside: Float[Tensor, "B M E"] | None = None,
        read: Float[Tensor, "B M E"] | None = None,
    ) -> tuple[Float[Tensor, "B M D"], dict[int, Float[Tensor, "B M D"]]]:
        """See ``FusedLayers.run``.

        Args:
            reach: also as bits, see ``triton_kernels.pack_bits``.
            read: by the first attention, after its norm and with what is beside it; None: they are made here.
        """
        bits = self._kernels.pack_bits(reach) if reach is not None and reach.dtype == torch.bool else reach
        shape, taps = hidden.shape, {}
        state, update = hidden.reshape(-1, shape[-1]), None  # what a sub-layer adds is added before the next one's norm
        for portion in portions:
            layer = self._layers[portion.layer]
            if portion.attention:
                if read is None:
                    state, rows = self._enter(state, update, layer.attention.norm)
                    read = rows.view(shape) if beside is None else torch.cat([beside, rows.view(shape)], -1)
                update, read = self._attend(layer, read, cos, sin, bits, cache, portion.layer, earlier), None
            if portion.mlp:
                state, rows = self._enter(state, update, layer.mlp.norm)
                update = self._feed(layer.mlp, rows)
            if portion.layer in wanted:
                state, update = self._enter(state, update, None)[0], None
                taps[portion.layer] = state.view(shape)
        return self._enter(state, update, None)[0].view(shape), taps

    def _enter(self, state: Tensor, update: Tensor | None, norm: Rows | None) -> tuple[Tensor, Tensor]:
        """The state with what the last sub-layer adds, and what the next one reads."""
        if isinstance(norm, RMSNorm):
            added, rows = self._kernels.add_norm(state, update, self._factors[id(norm)], norm.eps, self._residual)
            return added, rows
        added, _ = self._kernels.add_norm(state, update, None, factor=self._residual)
        return added, added if norm is None else norm(added)

    def _attend(
        self,
        layer: Layer,
        rows: Tensor,
        cos: Tensor,
        sin: Tensor,
        bits: Tensor | None,
        cache: Cache,
        index: int,
        earlier: int,
    ) -> Float[Tensor, "R D"]:
        attention = layer.attention
        batch, nodes, width = rows.shape
        store = cache.store[cache.place[index]]
        heads = attention.qkv(rows.reshape(-1, width)).view(batch, nodes, -1, store.shape[-1])
        heads = norm_heads(attention, heads, self._kv_heads)
        turn = (cos, sin) if attention.rotary else (None, None)
        query = self._kernels.turn_write(heads, *turn, store, cache.length, earlier)
        mixed = self._kernels.attend(query, store, cache.length, bits, self._scale, earlier=earlier)
        update = attention.out(mixed.view(batch * nodes, -1))
        return update if attention.post_norm is None else attention.post_norm(update)

    def _feed(self, mlp: FeedForward | SparseFeedForward, rows: Float[Tensor, "R D"]) -> Float[Tensor, "R D"]:
        if isinstance(mlp, SparseFeedForward):
            update = mlp.mix(rows, self._gate)
        else:
            update = mlp.down(self._gate(mlp.activation, mlp.gate_up(rows)))
        return update if mlp.post_norm is None else mlp.post_norm(update)

    def _gate(self, activation: Any, both: Float[Tensor, "R G"]) -> Float[Tensor, "R F"]:
        if type(activation).__name__.startswith("SiLU"):
            gated: Tensor = self._kernels.gate_up(both)
            return gated
        gate, up = both.chunk(2, dim=-1)
        joined: Tensor = activation(gate) * up
        return joined


def _sees_all(layer: Layer, longest: int) -> bool:
    attention = layer.attention
    near = attention.window is not None and attention.window < longest
    return not near and attention.soft_cap is None and attention.sinks is None


def _require_triton(device: torch.device) -> None:
    """Refuse a machine on which no kernel can run."""
    lacks = "no package named triton"
    if importlib.util.find_spec("triton") is not None:
        from methods.engine import triton_kernels

        if device.type == "cuda" or triton_kernels.INTERPRETED:
            return
        lacks = "no CUDA"
    raise ValueError(
        "hardware.kernels must be auto or torch where Triton's kernels cannot run, got triton "
        f"(device {device.type}, {lacks}). Set hardware.kernels=torch, or use an NVIDIA GPU with Triton; for tests on "
        "a CPU, TRITON_INTERPRET=1 interprets the kernels, slowly."
    )
