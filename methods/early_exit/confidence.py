"""How sure an exit is of its token (CALM, Schuster et al. 2022, arXiv 2207.07061, sec. 3.4).

    softmax      p_1 - p_2, the gap between the two largest probabilities over the vocabulary
    saturation   cosine between the states after this exit and after the one checked before it; no token exits at the
                 first one checked (the paper checks every layer and starts at the second)
    classifier   probability, by one linear classifier that all exits share, that the exit has the model's own token

Statistics are in 32 bit, of the distribution at temperature 1 before top-k and top-p, whatever the sampling.

The softmax needs the output matrix at each exit, which on a small model costs as much as several layers (SmolLM2-135M:
8.0). A screen therefore checks the first ids alone, which byte-pair encodings give to their most common pieces (87.5 %
of what SmolLM2 writes is below 8192), and the whole vocabulary only where their gap would suffice. With m <= 1 the mass
of the part and c its second token, p'_1 - p'_c = (p_1 - p_c) / m >= p_1 - p_c >= p_1 - p_2 if the part holds the
likeliest token. So the screen lets no token exit that the whole softmax would keep, and it additionally keeps only
those whose likeliest token is outside. ``vocabulary`` is its number of ids; ``auto`` takes as many as one layer costs,
or no screen where the whole output matrix costs at most two layers. With ``rank`` the screen multiplies the nearest
matrix of that rank instead (singular values, Eckart and Young 1936), of these ids or with ``auto`` of all: every token
can pass, and the gap is an approximation. Whatever the screen, a token exits by the whole softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from methods.early_exit.exits import Exits
from methods.early_exit.loop import head_share
from methods.engine.causal_lm import CausalLM
from methods.engine.fused_layers import ExitRule
from methods.engine.linear import KernelLinear, Linear, make_linear
from methods.engine.sampling import in_float
from methods.training.exit_quality import gap

Measure = Literal["softmax", "saturation", "classifier"]
Vocabulary = int | Literal["auto"] | None
Tempts = Callable[[Float[Tensor, "B"]], bool]  # whether a row would leave at these confidences

_CHEAP = 2.0  # layers that an output matrix may cost without a screen in front of it


@dataclass(frozen=True, slots=True)
class Opinion:
    """What a confidence measure found at an exit.

    Attributes:
        confidence: [B]; None where it is not defined yet.
        logits: [B, V], if computed over the whole vocabulary.
        columns: of the output matrix that were multiplied.
    """

    confidence: Float[Tensor, "B"] | None
    logits: Float[Tensor, "B V"] | None = None
    columns: int = 0


@runtime_checkable
class Confidence(Protocol):
    """A confidence measure.

    Attributes:
        nbytes: of its own weights.
    """

    nbytes: int

    def begin(self) -> None:
        """Start a new token."""
        ...

    def rule(self, stops: Sequence[int]) -> ExitRule | None:
        """How the kernels judge at these depths, without threshold and maps; None: they cannot."""
        ...

    def __call__(
        self, hidden: Float[Tensor, "B D"], ready: Float[Tensor, "B D"], tempts: Tempts | None = None
    ) -> Opinion:
        """Judge an exit.

        Args:
            hidden: states after it.
            ready: input of the output matrix there.
            tempts: of a first, cheaper confidence: whether to look closer; otherwise the first one is returned.
        """
        ...


class Softmax:
    """The gap between the two likeliest tokens.

    Attributes:
        screen: columns of the output matrix that the screen costs, without ``rank`` its ids; 0: there is none.
    """

    def __init__(self, target: CausalLM, vocabulary: Vocabulary = None, rank: int | None = None) -> None:
        self.target = target
        self._reduced: Linear | LowRank | None
        if rank is not None:
            self._reduced = LowRank(target, rank, None if vocabulary == "auto" else vocabulary)
            self.screen = self._reduced.columns
        else:
            ids = usual_screen(target) if vocabulary == "auto" else vocabulary
            self._reduced, self.screen = None if ids is None else reduced_head(target, ids), ids or 0
        self.nbytes = 0 if self._reduced is None else self._reduced.nbytes

    def begin(self) -> None:
        """Does nothing: exits are independent."""

    def rule(self, stops: Sequence[int]) -> ExitRule | None:
        if self._reduced is not None and not isinstance(self._reduced, KernelLinear):
            return None
        return ExitRule(stops, "softmax", screen=self._reduced)

    def __call__(
        self, hidden: Float[Tensor, "B D"], ready: Float[Tensor, "B D"], tempts: Tempts | None = None
    ) -> Opinion:
        screened = None if self._reduced is None else gap(self._reduced(ready))
        if screened is not None and tempts is not None and not tempts(screened):
            return Opinion(screened, columns=self.screen)
        logits = self.target.head(ready)
        found = gap(logits) if screened is None else torch.minimum(gap(logits), screened)
        return Opinion(found, logits, self.screen + self.target.vocab_size)


class Saturation:
    """Cosine between the states after two consecutive exits."""

    nbytes = 0

    def __init__(self) -> None:
        self._before: Tensor | None = None

    def begin(self) -> None:
        self._before = None

    def rule(self, stops: Sequence[int]) -> ExitRule | None:
        return ExitRule(stops, "saturation")

    def __call__(
        self, hidden: Float[Tensor, "B D"], ready: Float[Tensor, "B D"], tempts: Tempts | None = None
    ) -> Opinion:
        before, self._before = self._before, hidden
        if before is None:
            return Opinion(None)
        return Opinion(F.cosine_similarity(in_float(before), in_float(hidden), dim=-1))


class Classifier:
    """sigmoid(w . h + b) on the input of the output matrix; CALM takes the raw state."""

    def __init__(self, weight: Float[Tensor, "D"], bias: Float[Tensor, ""]) -> None:
        self._weight, self._bias = weight, bias
        self._in_float = weight.float().contiguous(), float(bias)
        self.nbytes = (weight.numel() + 1) * weight.element_size()

    def begin(self) -> None:
        """Does nothing: exits are independent."""

    def rule(self, stops: Sequence[int]) -> ExitRule | None:
        return ExitRule(stops, "classifier", classifier=self._in_float)

    def __call__(
        self, hidden: Float[Tensor, "B D"], ready: Float[Tensor, "B D"], tempts: Tempts | None = None
    ) -> Opinion:
        rows = in_float(ready)
        return Opinion(torch.sigmoid(rows @ self._weight.to(rows.dtype) + self._bias.to(rows.dtype)))


def make_confidence(
    measure: Measure, target: CausalLM, exits: Exits | None, vocabulary: Vocabulary, rank: int | None = None
) -> Confidence:
    """A confidence measure by its name.

    Raises:
        ValueError: a classifier that was never trained, or a vocabulary or rank out of range or without use.
    """
    if rank is not None and measure != "softmax":
        raise ValueError(
            f"rank must be null with confidence={measure}, which reads no output matrix, got {rank}. Set "
            "method.rank=null, or method.confidence=softmax."
        )
    if isinstance(vocabulary, int) and measure != "softmax":
        raise ValueError(
            f"vocabulary must be auto or null with confidence={measure}, which reads no vocabulary, got {vocabulary}. "
            "Set method.vocabulary=auto, or method.confidence=softmax."
        )
    if measure == "softmax":
        return Softmax(target, vocabulary, rank)
    if measure == "saturation":
        return Saturation()
    if exits is None or exits.classifier is None:
        raise ValueError(
            "confidence=classifier needs an exit classifier, and none is trained for this model. Train one with "
            "python -m bench train method=calm model=MODEL, or set method.confidence=softmax."
        )
    return Classifier(*exits.classifier)


def usual_screen(target: CausalLM) -> int | None:
    """Ids whose columns of the output matrix cost one layer; None where all of them cost little more."""
    share = head_share(target)
    return None if share <= _CHEAP else max(2, round(target.vocab_size / share))


def reduced_head(target: CausalLM, vocabulary: int) -> Linear:
    """The output matrix for the first ``vocabulary`` ids.

    Raises:
        ValueError: fewer than two, or more than there are.
    """
    _require_ids(target, vocabulary)
    weight, bias = target.output_rows(torch.arange(vocabulary, device=target.device))
    return make_linear([weight], [bias])


def _require_ids(target: CausalLM, vocabulary: int) -> None:
    if not 2 <= vocabulary <= target.vocab_size:
        raise ValueError(
            f"vocabulary must be between 2 and {target.vocab_size}, the vocabulary of {target.name}, got {vocabulary}. "
            "Set method.vocabulary to such a number, or null for all."
        )


class LowRank:
    """The nearest matrix of a rank to the output matrix, or to its first rows, as two products.

    Args:
        ids: how many of the first ids; None: all.

    Attributes:
        columns: of the output matrix that read as much.

    Raises:
        ValueError: a rank that saves nothing, or ids out of range.
    """

    def __init__(self, target: CausalLM, rank: int, ids: int | None) -> None:
        if not 1 <= rank < target.hidden_size:
            raise ValueError(
                f"rank must be from 1 to {target.hidden_size - 1}, below the width of {target.name}, got {rank}. Set "
                "method.rank to such a number, or null."
            )
        count = target.vocab_size if ids is None else ids
        _require_ids(target, count)
        weight, bias = target.output_rows(torch.arange(count, device=target.device))
        exact = in_float(weight)
        directions = torch.linalg.eigh(exact.T @ exact).eigenvectors[:, -rank:]  # right singular vectors
        self._into = make_linear([directions.T.to(weight.dtype).contiguous()], [None])
        self._out = make_linear([(exact @ directions).to(weight.dtype)], [bias])
        self.nbytes = self._into.nbytes + self._out.nbytes
        self.columns = -(-rank * (count + target.hidden_size) // target.hidden_size)

    def __call__(self, rows: Float[Tensor, "B D"]) -> Float[Tensor, "B n"]:
        """Logits of the ids, approximately."""
        return self._out(self._into(rows))
