"""Translation models: teachers, and the autoregressive baseline of the encoder-decoder track.

A Transformer (Vaswani et al. 2017, arXiv 1706.03762) as transformers' ``PegasusForConditionalGeneration``: pre-norm,
sinusoidal positions, one embedding for both languages and the output. Post-norm, as in the original and in Marian,
needs a longer training: validation BLEU 15.8 after 2800 steps (rate 1e-3), against 23.7 after 625. ``layers`` are those
of encoder and decoder: 4-4 is the teacher; a deep encoder with a decoder of one layer, 6-1 or 12-1, is the strong
autoregressive baseline (Kasai et al. 2021, arXiv 2006.10369). Label smoothing and warm-up are as in the original; then
the rate falls linearly to zero, and the weights of the best checkpoints by validation BLEU are averaged.

``method=exit_teacher`` trains one for early exit: CALM's weighted loss over all layers of the decoder, or FREE's over a
shallow exit and the last layer with layerwise distillation (``methods.training.layer_losses``). Every layer is then
read by the output matrix itself (``method.head=lens``), and the card says how good each one is. It may start with the
weights of an ordinary teacher (``begin=model``), as both papers start with a trained T5.

``data=distilled`` learns the translations of another model (``model=``); the vocabulary is that of the references, so
that all models of one corpus can draft for each other.

Published: 41.02 on Multi30k en-de test2016 (4-4, width 128, 130 epochs, beam 5; lower-cased and tokenised, which is
about 40.5 here). Only sacreBLEU on detokenised, cased text is reported here.

    python -m bench train method=teacher corpus=multi30k
    python -m bench train method=teacher corpus=multi30k 'train.layers=[6,1]' train.data=distilled model=multi30k_4_4
    python -m bench train method=exit_teacher corpus=multi30k model=multi30k_4_4
    python -m bench model=multi30k_4_4 dataset=multi30k method=prompt_lookup
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PegasusConfig, PegasusForConditionalGeneration, PreTrainedTokenizerFast

from methods.base_models import bpe
from methods.engine.generation import translate
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.training.distillation import translations
from methods.training.exit_quality import judge, quality, summary
from methods.training.interface import Trainable, TrainingContext, require
from methods.training.layer_losses import Exits, LayerLoss, collected, make_loss
from methods.training.losses import cross_entropy
from methods.training.trainer import Loss, attention_over_short_rows, discard
from methods.training.translation import NONE, BleuJudge, Pair, TranslationConfig, padded, split, train_on_pairs

Begin = Literal["random", "model"]
_GROUP = 128  # pairs read at once
_COMPARED = 1000  # training pairs that are translated after the training
MOST_MEMORY = 8.0  # BLEU


@dataclass
class TranslationTraining(Trainable):
    """Trains a model that translates, of any shape, with the vocabulary of its corpus.

    Args:
        width: of the states.
        inner: units of the feed-forward layers.
        heads: of each attention.
        vocabulary: most tokens of both languages together.
        positions: longest source and longest target, in tokens; longer pairs are left out.
        data: learn the references, or the translations of a teacher.
        beams: of that teacher; 1 is greedy.
        validation: corpus of pairs for validation; None: that of the corpus (``NAME_val``), else every thirtieth pair.
        recipe: of the training.

    Attributes:
        searches: names of decodings whose BLEU is in the card, and their beams.

    Raises:
        ValueError: a number out of range.
    """

    makes = "model"
    learns_from = "pairs"
    description = "a translation model with its tokenizer"
    searches: ClassVar[Sequence[tuple[str, int]]] = (("greedy", 1), ("beam5", 5))
    duration = "an hour or two on two CPU cores for Multi30k, minutes on a GPU"
    corpus = "multi30k"

    width: int = 256
    inner: int = 512
    heads: int = 4
    vocabulary: int = 8000
    positions: int = 256
    data: Literal["raw", "distilled"] = "raw"
    beams: int = 5
    validation: str | None = None
    recipe: TranslationConfig = field(default_factory=TranslationConfig)

    def __post_init__(self) -> None:
        counts = {"width": self.width, "inner": self.inner, "heads": self.heads, "positions": self.positions}
        require("at least 1", **counts, beams=self.beams)
        require_multiple(self.width, 2 * self.heads)

    @property
    def needs_model(self) -> bool:
        """See ``Trainable``."""
        return self.data == "distilled"

    def fit(self, context: TrainingContext) -> dict[str, Any]:
        """See ``Trainable``."""
        train, validation = split(context)
        tokenizer = bpe.learn(chain.from_iterable(train), self.vocabulary, self.positions)
        learnt = self._distilled(context, train) if self.data == "distilled" else train
        pairs, judge = self._encode(tokenizer, learnt), self.judge(tokenizer, validation, context)
        torch.manual_seed(context.seed)
        network = self.network(len(tokenizer)).to(context.device)
        self.initialise(network, tokenizer, context)
        self.prepare(network, pairs, context)
        loss = self.loss(network, pairs)
        facts = train_on_pairs(network, pairs, self.recipe, context, loss, lambda: {"bleu": judge.bleu(network)})
        facts |= {f"validation_bleu_{name}": round(judge.bleu(network, beams), 2) for name, beams in self.searches}
        seen = train[:: max(1, len(train) // _COMPARED)][:_COMPARED]  # references, whatever it learnt
        facts |= memory_of(network, self.judge(tokenizer, seen, context), judge)
        network.half()
        facts |= self.describe(network, tokenizer, validation)
        network.save_pretrained(context.output)
        tokenizer.save_pretrained(context.output)
        discard(context.output)
        return facts | {"pairs_left_out": len(learnt) - len(pairs), "vocabulary": len(tokenizer)}

    @abstractmethod
    def network(self, tokens: int) -> Any:
        """With random weights, for a vocabulary of so many tokens; padding and mask are never written."""

    @abstractmethod
    def loss(self, network: Any, pairs: Sequence[Pair]) -> Callable[[list[int], int], Loss]:
        """The loss of some of the pairs, by their numbers and that of the step."""

    def initialise(self, network: Any, tokenizer: PreTrainedTokenizerFast, context: TrainingContext) -> None:
        """Change the initial weights."""

    def prepare(self, network: Any, pairs: Sequence[Pair], context: TrainingContext) -> None:
        """Make what the loss needs beside the pairs."""

    def judge(
        self, tokenizer: PreTrainedTokenizerFast, pairs: Sequence[tuple[str, str]], context: TrainingContext
    ) -> Judge:
        """What translates these sources, as measurements will, and compares with the references."""
        return Judge(tokenizer, pairs)

    def describe(
        self, network: Any, tokenizer: PreTrainedTokenizerFast, validation: Sequence[tuple[str, str]]
    ) -> dict[str, Any]:
        """Further facts about the finished model, for the card."""
        return {}

    def _distilled(self, context: TrainingContext, pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """The same sources with the teacher's translations; those that it did not end are left out."""
        sources = [context.tokenizer(source)["input_ids"] for source, _ in pairs]
        texts = context.tokenizer.batch_decode(translations(context, sources, self.beams), skip_special_tokens=True)
        return [(source, text.strip()) for (source, _), text in zip(pairs, texts, strict=True) if text.strip()]

    def _encode(self, tokenizer: PreTrainedTokenizerFast, pairs: Sequence[tuple[str, str]]) -> list[Pair]:
        sides = [tokenizer(list(side))["input_ids"] for side in zip(*pairs, strict=True)]
        kept = [pair for pair in zip(*sides, strict=True) if max(map(len, pair)) <= self.positions]
        if not kept:
            raise ValueError(
                f"At least one pair of the corpus must have at most {self.positions} tokens on both sides, got none. "
                "Name a larger corpus, or set train.positions higher."
            )
        return kept


