"""Mixtures of experts: of many feed-forward networks in a layer, each token passes through a few that a router chooses.

Only chosen experts are computed: rows are sorted by expert and multiplied group by group. On a CPU every expert has its
own products, in any form of ``methods.engine.linear``, and the host reads which experts were chosen. On a GPU the
experts of a layer are one stacked weight and the groups one call, for which the host reads nothing: the pass stays one
queue of kernels, as CUDA graphs need.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from methods.engine.linear import Linear, LinearForm, make_linear
from methods.engine.sampling import in_float

_ALIGNED = 16  # bytes, of the rows of weights that torch multiplies in groups
_LEAST_CAPABILITY = (8, 0)  # of an NVIDIA GPU with such products

Activation = Callable[[Tensor], Tensor]
Gate = Callable[[Any, Tensor], Tensor]  # an activation, and gate and up side by side


@dataclass(frozen=True, slots=True)
class ClampedSwish:
    """gpt-oss' gate: (up + 1) * gate * sigmoid(alpha * gate), both limited beforehand.

    Attributes:
        alpha: slope of the sigmoid.
        limit: the most of ``gate`` and of the absolute value of ``up``.
    """

    alpha: float
    limit: float

    def join(self, gate: Float[Tensor, "R F"], up: Float[Tensor, "R F"]) -> Float[Tensor, "R F"]:
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses the experts of each row, and their weights in the sum.

    Attributes:
        scores: one number per expert.
        active: k, experts that a row passes through.
        softmax_first: whether the softmax is over all experts, of which k are kept, or over the k highest scores only.
        normalised: whether the weights that are kept are divided by their sum.
        correction: shares are sigmoids, and the k experts those with the highest sums of share and correction, which
            balances their load (DeepSeek-V3, arXiv 2412.19437, sec. 2.1.2); None: shares are softmaxes.
        factor: of the weights.
    """

    scores: Linear
    active: int
    softmax_first: bool
    normalised: bool
    correction: Float[Tensor, "E"] | None = None
    factor: float = 1.0

    def __call__(self, rows: Float[Tensor, "R D"]) -> tuple[Int[Tensor, "R k"], Float[Tensor, "R k"]]:
        """Experts and their weights, which are in 32 bit at least."""
        if self.correction is not None:
            return self._corrected(in_float(self.scores(in_float(rows))).sigmoid(), self.correction)
        scores = in_float(self.scores(rows))
        if not self.softmax_first:
            highest, chosen = scores.topk(self.active, dim=-1)
            return chosen, highest.softmax(-1)
        shares, chosen = scores.softmax(-1).topk(self.active, dim=-1)
        return chosen, shares / shares.sum(-1, keepdim=True) if self.normalised else shares

    def _corrected(
        self, shares: Float[Tensor, "R E"], correction: Float[Tensor, "E"]
    ) -> tuple[Int[Tensor, "R k"], Float[Tensor, "R k"]]:
        chosen = (shares + correction).topk(self.active, dim=-1).indices
        kept = shares.gather(1, chosen)
        return chosen, self.factor * (kept / (kept.sum(-1, keepdim=True) + 1e-20) if self.normalised else kept)


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The matrices of all experts of a layer, gate above up.

    Attributes:
        gate_up_bias, down_bias: None where the family has none.
    """

    gate_up: Float[Tensor, "E G D"]
    down: Float[Tensor, "E D F"]
    gate_up_bias: Float[Tensor, "E G"] | None = None
    down_bias: Float[Tensor, "E D"] | None = None


class Experts(ABC):
    """E gated feed-forward networks, of which each row passes through k (Shazeer et al. 2017, arXiv 1701.06538, eq. 1).

    Attributes:
        count: E.
        width: F, numbers between the two matrices of an expert.
        nbytes: of the matrices of all experts.
    """

    count: int
    width: int
    nbytes: int

    @abstractmethod
    def __call__(
        self, rows: Float[Tensor, "R D"], chosen: Int[Tensor, "R k"], weights: Float[Tensor, "R k"], gate: Gate
    ) -> Float[Tensor, "R D"]:
        """The weighted sum of what the chosen experts make of each row."""

    def products(self) -> Iterator[Linear]:
        """Matrices that are held one by one."""
        yield from ()


class SeparateExperts(Experts):
    """Experts with products of their own, see ``Experts``."""

    def __init__(self, weights: ExpertWeights, activation: Activation | ClampedSwish, form: LinearForm) -> None:
        self.count, _, self.width = weights.down.shape
        self._activation = activation
        self._gate_up = _separate(weights.gate_up, weights.gate_up_bias, form)
        self._down = _separate(weights.down, weights.down_bias, form)
        self.nbytes = sum(linear.nbytes for linear in self.products())

    def __call__(
        self, rows: Float[Tensor, "R D"], chosen: Int[Tensor, "R k"], weights: Float[Tensor, "R k"], gate: Gate
    ) -> Float[Tensor, "R D"]:
        order, sources = _by_expert(chosen)
        taken, parts, begin = rows[sources], [], 0
        for expert, size in enumerate(chosen.flatten().bincount(minlength=self.count).tolist()):
            if size:
                both = self._gate_up[expert](taken[begin : begin + size])
                parts.append(self._down[expert](gate(self._activation, both)))
                begin += size
        return _summed(torch.cat(parts), order, weights)

    def products(self) -> Iterator[Linear]:
        yield from self._gate_up
        yield from self._down


class StackedExperts(Experts):
    """Experts whose groups of rows are multiplied in one call, see ``Experts``.

    Where torch has no such call, every expert is computed for every row, and those not chosen have the weight 0.
    """

    def __init__(self, weights: ExpertWeights, activation: Activation | ClampedSwish) -> None:
        self.count, _, self.width = weights.down.shape
        self._activation, self._weights = activation, weights
        self.nbytes = sum(weight.numel() * weight.element_size() for weight in (weights.gate_up, weights.down))
        self.in_groups = can_group(weights.gate_up) and can_group(weights.down)

    def __call__(
        self, rows: Float[Tensor, "R D"], chosen: Int[Tensor, "R k"], weights: Float[Tensor, "R k"], gate: Gate
    ) -> Float[Tensor, "R D"]:
        if not self.in_groups:
            return self._every(rows, chosen, weights, gate)
        order, sources = _by_expert(chosen)
        owners = chosen.flatten()[order]
        ends = torch.searchsorted(owners, torch.arange(self.count, device=rows.device), right=True).int()
        own = self._weights
        both = _grouped(rows[sources], own.gate_up, own.gate_up_bias, owners, ends)
        made = _grouped(gate(self._activation, both), own.down, own.down_bias, owners, ends)
        return _summed(made, order, weights)

    def _every(self, rows: Tensor, chosen: Tensor, weights: Tensor, gate: Gate) -> Tensor:
        shares = weights.new_zeros(len(rows), self.count).scatter_(1, chosen, weights)
        own, total = self._weights, weights.new_zeros(rows.shape)
        for expert in range(self.count):
            first, last = (None if b is None else b[expert] for b in (own.gate_up_bias, own.down_bias))
            hidden = gate(self._activation, F.linear(rows, own.gate_up[expert], first))
            total += F.linear(hidden, own.down[expert], last) * shares[:, expert, None]
        return total.to(rows.dtype)


def make_experts(weights: ExpertWeights, activation: Activation | ClampedSwish, form: LinearForm) -> Experts:
    """The experts of a layer in the form that suits their device.

    Raises:
        ValueError: a form that the device, the type or the shape does not allow.
    """
    if weights.gate_up.device.type == "cpu":
        return SeparateExperts(weights, activation, form)
    return StackedExperts(weights, activation)


def can_group(weight: Float[Tensor, "E O I"]) -> bool:
    """Whether torch multiplies groups of rows with a stack of this type and shape in one call here."""
    if not hasattr(F, "grouped_mm") or weight.shape[2] * weight.element_size() % _ALIGNED:
        return False
    if weight.shape[1] * weight.element_size() % _ALIGNED:
        return False
    return weight.device.type != "cuda" or (
        weight.dtype == torch.bfloat16 and torch.cuda.get_device_capability(weight.device) >= _LEAST_CAPABILITY
    )


def expected_experts(experts: int, active: int, tokens: int) -> float:
    """Distinct experts that a pass of so many tokens is expected to touch: E (1 - (1 - k / E)^n).

    An estimate: it takes every expert to be equally likely and the tokens to be routed independently. Routers prefer
    some experts, and neighbouring tokens share them, so fewer are read.
    """
    return experts * (1.0 - (1.0 - active / experts) ** tokens)


def _by_expert(chosen: Int[Tensor, "R k"]) -> tuple[Int[Tensor, "N"], Int[Tensor, "N"]]:
    """Places in ``chosen``, flattened, in the order of the experts, and the row of each."""
    order = chosen.flatten().argsort(stable=True)
    return order, order // chosen.shape[1]


def _summed(made: Float[Tensor, "N D"], order: Int[Tensor, "N"], weights: Float[Tensor, "R k"]) -> Float[Tensor, "R D"]:
    """What the experts made, in the order of the experts, summed per row in 32 bit, always in the same order."""
    found = torch.empty_like(made)
    found[order] = made
    parts = in_float(found.view(*weights.shape, -1)) * weights[:, :, None]
    return parts.sum(1).to(made.dtype)


def _grouped(
    rows: Float[Tensor, "N I"],
    weight: Float[Tensor, "E O I"],
    bias: Float[Tensor, "E O"] | None,
    owners: Int[Tensor, "N"],
    ends: Int[Tensor, "E"],
) -> Float[Tensor, "N O"]:
    found = F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    return found if bias is None else found + bias[owners]


def _separate(weight: Tensor, bias: Tensor | None, form: LinearForm) -> Sequence[Linear]:
    biases = [None] * len(weight) if bias is None else list(bias.clone())
    return [make_linear([own], [b], form) for own, b in zip(weight, biases, strict=True)]
