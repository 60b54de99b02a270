"""Reading the weights of Hugging Face encoder-decoder models: all differences between the families.

Two skeletons: that of BART (Marian, mBART, Pegasus: layer norms with bias, absolute positions, plain feed-forward) and
that of T5 (root-mean-square norms in front, relative positions, plain or gated feed-forward). A family is on the list
only if a test proves its logits equal to those of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PretrainedConfig

from methods.engine.causal_layers import LayerNorm, Rows, UnsupportedModel, read_norm
from methods.engine.fused_layers import LANES, Described
from methods.engine.linear import Linear, LinearForm, make_linear

BART_LIKE = ("marian", "bart", "mbart", "pegasus")
T5_LIKE = ("t5", "mt5")
PROVEN = (*BART_LIKE, *T5_LIKE)
_T5_POSITIONS = 512  # what T5 was trained with on either side, where a config does not say


@dataclass(frozen=True, slots=True)
class Close:
    """The end of a sub-layer: the residual sum, normed in post-norm models."""

    norm: Rows | None = None

    def __call__(self, hidden: Tensor, update: Tensor) -> Tensor:
        total = hidden + update
        return total if self.norm is None else self.norm(total)


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """Self-attention. ``qkv`` yields H query, H key and H value heads side by side."""

    norm: Rows | None
    qkv: Linear
    out: Linear


@dataclass(frozen=True, slots=True)
class CrossAttention:
    """Attention over the source, whose keys and values the stack makes (``Stack.source``)."""

    norm: Rows | None
    query: Linear
    out: Linear


@dataclass(frozen=True, slots=True)
class FeedForward:
    """One feed-forward sub-layer; ``gated``: ``up`` yields gate and value side by side."""

    norm: Rows | None
    up: Linear
    down: Linear
    activation: Rows
    gated: bool


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the encoder (``cross`` None) or of the decoder; ``close_*`` follow its sub-layers."""

    attention: SelfAttention
    cross: CrossAttention | None
    mlp: FeedForward
    close_attention: Close
    close_cross: Close
    close_mlp: Close

    @property
    def described(self) -> Described:
        """The layer in the terms of a CPU's kernels."""
        own, cross, mlp = self.attention, self.cross, self.mlp
        matrices = {"qkv": own.qkv, "out": own.out, "up": mlp.up, "down": mlp.down}
        norms = {
            "before_attention": own.norm,
            "close_attention": self.close_attention.norm,
            "before_mlp": mlp.norm,
            "close_mlp": self.close_mlp.norm,
        }
        if cross is not None:
            matrices |= {"source_query": cross.query, "source_out": cross.out}
            norms |= {"before_source": cross.norm, "close_source": self.close_cross.norm}
        return Described(matrices, norms, mlp.activation, mlp.gated)

    @property
    def attention_bytes(self) -> int:
        """Bytes of the matrices of self- and cross-attention that a pass over target tokens reads."""
        own = self.attention.qkv.nbytes + self.attention.out.nbytes
        return own + (self.cross.query.nbytes + self.cross.out.nbytes if self.cross else 0)

    @property
    def mlp_bytes(self) -> int:
        return self.mlp.up.nbytes + self.mlp.down.nbytes


class NoPositions:
    """No positions in the embedding (T5's act in the attention scores)."""

    def __call__(self, hidden: Float[Tensor, "B M D"], positions: Int[Tensor, "b M"]) -> Float[Tensor, "B M D"]:
        return hidden


class AbsolutePositions:
    """A vector per position, learned or sinusoidal, added to the embedding; BART normalises the sum.

    Positions after the last one get its vector: a draft may exceed the limit of a text, and such tokens are never kept.
    """

    def __init__(self, table: Float[Tensor, "P D"], norm: Rows | None) -> None:
        self.table, self.norm = table, norm

    def __call__(self, hidden: Float[Tensor, "B M D"], positions: Int[Tensor, "b M"]) -> Float[Tensor, "B M D"]:
        placed = hidden + self.table[positions.clamp(max=len(self.table) - 1)]
        return placed if self.norm is None else self.norm(placed)

    def chain(self, hidden: Float[Tensor, "B M D"], start: int) -> Float[Tensor, "B M D"]:
        """The same at positions from ``start`` on."""
        end = start + hidden.shape[1]
        if end > len(self.table):
            return self(hidden, torch.arange(start, end, device=hidden.device)[None])
        placed = hidden + self.table[start:end]
        return placed if self.norm is None else self.norm(placed)


