"""A masked diffusion language model: the layers of ``CausalLM`` under an attention that looks both ways.

The network reads a text in which some tokens are the mask, and predicts each of them. In its plain form every position
sees every other (LLaDA, Nie et al. 2025, arXiv 2502.09992; Dream, Ye et al. 2025, arXiv 2508.15487; MDLM, Sahoo et al.
2024, arXiv 2406.07524). In a block diffusion model (BD3-LM, Arriola et al. 2025, arXiv 2503.09573) a position sees its
own block and those before it, so that keys and values of finished blocks never change.

Slots of the cache are positions of the text. A pass writes those it covers and may see slots after them, which an
earlier pass has written. Tests prove the logits equal to transformers' own forward under the same mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from methods.engine.causal_lm import CausalLM, Pass, UnsupportedModel
from methods.engine.kv_cache import Cache
from methods.engine.linear import LinearForm
from methods.engine.token_tree import Nodes, Parents


@dataclass(frozen=True, slots=True)
class Denoising:
    """How to read a network with the layers of a causal model as a diffusion model.

    Attributes:
        mask_id: the token that stands for an unknown one.
        shifted: a position predicts the token after it, as in the autoregressive model that this one was made from
            (Dream).
        block_size: tokens that are decoded together; None: the whole answer.
        block_causal: attention ends with the block a position is in.
        blocks_from: where blocks are counted from, as in the model's training: the beginning of the text, so that the
            end of a prompt shares its block with the beginning of the answer, or the beginning of the answer.

    Raises:
        ValueError: a block size below 1, or attention in blocks without one.
    """

    mask_id: int
    shifted: bool = False
    block_size: int | None = None
    block_causal: bool = False
    blocks_from: Literal["text", "answer"] = "answer"

    def __post_init__(self) -> None:
        if (self.block_size is None and self.block_causal) or (self.block_size is not None and self.block_size < 1):
            raise ValueError(
                "block_size must be at least 1, or null where attention does not end with the block, got "
                f"{self.block_size} with block_causal={self.block_causal}. Set model.block_size."
            )

    def put(self, config: PretrainedConfig) -> None:
        """Write it into a model's config, from which ``MaskedLM`` reads it."""
        config.denoising = {name: getattr(self, name) for name in self.__slots__}


def is_masked(config: PretrainedConfig) -> bool:
    """Whether a model is to be read as a diffusion model."""
    return getattr(config, "denoising", None) is not None


class MaskedLM(CausalLM):
    """A diffusion model over a static cache. Build it with ``from_hf`` from a model whose config holds a ``Denoising``.

    Attributes:
        denoising: how it is read.
    """

    def __init__(self, model: PreTrainedModel, linear: LinearForm = "auto", keep_hf: bool = False) -> None:
        super().__init__(model, linear, keep_hf)
        if self.window is not None:
            raise UnsupportedModel(
                f"A diffusion model must have no sliding window, got one of {self.window} tokens. Choose another model."
            )
        config: Any = self.config
        self.denoising = Denoising(**config.denoising)

    def begin(
        self, tokens: Nodes, parents: Parents, cache: Cache, levels: int | None = None, end: int | None = None
    ) -> Pass:
        """A pass whose nodes see the whole cache and one another."""
        assert parents is None and end is None, "a diffusion model scores no trees, and has no passes of fixed shape"
        return self.lay(tokens, cache, [length + tokens.shape[1] for length in cache.lengths], [0] * len(tokens))

    def lay(self, tokens: Int[Tensor, "B M"], cache: Cache, ends: Sequence[int], origins: Sequence[int]) -> Pass:
        """Embed the nodes of a pass, at the slots after the cache's lengths.

        Args:
            ends: per row, slots that exist for its nodes; a row's nodes at or after its end are padding.
            origins: per row, a position at which a block begins, for attention that ends with the block.
        """
        nodes, uniform, end = tokens.shape[1], cache.uniform, max(ends)
        assert max(cache.lengths) + nodes <= cache.capacity >= end, f"{nodes} nodes do not fit into the cache"
        self._rope.reserve(max(cache.lengths) + nodes)
        slots = cache.slots(nodes)
        mask = self._mask(slots, ends, origins)
        cos, sin = self._rope.gather(slots[:1] if uniform and mask is None else slots)
        return Pass(self.embed(tokens), cos, sin, mask, None if uniform else slots, end, cache)

    def _mask(
        self, slots: Int[Tensor, "B M"], ends: Sequence[int], origins: Sequence[int]
    ) -> Float[Tensor, "B 1 MG S"] | None:
        """None where every node sees every slot."""
        end, size = max(ends), self.denoising.block_size
        if not self.denoising.block_causal and min(ends) == end:
            return None
        limit, origin = (torch.tensor(rows, device=self.device)[:, None] for rows in (list(ends), list(origins)))
        reach = limit.expand_as(slots)
        if self.denoising.block_causal:
            assert size is not None
            block = torch.div(slots - origin, size, rounding_mode="floor")
            reach = torch.minimum(reach, origin + (block + 1) * size)
        hidden = torch.arange(end, device=self.device) >= reach[:, :, None]
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, -torch.inf)
        return mask.repeat_interleave(self.heads // self.kv_heads, 1)[:, None]

    @torch.inference_mode()
    def denoise(
        self,
        tokens: Int[Tensor, "B M"],
        cache: Cache,
        ends: Sequence[int],
        origins: Sequence[int],
        wanted: Int[Tensor, "B W"],
    ) -> Float[Tensor, "B W V"]:
        """One pass; logits of the tokens at some of its nodes. The mask itself is never one of them.

        The pass begins at the cache's lengths, which do not change; with ``shifted`` it must begin one node before the
        first that is wanted.

        Args:
            ends, origins: see ``lay``.
            wanted: columns of the pass.
        """
        state = self.lay(tokens, cache, ends, origins)
        self.run(state, range(self.n_layers))
        columns = wanted - int(self.denoising.shifted)
        hidden = state.hidden.gather(1, columns[:, :, None].expand(-1, -1, self.hidden_size))
        logits = self.head(self.norm(hidden))
        logits[..., self.denoising.mask_id] = -torch.inf
        return logits
