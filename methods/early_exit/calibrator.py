"""Risk targets: the settings of a calibration, and the thresholds it may choose among.

    python -m bench method=calm method.calibration.tolerance=0.05 method.calibration.error_rate=0.05

The benchmark decodes calibration prompts in full and at one threshold after the other, and asks here when to stop and
what to choose; ``risk_control.py`` has the statistics. Losses of a threshold count whatever the decoder does there,
hidden-state propagation and runaway texts included.
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
    """The loss that is allowed, and how the threshold is found.

    Args:
        tolerance: expected loss that is allowed; None: no calibration.
        error_rate: probability that the target may be missed.
        p_value: see ``risk_control.py``.
        procedure: likewise.
        against: what a text loses against: the full model's own (``textual``: 1 - ROUGE-L of the two texts' tokens), or
            a reference (``risk``: how much worse than the full model's it scores).
        metric: score of ``risk``, e.g. rougeL, bleu, chrf, exact_match_flexible; None: rougeL of a causal model, bleu
            of an encoder-decoder.
        thresholds: to choose among, safest first; None: those of the method.
        corpus: where the prompts come from, as in ``bench.train``; None: what goes with the data set of the run.
        prompts: how many; None: as many as certify, nine times in ten, a threshold that loses half the tolerance, with
            a standard deviation of twice the tolerance.
        seed: which prompts, and in which order.
        whole_grid: decode at thresholds after the end of a fixed sequence, too. It changes nothing but the record.

    Raises:
        ValueError: a number of prompts below 1, or a metric that nothing uses.
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
                f"Got method.calibration.prompts={self.prompts}; at least 1 is needed, or null for as many as the "
                "tolerance asks for. Set method.calibration.prompts=null."
            )
        if self.metric is not None and self.against != "risk":
            raise ValueError(
                f"Got method.calibration.metric={self.metric} with against={self.against}, which compares with the "
                "full model's own text and uses none. Set method.calibration.against=risk, or metric=null."
            )

    def over(self, grid: Sequence[float], sampling: Sampling) -> ThresholdCalibrator | None:
        """What chooses among the user's thresholds or, without any, a method's own; None without a tolerance.

        Raises:
            ValueError: a setting out of range, thresholds that do not fall, fewer prompts than can certify anything, or
                sampling, under which a text does not tell what an exit cost it.
        """
        if self.tolerance is None:
            return None
        if not sampling.greedy:
            raise ValueError(
                f"Got a calibration with temperature={sampling.temperature:g}; greedy decoding alone tells what a "
                "text lost. Set sampling=greedy, or method.calibration.tolerance=null."
            )
        filled = replace(self, thresholds=tuple(self.thresholds or grid))
        return ThresholdCalibrator(filled, self.tolerance, tuple(self.thresholds or grid))


class ThresholdCalibrator(Calibrator):
    """Says how many prompts are needed, how far to go, and which threshold is chosen.

    Attributes:
        risk_target: the settings.
        thresholds: to be tried, safest first.
        fewest: prompts needed at least.
    """

    def __init__(self, target: RiskTarget, tolerance: float, thresholds: tuple[float, ...]) -> None:
        self.risk_target, self.tolerance, self.thresholds = target, tolerance, thresholds
        try:
            risk_control.require_falling(thresholds)
            self.fewest = risk_control.fewest_prompts(
                tolerance, target.error_rate, target.p_value, target.procedure, len(thresholds)
            )
        except ValueError as error:
            raise ValueError(f"method.calibration: {error}.") from None
        if target.prompts is not None and target.prompts < self.fewest:
            raise ValueError(
                f"Got method.calibration.prompts={target.prompts}; for tolerance={tolerance:g} "
                f"({self._by()}) {self.fewest} or more are needed, since fewer certify nothing even if none of them "
                f"lost anything. Set method.calibration.prompts={self.planned()} or more, or a larger tolerance."
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
        """Whether the thresholds tried so far decide: after the first failure of a sequence nothing counts."""
        if self.risk_target.procedure == "bonferroni" or self.risk_target.whole_grid or not losses.shape[1]:
            return losses.shape[1] == len(self.thresholds)
        return losses.shape[1] == len(self.thresholds) or not self._chosen(losses).passed[-1]

    def choose(self, losses: Float[np.ndarray, "prompts tried"]) -> dict[str, Any]:
        """The record of the calibration, ``threshold`` and ``explanation`` among it, as plain JSON values."""
        found = self._chosen(losses)
        return {"explanation": found.explain(), **found.record()}

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
