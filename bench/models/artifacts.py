"""Find trained checkpoints: ``<root>/<method>-<model>/``, finished once they have a card."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from bench.config import instantiate
from bench.config.schema import PathsConfig, sanitise
from bench.tasks.sources import project_data
from bench.utils.files import digest, read_json

CARD, PLAN, CURVES, LOCK = "card.json", "training.json", "curves.jsonl", ".lock"
LOG = "training_log"  # folder of trials, costs, pictures
_NOT_THE_PART = frozenset({CARD, PLAN, CURVES, LOCK})
_LOGS = (f"{LOG}/", "making/")  # the second name is that of earlier versions

Origin = Literal["checkpoint", "shipped", "trained"]


@dataclass(frozen=True)
class Prepared:
    """A checkpoint that a decoder of this run uses.

    Attributes:
        folder: of a user's own checkpoint it may be a file.
        origin: the user's own (``method.checkpoint``), of data/checkpoints, or trained on this machine.
        card: facts about its training; None for a checkpoint without a card.
        warning: set where it was trained for another revision of the model.
    """

    folder: Path
    origin: Origin
    card: dict[str, Any] | None = None
    warning: str | None = None

    @cached_property
    def sha256(self) -> str:
        """Hash of all files except the card, which contains a timestamp."""
        return digest(files(self.folder))

    def facts(self) -> dict[str, Any]:
        """For the manifest of a run; of the card all but the curve of its training."""
        card = None if self.card is None else dict(self.card)
        if card and isinstance(facts := card.get("facts"), dict):
            card["facts"] = {name: value for name, value in facts.items() if name != "curve"}
        return {"origin": self.origin, "sha256": self.sha256, "warning": self.warning, "card": card}


def find(method: Mapping[str, Any], model: str, revision: str | None, paths: PathsConfig) -> Prepared | None:
    """The checkpoint of a method for a model, from the first place that has one.

    Args:
        method: the ``method`` group.
        model: name of the target.
        revision: of the target's weights.
    """
    kind = instantiate.method_class(method)
    if not kind.trainable:
        return None
    if (own := method.get("checkpoint")) is not None:
        path = Path(str(own)).expanduser()
        return Prepared(path, "checkpoint", read_card(path)) if path.exists() else None
    owner = str(method[kind.checkpoint_of])  # a class may use the checkpoint of another method
    for origin, folder in places(owner, model, paths).items():
        if card := read_card(folder):
            return Prepared(folder, origin, card, _misfit(folder, card, revision))
    return None


def places(method: str, model: str, paths: PathsConfig) -> dict[Origin, Path]:
    """Possible folders of the checkpoint of a method for a model, in the order of search."""
    name = f"{sanitise(method)}-{sanitise(model)}"
    return {"shipped": project_data() / "checkpoints" / name, "trained": Path(paths.cache) / "trained" / name}


def shipped(method: str) -> list[str]:
    """Models that data/checkpoints has a checkpoint of this method for."""
    prefix = f"{sanitise(method)}-"
    found = (project_data() / "checkpoints").glob(f"{prefix}*/{CARD}")
    return sorted(card.parent.name.removeprefix(prefix) for card in found)


def read_card(folder: Path) -> dict[str, Any] | None:
    """The card of a finished checkpoint, if there is one."""
    return read_json(folder / CARD)


def first_finished(folders: Iterable[Path]) -> Path | None:
    """The first folder with a finished checkpoint, if one has it."""
    return next((folder for folder in folders if read_card(folder)), None)


def files(folder: Path) -> dict[str, Path]:
    """The files of a checkpoint by their path below the folder, in order, with those it shares with another one."""
    if folder.is_file():
        return {folder.name: folder}
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    found = dict(sorted({**found, **shared(folder)}.items()))
    return {name: path for name, path in found.items() if name not in _NOT_THE_PART and not name.startswith(_LOGS)}


def shared(folder: Path) -> dict[str, Path]:
    """Files of a checkpoint that are in another folder, as its card says."""
    return {name: folder / place for name, place in ((read_card(folder) or {}).get("shared") or {}).items()}


def _misfit(folder: Path, card: Mapping[str, Any], revision: str | None) -> str | None:
    made_for = (card.get("model") or {}).get("revision")
    if made_for == revision:
        return None
    return f"{folder.name} was trained for revision {made_for} of the model, and this is {revision}"
