"""The draft network of EAGLE in decoding: its pass, over a small cache of its own.

One Llama layer predicts the target's next feature from the pair of the feature at a place and the embedding of the
token after it, and the output matrix turns that feature into a token. Versions 1 and 2 (arXiv 2401.15077, sec. 3.1;
arXiv 2406.16858) mix the pair in front of the layer, and the feature is the target's last hidden state after its final
norm. Version 3 (arXiv 2503.01840, sec. 3) mixes the states after three layers of the target into the first feature,
gives the layer both halves of the pair side by side, and does not require its own feature to resemble the target's.

``eagle_training.py`` holds the same network as a module; a test proves the two equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from methods.drafting import Draft
from methods.engine.causal_lm import CausalLM, rotate_
from methods.engine.cpu_kernels import reading_groups
from methods.engine.fused_layers import Portion
from methods.engine.fused_tree import FusedTree, TreeSizes
from methods.engine.host_copies import from_host
from methods.engine.kv_cache import Cache
from methods.engine.linear import KernelLinear
from methods.speculative.draft_layers import (
    Weights,
    after_attention,
    attend,
    bytes_of,
    hidden_padding,
    kernels_of,
    rotary_table,
    slots_of,
    triton_of,
)
from methods.speculative.eagle.checkpoint import Part
from methods.speculative.ranked_tree import tree_of

_MOST_ROWS = 256  # of a pass of the kernels, whose buffers take 25 kB a row


@dataclass(frozen=True, slots=True)
class Entered:
    """What the layer's kernels read of pairs.

    Attributes:
        residual: input of the layer.
        read: by its attention, after all norms.
        cos, sin: of the positions.
        bits: which guesses each sees, see ``methods.engine.triton_kernels.pack_bits``; None: they are no guesses.
    """

    residual: Float[Tensor, "B M D"]
    read: Float[Tensor, "B M E"]
    cos: Float[Tensor, "B M 1 r"]
    sin: Float[Tensor, "B M 1 r"]
    bits: Int[Tensor, "B M"] | None


class Network:
    """The draft network of a target, its weights in the form of ``CausalLM.draft_linear``."""

    def __init__(self, target: CausalLM, part: Part) -> None:
        self.spec, weights = part.spec, Weights(target, part.tensors, part.spec.rms_eps)
        self.device, self.dtype = target.device, target.dtype
        self._embed, self._table = weights.embedding(), weights.embedding_table()
        self.vocabulary = part.vocabulary.to(target.device)
        self.rotary = rotary_table(self.spec, target.device, target.dtype)
        spec, name = self.spec, self.spec.layer
        self._fc = weights.linear("fc")
        within = spec.version == 3 and not spec.norm_before_residual
        self.layer = weights.layer(name, norm="hidden_norm" if within else None)
        self.fused = kernels_of([self.layer], spec, spec.hidden_size if spec.version == 3 else 0)
        self.triton = triton_of(target, [self.layer], spec)
        if spec.version == 3:
            self._token_norm = weights.norm(f"{name}.input_layernorm")
            self._feature_norm = weights.norm(f"{name}.hidden_norm")
            self._last_norm = weights.norm("norm")
        self._state_norms = [weights.norm(f"fc_norm.{number}") for number in range(len(spec.taps)) if spec.fc_norm]
        self._mixing_norm = weights.norm("input_norm") if spec.norm_before_fc else None
        self._score, own = weights.output(self.vocabulary)
        self.nbytes = {"draft_network": self._fc.nbytes + bytes_of(self.layer), "draft_output_matrix": own}

    def tree(self, sizes: TreeSizes) -> FusedTree | None:
        """A tree of the most probable paths in one call of the kernels; None: they lack something of this network."""
        if (
            self.fused is None
            or self.spec.version != 3
            or self._table is None
            or not isinstance(self._score, KernelLinear)
        ):
            return None
        feature = self._feature_norm if self.spec.norm_before_residual else None
        ids = None if self.vocabulary.full else self.vocabulary.ids
        norms = (self._token_norm, feature, self._last_norm)
        normed = self.spec.fc_norm or self.spec.norm_before_fc
        mix = self._fc if isinstance(self._fc, KernelLinear) and not normed else None
        return FusedTree(self.fused, *norms, mix, self._score, self._table, ids, self.spec.norm_output, sizes)

    def feature(self, hidden: Float[Tensor, "B M D"], taps: Sequence[Float[Tensor, "B M D"]]) -> Float[Tensor, "B M D"]:
        """The target's feature at some places: its last state, or version 3's mixture of three."""
        if self.spec.version != 3:
            return hidden
        if self._state_norms:
            taps = [norm(tap) for norm, tap in zip(self._state_norms, taps, strict=True)]
        states = torch.cat(list(taps), dim=-1)
        if self._mixing_norm is not None:
            states = self._mixing_norm(states)
        return self._fc(states.flatten(0, 1)).view(hidden.shape)

    def enter(
        self, feature: Float[Tensor, "B M D"], tokens: Int[Tensor, "B M"]
    ) -> tuple[Float[Tensor, "B M D"], Float[Tensor, "B M D"] | None]:
        """Input of the layer for pairs: the residual, and what version 3 reads beside the residual's norm."""
        embedding = self._embed(tokens)
        if self.spec.version != 3:
            read = self._fc(torch.cat([embedding, feature], dim=-1).flatten(0, 1))
            return read.view(feature.shape), None
        residual = self._feature_norm(feature) if self.spec.norm_before_residual else feature
        return residual, self._token_norm(embedding)

    @property
    def makes_pairs(self) -> bool:
        """Whether ``pairs`` may be called: Triton's kernels run the layer, and nothing is done to an embedding."""
        return self.triton is not None and self._table is not None

    def pairs(
        self, feature: Float[Tensor, "B m D"], tokens: Int[Tensor, "B M"], cache: Cache, last: int, **guesses: Any
    ) -> Entered:
        """``enter`` and the norm of the layer by one kernel, with what depends on the places of pairs.

        Args:
            cache: that they are written into.
            last: the last position that is looked up.
            guesses: see ``methods.engine.triton_trees.enter_pairs``.
        """
        from methods.engine import triton_trees  # needs a package that not every machine has

        assert self._table is not None
        spec, norms, (cos, sin) = self.spec, None, self.rotary.slice(0, 2 * cache.capacity)
        if spec.version == 3:
            norms = self._token_norm.factor, self._feature_norm.factor, spec.rms_eps
        where = (self._table, norms, spec.norm_before_residual, (cos[0], sin[0]), cache.length, last)
        made = Entered(*triton_trees.enter_pairs(feature, tokens, *where, **guesses))
        if spec.version == 3:
            return made
        mixed = self._fc(made.read.flatten(0, 1)).view(made.residual.shape)
        return replace(made, residual=mixed, read=mixed)

    def heads(
        self, residual: Float[Tensor, "B M D"], beside: Float[Tensor, "B M D"] | None
    ) -> Float[Tensor, "B M h d"]:
        """Heads of query, key and value side by side, before the rotary positions."""
        attention = self.layer.attention
        read = residual if attention.norm is None else attention.norm(residual)
        read = read if beside is None else torch.cat([beside, read], dim=-1)
        return attention.qkv(read.flatten(0, 1)).view(*residual.shape[:2], -1, self.spec.head_dim)

    def leave(self, residual: Float[Tensor, "B M D"], mixed: Float[Tensor, "R H"]) -> Float[Tensor, "B M D"]:
        """The next features, from the residual and the output of the heads."""
        return after_attention(self.layer, residual.flatten(0, 1), mixed).view(residual.shape)

    def logits(self, feature: Float[Tensor, "B M D"]) -> tuple[Float[Tensor, "B M v"], Float[Tensor, "B M D"]]:
        """Logits over the draft vocabulary of the next token, and the feature that a pair with that token has."""
        if self.spec.version != 3:
            return self._scores(feature), feature
        normed = self._last_norm(feature)
        return self._scores(normed), normed if self.spec.norm_output else feature

    def _scores(self, rows: Float[Tensor, "B M D"]) -> Float[Tensor, "B M v"]:
        return self._score(rows.flatten(0, 1)).view(*rows.shape[:2], -1)


