"""Settings of ``python -m bench lossless``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bench.errors import UserError


@dataclass(frozen=True, slots=True)
class LosslessConfig:
    """Settings of an experiment.

    Attributes:
        draws: sample size per prompt, temperature and rule
        temperatures: at which tokens are drawn
        level: probability of a false alarm over all tests of exact rules together (Bonferroni)
        children: siblings per draft of the tree rules (sampling)
        horizon: tokens of a continuation (joint)
        floor: continuations at least this likely are counted separately (joint)
        controls: run the known-wrong rules too, at the highest temperature (sampling)
    """

    draws: int = 1_000_000
    temperatures: tuple[float, ...] = (0.7, 1.0)
    level: float = 0.01
    children: int = 3
    horizon: int = 3
    floor: float = 1e-3
    controls: bool = True

    def __post_init__(self) -> None:
        for name in ("draws", "children", "horizon"):
            if (value := getattr(self, name)) < 1:
                raise UserError(f"{name} must be at least 1, got {value}. Set {name}=NUMBER.")
        if not self.temperatures or min(self.temperatures) <= 0:
            raise UserError(
                f"temperatures must be numbers above 0, got {list(self.temperatures)}. Use experiment=greedy for "
                "temperature 0."
            )
        for name in ("level", "floor"):
            if not 0 < (share := getattr(self, name)) < 1:
                raise UserError(f"{name} must be between 0 and 1, got {share}. Set {name}=NUMBER.")


@dataclass(frozen=True, slots=True)
class Choice:
    """Which experiment is run.

    Attributes:
        experiment: greedy, sampling or joint
    """

    experiment: Literal["greedy", "sampling", "joint"]
