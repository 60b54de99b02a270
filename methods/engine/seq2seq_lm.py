"""An encoder-decoder model as every method sees it: a causal model whose prompt is the source.

The text of a row is the source, which the encoder reads, followed by the output, which the decoder reads. The decoder's
start token takes the place of the last source token, so a cache holds as many tokens as that of a causal model: after
the prefill the length of the source, and one more for every token committed. Loop, drafters and rules therefore need no
change. Node 0 of a pass is after everything the cache holds, positions count from the start token, and a drafter that
searches the text so far copies from the source.

Tests prove the logits equal to ``model(...)`` for every family it accepts, over chains, trees and ragged rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from methods.engine import causal_layers, seq2seq_layers, token_tree
from methods.engine.causal_layers import LayerNorm, UnsupportedModel
from methods.engine.causal_lm import CausalLM, Output, causal_mask, eos_ids, leave_file, padded_rows, ragged_mask
from methods.engine.fused_layers import Embedded, FusedEncoder, FusedLayers
from methods.engine.kv_cache import Cache
from methods.engine.linear import KernelLinear, LinearForm, faster_form, library_form, make_linear
from methods.engine.seq2seq_layers import AbsolutePositions, CrossAttention, FeedForward, SelfAttention, Stack
from methods.engine.token_tree import Nodes, Parents

__all__ = ["Seq2SeqLM", "Source", "SourceCache", "UnsupportedModel"]

_SCORE_CHUNK = 256


@dataclass(frozen=True, slots=True)
class Source:
    """Encoder output for a batch of sources.

    Attributes:
        states: [B, S, D] after its last layer and norm; rows padded at the end.
        mask: [B, 1, 1, S] additive, -inf over the padding; None where there is none.
        lengths: tokens of each row.
    """

    states: Float[Tensor, "B S D"]
    mask: Float[Tensor, "B 1 1 S"] | None
    lengths: list[int]


class SourceCache(Cache):
    """Keys and values of the source, and after them those of the target written so far, in one buffer.

    The first slots of every row are for cross-attention, the decoder's own begin after the longest source. ``lengths``
    counts source and target as ``CausalLM`` would; ``length`` is a row's next slot.

    Attributes:
        source: slots of the longest source.
        sources: tokens of each row's source.
        mask: hides the padding of shorter ones; None where there is none.
    """

    sources: list[int]  # always there

    def __init__(
        self, layers: Sequence[int], batch: int, capacity: int, heads: int, head_dim: int, **kind: Any
    ) -> None:
        super().__init__(layers, batch, capacity, heads, head_dim, **kind)
        self.reset()

    def open(self, sources: Sequence[int], mask: Float[Tensor, "B 1 1 S"] | None, prefix: int) -> None:
        """Prepare rows for sources of these lengths, without any target.

        Args:
            prefix: tokens the decoder starts with. The last source token counts for all of them.
        """
        self.source, self.sources, self.mask = max(sources), list(sources), mask
        self._shifts = [self.source + prefix - length for length in sources]
        self.set_lengths([length - prefix for length in sources])

    @property
    def begin(self) -> int:  # type: ignore[override]
        return self.source

    @property
    def written(self) -> list[int]:
        """Decoder slots in use, per row."""
        return [length + shift - self.source for length, shift in zip(self.lengths, self._shifts, strict=True)]

    @property
    def uniform(self) -> bool:
        written = self.written
        return min(written) == max(written)

    def write(self, layer: int, new: Float[Tensor, "B M H d"], slots: Int[Tensor, "B M"] | None) -> None:
        if slots is None:
            start = self.source + self.written[0]
            self.store[self.place[layer]][:, start : start + new.shape[1]] = new
        else:
            super().write(layer, new, slots)

    def view(self, layer: int, end: int) -> tuple[Float[Tensor, "B K S d"], Float[Tensor, "B K S d"]]:
        """Keys and values of the first ``end`` decoder slots, without a copy."""
        return self._slots(layer, self.source, self.source + end)

    def remember(self, new: Float[Tensor, "B S L H d"]) -> None:
        """Store the source's keys and values for cross-attention, of which those of L layers are given."""
        kept = new if new.shape[2] == len(self.place) else new[:, :, list(self.place)]
        self.store[:, :, : self.source] = kept.permute(2, 0, 1, 3, 4)

    def recall(self, layer: int) -> tuple[Float[Tensor, "B K S d"], Float[Tensor, "B K S d"]]:
        """Keys and values of the source, without a copy."""
        return self._slots(layer, 0, self.source)

    def reorder(self, rows: Int[Tensor, "B"], start: int) -> None:
        """See ``Cache``; rows have the same source, which stays."""
        begin, end = self.source, self.source + max(self.written)
        self.store[:, :, begin:end] = self.store[:, rows, begin:end]

    def select(self, rows: Sequence[int]) -> None:
        self._shifts = [self._shifts[row] for row in rows]
        self.sources = [self.sources[row] for row in rows]
        self.mask = None if self.mask is None else self.mask[list(rows)]
        super().select(rows)

    def adopt(self, rows: Sequence[int], other: Cache) -> None:
        assert isinstance(other, SourceCache), "rows come with their sources"
        self._reserve(other.source)
        chosen, written = list(rows), max(other.written)
        kept = other.store[:, :, : other.source + written]
        self.store[:, chosen, : other.source] = kept[:, :, : other.source]
        self.store[:, chosen, self.source : self.source + written] = kept[:, :, other.source :]
        if self.mask is None:
            self.mask = self.store.new_zeros(self.batch, 1, 1, self.source)
        self.mask[chosen] = -torch.inf
        self.mask[chosen, :, :, : other.source] = 0.0 if other.mask is None else other.mask
        for row, shift, source in zip(rows, other._shifts, other.sources, strict=True):
            self._shifts[row], self.sources[row] = shift + self.source - other.source, source
        self._replace_lengths(rows, other.lengths)

    def _reserve(self, source: int) -> None:
        more, end = source - self.source, self.source + max(self.written)
        if more <= 0:
            return
        self.store[:, :, source : end + more] = self.store[:, :, self.source : end].clone()
        mask = self.store.new_zeros(self.batch, 1, 1, self.source) if self.mask is None else self.mask
        self.mask = F.pad(mask, (0, more), value=-torch.inf)
        self.source, self._shifts = source, [shift + more for shift in self._shifts]

    def ends(self, lengths: Sequence[int]) -> Sequence[int]:
        return [length + shift for length, shift in zip(lengths, self._shifts, strict=True)]

    def reset(self) -> None:
        """Forget every row. Until a source is opened, each row has one of a single blank token."""
        self.source, self.mask = 1, None
        self.sources, self._shifts = [1] * self.batch, [1] * self.batch
        self.set_lengths([0] * self.batch)

    def _slots(self, layer: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        kept = self.store[self.place[layer]][:, start:end].transpose(1, 2)
        return kept[:, : self.kv_heads], kept[:, self.kv_heads :]


@dataclass(slots=True)
class DecoderPass:
    """State of a pass on its way through the decoder.

    Attributes:
        hidden: [B, M, D] input of the next layer.
        mask: additive, over the decoder's slots; with T5 it holds the bias of each head too. None where all is visible,
            or ``fused``.
        slots: cache slots of the nodes; None where all rows have written equally much.
        end: decoder slots a node may see at most.
        fused: kernels run the layers, which know what a node sees from ``reach`` and the cache's lengths.
        reach: which nodes of the pass each one sees; None: a chain.
        cos, sin: None, as positions are part of the embeddings or of the scores.
    """

    hidden: Float[Tensor, "B M D"]
    mask: Float[Tensor, "b h M S"] | None
    slots: Int[Tensor, "B M"] | None
    end: int
    cache: SourceCache
    fused: bool = False
    reach: Bool[Tensor, "B M M"] | None = None
    cos: None = None
    sin: None = None


class Seq2SeqLM(CausalLM):
    """An encoder-decoder model over a static cache. Build it with ``from_hf``.

    It adds ``encode`` to ``CausalLM``. Skipping the attention of a layer leaves out its cross-attention too.

    Attributes:
        start: ids the decoder begins with: its start token, and the one that generation forces after it, if any.
        suppressed: ids that the model's generation settings forbid (padding, with Marian); their logit is -inf.
        max_positions: longest source and longest target, in tokens.
    """

    _reads: FusedEncoder | None = None

    def __init__(self, model: PreTrainedModel, linear: LinearForm = "auto", keep_hf: bool = False) -> None:
        config: Any = model.config
        seq2seq_layers.check(config)
        seq2seq_layers.check_dtype(config, model.dtype)
        self.config = config
        self.name = str(getattr(config, "_name_or_path", "") or config.model_type)
        self.hidden_size: int = config.d_model
        self.max_positions = seq2seq_layers.max_positions(config)
        self.eos_ids = eos_ids(model)
        self.start = _start(model)
        self.suppressed = _suppressed(model)
        self.skipped_attention: frozenset[int] = frozenset()
        self.skipped_mlp: frozenset[int] = frozenset()
        self._output_scale = seq2seq_layers.output_scale(config)
        self._residual = self._logit_divisor = 1.0
        self._key_value = {}
        self._read(model, linear, keep_hf)

    def _read(self, model: PreTrainedModel, linear: LinearForm, keep_hf: bool) -> None:
        whole: Any = model
        head: Any = model.get_output_embeddings()
        if linear == "auto":
            kernels = seq2seq_layers.fits_kernels(self.config) and head.weight.device.type == "cpu"
            form = faster_form(head.weight.dtype) if kernels else "plain"
            linear = form if form == "panels" else library_form(head.weight.device, head.weight.dtype)
        if not keep_hf:
            leave_file(model, model.get_input_embeddings().weight)  # type: ignore[arg-type]
        self._encoder, self._decoder = (
            seq2seq_layers.read_stack(stack, self.config, linear)
            for stack in (whole.get_encoder(), whole.get_decoder())
        )
        self.layers, self._final_norm = self._decoder.layers, self._decoder.norm  # type: ignore[assignment]
        self.heads = self.kv_heads = self._decoder.heads
        self.head_dim = self._decoder.head_dim
        self._embedding, self._embed_scale = self._decoder.embedding, self._decoder.embed_scale
        self.device, self.dtype = self._embedding.device, self._embedding.dtype
        self.vocab_size: int = head.weight.shape[0]
        self._head = make_linear([head.weight.detach()], [_output_bias(model, self.suppressed)], linear)
        layers, encoding = self._decoder.of_kernels(), self._encoder.of_kernels()
        if layers is not None:
            self._fused = FusedLayers(layers, self.heads, self.kv_heads, self._decoder.score_scale, 1.0)
        if encoding is not None:
            self._reads = FusedEncoder(encoding, self._encoder.heads, self._encoder.score_scale)
        if not keep_hf:
            causal_layers.release(model)
        self.hf = model if keep_hf else None

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices a pass of this view multiplies with, and of the embedding, without the encoder."""
        kept = [layer for index, layer in enumerate(self._decoder.layers) if index not in self.skipped_attention]
        fed = [layer for index, layer in enumerate(self._decoder.layers) if index not in self.skipped_mlp]
        products = sum(layer.attention_bytes for layer in kept) + sum(layer.mlp_bytes for layer in fed)
        return products + self._head.nbytes + self._embedding.numel() * self._embedding.element_size()

    def pass_bytes(self, tokens: int) -> float:
        """See ``CausalLM.pass_bytes``: all of them."""
        return float(self.weight_bytes)

    @property
    def encoder_bytes(self) -> int:
        """Bytes of the matrices that reading a source multiplies with."""
        return sum(layer.attention_bytes + layer.mlp_bytes for layer in self._encoder.layers)

    def new_cache(self, batch: int, capacity: int) -> SourceCache:
        """An empty cache for rows of up to ``capacity`` tokens, source, target and drafts in flight together."""
        return self._make_cache(batch, capacity)

    def _make_cache(self, batch: int, capacity: int) -> SourceCache:
        kept = [i for i in range(self.n_layers) if i not in self.skipped_attention]
        slots = capacity + len(self.start)  # these stand for one source token, which keeps its own slot
        return SourceCache(kept, batch, slots, self.kv_heads, self.head_dim, dtype=self.dtype, device=self.device)

    @property
    def exits_fused(self) -> bool:
        """See ``CausalLM.exits_fused``; only of decoders that norm their last state."""
        plain = self._output_scale == 1.0 and isinstance(self._final_norm, LayerNorm)
        return self.fused and plain and isinstance(self._head, KernelLinear)

    @property
    def ends_fused(self) -> bool:
        """See ``CausalLM.ends_fused``; decoders without a last norm have such an end, too."""
        normed = self._final_norm is None or type(self._final_norm) is LayerNorm
        return self.fused and normed and self._output_scale == 1.0 and isinstance(self._head, KernelLinear)

    @property
    def batch_invariant(self) -> bool:
        """See ``CausalLM.batch_invariant``."""
        return super().batch_invariant and self._reads is not None

    # -- the source ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def encode(self, sources: Sequence[Int[Tensor, "_"]]) -> Source:
        """Run the encoder over sources of any lengths.

        Raises:
            ValueError: an empty source, or one beyond the last position.
        """
        lengths = [len(source) for source in sources]
        self._check_lengths(lengths)
        width, stack, tokens = max(lengths), self._encoder, padded_rows(sources, self.device)
        positions = torch.arange(width, device=self.device)[None]
        mask = _padding_mask(lengths, width, self.dtype, self.device)
        hidden = stack.place(stack.embed(tokens), positions)
        hidden = self._encode(hidden, mask, positions) if self._reads is None else self._reads(hidden, lengths)
        return Source(hidden if stack.norm is None else stack.norm(hidden), mask, lengths)

    def _encode(
        self, hidden: Float[Tensor, "B S D"], mask: Float[Tensor, "B 1 1 S"] | None, positions: Int[Tensor, "1 S"]
    ) -> Float[Tensor, "B S D"]:
        """The encoder's layers by torch's operators."""
        stack, scores = self._encoder, mask
        if stack.bias is not None:
            bias = stack.bias(positions, positions)
            scores = bias if mask is None else bias + mask
        for layer in stack.layers:
            query, key, value = _project(layer.attention, stack, hidden).split(stack.heads, dim=2)
            update = _mix(query, key.transpose(1, 2), value.transpose(1, 2), scores, stack.score_scale)
            hidden = layer.close_attention(hidden, layer.attention.out(update).view(hidden.shape))
            hidden = layer.close_mlp(hidden, _feed(layer.mlp, hidden))
        return hidden

    def _check_lengths(self, lengths: Sequence[int]) -> None:
        if min(lengths) < 1:
            raise ValueError("A source must have at least one token, got an empty one. Drop it, or write its text.")
        if max(lengths) > self.max_positions:
            raise ValueError(
                f"Sources must have at most {self.max_positions:,} tokens for {self.name}, got {max(lengths):,}. "
                "Shorten it, or choose a model with more positions."
            )

    def open(self, source: Source, cache: SourceCache) -> None:
        """Let the rows of ``cache`` read from an encoded source."""
        cache.open(source.lengths, source.mask, len(self.start))
        make = self._decoder.source
        assert make is not None, "a decoder looks at the source"
        made = make(source.states.flatten(0, 1))
        cache.remember(made.view(*source.states.shape[:2], self.n_layers, 2 * self.kv_heads, self.head_dim))

    # -- a pass in three acts -----------------------------------------------------------------------------------------

    def begin(  # type: ignore[override]
        self, tokens: Nodes, parents: Parents, cache: Cache, levels: int | None = None
    ) -> DecoderPass:
        """Embed the nodes of a pass and lay out positions and mask."""
        assert isinstance(cache, SourceCache), "an encoder-decoder model needs the cache it made itself"
        nodes, written = tokens.shape[1], cache.written
        end, fused = max(written) + nodes, self._fused is not None
        assert cache.source + end <= cache.capacity, f"{nodes} nodes do not fit into {cache.capacity} slots"
        place = self._decoder.place
        reach = None if parents is None else token_tree.ancestors(parents, levels or nodes)
        if parents is None and cache.uniform:
            if fused and isinstance(place, AbsolutePositions):
                hidden = place.chain(self._decoder.embed(tokens), written[0])
                return DecoderPass(hidden, None, None, end, cache, fused)
            positions = torch.arange(written[0], end, device=self.device)[None]
            mask = None if nodes == 1 else causal_mask(nodes, written[0], 1, self.dtype, self.device)
            slots, keys = None, None
        else:
            before = cache.length - cache.source
            offsets = torch.arange(nodes, device=self.device)[None] if reach is None else token_tree.depths(reach)
            positions = before[:, None] + offsets
            mask = None if fused else ragged_mask(before, reach, nodes, end, 1, self.dtype)
            slots = None if cache.uniform else cache.slots(nodes)
            keys = None if self._decoder.bias is None else _key_positions(before, offsets, end)
        if self._decoder.bias is not None:
            keys = torch.arange(end, device=self.device)[None] if keys is None else keys
            bias = self._decoder.bias(positions, keys)
            mask = bias if mask is None else bias + mask
        hidden = place(self._decoder.embed(tokens), positions)
        return DecoderPass(hidden, mask, slots, end, cache, fused, reach)

    def run(  # type: ignore[override]
        self, state: DecoderPass, layers: Iterable[int], hidden_layers: Collection[int] = ()
    ) -> dict[int, Float[Tensor, "B M D"]]:
        """Run ``layers`` of the decoder; returns the hidden states after those in ``hidden_layers``."""
        if state.fused:
            return self._run_fused(state, layers, hidden_layers)
        seen = {}
        for index in layers:
            layer = self._decoder.layers[index]
            if index not in self.skipped_attention:
                state.hidden = layer.close_attention(state.hidden, self._attend(layer.attention, index, state))
                state.hidden = layer.close_cross(state.hidden, self._look(index, state))
            if index not in self.skipped_mlp:
                state.hidden = layer.close_mlp(state.hidden, _feed(layer.mlp, state.hidden))
            if index in hidden_layers:
                seen[index] = state.hidden
        return seen

    def fill(self, state: DecoderPass, layers: Sequence[int]) -> None:  # type: ignore[override]
        """See ``CausalLM.fill``; the cache holds the input of cross-attention for every layer from the beginning."""
        for index in layers:
            if index not in self.skipped_attention:
                state.cache.write(index, self._project(index, state.hidden), state.slots)

    def norm(self, hidden: Float[Tensor, "*b D"]) -> Float[Tensor, "*b D"]:
        """Between the last layer and the output matrix: a norm or none, and T5's factor."""
        states = hidden if self._decoder.norm is None else self._decoder.norm(hidden)
        return states if self._output_scale == 1.0 else states * self._output_scale

    # -- whole passes -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(
        self,
        prompts: Sequence[Int[Tensor, "_"]],
        cache: Cache,
        *,
        hidden_layers: Collection[int] = (),
        chunk: int | None = None,
        kept: int = 0,
    ) -> Output:
        """Encode whole sources, ragged, and score the decoder's start; afterwards each row holds its source.

        Hidden states are those of the start tokens, the last of which predicts the first token. ``chunk`` is ignored
        and ``kept`` must be 0: an encoder reads a source at once.
        """
        assert not kept, "each token of a source depends on all of them"
        assert isinstance(cache, SourceCache), "an encoder-decoder model needs the cache it made itself"
        source = self.encode(prompts)
        self.open(source, cache)
        start = torch.tensor(self.start, device=self.device).expand(len(prompts), -1)
        state = self.begin(start, None, cache)
        seen = self.run(state, range(self.n_layers), hidden_layers)
        cache.advance([len(self.start)] * len(prompts))
        hidden = self.norm(state.hidden)
        return Output(self.head(hidden[:, -1:]), hidden if hidden_layers else hidden[:, -1:], seen, source.states)

    @property
    def runs_rounds(self) -> bool:
        """See ``CausalLM.runs_rounds``; of any size, as decoders are small."""
        place = self._decoder.place
        placed = isinstance(place, AbsolutePositions) and isinstance(place.norm, LayerNorm | None)
        return placed and self.ends_fused

    def _embedded(self, places: int) -> Embedded:
        place = self._decoder.place
        assert isinstance(place, AbsolutePositions) and isinstance(place.norm, LayerNorm | None)
        return Embedded(self._decoder.embedding, self._decoder.embed_scale, place.table, place.norm)

    @torch.inference_mode()
    def score(self, tokens: Int[Tensor, "T"], start: int = 0) -> Float[Tensor, "R V"]:
        """Teacher forcing: the tokens up to ``start`` are the source, the following ones the target.

        Row i judges token ``start + i + 1``, as with ``CausalLM``, where the prompt ends at ``start``.
        """
        cache = self.new_cache(1, len(tokens))
        rows = [self.prefill([tokens[: start + 1]], cache).logits[0]]
        for part in tokens[start + 1 :].split(_SCORE_CHUNK):
            if len(part):
                rows.append(self.forward(part[None], None, cache).logits[0])
                cache.advance([len(part)])
        return torch.cat(rows)

    # -- one sub-layer each -------------------------------------------------------------------------------------------

    def _cross(self, index: int) -> CrossAttention:
        cross = self._decoder.layers[index].cross
        assert cross is not None, "a layer of the decoder looks at the source"
        return cross

    def _project(self, index: int, hidden: Float[Tensor, "B M D"]) -> Float[Tensor, "B M HH d"]:
        norm = self._decoder.layers[index].attention.norm
        rows = hidden if norm is None else norm(hidden)
        flat = self._key_value_of(index)(rows.reshape(-1, rows.shape[-1]))
        return flat.view(*hidden.shape[:2], 2 * self.heads, self.head_dim)

    def _attend(  # type: ignore[override]
        self, attention: SelfAttention, index: int, state: DecoderPass
    ) -> Float[Tensor, "B M D"]:
        """Self-attention: every node sees its row's prefix and, of the pass, its ancestors."""
        heads = _project(attention, self._decoder, state.hidden)
        state.cache.write(index, heads[:, :, self.heads :], state.slots)
        keys, values = state.cache.view(index, state.end)
        mixed = _mix(heads[:, :, : self.heads], keys, values, state.mask, self._decoder.score_scale)
        return attention.out(mixed).view(state.hidden.shape)

    def _look(self, index: int, state: DecoderPass) -> Float[Tensor, "B M D"]:
        """Cross-attention: every node sees the whole source of its row."""
        batch, nodes, width = state.hidden.shape
        cross = self._cross(index)
        rows = state.hidden if cross.norm is None else cross.norm(state.hidden)
        query = cross.query(rows.reshape(-1, width)).view(batch, nodes, self.heads, self.head_dim)
        keys, values = state.cache.recall(index)
        mixed = _mix(query, keys, values, state.cache.mask, self._decoder.score_scale)
        return cross.out(mixed).view(state.hidden.shape)


