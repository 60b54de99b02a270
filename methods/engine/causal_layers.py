"""Reading the weights of Hugging Face decoder layers: all differences between the families.

The families share one skeleton (norm, attention with rotary positions, norm, gated feed-forward) and differ in the
positions of the norms, in biases, in query/key norms, in scale factors, in how projections are stored, in layers whose
attention ends with a window, and in layers with a mixture of experts. A family is on the list only if a test proves its
logits equal to those of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PretrainedConfig

from methods.engine import cpu_kernels
from methods.engine.expert_layers import ClampedSwish, Experts, ExpertWeights, Gate, Router, make_experts
from methods.engine.linear import Linear, LinearForm, make_linear
from methods.engine.sampling import in_float

DENSE = (
    *("llama", "mistral", "qwen2", "qwen3", "olmo", "olmo2", "phi3", "smollm3", "granite", "glm4"),
    *("gemma", "gemma2", "gemma3_text"),
)
SPARSE = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "glm4_moe")
PROVEN = (*DENSE, *SPARSE)
PROVEN_ROPE = ("default", "linear", "llama3", "yarn")

Rows = Callable[[Tensor], Tensor]


class UnsupportedModel(ValueError):
    """A model whose equality with the original is not proven."""


@dataclass(frozen=True, slots=True)
class Attention:
    """One self-attention sub-layer. ``qkv`` yields H query, K key and K value heads side by side.

    Attributes:
        norm_heads: whether query and key norms act on each head (Qwen3) or on all heads together (OLMo2).
        window: tokens that a token sees, the last ones and itself; None: all.
        soft_cap: scores are ``soft_cap * tanh(score / soft_cap)`` (Gemma 2, arXiv 2408.00118, sec. 2); None: as they
            are.
        sinks: one more score per head, which takes its share of the softmax and adds nothing (gpt-oss).
    """

    norm: Rows | None
    qkv: Linear
    out: Linear
    query_norm: Rows | None
    key_norm: Rows | None
    norm_heads: bool
    post_norm: Rows | None
    rotary: bool
    window: int | None = None
    soft_cap: float | None = None
    sinks: Float[Tensor, "H"] | None = None


@dataclass(frozen=True, slots=True)
class FeedForward:
    """One gated feed-forward sub-layer."""

    norm: Rows | None
    gate_up: Linear
    down: Linear
    activation: Rows
    post_norm: Rows | None

    @property
    def width(self) -> int:
        """Numbers between the two matrices."""
        return int(self.down.dense.shape[1])


@dataclass(frozen=True, slots=True)
class SparseFeedForward:
    """One feed-forward sub-layer with a mixture of experts.

    Attributes:
        shared: an expert of all tokens; its output is multiplied by the sigmoid of ``shared_gate``, if there is one.
    """

    norm: Rows | None
    router: Router
    experts: Experts
    shared: FeedForward | None
    shared_gate: Linear | None
    post_norm: Rows | None

    def mix(self, rows: Float[Tensor, "R D"], gate: Gate) -> Float[Tensor, "R D"]:
        """What the chosen experts, and the shared one, make of rows that are after the norm."""
        found = self.experts(rows, *self.router(rows), gate)
        if self.shared is None:
            return found
        always = self.shared.down(gate(self.shared.activation, self.shared.gate_up(rows)))
        return found + (always if self.shared_gate is None else torch.sigmoid(self.shared_gate(rows)) * always)

    @property
    def width(self) -> int:
        """Numbers between the two matrices of all experts that one token passes through."""
        return self.router.active * self.experts.width + (0 if self.shared is None else self.shared.width)

    @property
    def products(self) -> list[Linear]:
        """Matrices that every pass multiplies with."""
        shared = () if self.shared is None else (self.shared.gate_up, self.shared.down)
        return [self.router.scores, *shared, *(() if self.shared_gate is None else (self.shared_gate,))]


@dataclass(frozen=True, slots=True)
class Layer:
    attention: Attention
    mlp: FeedForward | SparseFeedForward


class RMSNorm:
    """x / rms(x) * w, with the statistics in 32 bit."""

    def __init__(self, weight: Float[Tensor, "D"], eps: float) -> None:
        self.weight, self.eps = weight.detach(), eps

    @property
    def factor(self) -> Float[Tensor, "D"]:
        """w"""
        return self.weight

    @cached_property
    def wide(self) -> list[Tensor]:
        """w in 32 bit, for a CPU's kernels."""
        return [self.factor.float().contiguous()]

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype or not cpu_kernels.reads(x):
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return cpu_kernels.norm(x, self.wide[0], None, self.eps)


