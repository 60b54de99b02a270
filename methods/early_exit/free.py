"""FREE: a shallow and a deep exit, and deep layers that run over many waiting tokens at once (Bae et al. 2023, arXiv
2310.05424).

The first k layers produce a token if their exit is confident; otherwise the rest of the model does, together with the
deep part of all tokens that have waited (synchronised parallel decoding, ``free_loop.py``). No state is copied upwards,
so the only error is an accepted shallow token. ``accept`` says what the deep layers do with those: ``all`` keeps them
(the paper), ``rollback`` takes back unlikely ones (BiLD, Kim et al. 2023, arXiv 2302.07863), ``verify`` keeps only what
an exact rule keeps: lossless self-speculation (LayerSkip, Elhoushi et al. 2024, arXiv 2404.16710).

The threshold is fixed, or learnt from how often the exits agree (``adaptive``, ``free_threshold.py``). The exit must be
trained, into the model (``method.head=lens``) or as a map over a frozen one:

    python -m bench train method=free model=MODEL

Published (T5-large, k = 6 of 24): up to 2.16x with about 99 % of the full model's quality over summarisation, question
answering and translation, batch size 1.

Differences: decoder-only targets too; ragged batches; the learnt threshold restarts with each prompt unless
``remember`` (the paper re-fits on everything so far). At most ``max_pending`` tokens wait, which bounds a deep pass. A
screen of frequent tokens comes first (``confidence.py``; ``method.vocabulary=null`` turns it off).

Command: ``python -m bench method=free method.accept=verify``
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from methods.decoder import Calibrated
from methods.drafting import AcceptanceRule
from methods.early_exit.calibrator import GRID, RiskTarget
from methods.early_exit.confidence import Vocabulary
from methods.early_exit.exits import Head, find_exits, find_reader, require_depths
from methods.early_exit.free_loop import (
    Accept,
    AdaptiveThreshold,
    FixedThreshold,
    Options,
    ShallowDeepDecoder,
)
from methods.early_exit.threshold import Threshold
from methods.early_exit.verified import Agreement
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling


class Free(ShallowDeepDecoder, Calibrated):
    """A shallow exit with synchronised parallel decoding.

    Args:
        depth: k, layers of the shallow exit; None: a quarter of the model, or the trained depth next to that.
        threshold: confidence (gap between the two likeliest tokens) above which it is taken; 1 is the full model.
        accept: treatment of shallow tokens: ``all``, ``rollback`` or ``verify``.
        adaptive: a threshold that learns; replaces ``threshold``.
        remember: the learnt threshold is kept from prompt to prompt.
        distance: ``rollback`` takes back tokens whose -log p by the deep layers is above this.
        rule: exact rule of ``verify``; None: keep a token while the whole model picks it too. At a temperature one for
            drawn chains (methods.speculative.verification.ChainRejection) keeps more.
        max_pending: most tokens that wait for the deep layers.
        head: how the exit is read: by trained maps, or by the model's own norm and output matrix (``lens``).
        vocabulary: ids that the exit checks first, see ``confidence.py``; None: no screen. A threshold that learns has
            none.
        calibration: a risk target for which the threshold is chosen; replaces ``threshold``.
        checkpoint: folder of trained exits; None: those prepared for this model.

    Raises:
        ValueError: an exit that is not trained, or an option out of range.
    """

    paper = "Bae et al. 2023, arXiv 2310.05424; Elhoushi et al. 2024, arXiv 2404.16710"
    checked_with = {"threshold": 0.3}  # at the default one, exits are seldom sure

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        depth: int | None = None,
        threshold: float = 0.9,
        accept: Accept = "all",
        adaptive: AdaptiveThreshold | None = None,
        remember: bool = False,
        distance: float = 2.0,
        rule: AcceptanceRule | None = None,
        max_pending: int = 16,
        head: Head = "trained",
        vocabulary: Vocabulary = "auto",
        calibration: RiskTarget | None = None,
        checkpoint: str | Path | None = None,
    ) -> None:
        reader = find_reader("free", head, target, find_exits(target, checkpoint))
        chosen = _nearest(reader.depths or range(1, target.n_layers), target.n_layers / 4) if depth is None else depth
        require_depths((chosen,), target, reader, "method.depth")
        _check(accept, distance, rule, max_pending)
        self.calibrator = None if calibration is None else calibration.over(GRID, sampling)
        _check_calibrated(self.calibrator is not None, accept, adaptive)
        known = FixedThreshold(Threshold(threshold).value) if adaptive is None else adaptive
        options = Options(chosen, accept, known, rule or Agreement(), distance, max_pending, vocabulary, remember)
        super().__init__(target, sampling, reader, options, accept != "verify" or rule is not None)

    def set_threshold(self, threshold: float) -> None:
        options = replace(self.options, threshold=FixedThreshold(Threshold(threshold).value))
        self.restart(options)


def _nearest(depths: Sequence[int], wished: float) -> int:
    return min(depths, key=lambda depth: abs(depth - wished))


def _check(accept: Accept, distance: float, rule: AcceptanceRule | None, max_pending: int) -> None:
    if distance < 0 or max_pending < 0:
        raise ValueError(
            f"distance and max_pending must be at least 0, got distance={distance}, max_pending={max_pending}. "
            "max_pending=0 runs the deep layers for every token."
        )
    if rule is not None and accept != "verify":
        raise ValueError(
            f"method.rule must be null with accept={accept}, got a rule; only accept=verify uses one. Set "
            "method.accept=verify, or method.rule=null."
        )


def _check_calibrated(calibrated: bool, accept: Accept, adaptive: AdaptiveThreshold | None) -> None:
    if calibrated and (accept == "verify" or adaptive is not None):
        given = (
            "accept=verify, which loses nothing" if accept == "verify" else "an adaptive threshold, which is not fixed"
        )
        raise ValueError(
            f"method.calibration.tolerance needs a fixed threshold with accept=all or rollback, got {given}. Set "
            "method.calibration.tolerance=null, or change the other."
        )
