"""The training loop of draft heads, exits and whole models.

The loss, the batches and the evaluation are functions of the caller; optimiser, schedule, gradient clipping, curves,
a checkpoint every minute and resuming are here. A step depends on the seed and its number alone, so a resumed training
ends exactly like an uninterrupted one, unless it ends after ``minutes``: their number of steps is the machine's.
"""

from __future__ import annotations

import math
import random
import shutil
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from methods.training.interface import TrainingContext, require

Precision = Literal["auto", "float32", "bfloat16"]
# What is minimised, in one piece or as parts to be added, and numbers for the curves.
Loss = tuple["Tensor | Mapping[str, Tensor]", Mapping[str, "Tensor | float | int"]]
Point = tuple[dict[str, Any], dict[str, float]]  # of the curve in the card, and of the training curves
Share = float | Callable[[int], float]  # of a learning rate
B = TypeVar("B")

STATE, SNAPSHOTS = "training.pt", "snapshots"
SAVE_EVERY_S = 60.0
_LOG_EVERY, _NORMS_EVERY = 10, 100  # steps
_WINDOW = 16  # batches sorted by length together


@dataclass(frozen=True)
class TrainingConfig:
    """How long and how fast to train.

    Attributes:
        steps: number of updates.
        batch_size: rows per update: dialogues, texts, or states.
        learning_rate: peak learning rate of AdamW.
        warmup: share of the steps in which the rate rises linearly; it falls along a cosine afterwards.
        final: learning rate at the end, as a share of the peak.
        weight_decay, betas: of AdamW.
        clip: maximum norm of the gradient.
        precision: of matrix products; auto is bfloat16 where the hardware supports it natively.
        evaluations: number of evaluations, evenly spread over the steps.
        minutes: of updates after which the training ends, whatever the number of steps: processor minutes of all
            threads on a CPU, else minutes of the clock. Whatever depends on ``steps``, such as the learning rate, then
            depends on the share of this time. None: it ends after ``steps``.
    """

    eps: ClassVar[float] = 1e-8

    steps: int = 2000
    batch_size: int = 16
    learning_rate: float = 1e-3
    warmup: float = 0.04
    final: float = 0.05
    weight_decay: float = 0.0
    betas: Sequence[float] = (0.9, 0.95)
    clip: float = 1.0
    precision: Precision = "auto"
    evaluations: int = 8
    minutes: float | None = None

    def __post_init__(self) -> None:
        require("at least 1", steps=self.steps, batch_size=self.batch_size, evaluations=self.evaluations)
        require("above 0", learning_rate=self.learning_rate, clip=self.clip, minutes=self.minutes)

    def place(self, step: int, seconds: float) -> int:
        """Where the schedule of ``steps`` is after so many updates, which took so many seconds."""
        return step if self.minutes is None else min(self.steps, int(self.steps * seconds / (60 * self.minutes)))

    def rate(self, step: int) -> float:
        """Learning rate of a step as a share of the peak."""
        rising = max(1, round(self.warmup * self.steps))
        if step < rising:
            return (step + 1) / rising
        way = (step - rising) / max(1, self.steps - rising)
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * way))


class Epochs:
    """Batches of row numbers, each row once per epoch.

    Args:
        make: all batches of an epoch, from its number; epochs need not have equally many.
    """

    def __init__(self, make: Callable[[int], list[list[int]]]) -> None:
        self._make = make
        self._starts = [0]  # of the epochs that are known, in steps
        self._made: tuple[int, list[list[int]]] | None = None

    @classmethod
    def shuffled(cls, lengths: Mapping[int, int], size: int, seed: int) -> Epochs:
        """Batches of ``size`` rows of similar length, in a random order; ``lengths`` by row number."""

        def make(epoch: int) -> list[list[int]]:
            rng, rows = random.Random(f"{seed}-{epoch}"), list(lengths)
            rng.shuffle(rows)
            batches = []
            for start in range(0, len(rows), _WINDOW * size):
                window = sorted(rows[start : start + _WINDOW * size], key=lengths.__getitem__)
                batches += [window[first : first + size] for first in range(0, len(window), size)]
            rng.shuffle(batches)
            return batches

        return cls(make)

    def batch(self, step: int) -> list[int]:
        """Row numbers of a step."""
        epoch = self._of(step)
        return self._batches(epoch)[step - self._starts[epoch]]

    def count(self, steps: int) -> float:
        """Epochs in so many steps."""
        epoch = self._of(steps)
        return round(epoch + (steps - self._starts[epoch]) / len(self._batches(epoch)), 2)

    def _of(self, step: int) -> int:
        while self._starts[-1] <= step:
            self._starts.append(self._starts[-1] + len(self._batches(len(self._starts) - 1)))
        return bisect_right(self._starts, step) - 1

    def _batches(self, epoch: int) -> list[list[int]]:
        if self._made is None or self._made[0] != epoch:
            self._made = (epoch, self._make(epoch))
        return self._made[1]


