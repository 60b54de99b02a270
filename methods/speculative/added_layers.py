"""A decoder layer beside those of the target: it reads states of the target, with a cache of its own.

Hydra++ puts such a layer in front of its heads, and models with multi-token prediction ship one as their drafter. The
layer's pass is the engine's own, so rows of different lengths and all proven layers work as in the target.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from methods.drafting import Context
from methods.engine.causal_layers import Layer, SparseFeedForward
from methods.engine.causal_lm import CausalLM
from methods.engine.host_copies import from_host
from methods.engine.kv_cache import Cache
from methods.speculative.draft_layers import Unread


class AddedLayer(CausalLM):
    """One layer, with the target's positions and sizes of heads.

    Args:
        target: whose states it reads.
        layer: its weights.
        plain: scores are divided by the root of the head's size and updates added as they are, as in a Llama layer;
            else both are as in the target.
    """

    def __init__(self, target: CausalLM, layer: Layer, plain: bool = False) -> None:  # a view, as CausalLM.skip makes
        self.__dict__.update(target.__dict__)
        self.layers, self._fused, self._key_value = [layer], None, {}
        self.skipped_attention = self.skipped_mlp = frozenset()
        self.window = layer.attention.window
        if plain:
            self._scale, self._residual = self.head_dim**-0.5, 1.0

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's matrices."""
        experts = sum(mlp.experts.nbytes for layer in self.layers if isinstance(mlp := layer.mlp, SparseFeedForward))
        return sum(product.nbytes for product in self._products()) + experts

    def read(self, states: Float[Tensor, "B W D"], cache: Cache) -> Float[Tensor, "B W D"]:
        """The layer's output for states after the end of each row of a cache, whose lengths do not change."""
        places = torch.zeros(states.shape[:2], dtype=torch.long, device=states.device)
        state = self.begin(places, None, cache)
        state.hidden = states
        self.run(state, (0,))
        return state.hidden


class StateReader:
    """The added layer's states over a text: those of the target that passes committed are read in turn.

    A row at its limit has nothing new; what is returned for it is never used.

    Attributes:
        cache: the layer's keys and values, by the place of the state they are made of.
    """

    def __init__(self, layer: AddedLayer, batch: int, capacity: int) -> None:
        self.layer, self.cache = layer, layer.new_cache(batch, capacity)
        self.unread = Unread(batch)

    @staticmethod
    def capacity(prompts: Sequence[list[int]], limit: int, nodes: int) -> int:
        """Slots for prompts, what is written, and a read of as much at once (``Unread``)."""
        return max(map(len, prompts)) + 2 * (limit + nodes + 1)

    def continue_from(self, other: StateReader, most: int) -> int:
        """Begin with the first states, at most so many, that another reader has read; how many. Both have one row."""
        read = min(most, other.cache.lengths[0])
        self.cache.continue_from(other.cache, read)
        self.unread = Unread(1, read)
        return read

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep only some rows, in this order."""
        self.cache.select(rows)
        self.unread.keep_rows(rows)

    def note(self, context: Context) -> None:
        """Keep the states that the last pass committed."""
        self.unread.note(context, [context.output.hidden])

    def advance(self, states: Float[Tensor, "B W D"], counts: Sequence[int]) -> Float[Tensor, "B D"]:
        """Commit the first ``counts[b]`` states of each row; the layer's output for the last of them."""
        read = self.layer.read(states, self.cache)
        self.cache.advance(list(counts))
        last = from_host(counts, read.device).sub_(1).clamp_(min=0)
        return read[torch.arange(len(counts), device=read.device), last]
