"""The network of the non-autoregressive family: an encoder, and a decoder that writes all positions at once.

It is the teacher's own architecture without the causal mask, so that encoder and decoder begin with the teacher's
weights: sinusoidal positions, and norms where the teacher has them, in front of the sub-layers and at the end of either
side (Pegasus) or after the sub-layers (Marian). Padding is masked everywhere, so a row does not depend on its batch.
Each method defines the decoder's input, the objective and the choice of tokens (student.py).

The embedding, which is the output matrix too, is the teacher's, frozen, or an own one that begins as it. A frozen one
takes no space in the checkpoint, and no gradient, which is a third of the output's cost in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.activations import ACT2FN

from methods.engine.causal_layers import LayerNorm
from methods.engine.causal_lm import CausalLM
from methods.engine.cpu_kernels import reading_groups
from methods.engine.fused_layers import Described, FusedEncoder, FusedLayers, Portion
from methods.engine.linear import Linear, LinearForm, library_form, make_linear
from methods.engine.positions import sinusoids
from methods.engine.seq2seq_lm import Seq2SeqLM, SourceCache

Embedding = Literal["shared", "own"]

_NORM_FIRST = {"marian": False, "pegasus": True}  # the families of a teacher


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes, from the teacher.

    Attributes:
        inner: units of the feed-forward layers.
        positions: longest source, and longest target.
        scale: factor of the embedding.
        norm_first: norms are in front of the sub-layers.
        end: the id that ends a text.
        suppressed: ids that are never written, the end among them: lengths are chosen, not written.
    """

    vocabulary: int
    width: int
    inner: int
    heads: int
    encoder_layers: int
    decoder_layers: int
    positions: int
    activation: str
    scale: float
    norm_first: bool
    end: int
    suppressed: tuple[int, ...]

    @classmethod
    def of(cls, target: CausalLM) -> Shape:
        """The teacher's.

        Raises:
            ValueError: it is of another family, or declares no end.
        """
        if not isinstance(target, Seq2SeqLM) or target.config.model_type not in _NORM_FIRST or not target.eos_ids:
            raise ValueError(
                "Non-autoregressive students need encoder-decoders of the Marian or Pegasus family, got "
                f"model={target.name}. Set model=multi30k_4_4, or model=hf model.name=HUB_ID_OR_FOLDER."
            )
        config = target.config
        end = int(target.eos_ids[0])
        return cls(
            vocabulary=target.vocab_size,
            width=config.d_model,
            inner=config.decoder_ffn_dim,
            heads=config.decoder_attention_heads,
            encoder_layers=config.encoder_layers,
            decoder_layers=config.decoder_layers,
            positions=target.max_positions,
            activation=config.activation_function,
            scale=float(config.d_model**0.5) if config.scale_embedding else 1.0,
            norm_first=_NORM_FIRST[config.model_type],
            end=end,
            suppressed=tuple(sorted({*target.suppressed, *target.eos_ids})),
        )


@dataclass(frozen=True, slots=True)
class Memory:
    """Encoder output for a batch of sources; rows are padded at their ends.

    Attributes:
        states: [B, S, D] after its last layer.
        embedded: [B, S, D] embeddings of the tokens, scaled, without positions.
        present: [B, S] where there is a token; None: everywhere.
        lengths: [B] tokens of each source, its end included.
    """

    states: Float[Tensor, "B S D"]
    embedded: Float[Tensor, "B S D"]
    present: Bool[Tensor, "B S"] | None
    lengths: Int[Tensor, "B"]

    def of_rows(self, rows: list[int]) -> Memory:
        """The same of some rows, in this order, as wide as the longest of them."""
        if self.present is None:
            return Memory(self.states[rows], self.embedded[rows], None, self.lengths[rows])
        width, lengths = int(self.lengths[rows].max()), self.lengths[rows]
        return Memory(self.states[rows, :width], self.embedded[rows, :width], self.present[rows, :width], lengths)

    @property
    def content(self) -> Int[Tensor, "B"]:
        """Tokens of each source without its end; at least one."""
        return (self.lengths - 1).clamp(min=1)

    def repeat(self, times: int) -> Memory:
        """Repeat each row ``times`` times consecutively."""
        if times == 1:
            return self
        present = None if self.present is None else self.present.repeat_interleave(times, 0)
        states, embedded = (tensor.repeat_interleave(times, 0) for tensor in (self.states, self.embedded))
        return Memory(states, embedded, present, self.lengths.repeat_interleave(times))