def _last(states: Float[Tensor, "B W D"], counts: Sequence[int], before: Float[Tensor, "B 1 D"]) -> Tensor:
    """Each row's state at the last of its places; of a row without one that from before."""
    if min(counts) == states.shape[1]:
        return states[:, -1:]
    last = from_host(counts, states.device)[:, None, None] - 1
    found = states.gather(1, last.clamp(min=0).expand(-1, 1, states.shape[2]))
    return torch.where(last >= 0, found, before)


class Reader:
    """The draft network over a cache of its own: pairs of committed tokens, and a tree of guesses after them.

    A pair is the feature at a place and the token after it, with the place's number, from 0. Committed pairs have the
    target's features and are at each row's own slots; guesses of all rows begin at the same slot, after the longest, so
    that a level of the tree is written and masked alike in every row.
    """

    def __init__(self, network: Network, batch: int, capacity: int) -> None:
        self.network, spec = network, network.spec
        self._cache = Cache(
            [0], batch, capacity, spec.kv_heads, spec.head_dim, dtype=network.dtype, device=network.device
        )
        self._guesses = 0
        self._prefix: Tensor | None = None
        self._portions = [Portion(0)]

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
        """Keep only some rows, in this order; to be followed by ``read``."""
        self._cache.select(rows)

    def read(
        self, feature: Float[Tensor, "B W D"], tokens: Int[Tensor, "B W"], counts: Sequence[int]
    ) -> Float[Tensor, "B 1 D"]:
        """Commit the first ``counts[b]`` pairs of each row and forget all guesses; the feature after the last pair.

        Without kernels, only keys and values of the earlier ones are computed.
        """
        if self.network.fused is None:
            return self._read_by_operators(*self.network.enter(feature, tokens), counts)
        groups = reading_groups(counts) if max(self.lengths) == 0 else []
        if len(groups) > 1:
            return self._read_groups(groups, feature, tokens, counts)
        self._guesses, most = 0, max(1, _MOST_ROWS // len(counts))
        found, done = feature[:, :1], 0
        while done < max(counts):
            width = min(most, max(counts) - done)
            part = self.network.enter(feature[:, done : done + width], tokens[:, done : done + width])
            cos, sin = self._turn(0, width)
            states = self._run(*part, cos, sin, None)
            new = [min(max(count - done, 0), width) for count in counts]
            found = _last(states, new, found)
            self._cache.advance(new)
            done += width
        return found

    def _read_groups(
        self,
        groups: Sequence[Sequence[int]],
        feature: Float[Tensor, "B W D"],
        tokens: Int[Tensor, "B W"],
        counts: Sequence[int],
    ) -> Float[Tensor, "B 1 D"]:
        """``read`` of the prompts, some rows at a time, each group by a reader of its own."""
        found = feature[:, :1].clone()
        for group in groups:
            rows, new = list(group), [counts[row] for row in group]
            if width := max(new):
                own = Reader(self.network, len(rows), width)
                found[rows] = own.read(feature[rows, :width], tokens[rows, :width], new)
                self._cache.adopt(rows, own.cache)
        return found

    def grow(
        self,
        tree: FusedTree,
        states: Sequence[Float[Tensor, "1 N D"]],
        rows: Sequence[int],
        tokens: Sequence[int],
        mixed: bool,
    ) -> Draft:
        """Commit the pairs of a batch of one row, forget all guesses, and draft the tree after them; see
        ``FusedTree.grow``.
        """
        start, places = self._cache.lengths[0], len(tokens) + tree.sizes.levels - 1
        turned = self.network.rotary.slice(start, start + places)
        grown = tree.grow(states, rows, tokens, *turned, self._cache, mixed)
        self._cache.advance([len(tokens)])
        self._guesses = 0
        made = tree_of(grown.ids, grown.parents, grown.scores, grown.levels, tree.sizes.width, grown.levels)
        return replace(made, listed=(grown.ids.tolist(), grown.parents.tolist()))

    def _run(
        self,
        residual: Float[Tensor, "B M D"],
        beside: Float[Tensor, "B M D"] | None,
        cos: Tensor,
        sin: Tensor,
        reach: Bool[Tensor, "b M g"] | None,
    ) -> Float[Tensor, "B M D"]:
        """The layer's output by the kernels; keys and values go after the guesses of each row."""
        assert self.network.fused is not None
        if reach is not None and len(reach) < len(residual):
            reach = reach.expand(len(residual), -1, -1)
        where = (None if reach is None else reach.contiguous(), self._cache, self._portions)
        return self.network.fused.run(residual, cos, sin, *where, earlier=self._guesses, beside=beside)[0]

    def _read_by_operators(
        self, residual: Float[Tensor, "B W D"], beside: Float[Tensor, "B W D"] | None, counts: Sequence[int]
    ) -> Float[Tensor, "B 1 D"]:
        cache, spec = self._cache, self.network.spec
        width, start = residual.shape[1], cache.lengths[0]
        heads = self.network.heads(residual, beside)
        slots = slots_of(cache, width)
        if slots is None:
            cos, sin = self.network.rotary.slice(start, start + width)
        else:
            self.network.rotary.reserve(cache.capacity)
            cos, sin = self.network.rotary.gather(slots)
        rotate_(heads[:, :, : spec.heads + spec.kv_heads], cos, sin)
        cache.write(0, heads[:, :, spec.heads :], slots)
        cache.advance(counts)
        self._guesses, self._prefix = 0, hidden_padding(cache, self.network.dtype)
        if len(counts) == 1 or min(counts) == width:
            residual, query = residual[:, counts[0] - 1 :][:, :1], heads[:, counts[0] - 1 :][:, :1, : spec.heads]
        else:
            last = from_host(counts, heads.device).sub_(1).clamp_(min=0)
            rows = torch.arange(len(counts), device=heads.device)
            residual, query = residual[rows, last][:, None], heads[rows, last][:, None, : spec.heads]
        return self.network.leave(residual, self._mix(query, self._prefix))

    def guess(
        self,
        feature: Float[Tensor, "B M D"],
        tokens: Int[Tensor, "B M"],
        level: int,
        reach: Bool[Tensor, "b M g"] | None = None,
    ) -> Float[Tensor, "B M D"]:
        """The features after some guesses of one level, 0 being the one right after the root.

        Args:
            feature: after the parent of each.
            tokens: the guesses.
            level: guesses between each and the root.
            reach: which guesses each of them sees, of all so far and these; None: all (a chain).
        """
        cache, spec, network, nodes = self._cache, self.network.spec, self.network, tokens.shape[1]
        residual, beside = network.enter(feature, tokens)
        cos, sin = self._turn(level, 1)
        if network.fused is not None:
            cos, sin = (table.expand(-1, nodes, -1, -1).contiguous() for table in (cos, sin))
            states = self._run(residual, beside, cos, sin, reach)
            self._guesses += nodes
            return states
        start = max(cache.lengths) + self._guesses
        end = start + nodes
        assert end <= cache.capacity, f"{end} pairs in a cache of {cache.capacity}"
        heads = network.heads(residual, beside)
        rotate_(heads[:, :, : spec.heads + spec.kv_heads], cos, sin)
        cache.store[0][:, start:end] = heads[:, :, spec.heads :]
        self._guesses += nodes
        return network.leave(residual, self._mix(heads[:, :, : spec.heads], self._mask(reach)))

    def _turn(self, level: int, places: int) -> tuple[Tensor, Tensor]:
        """Of some places from ``level`` after the pairs of each row on."""
        cache, rotary = self._cache, self.network.rotary
        if cache.uniform:
            return rotary.slice(cache.lengths[0] + level, cache.lengths[0] + level + places)
        rotary.reserve(max(cache.lengths) + level + places)
        return rotary.gather(cache.slots(places) + level)

    def _mask(self, reach: Bool[Tensor, "b M g"] | None) -> Float[Tensor, "b2 m S"] | None:
        """Added to the scores of committed pairs and guesses."""
        committed, prefix = max(self._cache.lengths), self._prefix
        if reach is None:
            return None if prefix is None else F.pad(prefix, (0, self._guesses))
        guesses = torch.zeros(reach.shape, dtype=self.network.dtype, device=reach.device)
        guesses.masked_fill_(~reach, -torch.inf)
        if prefix is None:
            return F.pad(guesses, (committed, 0))
        batch, nodes = len(prefix), reach.shape[1]
        return torch.cat([prefix.expand(-1, nodes, -1), guesses.expand(batch, -1, -1)], dim=2)

    def _mix(self, query: Float[Tensor, "B M H d"], mask: Float[Tensor, "b m S"] | None) -> Float[Tensor, "R HD"]:
        """Attention over all that is in the cache."""
        keys, values = self._cache.view(0, max(self._cache.lengths) + self._guesses)
        return attend(query, keys, values, mask)


class FixedReader:
    """A ``Reader`` in a pass of fixed shape, as it can be recorded: where rows end is known on the device alone.

    It works on a reader's cache. Guesses are at each row's own slots. By torch's operators attention reads all slots,
    those that a node does not see masked; Triton's kernels read those that there are.
    """

    def __init__(self, network: Network, cache: Cache) -> None:
        self.network, self._cache = network, cache
        self._guesses = 0  # after the rows' ends
        self._bits: Tensor | None = None  # of the guesses that the last level sees

    def read(
        self, feature: Float[Tensor, "B W D"], tokens: Int[Tensor, "B W"], counts: Int[Tensor, "B"]
    ) -> Float[Tensor, "B 1 D"]:
        """``Reader.read``; the cache's lengths grow on the device only."""
        cache, spec, self._guesses = self._cache, self.network.spec, 0
        last = (counts - 1)[:, None]
        rows = last[:, :, None].expand(-1, -1, feature.shape[2])
        if self.follows(feature.shape[1]):
            after = self._ran(self.network.pairs(feature, tokens, cache, cache.capacity - 1), None)
            cache.length += counts
            return after.gather(1, rows)
        residual, beside = self.network.enter(feature, tokens)
        slots = cache.slots(feature.shape[1]).clamp_(max=cache.capacity - 1)
        if (states := self._by_kernels(residual, beside, slots, None)) is not None:
            cache.length += counts
            return states.gather(1, rows)
        heads = self._written(residual, beside, slots, slots)
        cache.length += counts
        query = heads[:, :, : spec.heads].flatten(2)
        query = query.gather(1, last[:, :, None].expand(-1, -1, query.shape[2])).unflatten(2, (spec.heads, -1))
        return self.network.leave(residual.gather(1, rows), self._mix(query, None))

    def guess(
        self,
        feature: Float[Tensor, "B M D"],
        tokens: Int[Tensor, "B M"],
        level: int,
        reach: Bool[Tensor, "b M g"] | None = None,
    ) -> Float[Tensor, "B M D"]:
        """See ``Reader.guess``."""
        nodes, start = tokens.shape[1], self._cache.length
        if self.follows(nodes) and (reach is not None or nodes == 1):
            pairs = self.network.pairs(feature, tokens, self._cache, self._last, level=level)
            after = self._ran(pairs, None if reach is None else reach.expand(len(tokens), -1, -1))
            self._guesses += nodes
            return after
        residual, beside = self.network.enter(feature, tokens)
        place = (start + level)[:, None].expand(-1, nodes)
        if reach is None:
            reach = torch.ones(1, nodes, self._guesses + nodes, dtype=torch.bool, device=tokens.device)
        reach = reach.expand(len(tokens), -1, -1)
        states = self._by_kernels(residual, beside, place, reach)
        if states is None:
            slots = start[:, None] + torch.arange(self._guesses, self._guesses + nodes, device=tokens.device)
            heads = self._written(residual, beside, slots.clamp_(max=self._cache.capacity - 1), place)
            states = self.network.leave(residual, self._mix(heads[:, :, : self.network.spec.heads], reach))
        self._guesses += nodes
        return states

    def follows(self, guesses: int) -> bool:
        """Whether kernels run passes up to so many more guesses from their tokens on."""
        kernels = self.network.triton
        return kernels is not None and self.network.makes_pairs and kernels.takes(self._guesses + guesses, True)

    def follow(
        self, feature: Float[Tensor, "B m D"], tokens: Int[Tensor, "B M"], level: int, source: Int[Tensor, "B M"] | None
    ) -> Float[Tensor, "B M D"]:
        """``guess`` for a level of a tree, of which each node sees its ancestors; where it ``follows``.

        Args:
            feature: after the nodes of the level before, or after the root.
            tokens: the guesses.
            level: guesses between each and the root.
            source: which node of the level before is the parent of each; None: the root.
        """
        above, earlier = None if source is None else self._bits, self._guesses
        guesses = {"level": level, "source": source, "above": above, "earlier": earlier}
        pairs = self.network.pairs(feature, tokens, self._cache, self._last, **guesses)
        states = self._ran(pairs, pairs.bits)
        self._bits, self._guesses = pairs.bits, earlier + tokens.shape[1]
        return states

    @property
    def _last(self) -> int:
        """The last position that any guess has."""
        return 2 * self._cache.capacity - 1

    def _ran(self, pairs: Entered, reach: Bool[Tensor, "B M g"] | Int[Tensor, "B M"] | None) -> Float[Tensor, "B M D"]:
        """The layer's output, with keys and values in the cache."""
        assert self.network.triton is not None
        where = (pairs.cos, pairs.sin, reach, self._cache, [Portion(0)])
        return self.network.triton.run(pairs.residual, *where, earlier=self._guesses, read=pairs.read)[0]

    def _by_kernels(
        self,
        residual: Float[Tensor, "B M D"],
        beside: Float[Tensor, "B M D"] | None,
        places: Int[Tensor, "B M"],
        reach: Bool[Tensor, "B M g"] | None,
    ) -> Float[Tensor, "B M D"] | None:
        """The layer's output, with keys and values in the cache; None: Triton does not run such a pass."""
        kernels = self.network.triton
        if kernels is None or not kernels.takes(self._guesses + residual.shape[1], True):
            return None
        where = (*self.network.rotary.gather(places), reach, self._cache, [Portion(0)])
        return kernels.run(residual, *where, earlier=self._guesses, beside=beside)[0]

    def _written(
        self,
        residual: Float[Tensor, "B M D"],
        beside: Float[Tensor, "B M D"] | None,
        slots: Int[Tensor, "B M"],
        places: Int[Tensor, "B M"],
    ) -> Float[Tensor, "B M H d"]:
        """The heads of pairs at their places; keys and values are in the cache."""
        spec, heads = self.network.spec, self.network.heads(residual, beside)
        cos, sin = self.network.rotary.gather(places)
        rotate_(heads[:, :, : spec.heads + spec.kv_heads], cos, sin)
        self._cache.write(0, heads[:, :, spec.heads :], slots)
        return heads

    def _mix(self, query: Float[Tensor, "B M H d"], reach: Bool[Tensor, "B M g"] | None) -> Float[Tensor, "R HD"]:
        """Attention over what rows hold and, of their guesses, those in ``reach``."""
        capacity, nodes = self._cache.capacity, query.shape[1]
        offset = torch.arange(capacity, device=query.device)[None] - self._cache.length[:, None]
        visible = (offset < 0)[:, None].expand(-1, nodes, -1)
        if reach is not None:
            guesses = reach.shape[2]
            inside = ((offset >= 0) & (offset < guesses))[:, None]
            columns = offset.clamp(0, guesses - 1)[:, None].expand(-1, nodes, -1)
            visible = torch.where(inside, reach.gather(2, columns), visible)
        mask = torch.zeros(visible.shape, dtype=query.dtype, device=query.device).masked_fill_(~visible, -torch.inf)
        return attend(query, *self._cache.view(0, capacity), mask)