@dataclass
class TeacherTraining(TranslationTraining):
    """Trains an encoder-decoder.

    Args:
        layers: of encoder and decoder.
        width, inner, heads, vocabulary, positions, data, beams, validation, recipe: see ``TranslationTraining``.

    Raises:
        ValueError: a number out of range.
    """

    layers: Sequence[int] = (4, 4)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.layers) != 2 or min(self.layers) < 1:
            raise ValueError(
                f"layers must be two numbers of at least 1, got {list(self.layers)}. Set train.layers=[4,4]."
            )

    def model_name(self, corpus: str) -> str:
        """``multi30k_4_4``, ``multi30k_6_1_distilled``."""
        return "_".join([corpus, *map(str, self.layers), *(["distilled"] if self.data == "distilled" else [])])

    def layer_loss(self) -> LayerLoss | None:
        """A loss over all layers of the decoder; None: the last one alone is trained."""
        return None

    def loss(self, network: Any, pairs: Sequence[Pair]) -> Callable[[list[int], int], Loss]:
        """Smoothed cross-entropy per token of the target; places without a token cost no logits."""
        layer_loss = self.layer_loss()

        def loss(rows: list[int], step: int) -> Loss:
            with attention_over_short_rows(network.device):
                states, wanted = _states(network, [pairs[row] for row in rows], every=layer_loss is not None)

                def of_layer(state: Float[Tensor, "n D"]) -> Float[Tensor, ""]:
                    return cross_entropy(_lens(network, state), wanted, self.recipe.label_smoothing)

                found, parts = (of_layer(states[0]), {}) if layer_loss is None else layer_loss(states, of_layer)
                return found, {**parts, "tokens": len(wanted)}

        return loss

    def network(self, tokens: int) -> Any:
        """See ``TranslationTraining``."""
        encoder, decoder = self.layers
        config = PegasusConfig(
            vocab_size=tokens,
            d_model=self.width,
            encoder_layers=encoder,
            decoder_layers=decoder,
            encoder_attention_heads=self.heads,
            decoder_attention_heads=self.heads,
            encoder_ffn_dim=self.inner,
            decoder_ffn_dim=self.inner,
            max_position_embeddings=self.positions,
            activation_function="relu",
            dropout=self.recipe.dropout,
            init_std=self.width**-0.5,
            scale_embedding=True,
            forced_eos_token_id=None,
            pad_token_id=bpe.PAD_ID,
            eos_token_id=bpe.EOS_ID,
            decoder_start_token_id=bpe.PAD_ID,
        )
        network: Any = PegasusForConditionalGeneration(config)
        network.generation_config = bpe.generation_config(decoder_start_token_id=bpe.PAD_ID)
        return network