class RelativeBias:
    """T5's bias on attention scores by the distance between query and key (Raffel et al. 2020, arXiv 1910.10683)."""

    def __init__(self, module: Any, reach: int) -> None:
        self._reach = reach
        distance = torch.arange(-reach, reach + 1, device=module.relative_attention_bias.weight.device)
        bucket = module._relative_position_bucket(
            -distance,  # transformers counts from query to key
            bidirectional=not module.is_decoder,
            num_buckets=module.relative_attention_num_buckets,
            max_distance=module.relative_attention_max_distance,
        )
        self._by_distance = module.relative_attention_bias.weight.detach()[bucket].T.contiguous()

    def __call__(self, query: Int[Tensor, "b M"], key: Int[Tensor, "b S"]) -> Float[Tensor, "b H M S"]:
        """Bias between nodes at these positions; distances beyond the reach share a bucket."""
        distance = (query[:, :, None] - key[:, None, :]).clamp_(-self._reach, self._reach)
        return self._by_distance[:, distance + self._reach].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class Stack:
    """Encoder or decoder: embedding (and its factor), positions, layers, final norm.

    Attributes:
        heads, head_dim: of its attention.
        score_scale: factor of the attention scores; T5 has it in its weights.
        embed_scale: factor of the embedding.
        bias: added to the scores of self-attention by distance, or None.
        source: of a decoder, all keys and values of its attention over the source in one product: layer by layer, H key
            and H value heads side by side.
    """

    heads: int
    head_dim: int
    score_scale: float
    embedding: Float[Tensor, "V D"]
    embed_scale: float
    place: AbsolutePositions | NoPositions
    layers: list[Layer]
    norm: Rows | None
    bias: RelativeBias | None
    source: Linear | None

    def of_kernels(self) -> list[Described] | None:
        """The layers as a CPU's kernels run them; None: they lack something of them."""
        if self.head_dim % LANES or self.bias is not None:
            return None
        found = [layer.described for layer in self.layers]
        return found if all(layer.expressible for layer in found) else None

    def embed(self, tokens: Int[Tensor, "*b"]) -> Float[Tensor, "*b D"]:
        hidden = F.embedding(tokens, self.embedding)
        return hidden if self.embed_scale == 1.0 else hidden * self.embed_scale


def fits_kernels(config: Any) -> bool:
    """Whether a CPU's kernels may run such a model; not with T5's bias on attention scores."""
    if config.model_type not in BART_LIKE:
        return False
    return all(
        config.d_model // heads % LANES == 0 for heads in (config.encoder_attention_heads, config.num_attention_heads)
    )


def check(config: PretrainedConfig) -> None:
    """Refuse what is not proven.

    Raises:
        UnsupportedModel: the family or an option has no equality test.
    """
    if config.model_type not in PROVEN:
        raise UnsupportedModel(
            "The encoder-decoder family must be one whose forward pass is proven equal to transformers' own "
            f"({', '.join(PROVEN)}), got '{config.model_type}'. Choose a model of one of these."
        )
    if not getattr(config, "share_encoder_decoder_embeddings", True):
        raise UnsupportedModel(
            "A Marian model must have one vocabulary for source and target, got two, which is not proven. Choose a "
            "model in which both share one."
        )


def check_dtype(config: PretrainedConfig, dtype: torch.dtype) -> None:
    """Refuse T5 in float16: it overflows although transformers keeps part of it in 32 bit and clamps the rest.

    Raises:
        UnsupportedModel: it is such a model.
    """
    if config.model_type in T5_LIKE and dtype == torch.float16:
        raise UnsupportedModel(
            "T5 models must be in bfloat16 or float32, got float16, in which they overflow. Set "
            "hardware.dtype=bfloat16."
        )


def max_positions(config: Any) -> int:
    """Longest source, and longest target, in tokens.

    T5's relative positions have no end; its limit is the length it was trained with, on both sides together.
    """
    if config.model_type in T5_LIKE:
        return 2 * int(getattr(config, "n_positions", None) or _T5_POSITIONS)
    return int(config.max_position_embeddings)


def output_scale(config: Any) -> float:
    """Factor of the decoder's states before the output matrix: the first T5 scales them, version 1.1 does not."""
    scaled = config.model_type in T5_LIKE and getattr(config, "scale_decoder_outputs", False)
    return float(config.d_model**-0.5) if scaled else 1.0


def read_stack(module: Any, config: Any, form: LinearForm) -> Stack:
    """Encoder or decoder of a model."""
    read = _read_t5 if config.model_type in T5_LIKE else _read_bart
    return read(module, config, form)


# --------------------------------------------------------------------------------------------------- BART and kin


