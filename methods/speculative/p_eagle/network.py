"""The network of P-EAGLE in decoding: one pass over the new pairs and the masked places after them.

As in EAGLE-3, a place holds a pair: the target's feature there, a mixture of its states after some layers, and the
embedding of the token after it; the first layer reads both halves side by side, further ones are ordinary. The output
at the last pair guesses the token after the root. Each masked place has in both halves a vector that was learnt, the
same at every place, and guesses one token more, from what it sees before it (arXiv 2602.01469). Attention is causal.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from methods.engine.causal_lm import CausalLM, rotate_
from methods.engine.fused_layers import Portion
from methods.engine.kv_cache import Cache
from methods.speculative.draft_layers import (
    Weights,
    after_attention,
    attend,
    bytes_of,
    kernels_of,
    rotary_table,
    triton_of,
)
from methods.speculative.p_eagle.checkpoint import MASK_EMBEDDING, MASK_HIDDEN, Part

_MOST_ROWS = 1024  # of a pass over pairs: what a pass holds at once


class Network:
    """The network of a target, its weights in the form of ``CausalLM.draft_linear``."""

    def __init__(self, target: CausalLM, part: Part) -> None:
        self.spec, spec = part.spec, part.spec
        weights = Weights(target, part.tensors, spec.rms_eps)
        self.device, self.dtype = target.device, target.dtype
        self.vocabulary = part.vocabulary.to(target.device)
        self.rotary = rotary_table(spec, target.device, target.dtype)
        self.embed, self._fc = weights.embedding(), weights.linear("fc")
        self._state_norms = [weights.norm(f"fc_norm.{number}") for number in range(len(spec.taps)) if spec.fc_norm]
        self._token_norm = weights.norm("layers.0.input_layernorm")
        self._feature_norm = weights.norm("layers.0.hidden_norm")
        within = "hidden_norm" if not spec.norm_before_residual else None
        self.layers = [
            weights.layer(spec.layer(number), norm=within if number == 0 else "input_layernorm")
            for number in range(spec.draft_layers)
        ]
        self.first = kernels_of(self.layers[:1], spec, spec.hidden_size)
        self.others = kernels_of(self.layers, spec)
        self.triton = triton_of(target, self.layers, spec)
        self._last_norm = weights.norm("norm")
        self._score, own = weights.output(self.vocabulary)
        mask = weights.get(MASK_EMBEDDING)
        self._mask = mask if mask is not None else self.embed(torch.tensor(spec.mask, device=target.device))
        states = weights.tensor(MASK_HIDDEN).view(len(spec.taps), 1, 1, spec.hidden_size)
        self._masked = self.enter(self.feature(list(states)), self._mask.view(1, 1, -1))
        layers = sum(bytes_of(layer) for layer in self.layers)
        self.nbytes = {"draft_network": self._fc.nbytes + layers, "draft_output_matrix": own}

    def feature(self, taps: Sequence[Float[Tensor, "B M D"]]) -> Float[Tensor, "B M D"]:
        """The mixture of the target's states at some places."""
        if self._state_norms:
            taps = [norm(tap) for norm, tap in zip(self._state_norms, taps, strict=True)]
        return self._fc(torch.cat(list(taps), dim=-1).flatten(0, 1)).view(taps[0].shape)

    def enter(
        self,
        feature: Float[Tensor, "B M D"],
        embedded: Float[Tensor, "B M D"],
    ) -> tuple[Float[Tensor, "B M D"], Float[Tensor, "B M D"]]:
        """Input of the first layer for pairs: the residual, and what it reads beside the residual's norm."""
        residual = self._feature_norm(feature) if self.spec.norm_before_residual else feature
        return residual, self._token_norm(embedded)

    def masked(self, batch: int, places: int) -> tuple[Float[Tensor, "B M D"], Float[Tensor, "B M D"]]:
        """The same for masked places."""
        residual, beside = (half.expand(batch, places, -1) for half in self._masked)
        return residual, beside

    def out(self, rows: Float[Tensor, "B M D"]) -> Float[Tensor, "B M D"]:
        """What the output matrix reads."""
        return self._last_norm(rows)

    def logits(self, hidden: Float[Tensor, "B M D"]) -> Float[Tensor, "B M v"]:
        """Logits over the draft vocabulary."""
        return self._score(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)

    def bias(self, before: Int[Tensor, "B M"]) -> None:
        """A place's logits do not depend on the token drafted before it; see ``methods.speculative.dflash.trees``."""

    def confidence(self, hidden: Float[Tensor, "B M D"], before: Int[Tensor, "B M"]) -> None:
        """There is no confidence head; see ``methods.speculative.dflash.trees``."""


