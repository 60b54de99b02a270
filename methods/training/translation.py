"""Training on sentence pairs: what translation models, students and heads for them share."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor, nn

from methods.decoder import Decoder, Step, generate
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.training.distillation import GROUP, digest, most_tokens
from methods.training.interface import TrainingContext, require
from methods.training.trainer import SNAPSHOTS, Epochs, Loss, Share, Trainer, TrainingConfig

NONE = -1  # in padded rows: no token
_HELD_OUT, _MOST_HELD_OUT = 30, 1000  # every thirtieth pair, and no more

Pair = tuple[list[int], list[int]]  # ids of source and target
Write = Callable[[list[Int[Tensor, "_"]], int], list[list[int]]]  # sources, most tokens each -> ids of each


@dataclass(frozen=True)
class TranslationConfig(TrainingConfig):
    """How long and how fast to train on pairs.

    Attributes:
        tokens: of a batch, padding included, counted on its longer side.
        warmup: steps in which the rate rises linearly; it falls linearly to 0 afterwards.
        label_smoothing: probability that is spread over all tokens.
        dropout: of embeddings and sub-layers.
        mixed: a batch has pairs whose longer sides differ by up to about so many tokens, others in every epoch; 0:
            always the same pairs of equal length. Losses of lengths need batches of different ones.
        average: number of checkpoints, the best by validation BLEU, whose mean is the result.
        patience: evaluations in a row without a new best validation BLEU after which the training ends early; 0: it
            always takes all ``steps``, which the learning rate is planned for.
        steps, learning_rate, betas, weight_decay, clip, precision, evaluations: see ``TrainingConfig``.
    """

    eps: ClassVar[float] = 1e-9
    batch_size: int = field(init=False, repr=False, default=1)  # ``tokens`` and ``warmup`` take their place
    final: float = field(init=False, repr=False, default=0.0)

    steps: int = 5000
    tokens: int = 2048
    learning_rate: float = 1.5e-3
    warmup: int = 400
    betas: Sequence[float] = (0.9, 0.98)
    label_smoothing: float = 0.1
    dropout: float = 0.1
    mixed: float = 3.0
    evaluations: int = 16
    average: int = 5
    patience: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require("at least 1", tokens=self.tokens, warmup=self.warmup, average=self.average)
        require("from 0 to below 1", label_smoothing=self.label_smoothing, dropout=self.dropout)
        require("at least 0", mixed=self.mixed, patience=self.patience)

    def rate(self, step: int) -> float:
        """See ``TrainingConfig``."""
        return min((step + 1) / self.warmup, (self.steps - step) / max(1, self.steps - self.warmup))


def split(context: TrainingContext) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Pairs to learn from and pairs for validation.

    Raises:
        ValueError: too few of them.
    """
    pairs, validation = list(context.pairs), list(context.validation)
    if not validation:
        held_out = set(range(_HELD_OUT - 1, len(pairs), _HELD_OUT)[:_MOST_HELD_OUT])
        validation = [pairs[place] for place in sorted(held_out)]
        pairs = [pair for place, pair in enumerate(pairs) if place not in held_out]
    if not pairs or not validation:
        raise ValueError(
            f"A corpus without validation pairs must have at least {_HELD_OUT} pairs, got {len(context.pairs)}. Name a "
            "larger corpus, or set train.validation."
        )
    return pairs, validation


def batches(
    pairs: Sequence[Pair], tokens: int, mixed: float = 0.0, rng: random.Random | None = None
) -> list[list[int]]:
    """Numbers of pairs of similar length, at most ``tokens`` per batch, padding included; at least one pair.

    Args:
        mixed: see ``TranslationConfig``; above 0 it needs ``rng``.
    """
    widths = [max(map(len, pair)) for pair in pairs]
    if rng is None:
        order = sorted(range(len(pairs)), key=lambda place: (widths[place], len(pairs[place][0])))
    else:
        keys = [width + rng.uniform(0, mixed) for width in widths]
        order = sorted(range(len(pairs)), key=lambda place: (keys[place], rng.random()))
    found: list[list[int]] = []
    longest = 0
    for place in order:
        longest = max(longest, widths[place])
        if not found or (len(found[-1]) + 1) * longest > tokens:
            found.append([])
            longest = widths[place]
        found[-1].append(place)
    return found


def padded(
    rows: Sequence[Sequence[int]], device: torch.device, filler: int = NONE, width: int | None = None
) -> Int[Tensor, "B T"]:
    """Rows of one width, that of the longest unless given, filled up at the end."""
    width = max(map(len, rows)) if width is None else width
    return torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows], device=device)


