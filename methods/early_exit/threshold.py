"""Exit thresholds that fall along a text, since all later tokens build on early ones (CALM, sec. 3.2).

    paper          lambda_t = clip(0.9 lambda + 0.1 exp(-tau t / N), 0, 1)        eq. 5 of arXiv 2207.07061
    code           lambda_t = lambda (0.9 + 0.1 exp(-tau t / N))                   t5x, and FREE's copy of it
    linear         lambda_t = clip(0.9 lambda + 0.1 max(0, 1 - tau t / N), 0, 1)   a line in place of the curve

N is the most tokens that there can be after the prompt. The first of them has t = 0 by eq. 5 and t = 1 in the code.
Two defects of the published form are not kept:

* By eq. 5 lambda = 1 falls to 0.902 at t = N and tau = 4, so the fallback of CALM's guarantee, "the threshold 1 is the
full model", does not hold. Here 1 is never lowered: no token exits.
* t5x evaluates the code's form at t = 0 throughout (its decoding loop never passes the position), so it does not decay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Decay = Literal["none", "paper", "code", "linear"]

FULL_MODEL = 1.0


@dataclass(frozen=True, slots=True)
class Threshold:
    """The confidence above which a token exits, by its position in the text.

    Attributes:
        value: lambda; 1 is the full model.
        decay: form of the decay.
        tau: its speed.
        horizon: N; None: the limit of the decode.

    Raises:
        ValueError: a value out of range.
    """

    value: float
    decay: Decay = "none"
    tau: float = 4.0
    horizon: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.value <= 1 or self.tau < 0 or (self.horizon is not None and self.horizon < 1):
            raise ValueError(
                "Thresholds need 0 <= threshold <= 1, tau >= 0 and horizon >= 1 (or null), got "
                f"threshold={self.value}, tau={self.tau}, horizon={self.horizon}. method.threshold=1 is the full "
                "model."
            )

    @property
    def never(self) -> bool:
        """No token exits."""
        return self.value >= FULL_MODEL

    def at(self, place: int, limit: int) -> float:
        """The threshold for the token at ``place`` (0 is the first after the prompt) of at most ``limit``."""
        if self.never or self.decay == "none":
            return self.value
        counted = place + (self.decay == "code")
        elapsed = self.tau * counted / (self.horizon or limit)
        fading = 0.1 * (max(0.0, 1.0 - elapsed) if self.decay == "linear" else math.exp(-elapsed))
        if self.decay == "code":
            return self.value * (0.9 + fading)
        return min(max(0.9 * self.value + fading, 0.0), 1.0)
