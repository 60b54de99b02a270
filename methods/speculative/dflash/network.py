"""The network of DFlash and DSpark in decoding: one pass over a block, over a small cache of its own.

Layers of the target's kind read the last committed token, the anchor, and masked places after it. Each place sees the
whole block and the features of all committed tokens before the anchor: a feature is the norm of a mixture of the
target's states after some layers, and each layer makes keys and values of it with the projections that it uses for the
block (Chen et al. 2026, arXiv 2602.06036, sec. 4). Those keys are made once and kept.

The heads of DSpark (Cheng et al. 2026, arXiv 2607.05147) are small: the Markov head adds to the logits of a place a
product of two matrices that depends on the token before it, and the confidence head says how likely a place's token is
kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from methods.engine.causal_layers import norm_heads
from methods.engine.causal_lm import CausalLM, rotate_
from methods.engine.fused_layers import Portion
from methods.engine.kv_cache import Cache
from methods.engine.sampling import in_float
from methods.speculative.dflash.checkpoint import CONFIDENCE, MARKOV_OUTPUT, MARKOV_ROWS, MASK, Part
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


class Network:
    """The network of a target, its weights in the form of ``CausalLM.draft_linear``."""

    def __init__(self, target: CausalLM, part: Part) -> None:
        self.spec, spec = part.spec, part.spec
        weights = Weights(target, part.tensors, spec.rms_eps)
        self.device, self.dtype = target.device, target.dtype
        self.vocabulary = part.vocabulary.to(target.device)
        self.rotary = rotary_table(spec, target.device, target.dtype)
        self._embed = weights.embedding()
        mask = weights.get(MASK)
        self._mask = mask if mask is not None else self._embed(torch.tensor(spec.mask, device=target.device))
        self._fc, self._feature_norm = weights.linear("fc"), weights.norm("hidden_norm")
        names = [spec.layer(number) for number in range(spec.draft_layers)]
        self.layers = [weights.layer(name, norm_heads=spec.qk_norm) for name in names]
        self.fused, self.triton = kernels_of(self.layers, spec), triton_of(target, self.layers, spec)
        self._key_value = weights.linear(*(f"{name}.self_attn.{part}_proj" for name in names for part in "kv"))
        norms = [weights.tensor(f"{name}.self_attn.k_norm.weight") for name in names if spec.qk_norm]
        self._key_norms = torch.stack(norms)[:, None] if norms else None
        self._last_norm = weights.norm("norm")
        self._score, own = weights.output(self.vocabulary)
        self._markov_rows = weights.get(MARKOV_ROWS)
        self._markov = weights.linear(MARKOV_OUTPUT.removesuffix(".weight")) if spec.markov_rank else None
        self._confidence = weights.linear(CONFIDENCE) if spec.confidence else None
        heads = sum(part.nbytes for part in (self._markov_rows, self._markov, self._confidence) if part is not None)
        layers = sum(bytes_of(layer) for layer in self.layers)
        self.nbytes = {
            "draft_network": self._fc.nbytes + self._key_value.nbytes + layers,
            "draft_output_matrix": own,
            "draft_heads": heads,
        }

    def inputs(self, anchors: Int[Tensor, "B"]) -> Float[Tensor, "B b D"]:
        """Inputs of a block: the embedding of the anchor, and what masked places have."""
        masks = self._mask.expand(len(anchors), self.spec.block - 1, -1)
        return torch.cat([self._embed(anchors)[:, None], masks], dim=1)

    def memory(self, taps: Sequence[Float[Tensor, "B W D"]]) -> Float[Tensor, "L B W G d"]:
        """Key and value heads that each layer makes of the features of some places, before the rotary positions."""
        batch, width = taps[0].shape[:2]
        features = self._feature_norm(self._fc(torch.cat(list(taps), dim=-1).flatten(0, 1)))
        spec = self.spec
        heads = self._key_value(features).view(batch, width, spec.draft_layers, 2 * spec.kv_heads, spec.head_dim)
        if self._key_norms is not None:
            keys = heads[:, :, :, : spec.kv_heads]
            keys.copy_(F.rms_norm(keys, keys.shape[-1:], eps=spec.rms_eps).mul_(self._key_norms))
        return heads.permute(2, 0, 1, 3, 4)

    def logits(self, hidden: Float[Tensor, "B M D"]) -> Float[Tensor, "B M v"]:
        """Logits over the draft vocabulary, without what the Markov head adds."""
        return self._score(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)

    def out(self, rows: Float[Tensor, "R D"]) -> Float[Tensor, "R D"]:
        """What output matrix and confidence head read."""
        return self._last_norm(rows)

    def bias(self, before: Int[Tensor, "B M"]) -> Float[Tensor, "B M v"] | None:
        """What the Markov head adds to the logits after tokens; None: there is no such head."""
        if self._markov is None or self._markov_rows is None:
            return None
        rows = F.embedding(before.flatten(), self._markov_rows)
        return self._markov(rows).view(*before.shape, -1)

    def confidence(self, hidden: Float[Tensor, "B M D"], before: Int[Tensor, "B M"]) -> Float[Tensor, "B M"] | None:
        """How likely the tokens of places are kept, given those before them; None: there is no such head.

        A probability does not depend on the place's own token.
        """
        if self._confidence is None:
            return None
        if self._markov_rows is not None and self.spec.confidence_reads_markov:
            hidden = torch.cat([hidden, F.embedding(before, self._markov_rows)], dim=-1)
        return in_float(self._confidence(hidden.flatten(0, 1))).view(hidden.shape[:2]).sigmoid()


class Reader:
    """The network over a cache of its own: features of committed tokens, at each row's own slots from 0.

    A block is overwritten by what is read next. Without kernels, the blocks of all rows are at the same slots, after
    the longest row.
    """

    def __init__(self, network: Network, batch: int, capacity: int) -> None:
        self.network, spec = network, network.spec
        layers = range(spec.draft_layers)
        self._cache = Cache(
            layers, batch, capacity, spec.kv_heads, spec.head_dim, dtype=network.dtype, device=network.device
        )
        self._portions = [Portion(layer) for layer in layers]
        self._whole = torch.ones(batch, spec.block, spec.block, dtype=torch.bool, device=network.device)

    @property
    def cache(self) -> Cache:
        """Keys and values of the features."""
        return self._cache

    def reserve(self, positions: int) -> None:
        """Extend the table of positions."""
        self.network.rotary.reserve(positions)

    @property
    def lengths(self) -> list[int]:
        """Committed features of each row."""
        return self._cache.lengths

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep only some rows, in this order."""
        self._cache.select(rows)

    def read(self, taps: Sequence[Float[Tensor, "B W D"]], counts: Sequence[int]) -> None:
        """Commit the features of the first ``counts[b]`` places of each row, from the target's states there."""
        cache, rotary, width = self._cache, self.network.rotary, taps[0].shape[1]
        memory = self.network.memory(taps)
        slots = slots_of(cache, width)
        if slots is None:
            cos, sin = rotary.slice(cache.lengths[0], cache.lengths[0] + width)
        else:
            rotary.reserve(cache.capacity)
            cos, sin = rotary.gather(slots)
        for layer, heads in enumerate(memory):
            rotate_(heads[:, :, : cache.kv_heads], cos, sin)
            cache.write(layer, heads, slots)
        cache.advance(counts)

    def block(self, anchors: Int[Tensor, "B"]) -> Float[Tensor, "B n D"]:
        """What output matrix and heads read at the places of a block that draft tokens, in order.

        Args:
            anchors: last committed tokens; the features of all others have been read.
        """
        network, spec, inputs, turn = self.network, self.network.spec, self.network.inputs(anchors), self._turn()
        if network.fused is None:
            rows = self._by_operators(inputs, *turn)
        else:
            rows, _ = network.fused.run(inputs, *turn, self._whole[: len(anchors)], self._cache, self._portions)
        drafting = rows[:, spec.block - spec.drafted :]
        return network.out(drafting.flatten(0, 1)).view(drafting.shape)

    def _by_operators(self, inputs: Float[Tensor, "B b D"], cos: Tensor, sin: Tensor) -> Float[Tensor, "B b D"]:
        cache, block = self._cache, self.network.spec.block
        start = max(cache.lengths)
        end = start + block
        assert end <= cache.capacity, f"a block up to {end} in a cache of {cache.capacity}"
        mask = hidden_padding(cache, self.network.dtype)
        mask = None if mask is None else F.pad(mask, (0, block))

        def write(layer: int, new: Float[Tensor, "B b G d"]) -> None:
            cache.store[layer][:, start:end] = new

        return through_layers(self.network, inputs, (cos, sin), cache, write, end, mask)

    def _turn(self) -> tuple[Tensor, Tensor]:
        cache, rotary, block = self._cache, self.network.rotary, self.network.spec.block
        if cache.uniform:
            return rotary.slice(cache.lengths[0], cache.lengths[0] + block)
        rotary.reserve(max(cache.lengths) + block)
        return rotary.gather(cache.slots(block))


