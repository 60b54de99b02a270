"""The one optimisation loop of everything that is trained here: draft heads, and whole models.

What differs, the loss and what is measured on the way, is a subclass; here are updates, schedule, the gradient's
bound, curves, a checkpoint every minute, and going on after a kill. What a step sees depends on the seed and its number
alone, so an interrupted training goes on as if it had not been.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

Precision = Literal["auto", "float32", "bfloat16"]

STATE = "training.pt"
SAVE_EVERY_S = 60.0
_LOG_EVERY = 10  # steps


@runtime_checkable
class Plan(Protocol):
    """How long is trained, and how fast.

    Attributes:
        steps: updates.
        learning_rate: at its highest.
        clip: most norm of the gradient.
        evaluations: times that what was learnt is measured, evenly spread over the steps.
    """

    @property
    def steps(self) -> int: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def clip(self) -> float: ...
    @property
    def evaluations(self) -> int: ...

    def rate(self, step: int) -> float:
        """The learning rate of a step, as a share of the highest."""
        ...


@runtime_checkable
class Place(Protocol):
    """Where a training works: ``Workshop`` and ``Foundry`` of methods/decoder.py."""

    @property
    def folder(self) -> Path: ...
    @property
    def seed(self) -> int: ...
    @property
    def progress(self) -> Callable[[str, int, int], None]: ...
    @property
    def log(self) -> Callable[[Mapping[str, float]], None]: ...


class Epochs:
    """Batches, all of them once an epoch, those of one epoch made at a time.

    Args:
        length: batches of an epoch.
        make: they, as numbers of rows, from the number of the epoch.
    """

    def __init__(self, length: int, make: Callable[[int], list[list[int]]]) -> None:
        self._length, self._make = length, make
        self._made: tuple[int, list[list[int]]] | None = None

    def batch(self, step: int) -> list[int]:
        """What a step sees."""
        epoch, place = divmod(step, self._length)
        if self._made is None or self._made[0] != epoch:
            self._made = (epoch, self._make(epoch))
        return self._made[1][place]

    def count(self, steps: int) -> float:
        """So many epochs are so many steps."""
        return round(steps / self._length, 2)


class Loop:
    """Updates of some parameters up to the end of a plan, going on from a checkpoint in the place's folder.

    Args:
        learnt: the parameters, by name.
        optimizer: of all of them; its learning rate is set here, times the ``share`` of a group that has one.
        plan: how long and how fast.
        place: folder, seed, and whom to tell.
        about: what a checkpoint must agree in, by name, e.g. the hash of the texts.
        save_every_s: seconds between two checkpoints.

    Attributes:
        step: updates done.
        curve: what ``evaluate`` found, in order.

    Raises:
        ValueError: the folder holds the checkpoint of a training on something else.
    """

    def __init__(
        self,
        learnt: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        place: Place,
        about: Mapping[str, str],
        save_every_s: float = SAVE_EVERY_S,
    ) -> None:
        self.learnt, self.optimizer, self.plan, self.place, self.about = (
            dict(learnt),
            optimizer,
            plan,
            place,
            dict(about),
        )
        self.file, self.save_every_s = place.folder / STATE, save_every_s
        self.step = 0
        self.curve: list[dict[str, Any]] = []
        self._restore()

    def loss(self) -> tuple[Tensor, Mapping[str, Tensor | float | int]]:
        """What is minimised in the step that comes, and numbers for the curves."""
        raise NotImplementedError

    def evaluate(self) -> None:
        """Measure what is learnt so far, and add it to the curve."""
        raise NotImplementedError

    def run(self) -> None:
        """Train to the end."""
        plan = self.plan
        marks = {round(plan.steps * (n + 1) / plan.evaluations) for n in range(plan.evaluations)}
        saved = perf_counter()
        while self.step < plan.steps:
            self._update()
            if self.step in marks:
                self.evaluate()
            if perf_counter() - saved > self.save_every_s:
                self._save()
                saved = perf_counter()
            self.place.progress("training (steps)", self.step, plan.steps)
        self._save()

    def _update(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.learning_rate * self.plan.rate(self.step) * group.get("share", 1.0)
        torch.manual_seed(self.place.seed * 1_000_003 + self.step)  # noise and dropout of a step, also after a kill
        loss, seen = self.loss()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.learnt.values(), self.plan.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        if self.step % _LOG_EVERY == 0 or self.step == self.plan.steps:
            numbers = {"loss": loss.detach(), "gradient": norm, **seen}
            self.place.log({"step": self.step, **{name: float(value) for name, value in numbers.items()}})

    def _save(self) -> None:
        state = {
            "step": self.step,
            "learnt": self.learnt,
            "optimizer": self.optimizer.state_dict(),
            "curve": self.curve,
            **self.about,
        }
        draft = self.file.with_suffix(".tmp")
        torch.save(state, draft)
        draft.replace(self.file)

    def _restore(self) -> None:
        if not self.file.exists():
            return
        device = next(iter(self.learnt.values())).device
        state = torch.load(self.file, map_location=device, weights_only=True)
        for name, value in self.about.items():
            if state[name] != value:
                raise ValueError(
                    f"{self.file.parent} holds a training on other {name} than there are now. Delete it (or "
                    "force=true) to begin anew."
                )
        with torch.no_grad():
            for name, parameter in self.learnt.items():
                parameter.copy_(state["learnt"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.curve = state["step"], state["curve"]


def discard(folder: Path) -> None:
    """Remove the checkpoint: what was trained is written, and this is no piece of it."""
    (folder / STATE).unlink(missing_ok=True)


def autocast(chosen: Precision, device: torch.device) -> torch.autocast:
    """The precision of the products; ``auto`` is bfloat16 where the hardware multiplies it natively."""
    able = device.type == "cuda" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.autocast(device.type, torch.bfloat16, enabled=chosen == "bfloat16" or (chosen == "auto" and able))


def attention_over_short_rows(device: torch.device) -> AbstractContextManager[Any]:
    """Within it, a CPU's attention is made of matrix products: over some ten tokens, the gradient of the fused one is
    two to three times as slow.
    """
    return sdpa_kernel(SDPBackend.MATH) if device.type == "cpu" else nullcontext()
