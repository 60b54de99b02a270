"""The arms of a sweep that differ in more than the values of a few settings: ``sweep=league``, ``sweep=chat``.

Besides Hydra's ``params``, a file of conf/sweep may have ``arms``: for each the words of its measurement and, if it has
a checkpoint of its own, those of the training that makes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import yaml

from bench.config import compose
from bench.config.schema import sanitise
from bench.errors import UserError

LEAGUE = "league"
MINUTES = 7.0  # of a training, unless the command says more
_KEYS = ("train", "run", "heads")


@dataclass(frozen=True)
class Arm:
    """One arm.

    Attributes:
        name: its own, with which the folders of its checkpoints begin.
        run: words of its measurement, beside those of the sweep.
        train: words of the training that makes its checkpoint; empty: ``heads`` makes it, if there is one.
        heads: name of the arm whose checkpoint it uses; empty: the method is measured as its own file has it.
    """

    name: str
    run: tuple[str, ...]
    train: tuple[str, ...]
    heads: str

    def folder(self, root: Path, minutes: float) -> Path:
        """Of its checkpoint that was trained for so many minutes."""
        return root / f"{self.heads}-{minutes:g}"

    def checkpoints(self, root: Path) -> list[Path]:
        """The folders of its checkpoints, the one with the least training first; at least one, which may be missing."""
        found = {path: budget_of(path) for path in root.glob(f"{self.heads}-*") if (path / "card.json").is_file()}
        known = [path for path, minutes in found.items() if minutes is not None]
        return sorted(known, key=lambda path: found[path] or 0.0) or [self.folder(root, MINUTES)]

    def measures(self, method: Mapping[str, Any]) -> bool:
        """Whether a recorded ``method`` group is this arm's: its checkpoint's folder, and the settings of ``run``."""
        settings = dict(word.removeprefix("method.").split("=", 1) for word in self.run if word.startswith("method."))
        used = PurePath(str(method.get("checkpoint"))).name.rpartition("-")[0] == self.heads
        named = f"method={method.get('name')}" in self.run
        return used and named and all(str(method.get(key)) == value for key, value in settings.items())


def arms(sweep: str = LEAGUE) -> tuple[Arm, ...]:
    """The arms of a sweep in the order of its file; none if it has no ``arms``.

    Raises:
        UserError: no sweep of that name, or an arm that cannot be.
    """
    file = compose.config_file(compose.SWEEP, sweep)
    given = yaml.safe_load(file.read_text(encoding="utf-8")).get("arms") or {}
    found = tuple(
        Arm(name, tuple(arm["run"]), tuple(arm.get("train", ())), str(arm.get("heads", name if "train" in arm else "")))
        for name, arm in given.items()
        if _checked(file, name, arm)
    )
    trained = {arm.name for arm in found if arm.train}
    for arm in found:
        if arm.heads and arm.heads not in trained:
            raise UserError(
                f"heads of arm {arm.name} of {file.name} must be one of {', '.join(sorted(trained)) or 'none'}, which "
                f"have train, got {arm.heads}. Correct the file."
            )
    return found


def _checked(file: Path, name: str, arm: Any) -> bool:
    if not isinstance(arm, Mapping) or "run" not in arm or set(arm) - {*_KEYS} or ("train" in arm and "heads" in arm):
        raise UserError(
            f"Arm {name} of {file.name} must have run, and may have train or heads, got {arm}. Correct the file."
        )
    return True


def budget_of(folder: PurePath) -> float | None:
    """The minutes in the name of a checkpoint's folder; None: it names none."""
    try:
        return float(folder.name.rpartition("-")[2])
    except ValueError:
        return None


def untrained(checkpoint: object, cache: str) -> str | None:
    """The name of the head whose checkpoint this would be, if it is one of a league and not there; else None."""
    path = Path(str(checkpoint))
    ours = Path(cache) / "trained" / LEAGUE in path.parents
    return path.name.rpartition("-")[0] if ours and not (path / "card.json").is_file() else None


def folder(words: Sequence[str], sweep: str = LEAGUE) -> Path:
    """Where the checkpoints of the arms lie, by the words of a command line that name model and paths.

    Raises:
        UserError: several models.
    """
    named = [word for word in words if word.partition("=")[0].split(".")[0] in ("model", "paths")]
    if several := [word for word in named if "," in word.partition("=")[2]]:
        raise UserError(f"sweep={sweep} is for one model, whose heads it has, got {several[0]}. Name one model.")
    cfg = compose.compose_partly(named)
    return Path(cfg["paths"]["cache"]) / "trained" / sweep / sanitise(str(cfg["model"]["name"]))
