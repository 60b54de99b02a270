"""Learning from pairs of sentences: what the making of a teacher and of its students share.

Recipe, split, batches by length, validation BLEU, and a course whose best checkpoints are averaged.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from methods.training.distillation import digest
from methods.training.interface import Foundry
from methods.training.trainer import SAVE_EVERY_S, Epochs, Loop, Precision

NONE = -1  # in padded rows: no token
_MAKING = "making"  # no piece of what is made: checkpoints that may enter the average
_HELD_OUT, _MOST_HELD_OUT = 30, 1000  # every thirtieth pair, and no more
_GROUP = 128  # sentences that are translated together
_PER_SOURCE, _EXTRA = 2, 20  # a translation is cut at so many times its source, and so many tokens more

Pair = tuple[list[int], list[int]]  # ids of source and target
Write = Callable[[list[Int[Tensor, "_"]], int], list[list[int]]]  # sources, most tokens each -> ids of each


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
    learning_rate: float = 1.5e-3
    warmup: int = 400
    betas: Sequence[float] = (0.9, 0.98)
    weight_decay: float = 0.0
    label_smoothing: float = 0.1
    dropout: float = 0.1
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


def split(foundry: Foundry) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
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


def batches(pairs: Sequence[Pair], tokens: int) -> list[list[int]]:
    """Numbers of pairs of similar length, ``tokens`` to a batch at most, padding included; a pair at least."""
    width = [max(map(len, pair)) for pair in pairs]
    found: list[list[int]] = []
    for place in sorted(range(len(pairs)), key=lambda place: (width[place], len(pairs[place][0]))):
        if not found or (len(found[-1]) + 1) * width[place] > tokens:
            found.append([])
        found[-1].append(place)
    return found


def padded(
    rows: Sequence[Sequence[int]], device: torch.device, filler: int = NONE, width: int | None = None
) -> Int[Tensor, "B T"]:
    """Rows of one width, the longest one's unless given, filled up behind their ends."""
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

    def score(self, texts: Sequence[str]) -> float:
        """Percent, of one text for every source."""
        import sacrebleu

        return float(sacrebleu.corpus_bleu(list(texts), [self.references]).score)

    def write_all(self, write: Write, positions: int, device: torch.device) -> list[str]:
        """One text for every source, in their order; groups are of similar length.

        Args:
            write: decodes a group.
            positions: longest source, which loses its beginning, and longest text.
        """
        order = sorted(range(len(self._sources)), key=lambda place: len(self._sources[place]))
        texts: dict[int, list[int]] = {}
        for start in range(0, len(order), _GROUP):
            group = order[start : start + _GROUP]
            sources = [torch.tensor(self._sources[place][-positions:], device=device) for place in group]
            limit = min(positions, _PER_SOURCE * max(map(len, sources)) + _EXTRA)
            texts |= zip(group, write(sources, limit), strict=True)
        written: list[str] = self.tokenizer.batch_decode([texts[place] for place in range(len(order))], True)
        return written


def _groups(learnt: Mapping[str, nn.Parameter], shares: Mapping[str, float]) -> list[dict[str, Any]]:
    """Of an optimizer: the parameters of each share of the rate, and all others."""
    slower = {prefix: [p for name, p in learnt.items() if name.startswith(prefix)] for prefix in shares}
    others = [p for name, p in learnt.items() if not name.startswith(tuple(shares))]
    groups: list[dict[str, Any]] = [{"params": others}]
    groups += [{"params": found, "share": shares[prefix]} for prefix, found in slower.items()]
    return [group for group in groups if group["params"]]


class PairCourse(Loop):
    """The training of one model on pairs.

    Args:
        network: what learns; frozen parameters are left alone.
        pairs: what is learnt from.
        score: validation BLEU of the network as it is.
        recipe, foundry: see there.
        shares: of the learning rate, for parameters whose names begin so.

    Attributes:
        batches: numbers of the pairs of each.
    """

    def __init__(
        self,
        network: nn.Module,
        pairs: Sequence[Pair],
        score: Callable[[], float],
        recipe: Recipe,
        foundry: Foundry,
        save_every_s: float = SAVE_EVERY_S,
        shares: Mapping[str, float] | None = None,
    ) -> None:
        self.network, self.pairs, self.score, self.recipe = network, pairs, score, recipe
        self.device, self.snapshots = foundry.device, foundry.folder / _MAKING
        self.snapshots.mkdir(parents=True, exist_ok=True)
        self.seed, self.batches = foundry.seed, batches(pairs, recipe.tokens)
        self._epochs = Epochs(len(self.batches), self._shuffled)
        learnt = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
        betas = recipe.betas[0], recipe.betas[1]
        groups = _groups(learnt, shares or {})
        optimizer = torch.optim.AdamW(groups, recipe.learning_rate, betas, eps=1e-9, weight_decay=recipe.weight_decay)
        about = {"pairs": digest([[*source, NONE, *target] for source, target in pairs])}
        super().__init__(learnt, optimizer, recipe, foundry, about, save_every_s=save_every_s)

    def rows(self) -> list[int]:
        """Numbers of the pairs that this step sees: all of them once an epoch, in an order that the seed decides."""
        return self._epochs.batch(self.step)

    def _shuffled(self, epoch: int) -> list[list[int]]:
        found = list(self.batches)
        random.Random(f"{self.seed}-{epoch}").shuffle(found)
        return found

    def evaluate(self) -> None:
        """BLEU on the validation pairs; the weights are kept while they are among the best."""
        bleu = self.score()
        self.curve.append({"step": self.step, "bleu": round(bleu, 3)})
        self.place.log({"step": self.step, "validation/bleu": bleu})
        torch.save(self.learnt, self._snapshot(self.step))
        kept = {self._snapshot(step) for step in self._best()}
        for file in self.snapshots.glob("*.pt"):
            if file not in kept:
                file.unlink()

    def average(self) -> dict[str, Any]:
        """Put the mean of the best checkpoints, rounded to 16 bit as it is stored, into the network; facts."""
        best = self._best()
        load = partial(torch.load, map_location=self.device, weights_only=True)
        states = [load(self._snapshot(step)) for step in best]
        with torch.no_grad():
            for name, parameter in self.learnt.items():
                parameter.copy_(torch.stack([state[name] for state in states]).mean(0).half())
        return self.facts() | {"averaged_steps": best}

    def facts(self) -> dict[str, Any]:
        """For the card."""
        return {
            "pairs_sha256": self.about["pairs"],
            "pairs": len(self.pairs),
            "parameters": sum(parameter.numel() for parameter in self.learnt.values()),
            "steps": self.step,
            "epochs": self._epochs.count(self.step),
            "curve": self.curve,
        }

    def discard_checkpoints(self) -> None:
        """Remove what the average was taken of."""
        shutil.rmtree(self.snapshots, ignore_errors=True)

    def _best(self) -> list[int]:
        """Steps whose weights are averaged; of equally good ones the later."""
        ranked = sorted(self.curve, key=lambda point: (point["bleu"], point["step"]), reverse=True)
        return sorted(point["step"] for point in ranked[: self.recipe.average])

    def _snapshot(self, step: int) -> Path:
        return self.snapshots / f"{step}.pt"