def present_up_to(lengths: Int[Tensor, "B"], width: int) -> Bool[Tensor, "B T"]:
    """Where rows of these lengths have a token."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


class Network(nn.Module):
    """Encoder, decoder and output.

    Args:
        shape: sizes.
        embedding: [V, D] the teacher's.
        own: learn the embedding.
        dropout: of embeddings and sub-layers.
        positional: a positional attention in every layer of the decoder (Gu et al. 2018, sec. 3.1).
        blind: no position of the decoder attends to itself (same place).
        upsample: positions of the decoder for each of the source.
    """

    embedding: Tensor | None
    positions: Tensor

    def __init__(
        self,
        shape: Shape,
        embedding: Float[Tensor, "V D"] | None,
        own: bool = False,
        dropout: float = 0.0,
        positional: bool = False,
        blind: bool = False,
        upsample: int = 1,
    ) -> None:
        super().__init__()
        self.shape, self.own, self.blind = shape, own, blind
        if own:
            begin = torch.zeros(shape.vocabulary, shape.width) if embedding is None else embedding.detach().float()
            self.embedding = nn.Parameter(begin.clone())
        else:
            self.register_buffer("embedding", embedding, persistent=False)
        table = sinusoids(upsample * shape.positions, shape.width)
        self.register_buffer("positions", table, persistent=False)
        self.encoder = nn.ModuleList(EncoderLayer(shape, dropout) for _ in range(shape.encoder_layers))
        self.decoder = nn.ModuleList(DecoderLayer(shape, dropout, positional) for _ in range(shape.decoder_layers))
        self.encoder_norm, self.decoder_norm = final_norm(shape), final_norm(shape)
        self.dropout = nn.Dropout(dropout)
        self._kernels: _Kernels | None = None
        self._embed: Callable[[Tensor], Tensor] | None = None
        self._output: Callable[[Tensor], Tensor] | None = None

    def embed(self, tokens: Int[Tensor, "*b"]) -> Float[Tensor, "*b D"]:
        """Scaled embeddings, without positions."""
        if self._embed is not None:
            return self._embed(tokens)
        assert self.embedding is not None, "a network without an embedding borrows its teacher's"
        return F.embedding(tokens, self.embedding) * self.shape.scale

    def encode(self, sources: Int[Tensor, "B S"], lengths: Int[Tensor, "B"], whole: bool = False) -> Memory:
        """Read sources.

        Args:
            sources: ids, padded at the end with any id.
            lengths: tokens of each.
            whole: known to be without padding.
        """
        present = None if whole else present_up_to(lengths, sources.shape[1])
        mask = None if present is None else present[:, None, None]
        embedded = self.embed(sources)
        hidden = self.dropout(embedded + self.positions[: sources.shape[1]])
        if self._kernels is not None:
            return Memory(self.encoder_norm(self._kernels.encode(hidden, present, lengths)), embedded, present, lengths)
        for layer in self.encoder:
            hidden = layer(hidden, mask)
        return Memory(self.encoder_norm(hidden), embedded, present, lengths)

    def decode(
        self,
        inputs: Float[Tensor, "B T D"],
        present: Bool[Tensor, "B T"] | None,
        memory: Memory,
        causal: bool = False,
    ) -> Float[Tensor, "B T D"]:
        """States after the last layer, one pass over all positions.

        Args:
            inputs: the decoder's input, to which positions are added here.
            present: where rows have a position; None: everywhere.
            causal: each position sees itself and those before it, as in the teacher.
        """
        width = inputs.shape[1]
        positions = self.positions[:width]
        looks = attended(present, width, self.blind and not causal, causal, inputs.device)
        padding = None if present is None else present[:, None, None]
        across = None if memory.present is None else memory.present[:, None, None]
        hidden = self.dropout(inputs + positions)
        if self._kernels is not None:
            hidden = self._kernels.decode(hidden, looks, positions, padding, memory)
        else:
            for layer in self.decoder:
                hidden = layer(hidden, looks, positions, padding, memory.states, across)
        states: Tensor = self.decoder_norm(hidden)
        return states

    def logits(self, states: Float[Tensor, "*b D"]) -> Float[Tensor, "*b V"]:
        """Of every token of the vocabulary."""
        if self._output is not None:
            return self._output(states)
        assert self.embedding is not None, "a network without an embedding borrows its teacher's"
        return F.linear(states, self.embedding)

    def start_from(self, teacher: Any) -> None:
        """Copy the weights of transformers' teacher; parameters that it lacks do not change."""
        weights = teacher.state_dict()
        sides = {"encoder": (self.encoder, self.encoder_norm), "decoder": (self.decoder, self.decoder_norm)}
        for side, (layers, norm) in sides.items():
            for number, layer in enumerate(layers):
                assert isinstance(layer, EncoderLayer)
                layer.start_from(weights, f"model.{side}.layers.{number}.")
            if self.shape.norm_first:
                _take(norm, weights, [f"model.{side}.layer_norm"])

    def settle(self, target: CausalLM) -> None:
        """End the training: products in the engine's form, embedding and output borrowed where they are shared.

        Where a CPU's kernels run the target's layers, they run these.
        """
        form: LinearForm = "panels" if target.fused else library_form(target.device, target.dtype)
        for module in list(self.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.Linear):
                    setattr(module, name, _Settled(child.weight, child.bias, form))
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, PositionalAttention):
                    module.settle(self.positions)
        if not self.own:
            self._embed, self._output = target.embed, target.head
        else:
            assert self.embedding is not None
            self._output = _Settled(self.embedding, None, form)
        if target.fused:
            self._kernels = _Kernels(self)


