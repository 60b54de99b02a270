"""Models that are another one and a difference of its weights, which ``bench.train`` made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.config.schema import PathsConfig
from bench.errors import UserError
from bench.models import artifacts, loading
from bench.models.source import Read, Source
from bench.models.trained import TrainedModel
from bench.utils import files

if TYPE_CHECKING:
    import torch

_NAMED = ("name", "revision", "sha256")
_NOT_OF_THE_SOURCE = ("_target_", "weights", "parallel")


class AdaptedModel(TrainedModel):
    """A model whose weights get a low-rank difference added when they are read.

    Args:
        name: as it is called.
        base: the model it was made from: a name, or a ``model`` group without ``_target_``.
        method: what made the difference.
        folder: of the difference; None: where ``bench.train`` writes it.
    """

    kind = "causal"

    def __init__(
        self, name: str, base: str | Mapping[str, Any], method: str = "exit_model", folder: str | None = None
    ) -> None:
        super().__init__(name, method)
        given = {"name": base} if isinstance(base, str) else base
        self.base: dict[str, Any] = {**loading.named(str(given["name"])), **given}
        self.folder = folder

    @property
    def source(self) -> Source:
        """Of the base."""
        return loading.source_of(self.base)

    def read(self, dtype: torch.dtype, cache: Path) -> Read:
        """See ``bench.models.source.Source``. It is identified by the base and the files of the difference.

        Raises:
            UserError: the base is not to be had, or is another one than the difference was trained for.
        """
        from methods.engine.low_rank import LowRank

        folder = self.find(cache)
        read = self.source.read(dtype, cache)
        given = dict(zip(_NAMED, (self.base["name"], read.revision, read.sha256), strict=True))
        wanted = (artifacts.read_card(folder) or {}).get("model") or {}
        if any(wanted.get(key) != given[key] for key in _NAMED):
            raise UserError(
                f"The difference in {folder} must be added to model {_said(wanted)}, got {_said(given)}. Choose that "
                f"base (model.base=NAME), or train one for this: {self._command()}"
            )
        try:
            LowRank.load(folder, read.model).add_to(read.model)
        except ValueError as error:
            raise UserError(str(error)) from error
        digest = files.json_sha256([given, files.digest(artifacts.files(folder))])
        return Read(read.model, read.tokenizer, digest[:12], digest, read.languages)

    def find(self, cache: Path) -> Path:
        """The folder of the difference.

        Raises:
            UserError: it is not made yet.
        """
        places = artifacts.places(self.method, str(self.base["name"]), PathsConfig(cache=str(cache)))
        folders = list(places.values()) if self.folder is None else [Path(self.folder).expanduser()]
        folder = artifacts.first_finished(folders)
        if folder is None:
            raise UserError(
                f"Model '{self.name}' is not made yet: {' and '.join(map(str, folders))} must hold the difference that "
                f"{self._command()} writes. Run that, or name its folder: model.folder=FOLDER."
            )
        return folder

    def _command(self) -> str:
        return f"python -m bench train method={self.method} model={self.base['name']}"


def is_difference(folder: Path) -> bool:
    """Whether a checkpoint is a difference of a model's weights."""
    from methods.engine.low_rank import NAMES

    return (folder / NAMES[1]).is_file()


def group_of(folder: Path, base: str | Mapping[str, Any]) -> dict[str, Any]:
    """The ``model`` group of a difference and the model that it was trained for."""
    if not isinstance(base, str):
        base = {key: value for key, value in base.items() if key not in _NOT_OF_THE_SOURCE}
    target = f"{AdaptedModel.__module__}.{AdaptedModel.__name__}"
    return {"name": str(folder), "_target_": target, "base": base, "folder": str(folder)}


def _said(model: Mapping[str, Any]) -> str:
    sha256 = model.get("sha256")
    return f"{model.get('name')}, revision {model.get('revision')}" + (f", weights {sha256[:12]}" if sha256 else "")