class Reader:
    """The network over a cache of its own: committed pairs, at each row's own slots from 0.

    A masked place is overwritten by what is read next.
    """

    def __init__(self, network: Network, batch: int, capacity: int) -> None:
        self.network, spec = network, network.spec
        layers = range(spec.draft_layers)
        self._cache = Cache(
            layers, batch, capacity, spec.kv_heads, spec.head_dim, dtype=network.dtype, device=network.device
        )
        self._portions = [Portion(layer) for layer in layers]

    @property
    def cache(self) -> Cache:
        """Keys and values of the pairs."""
        return self._cache

    def reserve(self, positions: int) -> None:
        """Extend the table of positions."""
        self.network.rotary.reserve(positions)

    @property
    def lengths(self) -> list[int]:
        """Committed pairs of each row."""
        return self._cache.lengths

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep only some rows, in this order."""
        self._cache.select(rows)

    def draft(
        self, feature: Float[Tensor, "B W D"], tokens: Int[Tensor, "B W"], counts: Sequence[int], masks: int
    ) -> Float[Tensor, "B n D"]:
        """Commit the first ``counts[b]`` pairs of each row; what the output matrix reads at the last of them and after.

        Args:
            feature: the target's, at each pair's place.
            tokens: each pair's token, which is that after its place.
            counts: new pairs of each row; what a row without one drafts is meaningless.
            masks: masked places after the last pair, so that ``masks`` + 1 tokens are drafted.
        """
        residual, beside = self.network.enter(feature, self.network.embed(tokens))
        batch, most = len(counts), max(1, _MOST_ROWS // len(counts))
        read = [0] * batch
        while max(count - done for count, done in zip(counts, read, strict=True)) > most:
            now = [min(max(count - 1 - done, 0), most) for count, done in zip(counts, read, strict=True)]
            self._run(*(_from(half, read, max(now)) for half in (residual, beside)))
            self._cache.advance(now)
            read = [done + new for done, new in zip(read, now, strict=True)]
        left = [count - done for count, done in zip(counts, read, strict=True)]
        places = [_from(half, read, max(left)) for half in (residual, beside)]
        masked = self.network.masked(batch, masks)
        states = self._run(*(_followed(half, mask, left) for half, mask in zip(places, masked, strict=True)))
        self._cache.advance(left)
        last = [max(count - 1, 0) for count in left]
        return self.network.out(_from(states, last, masks + 1))

    def _run(self, residual: Float[Tensor, "B M D"], beside: Float[Tensor, "B M D"]) -> Float[Tensor, "B M D"]:
        """All layers over places after each row's pairs; keys and values go there."""
        cache, network = self._cache, self.network
        end = max(cache.lengths) + residual.shape[1]
        assert end <= cache.capacity, f"places up to {end} in a cache of {cache.capacity}"
        slots = cache.slots(residual.shape[1])
        if cache.uniform:
            cos, sin = network.rotary.slice(cache.lengths[0], end)
        else:
            network.rotary.reserve(end)
            cos, sin = network.rotary.gather(slots)
        if network.first is None or network.others is None:
            return _through_layers(network, residual, beside, cache, slots, (cos, sin), end)
        given = (cos, sin, None, cache)
        states, _ = network.first.run(residual, *given, self._portions[:1], beside=beside)
        if network.spec.draft_layers > 1:
            states, _ = network.others.run(states, *given, self._portions[1:])
        return states


