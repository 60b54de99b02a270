"""Reading a token from the state after a layer, and the folder of trained exits.

An exit uses the model's output matrix. Before that matrix, its state passes one of two things:

``lens``      the model's own final norm, for a model that was trained to exit. On one that was not it is confidently
              wrong: SmolLM2-135M agrees with itself on 10 % of the tokens at layer 15 of 30 and on 36 % at layer 24,
              with a mean gap between the two likeliest tokens of 0.47 and 0.61. It must therefore be asked for
              (``method.head=lens``).
``trained``   an affine map from the normed state to the state after the whole model (``affine_maps.py``), from the
              checkpoint.

A checkpoint is a folder with ``exits.safetensors`` (translators, classifier) and ``exits.json`` (target and depths).
Depths count layers that have run: depth 1 is after the first layer, depth L the whole model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from methods.engine.causal_lm import CausalLM
from methods.engine.checkpoint_files import (
    SIZES,
    MissingPart,
    read_part,
    require_shapes,
    require_target,
    target_sizes,
    write_part,
)
from methods.engine.linear import KernelLinear, Linear, make_linear

Head = Literal["trained", "lens"]

NAMES = "exits.safetensors", "exits.json"  # a part may hold other files beside these
_EVERY = 4


@dataclass(frozen=True)
class Exits:
    """Trained exits of one target.

    Attributes:
        depths: layers run at each exit, ascending.
        translators: by depth, weight and bias of the affine map; empty for a model whose own norm is right.
        classifier: weight and bias of the classifier that all exits share, or None.
        facts: how they were made, as plain JSON values.
    """

    depths: tuple[int, ...]
    translators: dict[int, tuple[Float[Tensor, "D D"], Float[Tensor, "D"]]] = field(default_factory=dict)
    classifier: tuple[Float[Tensor, "D"], Float[Tensor, ""]] | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def save(self, folder: Path, target: CausalLM) -> None:
        """Write them into a folder, as ``load`` reads it."""
        tensors: dict[str, Tensor] = {}
        for depth, (weight, bias) in self.translators.items():
            tensors |= {f"translator.{depth}.weight": weight, f"translator.{depth}.bias": bias}
        if self.classifier is not None:
            tensors |= {"classifier.weight": self.classifier[0], "classifier.bias": self.classifier[1]}
        config = {"depths": self.depths} | target_sizes(target)
        write_part(folder, tensors, config | {"facts": self.facts}, torch.float16, NAMES)

    @classmethod
    def load(cls, folder: Path, target: CausalLM) -> Exits:
        """Read them onto the target's device.

        Raises:
            ValueError: files are missing or damaged, or belong to another target.
        """
        (depths, sizes, facts), tensors = read_part(folder, "NAME", _announced, NAMES)
        require_target(folder, "NAME", sizes, target)
        require_shapes(folder, tensors, _shapes(depths, tensors, target.hidden_size))
        tensors = {key: tensor.to(target.device) for key, tensor in tensors.items()}
        translators = {
            depth: (tensors[f"translator.{depth}.weight"], tensors[f"translator.{depth}.bias"])
            for depth in depths
            if f"translator.{depth}.weight" in tensors
        }
        classifier = tensors.get("classifier.weight"), tensors.get("classifier.bias")
        known = None if classifier[0] is None or classifier[1] is None else (classifier[0], classifier[1])
        return cls(depths, translators, known, facts)


def _announced(config: dict[str, Any]) -> tuple[tuple[int, ...], dict[str, int], dict[str, Any]]:
    sizes = {key: int(config[key]) for key in SIZES}
    return tuple(int(depth) for depth in config["depths"]), sizes, dict(config.get("facts", {}))


def _shapes(depths: Sequence[int], tensors: Collection[str], width: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a translator for each depth or none, and of a classifier if any."""
    shapes: dict[str, tuple[int, ...]] = {}
    if any(key.startswith("translator.") for key in tensors):
        for depth in depths:
            shapes |= {f"translator.{depth}.weight": (width, width), f"translator.{depth}.bias": (width,)}
    if any(key.startswith("classifier.") for key in tensors):
        shapes |= {"classifier.weight": (width,), "classifier.bias": ()}
    return shapes