def _project(attention: SelfAttention, stack: Stack, hidden: Float[Tensor, "B M D"]) -> Float[Tensor, "B M HHH d"]:
    batch, nodes, width = hidden.shape
    rows = hidden if attention.norm is None else attention.norm(hidden)
    return attention.qkv(rows.reshape(-1, width)).view(batch, nodes, 3 * stack.heads, stack.head_dim)


def _mix(
    query: Float[Tensor, "B M H d"],
    keys: Float[Tensor, "B H S d"],
    values: Float[Tensor, "B H S d"],
    mask: Float[Tensor, "..."] | None,
    scale: float,
) -> Float[Tensor, "R HD"]:
    mixed = F.scaled_dot_product_attention(query.transpose(1, 2), keys, values, attn_mask=mask, scale=scale)
    return mixed.transpose(1, 2).reshape(query.shape[0] * query.shape[1], -1)


def _feed(mlp: FeedForward, hidden: Float[Tensor, "B M D"]) -> Float[Tensor, "B M D"]:
    rows = hidden if mlp.norm is None else mlp.norm(hidden)
    up = mlp.up(rows.reshape(-1, rows.shape[-1]))
    if mlp.gated:
        gate, value = up.chunk(2, dim=-1)
        return mlp.down(mlp.activation(gate) * value).view(hidden.shape)
    return mlp.down(mlp.activation(up)).view(hidden.shape)


