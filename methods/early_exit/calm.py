"""CALM: each token exits the model as soon as it is confident enough (Schuster et al. 2022, arXiv 2207.07061).

After each of a set of layers the token's confidence (``confidence.py``: softmax gap, saturation of the state, trained
classifier) is compared with one threshold, which may fall along the text (``threshold.py``). Skipped layers get keys
and values of the state at the exit (``loop.py``). A threshold of 1 is the full model. Below 1 no single text is
guaranteed; ``method.calibration.tolerance`` chooses the threshold on calibration prompts with a bound on the expected
loss (``calibrator.py``, ``risk_control.py``).

Exits must be trained: into the model itself (then ``method.head=lens``), or as maps and a classifier over a frozen one:

    python -m bench train method=calm model=MODEL

Published, T5 with 8 decoder layers, textual tolerance 0.25 at error rate 0.05, softmax gap: 2.62 layers and 2.57x on
CNN/DM, 1.76 and 2.83x on WMT15 en-fr, 1.03 on SQuAD; classifier: 4.51 layers and 2.04x on CNN/DM.

Differences: decoder-only targets too. A token exits above its threshold, not at it, since a softmax in 32 bit reaches
1. Skipped layers project the state after the exit that was taken; the published code takes the first exit's. The
classifier reads the state after the final norm. A screen of frequent tokens precedes the softmax and keeps a few tokens
longer (``confidence.py``; ``method.vocabulary=null`` turns it off).

Command: ``python -m bench method=calm method.threshold=0.8``
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from methods.decoder import Calibrated
from methods.drafting import AcceptanceRule
from methods.early_exit.calibrator import GRID, RiskTarget
from methods.early_exit.confidence import Confidence, Measure, Vocabulary, make_confidence
from methods.early_exit.exits import Head, default_depths, find_exits, find_reader, require_depths
from methods.early_exit.loop import ExitDecision, ExitPoint, Policy, exact_if
from methods.early_exit.rounds import RoundsDecoder
from methods.early_exit.threshold import Decay, Threshold
from methods.early_exit.verified import Judged, verification
from methods.engine.causal_lm import CausalLM
from methods.engine.fused_layers import ExitRule
from methods.engine.sampling import Sampling


class CalmPolicy(Policy):
    """Leave at the first exit whose confidence is above the threshold."""

    def __init__(self, depths: Sequence[int], layers: int, confidence: Confidence, threshold: Threshold) -> None:
        self.confidence, self.threshold = confidence, threshold
        self.guarantee = exact_if(threshold.never)
        self.nbytes, self.deepest = confidence.nbytes, layers
        self.fixed = layers if threshold.never else None
        self._stops = (layers,) if threshold.never else (*depths, layers)
        self._place, self._limit = 0, 1

    def reset(self, limit: int) -> None:
        self._place, self._limit = 0, limit

    def stops(self, roots: Sequence[int]) -> Sequence[int]:
        self._place += 1  # the first token came with the prompt
        self.confidence.begin()
        return self._stops

    def rule(self, roots: Sequence[int], places: Sequence[int]) -> ExitRule | None:
        if self.threshold.never:
            return ExitRule(self._stops, "table", depths=[self.deepest] * len(roots))
        return self.rule_of_rounds(places, 1)

    def rule_of_rounds(self, places: Sequence[int], rounds: int) -> ExitRule | None:
        if self.threshold.never or (found := self.confidence.rule(self._stops[:-1])) is None:
            return None
        least = [self.threshold.at(place + later, self._limit) for later in range(rounds) for place in places]
        return replace(found, thresholds=least)

    def judged(self, asked: int, kept: int) -> None:
        self._place += kept - asked

    def decide(self, point: ExitPoint) -> ExitDecision:
        """Costs one host read, and a second where a row passes the screen of frequent tokens."""
        least = self.threshold.at(self._place, self._limit)

        def tempts(confidence: Float[Tensor, "B"]) -> bool:
            found = (confidence > least).tolist()
            return any(sure and is_open for sure, is_open in zip(found, point.open, strict=True))

        opinion = self.confidence(point.hidden, point.ready, tempts)
        if opinion.confidence is None:
            return ExitDecision([False] * len(point.open))
        return ExitDecision((opinion.confidence > least).tolist(), opinion.logits, opinion.columns)


class Calm(RoundsDecoder, Calibrated):
    """Confident adaptive language modeling.

    Args:
        threshold: confidence above which a token exits; 1 is the full model.
        confidence: measure of the confidence.
        exits: depths that are checked, in layers run; None: those that were trained, else every fourth from the middle.
        head: how exits are read: by trained maps, or by the model's own norm and output matrix (``lens``).
        vocabulary: ids that the softmax checks first, see ``confidence.py``; None: no screen.
        rank: the softmax checks an output matrix of this rank first, see ``confidence.py``; None: exact columns of it.
        decay: form in which the threshold falls along the text.
        tau: speed of the decay.
        horizon: tokens over which it falls; None: the limit of the run.
        regroup: in a batch, rows that do not leave at an exit wait there until so many are there; None: all rows take
            a step together.
        accept: ``all`` tokens that exit, or ``verify`` them by the whole model, see ``verified.py``.
        rule: exact rule of ``verify``; None: keep a token while the whole model picks it too.
        max_pending: most tokens that wait to be verified.
        calibration: a risk target for which the threshold is chosen; replaces ``threshold``.
        checkpoint: folder of trained exits; None: those prepared for this model.

    Raises:
        ValueError: exits that are not trained, or an option out of range.
    """

    paper = "Schuster et al. 2022, arXiv 2207.07061"
    checked_with = {"threshold": 0.3}  # at the default one, exits are seldom sure

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        threshold: float = 0.9,
        confidence: Measure = "softmax",
        exits: Sequence[int] | None = None,
        head: Head = "trained",
        vocabulary: Vocabulary = "auto",
        rank: int | None = None,
        decay: Decay = "none",
        tau: float = 4.0,
        horizon: int | None = None,
        regroup: int | None = None,
        accept: Judged = "all",
        rule: AcceptanceRule | None = None,
        max_pending: int = 16,
        calibration: RiskTarget | None = None,
        checkpoint: str | Path | None = None,
    ) -> None:
        trained = find_exits(target, checkpoint)
        reader = find_reader("calm", head, target, trained)
        known = default_depths(target) if trained is None else trained.depths
        depths = known if exits is None else tuple(exits)
        require_depths(depths, target, reader, "method.exits")
        self._depths, self._threshold = depths, Threshold(threshold, decay, tau, horizon)
        if regroup is not None and confidence == "saturation":
            raise ValueError(
                "regroup must be null with confidence=saturation, which compares with the state before, got "
                f"{regroup}. Set method.regroup=null."
            )
        self._confidence = make_confidence(confidence, target, trained, vocabulary, rank)
        self.calibrator = None if calibration is None else calibration.over(GRID, sampling)
        verify = verification(accept, rule, max_pending, sampling, self.calibrator is not None)
        super().__init__(target, sampling, self._policy(threshold, target.n_layers), reader, verify, regroup)

    def set_threshold(self, threshold: float) -> None:
        self.restart(self._policy(threshold, self.target.n_layers))

    def _policy(self, threshold: float, layers: int) -> CalmPolicy:
        return CalmPolicy(self._depths, layers, self._confidence, replace(self._threshold, value=threshold))