class LayerNorm:
    """(x - mean) / deviation * w + b, with the statistics in 32 bit."""

    def __init__(self, weight: Float[Tensor, "D"], bias: Float[Tensor, "D"], eps: float) -> None:
        self.factor, self.bias, self.eps = weight.detach(), bias.detach(), eps

    @cached_property
    def wide(self) -> list[Tensor]:
        """w and b in 32 bit, for a CPU's kernels."""
        return [self.factor.float().contiguous(), self.bias.float().contiguous()]

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != self.factor.dtype or not cpu_kernels.reads(x):
            return F.layer_norm(x, self.factor.shape, self.factor, self.bias, self.eps)
        return cpu_kernels.norm(x, self.wide[0], self.wide[1], self.eps)


class OffsetRMSNorm(RMSNorm):
    """Gemma stores w - 1, and multiplies before it rounds."""

    @property
    def factor(self) -> Float[Tensor, "D"]:
        return 1.0 + self.weight.float()

    def __call__(self, x: Tensor) -> Tensor:
        weight = self.factor
        return F.rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)


class WideRMSNorm(RMSNorm):
    """gpt-oss keeps w in 32 bit, and multiplies before it rounds."""

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


def read_norm(module: nn.Module | None) -> Rows | None:
    """A norm of any family as a function of rows."""
    if module is None:
        return None
    kind = type(module).__name__
    if kind == "OlmoLayerNorm":
        return lambda x: F.layer_norm(x.float(), x.shape[-1:], eps=1e-5).to(x.dtype)
    eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps")  # noqa: B009
    weight = module.get_parameter("weight")
    return _NORMS.get(kind, RMSNorm)(weight, eps)


_NORMS = {
    **{f"Gemma{version}RMSNorm": OffsetRMSNorm for version in ("", "2", "3")},
    "GptOssRMSNorm": WideRMSNorm,
}


def norm_heads(attention: Attention, heads: Float[Tensor, "B M E d"], kv_heads: int) -> Float[Tensor, "B M E d"]:
    """Query and key heads after their norms, beside the value heads."""
    if attention.query_norm is None or attention.key_norm is None:
        return heads
    query, key, value = heads.split([heads.shape[2] - 2 * kv_heads, kv_heads, kv_heads], dim=2)
    if attention.norm_heads:
        query, key = attention.query_norm(query), attention.key_norm(key)
    else:
        query = attention.query_norm(query.flatten(2)).view(query.shape)
        key = attention.key_norm(key.flatten(2)).view(key.shape)
    return torch.cat([query, key, value], dim=2)


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
    for parameters in rope_parameters(config).values():
        rope = parameters.get("rope_type", "default")
        if rope not in PROVEN_ROPE:
            raise UnsupportedModel(
                f"The rotary scaling of a {config.model_type} model must be one proven equal "
                f"({', '.join(PROVEN_ROPE)}), got '{rope}'. Choose a variant of the model without it (for Phi-3: a 4k "
                "one)."
            )
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModel(
            f"A {config.model_type} model must write from left to right, got use_bidirectional_attention=true. Choose "
            "another model."
        )
    if config.model_type == "gemma3_text" and config.attn_logit_softcapping is not None:
        raise UnsupportedModel(
            "A gemma3_text model must have no soft cap on its attention scores (attn_logit_softcapping), which "
            "transformers leaves out. Choose another model."
        )
    if getattr(config, "n_group", 1) > 1:
        raise UnsupportedModel(
            f"A {config.model_type} model must choose among all experts of a layer, got n_group={config.n_group}, "
            "which is not proven equal. Choose another model."
        )
    if getattr(config, "clip_qkv", None) is not None:
        raise UnsupportedModel(
            "OLMo models must not clip queries and keys (clip_qkv), which is not proven equal. Choose another model."
        )


