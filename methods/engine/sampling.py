"""From logits to the distribution the user asked for: temperature, top-k, top-p. Written once, used by all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the target's distribution is processed before a token is drawn.

    Attributes:
        temperature: 0 is greedy decoding; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose mass reaches top_p; 1.0 keeps all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def probs(self, logits: Float[Tensor, "*batch V"]) -> Float[Tensor, "*batch V"]:
        """The processed distribution, float32 (float64 for float64 logits). One-hot when greedy."""
        raise NotImplementedError

    def pick(self, logits: Float[Tensor, "*batch V"], rng: Generator) -> Int[Tensor, "*batch"]:
        """One token from the processed distribution; argmax when greedy."""
        raise NotImplementedError


def draw(probs: Float[Tensor, "*batch V"], rng: Generator) -> Int[Tensor, "*batch"]:
    """One categorical draw per distribution."""
    raise NotImplementedError