class FixedReader:
    """A ``Reader`` in a pass of fixed shape, as it can be recorded: where rows end is known on the device alone.

    It works on a reader's cache. A block is at each row's own slots. By torch's operators attention reads all slots,
    those after the block masked; Triton's kernels read those that there are.
    """

    def __init__(self, network: Network, cache: Cache) -> None:
        self.network, self._cache = network, cache

    def read(self, taps: Sequence[Float[Tensor, "B W D"]], counts: Int[Tensor, "B"]) -> None:
        """``Reader.read``; the cache's lengths grow on the device only."""
        cache, memory = self._cache, self.network.memory(taps)
        slots = cache.slots(taps[0].shape[1]).clamp_(max=cache.capacity - 1)
        cos, sin = self.network.rotary.gather(slots)
        for layer, heads in enumerate(memory):
            rotate_(heads[:, :, : cache.kv_heads], cos, sin)
            cache.write(layer, heads, slots)
        cache.length += counts

    def block(self, anchors: Int[Tensor, "B"]) -> Float[Tensor, "B n D"]:
        """See ``Reader.block``."""
        network, spec, cache = self.network, self.network.spec, self._cache
        slots = cache.slots(spec.block).clamp_(max=cache.capacity - 1)
        inputs, turn = network.inputs(anchors), network.rotary.gather(slots)
        if network.triton is not None and network.triton.takes(spec.block, True):
            whole = torch.ones(len(anchors), spec.block, spec.block, dtype=torch.bool, device=slots.device)
            portions = [Portion(layer) for layer in range(spec.draft_layers)]
            return self._out(network.triton.run(inputs, *turn, whole, cache, portions)[0])
        places = torch.arange(cache.capacity, device=slots.device)
        hidden = (places >= cache.length[:, None] + spec.block)[:, None]
        mask = torch.zeros(hidden.shape, dtype=network.dtype, device=slots.device).masked_fill_(hidden, -torch.inf)

        def write(layer: int, new: Float[Tensor, "B b G d"]) -> None:
            cache.write(layer, new, slots)

        return self._out(through_layers(network, inputs, turn, cache, write, cache.capacity, mask))

    def _out(self, rows: Float[Tensor, "B b D"]) -> Float[Tensor, "B n D"]:
        drafting = rows[:, self.network.spec.block - self.network.spec.drafted :]
        return self.network.out(drafting.flatten(0, 1)).view(drafting.shape)


def through_layers(
    network: Network,
    inputs: Float[Tensor, "B b D"],
    turn: tuple[Tensor, Tensor],
    cache: Cache,
    write: Callable[[int, Float[Tensor, "B b G d"]], None],
    end: int,
    mask: Float[Tensor, "B 1 S"] | None,
) -> Float[Tensor, "B b D"]:
    """A block after all layers, by torch's operators.

    Args:
        turn: cosines and sines of its places.
        write: puts its keys and values of a layer into the cache.
        end: slots that attention reads.
        mask: added to the scores.
    """
    spec, rows = network.spec, inputs.flatten(0, 1)
    for number, layer in enumerate(network.layers):
        attention = layer.attention
        read = rows if attention.norm is None else attention.norm(rows)
        heads = norm_heads(attention, attention.qkv(read).view(*inputs.shape[:2], -1, spec.head_dim), spec.kv_heads)
        rotate_(heads[:, :, : spec.heads + spec.kv_heads], *turn)
        write(number, heads[:, :, spec.heads :])
        rows = after_attention(layer, rows, attend(heads[:, :, : spec.heads], *cache.view(number, end), mask))
    return rows.view(inputs.shape)
