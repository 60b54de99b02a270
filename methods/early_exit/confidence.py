"""How sure an exit is of its token (CALM, Schuster et al. 2022, arXiv 2207.07061, sec. 3.4).

    softmax      p_1 - p_2, the gap between the two largest probabilities over the vocabulary
    saturation   cosine between the states behind this exit and behind the one checked before it; the first one checked
                 has none before it, so nobody leaves there (the paper checks every layer and starts at the second)
    classifier   probability, by one linear classifier that all exits share, that the exit has the model's own token

Statistics are in 32 bit. All are of the distribution at temperature 1, before top-k and top-p, whatever is sampled
from.

The softmax needs the output matrix at each exit, which on a small model costs as much as several layers (SmolLM2-135M:
8.0). ``vocabulary`` restricts it to the first ids, which byte-pair encodings give to their commonest pieces (of what
SmolLM2 writes 87.5 % lie below 8192). The gap is then too large wherever the likeliest token lies outside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from methods.early_exit.exits import Exits
from methods.engine.exit_quality import gap
from methods.engine.linear import Linear, make_linear
from methods.engine.lm import CausalLM

Measure = Literal["softmax", "saturation", "classifier"]


@dataclass(frozen=True, slots=True)
class Opinion:
    """What a confidence measure found at an exit.

    Attributes:
        confidence: [B]; None where it cannot tell yet.
        logits: [B, V], if it had to compute them over the whole vocabulary.
    """

    confidence: Float[Tensor, "B"] | None
    logits: Float[Tensor, "B V"] | None = None


@runtime_checkable
class Confidence(Protocol):
    """A confidence measure.

    Attributes:
        vocabulary: columns of the output matrix it multiplies at each exit.
        nbytes: of its own weights.
    """

    vocabulary: int
    nbytes: int

    def begin(self) -> None:
        """A new token is on its way."""
        ...

    def __call__(self, hidden: Float[Tensor, "B D"], ready: Float[Tensor, "B D"]) -> Opinion:
        """Judge an exit by the state behind it and by what the output matrix would multiply there."""
        ...


class Softmax:
    """The gap between the two likeliest tokens."""

    def __init__(self, target: CausalLM, vocabulary: int | None = None) -> None:
        self.target = target
        self._reduced = None if vocabulary is None else reduced_head(target, vocabulary)
        self.vocabulary = vocabulary or target.vocab_size
        self.nbytes = 0 if self._reduced is None else self._reduced.nbytes

    def begin(self) -> None:
        """Every exit is judged by itself."""

    def __call__(self, hidden: Float[Tensor, "B D"], ready: Float[Tensor, "B D"]) -> Opinion:
        if self._reduced is not None:
            return Opinion(gap(self._reduced(ready)))
        logits = self.target.head(ready)
        return Opinion(gap(logits), logits)


class Saturation:
    """Cosine between the states behind two exits in turn."""

    vocabulary, nbytes = 0, 0

    def __init__(self) -> None:
        self._before: Tensor | None = None

    def begin(self) -> None:
        self._before = None

    def __call__(self, hidden: Float[Tensor, "B D"], ready: Float[Tensor, "B D"]) -> Opinion:
        before, self._before = self._before, hidden
        if before is None:
            return Opinion(None)
        return Opinion(F.cosine_similarity(_exact(before), _exact(hidden), dim=-1))


class Classifier:
    """sigmoid(w . h + b) on what the output matrix would multiply; CALM takes the raw state."""

    vocabulary = 0

    def __init__(self, weight: Float[Tensor, "D"], bias: Float[Tensor, ""]) -> None:
        self._weight, self._bias = weight, bias
        self.nbytes = (weight.numel() + 1) * weight.element_size()

    def begin(self) -> None:
        """Every exit is judged by itself."""

    def __call__(self, hidden: Float[Tensor, "B D"], ready: Float[Tensor, "B D"]) -> Opinion:
        rows = _exact(ready)
        return Opinion(torch.sigmoid(rows @ self._weight.to(rows.dtype) + self._bias.to(rows.dtype)))


def make_confidence(measure: Measure, target: CausalLM, exits: Exits | None, vocabulary: int | None) -> Confidence:
    """A confidence measure by its name.

    Raises:
        ValueError: a classifier that was never trained, or a vocabulary out of range or without use.
    """
    if vocabulary is not None and measure != "softmax":
        raise ValueError(
            f"vocabulary={vocabulary} came with confidence={measure}, which looks at no vocabulary; null is allowed. "
            "Set method.vocabulary=null, or method.confidence=softmax."
        )
    if measure == "softmax":
        return Softmax(target, vocabulary)
    if measure == "saturation":
        return Saturation()
    if exits is None or exits.classifier is None:
        raise ValueError(
            "confidence=classifier came, and no exit classifier is trained for this model; it needs one. Train it: "
            "python -m bench.train method=calm model=MODEL; or use method.confidence=softmax."
        )
    return Classifier(*exits.classifier)


def reduced_head(target: CausalLM, vocabulary: int) -> Linear:
    """The output matrix for the first ``vocabulary`` ids.

    Raises:
        ValueError: fewer than two, or more than there are.
    """
    if not 2 <= vocabulary <= target.vocab_size:
        raise ValueError(
            f"vocabulary={vocabulary} came; 2 to {target.vocab_size} ids are allowed, the size of {target.name}'s "
            "vocabulary. Set method.vocabulary to one of these, or null for all."
        )
    weight, bias = target.output_rows(torch.arange(vocabulary, device=target.device))
    return make_linear([weight], [bias])


def _exact(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()
