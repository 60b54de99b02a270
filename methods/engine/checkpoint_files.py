"""A checkpoint as two files in a folder: its tensors as safetensors, and a JSON object that describes them.

A file may be *packed*: its matrices have 4 to 8 bits per weight and a scale per row, or per group of a row. The weights
are then defined as the dequantised ones, and readers get plain tensors.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float, UInt8
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor

from methods.engine.causal_lm import CausalLM

WEIGHTS, CONFIG = "head.safetensors", "config.json"
SIZES = ("hidden_size", "layers", "vocab_size")  # of the model that a part was made for
Names = tuple[str, str]
T = TypeVar("T")


class MissingPart(ValueError):
    """A required checkpoint is missing; the message names the command that makes it."""


def training_command(method: str) -> str:
    """The command that makes the checkpoint of a method."""
    return f"python -m bench train method={method} model=MODEL"


def target_sizes(target: CausalLM) -> dict[str, int]:
    """Sizes of the model that a checkpoint is made for."""
    return {"hidden_size": target.hidden_size, "layers": target.n_layers, "vocab_size": target.vocab_size}


def sizes_of(shape: object) -> dict[str, int]:
    """The same sizes, from a checkpoint's own shape."""
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
    """What ``write_part`` wrote: the object as ``parse`` returns it, and the tensors.

    Raises:
        ValueError: files are missing or damaged, or ``parse`` raises ValueError, KeyError or TypeError.
    """
    try:
        config = parse(json.loads((folder / names[1]).read_text(encoding="utf-8")))
        return config, load_tensors(folder / names[0])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise ValueError(
            f"{folder} must hold {names[1]} and {names[0]} as the training of method={method} writes them, got "
            f"{type(error).__name__}: {error}. Name another folder, or train one: {training_command(method)}."
        ) from error


def require_target(folder: Path, method: str, sizes: Mapping[str, int], target: CausalLM) -> None:
    """Refuse a checkpoint that was made for a model of other sizes.

    Raises:
        ValueError: with the sizes of both.
    """
    if dict(sizes) != target_sizes(target):
        raise ValueError(
            f"The checkpoint of method={method} in {folder} must be of a model like {target.name} with "
            f"{target_sizes(target)}, got {dict(sizes)}. Train one for this model: {training_command(method)}."
        )