class _Settled(nn.Module):
    product: Linear

    def __init__(self, weight: Tensor, bias: Tensor | None, form: LinearForm) -> None:
        super().__init__()
        self.product = make_linear([weight.detach()], [None if bias is None else bias.detach()], form)

    def forward(self, states: Tensor) -> Tensor:
        return self.product(states.reshape(-1, states.shape[-1])).view(*states.shape[:-1], -1)


class _Kernels:
    """A settled network by a CPU's kernels, see ``methods.engine.fused_layers``."""

    def __init__(self, network: Network) -> None:
        self._heads, scale = network.shape.heads, (network.shape.width // network.shape.heads) ** -0.5
        encoder: list[Any] = list(network.encoder)
        self._decoder: list[Any] = list(network.decoder)
        self._encoder = FusedEncoder([layer.described() for layer in encoder], self._heads, scale)
        described = [layer.described() for layer in self._decoder]
        self._layers = FusedLayers(described, self._heads, self._heads, scale, 1.0)
        sources = [layer.cross.key_value.product for layer in self._decoder]
        self._source = make_linear([each.dense for each in sources], [each.bias for each in sources], "panels")

    def encode(
        self, hidden: Float[Tensor, "B S D"], present: Bool[Tensor, "B S"] | None, lengths: Int[Tensor, "B"]
    ) -> Float[Tensor, "B S D"]:
        """See ``Network.encode``."""
        return self._encoder(hidden, _lengths(hidden, present, lengths))

    def decode(
        self,
        hidden: Float[Tensor, "B T D"],
        looks: Bool[Tensor, "b 1 t T"] | None,
        positions: Float[Tensor, "T D"],
        padding: Bool[Tensor, "B 1 1 T"] | None,
        memory: Memory,
    ) -> Float[Tensor, "B T D"]:
        """See ``Network.decode``; rows of like lengths are run together, so that little padding is."""
        counts = [] if padding is None else padding.sum(-1).flatten().tolist()
        groups = reading_groups(counts)
        if padding is None or len(groups) == 1:
            return self._together(hidden, looks, positions, padding, memory)
        states = torch.zeros_like(hidden)
        for rows in groups:
            width = max(counts[row] for row in rows)
            seen = looks if looks is None or len(looks) == 1 else looks[rows]
            seen = None if seen is None else seen[..., :width, :width]
            inside, few = padding[rows, ..., :width], memory.of_rows(rows)
            states[rows, :width] = self._together(hidden[rows, :width], seen, positions[:width], inside, few)
        return states

    def _together(
        self,
        hidden: Float[Tensor, "B T D"],
        looks: Bool[Tensor, "b 1 t T"] | None,
        positions: Float[Tensor, "T D"],
        padding: Bool[Tensor, "B 1 1 T"] | None,
        memory: Memory,
    ) -> Float[Tensor, "B T D"]:
        batch, width, size = hidden.shape
        source, kind = memory.states.shape[1], {"dtype": hidden.dtype, "device": hidden.device}
        cache = SourceCache(range(len(self._decoder)), batch, source + width, self._heads, size // self._heads, **kind)
        cache.open(_lengths(memory.states, memory.present, memory.lengths), None, 0)
        made = self._source(memory.states.flatten(0, 1))
        cache.remember(made.view(batch, source, len(self._decoder), 2 * self._heads, -1))
        seen = torch.ones(1, 1, 1, 1, dtype=torch.bool) if looks is None else looks
        reach = seen[:, 0].expand(batch, width, width).contiguous()
        for portions, layer in self._parts():
            if layer is not None:
                hidden = layer.attend_positions(hidden, positions, padding)
            hidden, _ = self._layers.run(hidden, None, None, reach, cache, portions)
        return hidden

    def _parts(self) -> Iterator[tuple[list[Portion], DecoderLayer | None]]:
        """What each call runs, and the layer whose positional attention precedes it, if there is one."""
        waiting: list[Portion] = []
        before = None
        for index, layer in enumerate(self._decoder):
            if layer.positional is None:
                waiting.append(Portion(index))
                continue
            yield [*waiting, Portion(index, mlp=False, source=False)], before
            waiting, before = [Portion(index, attention=False)], layer
        yield waiting, before


def _lengths(states: Tensor, present: Tensor | None, lengths: Tensor) -> list[int]:
    return [states.shape[1]] * len(states) if present is None else lengths.tolist()


def attended(
    present: Bool[Tensor, "B T"] | None, width: int, blind: bool, causal: bool, device: torch.device
) -> Bool[Tensor, "b 1 t T"] | None:
    """Which positions each position of the decoder sees; None: all.

    A blind position does not see itself, unless its row has no other, since attention needs at least one.
    """
    looks = None if present is None else present[:, None]
    if causal:
        before = torch.ones(width, width, dtype=torch.bool, device=device).tril()[None]
        looks = before if looks is None else looks & before
    if blind:
        itself = torch.eye(width, dtype=torch.bool, device=device)[None]
        rows = torch.ones(1, width, dtype=torch.bool, device=device) if present is None else present
        alone = rows.sum(1)[:, None, None] == 1
        looks = rows[:, None] & (~itself | alone)
    return None if looks is None else looks[:, None]


def _mix(query: Tensor, key: Tensor, value: Tensor, heads: int, mask: Tensor | None) -> Tensor:
    q, k, v = (rows.unflatten(-1, (heads, -1)).transpose(1, 2) for rows in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


def final_norm(shape: Shape) -> nn.Module:
    """End of a stack of layers: a norm, unless each layer ends with one."""
    return nn.LayerNorm(shape.width) if shape.norm_first else nn.Identity()


class SelfAttention(nn.Module):
    """Attention among the nodes."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = self.qkv(hidden).chunk(3, -1)
        return self.out(_mix(query, key, value, self.heads, mask))


class CrossAttention(nn.Module):
    """Over the source."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, hidden: Tensor, source: Tensor, mask: Tensor | None) -> Tensor:
        key, value = self.key_value(source).chunk(2, -1)
        return self.out(_mix(self.query(hidden), key, value, self.heads, mask))


class PositionalAttention(nn.Module):
    """Queries and keys are positions, values the states (Gu et al. 2018, sec. 3.1).

    Its output is zero at first, so that the teacher's layers work as before.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key, self.value = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        self._known: Tensor | None = None

    def settle(self, positions: Float[Tensor, "P D"]) -> None:
        """End the training: queries and keys of all positions are computed once."""
        self._known = self.query_key(positions)

    def forward(self, hidden: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        made = self.query_key(positions) if self._known is None else self._known[: len(positions)]
        query, key = made[None].expand(len(hidden), -1, -1).chunk(2, -1)
        return self.out(_mix(query, key, self.value(hidden), self.heads, mask))


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each with a norm in front of it or after it."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        width = shape.width
        self.norm_first = shape.norm_first
        self.attention, self.norm_attention = SelfAttention(width, shape.heads), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, shape.inner), nn.Linear(shape.inner, width)
        self.norm_mlp, self.activation, self.dropout = (
            nn.LayerNorm(width),
            ACT2FN[shape.activation],
            nn.Dropout(dropout),
        )

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        hidden = self.add(hidden, self.norm_attention, lambda rows: self.attention(rows, mask))
        return self.add(hidden, self.norm_mlp, self.feed)

    def described(self) -> Described:
        """The settled layer in the terms of a CPU's kernels."""
        products = {"qkv": self.attention.qkv, "out": self.attention.out, "up": self.up, "down": self.down}
        place = "before" if self.norm_first else "close"
        norms = {f"{place}_attention": self.norm_attention, f"{place}_mlp": self.norm_mlp}
        return self._described(products, norms)

    def _described(self, products: Mapping[str, Any], norms: Mapping[str, nn.LayerNorm]) -> Described:
        made = {name: LayerNorm(norm.weight, norm.bias, norm.eps) for name, norm in norms.items()}
        return Described({name: settled.product for name, settled in products.items()}, made, self.activation, False)

    def add(self, hidden: Tensor, norm: nn.Module, update: Callable[[Tensor], Tensor]) -> Tensor:
        """The sum of a state and its update, with the norm where this network has it."""
        if self.norm_first:
            return hidden + self.dropout(update(norm(hidden)))
        total: Tensor = norm(hidden + self.dropout(update(hidden)))
        return total

    def feed(self, hidden: Tensor) -> Tensor:
        """The feed-forward sub-layer's update."""
        return self.down(self.activation(self.up(hidden)))

    def start_from(self, weights: dict[str, Tensor], prefix: str) -> None:
        """Take over a layer of the teacher."""
        _take(self.attention.qkv, weights, [f"{prefix}self_attn.{name}_proj" for name in "qkv"])
        _take(self.attention.out, weights, [f"{prefix}self_attn.out_proj"])
        _take(self.norm_attention, weights, [f"{prefix}self_attn_layer_norm"])
        _take(self.up, weights, [f"{prefix}fc1"])
        _take(self.down, weights, [f"{prefix}fc2"])
        _take(self.norm_mlp, weights, [f"{prefix}final_layer_norm"])


class DecoderLayer(EncoderLayer):
    """Self-attention, positional attention if wanted, attention over the source, feed-forward."""

    def __init__(self, shape: Shape, dropout: float, positional: bool) -> None:
        super().__init__(shape, dropout)
        width = shape.width
        self.positional = PositionalAttention(width, shape.heads) if positional else None
        self.norm_positional = nn.LayerNorm(width) if positional else None
        self.cross, self.norm_cross = CrossAttention(width, shape.heads), nn.LayerNorm(width)

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        looks: Tensor | None,
        positions: Tensor,
        padding: Tensor | None,
        source: Tensor,
        across: Tensor | None,
    ) -> Tensor:
        hidden = self.add(hidden, self.norm_attention, lambda rows: self.attention(rows, looks))
        if self.positional is not None:
            hidden = self.attend_positions(hidden, positions, padding)
        hidden = self.add(hidden, self.norm_cross, lambda rows: self.cross(rows, source, across))
        return self.add(hidden, self.norm_mlp, self.feed)

    def attend_positions(self, hidden: Tensor, positions: Tensor, padding: Tensor | None) -> Tensor:
        """The state after the positional attention, which the layer has."""
        positional, norm = self.positional, self.norm_positional
        assert positional is not None and norm is not None
        return self.add(hidden, norm, lambda rows: positional(rows, positions, padding))

    def described(self) -> Described:
        own, place = super().described(), "before" if self.norm_first else "close"
        products = {"source_query": self.cross.query, "source_out": self.cross.out}
        more = self._described(products, {f"{place}_source": self.norm_cross})
        return replace(own, matrices={**own.matrices, **more.matrices}, norms={**own.norms, **more.norms})

    def start_from(self, weights: dict[str, Tensor], prefix: str) -> None:
        super().start_from(weights, prefix)
        _take(self.cross.query, weights, [f"{prefix}encoder_attn.q_proj"])
        _take(self.cross.key_value, weights, [f"{prefix}encoder_attn.{name}_proj" for name in "kv"])
        _take(self.cross.out, weights, [f"{prefix}encoder_attn.out_proj"])
        _take(self.norm_cross, weights, [f"{prefix}encoder_attn_layer_norm"])


@torch.no_grad()
def _take(module: Any, weights: dict[str, Tensor], names: list[str]) -> None:
    module.weight.copy_(torch.cat([weights[f"{name}.weight"] for name in names]))
    module.bias.copy_(torch.cat([weights[f"{name}.bias"] for name in names]))
