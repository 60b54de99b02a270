"""Choosing an exit threshold with a guarantee: Learn-then-Test (Angelopoulos et al. 2021), as used by CALM (Schuster et
al. 2022, section 4).

Every calibration prompt is decoded in full and once per threshold; the caller scores each output with a loss in [0, 1].
"The mean loss at this threshold exceeds the tolerance" is then tested for each threshold, and the lowest one for which
it is rejected is chosen. The guarantee: with probability at least 1 - ``error_rate`` over the draw of the calibration
prompts, the expected loss at the chosen threshold is at most ``tolerance`` (the papers swap the Greek letters of the
two, so they are spelt out here). It requires new prompts from the source of the calibration prompts, the same decoding
settings, and thresholds fixed before the losses were seen, but no loss that grows as thresholds fall. If no threshold
is certified it is 1, the full model, which loses nothing.

p-values
    ``hoeffding``           exp(-2 n (tolerance - mean)^2)
    ``hoeffding_bentkus``   Angelopoulos et al. 2021, what CALM uses: the smaller of two tail bounds of the mean
``betting``             the default: the wealth of a gambler who bets against the hypothesis (Waudby-Smith and Ramdas
                        2024, with the stakes of Bates et al. 2021). It uses the spread of the losses, the other two
                        only the mean: an expected loss of 0.025 is certified for a tolerance of 0.05 (power 0.9) with
                        168 prompts instead of 479 where losses deviate by 0.05. Losses of 0 and 1 spread most, and
                        Hoeffding-Bentkus is better there: 676 to 826.
Procedures
    ``fixed_sequence``      from the safest threshold down, each at the full error rate, until one is not rejected
    ``bonferroni``          each at error_rate / number of thresholds; gets past a bump in the losses, else weaker
    ``conformal``           conformal risk control (Angelopoulos et al. 2024): the expected loss is at most the
                            tolerance ON AVERAGE over calibration sets; a single one may exceed it at any size

Published (CALM, T5 with 8 decoder layers, error_rate 0.05): at textual tolerance 0.25 certified thresholds need 2.62
layers on CNN/DM and 1.76 on WMT15 en-fr. Differences: betting rather than Hoeffding-Bentkus by default; the chosen
threshold is the last rejected one of the sequence (published code for another exit network returns the one after it);
prompts are shuffled by a seed before betting, since a file sorted by task is no random order.

Settings: ``method.calibration.tolerance=0.05 method.calibration.error_rate=0.05``
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Bool, Float
from scipy import stats

PValue = Literal["hoeffding", "hoeffding_bentkus", "betting"]
Procedure = Literal["fixed_sequence", "bonferroni", "conformal"]

FULL_MODEL = 1.0
MOST_PROMPTS = 100_000  # a larger plan, decoded once per threshold, is impractical and refused
_SIMULATIONS = 2_000  # of a plan; the standard error of a power of 0.9 is 0.007
_AT_ONCE = 2_000_000  # losses simulated in one array


# -------------------------------------------------------------------------------------------------------- p-values


def p_values(
    losses: Float[np.ndarray, "prompts thresholds"], tolerance: float, kind: PValue = "betting", level: float = 0.05
) -> Float[np.ndarray, " thresholds"]:
    """p-values of "the expected loss is at least ``tolerance``", one per column.

    Args:
        losses: in [0, 1]; rows independent and in an order that does not depend on them.
        tolerance: in (0, 1).
        kind: see the head of this file.
        level: for which betting's stakes are chosen; any level gives a valid p-value.
    """
    losses = losses.astype(np.float64)
    if kind == "betting":
        return _betting(losses, tolerance, level)
    # The exactly rounded sum: losses that add up to 3 must not count as 4 for the sake of the last bit.
    sums = np.array([math.fsum(column) for column in losses.T])
    return _OF_SUMS[kind](sums, len(losses), tolerance)


def _hoeffding(sums: Float[np.ndarray, " thresholds"], n: int, tolerance: float) -> Float[np.ndarray, " thresholds"]:
    return np.exp(-2 * n * np.maximum(0.0, tolerance - sums / n) ** 2)


def _hoeffding_bentkus(
    sums: Float[np.ndarray, " thresholds"], n: int, tolerance: float
) -> Float[np.ndarray, " thresholds"]:
    mean = np.minimum(sums / n, tolerance)
    tight_hoeffding = np.exp(-n * _divergence(mean, tolerance))
    bentkus = math.e * stats.binom.cdf(np.ceil(sums), n, tolerance)
    return np.minimum(1.0, np.minimum(tight_hoeffding, bentkus))


def _divergence(a: Float[np.ndarray, " thresholds"], b: float) -> Float[np.ndarray, " thresholds"]:
    """Kullback-Leibler divergence of a coin with chance a from one with chance b, nats; a may be 0."""
    a_term = np.where(a > 0, a * np.log(np.where(a > 0, a, 1.0) / b), 0.0)
    return a_term + (1 - a) * (np.log1p(-a) - math.log1p(-b))


def _betting(
    losses: Float[np.ndarray, "prompts thresholds"], tolerance: float, level: float
) -> Float[np.ndarray, " thresholds"]:
    """1 / (largest wealth): the wealth never falls below 0 and, where the expected loss is at least the tolerance,
    does not grow in expectation, so it ever reaches 1/p with probability at most p (Ville 1939)."""
    n = len(losses)
    seen = np.arange(2, n + 2)[:, None]  # one observation is assumed beforehand, of mean 1/2 and variance 1/4
    mean = (0.5 + np.cumsum(losses, axis=0)) / seen
    variance = (0.25 + np.cumsum((losses - mean) ** 2, axis=0)) / seen
    # A stake must be placed before its loss is seen, so it goes by the variance of the losses before.
    before = np.concatenate([np.full((1, losses.shape[1]), 0.25), variance[:-1]])
    stakes = np.minimum(1.0, np.sqrt(2 * math.log(1 / level) / (n * before)))
    log_wealth = np.cumsum(np.log1p(-stakes * (losses - tolerance)), axis=0)
    return np.exp(-np.maximum(0.0, log_wealth.max(axis=0)))


_OF_SUMS: dict[str, Callable[..., Float[np.ndarray, " thresholds"]]] = {
    "hoeffding": _hoeffding,
    "hoeffding_bentkus": _hoeffding_bentkus,
}


# ------------------------------------------------------------------------------------------------------ procedures


def fixed_sequence(p: Float[np.ndarray, " thresholds"], error_rate: float) -> Bool[np.ndarray, " thresholds"]:
    """Which hypotheses are rejected, tested in the given order until one is not; no correction for their number."""
    return np.logical_and.accumulate(p <= error_rate)


def bonferroni(p: Float[np.ndarray, " thresholds"], error_rate: float) -> Bool[np.ndarray, " thresholds"]:
    """Which hypotheses are rejected, each tested at its share of the error rate."""
    return p <= error_rate / len(p)


@dataclass(frozen=True, slots=True)
class Calibration:
    """A threshold and how it was chosen.

    Attributes:
        threshold: the chosen one; 1, the full model, where none passed.
        procedure: how it was chosen.
        p_value: kind of the p-values; None for ``conformal``.
        tolerance: allowed expected loss.
        error_rate: allowed probability of a wrong certificate; None for ``conformal``, which has none.
        prompts: calibration prompts.
        seed: of the order of the prompts in betting.
        thresholds: the tested ones, safest first.
        risks: mean loss on the calibration prompts, per threshold.
        p_values: per threshold, after the stop of the fixed sequence too; empty for ``conformal``.
        passed: per threshold, whether it was accepted.
        falls: pairs of prompt and neighbouring thresholds where the lower threshold lost less. ``conformal`` requires
            none and replaces each loss by the largest at any safer threshold.
    """

    threshold: float
    procedure: Procedure
    p_value: PValue | None
    tolerance: float
    error_rate: float | None
    prompts: int
    seed: int
    thresholds: tuple[float, ...]
    risks: tuple[float, ...]
    p_values: tuple[float, ...]
    passed: tuple[bool, ...]
    falls: int

    @property
    def certified(self) -> bool:
        """Whether an early exit is certified in probability; one accepted by ``conformal`` is not."""
        return any(self.passed) and self.procedure != "conformal"

    def explain(self) -> str:
        """One sentence about the guarantee."""
        by = f"{self.procedure}, {self.prompts} prompts" + (f", p-value {self.p_value}" if self.p_value else "")
        if not any(self.passed):
            return f"no threshold passed for tolerance {self.tolerance:g} ({by}): the full model runs"
        if self.error_rate is None:
            kept = f"expected loss at most {self.tolerance:g} in expectation over calibration sets, not certified"
        else:
            kept = f"expected loss at most {self.tolerance:g} with probability at least {1 - self.error_rate:g}"
        return f"threshold {self.threshold:g}: {kept} ({by})"

    def record(self) -> dict[str, Any]:
        """The fields as plain JSON values, with ``certified``."""
        fields = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}
        return {**fields, "certified": self.certified}


def calibrate(
    losses: Float[np.ndarray, "prompts thresholds"],
    thresholds: Sequence[float],
    *,
    tolerance: float,
    error_rate: float = 0.05,
    p_value: PValue = "betting",
    procedure: Procedure = "fixed_sequence",
    seed: int = 0,
) -> Calibration:
    """Choose the lowest threshold that passes.

    Args:
        losses: in [0, 1], one row per calibration prompt, one column per threshold.
        thresholds: falling, all below 1 (1 is the full model and needs no test), fixed before the losses were seen.
        tolerance: allowed expected loss, in (0, 1).
        error_rate: allowed probability of a wrong certificate, in (0, 1); ignored by ``conformal``.
        p_value: see the head of this file; ignored by ``conformal``.
        procedure: see the head of this file.
        seed: of the order of the prompts in betting; must be fixed beforehand, or the guarantee is void.

    Raises:
        ValueError: a setting or a loss out of range, thresholds not falling, or too few prompts to certify anything
            even if none of them lost anything.
    """
    losses = _checked_losses(losses, thresholds)
    _check_settings(tolerance, error_rate, p_value, procedure)
    _check_enough(len(losses), tolerance, error_rate, p_value, procedure, len(thresholds))
    if procedure == "conformal":
        passed, p = _conformal(losses, tolerance), np.empty(0)
    else:
        level = _level(error_rate, procedure, len(thresholds))
        p = p_values(np.random.default_rng(seed).permutation(losses), tolerance, p_value, level)
        passed = (fixed_sequence if procedure == "fixed_sequence" else bonferroni)(p, error_rate)
    certifies = procedure != "conformal"
    return Calibration(
        threshold=float(min((t for t, ok in zip(thresholds, passed, strict=True) if ok), default=FULL_MODEL)),
        procedure=procedure,
        p_value=p_value if certifies else None,
        tolerance=tolerance,
        error_rate=error_rate if certifies else None,
        prompts=len(losses),
        seed=seed,
        thresholds=tuple(float(t) for t in thresholds),
        risks=tuple(losses.mean(axis=0).tolist()),
        p_values=tuple(p.tolist()),
        passed=tuple(passed.tolist()),
        falls=int((np.diff(losses, axis=1) < 0).sum()),
    )


def _conformal(losses: Float[np.ndarray, "prompts thresholds"], tolerance: float) -> Bool[np.ndarray, " thresholds"]:
    """(n mean + 1) / (n + 1) <= tolerance: the new prompt's loss counts at its largest (Angelopoulos et al. 2024).

    Each loss is replaced by the largest at any safer threshold, since this guarantee assumes losses that only grow.
    """
    monotone = np.maximum.accumulate(losses, axis=1)
    return (monotone.sum(axis=0) + 1) / (len(losses) + 1) <= tolerance


def _level(error_rate: float, procedure: Procedure, n_thresholds: int) -> float:
    return error_rate / n_thresholds if procedure == "bonferroni" else error_rate


# --------------------------------------------------------------------------------------------------------- planner


def fewest_prompts(
    tolerance: float,
    error_rate: float = 0.05,
    p_value: PValue = "betting",
    procedure: Procedure = "fixed_sequence",
    n_thresholds: int = 1,
) -> int:
    """The fewest prompts with which anything can be certified if all their losses are 0.

    Raises:
        ValueError: a setting is out of range.
    """
    _check_settings(tolerance, error_rate, p_value, procedure)
    if procedure == "conformal":
        n = math.floor(1 / tolerance) - 1
        return n if n > 0 and 1 / (n + 1) <= tolerance else n + 1
    return _fewest(tolerance, _level(error_rate, procedure, n_thresholds), p_value)


@lru_cache(maxsize=256)
def _fewest(tolerance: float, level: float, kind: PValue) -> int:
    def p_without_loss(n: int) -> float:
        if kind in _OF_SUMS:
            return float(_OF_SUMS[kind](np.zeros(1), n, tolerance)[0])
        return float(p_values(np.zeros((n, 1)), tolerance, kind, level)[0])

    enough = 1
    while p_without_loss(enough) > level:
        enough *= 2
    return _smallest(lambda n: p_without_loss(n) <= level, enough // 2, enough)


def chance_to_certify(
    prompts: int,
    risk: float,
    tolerance: float,
    error_rate: float = 0.05,
    p_value: PValue = "betting",
    deviation: float | None = None,
    seed: int = 0,
) -> float:
    """Probability that one threshold of expected loss ``risk`` is certified with ``prompts`` calibration prompts.

    Exact for p-values of the mean and losses of 0 and 1, else from 2000 simulated calibrations. In a fixed sequence all
    safer thresholds must pass too, which they nearly always do if they lose clearly less.

    Args:
        risk: supposed expected loss, at least 0 and below the tolerance.
        tolerance: allowed expected loss.
        error_rate: level of the test; for ``bonferroni`` divide it by the number of thresholds.
        p_value: see the head of this file.
        deviation: supposed standard deviation of the losses, taken as Beta distributed. None: losses of 0 and 1, which
            spread most.
        seed: of the simulation.

    Raises:
        ValueError: a setting is out of range, or no losses in [0, 1] have that mean and deviation.
    """
    _check_settings(tolerance, error_rate, p_value, "fixed_sequence")
    _check_supposed(risk, tolerance, deviation)
    _check(prompts >= 1, f"prompts={prompts}", "at least 1", "plan for a prompt or more")
    if deviation is None and p_value in _OF_SUMS:
        counts = np.arange(prompts + 1)
        passing = int((_OF_SUMS[p_value](counts.astype(np.float64), prompts, tolerance) <= error_rate).sum())
        return float(stats.binom.cdf(passing - 1, prompts, risk))
    rng, certified, left = np.random.default_rng(seed), 0, _SIMULATIONS
    while left:
        columns = min(left, max(1, _AT_ONCE // prompts))
        losses = _supposed_losses(rng, risk, deviation, (prompts, columns))
        certified += int((p_values(losses, tolerance, p_value, error_rate) <= error_rate).sum())
        left -= columns
    return certified / _SIMULATIONS


def prompts_needed(
    risk: float,
    tolerance: float,
    error_rate: float = 0.05,
    p_value: PValue = "betting",
    power: float = 0.9,
    deviation: float | None = None,
    seed: int = 0,
) -> int:
    """How many prompts certify a threshold of expected loss ``risk`` with probability ``power``.

    Arguments as in ``chance_to_certify``; ``power`` in (0, 1).

    Raises:
        ValueError: a setting is out of range, the supposed risk is not below the tolerance, or so close to it that
            more than 100 000 prompts would be needed.
    """
    _check(0 < power < 1, f"power={power:g}", "above 0 and below 1", "ask for 0.8 or 0.9")
    _check_supposed(risk, tolerance, deviation)

    def enough(n: int) -> bool:
        return chance_to_certify(n, risk, tolerance, error_rate, p_value, deviation, seed) >= power

    fewest = high = fewest_prompts(tolerance, error_rate, p_value)
    while not enough(high):
        _check(
            high < MOST_PROMPTS,
            f"a risk of {risk:g} against a tolerance of {tolerance:g}",
            f"a gap that {MOST_PROMPTS} prompts can show with p_value={p_value}",
            "allow a larger tolerance, or aim at a safer threshold",
        )
        high = min(2 * high, MOST_PROMPTS)
    return _smallest(enough, max(high // 2, fewest - 1), high)


def _supposed_losses(
    rng: np.random.Generator, risk: float, deviation: float | None, shape: tuple[int, int]
) -> Float[np.ndarray, "prompts thresholds"]:
    widest = risk * (1 - risk)
    if deviation is None or deviation**2 >= widest:
        return (rng.random(shape) < risk).astype(np.float64)
    if deviation == 0:
        return np.full(shape, risk)
    total = widest / deviation**2 - 1
    return rng.beta(risk * total, (1 - risk) * total, shape)


def _smallest(holds: Callable[[int], bool], fails: int, works: int) -> int:
    while works - fails > 1:
        middle = (fails + works) // 2
        fails, works = (fails, middle) if holds(middle) else (middle, works)
    return works


# ------------------------------------------------------------------------------------------- the promise, as a test


@dataclass(frozen=True, slots=True)
class Redraws:
    """How often a way of choosing thresholds broke the tolerance on newly drawn calibration sets.

    Attributes:
        draws: calibration sets drawn.
        broken: how many led to a threshold whose risk over the whole table exceeds the tolerance.
        thresholds: the chosen ones, one per draw.
    """

    draws: int
    broken: int
    thresholds: tuple[float, ...]


def redraw(
    losses: Float[np.ndarray, "prompts thresholds"],
    thresholds: Sequence[float],
    choose: Callable[[Float[np.ndarray, "prompts thresholds"]], float],
    *,
    tolerance: float,
    prompts: int,
    draws: int = 1000,
    seed: int = 0,
) -> Redraws:
    """Take recorded losses as the population, draw calibration sets from it, and count broken guarantees.

    Rows are drawn with replacement: independent prompts, as the guarantee requires, whatever the size of the table.
    ``choose`` maps the losses of one draw to a threshold; ``naive_threshold`` is the control.
    """
    losses = _checked_losses(losses, thresholds)
    rng = np.random.default_rng(seed)
    risk = {FULL_MODEL: 0.0, **dict(zip(map(float, thresholds), losses.mean(axis=0).tolist(), strict=True))}
    chosen = tuple(float(choose(losses[rng.integers(len(losses), size=prompts)])) for _ in range(draws))
    return Redraws(draws, sum(risk[threshold] > tolerance for threshold in chosen), chosen)


def naive_threshold(
    losses: Float[np.ndarray, "prompts thresholds"], thresholds: Sequence[float], tolerance: float
) -> float:
    """The lowest threshold down to which the mean loss stays within the tolerance: a control without any guarantee."""
    within = np.logical_and.accumulate(losses.mean(axis=0) <= tolerance)
    return float(thresholds[int(within.sum()) - 1]) if within[0] else FULL_MODEL


# ---------------------------------------------------------------------------------------------------------- checks


def _check(holds: bool, given: str, allowed: str, remedy: str) -> None:
    if not holds:
        raise ValueError(f"expected {allowed}, got {given}; {remedy}")


def _check_settings(tolerance: float, error_rate: float, p_value: str, procedure: str) -> None:
    _check(
        0 < tolerance < 1,
        f"tolerance={tolerance:g}",
        "above 0 and below 1",
        "a loss of exactly 0 can be certified for the full model alone; try 0.05",
    )
    _check(0 < error_rate < 1, f"error_rate={error_rate:g}", "above 0 and below 1", "try 0.05")
    for name, value, kinds in (("p_value", p_value, PValue), ("procedure", procedure, Procedure)):
        _check(value in get_args(kinds), f"{name}={value}", " | ".join(get_args(kinds)), "choose one of these")


def _check_enough(
    n: int, tolerance: float, error_rate: float, p_value: PValue, procedure: Procedure, n_thresholds: int
) -> None:
    fewest = fewest_prompts(tolerance, error_rate, p_value, procedure, n_thresholds)
    by = procedure if procedure == "conformal" else f"error_rate={error_rate:g}, p_value={p_value}, {procedure}"
    _check(
        n >= fewest,
        f"{n} calibration prompts for tolerance={tolerance:g} ({by})",
        f"{fewest} or more, since fewer certify nothing even if none of them lost anything",
        "calibrate on more prompts, or allow a larger tolerance"
        + ("" if procedure == "conformal" else " or error_rate"),
    )


def _check_supposed(risk: float, tolerance: float, deviation: float | None) -> None:
    _check(
        0 <= risk < tolerance,
        f"a supposed risk of {risk:g}",
        f"at least 0 and below the tolerance of {tolerance:g}, for no number of prompts certifies what is not so",
        "allow a larger tolerance, or aim at a safer threshold",
    )
    if deviation is not None:
        widest = math.sqrt(risk * (1 - risk))
        _check(
            0 <= deviation <= widest * (1 + 1e-9),
            f"deviation={deviation:g} for losses of mean {risk:g}",
            f"0 to {widest:.4g}, the deviation of losses of 0 and 1",
            "leave it out to plan for the widest losses",
        )


def _in_unit(values: Float[np.ndarray, "..."], name: str) -> Float[np.ndarray, "..."]:
    values = values.astype(np.float64)
    inside = bool(((values >= 0) & (values <= 1)).all())  # False for NaN
    _check(
        inside,
        f"{name} with values from {values.min(initial=0):g} to {values.max(initial=0):g}",
        "[0, 1] for each prompt",
        "divide percentages by 100, and drop what could not be scored",
    )
    return values


def require_falling(thresholds: Sequence[float]) -> None:
    """Refuse thresholds that are not a falling sequence from below 1 to 0.

    Raises:
        ValueError: they are not.
    """
    falling = all(high > low for high, low in zip([FULL_MODEL, *thresholds], thresholds, strict=False))
    _check(
        bool(thresholds) and falling and thresholds[-1] >= 0,
        f"thresholds {', '.join(f'{t:g}' for t in thresholds) or '(none)'}",
        "a falling sequence that starts below 1 (the full model, which needs no test) and ends at 0 or above",
        "sort them from the safest down",
    )


def _checked_losses(
    losses: Float[np.ndarray, "prompts thresholds"], thresholds: Sequence[float]
) -> Float[np.ndarray, "prompts thresholds"]:
    _check(
        losses.shape[1] == len(thresholds) and losses.size > 0,
        f"losses of {losses.shape[0]} prompts at {losses.shape[1]} thresholds, for {len(thresholds)} thresholds",
        "one row per prompt and one column per threshold, at least one of each",
        "decode every calibration prompt at every threshold",
    )
    require_falling(thresholds)
    return _in_unit(losses, "losses")