def rope_parameters(config: PretrainedConfig) -> dict[str, dict[str, Any]]:
    """Parameters of the rotary positions by the type of layer; ``""`` where all layers have the same."""
    found = dict(getattr(config, "rope_parameters", None) or {})
    by_layer = {name: dict(one) for name, one in found.items() if isinstance(one, dict)}
    return by_layer or {"": found}


def window(config: PretrainedConfig, layer: int) -> int | None:
    """Tokens that a token sees in a layer, itself included; None: all."""
    size, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    slides = types is None or types[layer] == "sliding_attention"
    return int(size) if size and slides else None


def is_sparse(config: PretrainedConfig, layer: int) -> bool:
    """Whether a layer has a mixture of experts."""
    every = getattr(config, "decoder_sparse_step", 1)
    dense = getattr(config, "mlp_only_layers", None) or ()
    first = getattr(config, "first_k_dense_replace", 0)
    return config.model_type in SPARSE and layer >= first and layer not in dense and (layer + 1) % every == 0


def read_layer(layer: nn.Module, form: LinearForm, config: PretrainedConfig, index: int) -> Layer:
    """Weights of one decoder layer, projections with the same input joined."""
    norms = _read_norms(layer)
    return Layer(_read_attention(layer, form, norms, config, window(config, index)), _read_mlp(layer, form, norms))


def rounded(layer: Layer) -> Layer:
    """The same layer with copies of its matrices in blocks of 4-bit numbers, see ``methods.engine.linear``.

    Raises:
        ValueError: it has a mixture of experts; or a device, type or shape without such weights.
    """
    if isinstance(layer.mlp, SparseFeedForward):
        raise ValueError(
            "Copies of 4 bits must be of layers without experts, got a mixture of experts. Choose another model."
        )
    attention = replace(layer.attention, qkv=_rounded(layer.attention.qkv), out=_rounded(layer.attention.out))
    return Layer(attention, replace(layer.mlp, gate_up=_rounded(layer.mlp.gate_up), down=_rounded(layer.mlp.down)))


def _rounded(product: Linear) -> Linear:
    return make_linear([product.dense], [product.bias], "int4")


@dataclass(frozen=True, slots=True)
class _Norms:
    """Norms before and after both sub-layers."""

    attention: Rows | None
    after_attention: Rows | None
    mlp: Rows | None
    after_mlp: Rows | None


def _read_norms(layer: nn.Module) -> _Norms:
    names: tuple[str | None, ...] = ("input_layernorm", None, "post_attention_layernorm", None)
    if hasattr(layer, "post_self_attn_layernorm"):  # GLM-4
        names = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    elif hasattr(layer, "pre_feedforward_layernorm"):  # Gemma 2 and 3
        names = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", _AFTER_MLP)
    elif hasattr(layer, _AFTER_MLP):  # OLMo2
        names = (None, "post_attention_layernorm", None, _AFTER_MLP)
    return _Norms(*(None if name is None else read_norm(layer.get_submodule(name)) for name in names))


_AFTER_MLP = "post_feedforward_layernorm"


def _read_attention(
    layer: nn.Module, form: LinearForm, norms: _Norms, config: PretrainedConfig, seen: int | None
) -> Attention:
    module: Any = layer.get_submodule("self_attn")
    query_norm, key_norm = getattr(module, "q_norm", None), getattr(module, "k_norm", None)
    if config.model_type == "glm4":
        qkv = _join_interleaved(module, config, form)
    else:
        qkv = _join(module, ("qkv_proj",) if hasattr(module, "qkv_proj") else ("q_proj", "k_proj", "v_proj"), form)
    sinks = getattr(module, "sinks", None)
    return Attention(
        norm=norms.attention,
        qkv=qkv,
        out=_join(module, ("o_proj",), form),
        query_norm=read_norm(query_norm),
        key_norm=read_norm(key_norm),
        norm_heads=query_norm is not None and query_norm.weight.shape[0] == module.head_dim,
        post_norm=norms.after_attention,
        rotary=bool(getattr(module, "use_rope", True)),
        window=seen,
        soft_cap=getattr(module, "attn_logit_softcapping", None),
        sinks=None if sinks is None else sinks.detach(),
    )


