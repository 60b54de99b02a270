"""Comparing a million draws with the distribution they should come from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln, xlog1py, xlogy
from scipy.stats import chisquare

Array = npt.NDArray[np.float64]
_LEAST_EXPECTED = 5.0  # Cochran's rule: cells of a chi-square test that expect fewer counts are joined


@dataclass(frozen=True, slots=True)
class Comparison:
    """Empirical frequencies against a target distribution over V outcomes.

    Attributes:
        draws: sample size n.
        standard_deviation: root mean square over all V outcomes of frequency - probability.
        expected_deviation: what an exact sampler of that size gives on average, sqrt(sum p (1 - p) / (n V)).
        total_variation: half the summed absolute difference.
        expected_total_variation: what an exact sampler gives on average.
        chi_square, degrees, p_value: goodness of fit, outcomes with fewer than 5 expected counts joined.
        impossible: draws of outcomes whose target probability is 0; an exact sampler makes none.
    """

    draws: int
    standard_deviation: float
    expected_deviation: float
    total_variation: float
    expected_total_variation: float
    chi_square: float
    degrees: int
    p_value: float
    impossible: int


def compare(counts: Array, probs: Array) -> Comparison:
    """Test ``counts`` [V] against ``probs`` [V].

    Raises:
        ValueError: no draws, or shapes that differ.
    """
    draws = int(counts.sum())
    if draws == 0 or counts.shape != probs.shape:
        raise ValueError(f"{draws} draws over {counts.shape} outcomes cannot be compared with {probs.shape}.")
    probs = probs / probs.sum()
    gap = counts / draws - probs
    variance = probs * (1 - probs) / draws
    statistic, degrees, p_value = goodness_of_fit(counts, probs * draws)
    return Comparison(
        draws,
        standard_deviation=float(np.sqrt(np.mean(gap**2))),
        expected_deviation=float(np.sqrt(np.mean(variance))),
        total_variation=float(np.abs(gap).sum() / 2),
        expected_total_variation=float(mean_absolute_deviation(probs, draws).sum() / (2 * draws)),
        chi_square=statistic,
        degrees=degrees,
        p_value=p_value,
        impossible=int(counts[probs == 0].sum()),
    )


def deviation_shown(target: Sequence[float], empirical: Sequence[float], draws: int) -> tuple[float, float]:
    """Root mean square of frequency - probability over the tokens of a bar chart alone, and that of an exact sampler.

    Over few likely tokens it is far larger than over a vocabulary of mostly unlikely ones: at n draws over V outcomes
    an exact sampler cannot exceed sqrt(1 / (n V)) on average.
    """
    p, seen = np.asarray(target), np.asarray(empirical)
    return float(np.sqrt(np.mean((seen - p) ** 2))), float(np.sqrt(np.mean(p * (1 - p)) / draws))


def mean_absolute_deviation(probs: Array, draws: int) -> Array:
    """E|X - np| of binomial counts, exact: 2 m C(n, m) p^m (1 - p)^(n - m + 1) with m = floor(np) + 1.

    De Moivre's identity (Diaconis and Zabell 1991, Statistical Science 6(3)). The normal approximation is a third
    too large over a vocabulary, most of whose tokens expect less than one draw.
    """
    m = np.minimum(np.floor(probs * draws) + 1, draws)
    choose = gammaln(draws + 1) - gammaln(m + 1) - gammaln(draws - m + 1)
    return np.asarray(2 * m * np.exp(choose + xlogy(m, probs) + xlog1py(draws - m + 1, -probs)))


def goodness_of_fit(counts: Array, expected: Array) -> tuple[float, int, float]:
    """Chi-square statistic, degrees of freedom and p-value; an impossible draw has p-value 0."""
    if counts[expected == 0].sum() > 0:
        return math.inf, 0, 0.0
    big = expected >= _LEAST_EXPECTED
    seen, wanted = counts[big], expected[big]
    rest_seen, rest_wanted = counts[~big].sum(), expected[~big].sum()
    if rest_wanted >= _LEAST_EXPECTED or len(wanted) == 0:
        seen, wanted = np.append(seen, rest_seen), np.append(wanted, rest_wanted)
    else:  # too little to stand alone: it joins the smallest cell
        smallest = int(np.argmin(wanted))
        seen[smallest] += rest_seen
        wanted[smallest] += rest_wanted
    if len(wanted) == 1:
        return 0.0, 0, 1.0
    result = chisquare(seen, wanted * (seen.sum() / wanted.sum()))
    return float(result.statistic), len(wanted) - 1, float(result.pvalue)
