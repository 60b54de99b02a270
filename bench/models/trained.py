"""Models trained with ``python -m bench train``, found by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.config import instantiate
from bench.config.schema import PathsConfig
from bench.errors import UserError
from bench.models import artifacts
from bench.models.source import Read
from bench.utils import files

if TYPE_CHECKING:
    import torch
from bench.models.hub import HubModel


class TrainedModel:
    """A model that ``bench.train`` made: one that comes with the project, or of this machine.

    Args:
        name: as it is called in its card.
        method: what made it.
    """

    def __init__(self, name: str, method: str = "teacher") -> None:
        self.name, self.method = name, method

    def read(self, dtype: torch.dtype, cache: Path) -> Read:
        """See ``bench.models.source.Source``. It is identified by its files without the card, which knows the time."""
        folder = self.find(cache)
        digest = files.digest(artifacts.files(folder))
        read = HubModel(str(folder)).read(dtype, cache)
        return Read(read.model, read.tokenizer, digest[:12], digest, read.languages)

    def find(self, cache: Path) -> Path:
        """Its folder.

        Raises:
            UserError: it is not made yet.
        """
        places = artifacts.places(self.method, self.name, PathsConfig(cache=str(cache)))
        folder = artifacts.first_finished(places.values())
        if folder is None:
            raise UserError(
                f"Model '{self.name}' is not made yet: {' and '.join(map(str, places.values()))} do not have it. "
                f"{self._command()} makes it; or choose another (python -m bench list models)."
            )
        return folder

    def _command(self) -> str:
        layers, more = "", ""
        if found := re.fullmatch(r"(.+)_(\d+)_(\d+)(_distilled)?(?:_(calm|free)|_self_diffusion|_hash)?", self.name):
            corpus, encoder, decoder, distilled, exits = found.groups()
            layers = f" corpus={corpus} 'train.layers=[{encoder},{decoder}]'"
            more = f" train.data=distilled model={corpus}_4_4" if distilled else ""
            more += f" train.exits={exits}" if exits else ""
        elif found := re.fullmatch(r"(.+)_masked_diffusion(_distilled)?", self.name):
            corpus, distilled = found.groups()
            more = f" corpus={corpus} " + (f"model={corpus}_4_4" if distilled else "train.data=raw")
        return f"python -m bench train method={self.method}{layers}{more}"


class TrainedDiffusionModel(TrainedModel):
    """A diffusion model that translates: it writes after what it reads, and data sets are for it as for an
    encoder-decoder.
    """

    kind = "seq2seq"
    denoises = True


def is_trained(model: Mapping[str, Any]) -> bool:
    """Whether a ``model`` group is of a model that ``bench.train`` made."""
    kind = instantiate.locate(model["_target_"]) if "_target_" in model else None
    return isinstance(kind, type) and issubclass(kind, TrainedModel)
