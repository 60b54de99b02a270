"""A trained part as two files in a folder: its tensors as safetensors, and a JSON object that says what they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from methods.engine.causal_lm import CausalLM

import json
from typing import TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from methods.engine.causal_lm import CausalLM

WEIGHTS, CONFIG = "head.safetensors", "config.json"
SIZES = ("hidden_size", "layers", "vocab_size")  # of the model that a part was made for
Names = tuple[str, str]
T = TypeVar("T")


class MissingPart(ValueError):
    """What a decoder cannot do without is not there; the message names the command that makes it."""


def training_command(method: str) -> str:
    """What makes the part of a method."""
    return f"python -m bench.train method={method} model=MODEL"


def target_sizes(target: CausalLM) -> dict[str, int]:
    """What a part says of the model it was made for."""
    return {"hidden_size": target.hidden_size, "layers": target.n_layers, "vocab_size": target.vocab_size}


def sizes_of(shape: object) -> dict[str, int]:
    """The same as a part's own shape has them, among others."""
    return {name: getattr(shape, name) for name in SIZES}


def write_part(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    dtype: torch.dtype = torch.bfloat16,
    names: Names = (WEIGHTS, CONFIG),
) -> None:
    """Write both files; floating-point tensors as ``dtype``, others as they are."""
    stored = {
        key: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
        for key, tensor in tensors.items()
    }
    (folder / names[0]).write_bytes(save(stored))
    (folder / names[1]).write_text(json.dumps(config) + "\n", encoding="utf-8")


def read_part(
    folder: Path, method: str, parse: Callable[[dict[str, Any]], T], names: Names = (WEIGHTS, CONFIG)
) -> tuple[T, dict[str, Tensor]]:
    """What ``write_part`` wrote: what ``parse`` makes of the object, and the tensors.

    Raises:
        ValueError: files are missing or damaged, or ``parse`` finds the object wanting (ValueError, KeyError or
            TypeError).
    """
    try:
        config = parse(json.loads((folder / names[1]).read_text(encoding="utf-8")))
        with safe_open(folder / names[0], "pt") as file:
            return config, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, no mapping
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise ValueError(
            f"{folder} cannot be read as a part of method={method} ({type(error).__name__}: {error}); it must hold "
            f"{names[1]} and {names[0]} as their training leaves them. Name another folder, or train one: "
            f"{training_command(method)}."
        ) from error


def require_target(folder: Path, method: str, sizes: Mapping[str, int], target: CausalLM) -> None:
    """Refuse a part that was made for a model of other sizes.

    Raises:
        ValueError: with the sizes of both.
    """
    if dict(sizes) != target_sizes(target):
        raise ValueError(
            f"The part of method={method} in {folder} is of a model with {dict(sizes)}; {target.name} has "
            f"{target_sizes(target)}, and all must be the same. Train one for this model: {training_command(method)}."
        )


def require_shapes(folder: Path, tensors: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a file that holds other tensors than the object beside it announces.

    Raises:
        ValueError: naming those that differ.
    """
    found = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    differing = sorted(key for key in {*found, *wanted} if found.get(key) != wanted.get(key))
    if differing:
        raise ValueError(
            f"The weights in {folder} are { {key: found.get(key, 'missing') for key in differing} }; what is announced "
            f"beside them is { {key: wanted.get(key, 'none') for key in differing} }. Copy both files again, or train "
            "the part anew."
        )


def own_folder(
    method: str, kind: str, checkpoint: str | Path | None, part: Path | None, published: bool = True
) -> Path | None:
    """The folder of a part in our own format; None where the checkpoint is in another one.

    Args:
        kind: of thing the part is, for the message.
        checkpoint: the user's; wins.
        part: found for this method and model.
        published: whether other formats are known. If not, the checkpoint must be in ours.

    Raises:
        MissingPart: there is neither.
    """
    if checkpoint is None:
        if part is None:
            named = "yours, or a published one: method.checkpoint=FOLDER_OR_HUB_ID" if published else ""
            raise MissingPart(
                f"{method} has no {kind} for this model, and cannot draft without. Train: {training_command(method)}; "
                f"or name {named or 'yours: method.checkpoint=FOLDER (none were published)'}."
            )
        return part
    folder = Path(checkpoint).expanduser()
    return folder if not published or (folder / WEIGHTS).is_file() else None