def _read_mlp(layer: nn.Module, form: LinearForm, norms: _Norms) -> FeedForward | SparseFeedForward:
    module = layer.get_submodule("mlp")
    if not hasattr(module, "experts"):
        return _read_dense(module, form, norms.mlp, norms.after_mlp)
    routed: LinearForm = "auto" if form == "int4" else form  # 4 bits would change which experts are chosen
    scores: Any = module.get_submodule("router" if hasattr(module, "router") else "gate")
    if form in ("int4", "fp8") and scores.weight.device.type == "cuda":
        raise ValueError(
            f"model.weights={form} on a GPU needs a model without a mixture of experts. Set model.weights=full."
        )
    bias = getattr(scores, "bias", None)
    correction = getattr(scores, "e_score_correction_bias", None)
    weight = scores.weight.detach() if correction is None else in_float(scores.weight.detach())
    linear = make_linear([weight], [None if bias is None else bias.detach()], routed)
    softmax_first = not hasattr(module, "router")
    name = next((name for name in ("shared_expert", "shared_experts") if hasattr(module, name)), None)
    shared = None if name is None else module.get_submodule(name)
    return SparseFeedForward(
        norm=norms.mlp,
        router=Router(
            linear,
            int(scores.top_k),
            softmax_first,
            bool(getattr(scores, "norm_topk_prob", True)),
            None if correction is None else correction.detach().clone(),
            float(getattr(scores, "routed_scaling_factor", 1.0)),
        ),
        experts=_read_experts(module.get_submodule("experts"), form),
        shared=None if shared is None else _read_dense(shared, form, None, None),
        shared_gate=None
        if not hasattr(module, "shared_expert_gate")
        else _join(module, ("shared_expert_gate",), routed),
        post_norm=norms.after_mlp,
    )


def _read_dense(module: Any, form: LinearForm, norm: Rows | None, post_norm: Rows | None) -> FeedForward:
    return FeedForward(
        norm=norm,
        gate_up=_join(module, ("gate_up_proj",) if hasattr(module, "gate_up_proj") else ("gate_proj", "up_proj"), form),
        down=_join(module, ("down_proj",), form),
        activation=getattr(module, "act_fn", None) or module.activation_fn,
        post_norm=post_norm,
    )


def _read_experts(module: Any, form: LinearForm) -> Experts:
    gate_up, down = module.gate_up_proj.detach(), module.down_proj.detach()
    if type(module).__name__ != "GptOssExperts":
        return make_experts(ExpertWeights(gate_up, down), module.act_fn, form)
    apart = torch.cat([gate_up[:, :, 0::2], gate_up[:, :, 1::2]], dim=2)  # gates and ups take turns, inputs come first
    bias = module.gate_up_proj_bias.detach()
    weights = ExpertWeights(
        apart.transpose(1, 2).contiguous(),
        down.transpose(1, 2).contiguous(),
        torch.cat([bias[:, 0::2], bias[:, 1::2]], dim=1),
        module.down_proj_bias.detach(),
    )
    return make_experts(weights, ClampedSwish(float(module.alpha), float(module.limit)), form)


def _join_interleaved(module: Any, config: PretrainedConfig, form: LinearForm) -> Linear:
    """Query, key and value of heads whose rotary pairs are neighbours, sorted so that pairs are half a width apart.

    Queries and keys are sorted alike, so every score stays what it was.
    """
    width = int(module.head_dim * rope_parameters(config)[""].get("partial_rotary_factor", 1.0))
    order = torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2), torch.arange(width, module.head_dim)])
    weights, biases = [], []
    for name in ("q_proj", "k_proj", "v_proj"):
        part = module.get_submodule(name)
        rows = torch.arange(part.weight.shape[0]).view(-1, module.head_dim)
        sort = (rows if name == "v_proj" else rows[:, order]).flatten().to(part.weight.device)
        weights.append(part.weight.detach()[sort])
        biases.append(None if part.bias is None else part.bias.detach()[sort])
    return make_linear(weights, biases, form)


def _join(module: nn.Module, names: tuple[str, ...], form: LinearForm) -> Linear:
    parts = [module.get_submodule(name) for name in names]
    return make_linear([p.weight.detach() for p in parts], [p.bias for p in parts], form)  # type: ignore[operator,misc]


def release(module: nn.Module) -> None:
    """Free the memory of weights that the engine now holds in its own layout."""
    for parameter in module.parameters():
        parameter.data = parameter.data.new_empty(0)
