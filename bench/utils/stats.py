"""Intervals of paired ratios: how far a measured speed-up may be from the true one.

A pair is one unit of text decoded by both arms. The unit is drawn from a population of such units, and what is
estimated is the ratio of the two arms' totals over that population, or the geometric mean of the ratios.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Values = Sequence[float] | Array

FEWEST_PAIRS = 5  # below, an interval is too wide to say anything, and its form rests on an assumption
FEWEST_FOR_BOOTSTRAP = 20
CONFIDENCE = 0.95
_SAME = 1e-9  # ratios that differ by less are one value: floating-point dust, no spread
_BATCH = 500  # resamples held in memory at once
_MORE_PROMPTS = "; measure more prompts (dataset.limit)"


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95 % interval.

    Attributes:
        value: the estimate; None where there was nothing to estimate it from.
        low: lower end; None where there is no interval, ``reason`` says why.
        high: upper end, likewise.
        n: pairs.
        kind: ``"bca"``, ``"t"``, ``"percentile"`` of a bootstrap, or ``"equal"`` where all pairs gave the same ratio;
            None without an interval.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    n: int = 0
    kind: Literal["bca", "t", "percentile", "equal"] | None = None
    reason: str | None = None


def ratio_of_totals(numerator: Values, denominator: Values, *, n_resamples: int, seed: int) -> Interval:
    """Sum of ``numerator`` over sum of ``denominator``, with a 95 % interval over the pairs, see ``_interval``.

    Args:
        numerator: one positive value per pair.
        denominator: likewise.
        n_resamples: bootstrap resamples.
        seed: of the resampling; the same seed gives the same interval.

    Raises:
        ValueError: the two differ in length, or hold a value that is not positive and finite.
    """
    top, bottom = _checked(numerator, denominator)
    if not len(top):
        return Interval(None, reason="no pairs were measured")
    if len(top) >= FEWEST_PAIRS and _all_same(top / bottom):
        value = float(top.sum() / bottom.sum())
        return Interval(value, value, value, len(top), "equal")

    def ratio(a: Array, b: Array, axis: int = -1) -> Any:
        return a.sum(axis) / b.sum(axis)

    return _interval((top, bottom), ratio, n_resamples, seed, few_pairs(len(top)) + _MORE_PROMPTS)


def ratio_of_ratios(columns: Sequence[Values], *, n_resamples: int, seed: int) -> Interval:
    """(sum 0 / sum 1) / (sum 2 / sum 3), with a 95 % interval over the rows, see ``_interval``.

    Eight columns are such a quotient of seconds, divided by one of tokens.
    """
    arrays = tuple(np.asarray(column, dtype=float) for column in columns)
    if not len(arrays[0]):
        return Interval(None, reason="no conversation was finished in both runs")

    def ratio(a: Array, b: Array, c: Array, d: Array, *tokens: Array, axis: int = -1) -> Any:
        seconds = _per_unit(a, b, c, d, axis)
        if not tokens:
            return seconds
        e, f, g, h = tokens
        return seconds / _per_unit(e, f, g, h, axis)

    return _interval(arrays, ratio, n_resamples, seed, few_pairs(len(arrays[0]), "conversation"))


def ratio_per_token(
    seconds: tuple[Values, Values], tokens: tuple[Values, Values], *, n_resamples: int, seed: int
) -> Interval:
    """Ratio of the arms' seconds per token: (sum of seconds / sum of tokens) of the first over that of the second.

    Where both arms have the same tokens in every pair this is ``ratio_of_totals`` of the seconds, interval included.

    Args:
        seconds: one positive value per pair, of the first arm and of the second.
        tokens: likewise, what the arms wrote in this time.
        n_resamples, seed: see ``ratio_of_totals``.

    Raises:
        ValueError: see ``ratio_of_totals``.
    """
    (top, bottom), (over, under) = _checked(*seconds), _checked(*tokens, noun="tokens")
    if len(top) != len(over):
        raise ValueError(f"Pairs need seconds and tokens of one length, not of {len(top)} and {len(over)}.")
    if np.array_equal(over, under) or not len(top):
        return ratio_of_totals(top, bottom, n_resamples=n_resamples, seed=seed)
    if len(top) >= FEWEST_PAIRS and _all_same(top / bottom) and _all_same(over / under):
        value = float(_per_unit(top, over, bottom, under))
        return Interval(value, value, value, len(top), "equal")
    return _interval((top, over, bottom, under), _per_unit, n_resamples, seed, few_pairs(len(top)) + _MORE_PROMPTS)


def _per_unit(a: Array, b: Array, c: Array, d: Array, axis: int = -1) -> Any:
    """(sum a / sum b) / (sum c / sum d)."""
    return a.sum(axis) / b.sum(axis) / (c.sum(axis) / d.sum(axis))


def few_pairs(n: int, noun: str = "pair") -> str:
    """Why so few have no interval."""
    if n == 1:
        return f"one {noun} has no spread"
    return f"{n} {noun}s are too few for an interval, {FEWEST_PAIRS} are needed"


def _interval(columns: tuple[Array, ...], ratio: Callable[..., Any], n_resamples: int, seed: int, few: str) -> Interval:
    """A ratio of totals with its 95 % interval over at least 5 paired rows.

    From 20 rows on the interval is a paired BCa bootstrap (Efron 1987). Below, BCa covers too seldom, and a t
    interval takes its place, on the log of the ratio of totals and with the jackknife's standard error: its centre is
    the reported value, and where long texts have other ratios than short ones it still covers, which the t interval
    of the plain log ratios, an interval of the geometric mean, does not.

    Args:
        columns: one value per row each.
        ratio: of the columns' totals.
        few: why fewer rows have no interval.
    """
    value, n = float(ratio(*columns)), len(columns[0])
    if n < FEWEST_PAIRS:
        return Interval(value, n=n, reason=few)
    if n >= FEWEST_FOR_BOOTSTRAP:
        low, high = _bca(columns, ratio, n_resamples, seed)
        if np.isfinite(low) and np.isfinite(high):
            return Interval(value, low, high, n, "bca")
    without = np.log(ratio(*(column.sum() - column[:, None] for column in columns)))
    pseudo = n * np.log(value) - (n - 1) * without
    low, high = np.exp(_t_interval(pseudo) - pseudo.mean() + np.log(value))
    return Interval(value, float(low), float(high), n, "t")


def geometric_mean(numerator: Values, denominator: Values) -> Interval:
    """Geometric mean of the pairs' ratios, with the t interval of their logs.

    Raises:
        ValueError: see ``ratio_of_totals``.
    """
    top, bottom = _checked(numerator, denominator)
    if not len(top):
        return Interval(None, reason="no pairs were measured")
    logs = np.log(top / bottom)
    value = float(np.exp(logs.mean()))
    if len(logs) < FEWEST_PAIRS:
        return Interval(value, n=len(logs), reason=few_pairs(len(logs)) + _MORE_PROMPTS)
    if _all_same(top / bottom):
        return Interval(value, value, value, len(logs), "equal")
    low, high = np.exp(_t_interval(logs))
    return Interval(value, float(low), float(high), len(logs), "t")


def mean(values: Values) -> Interval:
    """Mean of independent values, which may be 0, with its t interval."""
    found = np.asarray(values, dtype=float)
    if not len(found):
        return Interval(None, reason="nothing was measured")
    value = float(found.mean())
    if len(found) < FEWEST_PAIRS:
        return Interval(value, n=len(found), reason=few_pairs(len(found), "value"))
    low, high = _t_interval(found)
    return Interval(value, float(low), float(high), len(found), "equal" if low == high else "t")


def _checked(numerator: Values, denominator: Values, noun: str = "times") -> tuple[Array, Array]:
    top, bottom = np.asarray(numerator, dtype=float), np.asarray(denominator, dtype=float)
    if top.shape != bottom.shape or top.ndim != 1:
        raise ValueError(f"Pairs need two lists of one length, not of {top.shape} and {bottom.shape}.")
    both = np.concatenate([top, bottom])
    if not (np.isfinite(both).all() and (both > 0).all()):
        raise ValueError(f"A ratio of {noun} needs {noun} above 0; one is not.")
    return top, bottom


def _all_same(ratios: Array) -> bool:
    return bool(np.ptp(ratios) <= _SAME * ratios[0])


def _bca(columns: tuple[Array, ...], ratio: Callable[..., Any], n_resamples: int, seed: int) -> tuple[float, float]:
    """NaN where the resamples are degenerate."""
    from scipy.stats import bootstrap

    with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
        warnings.simplefilter("ignore")
        found = bootstrap(
            columns,
            ratio,
            paired=True,
            vectorized=True,
            method="BCa",
            confidence_level=CONFIDENCE,
            n_resamples=n_resamples,
            batch=_BATCH,
            rng=np.random.default_rng(seed),
        ).confidence_interval
    return float(found.low), float(found.high)


def _t_interval(values: Array) -> Array:
    """Low and high around the mean."""
    from scipy.stats import t

    half = t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return np.array([values.mean() - half, values.mean() + half])


def pareto(points: Mapping[str, tuple[float | None, float | None]]) -> set[str]:
    """Names of the points that no other one equals or exceeds in both values and exceeds in one."""
    known = {name: (x, y) for name, (x, y) in points.items() if x is not None and y is not None}
    return {
        name
        for name, (x, y) in known.items()
        if not any(a >= x and b >= y and (a, b) != (x, y) for a, b in known.values())
    }
