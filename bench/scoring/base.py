"""What every scorer offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from bench.utils.stats import Interval

Pair = tuple[Any, str]  # a reference and the answer to it


class Scorer(ABC):
    """Compares answers with references.

    Attributes:
        metrics: the names of what it reports.
    """

    metrics: ClassVar[tuple[str, ...]]

    def load(self) -> None:  # noqa: B027 - most need nothing
        """Import what scoring takes, if it is not there yet."""

    @abstractmethod
    def score(self, reference: Any, answer: str) -> dict[str, float]:
        """Percentages of one answer by metric; a metric that was not measured is absent."""

    def aggregate(self, pairs: Sequence[Pair]) -> dict[str, float | None]:
        """Percentages of many answers; None where nothing was measured. Unless overridden, the mean of the scores."""
        scores = [self.score(reference, answer) for reference, answer in pairs]
        return {metric: _mean([s[metric] for s in scores if metric in s]) for metric in self.metrics}

    def change(self, before: Sequence[Pair], after: Sequence[Pair]) -> dict[str, Interval]:
        """How far ``aggregate`` of other answers to the same references is from that of these, with an interval.

        By metric, in percentage points; only where an interval over the answers has a meaning of its own.
        """
        return {}

    def notes(self) -> dict[str, str]:
        """How each metric is computed, or why it is absent: what a reader must know to compare it."""
        return {}


def percent(share: float | int) -> float:
    """A share of 1, or a truth, as a percentage."""
    return 100.0 * float(share)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