class Trainer:
    """Trains the parameters of a module that require a gradient, resuming from ``training.pt`` in the output folder.

    Args:
        config: how long and how fast.
        module: set to training mode before a step, and to evaluation mode before an evaluation.
        context: folder, seed, progress and log.
        data: identifies what is learnt from; a checkpoint of a training on other data is refused.
        shares: factors on the learning rate of parameters by the beginning of their names, or functions of the step.

    Attributes:
        learnt: the trained parameters by name.
        step: number of updates done.
        seconds: that they took; see ``TrainingConfig.minutes``.
        curve: results of the evaluations in order.

    Raises:
        ValueError: the folder holds the checkpoint of a training on other data.
    """

    def __init__(
        self,
        config: TrainingConfig,
        module: nn.Module,
        context: TrainingContext,
        data: str,
        shares: Mapping[str, Share] | None = None,
    ) -> None:
        self.config, self.module, self.context, self.data = config, module, context, data
        self.learnt = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self.device = next(iter(self.learnt.values())).device
        betas = config.betas[0], config.betas[1]
        self._shares = dict(shares or {})
        self.optimizer = torch.optim.AdamW(self._groups(), config.learning_rate, betas, config.eps, config.weight_decay)
        self.step, self.seconds, self.curve = 0, 0.0, list[dict[str, Any]]()
        self._clock = process_time if self.device.type == "cpu" else perf_counter
        self._file = context.output / STATE
        self._restore()

    def run(
        self,
        loss_fn: Callable[[B, int], Loss],
        batches: Callable[[int], B],
        evaluate: Callable[[], Point],
        ended: Callable[[Sequence[Mapping[str, Any]]], bool] = lambda curve: False,
    ) -> None:
        """Train to the last step.

        Args:
            loss_fn: from a batch and its place in the schedule, the number of the step unless ``minutes`` are given.
            batches: the batch of a step; it may draw random numbers.
            evaluate: measures the module.
            ended: whether the evaluations so far say that more steps are of no use.
        """
        config, saved = self.config, perf_counter()
        marks = sorted({round(config.steps * (n + 1) / config.evaluations) for n in range(config.evaluations)})
        while (begin := self.place) < config.steps and not ended(self.curve):
            self.update(loss_fn, batches)
            if bisect_right(marks, self.place) > bisect_right(marks, begin):
                self._evaluate(evaluate)
            if perf_counter() - saved > SAVE_EVERY_S:
                self._save()
                saved = perf_counter()
            self.context.report_progress("training (steps)", self.place, config.steps)
        self._save()

    @property
    def place(self) -> int:
        """See ``TrainingConfig.place``."""
        return self.config.place(self.step, self.seconds)

    def update(self, loss_fn: Callable[[B, int], Loss], batches: Callable[[int], B]) -> None:
        """One step."""
        begin, place = self._clock(), self.place
        for group in self.optimizer.param_groups:
            share = self._shares.get(group.get("prefix", ""), 1.0)
            factor = share(place) if callable(share) else share
            group["lr"] = self.config.learning_rate * self.config.rate(place) * factor
        torch.manual_seed(self.context.seed * 1_000_003 + self.step)  # noise and dropout, also after resuming
        self.module.train()
        batch = batches(self.step)
        with autocast(self.config.precision, self.device):
            found, seen = loss_fn(batch, place)
        judged = (self.step + 1) % _NORMS_EVERY == 0
        norms = self._norms(found) if isinstance(found, Mapping) and judged else {}
        loss = added(found)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.learnt.values(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.seconds += self._clock() - begin
        if self.step % _LOG_EVERY == 0 or self.place == self.config.steps:
            numbers = {"loss": loss.detach(), "gradient": norm, **norms, **seen}
            self.context.log({"step": self.step, **{name: float(value) for name, value in numbers.items()}})

    def _norms(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of the gradient of each part, before clipping: one that outweighs the others leaves them little."""
        learnt = list(self.learnt.values())
        grads = {
            name: torch.autograd.grad(part, learnt, retain_graph=True, allow_unused=True)
            for name, part in parts.items()
        }
        return {
            f"gradient_{name}": torch.stack([grad.norm() for grad in found if grad is not None]).norm()
            for name, found in grads.items()
        }

    @property
    def facts(self) -> dict[str, Any]:
        """For the card."""
        return {
            "parameters": sum(parameter.numel() for parameter in self.learnt.values()),
            "steps": self.step,
            **self._spent(2),
            "curve": self.curve,
        }

    @torch.no_grad()
    def _evaluate(self, evaluate: Callable[[], Point]) -> None:
        self.module.eval()
        point, numbers = evaluate()
        self.curve.append({"step": self.step, **self._spent(3), **point})
        self.context.log({"step": self.step, **numbers})

    def _spent(self, digits: int) -> dict[str, float]:
        """Of a training by ``minutes`` those that it took; others end alike on every machine."""
        return {} if self.config.minutes is None else {"minutes": round(self.seconds / 60, digits)}

    def _groups(self) -> list[dict[str, Any]]:
        others = [p for name, p in self.learnt.items() if not name.startswith(tuple(self._shares))]
        groups: list[dict[str, Any]] = [{"params": others}]
        for prefix in self._shares:
            groups.append({"params": [p for n, p in self.learnt.items() if n.startswith(prefix)], "prefix": prefix})
        return [group for group in groups if group["params"]]

    def _save(self) -> None:
        state = {"learnt": self.learnt, "optimizer": self.optimizer.state_dict(), "data": self.data}
        draft = self._file.with_suffix(".tmp")
        torch.save({"step": self.step, "seconds": self.seconds, "curve": self.curve, **state}, draft)
        draft.replace(self._file)

    def _restore(self) -> None:
        if not self._file.exists():
            return
        state = torch.load(self._file, map_location=self.device, weights_only=True)
        if state.get("data") != self.data:
            raise ValueError(
                f"{self._file.parent} holds an unfinished training on other data. Delete it, or set force=true."
            )
        with torch.no_grad():
            for name, parameter in self.learnt.items():
                parameter.copy_(state["learnt"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds, self.curve = state["step"], state.get("seconds", 0.0), state["curve"]


def added(loss: Tensor | Mapping[str, Tensor]) -> Tensor:
    """What is minimised, in one piece."""
    return sum(loss.values(), torch.zeros(())) if isinstance(loss, Mapping) else loss


def discard(folder: Path) -> None:
    """Remove the training state from the output folder, after the result is written."""
    (folder / STATE).unlink(missing_ok=True)
    shutil.rmtree(folder / SNAPSHOTS, ignore_errors=True)


def autocast(chosen: Precision, device: torch.device) -> torch.autocast:
    """Mixed precision; ``auto`` is bfloat16 where the hardware supports it natively."""
    able = device.type == "cuda" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.autocast(device.type, torch.bfloat16, enabled=chosen == "bfloat16" or (chosen == "auto" and able))


def attention_over_short_rows(device: torch.device) -> AbstractContextManager[Any]:
    """On a CPU, attention by matrix products: over ten tokens, the fused kernel's gradient takes two to three times as
    long.
    """
    return sdpa_kernel(SDPBackend.MATH) if device.type == "cpu" else nullcontext()
