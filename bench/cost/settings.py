"""Settings of ``python -m bench cost``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.errors import UserError


@dataclass(frozen=True, slots=True)
class Grid:
    """What of a model is measured.

    Attributes:
        nodes: scored nodes per row; 1 is a round of autoregression.
        batches: rows in lockstep.
        contexts: committed tokens per row.
        repeats: timed rounds per point.
        prompts: prompts whose drafts are timed.
        matrix: rows and columns of the product that measures the peak; None: by the kind of device.
    """

    nodes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    contexts: tuple[int, ...] = (128, 512, 2048)
    repeats: int = 7
    prompts: int = 8
    matrix: int | None = None

    def __post_init__(self) -> None:
        for name in ("nodes", "batches", "contexts"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise UserError(
                    f"{name} came as {list(values)}; it must hold whole numbers from 1 on. Set {name}=[...]."
                )
        if 1 not in self.nodes:
            raise UserError(f"nodes came as {list(self.nodes)}; 1, a round of autoregression, must be among them.")
        for name in ("repeats", "prompts", "matrix"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"{name} came as {value}; it must be at least 1. Set {name}=VALUE.")


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be predicted.

    Attributes:
        run: folder of the run with the acceptance.
        curve: folder with the curve; None: the run's own.
        batch: rows in lockstep, each one a prediction; None: as recorded.
        gamma: draft lengths; None: the recorded rounds.
        draft_ms: milliseconds of a proposal; None: see ``bench.cost.what_if``.
    """

    run: Path
    curve: Path | None = None
    batch: tuple[int, ...] | None = None
    gamma: tuple[int, ...] | None = None
    draft_ms: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("gamma", 0)):
            values = getattr(self, name)
            if values is not None and (not values or min(values) < least):
                shown = ",".join(map(str, values))
                raise UserError(f"{name} came as {shown}; it must be whole numbers from {least} on. Set {name}=N,N.")
        if self.draft_ms is not None and self.draft_ms < 0:
            raise UserError(f"draft_ms came as {self.draft_ms}; it must be at least 0. Set draft_ms=VALUE.")
