"""Training of translation models for method=self_diffusion: one network that writes in two ways.

In causal mode it reads a text and writes the next token. In masked-block mode it reads the text up to an anchor and
then masks, and writes at the place of every mask the token that follows it. One pass trains both (TiDAR, Liu et al.
2025, arXiv 2511.08923, sec. 3.1): after the text the decoder reads a mask for every place again. These masks are cut
into blocks of N at a random offset; one sees the text up to the anchor, which is the place in front of its block, and
the masks of its block up to itself. Every mask is learnt, so the losses have n and n - 1 terms:

    L = L_next + w L_block

``begin=model`` starts with the weights of a teacher and learns its translations, as ``method=exit_teacher`` does.

    python -m bench train method=self_diffusion_teacher model=multi30k_4_4
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from methods.base_models import bpe
from methods.base_models.translation import ContinuedTraining, Judge, decoder_input
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.speculative.self_diffusion import BLOCK, MASK, SelfDiffusion
from methods.training.interface import require
from methods.training.losses import cross_entropy
from methods.training.trainer import Loss, attention_over_short_rows
from methods.training.translation import NONE, Pair, padded


@dataclass
class SelfDiffusionTeacherTraining(ContinuedTraining):
    """Trains a translation model with a causal and a masked-block mode.

    Args:
        block: N, masks of a block.
        block_weight: w, of the loss of the masks, where that of the next token is 1.
        begin, layers, width, inner, heads, vocabulary, positions, data, beams, validation, recipe: see
            ``ContinuedTraining``.

    Raises:
        ValueError: a number out of range.
    """

    description = "a translation model that drafts blocks for itself, with its tokenizer"

    block: int = 4
    block_weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require("at least 1", block=self.block)
        require("above 0", block_weight=self.block_weight)

    def model_name(self, corpus: str) -> str:
        """``multi30k_4_4_distilled_self_diffusion``."""
        return f"{super().model_name(corpus)}_self_diffusion"

    def network(self, tokens: int) -> Any:
        """See ``TeacherTraining``; its config says that it can fill in blocks."""
        network = super().network(tokens)
        setattr(network.config, BLOCK, self.block)
        setattr(network.config, MASK, bpe.MASK_ID)
        return network

    def loss(self, network: Any, pairs: Sequence[Pair]) -> Callable[[list[int], int], Loss]:
        """Smoothed cross-entropy per token in either mode."""
        smoothing = self.recipe.label_smoothing

        def loss(rows: list[int], step: int) -> Loss:
            with attention_over_short_rows(network.device):
                offset = int(torch.randint(self.block, ()))
                sides = read_twice(network, [pairs[row] for row in rows], self.block, offset)
                following, block = (cross_entropy(network.lm_head(s), wanted, smoothing) for s, wanted in sides)
            numbers: dict[str, Tensor | float | int] = {
                "next_loss": following.detach(),
                "block_loss": block.detach(),
                "tokens": len(sides[0][1]),
            }
            return {"next": following, "block": self.block_weight * block}, numbers

        return loss

    def describe(
        self, network: Any, tokenizer: PreTrainedTokenizerFast, validation: Sequence[tuple[str, str]]
    ) -> dict[str, Any]:
        """See ``TeacherTraining``: tokens per pass after the first one when it drafts for itself, on validation."""
        target = Seq2SeqLM.from_hf(network.float(), linear="plain", keep_hf=True)
        assert isinstance(target, Seq2SeqLM)
        found = Judge(tokenizer, validation).of_decoder(SelfDiffusion(target, Sampling()), target)
        network.half()
        return {"validation_bleu_self_diffusion": found["bleu"], "tokens_per_step": found["tokens_per_step"]}


def read_twice(
    network: Any, pairs: Sequence[Pair], block: int, offset: int
) -> tuple[tuple[Float[Tensor, "n D"], Int[Tensor, "n"]], tuple[Float[Tensor, "m D"], Int[Tensor, "m"]]]:
    """States before the output matrix and the tokens wanted of them: of the texts, and of masks at their places.

    Args:
        offset: places by which the first block is shorter, below ``block``.
    """
    sources, targets = (padded([pair[side] for pair in pairs], network.device) for side in (0, 1))
    width = targets.shape[1]
    read = decoder_input(network, targets)
    masks = torch.full_like(read[:, 1:], getattr(network.config, MASK))
    places = torch.cat([torch.arange(width), torch.arange(1, width)]).to(network.device)
    with _placed(network.model.decoder.embed_positions, places):
        states = network.model(
            input_ids=sources.clamp(min=0),
            attention_mask=sources != NONE,
            decoder_input_ids=torch.cat([read, masks], 1),
            decoder_attention_mask=block_attention(width, block, offset, network.device),
            use_cache=False,
        ).last_hidden_state
    wanted = torch.cat([targets, targets[:, 1:]], 1)
    text, masked = ((states[:, side], wanted[:, side]) for side in (slice(width), slice(width, None)))
    return tuple((side[tokens != NONE], tokens[tokens != NONE]) for side, tokens in (text, masked))  # type: ignore[return-value]


def block_attention(width: int, block: int, offset: int, device: torch.device) -> Bool[Tensor, "1 1 n n"]:
    """Which of a text of ``width`` tokens, and of the masks at all its places but the first, each of them sees."""
    text, places = torch.arange(width), torch.arange(1, width)
    number = (places - 1 + offset) // block
    anchors = (number * block - offset).clamp(min=0)
    together = (number[:, None] == number) & (places[:, None] >= places)
    causal = torch.cat([text[:, None] >= text, torch.zeros(width, width - 1, dtype=torch.bool)], 1)
    masked = torch.cat([anchors[:, None] >= text, together], 1)
    return torch.cat([causal, masked])[None, None].to(device)


@contextmanager
def _placed(table: nn.Module, places: Int[Tensor, "n"]) -> Iterator[None]:
    """Within it, transformers' decoder reads its tokens at these places instead of 0, 1, 2, ..."""

    def other(module: nn.Module, given: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return given, named | {"position_ids": places}

    handle = table.register_forward_pre_hook(other, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