def _padding_mask(
    lengths: Sequence[int], width: int, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "B 1 1 S"] | None:
    if min(lengths) == width:
        return None
    hidden: Bool[Tensor, "B S"] = torch.arange(width)[None] >= torch.tensor(lengths)[:, None]
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
    return mask[:, None, None].to(device)


def _key_positions(before: Int[Tensor, "B"], offsets: Int[Tensor, "b M"], end: int) -> Int[Tensor, "B S"]:
    """Positions of all decoder slots: those of the prefix count up, a node of the pass has that of its depth."""
    slots = torch.arange(end, device=before.device).expand(len(before), end)
    inside = slots - before[:, None]
    node = inside.clamp(0, offsets.shape[1] - 1)
    return torch.where(inside < 0, slots, before[:, None] + offsets.expand(len(before), -1).gather(1, node))


def _start(model: PreTrainedModel) -> tuple[int, ...]:
    """The decoder's start token and the one forced after it.

    Raises:
        UnsupportedModel: the model names no start token.
    """
    first = _setting(model, "decoder_start_token_id")
    forced = _setting(model, "forced_bos_token_id")
    if first is None:
        raise UnsupportedModel(
            f"A {model.config.model_type} model must have decoder_start_token_id, the beginning of a target, in its "
            "config, got none. Add it to config.json or generation_config.json."
        )
    return (int(first),) if forced is None else (int(first), int(forced))


