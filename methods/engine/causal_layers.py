"""Reading the weights of Hugging Face decoder layers: all differences between the families.

Ten families share one skeleton (norm, attention with rotary positions, norm, gated feed-forward) and differ in the
positions of the norms, in biases, in query/key norms, in scale factors and in how projections are stored. A family is
on the list only if a test proves its logits equal to those of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PretrainedConfig

from methods.engine.linear import Linear, LinearForm, make_linear

PROVEN = ("llama", "mistral", "qwen2", "qwen3", "olmo", "olmo2", "phi3", "smollm3", "gemma", "granite")
PROVEN_ROPE = ("default", "linear", "llama3", "yarn")

Rows = Callable[[Tensor], Tensor]


class UnsupportedModel(ValueError):
    """A model whose equality with the original is not proven."""


@dataclass(frozen=True, slots=True)
class Attention:
    """One self-attention sub-layer. ``qkv`` yields H query, K key and K value heads side by side."""

    norm: Rows | None
    qkv: Linear
    out: Linear
    query_norm: Rows | None
    key_norm: Rows | None
    norm_heads: bool  # query/key norms act on each head (Qwen3) or on all heads together (OLMo2)
    post_norm: Rows | None
    rotary: bool


@dataclass(frozen=True, slots=True)
class FeedForward:
    """One gated feed-forward sub-layer."""

    norm: Rows | None
    gate_up: Linear
    down: Linear
    activation: Rows
    post_norm: Rows | None


@dataclass(frozen=True, slots=True)
class Layer:
    attention: Attention
    mlp: FeedForward


class RMSNorm:
    """x / rms(x) * w, with the statistics in 32 bit."""

    def __init__(self, weight: Float[Tensor, "D"], eps: float) -> None:
        self.weight, self.eps = weight.detach(), eps

    @property
    def factor(self) -> Float[Tensor, "D"]:
        """w"""
        return self.weight

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class OffsetRMSNorm(RMSNorm):
    """Gemma stores w - 1, and multiplies before it rounds."""

    @property
    def factor(self) -> Float[Tensor, "D"]:
        return 1.0 + self.weight.float()

    def __call__(self, x: Tensor) -> Tensor:
        weight = self.factor
        return F.rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)


def read_norm(module: nn.Module | None) -> Rows | None:
    """A norm of any family as a function of rows."""
    if module is None:
        return None
    kind = type(module).__name__
    if kind == "OlmoLayerNorm":
        return lambda x: F.layer_norm(x.float(), x.shape[-1:], eps=1e-5).to(x.dtype)
    eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps")  # noqa: B009
    weight = module.get_parameter("weight")
    return OffsetRMSNorm(weight, eps) if kind == "GemmaRMSNorm" else RMSNorm(weight, eps)


def check(config: PretrainedConfig) -> None:
    """Refuse what is not proven.

    Raises:
        UnsupportedModel: the family, the rotary scaling or an option has no equality test.
    """
    if config.model_type not in PROVEN:
        raise UnsupportedModel(
            "The model family must be one whose forward pass is proven equal to transformers' own "
            f"({', '.join(PROVEN)}), got '{config.model_type}'. Choose a model of one of these."
        )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in PROVEN_ROPE:
        raise UnsupportedModel(
            f"The rotary scaling of a {config.model_type} model must be one proven equal ({', '.join(PROVEN_ROPE)}), "
            f"got '{rope}'. Choose a variant of the model without it (for Phi-3: a 4k one)."
        )
    if getattr(config, "clip_qkv", None) is not None:
        raise UnsupportedModel(
            "OLMo models must not clip queries and keys (clip_qkv), which is not proven equal. Choose another model."
        )


def max_positions(config: PretrainedConfig) -> int:
    """Longest context in which full attention is right (a sliding window ends it)."""
    limit = int(config.max_position_embeddings)
    window = getattr(config, "sliding_window", None)
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    return min(limit, int(window)) if window and sliding else limit


def read_layer(layer: nn.Module, form: LinearForm) -> Layer:
    """Weights of one decoder layer, projections with the same input joined."""
    return Layer(read_attention(layer, form), read_mlp(layer, form))


def read_attention(layer: nn.Module, form: LinearForm) -> Attention:
    module = layer.get_submodule("self_attn")
    query_norm, key_norm = getattr(module, "q_norm", None), getattr(module, "k_norm", None)
    post = layer.post_attention_layernorm if _norms_after(layer) else None
    return Attention(
        norm=read_norm(getattr(layer, "input_layernorm", None)),
        qkv=_join(module, ("qkv_proj",) if hasattr(module, "qkv_proj") else ("q_proj", "k_proj", "v_proj"), form),
        out=_join(module, ("o_proj",), form),
        query_norm=read_norm(query_norm),
        key_norm=read_norm(key_norm),
        norm_heads=query_norm is not None and query_norm.weight.shape[0] == module.head_dim,
        post_norm=read_norm(post),  # type: ignore[arg-type]
        rotary=bool(getattr(module, "use_rope", True)),
    )


def read_mlp(layer: nn.Module, form: LinearForm) -> FeedForward:
    module = layer.get_submodule("mlp")
    after = _norms_after(layer)
    return FeedForward(
        norm=None if after else read_norm(layer.get_submodule("post_attention_layernorm")),
        gate_up=_join(module, ("gate_up_proj",) if hasattr(module, "gate_up_proj") else ("gate_proj", "up_proj"), form),
        down=_join(module, ("down_proj",), form),
        activation=getattr(module, "act_fn", None) or module.activation_fn,  # type: ignore[arg-type]
        post_norm=read_norm(layer.get_submodule("post_feedforward_layernorm")) if after else None,
    )


def _norms_after(layer: nn.Module) -> bool:
    return hasattr(layer, "post_feedforward_layernorm")


def _join(module: nn.Module, names: tuple[str, ...], form: LinearForm) -> Linear:
    parts = [module.get_submodule(name) for name in names]
    return make_linear([p.weight.detach() for p in parts], [p.bias for p in parts], form)  # type: ignore[operator,misc]


def release(module: nn.Module) -> None:
    """Free the memory of weights that the engine now holds in its own layout."""
    for parameter in module.parameters():
        parameter.data = parameter.data.new_empty(0)
