"""The location of a published head and its files: a folder, a file or a hub id; safetensors or pickles.

Nothing is executed: pickles are read with ``weights_only``, mapped into memory where their format allows it. From the
hub only the few files that can hold a head are fetched.
"""

from __future__ import annotations

import json
import pickle
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

CONFIG = "config.json"
HEADS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "hydra_lm_head.safetensors", "hydra_lm_head.pt")
MODELS = ("model.safetensors", "pytorch_model.bin")
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
WITHIN = "medusa_head."  # the heads of a whole Medusa-2 model stand among its weights under this name

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SHOWN = 6


@dataclass
class Checkpoint:
    """Files of a head, read.

    Attributes:
        name: as the user gave it.
        config: content of config.json; empty where there is none.
        tensors: those of the head by the names in the file.
        whole_model: the weights of a language model belong to the head.
        notes: facts for the user, also given as warnings.
    """

    name: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    whole_model: bool = False
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Keep a note and warn."""
        self.notes.append(text)
        warnings.warn(f"{self.name}: {text}", stacklevel=3)


def read_checkpoint(where: str | Path) -> Checkpoint:
    """Read the head at a path or of a hub id.

    Raises:
        ValueError: nothing is there, a file is damaged, or a pickle holds more than tensors.
    """
    path = Path(where).expanduser()
    if path.is_file():
        return Checkpoint(str(where), _config(path.parent), tensors_of(path))
    if path.is_dir():
        return _of_folder(str(where), path)
    if not _HUB_ID.fullmatch(str(where)) or str(where).startswith((".", "~")):
        raise ValueError(
            f"A checkpoint must be a file, a folder or a hub id (OWNER/NAME), got {where}, where there is nothing. "
            "Correct it."
        )
    folder = _download(str(where))
    found = _of_folder(str(where), folder)
    found.notes.append(f"from the hub, revision {folder.name}")
    return found


def _of_folder(name: str, folder: Path) -> Checkpoint:
    config = _config(folder)
    for file in HEADS:
        if (folder / file).is_file():
            whole = "num_hidden_layers" in config or any((folder / model).is_file() for model in (*MODELS, *INDICES))
            return Checkpoint(name, config, tensors_of(folder / file), whole)
    if _index(folder) is not None:
        return Checkpoint(name, config, _of_shards(folder), whole_model=True)
    for file in MODELS:
        if (folder / file).is_file():
            tensors = tensors_of(folder / file)
            inside = {key: tensor for key, tensor in tensors.items() if key.startswith(WITHIN)}
            return Checkpoint(name, config, inside or tensors, whole_model=bool(inside))
    raise ValueError(
        f"{name} must hold a draft head (one of {', '.join((*HEADS, *MODELS))}), got none. Name another folder, or the "
        "file itself."
    )


def _of_shards(folder: Path) -> dict[str, Tensor]:
    found = {}
    for file in sorted(_shards(folder)):
        if not (folder / file).is_file():
            raise ValueError(
                f"{folder / file}, which the index of the weights names, is missing; all files are needed. Copy it."
            )
        found.update({k: tensor for k, tensor in tensors_of(folder / file).items() if k.startswith(WITHIN)})
    return found


def _shards(folder: Path) -> set[str]:
    index = _index(folder)
    places = _json(index).get("weight_map", {}) if index else {}
    inside = {file for key, file in places.items() if key.startswith(WITHIN)}
    if not inside:
        keys = ", ".join(sorted(places)[:_SHOWN])
        raise ValueError(
            f"{folder} must hold {', '.join(HEADS)} or weights named {WITHIN}*, got a language model without a draft "
            f"head ({keys}, ..). Name the folder of the head."
        )
    return inside


def _index(folder: Path) -> Path | None:
    return next((folder / name for name in INDICES if (folder / name).is_file()), None)


def _config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG
    return _json(file) if file.is_file() else {}


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} must be JSON and cannot be read ({error}). Copy it again.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(found).__name__}. Copy it again.")
    return found


def tensors_of(file: Path) -> dict[str, Tensor]:
    """All tensors of a file, mapped into memory where its format allows it.

    Raises:
        ValueError: the file is damaged, or holds something else.
    """
    with _explained(file):
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as opened:
                return {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118, no mapping
        return _require_tensors(file, _unpickled(file))


def tensors_within(name: str, prefix: str, revision: str | None = None) -> dict[str, Tensor]:
    """Tensors of a whole model whose names begin with ``prefix``, which is cut off; only their files are read.

    Args:
        name: a folder, or a hub id, of which only the files that hold such tensors are fetched.
        revision: of the hub; None: the newest.

    Raises:
        ValueError: it cannot be reached, a file is missing or damaged, or the weights are no safetensors.
    """
    folder = Path(name).expanduser()
    local = folder.is_dir()
    if not local:
        folder = _snapshot(name, (INDICES[0],), revision)
    index = folder / INDICES[0]
    if index.is_file():
        places = _json(index).get("weight_map", {})
        files = sorted({file for key, file in places.items() if key.startswith(prefix)})
    else:
        files = [MODELS[0]]
    if not local and files:
        folder = _snapshot(name, files, revision)
    found: dict[str, Tensor] = {}
    for file in files:
        if not (folder / file).is_file():
            raise ValueError(f"{folder / file}, which holds weights of {name}, must be there, got none. Copy it.")
        with _explained(folder / file), safe_open(folder / file, "pt") as opened:
            inside = [key for key in opened.keys() if key.startswith(prefix)]  # noqa: SIM118, no mapping
            found |= {key.removeprefix(prefix): opened.get_tensor(key) for key in inside}
    return found


def _unpickled(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # the format before torch 1.6 cannot be mapped
        return torch.load(file, map_location="cpu", weights_only=True)


def _require_tensors(file: Path, found: Any) -> dict[str, Tensor]:
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(
            f"{file} must hold tensors by name (a state dict), got {type(found).__name__}. Name another file."
        )
    return dict(found)


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    try:
        yield
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{file} holds more than tensors, or is damaged ({_first_line(error)}); a pickle is read only if "
            "it needs no code to run. Convert it to safetensors where you trust it, or fetch it again."
        ) from error
    except (OSError, RuntimeError, LookupError, SafetensorError, EOFError) as error:
        raise ValueError(
            f"{file} is damaged, or no file of tensors ({_first_line(error)}); fetch it again or name another."
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# -- the hub ----------------------------------------------------------------------------------------------------------


def _download(name: str) -> Path:
    """Fetch what can hold a head, smallest first: heads of their own, the files of an index, a model file."""
    folder = _snapshot(name, (CONFIG, *HEADS, *INDICES))
    if any((folder / file).is_file() for file in HEADS):
        return folder
    if _index(folder) is not None:
        return _snapshot(name, (CONFIG, *INDICES, *sorted(_shards(folder))))
    for file in MODELS:
        folder = _snapshot(name, (CONFIG, file))
        if (folder / file).is_file():
            break
    return folder


def _snapshot(name: str, files: Sequence[str], revision: str | None = None) -> Path:
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, allow_patterns=list(files)))
    except Exception as error:  # the hub's client raises dozens of kinds, those of its HTTP library among them
        raise ValueError(
            f"{name} must be a folder here or a hub id that can be reached ({_first_line(error)}). Fetch it where "
            "there is a network, and name its folder."
        ) from error
