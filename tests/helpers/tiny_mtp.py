"""Modules for multi-token prediction of small targets, in files with the published names."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.speculative.mtp import MultiTokenPrediction
from methods.speculative.published.mtp import _empty_layer


def published(target: CausalLM, seed: int = 0, scale: float = 0.2) -> dict[str, Tensor]:
    """Random tensors of a module by their names within the layer; experts one by one, as they are published."""
    rng = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        mean = 1.0 if len(shape) == 1 else 0.0
        return (mean + scale * torch.randn(*shape, generator=rng, dtype=torch.float64)).to(target.dtype)

    width = target.hidden_size
    found = {f"{name}.weight": random(width) for name in ("enorm", "hnorm", "shared_head.norm")}
    found["eh_proj.weight"] = random(width, 2 * width)
    for name, tensor in _empty_layer(target).state_dict().items():
        if name == "mlp.experts.gate_up_proj":
            for expert in range(len(tensor)):
                for part in ("gate", "up"):
                    found[f"mlp.experts.{expert}.{part}_proj.weight"] = random(tensor.shape[1] // 2, tensor.shape[2])
        elif name == "mlp.experts.down_proj":
            for expert in range(len(tensor)):
                found[f"mlp.experts.{expert}.down_proj.weight"] = random(*tensor.shape[1:])
        else:
            found[name] = random(*tensor.shape)
    found["embed_tokens.weight"] = target.embed(torch.arange(target.vocab_size)).clone()
    found["shared_head.head.weight"] = target.output_rows(torch.arange(target.vocab_size))[0].clone()
    return found


def ship(target: CausalLM, folder: Path, tensors: dict[str, Tensor]) -> CausalLM:
    """Write a module where the files of a target would be, and name them."""
    named = {f"model.layers.{target.n_layers}.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors")
    target.name = str(folder)
    return target


def mtp(target: CausalLM, sampling: Sampling, **options: Any) -> MultiTokenPrediction:
    """The method with a random module."""
    name = target.name
    with tempfile.TemporaryDirectory() as folder:
        try:
            return MultiTokenPrediction(ship(target, Path(folder), published(target)), sampling, **options)
        finally:
            target.name = name
