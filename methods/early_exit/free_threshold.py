"""A threshold learnt while decoding: two Beta distributions of confidences (FREE, Bae et al. 2023).

Where the deep layers have caught up, each token has a confidence of the shallow exit and a label, whether the deep
layers chose the same token. One Beta distribution is fitted to the confidences of the tokens that agree and one to
those of the tokens that do not; Bayes' rule then gives the probability of agreement at a confidence c,

    P(agree | c) = b f_agree(c) / (b f_agree(c) + (1 - b) f_disagree(c)),        b the rate of agreement,

and the threshold is the lowest confidence from which it is at least the wished rate. No weights are trained.

Differences from the authors' code, each a defect there:

* b. The code weighs both distributions equally, whatever share of tokens agrees: an exit that is right on 20 % of the
tokens then reaches a wished rate at the same threshold as one that is right on 95 %. ``base_rates=False`` does so too,
for comparison.
* The threshold is the lowest confidence *from which on* the wished rate holds, not the lowest at which it holds: the
ratio of two Beta densities need not rise with c, and a token exits at every confidence above the threshold.
* Where nearly all tokens agree, or nearly none, one of the two distributions is unknown. The code then returns its most
permissive threshold; here it is 1, never exit, until ``fewest`` tokens of either kind were seen.
* A grid of 999 confidences in place of ten between 0.3 and 0.9; no clipping of the confidences before the fit, whose
moments need none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from scipy import special

NEVER = 1.0  # the threshold at which no token exits
GRID = np.linspace(0.001, 0.999, 999)
_Logs = tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]  # of confidences c in (0, 1): log(c) and log(1 - c)
_GRID_LOGS: _Logs = np.log(GRID), np.log1p(-GRID)
_EDGE = 1e-4  # means closer to 0 or 1 than this count as this
_LEAST_VARIANCE = 1e-6  # a standard deviation of 0.001, the step of the grid
_WIDEST = 0.999  # variance over its upper bound mean (1 - mean); 1 would be mass on 0 and 1 alone, no density


@dataclass(frozen=True, slots=True)
class Beta:
    """A Beta distribution on (0, 1) with shapes ``alpha`` and ``beta``."""

    alpha: float
    beta: float

    @classmethod
    def of_moments(cls, mean: float, variance: float) -> Beta:
        """The Beta distribution with this mean and variance.

        Moments that no Beta distribution has move to the nearest possible ones: a mean of 0 or 1 by 1e-4, a variance of
        0 (all confidences the same) to 1e-6, one of mean (1 - mean) (all of them 0 or 1) to 0.999 of it.
        """
        mean = min(max(mean, _EDGE), 1 - _EDGE)
        widest = mean * (1 - mean)
        variance = min(max(variance, _LEAST_VARIANCE), _WIDEST * widest)
        total = widest / variance - 1
        return cls(mean * total, (1 - mean) * total)

    def log_density(self, confidence: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Logarithm of the density at confidences in (0, 1)."""
        return self.of_logs((np.log(confidence), np.log1p(-confidence)))

    def of_logs(self, logs: _Logs) -> Float[np.ndarray, " n"]:
        """The same, of logarithms that are known."""
        powers = (self.alpha - 1) * logs[0] + (self.beta - 1) * logs[1]
        return np.asarray(powers - special.betaln(self.alpha, self.beta))


@dataclass(slots=True)
class Moments:
    """Count, mean and sum of squared deviations of a stream (Welford 1962: confidences near 1 do not cancel)."""

    n: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.n += 1
        step = value - self.mean
        self.mean += step / self.n
        self.squares += step * (value - self.mean)

    @classmethod
    def of(cls, values: Float[np.ndarray, " n"]) -> Moments:
        if not len(values):
            return cls()
        mean = float(values.mean())
        return cls(len(values), mean, float(((values - mean) ** 2).sum()))

    def distribution(self) -> Beta:
        """The Beta distribution of the same mean and variance."""
        return Beta.of_moments(self.mean, self.squares / self.n)


