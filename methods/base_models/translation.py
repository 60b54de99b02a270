"""A translation model of one's own: the autoregressive teacher, and the baseline, of the encoder-decoder track.

A Transformer (Vaswani et al. 2017, arXiv 1706.03762) as transformers' ``PegasusForConditionalGeneration``: norms in
front of the sub-layers, sinusoidal positions, one embedding for both languages and the output. With norms behind the
sub-layers, as in the original and in Marian, a short training stays far behind: validation BLEU 15.8 after 2800 steps
(rate 1e-3), where this one has 23.7 after 625. ``layers`` are those of encoder and decoder: 4-4 is the teacher; a deep
encoder with a decoder of one layer, 6-1 or 12-1, is the strong autoregressive baseline that non-autoregressive papers
long left out (Kasai et al. 2021, arXiv 2006.10369). Label smoothing and a warm-up as in the original, then a rate that
falls to nothing, which suits a short budget; the weights of the best checkpoints by validation BLEU are averaged.

``method=exit_teacher`` makes one that may be left early: CALM's weighted loss over all layers of the decoder, or FREE's
over a shallow exit and the last layer with layerwise distillation (``methods.training.layer_losses``). Every layer is
then read by the output matrix itself (``method.head=lens``), and the card says how good each one is. It may begin with
the weights of an ordinary teacher (``begin=model``), as both papers begin with a trained T5.

``data=distilled`` learns from what another model (``model=``) translates, instead of the references; the vocabulary is
that of the references, so that all models of one corpus can draft for each other.

Published: 41.02 on Multi30k en-de test2016 (4-4, width 128, 130 epochs, beam 5; lower-cased and tokenised, which is
about 40.5 here). Only sacreBLEU on detokenised, cased text is reported here.

    python -m bench.train method=teacher corpus=multi30k
    python -m bench.train method=teacher corpus=multi30k 'train.layers=[6,1]' train.data=distilled model=multi30k_4_4
    python -m bench.train method=exit_teacher corpus=multi30k model=multi30k_4_4
    python -m bench model=multi30k_4_4 dataset=multi30k method=prompt_lookup
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor
from transformers import GenerationConfig, PegasusConfig, PegasusForConditionalGeneration, PreTrainedTokenizerFast

from methods.base_models import bpe
from methods.engine.generation import answer, search
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.training.distillation import translations
from methods.training.exit_quality import judge, quality, summary
from methods.training.interface import Foundry
from methods.training.layer_losses import Exits, LayerLoss, collected, make_loss
from methods.training.losses import cross_entropy
from methods.training.trainer import SAVE_EVERY_S, attention_over_short_rows, autocast, discard
from methods.training.translation import NONE, BleuJudge, Pair, PairCourse, Recipe, batches, padded, split

__all__ = ["Judge", "Recipe", "TeacherTraining", "batches"]

Begin = Literal["random", "model"]

_SAVE_EVERY_S = SAVE_EVERY_S


class TeacherTraining:
    """Makes a translation model.

    Args:
        layers: of encoder and decoder.
        width: of the states.
        inner: units of the feed-forward layers.
        heads: of each attention.
        vocabulary: most tokens of both languages together.
        positions: longest source and longest target, in tokens; longer pairs are left out.
        data: learn the references, or what a teacher translates.
        beams: of that teacher; 1 is greedy.
        validation: corpus of pairs to judge by; None: the corpus' own (``NAME_val``), else every thirtieth pair.
        recipe: of the training; None: the defaults.

    Raises:
        ValueError: a number out of range.
    """

    prepares: ClassVar[str] = "a translation model with its tokenizer"
    takes: ClassVar[str] = "an hour or two on two CPU cores for Multi30k, minutes on a GPU"
    corpus: ClassVar[str] = "multi30k"

    def __init__(
        self,
        layers: Sequence[int] = (4, 4),
        width: int = 256,
        inner: int = 512,
        heads: int = 4,
        vocabulary: int = 8000,
        positions: int = 256,
        data: Literal["raw", "distilled"] = "raw",
        beams: int = 5,
        validation: str | None = None,
        recipe: Recipe | None = None,
    ) -> None:
        if len(layers) != 2 or min(*layers, width, inner, heads, positions, beams) < 1 or width % (2 * heads):
            raise ValueError(
                f"layers={list(layers)}, width={width}, inner={inner}, heads={heads}, positions={positions}, "
                f"beams={beams} came; two numbers of layers, all of at least 1, and a width that twice the heads "
                "divide are allowed."
            )
        self.layers = (layers[0], layers[1])
        self.width, self.inner, self.heads, self.vocabulary, self.positions = width, inner, heads, vocabulary, positions
        self.data, self.beams, self.validation, self.recipe = data, beams, validation, recipe or Recipe()
        self.begin: Begin = "random"
        self.exits: Exits | None = None
        self.layer_loss: LayerLoss | None = None

    @property
    def learns_from_teacher(self) -> bool:
        return self.data == "distilled" or self.begin == "model"

    def model_name(self, corpus: str) -> str:
        """``multi30k_4_4``, ``multi30k_6_1_distilled``, ``multi30k_4_4_calm``."""
        kinds = [*(["distilled"] if self.data == "distilled" else []), *([self.exits] if self.exits else [])]
        return "_".join([corpus, *map(str, self.layers), *kinds])

    def fit(self, foundry: Foundry) -> dict[str, Any]:
        """See ``methods.training.interface.ModelMaker``."""
        train, validation = split(foundry)
        tokenizer = bpe.learn(chain.from_iterable(train), self.vocabulary, self.positions)
        learnt = self._distilled(foundry, train) if self.data == "distilled" else train
        pairs = self._encode(tokenizer, learnt)
        torch.manual_seed(foundry.seed)
        network = self.network(len(tokenizer)).to(foundry.device)
        if self.begin == "model":
            _take_over(network, tokenizer, foundry)
        course = _Course(network, pairs, Judge(tokenizer, validation), self.recipe, foundry, self.layer_loss)
        course.run()
        facts = course.finish()
        if self.exits:
            facts["exits"] = exits_of(network, self._encode(tokenizer, validation))
            facts["summary"] = summary({"lens": facts["exits"]})
        network.save_pretrained(foundry.folder)
        tokenizer.save_pretrained(foundry.folder)
        discard(foundry.folder)
        course.discard_checkpoints()
        return facts | {"pairs_left_out": len(learnt) - len(pairs), "vocabulary": len(tokenizer)}

    def network(self, tokens: int) -> Any:
        """With random weights, for a vocabulary of so many tokens; padding and mask are never written."""
        encoder, decoder = self.layers
        pad, end, mask = (bpe.SPECIAL.index(token) for token in (bpe.PAD, bpe.EOS, bpe.MASK))
        special: dict[str, Any] = {"pad_token_id": pad, "eos_token_id": end, "decoder_start_token_id": pad}
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
            **special,
        )
        network: Any = PegasusForConditionalGeneration(config)
        network.generation_config = GenerationConfig(**special, bad_words_ids=[[pad], [mask]])
        return network

    def _distilled(self, foundry: Foundry, pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """The same sources with the teacher's translations; a source it could not end is left out."""
        teacher, tokenizer = _teacher(foundry)
        sources = [tokenizer(source)["input_ids"] for source, _ in pairs]
        written = translations(teacher, sources, self.beams, foundry.common, foundry.progress)
        texts = tokenizer.batch_decode(written, skip_special_tokens=True)
        return [(source, text.strip()) for (source, _), text in zip(pairs, texts, strict=True) if text.strip()]

    def _encode(self, tokenizer: PreTrainedTokenizerFast, pairs: Sequence[tuple[str, str]]) -> list[Pair]:
        sides = [tokenizer(list(side))["input_ids"] for side in zip(*pairs, strict=True)]
        kept = [pair for pair in zip(*sides, strict=True) if max(map(len, pair)) <= self.positions]
        if not kept:
            raise ValueError(
                f"No pair of the corpus has at most {self.positions} tokens on both sides. Name a larger corpus, or "
                "set train.positions higher."
            )
        return kept


