"""Training of translation models for method=diffusion: block diffusion, on the pairs of the other families.

One stack of layers reads the source and writes the translation in blocks of N tokens after it. A block begins
as masks; all its places see one another and everything before the block, so keys and values of finished blocks are
final (BD3-LM, Arriola et al. 2025, arXiv 2503.09573). The source is read in blocks, too, counted back from its end.

One pass trains all blocks of a text: after source and translation the network reads the translation again with masks in
it, and a block of that sees its own places, and of the text what is before the block. In each block k of N places are
masks, k uniform from 1 to N, and the loss is

    L = sum over blocks of N / k * sum over its masks of -log p(token)

per token, an upper bound on the negative log-likelihood (the form with a number in place of a ratio of masks: LLaDA,
Nie et al. 2025, arXiv 2502.09992, eq. 6). The last block is filled up with ends of text, which are learnt.

    python -m bench train method=masked_diffusion model=multi30k_4_4
    python -m bench model=multi30k_masked_diffusion_distilled dataset=multi30k method=diffusion
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from methods.base_models import bpe
from methods.base_models.translation import Judge, TranslationTraining
from methods.decoder import generate
from methods.engine.masked_lm import Denoising, MaskedLM
from methods.engine.sampling import Sampling
from methods.non_autoregressive.diffusion import Diffusion
from methods.training.interface import TrainingContext, require
from methods.training.trainer import Loss, attention_over_short_rows
from methods.training.translation import NONE, Pair, padded


@dataclass
class MaskedDiffusionTraining(TranslationTraining):
    """Trains a block diffusion model that translates.

    Args:
        layers: of the stack.
        block: N, places that are filled in together.
        width, inner, heads, vocabulary, positions, data, beams, validation, recipe: see ``TranslationTraining``;
            dropout is that of attention alone, as the layers have no other.

    Raises:
        ValueError: a number out of range.
    """

    description = "a block diffusion model that translates, with its tokenizer"
    searches: ClassVar[Sequence[tuple[str, int]]] = (("greedy", 1),)

    layers: int = 6
    block: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        require("at least 1", layers=self.layers, block=self.block)

    def model_name(self, corpus: str) -> str:
        """``multi30k_masked_diffusion``, ``multi30k_masked_diffusion_distilled``."""
        return f"{corpus}_masked_diffusion" + ("_distilled" if self.data == "distilled" else "")

    def network(self, tokens: int) -> Any:
        """See ``TranslationTraining``; its config says how it is to be read."""
        config = LlamaConfig(
            vocab_size=tokens,
            hidden_size=self.width,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            max_position_embeddings=2 * self.positions + self.block,
            attention_dropout=self.recipe.dropout,
            tie_word_embeddings=True,
            bos_token_id=None,
            pad_token_id=bpe.PAD_ID,
            eos_token_id=bpe.EOS_ID,
        )
        Denoising(bpe.MASK_ID, block_size=self.block, block_causal=True).put(config)
        network: Any = LlamaForCausalLM(config)
        network.generation_config = bpe.generation_config()
        return network

    def initialise(self, network: Any, tokenizer: PreTrainedTokenizerFast, context: TrainingContext) -> None:
        """Begin with the teacher's embedding where it has this vocabulary and width, as students do."""
        hf: Any = context.model.hf if context.model is not None else None
        ours = network.get_input_embeddings().weight
        if hf is None or context.tokenizer.get_vocab() != tokenizer.get_vocab():
            return
        theirs = hf.get_input_embeddings().weight
        if theirs.shape == ours.shape:
            with torch.no_grad():
                ours.copy_(theirs)

    def loss(self, network: Any, pairs: Sequence[Pair]) -> Callable[[list[int], int], Loss]:
        """The bound of the module's docstring, per token of the target with its ends of text."""

        def loss(rows: list[int], step: int) -> Loss:
            sources, targets = blocks_of([pairs[row] for row in rows], self.block, network.device)
            hidden, weights = random_masks(targets, self.block)
            with attention_over_short_rows(network.device):
                states = read_masked(network, sources, targets, hidden, self.block)
                logits, smoothing = network.lm_head(states).float(), self.recipe.label_smoothing
                wrong = F.cross_entropy(logits, targets[hidden], reduction="none", label_smoothing=smoothing)
            count = int((targets != NONE).sum())
            return (wrong * weights[hidden]).sum() / count, {"tokens": count}

        return loss

    def judge(
        self, tokenizer: PreTrainedTokenizerFast, pairs: Sequence[tuple[str, str]], context: TrainingContext
    ) -> Judge:
        """See ``TranslationTraining``."""
        return DiffusionJudge(tokenizer, pairs)

    def describe(
        self, network: Any, tokenizer: PreTrainedTokenizerFast, validation: Sequence[tuple[str, str]]
    ) -> dict[str, Any]:
        """BLEU on validation with one token per pass, the surest, in place of all above the threshold."""
        judge = DiffusionJudge(tokenizer, validation)
        bleu = judge.bleu_of_texts(judge.texts(network.float(), threshold=None))
        network.half()
        return {"validation_bleu_one_token_per_pass": round(bleu, 2)}