def _read_bart(module: Any, config: Any, form: LinearForm) -> Stack:
    positions = module.embed_positions
    table = positions.weight.detach()[getattr(positions, "offset", 0) :].clone()
    before = config.model_type in ("mbart", "pegasus")
    heads = module.layers[0].self_attn.num_heads
    return Stack(
        heads=heads,
        head_dim=config.d_model // heads,
        score_scale=float((config.d_model // heads) ** -0.5),
        embedding=module.embed_tokens.weight.detach(),
        embed_scale=float(config.d_model**0.5) if config.scale_embedding else 1.0,
        place=AbsolutePositions(table, _layer_norm(getattr(module, "layernorm_embedding", None))),
        layers=[_bart_layer(layer, before, form) for layer in module.layers],
        norm=_layer_norm(getattr(module, "layer_norm", None)),
        bias=None,
        source=_source([getattr(layer, "encoder_attn", None) for layer in module.layers], ("k_proj", "v_proj"), form),
    )


def _bart_layer(layer: Any, before: bool, form: LinearForm) -> Layer:
    own, last = _layer_norm(layer.self_attn_layer_norm), _layer_norm(layer.final_layer_norm)
    attention = _attention(layer.self_attn, own if before else None, ("q_proj", "k_proj", "v_proj"), "out_proj", form)
    mlp = FeedForward(
        last if before else None, _join(layer, ("fc1",), form), _join(layer, ("fc2",), form), layer.activation_fn, False
    )
    cross, across = None, None
    if hasattr(layer, "encoder_attn"):
        across = _layer_norm(layer.encoder_attn_layer_norm)
        cross = _cross(layer.encoder_attn, across if before else None, "q_proj", "out_proj", form)
    closes = [Close(None if before else norm) for norm in (own, across, last)]
    return Layer(attention, cross, mlp, *closes)


# ----------------------------------------------------------------------------------------------------- T5 and kin


def _read_t5(module: Any, config: Any, form: LinearForm) -> Stack:
    first = module.block[0].layer[0].SelfAttention
    return Stack(
        heads=config.num_heads,
        head_dim=config.d_kv,
        score_scale=1.0,
        embedding=module.embed_tokens.weight.detach(),
        embed_scale=1.0,
        place=NoPositions(),
        layers=[_t5_layer(block, form) for block in module.block],
        norm=read_norm(module.final_layer_norm),
        bias=RelativeBias(first, config.relative_attention_max_distance),
        source=_source([getattr(block.layer[1], "EncDecAttention", None) for block in module.block], ("k", "v"), form),
    )


def _t5_layer(block: Any, form: LinearForm) -> Layer:
    first, last = block.layer[0], block.layer[-1]
    attention = _attention(first.SelfAttention, read_norm(first.layer_norm), ("q", "k", "v"), "o", form)
    cross = None
    if len(block.layer) == 3:
        middle = block.layer[1]
        cross = _cross(middle.EncDecAttention, read_norm(middle.layer_norm), "q", "o", form)
    dense = last.DenseReluDense
    gated = hasattr(dense, "wi_0")
    up = _join(dense, ("wi_0", "wi_1") if gated else ("wi",), form)
    mlp = FeedForward(read_norm(last.layer_norm), up, _join(dense, ("wo",), form), dense.act, gated)
    return Layer(attention, cross, mlp, Close(), Close(), Close())


# --------------------------------------------------------------------------------------------------------- parts


def _attention(module: Any, norm: Rows | None, qkv: Sequence[str], out: str, form: LinearForm) -> SelfAttention:
    return SelfAttention(norm, _join(module, qkv, form), _join(module, (out,), form))


def _cross(module: Any, norm: Rows | None, query: str, out: str, form: LinearForm) -> CrossAttention:
    return CrossAttention(norm, _join(module, (query,), form), _join(module, (out,), form))


def _source(modules: Sequence[Any], names: Sequence[str], form: LinearForm) -> Linear | None:
    """The keys and values of a source in all layers; None: an encoder's, which look at none."""
    if modules[0] is None:
        return None
    return _joined([module.get_submodule(name) for module in modules for name in names], form)


def _layer_norm(module: Any) -> Rows | None:
    if module is None:
        return None
    return LayerNorm(module.weight, module.bias, module.eps)


def _join(module: nn.Module, names: Sequence[str], form: LinearForm) -> Linear:
    return _joined([module.get_submodule(name) for name in names], form)


def _joined(parts: Sequence[Any], form: LinearForm) -> Linear:
    biases = [None if part.bias is None else part.bias.detach() for part in parts]
    return make_linear([part.weight.detach() for part in parts], biases, form)