def _teacher(foundry: Foundry) -> tuple[Seq2SeqLM, Any]:
    assert foundry.teacher is not None, "who calls provides what learns_from_teacher asks for"
    teacher, tokenizer = foundry.teacher
    assert isinstance(teacher, Seq2SeqLM), "who calls refuses others"
    return teacher, tokenizer


def _take_over(network: Any, tokenizer: PreTrainedTokenizerFast, foundry: Foundry) -> None:
    """Begin with the weights of a model.

    Raises:
        ValueError: it is of another kind, shape or vocabulary.
    """
    model, its_tokenizer = _teacher(foundry)
    weights = {} if model.hf is None else model.hf.state_dict()
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    if {name: tuple(value.shape) for name, value in weights.items()} != shapes:
        raise ValueError(
            f"train.begin=model came, and {model.name} has other weights than what is trained. Name a model that was "
            "made with the same train.layers, width, inner and vocabulary, or set train.begin=random."
        )
    if its_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"train.begin=model came, and {model.name} has another vocabulary than this corpus gives. Name a model "
            "that was made from the same corpus, or set train.begin=random."
        )
    network.load_state_dict(weights)


class Judge(BleuJudge):
    """See ``BleuJudge``, for an encoder-decoder of transformers."""

    def bleu(self, network: PegasusForConditionalGeneration, beams: int = 1) -> float:
        """Percent, of greedy translations or of those of a beam search."""
        target = Seq2SeqLM.from_hf(network, linear="plain", keep_hf=True)
        assert isinstance(target, Seq2SeqLM)
        return self.score(self.translate(target, beams))

    def translate(self, target: Seq2SeqLM, beams: int = 1) -> list[str]:
        """One text for every source, in their order."""
        write = partial(self._write, target, beams=beams)
        return self.write_all(write, target.max_positions, target.device)

    def _write(self, target: Seq2SeqLM, sources: list[Int[Tensor, "_"]], limit: int, beams: int) -> list[list[int]]:
        if beams > 1:
            return search(target, sources, limit, beams)
        return answer(target, sources, limit, Sampling(), Generator(target.device))


