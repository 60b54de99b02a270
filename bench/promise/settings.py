"""Settings of ``python -m bench promise``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bench.errors import UserError

Against = Literal["textual", "risk"]


@dataclass(frozen=True, slots=True)
class PromiseConfig:
    """How a promise is tested.

    Attributes:
        tolerances: expected losses that are promised, each by itself
        losses: what a loss compares with: the full model's own text (textual), or a reference (risk)
        resamplings: how often the prompts are split anew into calibration and test prompts
        calibration_share: of the prompts; the others test
        prompts: most prompts that are decoded; null: all of the corpus
        record: folder of an earlier test, whose losses are resampled; nothing is decoded
    """

    tolerances: tuple[float, ...] = (0.02, 0.05, 0.1)
    losses: tuple[Against, ...] = ("textual", "risk")
    resamplings: int = 100
    calibration_share: float = 0.5
    prompts: int | None = None
    record: str | None = None

    def __post_init__(self) -> None:
        if not self.tolerances or not all(0 < tolerance < 1 for tolerance in self.tolerances):
            raise UserError(
                f"tolerances must be between 0 and 1, got {list(self.tolerances)}. Set tolerances=0.02,0.05,0.1."
            )
        if not self.losses:
            raise UserError("losses must name textual, risk or both, got none. Set losses=textual,risk.")
        if not 0 < self.calibration_share < 1:
            raise UserError(
                f"calibration_share must be between 0 and 1, got {self.calibration_share:g}. Set calibration_share=0.5."
            )
        for name in ("resamplings", "prompts"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"{name} must be at least 1, got {value}. Set {name}=NUMBER.")
        if self.record is not None and self.prompts is not None:
            raise UserError("prompts has no effect beside record, whose losses are of all its prompts. Leave it out.")
