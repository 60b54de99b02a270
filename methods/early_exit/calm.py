"""CALM: each token leaves the model as soon as it is sure enough (Schuster et al. 2022, arXiv 2207.07061).

Behind each of a set of layers the token's confidence is measured (``confidence.py``: softmax gap, saturation of the
state, trained classifier) and compared with one threshold that may fall along the text (``threshold.py``); the layers
it skips get keys and values of the state it left with (``loop.py``). Nothing is promised of one text. With a threshold
of 1 no token leaves and the text is the target's; in between, ``method.calibration.tolerance`` chooses the threshold on
calibration prompts and promises a bound on the expected loss (``promise.py``, ``calibration.py``).

Exits must be trained: into the model itself (then ``method.head=lens``), or as maps and a classifier over a frozen one:

    python -m bench.train method=calm model=MODEL

Published, T5 with 8 decoder layers, textual tolerance 0.25 at error rate 0.05: 2.62 layers and 2.57x on CNN/DM, 1.76
and 2.83x on WMT15 en-fr, 1.03 on SQuAD, all with the softmax gap, whose heads make the decoder compute more than
without exits (0.49 of its FLOPs "saved" on CNN/DM); the classifier 4.51 layers and 2.04x there. SmolLM2-135M, which
was not trained to exit, keeps a ROUGE-L of 0.71 to its own text at 28.5 of 30 layers with trained maps.

Differences: decoder-only targets, whose prompt and first token take all layers. A token exits above its threshold, not
at it, since a softmax in 32 bit reaches 1. A threshold of 1 is the full model under every decay. The state that skipped
layers project is the one behind the exit that was taken; the published code takes the first exit's. The classifier
reads the state behind the final norm. The softmax is asked behind a screen of frequent tokens, which makes no token
leave and keeps a few (``confidence.py``; ``method.vocabulary=null`` does without). Batches: see ``loop.py``. At a
temperature the exit's own distribution is sampled from.

Command: ``python -m bench method=calm method.threshold=0.8``
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from methods.decoder import Calibrated, Guarantee
from methods.early_exit.calibrator import GRID, Promise
from methods.early_exit.confidence import Confidence, Measure, Vocabulary, make_confidence
from methods.early_exit.exits import Head, default_depths, find_exits, find_reader, require_depths
from methods.early_exit.loop import EarlyExitDecoder, ExitDecision
from methods.early_exit.threshold import Decay, Threshold
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling


class CalmPolicy:
    """Leave at the first exit whose confidence is above the threshold."""

    def __init__(self, depths: Sequence[int], layers: int, confidence: Confidence, threshold: Threshold) -> None:
        self.confidence, self.threshold = confidence, threshold
        self.guarantee = Guarantee.EXACT if threshold.never else Guarantee.RELAXED
        self.nbytes, self.deepest = confidence.nbytes, layers
        self._stops = (layers,) if threshold.never else (*depths, layers)
        self._place, self._limit = 0, 1

    def reset(self, limit: int) -> None:
        self._place, self._limit = 0, limit

    def stops(self, roots: Sequence[int]) -> Sequence[int]:
        self._place += 1  # the first token came with the prompt
        self.confidence.begin()
        return self._stops

    def look(
        self,
        depth: int,
        hidden: Float[Tensor, "B D"],
        ready: Float[Tensor, "B D"],
        roots: list[int],
        rows: Sequence[bool],
    ) -> ExitDecision:
        """Costs one host read, and one more where a screen lets somebody pass: whether to go on is for the data."""
        least = self.threshold.at(self._place, self._limit)

        def tempts(confidence: Float[Tensor, "B"]) -> bool:
            found = (confidence > least).tolist()
            return any(sure and is_open for sure, is_open in zip(found, rows, strict=True))

        opinion = self.confidence(hidden, ready, tempts)
        if opinion.confidence is None:
            return ExitDecision([False] * len(hidden))
        return ExitDecision((opinion.confidence > least).tolist(), opinion.logits, opinion.columns)


class Calm(EarlyExitDecoder, Calibrated):
    """Confident adaptive language modeling.

    Args:
        target: model to leave early.
        sampling: how the distribution at an exit is processed.
        threshold: confidence above which a token leaves; 1 is the full model.
        confidence: how it is measured.
        exits: depths that are checked, in layers run; None: those that were trained, else every fourth from the middle
            on.
        head: how exits are read: by what was trained, or by the model's own norm and output matrix (``lens``).
        vocabulary: ids that the softmax asks first, see ``confidence.py``; None: no screen.
        decay: how the threshold falls along the text.
        tau: how fast.
        horizon: tokens over which it does; None: the limit of the run.
        calibration: a promise for which the threshold is chosen; it takes the place of ``threshold``.
        checkpoint: folder of trained exits; None: those prepared for this model.

    Raises:
        ValueError: exits that are not trained, or an option out of range.
    """

    paper = "Schuster et al. 2022, arXiv 2207.07061"

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        threshold: float = 0.9,
        confidence: Measure = "softmax",
        exits: Sequence[int] | None = None,
        head: Head = "trained",
        vocabulary: Vocabulary = "auto",
        decay: Decay = "none",
        tau: float = 4.0,
        horizon: int | None = None,
        calibration: Promise | None = None,
        checkpoint: str | Path | None = None,
    ) -> None:
        trained = find_exits(target, checkpoint)
        reader = find_reader("calm", head, target, trained)
        known = default_depths(target) if trained is None else trained.depths
        depths = known if exits is None else tuple(exits)
        require_depths(depths, target, reader, "method.exits")
        self._depths, self._threshold = depths, Threshold(threshold, decay, tau, horizon)
        self._confidence = make_confidence(confidence, target, trained, vocabulary)
        self.calibrator = None if calibration is None else calibration.over(GRID, sampling)
        super().__init__(target, sampling, self._policy(threshold, target.n_layers), reader)

    def set_threshold(self, threshold: float) -> None:
        """See ``methods.decoder.Calibrated``."""
        self.restart(self._policy(threshold, self.target.n_layers))

    def _policy(self, threshold: float, layers: int) -> CalmPolicy:
        return CalmPolicy(self._depths, layers, self._confidence, replace(self._threshold, value=threshold))