@dataclass
class ContinuedTraining(TeacherTraining):
    """Trains a translation model that may begin as another one.

    Args:
        begin: with random weights, or those of a model (``model=``) of the same shape and vocabulary.
        layers, width, inner, heads, vocabulary, positions, data, beams, validation, recipe: see ``TeacherTraining``.

    Raises:
        ValueError: a number out of range.
    """

    begin: Begin = "random"

    @property
    def needs_model(self) -> bool:
        """See ``Trainable``."""
        return super().needs_model or self.begin == "model"

    def initialise(self, network: Any, tokenizer: PreTrainedTokenizerFast, context: TrainingContext) -> None:
        """Start with the weights of the model, if asked for.

        Raises:
            ValueError: it is of another kind, shape or vocabulary.
        """
        if self.begin == "random":
            return
        model: Any = context.target
        weights = {} if model.hf is None else model.hf.state_dict()
        shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
        if {name: tuple(value.shape) for name, value in weights.items()} != shapes:
            raise ValueError(
                f"With train.begin=model the weights must have the shapes of the new model, got others: {model.name}. "
                "Name a model with the same train.layers, width, inner and vocabulary, or set train.begin=random."
            )
        if context.tokenizer.get_vocab() != tokenizer.get_vocab():
            raise ValueError(
                f"With train.begin=model the vocabulary must be that of the corpus, got another one from {model.name}. "
                "Name a model that was trained on the same corpus, or set train.begin=random."
            )
        network.load_state_dict(weights)


@dataclass
class ExitTeacherTraining(ContinuedTraining):
    """Trains a translation model whose decoder may be left after every layer.

    Args:
        exits: the loss over the decoder's layers, ``calm`` or ``free``.
        shallow: layers of the shallow exit of ``free``; None: a quarter.
        distillation: weight of the layerwise distillation of ``free``.
        begin, layers, width, inner, heads, vocabulary, positions, data, beams, validation, recipe: see
            ``ContinuedTraining``.

    Raises:
        ValueError: a number out of range.
    """

    description = "a translation model for early exit, with its tokenizer"

    exits: Exits = "calm"
    shallow: int | None = None
    distillation: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self.layer_loss()

    def model_name(self, corpus: str) -> str:
        """``multi30k_4_4_distilled_calm``."""
        return f"{super().model_name(corpus)}_{self.exits}"

    def layer_loss(self) -> LayerLoss:
        """See ``TeacherTraining``."""
        return make_loss(self.exits, self.layers[1], self.shallow, self.distillation)

    def describe(
        self, network: Any, tokenizer: PreTrainedTokenizerFast, validation: Sequence[tuple[str, str]]
    ) -> dict[str, Any]:
        """See ``TeacherTraining``: how good each layer is."""
        exits = exits_of(network, self._encode(tokenizer, validation))
        return {"exits": exits, "summary": summary({"lens": exits})}