class DiffusionJudge(Judge):
    """See ``BleuJudge``, for a block diffusion model of transformers."""

    def texts(self, network: Any, beams: int = 1, **options: Any) -> list[str]:
        """Its translations of the sources, in their order; there is no beam search.

        Args:
            options: of ``Diffusion``.
        """
        target = MaskedLM.from_hf(network, linear="plain", keep_hf=True)
        assert isinstance(target, MaskedLM)
        decoder = Diffusion(target, Sampling(), **options)

        def write(sources: list[Int[Tensor, "_"]], limit: int) -> list[list[int]]:
            return generate(decoder, sources, limit, target.eos_ids)

        return self.write_all(write, target.max_positions, target.device)


def blocks_of(pairs: Sequence[Pair], block: int, device: torch.device) -> tuple[Int[Tensor, "B S"], Int[Tensor, "B T"]]:
    """Padded sources, and targets whose last block is filled up with their last token, the end of text."""
    targets = [target + [target[-1]] * (-len(target) % block) for _, target in pairs]
    return padded([source for source, _ in pairs], device), padded(targets, device)


def random_masks(targets: Int[Tensor, "B T"], block: int) -> tuple[Bool[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Which places are masks, from one to all of each block, and the weight of each place: N / k."""
    rows, width = targets.shape
    shape = (rows, width // block, block)
    count = torch.randint(1, block + 1, (*shape[:2], 1), device=targets.device)
    rank = torch.rand(shape, device=targets.device).argsort(-1).argsort(-1)
    hidden = (rank < count).view(rows, width) & (targets != NONE)
    return hidden, (block / count).expand(shape).reshape(rows, width)


def read_masked(
    network: Any,
    sources: Int[Tensor, "B S"],
    targets: Int[Tensor, "B T"],
    hidden: Bool[Tensor, "B T"],
    block: int,
) -> Float[Tensor, "n D"]:
    """States before the output matrix at the masks of all blocks; each block is read after the text before it."""
    mask = network.config.denoising["mask_id"]
    lengths = (sources != NONE).sum(1, keepdim=True)
    read, written = (torch.arange(side.shape[1], device=side.device) for side in (sources, targets))
    clean = targets.clamp(min=0)
    states = network.model(
        input_ids=torch.cat([sources.clamp(min=0), clean, clean.masked_fill(hidden, mask)], 1),
        attention_mask=block_attention(sources != NONE, targets != NONE, block),
        position_ids=torch.cat([read.expand(len(sources), -1), lengths + written, lengths + written], 1),
        use_cache=False,
    ).last_hidden_state
    found: Tensor = states[:, -targets.shape[1] :][hidden]
    return found


def block_attention(sources: Bool[Tensor, "B S"], targets: Bool[Tensor, "B T"], block: int) -> Bool[Tensor, "B 1 n n"]:
    """Which of source, translation, and translation with masks each of them sees; where there is no token, itself.

    Args:
        sources, targets: where there are tokens.
    """
    places = [torch.arange(side.shape[1], device=side.device) for side in (sources, targets)]
    behind = places[0] - sources.sum(1, keepdim=True)  # negative: places before the end of the source
    number = torch.cat([behind, *2 * [places[1].expand(len(targets), -1)]], 1).div(block, rounding_mode="floor")
    masked = torch.arange(number.shape[1], device=number.device) >= sources.shape[1] + targets.shape[1]
    of, at = number[:, :, None], number[:, None]
    text = ~masked & torch.where(masked[:, None], at < of, at <= of)
    seen = text | (masked[:, None] & masked & (at == of))
    present = torch.cat([sources, targets, targets], 1)
    itself = torch.eye(number.shape[1], dtype=torch.bool, device=number.device)
    return ((seen & present[:, None]) | itself)[:, None]
