"""Static depth: every token after the prompt takes the first k layers, the baseline of adaptive methods.

There is no confidence, one output matrix per token, and nothing is computed for the layers above, as no later token
reaches them. Prompt and first token take the whole model, as with the adaptive methods. k = L is the full model.

The exit after layer k must be trained, into the model (``method.head=lens``) or as a map over a frozen one:

    python -m bench train method=static_depth model=MODEL

With ``method.calibration.tolerance`` the depth is the smallest trained one that meets the risk target; its share of the
layers is what other methods call a threshold.

Command: ``python -m bench method=static_depth method.depth=20``
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from methods.decoder import Calibrated
from methods.drafting import AcceptanceRule
from methods.early_exit.calibrator import RiskTarget
from methods.early_exit.exits import Head, find_exits, find_reader, require_depths
from methods.early_exit.loop import Policy, exact_if
from methods.early_exit.rounds import RoundsDecoder
from methods.early_exit.verified import Judged, verification
from methods.engine.causal_lm import CausalLM
from methods.engine.fused_layers import ExitRule
from methods.engine.sampling import Sampling


class StaticPolicy(Policy):
    """Exit after ``depth`` layers."""

    def __init__(self, depth: int, layers: int) -> None:
        self.deepest = self.fixed = depth
        self.guarantee = exact_if(depth == layers)

    def stops(self, roots: Sequence[int]) -> Sequence[int]:
        return (self.deepest,)

    def rule(self, roots: Sequence[int], places: Sequence[int]) -> ExitRule | None:
        return ExitRule((self.deepest,), "table", depths=[self.deepest] * len(roots))


class StaticDepth(RoundsDecoder, Calibrated):
    """The first layers of the target.

    Args:
        depth: layers run; None: three quarters of the model's, or the trained depth next to that.
        head: how the exit is read: by trained maps, or by the model's own norm and output matrix (``lens``).
        accept: ``all`` tokens of the exit, or ``verify`` them by the whole model, see ``verified.py``.
        rule: exact rule of ``verify``; None: keep a token while the whole model picks it too.
        max_pending: most tokens that wait to be verified.
        calibration: a risk target for which the depth is chosen; replaces ``depth``.
        checkpoint: folder of trained exits; None: those prepared for this model.

    Raises:
        ValueError: an exit that is not trained, or a depth out of range.
    """

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        depth: int | None = None,
        head: Head = "trained",
        accept: Judged = "all",
        rule: AcceptanceRule | None = None,
        max_pending: int = 16,
        calibration: RiskTarget | None = None,
        checkpoint: str | Path | None = None,
    ) -> None:
        whole = depth == target.n_layers and (calibration is None or calibration.tolerance is None)
        trained = find_exits(target, checkpoint)
        reader = find_reader("static_depth", "lens" if whole else head, target, trained)
        wished = round(0.75 * target.n_layers)
        known = reader.depths or range(1, target.n_layers)
        chosen = min(known, key=lambda k: abs(k - wished)) if depth is None else depth
        require_depths((chosen,), target, reader, "method.depth", last=True)
        shares = [k / target.n_layers for k in sorted(known, reverse=True)]
        self.calibrator = None if calibration is None else calibration.over(shares, sampling)
        verify = verification(accept, rule, max_pending, sampling, self.calibrator is not None)
        super().__init__(target, sampling, StaticPolicy(chosen, target.n_layers), reader, verify)

    @classmethod
    def needs_checkpoint(cls, settings: Mapping[str, Any]) -> bool:
        """The whole model needs none, but its number of layers is not known before it is loaded."""
        return super().needs_checkpoint(settings) and settings.get("depth") is None

    def set_threshold(self, threshold: float) -> None:
        """See ``methods.decoder.Calibrated``; a share of the layers."""
        depth = round(threshold * self.target.n_layers)
        require_depths((depth,), self.target, self.reader, "method.calibration.thresholds, in layers", last=True)
        self.restart(StaticPolicy(depth, self.target.n_layers))

    def stats(self) -> dict[str, Any]:
        """Cost of the steps so far, without any for confidence."""
        return super().stats() | {"confidence_share": 0.0}