class FixedReader:
    """A ``Reader`` in a pass of fixed shape, as it can be recorded: where rows end is known on the device alone.

    It works on a reader's cache. By torch's operators attention reads all slots, those after each place masked;
    Triton's kernels read those that there are.
    """

    def __init__(self, network: Network, cache: Cache) -> None:
        self.network, self._cache = network, cache

    def draft(
        self, feature: Float[Tensor, "B W D"], tokens: Int[Tensor, "B W"], counts: Int[Tensor, "B"], masks: int
    ) -> Float[Tensor, "B n D"]:
        """``Reader.draft``; the cache's lengths grow on the device only."""
        network, cache, (batch, width) = self.network, self._cache, tokens.shape
        places = torch.arange(width + masks, device=tokens.device)
        after = places - counts[:, None]
        at = torch.where(after < 0, places, (width + after).clamp(max=width + masks - 1))
        pairs = zip(network.enter(feature, network.embed(tokens)), network.masked(batch, masks), strict=True)
        residual, beside = (_at(torch.cat(halves, dim=1), at) for halves in pairs)
        slots = cache.slots(width + masks).clamp_(max=cache.capacity - 1)
        turn = network.rotary.gather(slots)
        if network.triton is not None and network.triton.takes(width + masks, True):
            first, *others = (Portion(layer) for layer in range(network.spec.draft_layers))
            states, _ = network.triton.run(residual, *turn, None, cache, [first], beside=beside)
            states, _ = network.triton.run(states, *turn, None, cache, others)
        else:
            states = _through_layers(network, residual, beside, cache, slots, turn, cache.capacity)
        cache.length += counts
        return network.out(_at(states, (counts - 1)[:, None] + places[: masks + 1]))


def _through_layers(
    network: Network,
    residual: Float[Tensor, "B M D"],
    beside: Float[Tensor, "B M D"],
    cache: Cache,
    slots: Int[Tensor, "B M"],
    turn: tuple[Tensor, Tensor],
    end: int,
) -> Float[Tensor, "B M D"]:
    """Places after all layers, by torch's operators.

    Args:
        cache: gets their keys and values, at ``slots``.
        turn: cosines and sines of the places.
        end: slots that attention reads.
    """
    spec = network.spec
    later: Bool[Tensor, "B M S"] = torch.arange(end, device=slots.device) > slots[:, :, None]
    mask = torch.zeros(later.shape, dtype=network.dtype, device=slots.device).masked_fill_(later, -torch.inf)
    rows = residual.flatten(0, 1)
    for number, layer in enumerate(network.layers):
        attention = layer.attention
        read = rows if attention.norm is None else attention.norm(rows)
        if number == 0:
            read = torch.cat([beside.flatten(0, 1), read], dim=-1)
        heads = attention.qkv(read).view(*residual.shape[:2], -1, spec.head_dim)
        rotate_(heads[:, :, : spec.heads + spec.kv_heads], *turn)
        cache.write(number, heads[:, :, spec.heads :], slots)
        mixed = attend(heads[:, :, : spec.heads], *cache.view(number, end), mask)
        rows = after_attention(layer, rows, mixed)
    return rows.view(residual.shape)


def _at(places: Float[Tensor, "B W D"], index: Int[Tensor, "B w"]) -> Float[Tensor, "B w D"]:
    return places.gather(1, index[:, :, None].expand(-1, -1, places.shape[2]))


def _from(places: Float[Tensor, "B W D"], starts: Sequence[int], width: int) -> Float[Tensor, "B w D"]:
    """``width`` places of each row from its own start; beyond the end the last one is repeated."""
    if min(starts) == max(starts) and starts[0] + width <= places.shape[1]:
        return places[:, starts[0] : starts[0] + width]
    at = torch.tensor(starts)[:, None] + torch.arange(width)
    return _at(places, at.clamp_(max=places.shape[1] - 1).to(places.device))


def _followed(
    places: Float[Tensor, "B W D"], masks: Float[Tensor, "B m D"], counts: Sequence[int]
) -> Float[Tensor, "B w D"]:
    """The first ``counts[b]`` places of each row, then the masks; what comes after these is meaningless."""
    whole = torch.cat([places, masks], dim=1)
    if min(counts) == places.shape[1]:
        return whole
    width = places.shape[1]
    rows = [[*range(count), *range(width, width + masks.shape[1]), *range(count, width)] for count in counts]
    return _at(whole, torch.tensor(rows, device=places.device))
