"""The networks of FlowSeq besides encoder and decoder: posterior, latent reader, prior and its couplings."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from methods.engine.positions import sinusoids
from methods.engine.sampling import in_float
from methods.non_autoregressive.flowseq.flow import Condition, Flow, Place
from methods.non_autoregressive.network import CrossAttention, DecoderLayer, Memory, Shape, final_norm

_SMALL = 0.05  # spread of the posterior's last layer at first


@dataclass(frozen=True, slots=True)
class Sighted:
    """The source and the positions as the networks of a flow see them.

    Attributes:
        states: [B, S, W] of the source.
        across: [B, 1, 1, S] where there is a token; None: everywhere.
        positions: [P, W] sinusoids.
    """

    states: Float[Tensor, "B S W"]
    across: Bool[Tensor, "B 1 1 S"] | None
    positions: Float[Tensor, "P W"]


class CouplingNetwork(nn.Module):
    """One layer of a transformer's decoder between two linear maps; the last begins as zero.

    The first unit of a level reads the other part by position (attention whose queries are positions), the others add
    positions to it.
    """

    def __init__(self, shape: Shape, given: int, wanted: int, place: Place, dropout: float) -> None:
        super().__init__()
        self.enter = nn.Linear(given, shape.width)
        self.ask = CrossAttention(shape.width, shape.heads) if place == "first" else None
        self.layer, self.norm = DecoderLayer(shape, dropout, positional=False), final_norm(shape)
        self.leave = nn.Linear(shape.width, wanted)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)

    def forward(self, given: Float[Tensor, "B T C"], condition: Condition) -> Float[Tensor, "B T W"]:
        seen: Sighted = condition.source
        positions, looks = seen.positions[: given.shape[1]], condition.present[:, None, None]
        rows = self.enter(given)
        rows = rows + positions if self.ask is None else self.ask(positions.expand(len(rows), -1, -1), rows, looks)
        return self.leave(self.norm(self.layer(rows, looks, positions, looks, seen.states, seen.across)))


class Prior(nn.Module):
    """p(z | x): a flow over latent sequences that sees the source, computed in at least 32 bit.

    Args:
        shape: of the student's network; the flow's layers have the same heads.
        latent: channels of z.
        width, inner: of the networks in the couplings.
        steps: of each level.

    Attributes:
        unit: lengths are multiples of it.
        layers: decoder layers that a pass through the flow runs one after the other.
    """

    def __init__(self, shape: Shape, latent: int, width: int, inner: int, steps: list[int], dropout: float) -> None:
        super().__init__()
        own = replace(shape, width=width, inner=inner)

        def build(given: int, wanted: int, place: Place) -> nn.Module:
            return CouplingNetwork(own, given, wanted, place, dropout)

        self.source = nn.Linear(shape.width, width)
        self.flow = Flow(latent, steps, build)
        self.unit = self.flow.unit
        self.layers = sum(isinstance(module, CouplingNetwork) for module in self.flow.modules())
        self.register_buffer("positions", sinusoids(shape.positions, width), persistent=False)

    def condition(self, memory: Memory, present: Bool[Tensor, "B T"]) -> Condition:
        """What the flow sees."""
        weight = self.source.weight
        across = None if memory.present is None else memory.present[:, None, None]
        positions: Any = self.positions
        return Condition(present, Sighted(self.source(memory.states.to(weight.dtype)), across, positions))

    def log_prob(self, z: Float[Tensor, "B T Z"], memory: Memory, present: Bool[Tensor, "B T"]) -> Float[Tensor, "B"]:
        """Log-density of each row's latents."""
        with torch.autocast(z.device.type, enabled=False):
            return self.flow.log_prob(z.to(self.source.weight.dtype), self.condition(memory, present))

    def latents(
        self, noise: Float[Tensor, "B T Z"], memory: Memory, present: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T Z"]:
        """What a noise becomes."""
        with torch.autocast(noise.device.type, enabled=False):
            return self.flow.inverse(noise.to(self.source.weight.dtype), self.condition(memory, present))


class Posterior(nn.Module):
    """q(z | y, x): layers of a decoder over the embedded target, then mean and log-variance of every position."""

    def __init__(self, shape: Shape, latent: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(shape, dropout, positional=False) for _ in range(layers))
        self.norm, self.moments = final_norm(shape), nn.Linear(shape.width, 2 * latent)
        nn.init.normal_(self.moments.weight, std=_SMALL / math.sqrt(shape.width))
        nn.init.zeros_(self.moments.bias)

    def forward(
        self, inputs: Float[Tensor, "B T D"], positions: Float[Tensor, "T D"], memory: Memory, present: Tensor
    ) -> tuple[Float[Tensor, "B T Z"], Float[Tensor, "B T Z"]]:
        """Mean and log-variance."""
        looks = present[:, None, None]
        across = None if memory.present is None else memory.present[:, None, None]
        hidden = inputs + positions
        for layer in self.layers:
            hidden = layer(hidden, looks, positions, looks, memory.states, across)
        moments = self.moments(self.norm(hidden))
        mean, log_variance = in_float(moments).chunk(2, -1)
        return mean, log_variance


class LatentReader(nn.Module):
    """Attention over the latents whose queries are positions: the decoder's input."""

    def __init__(self, shape: Shape, latent: int) -> None:
        super().__init__()
        self.enter, self.ask = nn.Linear(latent, shape.width), CrossAttention(shape.width, shape.heads)

    def forward(
        self, z: Float[Tensor, "B T Z"], positions: Float[Tensor, "T D"], present: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T D"]:
        rows = self.enter(z.to(positions.dtype))
        return rows + self.ask(positions.expand(len(z), -1, -1), rows, present[:, None, None])


def log_normal_of(
    z: Float[Tensor, "B T Z"],
    mean: Float[Tensor, "B T Z"],
    log_variance: Float[Tensor, "B T Z"],
    present: Bool[Tensor, "B T"],
) -> Float[Tensor, "B"]:
    """Log-density of each row's latents under independent normal distributions."""
    squares = (z - mean) ** 2 * (-log_variance).exp()
    return Condition(present).total(-0.5 * (squares + log_variance + math.log(2 * math.pi)))
