"""The draft network of method=specdec: a shallow decoder that fills a whole block of places in one pass.

Its embedding and output matrix are the target's, and its encoder too (``Output.memory``), unless the network has one of
its own; the rest is trained and stored. A
pass reads nodes side by side: tokens that were committed since the last pass, each of which sees what is before it, and
after them the block, whose places see all committed tokens and one another. So the keys and values of committed tokens
never change and are cached; those of the block are forgotten.

The input of a place of the block is a mixture of the source's embeddings, chosen by its position (soft copy), and a
vector of its own. ``specdec_training.py`` trains the same module that ``DraftPass`` packs for decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from methods.engine.causal_layers import LayerNorm
from methods.engine.checkpoint_files import read_part, require_shapes, require_target, sizes_of, write_part
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.engine.fused_layers import LANES, Described, FusedLayers, Portion
from methods.engine.kv_cache import Cache
from methods.engine.linear import Linear, LinearForm, make_linear
from methods.engine.positions import sinusoids
from methods.engine.sampling import argmax
from methods.engine.seq2seq_lm import Seq2SeqLM, SourceCache
from methods.training.translation import padded

_VOCABULARY = "vocabulary"

C = TypeVar("C", bound=Cache)
Product = Callable[[Tensor], Tensor]
KeysValues = tuple[Tensor, Tensor]  # [B, H, S, d] each


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the network, and of the target it was trained for.

    Attributes:
        block: most places it fills at once.
        depth: its layers.
        heads: of each attention.
        inner: units of its feed-forward layers.
        positions: longest text it knows the positions of, in tokens, a block after it included.
        encoder_layers: of an encoder of its own; 0: it reads the states of the target's.
        hidden_size, layers, vocab_size: of the target.
    """

    block: int
    depth: int
    heads: int
    inner: int
    positions: int
    hidden_size: int
    layers: int
    vocab_size: int
    encoder_layers: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """Positions of the nodes of a pass and what they see.

    A row is its new tokens, then the block, then padding up to the width of the longest row.

    Attributes:
        positions: [B, M] in the text, the decoder's start token at 0.
        places: [B, M] in the block; below 0 for tokens.
        end: [B, M] slots of the row that each node sees.
        first: [B] the column of the first place of the block.
    """

    positions: Int[Tensor, "B M"]
    places: Int[Tensor, "B M"]
    end: Int[Tensor, "B M"]
    first: Int[Tensor, "B"]

    @classmethod
    def of(cls, before: Int[Tensor, "B"], new: Int[Tensor, "B"], block: int, nodes: int) -> Layout:
        """Rows with ``before`` cached tokens and ``new`` ones."""
        column = torch.arange(nodes, device=before.device)
        positions, places = before[:, None] + column, column - new[:, None]
        end = torch.where(places < 0, positions + 1, (before + new + block)[:, None])
        return cls(positions, places, end, new)

    def visible(self, slots: int) -> Bool[Tensor, "B 1 M S"]:
        """Which of the first slots of the row each node sees."""
        return (torch.arange(slots, device=self.end.device) < self.end[:, :, None])[:, None]

    def among(self) -> Bool[Tensor, "B M M"]:
        """Which nodes each node sees."""
        column = torch.arange(self.end.shape[1], device=self.end.device)
        return column < (self.end - self.positions[:, :1])[:, :, None]

    def block(self, values: Float[Tensor, "B M D"], size: int) -> Float[Tensor, "B k D"]:
        """The values in the block."""
        column = self.first[:, None] + torch.arange(size, device=values.device)
        return values.gather(1, column[:, :, None].expand(-1, -1, values.shape[2]))