def _suppressed(model: PreTrainedModel) -> tuple[int, ...]:
    """Ids that generation never writes.

    Raises:
        UnsupportedModel: words of several tokens are forbidden.
    """
    words = _setting(model, "bad_words_ids") or []
    if any(len(word) != 1 for word in words):
        raise UnsupportedModel(
            "bad_words_ids of generation_config.json must forbid single tokens only, got words of several tokens, "
            "which is not proven. Remove them from the file."
        )
    return tuple(sorted({int(word[0]) for word in words} | {int(i) for i in _setting(model, "suppress_tokens") or []}))


def _setting(model: PreTrainedModel, name: str) -> Any:
    """A generation setting, from generation_config.json or, as older models have it, from config.json."""
    found = getattr(getattr(model, "generation_config", None), name, None)
    return getattr(model.config, name, None) if found is None else found


def _output_bias(model: PreTrainedModel, suppressed: Sequence[int]) -> Float[Tensor, "V"] | None:
    """Bias of the output matrix; None where it is zero everywhere."""
    head: Any = model.get_output_embeddings()
    bias = torch.zeros(head.weight.shape[0], dtype=head.weight.dtype, device=head.weight.device)
    final = getattr(model, "final_logits_bias", None)
    if final is not None:
        bias += final[0]
    bias[list(suppressed)] = -torch.inf
    return bias if bool(bias.any()) else None
