"""Training of a drafter with a loss of choice: what EAGLE, Medusa, Hydra, DFlash and DSpark share."""

from __future__ import annotations

from dataclasses import dataclass

from methods.training.head_trainer import HeadTraining
from methods.training.losses import DraftLoss, LossKind


@dataclass(kw_only=True)
class DraftTraining(HeadTraining):
    """Trains a drafter that is compared with the target's distributions.

    Args:
        loss, top_k, top_k_weight: see ``DraftLoss``.
        vocabulary, answers, features, recipe: see ``HeadTraining``.
    """

    loss: LossKind = "ce"
    top_k: int = 0
    top_k_weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.draft_loss = DraftLoss(self.loss, self.top_k, self.top_k_weight)