def require_multiple(width: int, unit: int) -> None:
    """Check the width of a network whose heads are rotated or paired.

    Raises:
        ValueError: it is no multiple.
    """
    if width % unit:
        raise ValueError(f"width must be a multiple of {unit}, twice the heads, got {width}. Set train.width.")


class Judge(BleuJudge):
    """See ``BleuJudge``, for an encoder-decoder of transformers."""

    def bleu(self, network: Any, beams: int = 1) -> float:
        """Percent, of greedy translations or of those of a beam search."""
        return self.bleu_of_texts(self.texts(network, beams))

    def texts(self, network: Any, beams: int = 1) -> list[str]:
        """Its translations of the sources, in their order."""
        target = Seq2SeqLM.from_hf(network, linear="plain", keep_hf=True)
        assert isinstance(target, Seq2SeqLM)
        return self.write_all(partial(translate, target, beams=beams), target.max_positions, target.device)


def memory_of(network: Any, seen: Judge, unseen: Judge) -> dict[str, Any]:
    """How much better a network translates what it learnt than what it did not, for the card.

    Students that learn the translations of a teacher learn its training pairs again where it repeats them, with all
    their different ways to say one thing.

    Args:
        seen, unseen: pairs of the training and of the validation.

    Returns:
        Greedy BLEU and the percentage of texts equal to their references on both sides, and whether the first is
        more than ``MOST_MEMORY`` above the second.
    """
    sides = {name: judge.texts(network) for name, judge in (("train", seen), ("validation", unseen))}
    bleu = {name: judge.bleu_of_texts(sides[name]) for name, judge in (("train", seen), ("validation", unseen))}
    return {
        "train_bleu_greedy": round(bleu["train"], 2),
        "train_equal_reference": round(seen.equal(sides["train"]), 2),
        "validation_equal_reference": round(unseen.equal(sides["validation"]), 2),
        "memorised": bleu["train"] > bleu["validation"] + MOST_MEMORY,
    }


def _states(
    network: Any, pairs: Sequence[Pair], every: bool = False
) -> tuple[list[Float[Tensor, "n D"]], Int[Tensor, "n"]]:
    """States of the decoder, raw, from which the tokens of the targets are predicted, and these tokens.

    Args:
        every: after each layer, not after the last one only.
    """
    sources, targets = (padded([pair[side] for pair in pairs], network.device) for side in (0, 1))
    present = targets != NONE
    read = decoder_input(network, targets)
    with collected(network.model.decoder.layers if every else network.model.decoder.layers[-1:]) as states:
        network.model(
            input_ids=sources.clamp(min=0), attention_mask=sources != NONE, decoder_input_ids=read, use_cache=False
        )
    return [state[present] for state in states], targets[present]


def decoder_input(network: Any, targets: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """What the decoder reads where it is to write the targets: the start, and each token but the last."""
    read = targets.clamp(min=0).roll(1, dims=1)
    read[:, 0] = network.config.decoder_start_token_id
    return read


def _lens(network: Any, states: Float[Tensor, "n D"]) -> Float[Tensor, "n V"]:
    """Logits of raw states by the decoder's own norm and output matrix."""
    logits: Tensor = network.lm_head(network.model.decoder.layer_norm(states))
    return logits


@torch.inference_mode()
def exits_of(network: Any, pairs: Sequence[Pair]) -> dict[str, dict[str, float]]:
    """How good each layer of the decoder is, read by the output matrix, at the tokens of references."""
    whole = network.eval().float()
    groups = [pairs[start : start + _GROUP] for start in range(0, len(pairs), _GROUP)]
    behind = [
        torch.cat(parts) for parts in zip(*(_states(whole, group, every=True)[0] for group in groups), strict=True)
    ]
    exits = dict(enumerate(behind[:-1], 1))
    seen = judge(partial(_lens, whole), {"": lambda _, states: states}, exits, behind[-1])[""]
    network.half()
    return {str(depth): quality(*found) for depth, found in seen.items()}