@dataclass(slots=True)
class BetaMixture:
    """Threshold on the confidence of an exit, from the confidences at which it agreed with the full model so far.

    Args:
        wished_rate: least probability of agreement at which a token may exit, in (0, 1).
        fewest: tokens of either kind, agreeing and disagreeing, before any token exits; at least 2.
        base_rates: weigh the two distributions by how often tokens agree; False is the published code's form.

    Raises:
        ValueError: an argument is out of range.
    """

    wished_rate: float
    fewest: int = 10
    base_rates: bool = True
    agreeing: Moments = field(default_factory=Moments, init=False)
    disagreeing: Moments = field(default_factory=Moments, init=False)

    def __post_init__(self) -> None:
        if not 0 < self.wished_rate < 1:
            raise ValueError(
                f"wished_rate must be above 0 and below 1, got {self.wished_rate:g}. Try 0.9, or accept=verify where "
                "every token must agree."
            )
        if self.fewest < 2:
            raise ValueError(f"fewest must be at least 2, as one token has no spread, got {self.fewest}. Try 10.")

    def update(self, confidence: float, agreed: bool) -> None:
        """Add one token: the exit's confidence in [0, 1], and whether the full model chose the same token."""
        if not 0 <= confidence <= 1:
            _check_confidences(np.array([confidence], dtype=np.float64))
        (self.agreeing if agreed else self.disagreeing).add(confidence)

    def fit(
        self, confidences: Float[np.ndarray, " n"] | Sequence[float], agreed: Bool[np.ndarray, " n"] | Sequence[bool]
    ) -> BetaMixture:
        """Forget earlier tokens and add these; returns itself.

        Raises:
            ValueError: the two differ in length, or a confidence is outside [0, 1].
        """
        values, labels = np.asarray(confidences, dtype=np.float64), np.asarray(agreed, dtype=bool)
        if values.shape != labels.shape:
            raise ValueError(
                f"There must be one label per confidence, got {len(values)} confidences and {len(labels)} labels. Pair "
                "them."
            )
        _check_confidences(values)
        self.agreeing, self.disagreeing = Moments.of(values[labels]), Moments.of(values[~labels])
        return self

    @property
    def known(self) -> bool:
        """Whether enough tokens of either kind were seen."""
        return min(self.agreeing.n, self.disagreeing.n) >= self.fewest

    @property
    def base_rate(self) -> float:
        """Share of tokens that agreed; 1/2 before the first, and always without base rates."""
        seen = self.agreeing.n + self.disagreeing.n
        return self.agreeing.n / seen if seen and self.base_rates else 0.5

    def posterior(self, confidences: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Probability of agreement at confidences in (0, 1); there must have been ``fewest`` tokens of either kind."""
        return np.asarray(special.expit(self._log_odds((np.log(confidences), np.log1p(-confidences)))))

    def _log_odds(self, logs: _Logs) -> Float[np.ndarray, " n"]:
        assert self.known, "one of the two distributions is not known yet"
        odds = self.agreeing.distribution().of_logs(logs) - self.disagreeing.distribution().of_logs(logs)
        return np.asarray(odds + special.logit(self.base_rate))

    def threshold(self) -> float:
        """The lowest confidence in 0.001 .. 0.999 from which agreement is at least as probable as wished.

        It is 1, at which no token exits, where there is no such confidence or too few tokens of either kind were seen.
        If all tokens have the same confidence, the base rate alone decides between 0.001 and 1.
        """
        if not self.known:
            return NEVER
        below = np.flatnonzero(self._log_odds(_GRID_LOGS) < special.logit(self.wished_rate))
        first = int(below[-1]) + 1 if len(below) else 0
        return float(GRID[first]) if first < len(GRID) else NEVER

    def stats(self) -> dict[str, Any]:
        """Plain JSON values that explain the threshold; shapes are None while unknown."""
        kinds = {"agree": self.agreeing, "disagree": self.disagreeing}
        shapes = {name: kind.distribution() if self.known else None for name, kind in kinds.items()}
        return {
            "threshold": self.threshold(),
            "wished_rate": self.wished_rate,
            "base_rate": self.base_rate,
            **{name: {"tokens": kind.n, "mean": kind.mean} for name, kind in kinds.items()},
            "shapes": {name: shape and [shape.alpha, shape.beta] for name, shape in shapes.items()},
        }


def _check_confidences(values: Float[np.ndarray, " n"]) -> None:
    if not ((values >= 0) & (values <= 1)).all():  # False for NaN
        raise ValueError(
            f"Confidences must be in [0, 1], got {values.min():g} to {values.max():g}. Use a gap or a probability, or "
            "map a cosine by (1 + c) / 2."
        )