@dataclass(frozen=True, slots=True)
class Sources:
    """The network's view of a batch of sources, made once for all passes over them.

    Attributes:
        embeddings: [B, S, D] of the source's tokens.
        placed: [B, S, D] the same with their positions, as the soft copy compares them.
        keys_values: for cross-attention, of every layer.
        present: [B, 1, S] where there is a token; None: everywhere.
    """

    embeddings: Float[Tensor, "B S D"]
    placed: Float[Tensor, "B S D"]
    keys_values: list[KeysValues]
    present: Bool[Tensor, "B 1 S"] | None

    def of_rows(self, rows: list[int]) -> Sources:
        """The same of some rows, in this order."""
        seen = [(keys[rows], values[rows]) for keys, values in self.keys_values]
        present = None if self.present is None else self.present[rows]
        return Sources(self.embeddings[rows], self.placed[rows], seen, present)


class EncoderLayer(nn.Module):
    """One layer of an encoder: self-attention over a source, feed-forward; norms in front of each."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        width = shape.hidden_size
        self.heads = shape.heads
        self.own_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, shape.inner), nn.Linear(shape.inner, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, hidden: Float[Tensor, "B S D"], present: Bool[Tensor, "B 1 S"] | None) -> Float[Tensor, "B S D"]:
        query, keys, values = split_heads(apply(self.qkv, self.own_norm(hidden)), self.heads, 3)
        hidden = hidden + self.drop(
            _attend(self.out, query, (keys, values), None if present is None else present[:, None])
        )
        return hidden + self.drop(apply(self.down, torch.relu(apply(self.up, self.mlp_norm(hidden)))))


class DraftLayer(nn.Module):
    """One layer: self-attention, attention over the source, feed-forward; norms in front of each."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        width = shape.hidden_size
        self.own_norm, self.cross_norm, self.mlp_norm = (nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.query, self.cross_out = nn.Linear(width, width), nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.up, self.down = nn.Linear(width, shape.inner), nn.Linear(shape.inner, width)
        self.drop = nn.Dropout(dropout)


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """A ``DraftLayer`` whose products are packed."""

    own_norm: Product
    cross_norm: Product
    mlp_norm: Product
    qkv: Linear
    out: Linear
    query: Linear
    cross_out: Linear
    key_value: Linear
    up: Linear
    down: Linear
    drop: Product

    @classmethod
    def of(cls, layer: Any, form: LinearForm) -> PackedLayer:
        products = ("qkv", "out", "query", "cross_out", "key_value", "up", "down")
        parts = {name: getattr(layer, name) for name in products}
        packed = {name: make_linear([part.weight], [part.bias], form) for name, part in parts.items()}
        own, cross, mlp = (
            LayerNorm(norm.weight, norm.bias, norm.eps) for norm in (layer.own_norm, layer.cross_norm, layer.mlp_norm)
        )
        return cls(own, cross, mlp, **packed, drop=layer.drop)

    @property
    def described(self) -> Described:
        """The layer in the terms of a CPU's kernels."""
        own = {"qkv": self.qkv, "out": self.out, "up": self.up, "down": self.down}
        across = {"source_query": self.query, "source_out": self.cross_out}
        norms = {"before_attention": self.own_norm, "before_source": self.cross_norm, "before_mlp": self.mlp_norm}
        return Described({**own, **across}, norms, nn.ReLU(), False)


AnyLayer = DraftLayer | PackedLayer


class BlockDecoder(nn.Module):
    """The network as it is trained.

    Args:
        shape: its sizes.
        dropout: of its input and its sub-layers, in training.
    """

    positions: Float[Tensor, "P D"]

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.enter = nn.LayerNorm(shape.hidden_size)
        self.copy = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.places = nn.Parameter(torch.zeros(shape.block, shape.hidden_size))
        self.layers = nn.ModuleList(DraftLayer(shape, dropout) for _ in range(shape.depth))
        self.leave = nn.LayerNorm(shape.hidden_size)
        self.encoder = nn.ModuleList(EncoderLayer(shape, dropout) for _ in range(shape.encoder_layers))
        self.encoded = nn.LayerNorm(shape.hidden_size) if shape.encoder_layers else None
        self.drop = nn.Dropout(dropout)
        self.register_buffer("positions", sinusoids(shape.positions, shape.hidden_size), persistent=False)

    def read(
        self,
        embeddings: Float[Tensor, "B S D"],
        memory: Float[Tensor, "B S D"] | None,
        lengths: Sequence[int],
        layers: Sequence[AnyLayer] | None = None,
    ) -> Sources:
        """Prepare what all passes over some sources need.

        Args:
            embeddings: of their tokens, by the target's matrix.
            memory: output of the target's encoder; None: the network has its own.
            lengths: tokens of each.
            layers: packed ones; None: its own.
        """
        entered = self.enter(embeddings)
        placed = entered + self.positions[: embeddings.shape[1]]
        present = None
        if min(lengths) < max(lengths):
            column = torch.arange(max(lengths), device=embeddings.device)
            present = (column < torch.tensor(lengths, device=embeddings.device)[:, None])[:, None]
        if self.encoded is not None:
            memory = self.drop(placed)
            for layer in self.encoder:
                memory = layer(memory, present)
            memory = self.encoded(memory)
        assert memory is not None, "a network without an encoder reads what the target's says"
        joined = [apply(layer.key_value, memory) for layer in layers or self._layers()]
        keys_values = [(keys, values) for keys, values in (split_heads(both, self.shape.heads, 2) for both in joined)]
        return Sources(entered, apply(self.copy, placed), keys_values, present)

    def place(
        self, embeddings: Float[Tensor, "B M D"], masked: Bool[Tensor, "B M"], layout: Layout, sources: Sources
    ) -> Float[Tensor, "B M D"]:
        """The input of the first layer: tokens with their positions, and soft copies where ``masked``."""
        positions = self.positions[layout.positions.clamp(max=len(self.positions) - 1)]
        scores = positions @ sources.placed.transpose(1, 2) * self.shape.hidden_size**-0.5
        if sources.present is not None:
            scores = scores.masked_fill(~sources.present, -torch.inf)
        copied = scores.softmax(-1) @ sources.embeddings
        own = self.places[layout.places.clamp(0, self.shape.block - 1)]
        entered = torch.where(masked[:, :, None], copied + own, self.enter(embeddings))
        return self.drop(entered + positions)

    def forward(
        self, embeddings: Float[Tensor, "B M D"], masked: Bool[Tensor, "B M"], layout: Layout, sources: Sources
    ) -> Float[Tensor, "B M D"]:
        """Whole rows from their beginning, without a cache; states that the output matrix multiplies."""
        hidden, visible = self.place(embeddings, masked, layout, sources), layout.visible(embeddings.shape[1])
        for layer, source in zip(self._layers(), sources.keys_values, strict=True):
            hidden = through(layer, hidden, self.shape.heads, own_keys, visible, source, sources.present)
        return self.leave(hidden)

    def _layers(self) -> Sequence[AnyLayer]:
        return list(self.layers)  # type: ignore[arg-type]


def own_keys(keys: Float[Tensor, "B H M d"], values: Float[Tensor, "B H M d"]) -> KeysValues:
    """Without a cache the nodes see only one another."""
    return keys, values


def through(
    layer: AnyLayer,
    hidden: Float[Tensor, "B M D"],
    heads: int,
    remember: Callable[[Tensor, Tensor], KeysValues],
    visible: Bool[Tensor, "B 1 M S"],
    source: KeysValues,
    present: Bool[Tensor, "B 1 T"] | None,
) -> Float[Tensor, "B M D"]:
    """One layer over the nodes of a pass; ``remember`` turns their keys and values into all visible ones."""
    query, keys, values = split_heads(apply(layer.qkv, layer.own_norm(hidden)), heads, 3)
    hidden = hidden + layer.drop(_attend(layer.out, query, remember(keys, values), visible))
    (query,) = split_heads(apply(layer.query, layer.cross_norm(hidden)), heads, 1)
    hidden = hidden + layer.drop(_attend(layer.cross_out, query, source, None if present is None else present[:, None]))
    return hidden + layer.drop(apply(layer.down, torch.relu(apply(layer.up, layer.mlp_norm(hidden)))))


def _attend(
    out: Product, query: Float[Tensor, "B H M d"], seen: KeysValues, mask: Bool[Tensor, "B 1 m S"] | None
) -> Float[Tensor, "B M D"]:
    return apply(out, F.scaled_dot_product_attention(query, *seen, attn_mask=mask).transpose(1, 2).flatten(2))


def apply(product: Product, states: Float[Tensor, "B M I"]) -> Float[Tensor, "B M O"]:
    """A product over the rows of all nodes at once."""
    return product(states.flatten(0, 1)).unflatten(0, states.shape[:2])


def split_heads(states: Float[Tensor, "B M D"], heads: int, parts: int) -> tuple[Float[Tensor, "B H M d"], ...]:
    """Queries, keys or values side by side, cut into heads."""
    return states.unflatten(2, (parts, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


# -- decoding ---------------------------------------------------------------------------------------------------------


class DraftPass:
    """The network in decoding: its products packed, committed tokens cached.

    Args:
        target: whose encoder, embedding and output matrix are used.
        decoder: the trained network.
        vocabulary: what is proposed.
    """

    def __init__(self, target: Seq2SeqLM, decoder: BlockDecoder, vocabulary: DraftVocabulary) -> None:
        self.target, self.shape, self.vocabulary = target, decoder.shape, vocabulary.to(target.device)
        self._decoder = decoder.to(target.device, target.dtype).eval().requires_grad_(False)
        nbytes = sum(parameter.numel() * parameter.element_size() for parameter in decoder.parameters())
        by_kernels = target.fused and self._head_dim % LANES == 0
        form: LinearForm = "panels" if by_kernels else "auto"
        self._layers = [PackedLayer.of(layer, form) for layer in self._decoder.layers]
        self._kernels = None
        if by_kernels:
            heads, described = self.shape.heads, [layer.described for layer in self._layers]
            self._kernels = FusedLayers(described, heads, heads, self._head_dim**-0.5, 1.0)
        self._decoder.layers = nn.ModuleList()  # what was packed is needed no more
        weight, bias = target.output_rows(self.vocabulary.ids)
        self._output = make_linear([weight], [bias])
        self.nbytes = {"draft_network": nbytes, "draft_output_matrix": self._output.nbytes}
        self._cache: Cache | None = None
        self._capacity = 0
        self._sources: Sources | None = None

    @property
    def _head_dim(self) -> int:
        return self.shape.hidden_size // self.shape.heads

    def make_room(self, batch: int, capacity: int) -> None:
        """Forget all rows; make room for texts of ``capacity`` nodes, those of a pass included."""
        self._capacity, self._sources = capacity, None
        self._cache = None if self._kernels else self._new_cache(Cache, batch, capacity)

    def _new_cache(self, kind: type[C], batch: int, capacity: int) -> C:
        sizes = (range(self.shape.depth), batch, capacity, self.shape.heads, self._head_dim)
        return kind(*sizes, dtype=self.target.dtype, device=self.target.device)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Go on with some rows only, in this order."""
        if self._cache is not None:
            self._cache.select(rows)
        if self._sources is not None:
            self._sources = self._sources.of_rows(list(rows))

    def read(self, sources: Sequence[Sequence[int]], memory: Float[Tensor, "B S D"]) -> None:
        """Take the sources that all further passes translate."""
        lengths = [len(source) for source in sources]
        embeddings = self.target.embed(padded(sources, self.target.device, 0))
        self._sources = self._decoder.read(embeddings, memory, lengths, self._layers)
        if self._kernels is None:
            return
        cache = self._new_cache(SourceCache, len(sources), self._capacity + max(lengths))
        cache.open(lengths, None, 0)
        made = [torch.cat([keys, values], dim=1).transpose(1, 2) for keys, values in self._sources.keys_values]
        cache.remember(torch.stack(made, dim=2))
        self._cache = cache

    @property
    def written(self) -> list[int]:
        """Tokens of each text that are cached, the decoder's start included."""
        assert self._cache is not None, "room is made and sources are read first"
        return self._cache.written

    def fill(self, new: Sequence[Sequence[int]], block: int) -> Int[Tensor, "B k"]:
        """The most likely token at each of ``block`` places after the texts, which ``new`` tokens continue."""
        best = argmax(self._output(self.states(new, block).flatten(0, 1))).view(len(new), block)
        return self.vocabulary.tokens(best)

    def states(self, new: Sequence[Sequence[int]], block: int) -> Float[Tensor, "B k D"]:
        """Inputs of the output matrix at those places; afterwards ``new`` is part of the texts."""
        cache, sources, device = self._cache, self._sources, self.target.device
        assert cache is not None and sources is not None, "room is made and sources are read first"
        widths = [len(row) for row in new]
        nodes = max(widths) + block
        tokens = padded(new, device, 0, nodes)
        layout = Layout.of(cache.length - cache.begin, torch.tensor(widths, device=device), block, nodes)
        hidden = self._decoder.place(self.target.embed(tokens), layout.places >= 0, layout, sources)
        if self._kernels is not None and isinstance(cache, SourceCache):
            portions = [Portion(layer) for layer in range(self.shape.depth)]
            where = (None, None, layout.among(), cache, portions)
            hidden, _ = self._kernels.run(hidden, *where)
        else:
            end = max(cache.lengths) + nodes
            slots, visible = None if cache.uniform else cache.slots(nodes), layout.visible(end)
            for index, layer in enumerate(self._layers):
                remember = _Remember(cache, index, slots, end)
                source = sources.keys_values[index]
                hidden = through(layer, hidden, self.shape.heads, remember, visible, source, sources.present)
        cache.advance(widths)
        return self._decoder.leave(layout.block(hidden, block))


@dataclass(frozen=True, slots=True)
class _Remember:
    """Puts keys and values of a layer into the cache, and gives all that it holds up to ``end``."""

    cache: Cache
    layer: int
    slots: Int[Tensor, "B M"] | None
    end: int

    def __call__(self, keys: Float[Tensor, "B H M d"], values: Float[Tensor, "B H M d"]) -> KeysValues:
        self.cache.write(self.layer, torch.cat([keys, values], dim=1).transpose(1, 2), self.slots)
        return self.cache.view(self.layer, self.end)


# -- files ------------------------------------------------------------------------------------------------------------


def save(folder: Path, decoder: BlockDecoder, vocabulary: DraftVocabulary) -> None:
    """Write a trained network into a folder; the weights in 16 bit."""
    tensors = {**decoder.state_dict(), _VOCABULARY: vocabulary.ids.to(torch.int32)}
    write_part(folder, tensors, asdict(decoder.shape), torch.float16)


def load(folder: Path, target: Seq2SeqLM) -> tuple[BlockDecoder, DraftVocabulary]:
    """Read it.

    Raises:
        ValueError: files are missing or damaged, or belong to another target.
    """
    shape, tensors = read_part(folder, "specdec", lambda found: Shape(**{key: int(n) for key, n in found.items()}))
    require_target(folder, "specdec", sizes_of(shape), target)
    ids = tensors.pop(_VOCABULARY, torch.zeros(0))
    decoder = BlockDecoder(shape)
    require_shapes(folder, tensors, {key: tuple(tensor.shape) for key, tensor in decoder.state_dict().items()})
    decoder.load_state_dict(tensors)
    return decoder, DraftVocabulary(ids, target.vocab_size)
