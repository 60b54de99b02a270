"""Trainings that are interrupted."""

from __future__ import annotations

from typing import Any

import pytest

from methods.training import trainer


def interrupted_at(update: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make one of the next updates, counted from 1, raise KeyboardInterrupt; the list gets the step of every update."""
    monkeypatch.setattr(trainer, "SAVE_EVERY_S", 0.0)
    steps: list[int] = []
    whole = trainer.Trainer.update

    def broken(self: Any, *given: Any) -> None:
        steps.append(self.step)
        if len(steps) == update:
            raise KeyboardInterrupt
        whole(self, *given)

    monkeypatch.setattr(trainer.Trainer, "update", broken)
    return steps
