"""Which kernel computes the attention of a model's passes, for the record of a run."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend

from methods.engine.causal_lm import CausalLM

_SLOTS, _NODES = 256, 8  # of the passes that are asked about


def attention_kernels(lm: CausalLM) -> dict[str, str]:
    """By kind of pass: ``cpp`` and ``triton`` are this project's kernels, ``eager`` is one operator after another.

    All others are what ``scaled_dot_product_attention`` of torch chooses for a model of this shape, type and device:
    flash, efficient, cudnn or math. A CUDA graph has a mask in passes over one token too.
    """
    if lm.fused:
        return {"one token": "cpp", "tree": "cpp", "prompt": "cpp"}
    plain = {"one token": _chosen(lm, 1, False), "tree": _chosen(lm, _NODES, True), "prompt": _chosen(lm, _NODES, True)}
    if getattr(lm, "graphs", None) is not None:
        plain["one token"] = _chosen(lm, 1, True)
    if lm.kernels == "triton":
        return plain | {"one token": "triton", "tree": "triton"}
    return plain


def _chosen(lm: CausalLM, nodes: int, masked: bool) -> str:
    first = lm.layers[0].attention
    if any(getattr(first, name, None) is not None for name in ("soft_cap", "sinks")):
        return "eager"
    groups = lm.heads // lm.kv_heads
    like = {"dtype": lm.dtype, "device": lm.device}
    query = torch.empty(1, lm.kv_heads, nodes * groups, lm.head_dim, **like)
    keys = torch.empty(1, lm.kv_heads, _SLOTS, lm.head_dim, **like)
    mask = torch.zeros(1, 1, nodes * groups, _SLOTS, **like) if masked else None
    chosen = torch._fused_sdp_choice(query, keys, keys, mask)
    return SDPBackend(chosen).name.removesuffix("_ATTENTION").lower()
