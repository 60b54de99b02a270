"""How often a promise is broken when its prompts are drawn again.

The losses of every prompt at every threshold are known, so a calibration costs no decoding. Each resampling splits the
prompts into those that calibrate and those that test, as CALM's experiments do (Schuster et al. 2022, arXiv 2207.07061,
sec. 6). The promise is about the expected loss; the mean over the test prompts differs from it by chance, so a promise
that is kept with room to spare can count as broken here, and one that is kept to the last digit does so half of the
time. Splits of one set of prompts are not independent of each other, which the bounds take them to be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy import stats

from methods.decoder import Calibrator

_FULL_MODEL = 1.0
_CERTAINTY = 0.95  # of each bound of a share, and of a test loss that is above the tolerance beyond chance


def resample(
    losses: Float[np.ndarray, "prompts thresholds"],
    layers: Sequence[float],
    calibrator: Calibrator,
    *,
    calibration: int,
    draws: int,
    seed: int,
) -> dict[str, Any]:
    """Calibrate and test on ``draws`` splits of the prompts; plain JSON values.

    Args:
        losses: in [0, 1], a column for each of the calibrator's thresholds.
        layers: share of the layers that a token takes on average, by threshold.
        calibrator: chooses the thresholds.
        calibration: prompts that calibrate; the others test.
        seed: of the splits.

    Returns:
        ``broken`` counts the splits whose test prompts lose more than the tolerance on average, ``beyond_chance`` those
        that do so at 95 % certainty. ``low`` and ``high`` bound the share of broken ones, each at 95 %: ``kept`` is
        True where ``high`` is at most the error rate, False where ``low`` is above it, and None between. ``naive`` is
        the share that is broken by the lowest threshold whose mean calibration loss is within the tolerance.
    """
    rng, tolerance = np.random.default_rng(seed), calibrator.tolerance
    columns = {_FULL_MODEL: np.zeros(len(losses))} | dict(zip(calibrator.thresholds, losses.T, strict=True))
    shares = {_FULL_MODEL: 1.0} | dict(zip(calibrator.thresholds, layers, strict=True))
    chosen, naive, tested = Counter[float](), 0, []
    for _ in range(draws):
        order = rng.permutation(len(losses))
        calibrates, tests = order[:calibration], order[calibration:]
        threshold = float(calibrator.choose(losses[calibrates])["threshold"])
        chosen[threshold] += 1
        tested.append(columns[threshold][tests])
        naive += bool(columns[calibrator.naive(losses[calibrates])][tests].mean() > tolerance)
    means = np.array([found.mean() for found in tested])
    broken = int((means > tolerance).sum())
    low, high = bounds(broken, draws)
    allowed = calibrator.error_rate
    return {
        "tolerance": tolerance,
        "error_rate": allowed,
        "calibration_prompts": calibration,
        "test_prompts": len(losses) - calibration,
        "draws": draws,
        "broken": broken,
        "share": broken / draws,
        "low": low,
        "high": high,
        "kept": True if high <= allowed else False if low > allowed else None,
        "beyond_chance": sum(_above(found, tolerance) for found in tested),
        "naive": naive / draws,
        "test_loss": float(means.mean()),
        "layers": sum(shares[threshold] * count for threshold, count in chosen.items()) / draws,
        "full_model": chosen[_FULL_MODEL],
        "thresholds": {f"{threshold:g}": count for threshold, count in sorted(chosen.items(), reverse=True)},
    }


def bounds(broken: int, draws: int) -> tuple[float, float]:
    """Lower and upper bound of a share, each at 95 % certainty (Clopper and Pearson 1934)."""
    low = float(stats.beta.ppf(1 - _CERTAINTY, broken, draws - broken + 1)) if broken else 0.0
    high = float(stats.beta.ppf(_CERTAINTY, broken + 1, draws - broken)) if broken < draws else 1.0
    return low, high


def _above(losses: Float[np.ndarray, " tests"], tolerance: float) -> bool:
    """Whether the expected loss is above the tolerance at 95 % certainty, by a t test."""
    if len(losses) < 2 or losses.mean() <= tolerance:
        return False
    error = losses.std(ddof=1) / len(losses) ** 0.5
    return bool(losses.mean() - stats.t.ppf(_CERTAINTY, len(losses) - 1) * error > tolerance)