class BleuJudge:
    """Validation BLEU: sacreBLEU on cased, detokenised text, decoded by the code that decodes in measurements.

    Args:
        tokenizer: of the model.
        pairs: sources and references.
    """

    def __init__(self, tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> None:
        self.tokenizer = tokenizer
        self.references = [reference for _, reference in pairs]
        self._sources: list[list[int]] = tokenizer([source for source, _ in pairs])["input_ids"]

    def score(self, write: Write, positions: int, device: torch.device) -> float:
        """Percent.

        Args:
            write: decodes a group of sources of similar length.
            positions: longest source, which loses its beginning, and longest text.
        """
        return self.bleu_of_texts(self.write_all(write, positions, device))

    def of_decoder(self, decoder: Decoder, target: Seq2SeqLM) -> dict[str, float]:
        """Greedy decoding by the loop of measurements: BLEU, and tokens per pass of the model after the first one."""
        tokens = passes = 0

        def count(step: Step, rows: Collection[int]) -> None:
            nonlocal passes
            passes += len(rows)

        def write(sources: list[Int[Tensor, "_"]], limit: int) -> list[list[int]]:
            nonlocal tokens, passes
            texts = generate(decoder, sources, limit, target.eos_ids, watch=count)
            tokens, passes = tokens + sum(len(text) - 1 for text in texts), passes - len(texts)
            return texts

        bleu = self.score(write, target.max_positions, target.device)
        return {"bleu": round(bleu, 3), "tokens_per_step": round(tokens / max(1, passes), 4)}

    def bleu_of_texts(self, texts: Sequence[str]) -> float:
        """Percent, of one text for every source."""
        import sacrebleu

        return float(sacrebleu.corpus_bleu(texts, [self.references]).score)

    def equal(self, texts: Sequence[str]) -> float:
        """Percent of the texts that are their references, but for space around them."""
        pairs = zip(texts, self.references, strict=True)
        return 100 * sum(text.strip() == reference.strip() for text, reference in pairs) / len(self.references)

    def write_all(self, write: Write, positions: int, device: torch.device) -> list[str]:
        """One text for every source, in their order."""
        order = sorted(range(len(self._sources)), key=lambda place: len(self._sources[place]))
        texts: dict[int, list[int]] = {}
        for start in range(0, len(order), GROUP):
            group = order[start : start + GROUP]
            sources = [torch.tensor(self._sources[place][-positions:], device=device) for place in group]
            texts |= zip(group, write(sources, most_tokens(sources, positions)), strict=True)
        written: list[str] = self.tokenizer.batch_decode([texts[place] for place in range(len(order))], True)
        return written


def train_on_pairs(
    network: nn.Module,
    pairs: Sequence[Pair],
    config: TranslationConfig,
    context: TrainingContext,
    loss_fn: Callable[[list[int], int], Loss],
    evaluate: Callable[[], Mapping[str, float]],
    shares: Mapping[str, Share] | None = None,
    rank: Callable[[Mapping[str, Any]], Any] = itemgetter("bleu"),
) -> dict[str, Any]:
    """Train a network on all pairs once per epoch, in an order that the seed decides; facts for the card.

    Args:
        loss_fn: from numbers of pairs and the number of the step.
        evaluate: validation scores, ``bleu`` among them.
        shares: see ``Trainer``.
        rank: of a point of the curve. The mean of the best checkpoints, rounded to 16 bit, is put into the network.
    """
    sha256 = digest([[*source, NONE, *target] for source, target in pairs])
    trainer = Trainer(config, network, context, sha256, shares)
    snapshots = context.output / SNAPSHOTS

    def shuffled(epoch: int) -> list[list[int]]:
        rng = random.Random(f"{context.seed}-{epoch}")
        found = batches(pairs, config.tokens, config.mixed, rng if config.mixed else None)
        rng.shuffle(found)
        return found

    def best(curve: Sequence[Mapping[str, Any]]) -> list[int]:
        """Steps whose weights are averaged; of equally good ones the later."""
        ranked = sorted(curve, key=lambda point: (rank(point), point["step"]), reverse=True)
        return sorted(point["step"] for point in ranked[: config.average])

    def evaluated() -> tuple[dict[str, Any], dict[str, float]]:
        scores = evaluate()
        point = {name: round(score, 3 if name == "bleu" else 4) for name, score in scores.items()}
        snapshots.mkdir(exist_ok=True)
        torch.save(trainer.learnt, snapshots / f"{trainer.step}.pt")
        kept = {f"{step}.pt" for step in best([*trainer.curve, {"step": trainer.step, **point}])}
        for file in snapshots.glob("*.pt"):
            if file.name not in kept:
                file.unlink()
        return point, {f"validation/{name}": score for name, score in scores.items()}

    def ended(curve: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the last ``patience`` points are no better than one before them."""
        ranks = [rank(point) for point in curve]
        return 0 < config.patience < len(ranks) and max(ranks[-config.patience :]) <= max(ranks[: -config.patience])

    epochs = Epochs(shuffled)
    trainer.run(loss_fn, epochs.batch, evaluated, ended)
    facts = {"pairs_sha256": sha256, "pairs": len(pairs), "epochs": epochs.count(trainer.step), **trainer.facts}
    steps = best(trainer.curve)
    states = [torch.load(snapshots / f"{step}.pt", map_location=trainer.device, weights_only=True) for step in steps]
    with torch.no_grad():
        for name, parameter in trainer.learnt.items():
            parameter.copy_(torch.stack([state[name] for state in states]).mean(0).half())
    return facts | {"averaged_steps": steps}
