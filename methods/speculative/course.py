"""Training a draft head: the one optimisation loop of all of them, on features of the target's own answers.

A head is a ``Learner``: it knows its loss and what it would have drafted. Everything else is here: order of the
batches, AdamW with a warm-up and a cosine, mixed precision, curves, a checkpoint every minute, and the held-out
acceptance. What a step sees depends on the seed and its number alone, so an interrupted training goes on as if it had
not been.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor, nn

from methods.decoder import Workshop
from methods.speculative.features import Batch, Features

Precision = Literal["auto", "float32", "bfloat16"]

_STATE = "training.pt"
_WINDOW = 16  # batches that are sorted by length together
_SAVE_EVERY_S = 60.0
_LOG_EVERY = 10  # steps
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


def discard(folder: Path) -> None:
    """Remove the checkpoint: the part is written, and this is no piece of it."""
    (folder / _STATE).unlink(missing_ok=True)


class _Course:
    def __init__(self, learner: Learner, features: Features, recipe: Recipe, workshop: Workshop) -> None:
        self.learner, self.features, self.recipe, self.workshop = learner, features, recipe, workshop
        self.learnt = {name: p for name, p in learner.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(
            self.learnt.values(), recipe.learning_rate, betas=recipe.betas, weight_decay=recipe.weight_decay
        )
        self.file = workshop.folder / _STATE
        self.step = 0
        self.curve: list[dict[str, Any]] = []
        self._order: tuple[int, list[list[int]]] = (0, self._shuffle(0))
        self._epoch_steps = len(self._order[1])
        self._restore()

    def run(self) -> None:
        marks = {round(self.recipe.steps * (n + 1) / self.recipe.evaluations) for n in range(self.recipe.evaluations)}
        saved = perf_counter()
        while self.step < self.recipe.steps:
            self._update()
            if self.step in marks:
                self._evaluate()
            if perf_counter() - saved > _SAVE_EVERY_S:
                self._save()
                saved = perf_counter()
            self.workshop.progress("training (steps)", self.step, self.recipe.steps)
        self._save()

    def facts(self) -> dict[str, Any]:
        answers = self.features.answers
        last = self.curve[-1] if self.curve else {}
        return {
            "answers": len(answers.rows),
            "answer_tokens": answers.tokens,
            "answers_sha256": answers.sha256,
            "parameters": sum(p.numel() for p in self.learnt.values()),
            "steps": self.step,
            "epochs": round(self.step / self._epoch_steps, 2),
            "acceptance": last.get("acceptance"),
            "tokens_per_step_of_a_chain": last.get("tokens_per_step"),
            "curve": self.curve,
        }

    def _update(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate * self.recipe.rate(self.step)
        torch.manual_seed(self.workshop.seed * 1_000_003 + self.step)  # noise and dropout of a step, also after a kill
        self.learner.train()
        batch = self.features.batch(self._rows(self.step))
        with self._precision(batch.hidden.device):
            loss, seen = self.learner.loss(batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.learnt.values(), self.recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        if self.step % _LOG_EVERY == 0 or self.step == self.recipe.steps:
            numbers = {"loss": loss.detach(), "gradient": norm, **seen}
            self.workshop.log({"step": self.step, **{name: float(value) for name, value in numbers.items()}})

    @torch.no_grad()
    def _evaluate(self) -> None:
        self.learner.eval()
        rows = list(self.features.held_out)[:_JUDGED]
        counts = []
        for start in range(0, len(rows), self.recipe.batch_size):
            batch = self.features.batch(rows[start : start + self.recipe.batch_size])
            with self._precision(batch.hidden.device):
                counts.append(self.learner.hits(batch))
        right, judged = (torch.stack(numbers).sum(0) for numbers in zip(*counts, strict=True))
        shares = right / judged.clamp(min=1)[:, None]
        acceptance = [round(float(share), 4) for share in shares[:, 0]]
        point = {"step": self.step, "acceptance": acceptance, "tokens_per_step": round(tokens_per_step(acceptance), 4)}
        self.curve.append(point | {"ranks": [[round(float(x), 4) for x in row] for row in shares]})
        flat = {f"held_out/acceptance_{place + 1}": share for place, share in enumerate(acceptance)}
        self.workshop.log({"step": self.step, "held_out/tokens_per_step": tokens_per_step(acceptance), **flat})

    def _rows(self, step: int) -> list[int]:
        epoch, place = divmod(step, self._epoch_steps)
        return self._batches(epoch)[place]

    def _batches(self, epoch: int) -> list[list[int]]:
        """The batches of an epoch: dialogues of similar length together, all in an order that the seed decides."""
        if self._order[0] != epoch:
            self._order = (epoch, self._shuffle(epoch))
        return self._order[1]

    def _shuffle(self, epoch: int) -> list[list[int]]:
        rng = random.Random(f"{self.workshop.seed}-{epoch}")
        rows, texts = list(self.features.train), self.features.answers.rows
        rng.shuffle(rows)
        size = self.recipe.batch_size
        batches = []
        for start in range(0, len(rows), _WINDOW * size):
            window = rows[start : start + _WINDOW * size]
            window.sort(key=lambda row: len(texts[row].prompt) + len(texts[row].answer))
            batches += [window[first : first + size] for first in range(0, len(window), size)]
        rng.shuffle(batches)
        return batches

    def _precision(self, device: torch.device) -> torch.autocast:
        chosen = self.recipe.precision
        able = device.type == "cuda" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        return torch.autocast(device.type, torch.bfloat16, enabled=chosen == "bfloat16" or (chosen == "auto" and able))

    def _save(self) -> None:
        state = {
            "step": self.step,
            "learnt": self.learnt,
            "optimizer": self.optimizer.state_dict(),
            "curve": self.curve,
            "answers": self.features.answers.sha256,
        }
        draft = self.file.with_suffix(".tmp")
        torch.save(state, draft)
        draft.replace(self.file)

    def _restore(self) -> None:
        if not self.file.exists():
            return
        state = torch.load(self.file, map_location=self.workshop.target.device, weights_only=True)
        if state["answers"] != self.features.answers.sha256:
            raise ValueError(
                f"{self.workshop.folder} holds a training on other answers of the target than the ones that lie in the "
                "cache now. Delete it (or force=true) to begin anew."
            )
        with torch.no_grad():
            for name, parameter in self.learnt.items():
                parameter.copy_(state["learnt"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.curve = state["step"], state["curve"]
