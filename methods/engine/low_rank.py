"""A low-rank difference of a model's weights: W + B A for the linear maps of its layers.

LoRA (Hu et al. 2021, arXiv 2106.09685, sec. 4.1) freezes W and trains A and B, which start with a difference of zero.
Here the factor alpha / r is 1. In training B A x is added to what the map writes; a model that is loaded has B A added
to its weights once, so it is as fast as the one it was made from.

A folder has ``difference.safetensors``, in 8 bits with a scale for each row of A and column of B, and
``difference.json``, which says for which model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from methods.engine.checkpoint_files import SIZES, pack_file, read_part, require_shapes, write_part

NAMES = "difference.safetensors", "difference.json"
METHOD = "exit_model"  # which trains them
_BITS = 8


class LowRank(nn.Module):
    """A and B of some linear maps.

    Args:
        maps: by name, widths of input and output of each.
        rank: r, of all differences.

    Attributes:
        down: A of each map, [r, in].
        up: B of each map, transposed, [r, out].

    Raises:
        ValueError: a rank below 1, or above what the narrowest map has.
    """

    def __init__(self, maps: Mapping[str, tuple[int, int]], rank: int) -> None:
        super().__init__()
        most = min(min(widths) for widths in maps.values())
        if not 1 <= rank <= most:
            raise ValueError(
                f"rank must be from 1 to {most}, the narrowest map of the model, got {rank}. Set train.rank."
            )
        self.maps, self.rank = dict(maps), rank
        self.down = nn.ParameterList([torch.zeros(rank, given) for given, _ in maps.values()])
        self.up = nn.ParameterList([torch.zeros(rank, made) for _, made in maps.values()])

    @classmethod
    def begin(cls, network: Any, rank: int, matrices: Sequence[str] | None = None) -> LowRank:
        """A difference of zero, beside the network: A is drawn from a uniform distribution, B is zero.

        Args:
            network: a causal model of transformers.
            rank: r.
            matrices: last parts of the names of the maps, e.g. ``q_proj``; None: all of the layers.

        Raises:
            ValueError: no such maps, or a rank that they do not have.
        """
        known = _linear_maps(network)
        names = list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in known))
        if matrices is not None and (not matrices or set(matrices) - set(names)):
            raise ValueError(f"matrices must be some of {', '.join(names)}, got {list(matrices)}. Set train.matrices.")
        chosen = {n: m for n, m in known.items() if matrices is None or n.rsplit(".", 1)[-1] in matrices}
        found = cls({name: (module.in_features, module.out_features) for name, module in chosen.items()}, rank)
        weight = next(iter(chosen.values())).weight
        found.to(weight.device, torch.promote_types(weight.dtype, torch.float32))
        with torch.no_grad():
            for down in found.down:
                nn.init.uniform_(down, -(down.shape[1] ** -0.5), down.shape[1] ** -0.5)
        return found

    @contextmanager
    def beside(self, network: Any) -> Iterator[None]:
        """Within it, the network computes with the difference, and gradients go to A and B."""
        known = _linear_maps(network)
        handles = [
            known[name].register_forward_hook(_adding(down, up))
            for name, down, up in zip(self.maps, self.down, self.up, strict=True)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def add_to(self, network: Any) -> None:
        """Add B A to the weights of a network, in at least 32 bit."""
        known = _linear_maps(network)
        for name, down, up in zip(self.maps, self.down, self.up, strict=True):
            weight = known[name].weight
            wide = torch.promote_types(weight.dtype, down.dtype)
            change = up.to(weight.device, wide).T @ down.to(weight.device, wide)
            weight.copy_(weight.to(wide) + change)

    def save(self, folder: Path, network: Any) -> None:
        """Write both files."""
        tensors = {f"{name}.down": down for name, down in zip(self.maps, self.down, strict=True)}
        tensors |= {f"{name}.up": up for name, up in zip(self.maps, self.up, strict=True)}
        config = {"rank": self.rank, "maps": list(self.maps)} | _sizes(network)
        write_part(folder, tensors, config, torch.float32, NAMES)
        pack_file(folder / NAMES[0], _BITS)

    @classmethod
    def load(cls, folder: Path, network: Any) -> LowRank:
        """What ``save`` wrote, as it is stored, for a network.

        Raises:
            ValueError: files are missing or damaged, of another rank than announced, or of another network.
        """
        (rank, names, sizes), tensors = read_part(folder, METHOD, _announced, NAMES)
        known, ours = _linear_maps(network), _sizes(network)
        if sizes != ours or set(names) - set(known):
            raise ValueError(
                f"The difference in {folder} must be of a model with {sizes} and the maps {names[0]} to {names[-1]}, "
                f"got one with {ours}. Choose the model it was trained for, or train another: python -m bench train "
                f"method={METHOD} model=MODEL."
            )
        found = cls({name: (known[name].in_features, known[name].out_features) for name in names}, rank)
        parts = {"down": found.down, "up": found.up}
        pairs = {f"{n}.{part}": p for part, every in parts.items() for n, p in zip(names, every, strict=True)}
        require_shapes(folder, tensors, {key: tuple(parameter.shape) for key, parameter in pairs.items()})
        with torch.no_grad():
            for key, parameter in pairs.items():
                parameter.copy_(tensors[key])
        return found.requires_grad_(False)


def _linear_maps(network: Any) -> dict[str, nn.Linear]:
    """Of the layers, by their names below ``model.layers``."""
    return {name: module for name, module in network.model.layers.named_modules() if isinstance(module, nn.Linear)}


def _adding(down: nn.Parameter, up: nn.Parameter) -> Any:
    def hook(module: nn.Module, given: tuple[Tensor, ...], output: Float[Tensor, "*b o"]) -> Float[Tensor, "*b o"]:
        low = given[0].flatten(0, -2).to(output.dtype) @ down.T.to(output.dtype)
        return torch.addmm(output.flatten(0, -2), low, up.to(output.dtype)).view_as(output)

    return hook


def _sizes(network: Any) -> dict[str, int]:
    config = network.config
    return dict(zip(SIZES, (config.hidden_size, config.num_hidden_layers, config.vocab_size), strict=True))


def _announced(config: dict[str, Any]) -> tuple[int, list[str], dict[str, int]]:
    return int(config["rank"]), [str(name) for name in config["maps"]], {key: int(config[key]) for key in SIZES}