def require_shapes(folder: Path | str, tensors: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse tensors other than those that the config announces.

    Raises:
        ValueError: naming those that differ.
    """
    found = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    differing = sorted(key for key in {*found, *wanted} if found.get(key) != wanted.get(key))
    if differing:
        given = ", ".join(f"{key} {found.get(key, 'missing')}" for key in differing)
        needed = ", ".join(f"{key} {wanted.get(key, 'none')}" for key in differing)
        raise ValueError(
            f"The weights in {folder} must be those that are announced beside them, {needed}, got {given}. Copy both "
            "files again, or train the part anew."
        )


def part_folder(
    method: str, kind: str, checkpoint: str | Path | None, name: str = "yours: method.checkpoint=FOLDER"
) -> Path:
    """The folder of a checkpoint.

    Args:
        kind: of checkpoint, for the message.
        name: what may be named instead, for the message.

    Raises:
        MissingPart: there is no checkpoint.
    """
    if checkpoint is None:
        raise MissingPart(
            f"{method} has no {kind} for this model. Train with {training_command(method)}; or name {name}."
        )
    return Path(checkpoint).expanduser()


def own_folder(method: str, kind: str, checkpoint: str | Path | None) -> Path | None:
    """The folder of a checkpoint; None where it is in a published format.

    Raises:
        MissingPart: there is no checkpoint.
    """
    either = "yours, or a published one: method.checkpoint=FOLDER_OR_HUB_ID"
    folder = part_folder(method, kind, checkpoint, either)
    return folder if (folder / WEIGHTS).is_file() else None


# ------------------------------------------------------------------------------------------------------------- packed

_PACKED, _SCALE = "packed", ".scale"  # key of the file's metadata; what a tensor of scales is called after its weights
_SHARES = tuple(share / 20 for share in range(20, 13, -1))  # of the largest weight of a group that may be its last code


def pack_file(file: Path, bits: int, group: int | None = None, without: Sequence[str] = ()) -> None:
    """Rewrite a file of tensors with fewer bits per weight of its matrices; other tensors stay as they are.

    Args:
        bits: per weight, 2 to 8.
        group: weights that share a scale, where it divides a row; None: whole rows.
        without: beginnings of names of tensors to leave out.

    Raises:
        ValueError: it is packed already.
    """
    if is_packed(file):
        raise ValueError(f"{file} must be plain, but it is packed already; packing it again would add up the errors.")
    stored: dict[str, Tensor] = {}
    notes: dict[str, dict[str, Any]] = {}
    for key, tensor in load_tensors(file).items():
        if key.startswith(tuple(without)):
            continue
        stored[key] = tensor
        if tensor.ndim > 1 and tensor.is_floating_point():
            width = group if group and tensor.shape[-1] % group == 0 else tensor.shape[-1]
            codes, stored[key + _SCALE] = _quantised(tensor.float().reshape(-1, width), bits)
            digits = np.unpackbits(codes.numpy().reshape(-1, 1), axis=1)[:, 8 - bits :]
            stored[key] = torch.from_numpy(np.packbits(digits))
            notes[key] = {"bits": bits, "shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
    file.write_bytes(save(stored, {"format": "pt", _PACKED: json.dumps(notes)}))


def load_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a file; packed ones are dequantised."""
    with safe_open(file, "pt") as opened:
        found = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118, no mapping
        notes = json.loads((opened.metadata() or {}).get(_PACKED, "{}"))
    for key, note in notes.items():
        scale, bits = found.pop(key + _SCALE).float(), note["bits"]
        digits = np.unpackbits(found[key].numpy(), count=math.prod(note["shape"]) * bits).reshape(-1, bits)
        codes = torch.from_numpy(np.packbits(np.pad(digits, ((0, 0), (8 - bits, 0))), axis=1))
        weights = (codes.float().view(len(scale), -1) - _largest(bits)) * scale
        found[key] = weights.view(note["shape"]).to(getattr(torch, note["dtype"]))
    return found


def is_packed(file: Path) -> bool:
    """Whether the weights of a file have to be dequantised; False where there is no such file."""
    if not file.is_file():
        return False
    with safe_open(file, "pt") as opened:
        return _PACKED in (opened.metadata() or {})


def load_model(kind: Any, folder: Path | str, **how: Any) -> Any:
    """A model by ``kind.from_pretrained`` of transformers, from a folder whose weights may be packed, or a hub id."""
    file = Path(folder) / "model.safetensors"
    if not is_packed(file):
        return kind.from_pretrained(folder, **how)
    with TemporaryDirectory() as plain:
        for path in Path(folder).glob("*.json"):
            shutil.copy(path, plain)
        save_file(load_tensors(file), Path(plain) / file.name, {"format": "pt"})
        read = kind.from_pretrained(plain, **how)
    model = read[0] if isinstance(read, tuple) else read
    model.name_or_path = model.config._name_or_path = str(folder)
    return read


def _largest(bits: int) -> int:
    """Code of the largest weight; the smallest has its negative, and 0 is among the codes."""
    return int(2 ** (bits - 1)) - 1


def _quantised(rows: Float[Tensor, "r g"], bits: int) -> tuple[UInt8[Tensor, "r g"], Float[Tensor, "r 1"]]:
    """Codes and scales: of several cuts of a row's largest weights, the one with the least error."""
    largest, peak = _largest(bits), rows.abs().amax(1, keepdim=True)
    least, best = torch.full_like(peak, torch.inf), torch.ones_like(peak)
    for share in _SHARES:
        scale = (peak * share / largest).clamp(min=1e-30).bfloat16().float()
        error = ((rows / scale).round().clamp(-largest, largest) * scale - rows).square().sum(1, keepdim=True)
        least, best = torch.minimum(error, least), torch.where(error < least, scale, best)
    return ((rows / best).round().clamp(-largest, largest) + largest).to(torch.uint8), best.bfloat16()
