"""Losses over the layers of a model, so that it can be left early: CALM's, FREE's, LayerSkip's, and HASH-EE's passes.

    calm    sum over the layers of w_i CE_i, w_i = i / (1 + ... + L) (Schuster et al. 2022, arXiv 2207.07061, sec. 4)
    free    (k CE_k + L CE_L) / (k + L), and ``distillation`` times the layerwise distillation of the layers up to k
            (Bae et al. 2023, arXiv 2310.05424, sec. 4.1)

CE_i is the cross-entropy of the model's own norm and output matrix on the state after layer i, so that the lens alone
reads every layer after training. The loss makes exits work: with the usual loss, early layers of the same model agree
with the last one far less often.

Layerwise distillation: mean squared error between states of the layers up to k and the detached states of as many
layers spread evenly over the model, as a share of the mean square of the latter: states grow with the depth where norms
come before the sub-layers, and an error in absolute terms then drives those of all layers apart without end.
``dynamic`` (the published default) pairs them from the last one down: each takes the nearest state among the layers
strictly below the one chosen before, as long as there is one. ``uniform`` pairs them in order.

LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710) trains a finished model on. Layer l of L, counted from 0, is dropped
for a row of the batch with a probability that grows with its depth (sec. 4.1.1, S(t) = 1): ``drop_rates``, ``dropped``.
The loss is the mean of CE_l over the layers of a step with weights that grow, too (sec. 4.1.2): ``LayerSkipLoss``.

HASH-EE trains with the exits it decodes with: ``frozen_from`` makes each token's state stay as it is above its depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from methods.training.interface import require

Exits = Literal["calm", "free"]
Pairing = Literal["dynamic", "uniform"]
Curriculum = Literal["rotational", "gradual"]

CrossEntropy = Callable[[Float[Tensor, "n D"]], Float[Tensor, ""]]


@runtime_checkable
class LayerLoss(Protocol):
    """A loss over the states after all layers."""

    def __call__(
        self, states: Sequence[Float[Tensor, "n D"]], cross_entropy: CrossEntropy
    ) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
        """What is minimised, and its parts for the curves.

        Args:
            states: raw, after each layer, at the places that are judged.
            cross_entropy: of the model's own norm and output matrix on such states.
        """
        ...


class CalmLoss:
    """See the head of this file."""

    def __call__(
        self, states: Sequence[Float[Tensor, "n D"]], cross_entropy: CrossEntropy
    ) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
        losses = torch.stack([cross_entropy(state) for state in states])
        weights = torch.arange(1, len(losses) + 1, device=losses.device, dtype=losses.dtype)
        parts = {f"loss_{depth}": loss for depth, loss in enumerate(losses.detach(), 1)}
        return (weights * losses).sum() / weights.sum(), parts


@dataclass(frozen=True, slots=True)
class FreeLoss:
    """See the head of this file.

    Attributes:
        shallow: k, layers of the shallow exit.
        distillation: weight of the layerwise distillation; 0: none.
        pairing: which layer learns from which.
    """

    shallow: int
    distillation: float = 0.5
    pairing: Pairing = "dynamic"

    def __call__(
        self, states: Sequence[Float[Tensor, "n D"]], cross_entropy: CrossEntropy
    ) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
        k, layers = self.shallow, len(states)
        shallow, deep = cross_entropy(states[k - 1]), cross_entropy(states[-1])
        loss = (k * shallow + layers * deep) / (k + layers)
        parts = {"loss_shallow": shallow.detach(), "loss_deep": deep.detach()}
        if self.distillation:
            distance = self.distance(states)
            loss = loss + self.distillation * distance
            parts["distillation"] = distance.detach()
        return loss, parts

    def distance(self, states: Sequence[Float[Tensor, "n D"]]) -> Float[Tensor, ""]:
        """Mean over the pairs of the relative squared error."""
        k, layers = self.shallow, len(states)
        teachers = [states[round(layers * (place + 1) / k) - 1].detach() for place in range(k)]
        students = list(states[:k])
        if self.pairing == "uniform":
            pairs = list(zip(students, teachers, strict=True))
        else:
            pairs = _nearest_below(students, teachers)
        return torch.stack([_relative(student, teacher) for student, teacher in pairs]).mean()


def make_loss(exits: Exits, layers: int, shallow: int | None = None, distillation: float = 0.5) -> LayerLoss:
    """A loss by its name.

    Args:
        exits: see the head of this file.
        layers: of the model.
        shallow: of ``free``; None: a quarter of the layers.
        distillation: of ``free``.

    Raises:
        ValueError: a shallow exit that is none, or a weight below 0.
    """
    if exits == "calm":
        return CalmLoss()
    k = max(1, round(layers / 4)) if shallow is None else shallow
    require("at least 0", distillation=distillation)
    if not 1 <= k < layers:
        raise ValueError(f"shallow must be from 1 to {layers - 1} for {layers} layers, got {k}. Set train.shallow.")
    return FreeLoss(k, distillation)


@dataclass(frozen=True, slots=True)
class LayerSkipLoss:
    """Which exits learn in a step, and their weights; see the head of this file.

    With l from 0, e(l) = s (0 + 1 + ... + l) before the last layer and e(L - 1) = L - 1 + s (0 + ... + L - 2). The
    weights of a step are the e(l) of the exits that learn in it, divided by their sum. The last layer always learns.

    Attributes:
        layers: L.
        scale: s, between 0, where the last layer learns alone, and 1.
        curriculum: ``rotational``, every ``interval``-th exit, from one layer further on in each step; ``gradual``, the
            exits from the last one down, one more each time a share of 1 / 2L of the training is over.
        interval: R of ``rotational``.

    Raises:
        ValueError: a number out of range.
    """

    layers: int
    scale: float = 0.2
    curriculum: Curriculum = "rotational"
    interval: int = 8

    def __post_init__(self) -> None:
        require("from 0 to 1", scale=self.scale)
        require("at least 1", interval=self.interval)

    def weights(self, step: int, share: float) -> dict[int, float]:
        """By depth (layers run) of the exits that learn in a step; they add up to 1.

        Args:
            step: its number.
            share: of the training that is over, from 0 to 1.
        """
        last = self.layers - 1
        if self.curriculum == "rotational":
            learning = range(step % self.interval, last, self.interval)
        else:
            learning = range(max(0, last - int(2 * self.layers * share)), last)
        each = {layer + 1: self.scale * layer * (layer + 1) / 2 for layer in learning}
        each = {depth: weight for depth, weight in each.items() if weight}
        each[self.layers] = last + self.scale * (last - 1) * last / 2 if last else 1.0
        total = sum(each.values())
        return {depth: weight / total for depth, weight in each.items()}


def drop_rates(layers: int, most: float) -> list[float]:
    """p_l = ``most`` (exp(l ln 2 / (L - 1)) - 1) by layer: 0 at the first one, ``most`` at the last one."""
    return [most * (math.exp(layer * math.log(2) / max(1, layers - 1)) - 1) for layer in range(layers)]


@contextmanager
def dropped(layers: Iterable[nn.Module], rates: Sequence[float]) -> Iterator[None]:
    """Within it, each row of a batch leaves out each layer of transformers with its probability.

    A layer computes the rows that keep it alone, and does not run without any. Draws are those of PyTorch's generator.
    """
    for layer, rate in zip(layers, rates, strict=True):
        layer.forward = _of_kept_rows(layer.forward, rate)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _of_kept_rows(forward: Callable[..., Tensor], rate: float) -> Callable[..., Tensor]:
    def call(hidden: Float[Tensor, "B T D"], *given: Any, **named: Any) -> Float[Tensor, "B T D"]:
        batch = len(hidden)
        kept = (torch.rand(batch) >= rate).nonzero()[:, 0].to(hidden.device)
        if len(kept) == batch:
            return forward(hidden, *given, **named)
        if not len(kept):
            return hidden
        own = [_rows(value, kept, batch) for value in given]
        made = forward(hidden[kept], *own, **{name: _rows(value, kept, batch) for name, value in named.items()})
        return hidden.index_copy(0, kept, made)

    return call


def _rows(value: Any, kept: Int[Tensor, "b"], batch: int) -> Any:
    """Of what a layer is given, the part of some rows; what all rows share stays."""
    if isinstance(value, tuple):
        return tuple(_rows(part, kept, batch) for part in value)
    return value[kept] if isinstance(value, Tensor) and value.dim() > 1 and len(value) == batch > 1 else value


@contextmanager
def frozen_from(layers: Iterable[nn.Module], depths: Int[Tensor, "B T"]) -> Iterator[None]:
    """Within it, layers of transformers do not change a state after so many layers.

    Attention still sees all states, each layer through its own projections, as in decoding with these exits.

    Args:
        layers: all of the model's, in order.
        depths: layers that each place takes.
    """

    def freeze(index: int, before: Tensor, behind: Tensor) -> Tensor:
        return torch.where((depths > index)[:, :, None], behind, before)

    with _watched(layers, freeze):
        yield


@contextmanager
def collected(layers: Iterable[nn.Module]) -> Iterator[list[Float[Tensor, "B T D"]]]:
    """Within it, the states after layers of transformers are appended to a list as they are computed."""
    states: list[Tensor] = []

    def keep(index: int, before: Tensor, behind: Tensor) -> Tensor:
        states.append(behind)
        return behind

    with _watched(layers, keep):
        yield states


@contextmanager
def _watched(layers: Iterable[nn.Module], change: Callable[[int, Tensor, Tensor], Tensor]) -> Iterator[None]:
    """Every layer returns ``change`` of its number, its input and its output."""

    def hook(index: int) -> Callable[[Any, Any, Any], Any]:
        def call(layer: Any, given: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return (change(index, given[0], output[0]), *output[1:])
            return change(index, given[0], output)

        return call

    handles = [layer.register_forward_hook(hook(index)) for index, layer in enumerate(layers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _relative(student: Float[Tensor, "n D"], teacher: Float[Tensor, "n D"]) -> Float[Tensor, ""]:
    return F.mse_loss(student, teacher) / teacher.square().mean()


def _nearest_below(students: Sequence[Tensor], teachers: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Teachers from the last one down, each with the nearest student below the one chosen before."""
    pairs, bound = [], len(students)
    for teacher in reversed(teachers):
        if not bound:
            break
        with torch.no_grad():
            bound = int(torch.stack([F.mse_loss(student, teacher) for student in students[:bound]]).argmin())
        pairs.append((students[bound], teacher))
    return pairs
