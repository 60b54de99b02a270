"""A translation model of one's own: the autoregressive teacher, and the baseline, of the encoder-decoder track.

A Transformer (Vaswani et al. 2017, arXiv 1706.03762) as transformers' ``MarianMTModel``: norms behind the sub-layers,
sinusoidal positions, one embedding for both languages and the output. ``layers`` are those of encoder and decoder: 4-4
is the teacher; a deep encoder with a decoder of one layer, 6-1 or 12-1, is the strong autoregressive baseline that
non-autoregressive papers long left out (Kasai et al. 2021, arXiv 2006.10369). Label smoothing and a warm-up as in the
original, then a rate that falls to nothing, which suits a short budget; the weights of the best checkpoints by
validation BLEU are averaged.

``data=distilled`` learns from what another model (``model=``) translates, instead of the references; the vocabulary is
that of the references, so that all models of one corpus can draft for each other.

Published: 41.02 on Multi30k en-de test2016 (4-4, width 128, 130 epochs, beam 5; lower-cased and tokenised, which is
about 40.5 here). Only sacreBLEU on detokenised, cased text is reported here.

    python -m bench.train method=teacher corpus=multi30k
    python -m bench.train method=teacher corpus=multi30k 'train.layers=[6,1]' train.data=distilled model=multi30k_4_4
    python -m bench model=multi30k_4_4 dataset=multi30k method=prompt_lookup
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Generator, Tensor
from transformers import GenerationConfig, MarianConfig, MarianMTModel, PreTrainedTokenizerFast

from methods.decoder import Foundry
from methods.engine.distillation import digest, translations
from methods.engine.sampling import Sampling
from methods.engine.seq2seq import Seq2SeqLM
from methods.engine.training import SAVE_EVERY_S, Loop, Precision, autocast, discard
from methods.engine.writing import answer, search
from methods.translation import vocabulary

_SAVE_EVERY_S = SAVE_EVERY_S
_MAKING = "making"  # no piece of the model: checkpoints that may enter the average
_HELD_OUT, _MOST_HELD_OUT = 30, 1000  # every thirtieth pair, and no more
_GROUP = 128  # sentences that are translated together
_PER_SOURCE, _EXTRA = 2, 20  # a translation is cut at so many times its source, and so many tokens more

Pair = tuple[list[int], list[int]]  # ids of source and target, both with their end


@dataclass(frozen=True)
class Recipe:
    """How a model is trained.

    Attributes:
        steps: updates.
        tokens: of a batch, padding included, counted on its longer side.
        learning_rate: at its highest.
        warmup: steps in which the rate rises to it; behind them it falls to nothing along a straight line.
        betas: of Adam.
        weight_decay: of AdamW.
        label_smoothing: probability that is spread over all tokens.
        dropout: of embeddings and sub-layers.
        clip: most norm of the gradient.
        precision: of the products; auto is bfloat16 where the hardware multiplies it natively.
        evaluations: times the validation BLEU is measured; a checkpoint is kept at each.
        average: of how many checkpoints, the best by validation BLEU, the mean is the model.
    """

    steps: int = 5000
    tokens: int = 2048
    learning_rate: float = 1e-3
    warmup: int = 600
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.0
    label_smoothing: float = 0.1
    dropout: float = 0.2
    clip: float = 1.0
    precision: Precision = "auto"
    evaluations: int = 16
    average: int = 5

    def __post_init__(self) -> None:
        counts = (self.steps, self.tokens, self.warmup, self.evaluations, self.average)
        shares = (self.label_smoothing, self.dropout)
        if min(counts) < 1 or min(self.learning_rate, self.clip) <= 0 or not all(0 <= x < 1 for x in shares):
            raise ValueError(
                f"{self} came; counts of at least 1, rates above 0, and dropout and smoothing from 0 to below 1 are "
                "allowed."
            )

    def rate(self, step: int) -> float:
        """The learning rate of a step, as a share of the highest."""
        return min((step + 1) / self.warmup, (self.steps - step) / max(1, self.steps - self.warmup))


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

    @property
    def learns_from_teacher(self) -> bool:
        return self.data == "distilled"

    def model_name(self, corpus: str) -> str:
        """``multi30k_4_4``, ``multi30k_6_1_distilled``."""
        return "_".join([corpus, *map(str, self.layers), *(["distilled"] if self.learns_from_teacher else [])])

    def fit(self, foundry: Foundry) -> dict[str, Any]:
        """See ``methods.decoder.ModelMaker``."""
        train, validation = _split(foundry)
        tokenizer = vocabulary.learn(chain.from_iterable(train), self.vocabulary, self.positions)
        learnt = self._distilled(foundry, train) if self.learns_from_teacher else train
        pairs = self._encode(tokenizer, learnt)
        torch.manual_seed(foundry.seed)
        network = self.network(len(tokenizer)).to(foundry.device)
        course = _Course(network, pairs, Judge(tokenizer, validation), self.recipe, foundry)
        course.run()
        facts = course.finish()
        network.save_pretrained(foundry.folder)
        tokenizer.save_pretrained(foundry.folder)
        discard(foundry.folder)
        shutil.rmtree(foundry.folder / _MAKING, ignore_errors=True)
        return facts | {"pairs": len(pairs), "pairs_left_out": len(learnt) - len(pairs), "vocabulary": len(tokenizer)}

    def network(self, tokens: int) -> Any:
        """With random weights, for a vocabulary of so many tokens; padding and mask are never written."""
        encoder, decoder = self.layers
        pad, end, mask = (
            vocabulary.SPECIAL.index(token) for token in (vocabulary.PAD, vocabulary.EOS, vocabulary.MASK)
        )
        special: dict[str, Any] = {"pad_token_id": pad, "eos_token_id": end, "decoder_start_token_id": pad}
        config = MarianConfig(
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
        network: Any = MarianMTModel(config)
        network.generation_config = GenerationConfig(**special, bad_words_ids=[[pad], [mask]])
        return network

    def _distilled(self, foundry: Foundry, pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """The same sources with the teacher's translations; a source it could not end is left out."""
        assert foundry.teacher is not None, "who calls provides what learns_from_teacher asks for"
        teacher, tokenizer = foundry.teacher
        if not isinstance(teacher, Seq2SeqLM):
            raise ValueError(
                f"model={teacher.name} is a causal model; the teacher must be an encoder-decoder that translates. Set "
                "model=multi30k_4_4, or model=hf model.name=HUB_ID_OR_FOLDER."
            )
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