class ExitTeacherTraining(TeacherTraining):
    """Makes a translation model whose decoder may be left behind every layer.

    Args:
        exits: the loss over the decoder's layers, ``calm`` or ``free``.
        shallow: layers of the shallow exit of ``free``; None: a quarter.
        distillation: weight of the layerwise distillation of ``free``.
        begin: with random weights, or those of a model (``model=``) of the same shape and vocabulary.
        layers, width, inner, heads, vocabulary, positions, data, beams, validation, recipe: see ``TeacherTraining``.

    Raises:
        ValueError: a number out of range.
    """

    prepares: ClassVar[str] = "a translation model that may be left early, with its tokenizer"

    def __init__(
        self,
        layers: Sequence[int] = (4, 4),
        width: int = 256,
        inner: int = 512,
        heads: int = 4,
        vocabulary: int = 8000,
        positions: int = 256,
        data: Literal["raw", "distilled"] = "raw",
        beams: int = 5,
        validation: str | None = None,
        exits: Exits = "calm",
        shallow: int | None = None,
        distillation: float = 0.5,
        begin: Begin = "random",
        recipe: Recipe | None = None,
    ) -> None:
        super().__init__(layers, width, inner, heads, vocabulary, positions, data, beams, validation, recipe)
        self.begin = begin
        self.exits, self.layer_loss = exits, make_loss(exits, layers[1], shallow, distillation)


class _Course(PairCourse):
    """The training of one model."""

    def __init__(
        self,
        network: PegasusForConditionalGeneration,
        pairs: Sequence[Pair],
        judge: Judge,
        recipe: Recipe,
        foundry: Foundry,
        layer_loss: LayerLoss | None = None,
    ) -> None:
        self.judge, self.layer_loss = judge, layer_loss
        super().__init__(network, pairs, partial(judge.bleu, network), recipe, foundry, _SAVE_EVERY_S)

    def loss(self) -> tuple[Tensor, Mapping[str, Tensor | float | int]]:
        """Smoothed cross-entropy per token of the target; places without a token cost no logits."""
        network: Any = self.network
        network.train()
        rows = [self.pairs[place] for place in self.rows()]
        with autocast(self.recipe.precision, self.device), attention_over_short_rows(self.device):
            if self.layer_loss is None:
                (state,), wanted = _states(network, rows)
                return self._cross_entropy(state, wanted), {"tokens": len(wanted)}
            states, wanted = _states(network, rows, every=True)
            loss, parts = self.layer_loss(states, lambda state: self._cross_entropy(state, wanted))
            return loss, {**parts, "tokens": len(wanted)}

    def _cross_entropy(self, states: Float[Tensor, "n D"], wanted: Int[Tensor, "n"]) -> Float[Tensor, ""]:
        return cross_entropy(_lens(self.network, states), wanted, self.recipe.label_smoothing)

    def finish(self) -> dict[str, Any]:
        """Put the mean of the best checkpoints into the network, in 16 bit; facts."""
        network: Any = self.network
        facts = self.average()
        scores = {f"validation_bleu_{name}": round(self.judge.bleu(network, n), 2) for name, n in _SEARCHES}
        network.half()
        return facts | scores


def _states(
    network: Any, pairs: Sequence[Pair], every: bool = False
) -> tuple[list[Float[Tensor, "n D"]], Int[Tensor, "n"]]:
    """States of the decoder, raw, from which the tokens of the targets are predicted, and these tokens.

    Args:
        every: behind each layer, not behind the last alone.
    """
    sources, targets = (padded([pair[side] for pair in pairs], network.device) for side in (0, 1))
    present = targets != NONE
    read = targets.clamp(min=0).roll(1, dims=1)
    read[:, 0] = network.config.decoder_start_token_id
    with collected(network.model.decoder.layers if every else network.model.decoder.layers[-1:]) as states:
        network.model(
            input_ids=sources.clamp(min=0), attention_mask=sources != NONE, decoder_input_ids=read, use_cache=False
        )
    return [state[present] for state in states], targets[present]


def _lens(network: Any, states: Float[Tensor, "n D"]) -> Float[Tensor, "n V"]:
    """What the decoder's own norm and output matrix make of raw states."""
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


_GROUP = 128  # pairs read at once
_SEARCHES = (("greedy", 1), ("beam5", 5))