@runtime_checkable
class Reader(Protocol):
    """Turns the state at an exit into the input of the output matrix.

    Attributes:
        depths: exits it can read; None: any.
        nbytes: of its own weights.
    """

    depths: tuple[int, ...] | None
    nbytes: int

    def read(self, depth: int, hidden: Float[Tensor, "*b D"]) -> Float[Tensor, "*b D"]:
        """Input of the output matrix, from the state after ``depth`` layers."""
        ...

    def maps(self, depth: int) -> int:
        """Square matrices of the model's width that this multiplies."""
        ...

    def kernel_maps(self) -> dict[int, KernelLinear] | None:
        """By depth, the maps as the kernels take them; None: in another form."""
        ...


class Lens:
    """The target's own final norm at every depth."""

    depths: tuple[int, ...] | None = None
    nbytes = 0

    def __init__(self, target: CausalLM) -> None:
        self.target = target

    def read(self, depth: int, hidden: Float[Tensor, "*b D"]) -> Float[Tensor, "*b D"]:
        return self.target.norm(hidden)

    def maps(self, depth: int) -> int:
        return 0

    def kernel_maps(self) -> dict[int, KernelLinear] | None:
        return {}


class Translated(Lens):
    """An affine map of the normed state for each exit; the whole model needs none."""

    def __init__(self, target: CausalLM, exits: Exits) -> None:
        super().__init__(target)
        self.depths = exits.depths
        self._maps: dict[int, Linear] = {
            depth: make_linear([weight.to(target.dtype)], [bias.to(target.dtype)])
            for depth, (weight, bias) in exits.translators.items()
        }
        self.nbytes = sum(linear.nbytes for linear in self._maps.values())

    def read(self, depth: int, hidden: Float[Tensor, "*b D"]) -> Float[Tensor, "*b D"]:
        normed = super().read(depth, hidden)
        if depth == self.target.n_layers:
            return normed
        return self._maps[depth](normed.reshape(-1, normed.shape[-1])).view(normed.shape)

    def maps(self, depth: int) -> int:
        return int(depth in self._maps)

    def kernel_maps(self) -> dict[int, KernelLinear] | None:
        found = {depth: linear for depth, linear in self._maps.items() if isinstance(linear, KernelLinear)}
        return found if len(found) == len(self._maps) else None


def default_depths(target: CausalLM) -> tuple[int, ...]:
    """Every fourth depth from the middle of the model."""
    return tuple(range(max(1, target.n_layers // 2), target.n_layers, _EVERY))


def find_exits(target: CausalLM, checkpoint: str | Path | None) -> Exits | None:
    """The exits of a checkpoint, if there is one.

    Raises:
        ValueError: see ``Exits.load``.
    """
    return None if checkpoint is None else Exits.load(Path(checkpoint).expanduser(), target)


def find_reader(method: str, head: Head, target: CausalLM, exits: Exits | None) -> Reader:
    """How this decoder reads its exits.

    Raises:
        MissingPart: trained exits are wanted and there are none.
    """
    if head == "lens" or (exits is not None and not exits.translators):
        return Lens(target)
    if exits is None:
        raise MissingPart(
            f"{method} needs trained exits, and there are none for this model. Train them with python -m bench train "
            f"method={method} model=MODEL; or, for a model that was itself trained to exit, set method.head=lens, "
            "which reads every layer by the model's own norm and output matrix."
        )
    return Translated(target, exits)


def require_depths(depths: Sequence[int], target: CausalLM, reader: Reader, name: str, last: bool = False) -> None:
    """Refuse exits that the model or its reader does not have.

    Args:
        name: of the setting, for the message.
        last: whether the whole model counts as an exit.

    Raises:
        ValueError: a depth out of range, not ascending, or without a trained exit.
    """
    most = target.n_layers if last else target.n_layers - 1
    ascending = all(a < b for a, b in zip(depths, depths[1:], strict=False))
    if not depths or not ascending or depths[0] < 1 or depths[-1] > most:
        raise ValueError(
            f"{name} must be ascending numbers of layers from 1 to {most} ({target.name} has {target.n_layers}), got "
            f"{list(depths)}. Change {name}."
        )
    known: Collection[int] = range(1, target.n_layers) if reader.depths is None else reader.depths
    missing = [depth for depth in depths if depth not in known and depth < target.n_layers]
    if missing:
        raise ValueError(
            f"{name} must be among the depths of the trained exits, {list(known)}, got {list(depths)}. Choose among "
            "them, or train others: python -m bench train method=NAME model=MODEL train.exits=[..] force=true."
        )