def _split(foundry: Foundry) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Pairs to learn from and pairs to judge by.

    Raises:
        ValueError: too few of them.
    """
    pairs, validation = list(foundry.pairs), list(foundry.validation)
    if not validation:
        held_out = set(range(_HELD_OUT - 1, len(pairs), _HELD_OUT)[:_MOST_HELD_OUT])
        validation = [pairs[place] for place in sorted(held_out)]
        pairs = [pair for place, pair in enumerate(pairs) if place not in held_out]
    if not pairs or not validation:
        raise ValueError(
            f"The corpus has {len(foundry.pairs)} pairs; at least {_HELD_OUT} are needed where none are given for "
            "validation. Name a larger corpus, or set train.validation."
        )
    return pairs, validation


class Judge:
    """Validation BLEU: sacreBLEU on cased, detokenised text, decoded by the engine that decodes in measurements.

    Args:
        tokenizer: of the model.
        pairs: sources and references.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, pairs: Sequence[tuple[str, str]]) -> None:
        self.tokenizer = tokenizer
        self.references = [reference for _, reference in pairs]
        self._sources: list[list[int]] = tokenizer([source for source, _ in pairs])["input_ids"]

    def bleu(self, network: MarianMTModel, beams: int = 1) -> float:
        """Percent, of greedy translations or of those of a beam search."""
        import sacrebleu

        target = Seq2SeqLM.from_hf(network, linear="plain", keep_hf=True)
        assert isinstance(target, Seq2SeqLM)
        return float(sacrebleu.corpus_bleu(self.translate(target, beams), [self.references]).score)

    def translate(self, target: Seq2SeqLM, beams: int = 1) -> list[str]:
        """One text for every source, in their order."""
        order = sorted(range(len(self._sources)), key=lambda place: len(self._sources[place]))
        texts: dict[int, list[int]] = {}
        for start in range(0, len(order), _GROUP):
            group = order[start : start + _GROUP]
            sources = [
                torch.tensor(self._sources[place][-target.max_positions :], device=target.device) for place in group
            ]
            limit = min(target.max_positions, _PER_SOURCE * max(map(len, sources)) + _EXTRA)
            texts |= zip(group, self._write(target, sources, limit, beams), strict=True)
        written: list[str] = self.tokenizer.batch_decode([texts[place] for place in range(len(order))], True)
        return written

    def _write(self, target: Seq2SeqLM, sources: list[Int[Tensor, "_"]], limit: int, beams: int) -> list[list[int]]:
        if beams > 1:
            return search(target, sources, limit, beams)
        return answer(target, sources, limit, Sampling(), Generator(target.device))


