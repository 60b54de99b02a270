"""Invertible maps of sequences, from which a density over latent sequences is made (Glow, Kingma & Dhariwal 2018, arXiv
1807.03039; for sequences Ma et al. 2019, FlowSeq, arXiv 1909.02480, sec. 3.2 and 3.3).

``forward`` goes from the latent z to the noise and returns log |det d noise / d z| per row, so that

    log p(z) = log N(forward(z)) + log determinant;

``inverse`` goes from noise to z. Determinants and statistics count real positions only; padded positions are zero
everywhere. Everything needs 32 bit, since errors of an inversion grow with depth.

A ``Build`` makes the networks inside the couplings, which read a ``Condition``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

Split = Literal["halves", "alternate", "time"]
Place = Literal["first", "inner"]
Build = Callable[[int, int, Place], nn.Module]
"""Makes the network of a coupling from channels in, channels out, and whether it is of a level's first unit."""

_HEADS = (32, 16, 8, 4, 2, 1)
_GENTLE = 2.0  # sigmoid(0 + 2): a coupling begins close to nothing


@dataclass(frozen=True, slots=True)
class Condition:
    """Input of a flow besides its own state.

    Attributes:
        present: [B, T] where there is a position. Their number in a row is a multiple of ``unit`` of the flow.
        source: passed to the networks.
    """

    present: Bool[Tensor, "B T"]
    source: Any = None

    def every_second(self, first: int) -> Condition:
        """Of the even positions, or of the odd ones."""
        return replace(self, present=self.present[:, first::2])

    def hide(self, hidden: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Set padded positions to zero."""
        return hidden * self.present[:, :, None].to(hidden.dtype)

    def total(self, logs: Float[Tensor, "B T D"]) -> Float[Tensor, "B"]:
        """Sum over real positions and all channels."""
        return self.hide(logs).sum((1, 2))


class ActNorm(nn.Module):
    """Scale and shift of every channel, set by the first batch so that its real positions have mean 0 and deviation 1.

    (The released code counts padding as data.)
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.log_scale, self.shift = nn.Parameter(torch.zeros(channels)), nn.Parameter(torch.zeros(channels))
        self.initialising = False

    def forward(self, z: Float[Tensor, "B T D"], condition: Condition) -> tuple[Tensor, Tensor]:
        if self.initialising:
            self._set(z[condition.present])
        noise = condition.hide(z * self.log_scale.exp() + self.shift)
        return noise, condition.present.sum(1) * self.log_scale.sum()

    def inverse(self, noise: Float[Tensor, "B T D"], condition: Condition) -> Float[Tensor, "B T D"]:
        return condition.hide((noise - self.shift) * (-self.log_scale).exp())

    @torch.no_grad()
    def _set(self, rows: Float[Tensor, "N D"]) -> None:
        scale = 1 / rows.std(0, unbiased=False).clamp(min=1e-6)
        self.log_scale.copy_(scale.log())
        self.shift.copy_(-rows.mean(0) * scale)


class HeadwiseLinear(nn.Module):
    """One matrix for all heads and positions; channels of a head are adjacent, or interleaved.

    The inverse is computed where it is needed: a stored one must be refreshed after training, or samples are silently
    wrong.
    """

    def __init__(self, channels: int, interleaved: bool) -> None:
        super().__init__()
        size = next(size for size in _HEADS if channels % size == 0)
        self.heads, self.interleaved = channels // size, interleaved
        self.weight = nn.Parameter(torch.linalg.qr(torch.randn(size, size))[0])

    def forward(self, z: Float[Tensor, "B T D"], condition: Condition) -> tuple[Tensor, Tensor]:
        log_determinant = torch.linalg.slogdet(self.weight)[1]
        return self._multiply(z, self.weight), condition.present.sum(1) * self.heads * log_determinant

    def inverse(self, noise: Float[Tensor, "B T D"], condition: Condition) -> Float[Tensor, "B T D"]:
        return self._multiply(noise, torch.linalg.inv(self.weight))

    def _multiply(self, z: Float[Tensor, "B T D"], weight: Float[Tensor, "h h"]) -> Float[Tensor, "B T D"]:
        if not self.interleaved:
            return (z.unflatten(-1, (self.heads, -1)) @ weight.T).flatten(2)
        return (z.unflatten(-1, (-1, self.heads)).transpose(2, 3) @ weight.T).transpose(2, 3).flatten(2)


class Coupling(nn.Module):
    """One part of the state moves the other: ``b' = s b + m`` with ``(m, s)`` from a network over part a.

    Args:
        channels: of the state.
        split: halves of the channels, even and odd channels, or even and odd positions.
        flipped: the second part moves the first.
    """

    def __init__(self, channels: int, split: Split, flipped: bool, build: Build, place: Place = "inner") -> None:
        super().__init__()
        self.split, self.flipped = split, flipped
        first = channels - channels // 2
        parts = (channels, channels) if split == "time" else (first, channels // 2)
        given, moved = reversed(parts) if flipped else parts
        self.network = build(given, 2 * moved, place)

    def forward(self, z: Float[Tensor, "B T D"], condition: Condition) -> tuple[Tensor, Tensor]:
        given, moved, inside = self._parts(z, condition)
        noise, log_determinant = affine(self.network, given, moved, inside)
        return self._join(given, noise), log_determinant

    def inverse(self, noise: Float[Tensor, "B T D"], condition: Condition) -> Float[Tensor, "B T D"]:
        given, moved, inside = self._parts(noise, condition)
        return self._join(given, affine_inverse(self.network, given, moved, inside))

    def _parts(self, z: Tensor, condition: Condition) -> tuple[Tensor, Tensor, Condition]:
        parts: Sequence[Tensor]
        if self.split == "time":
            parts, inside = (z[:, 0::2], z[:, 1::2]), condition.every_second(0)
        else:
            half = z.shape[-1] - z.shape[-1] // 2
            parts = (z[..., :half], z[..., half:]) if self.split == "halves" else (z[..., 0::2], z[..., 1::2])
            inside = condition
        given, moved = reversed(parts) if self.flipped else parts
        return given, moved, inside

    def _join(self, given: Tensor, moved: Tensor) -> Tensor:
        first, second = (moved, given) if self.flipped else (given, moved)
        if self.split == "halves":
            return torch.cat([first, second], -1)
        if self.split == "time":
            return torch.stack([first, second], 2).flatten(1, 2)
        return torch.stack([first, second], -1).flatten(2)


def affine(network: nn.Module, given: Tensor, moved: Tensor, condition: Condition) -> tuple[Tensor, Tensor]:
    """Scale and shift a part of the state; the log-determinant of it."""
    shift, raw = network(given, condition).chunk(2, -1)
    scale = torch.sigmoid(raw + _GENTLE)
    return condition.hide(moved * scale + shift), condition.total(nn.functional.logsigmoid(raw + _GENTLE))


def affine_inverse(network: nn.Module, given: Tensor, moved: Tensor, condition: Condition) -> Tensor:
    """Undo ``affine``."""
    shift, raw = network(given, condition).chunk(2, -1)
    return condition.hide((moved - shift) / torch.sigmoid(raw + _GENTLE))


class Chain(nn.Module):
    """Maps in sequence."""

    def __init__(self, *maps: nn.Module) -> None:
        super().__init__()
        self.maps = nn.ModuleList(maps)

    def forward(self, z: Float[Tensor, "B T D"], condition: Condition) -> tuple[Tensor, Tensor]:
        total = z.new_zeros(len(z))
        for one in self.maps:
            z, log_determinant = one(z, condition)
            total = total + log_determinant
        return z, total

    def inverse(self, noise: Float[Tensor, "B T D"], condition: Condition) -> Float[Tensor, "B T D"]:
        for one in reversed(self.maps):
            noise = one.inverse(noise, condition)  # type: ignore[operator]
        return noise


def pair(channels: int, split: Split, build: Build, place: Place = "inner") -> list[nn.Module]:
    """Two couplings, so that each part has moved the other."""
    return [Coupling(channels, split, flipped, build, place) for flipped in (False, True)]


def step(channels: int, in_time: bool, build: Build) -> Chain:
    """Twice norm, linear map and unit; the linear map over heads of adjacent channels, then of interleaved ones.

    Args:
        in_time: whether units couple positions too.
    """
    maps: list[nn.Module] = []
    for interleaved in (False, True):
        maps += [ActNorm(channels), HeadwiseLinear(channels, interleaved)]
        maps += [*pair(channels, "halves", build), ActNorm(channels), *pair(channels, "alternate", build)]
        if in_time:
            maps += [ActNorm(channels), *pair(channels, "time", build)]
    return Chain(*maps)


class Flow(nn.Module):
    """A multi-scale flow: after the steps of a level half of the channels is set aside; the rest continues at half the
    length.

    The noise has the shape of z; the second half of the channels is what was set aside.

    Args:
        channels: of z; even where there is a further level.
        steps: of each level.
        build: makes the networks of the couplings.

    Attributes:
        unit: lengths are multiples of it.
    """

    def __init__(self, channels: int, steps: Sequence[int], build: Build) -> None:
        super().__init__()
        last = len(steps) == 1
        first = [ActNorm(channels), *pair(channels, "halves", build, "first")]
        self.body = Chain(*first, *(step(channels, not last, build) for _ in range(steps[0])))
        self.unit = 1 if last else 2 ** (len(steps) - 1)
        if not last:
            self.aside = build(channels // 2, channels, "inner")
            self.further = Flow(channels, steps[1:], build)

    def forward(self, z: Float[Tensor, "B T D"], condition: Condition) -> tuple[Tensor, Tensor]:
        z, total = self.body(condition.hide(z), condition)
        if self.unit == 1:
            return z, total
        kept, aside = z.chunk(2, -1)
        aside, moved = affine(self.aside, kept, aside, condition)
        kept, below = self.further(squeeze(kept), condition.every_second(0))
        return torch.cat([unsqueeze(kept), aside], -1), total + moved + below

    def inverse(self, noise: Float[Tensor, "B T D"], condition: Condition) -> Float[Tensor, "B T D"]:
        noise = condition.hide(noise)
        if self.unit > 1:
            kept, aside = noise.chunk(2, -1)
            kept = unsqueeze(self.further.inverse(squeeze(kept), condition.every_second(0)))
            noise = torch.cat([kept, affine_inverse(self.aside, kept, aside, condition)], -1)
        return self.body.inverse(noise, condition)

    def log_prob(self, z: Float[Tensor, "B T D"], condition: Condition) -> Float[Tensor, "B"]:
        """Of the real positions of each row."""
        noise, log_determinant = self(z, condition)
        return log_normal(noise, condition) + log_determinant


def log_normal(noise: Float[Tensor, "B T D"], condition: Condition) -> Float[Tensor, "B"]:
    """Log-density of standard normal noise at the real positions."""
    return condition.total(-0.5 * (noise * noise + math.log(2 * math.pi)))


def squeeze(z: Float[Tensor, "B T D"]) -> Float[Tensor, "B t D2"]:
    """Neighbouring positions side by side in one."""
    return z.unflatten(1, (-1, 2)).flatten(2)


def unsqueeze(z: Float[Tensor, "B t D2"]) -> Float[Tensor, "B T D"]:
    """Undo ``squeeze``."""
    return z.unflatten(2, (2, -1)).flatten(1, 2)


@contextmanager
def initialising(flow: nn.Module) -> Iterator[None]:
    """A context in which every norm is initialised by its first input."""
    norms = [module for module in flow.modules() if isinstance(module, ActNorm)]
    for norm in norms:
        norm.initialising = True
    try:
        yield
    finally:
        for norm in norms:
            norm.initialising = False
