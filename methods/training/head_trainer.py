"""Training a draft head: what all of them share, on features of the target's own answers.

A head is a ``Learner``: it knows its loss and what it would have drafted. The updates are those of
``methods.training.trainer``; here are the order of the batches, AdamW with a warm-up and a cosine, mixed precision, and
the held-out acceptance.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from methods.training.features import Batch, Features
from methods.training.interface import Workshop
from methods.training.trainer import SAVE_EVERY_S, Epochs, Loop, Precision, autocast, discard

__all__ = ["Learner", "Recipe", "discard", "shuffled_batches", "teach", "tokens_per_step"]

_SAVE_EVERY_S = SAVE_EVERY_S
_WINDOW = 16  # batches that are sorted by length together
_JUDGED = 128  # held-out dialogues that are looked at


class Learner(nn.Module):
    """A draft head in training. Its parameters that require a gradient are what is learnt."""

    def loss(self, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """What is minimised over a batch, and numbers for the curves."""
        raise NotImplementedError

    def hits(self, batch: Batch) -> tuple[Int[Tensor, "P R"], Int[Tensor, "P"]]:
        """How good its drafts are.

        Returns:
            [p, r]: how often the token p + 1 places behind the root was its candidate of rank r, given that all
            earlier ones of the draft were right; and how often that was judged.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Recipe:
    """How a head is trained.

    Attributes:
        steps: updates.
        batch_size: dialogues per update.
        learning_rate: at its highest.
        warmup: share of the steps in which the rate rises to it; behind them it falls along a cosine.
        final: what is left of the rate at the end, as a share of it.
        weight_decay, betas: of AdamW.
        clip: most norm of the gradient.
        precision: of the products; auto is bfloat16 where the hardware multiplies it natively.
        evaluations: times the held-out acceptance is measured.
    """

    steps: int = 2000
    batch_size: int = 16
    learning_rate: float = 1e-3
    warmup: float = 0.04
    final: float = 0.05
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    precision: Precision = "auto"
    evaluations: int = 8

    def __post_init__(self) -> None:
        if min(self.steps, self.batch_size, self.evaluations) < 1 or min(self.learning_rate, self.clip) <= 0:
            raise ValueError(f"{self} came; counts of at least 1 and rates above 0 are allowed.")

    def rate(self, step: int) -> float:
        """The learning rate of a step, as a share of the highest."""
        rising = max(1, round(self.warmup * self.steps))
        if step < rising:
            return (step + 1) / rising
        way = (step - rising) / max(1, self.steps - rising)
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * way))


def teach(learner: Learner, features: Features, recipe: Recipe, workshop: Workshop) -> dict[str, Any]:
    """Train to the end of the recipe, going on from a checkpoint in the workshop's folder.

    Returns:
        Facts for the card: answers, parameters, steps, and the held-out acceptance with its curve.
    """
    course = _Course(learner, features, recipe, workshop)
    course.run()
    return course.facts()


def tokens_per_step(acceptance: Sequence[float]) -> float:
    """Committed per pass with a chain of which position i is kept with ``acceptance[i]``, given those before."""
    return 1.0 + sum(math.prod(acceptance[: place + 1]) for place in range(len(acceptance)))


class _Course(Loop):
    def __init__(self, learner: Learner, features: Features, recipe: Recipe, workshop: Workshop) -> None:
        self.learner, self.features, self.recipe, self.workshop = learner, features, recipe, workshop
        self._epochs = Epochs(-(-len(features.train) // recipe.batch_size), self._shuffle)
        learnt = {name: p for name, p in learner.named_parameters() if p.requires_grad}
        optimizer = torch.optim.AdamW(
            learnt.values(), recipe.learning_rate, betas=recipe.betas, weight_decay=recipe.weight_decay
        )
        super().__init__(
            learnt, optimizer, recipe, workshop, {"answers": features.answers.sha256}, save_every_s=_SAVE_EVERY_S
        )

    def facts(self) -> dict[str, Any]:
        answers = self.features.answers
        last = self.curve[-1] if self.curve else {}
        return {
            "answers": len(answers.rows),
            "answer_tokens": answers.tokens,
            "answers_sha256": answers.sha256,
            "parameters": sum(p.numel() for p in self.learnt.values()),
            "steps": self.step,
            "epochs": self._epochs.count(self.step),
            "acceptance": last.get("acceptance"),
            "tokens_per_step_of_a_chain": last.get("tokens_per_step"),
            "curve": self.curve,
        }

    def loss(self) -> tuple[Tensor, Mapping[str, Tensor | float | int]]:
        self.learner.train()
        batch = self.features.batch(self._epochs.batch(self.step))
        with autocast(self.recipe.precision, batch.hidden.device):
            return self.learner.loss(batch)

    @torch.no_grad()
    def evaluate(self) -> None:
        self.learner.eval()
        rows = list(self.features.held_out)[:_JUDGED]
        counts = []
        for start in range(0, len(rows), self.recipe.batch_size):
            batch = self.features.batch(rows[start : start + self.recipe.batch_size])
            with autocast(self.recipe.precision, batch.hidden.device):
                counts.append(self.learner.hits(batch))
        right, judged = (torch.stack(numbers).sum(0) for numbers in zip(*counts, strict=True))
        shares = right / judged.clamp(min=1)[:, None]
        acceptance = [round(float(share), 4) for share in shares[:, 0]]
        point = {"step": self.step, "acceptance": acceptance, "tokens_per_step": round(tokens_per_step(acceptance), 4)}
        self.curve.append(point | {"ranks": [[round(float(x), 4) for x in row] for row in shares]})
        flat = {f"held_out/acceptance_{place + 1}": share for place, share in enumerate(acceptance)}
        self.workshop.log({"step": self.step, "held_out/tokens_per_step": tokens_per_step(acceptance), **flat})

    def _shuffle(self, epoch: int) -> list[list[int]]:
        texts = self.features.answers.rows
        lengths = {row: len(texts[row].prompt) + len(texts[row].answer) for row in self.features.train}
        return shuffled_batches(lengths, self.recipe.batch_size, f"{self.workshop.seed}-{epoch}")


def shuffled_batches(lengths: Mapping[int, int], size: int, seed: str) -> list[list[int]]:
    """The batches of an epoch: rows of similar length together, all in an order that the seed decides.

    Args:
        lengths: of every row, by its number.
    """
    rng, rows = random.Random(seed), list(lengths)
    rng.shuffle(rows)
    batches = []
    for start in range(0, len(rows), _WINDOW * size):
        window = sorted(rows[start : start + _WINDOW * size], key=lengths.__getitem__)
        batches += [window[first : first + size] for first in range(0, len(window), size)]
    rng.shuffle(batches)
    return batches
