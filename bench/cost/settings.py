"""Settings of ``python -m bench cost``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.errors import UserError


@dataclass(frozen=True, slots=True)
class Grid:
    """What is measured of a model.

    Attributes:
        nodes: scored nodes per row; 1 is a round of autoregression
        batches: rows per batch
        contexts: committed tokens per row
        repeats: timed rounds per point, interleaved over the whole grid
        prompts: prompts whose drafts are timed, of dataset=NAME
        matrix: rows of the square product that measures the peak; default: 2048, on a GPU 8192
    """

    nodes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    contexts: tuple[int, ...] = (128, 512, 2048)
    repeats: int = 7
    prompts: int = 8
    matrix: int | None = None

    def __post_init__(self) -> None:
        for name in ("nodes", "batches", "contexts"):
            _check_list(name, getattr(self, name), 1)
        if 1 not in self.nodes:
            raise UserError(f"nodes must contain 1, a round of autoregression, got {list(self.nodes)}.")
        for name in ("repeats", "prompts", "matrix"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"{name} must be at least 1, got {value}. Set {name}=VALUE.")


@dataclass(frozen=True, slots=True)
class WhatIfQuery:
    """What is predicted.

    Attributes:
        curve: folder of bench cost, or of a run; default: the run's own curve
        batch: rows per batch, one prediction each; default: as recorded
        gamma: draft lengths of a chain; default: the recorded rounds
        draft_ms: milliseconds of a proposal; default: from the curve's folder, else as recorded
        oracle: in place of RUN, folders of runs over the same prompts: what perfect knowledge of drafts would give
        route: in place of RUN, two such folders: the first run's draft if it has 1, 2, ... 8 tokens, else the second's
    """

    run: Path | None = None
    curve: Path | None = None
    batch: tuple[int, ...] | None = None
    gamma: tuple[int, ...] | None = None
    draft_ms: float | None = None
    oracle: tuple[str, ...] | None = None
    route: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        self._check_runs()
        for name, least in (("batch", 1), ("gamma", 0)):
            if (values := getattr(self, name)) is not None:
                _check_list(name, values, least)
        if self.draft_ms is not None and self.draft_ms < 0:
            raise UserError(f"draft_ms must be at least 0, got {self.draft_ms}. Set draft_ms=VALUE.")

    def _check_runs(self) -> None:
        """One of RUN, oracle and route, and with the last two no setting of the first."""
        if (self.run is not None) + (self.oracle is not None) + (self.route is not None) != 1:
            raise UserError(
                "what-if needs one of RUN, oracle=RUN,RUN and route=RUN,RUN, the folders of runs: python -m bench cost "
                "what-if results/RUN"
            )
        if self.route is not None and len(self.route) != 2:
            raise UserError(f"route must name the folders of two runs, got {len(self.route)}. Set route=RUN,RUN.")
        for name in ("batch", "gamma", "draft_ms") if self.run is None else ():
            if getattr(self, name) is not None:
                raise UserError(f"{name} needs the folder of one run, got it with oracle or route. Leave {name} out.")


def _check_list(name: str, values: tuple[int, ...], least: int) -> None:
    if not values or min(values) < least:
        raise UserError(f"{name} must be whole numbers of at least {least}, got {list(values)}. Set {name}=[N,N].")
