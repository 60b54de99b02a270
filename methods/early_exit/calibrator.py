"""Risk targets: the settings of a calibration, and the thresholds it may choose among.

    python -m bench method=calm method.calibration.tolerance=0.05 method.calibration.error_rate=0.05

The benchmark decodes calibration prompts in full and at one threshold after the other; this module says when to stop
and what to choose (statistics: ``risk_control.py``). The losses of a threshold include the effects of hidden-state
propagation and of runaway texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from methods.decoder import Calibrator
from methods.early_exit import risk_control
from methods.early_exit.risk_control import Procedure, PValue
from methods.engine.sampling import Sampling

Against = Literal["textual", "risk"]

GRID = tuple(round(0.95 - 0.05 * step, 2) for step in range(19))  # as CALM's, 0.95 .. 0.05
_POWER = 0.9
_CONFORMAL = 10  # times the fewest prompts that can do: the mean of so many is steady enough


@dataclass(frozen=True, slots=True)
class RiskTarget:
    """The allowed loss, and how the threshold is found.

    Args:
        tolerance: allowed expected loss; None: no calibration.
        error_rate: allowed probability of missing the target.
        p_value, procedure: see ``risk_control.py``.
        against: what the loss compares with: the full model's own text (``textual``: 1 - ROUGE-L of the two texts'
            tokens), or a reference (``risk``: how much worse than the full model's it scores).
        metric: score of ``risk``, e.g. rougeL, bleu, chrf, exact_match_flexible; None: rougeL of a causal model, bleu
            of an encoder-decoder.
        thresholds: to choose among, safest first; None: those of the method.
        corpus: source of the prompts, as in ``bench.train``; None: the one that belongs to the data set of the run.
        prompts: how many; None: as many as certify, nine times in ten, a threshold that loses half the tolerance, with
            a standard deviation of twice the tolerance.
        seed: which prompts, and in which order.
        whole_grid: decode at thresholds after the end of a fixed sequence, too. Only the record changes.

    Raises:
        ValueError: a number of prompts below 1, or a metric that is not used.
    """

    tolerance: float | None = None
    error_rate: float = 0.05
    p_value: PValue = "betting"
    procedure: Procedure = "fixed_sequence"
    against: Against = "textual"
    metric: str | None = None
    thresholds: Sequence[float] | None = None
    corpus: str | None = None
    prompts: int | None = None
    seed: int = 0
    whole_grid: bool = False

    def __post_init__(self) -> None:
        if self.prompts is not None and self.prompts < 1:
            raise ValueError(
                "method.calibration.prompts must be at least 1 or null (as many as the tolerance needs), got "
                f"{self.prompts}. Set method.calibration.prompts=null."
            )
        if self.metric is not None and self.against != "risk":
            raise ValueError(
                f"method.calibration.metric must be null with against={self.against}, which compares with the full "
                f"model's own text, got {self.metric}. Set method.calibration.against=risk, or metric=null."
            )

    def over(self, grid: Sequence[float], sampling: Sampling) -> ThresholdCalibrator | None:
        """A calibrator over the user's thresholds or else a method's own; None without a tolerance.

        Raises:
            ValueError: a setting out of range, thresholds that do not fall, fewer prompts than can certify anything, or
                sampling, under which the loss of a text is not due to the exit alone.
        """
        if self.tolerance is None:
            return None
        if not sampling.greedy:
            raise ValueError(
                "Calibration needs greedy decoding, where losses are due to exits alone, got "
                f"temperature={sampling.temperature:g}. Set sampling=greedy, or method.calibration.tolerance=null."
            )
        filled = replace(self, thresholds=tuple(self.thresholds or grid))
        return ThresholdCalibrator(filled, self.tolerance, tuple(self.thresholds or grid))


class ThresholdCalibrator(Calibrator):
    """Says how many prompts are needed, when to stop, and which threshold is chosen.

    Attributes:
        risk_target: the settings.
        thresholds: to be tried, safest first.
        fewest: least number of prompts.
    """

    def __init__(self, target: RiskTarget, tolerance: float, thresholds: tuple[float, ...]) -> None:
        self.risk_target, self.tolerance, self.thresholds = target, tolerance, thresholds
        self.error_rate = target.error_rate
        try:
            risk_control.require_falling(thresholds)
            self.fewest = risk_control.fewest_prompts(
                tolerance, target.error_rate, target.p_value, target.procedure, len(thresholds)
            )
        except ValueError as error:
            raise ValueError(f"method.calibration: {error}.") from None
        if target.prompts is not None and target.prompts < self.fewest:
            raise ValueError(
                f"method.calibration.prompts must be at least {self.fewest} for tolerance={tolerance:g} "
                f"({self._by()}), got {target.prompts}; fewer certify nothing even at loss 0. Set "
                f"method.calibration.prompts={self.planned()} or more, or a larger tolerance."
            )

    def planned(self) -> int:
        """Prompts with which a threshold that loses half the tolerance passes nine times in ten, see ``RiskTarget``."""
        target, risk = self.risk_target, self.tolerance / 2
        if target.procedure == "conformal":
            return _CONFORMAL * self.fewest
        deviation = min(2 * self.tolerance, (risk * (1 - risk)) ** 0.5)
        share = len(self.thresholds) if target.procedure == "bonferroni" else 1
        return risk_control.prompts_needed(
            risk, self.tolerance, target.error_rate / share, target.p_value, _POWER, deviation
        )

    def complete(self, losses: Float[np.ndarray, "prompts tried"]) -> bool:
        """Whether the thresholds tried so far suffice: a fixed sequence ends at its first failure."""
        if self.risk_target.procedure == "bonferroni" or self.risk_target.whole_grid or not losses.shape[1]:
            return losses.shape[1] == len(self.thresholds)
        return losses.shape[1] == len(self.thresholds) or not self._chosen(losses).passed[-1]

    def choose(self, losses: Float[np.ndarray, "prompts tried"]) -> dict[str, Any]:
        """The record of the calibration with ``threshold`` and ``explanation``, as plain JSON values."""
        found = self._chosen(losses)
        return {"explanation": found.explain(), **found.record()}

    def naive(self, losses: Float[np.ndarray, "prompts tried"]) -> float:
        """See ``methods.decoder.Calibrator``."""
        return risk_control.naive_threshold(losses, self.thresholds[: losses.shape[1]], self.tolerance)

    def promising(self, tolerance: float) -> ThresholdCalibrator:
        """See ``methods.decoder.Calibrator``."""
        return ThresholdCalibrator(replace(self.risk_target, tolerance=tolerance), tolerance, tuple(self.thresholds))

    def _chosen(self, losses: Float[np.ndarray, "prompts tried"]) -> risk_control.Calibration:
        target = self.risk_target
        return risk_control.calibrate(
            losses,
            self.thresholds[: losses.shape[1]],
            tolerance=self.tolerance,
            error_rate=target.error_rate,
            p_value=target.p_value,
            procedure=target.procedure,
            seed=target.seed,
        )

    def _by(self) -> str:
        target = self.risk_target
        if target.procedure == "conformal":
            return target.procedure
        return f"error_rate={target.error_rate:g}, p_value={target.p_value}, {target.procedure}"