class _Course(Loop):
    """The training of one model."""

    def __init__(
        self, network: MarianMTModel, pairs: Sequence[Pair], judge: Judge, recipe: Recipe, foundry: Foundry
    ) -> None:
        self.network, self.pairs, self.judge, self.recipe = network, pairs, judge, recipe
        self.device, self.snapshots = foundry.device, foundry.folder / _MAKING
        self.snapshots.mkdir(parents=True, exist_ok=True)
        self.seed, self.batches = foundry.seed, batches(pairs, recipe.tokens)
        self._order: tuple[int, list[int]] = (-1, [])
        learnt = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
        optimizer = torch.optim.AdamW(
            learnt.values(), recipe.learning_rate, recipe.betas, eps=1e-9, weight_decay=recipe.weight_decay
        )
        about = {"pairs": digest([[*source, -1, *target] for source, target in pairs])}
        super().__init__(learnt, optimizer, recipe, foundry, about, save_every_s=_SAVE_EVERY_S)

    def loss(self) -> tuple[Tensor, Mapping[str, Tensor | float | int]]:
        """Smoothed cross-entropy per token of the target; places without a token cost no logits."""
        self.network.train()
        rows = [self.pairs[place] for place in self.batches[self._batch(self.step)]]
        sources, targets = (_padded([row[side] for row in rows], self.device) for side in (0, 1))
        present = targets != _NONE
        read = targets.clamp(min=0).roll(1, dims=1)
        read[:, 0] = self.network.config.decoder_start_token_id
        with autocast(self.recipe.precision, self.device):
            states = self.network.model(
                input_ids=sources.clamp(min=0), attention_mask=sources != _NONE, decoder_input_ids=read, use_cache=False
            ).last_hidden_state
            logits = self.network.lm_head(states[present])
        wanted = targets[present]
        loss = F.cross_entropy(logits.float(), wanted, label_smoothing=self.recipe.label_smoothing)
        right = (logits.argmax(-1) == wanted).float().mean()
        return loss, {"right": right, "tokens": len(wanted)}

    def evaluate(self) -> None:
        """Greedy BLEU on the validation pairs; the weights are kept while they are among the best."""
        bleu = self.judge.bleu(self.network)
        self.curve.append({"step": self.step, "bleu": round(bleu, 3)})
        self.place.log({"step": self.step, "validation/bleu": bleu})
        torch.save(self.learnt, self._snapshot(self.step))
        kept = {self._snapshot(step) for step in self._best()}
        for file in self.snapshots.glob("*.pt"):
            if file not in kept:
                file.unlink()

    def finish(self) -> dict[str, Any]:
        """Put the mean of the best checkpoints, rounded to 16 bit as it is stored, into the network; facts."""
        best = self._best()
        states = [torch.load(self._snapshot(step), map_location=self.device, weights_only=True) for step in best]
        with torch.no_grad():
            for name, parameter in self.learnt.items():
                parameter.copy_(torch.stack([state[name] for state in states]).mean(0).half())
        scores = {f"validation_bleu_{name}": round(self.judge.bleu(self.network, n), 2) for name, n in _SEARCHES}
        self.network.half()
        return {
            "pairs_sha256": self.about["pairs"],
            "parameters": sum(parameter.numel() for parameter in self.learnt.values()),
            "steps": self.step,
            "epochs": round(self.step / len(self.batches), 2),
            "averaged_steps": best,
            **scores,
            "curve": self.curve,
        }

    def _best(self) -> list[int]:
        """Steps whose weights are averaged; of equally good ones the later."""
        ranked = sorted(self.curve, key=lambda point: (point["bleu"], point["step"]), reverse=True)
        return sorted(point["step"] for point in ranked[: self.recipe.average])

    def _snapshot(self, step: int) -> Path:
        return self.snapshots / f"{step}.pt"

    def _batch(self, step: int) -> int:
        """Which batch a step sees: all of them once an epoch, in an order that the seed decides."""
        epoch, place = divmod(step, len(self.batches))
        if self._order[0] != epoch:
            order = list(range(len(self.batches)))
            random.Random(f"{self.seed}-{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1][place]


_NONE = -1
_SEARCHES = (("greedy", 1), ("beam5", 5))


def batches(pairs: Sequence[Pair], tokens: int) -> list[list[int]]:
    """Numbers of pairs of similar length, ``tokens`` to a batch at most, padding included; a pair at least."""
    width = [max(map(len, pair)) for pair in pairs]
    found: list[list[int]] = []
    for place in sorted(range(len(pairs)), key=lambda place: (width[place], len(pairs[place][0]))):
        if not found or (len(found[-1]) + 1) * width[place] > tokens:
            found.append([])
        found[-1].append(place)
    return found


def _padded(rows: Sequence[list[int]], device: torch.device) -> Int[Tensor, "B T"]:
    width = max(map(len, rows))
    return torch.tensor([row + [_NONE] * (width - len(row)) for row in rows], device=device)
