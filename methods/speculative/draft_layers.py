"""Llama layers of draft networks: the names and shapes of their tensors, and their rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from methods.engine.causal_lm import RotaryTable

Shapes = dict[str, tuple[int, ...]]


@runtime_checkable
class Sizes(Protocol):
    """Of a layer; ``rope`` as transformers has it in ``rope_parameters``."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rope(self) -> Mapping[str, Any]: ...


def layer_shapes(sizes: Sizes, read: int | None = None) -> Shapes:
    """Tensors of a layer whose projections read ``read`` values; None: as many as it writes."""
    width, heads, kv = sizes.hidden_size, sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    read = read or width
    return {
        "self_attn.q_proj.weight": (heads, read),
        "self_attn.k_proj.weight": (kv, read),
        "self_attn.v_proj.weight": (kv, read),
        "self_attn.o_proj.weight": (width, heads),
        "mlp.gate_proj.weight": (sizes.intermediate_size, width),
        "mlp.up_proj.weight": (sizes.intermediate_size, width),
        "mlp.down_proj.weight": (width, sizes.intermediate_size),
        "post_attention_layernorm.weight": (width,),
    }


def bias_shapes(sizes: Sizes) -> Shapes:
    """Biases of its attention, which few networks have."""
    heads, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    parts = {"q": heads, "k": kv, "v": kv, "o": sizes.hidden_size}
    return {f"self_attn.{name}_proj.bias": (size,) for name, size in parts.items()}


def rotary_table(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> RotaryTable:
    """Cosines and sines of its positions."""
    config = LlamaConfig(
        hidden_size=sizes.hidden_size,
        num_attention_heads=sizes.heads,
        head_dim=sizes.head_dim,
        rope_parameters=dict(sizes.rope),
    )
    return RotaryTable(LlamaRotaryEmbedding(config).to(device), device, dtype)
