"""Published heads without the heads: their files with random weights, to load and time at the target's sizes.

``method.checkpoint=random:FORMAT`` stands for such a file: tensors of the names, shapes and type that the authors
publish, and the configuration beside them. They are read like any other, and guess nothing.

    python -m bench cost method=eagle method.checkpoint=random:eagle3 model=random model.like=llama3_8b dataset=mtbench

Sizes that a file leaves to its maker are the published ones: five heads of one block of Medusa (Cai et al. 2024, arXiv
2401.10774) and four of four blocks of Hydra (Ankner et al. 2024, arXiv 2402.05109), 32,000 draft tokens of EAGLE-3 (Li
et al. 2025, arXiv 2503.01840) and of P-EAGLE (Hui et al. 2026, arXiv 2602.01469), which has four layers. DFlash (Chen
et al. 2026, arXiv 2602.06036) and DSpark (Cheng et al. 2026, arXiv 2607.05147) have five layers and five taps, fewer at
a target of few layers; blocks are of 16 and of 7 tokens, and DSpark's Markov head has rank 256.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from methods.engine.causal_lm import CausalLM
from methods.speculative.dflash.checkpoint import Spec, spread_taps
from methods.speculative.published.files import Checkpoint

PREFIX = "random:"
_MEDUSA_HEADS, _HYDRA_HEADS, _HYDRA_BLOCKS = 5, 4, 4
_PARALLEL_LAYERS, _BLOCK_LAYERS, _BLOCK_TAPS = 4, 5, 5  # of P-EAGLE, and of DFlash and DSpark
_DFLASH_PLACES, _DSPARK_PLACES, _MARKOV_RANK = 16, 7, 256
_SPREAD, _BLOCK = 0.02, 1 << 22
_TYPE = torch.float16  # of the files

Shapes = dict[str, tuple[int, ...]]


def checkpoint(name: str, target: CausalLM) -> Checkpoint:
    """The files of a format, for a target.

    Args:
        name: ``random:FORMAT``.

    Raises:
        ValueError: an unknown format.
    """
    form = name.removeprefix(PREFIX)
    if form not in FORMATS:
        known = ", ".join(f"{PREFIX}{known}" for known in FORMATS)
        raise ValueError(f"method.checkpoint must be one of {known}, a path or a hub id, got {name}. Correct it.")
    shapes, config = FORMATS[form](target)
    block = (torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0)) * _SPREAD).to(_TYPE)
    tensors = {key: _filled(shape, block) for key, shape in shapes.items()}
    return Checkpoint(name, dict(config), tensors | _offsets(shapes, target))


def _filled(shape: tuple[int, ...], block: Tensor) -> Tensor:
    """Norms are 1; matrices repeat a block of random numbers, since drawing billions takes minutes."""
    size = prod(shape)
    if len(shape) == 1:
        return torch.ones(shape, dtype=block.dtype)
    return block.repeat(-(-size // len(block)))[:size].view(shape)


def _offsets(shapes: Shapes, target: CausalLM) -> dict[str, Tensor]:
    """Of EAGLE-3 and P-EAGLE, from draft ids to the target's: every k-th one."""
    if "lm_head.weight" not in shapes:
        return {}
    count = shapes["lm_head.weight"][0]
    ids = torch.arange(count) * (target.vocab_size // count)
    marked = torch.zeros(target.vocab_size, dtype=torch.bool)
    marked[ids] = True
    return {"d2t": ids - torch.arange(count), "t2d": marked}


def _medusa(target: CausalLM) -> tuple[Shapes, Mapping[str, Any]]:
    width, shapes = target.hidden_size, Shapes()
    for head in range(_MEDUSA_HEADS):
        shapes[f"{head}.0.linear.weight"], shapes[f"{head}.0.linear.bias"] = (width, width), (width,)
        shapes[f"{head}.1.weight"] = (target.vocab_size, width)
    return shapes, {"medusa_num_heads": _MEDUSA_HEADS, "medusa_num_layers": 1}


def _hydra(target: CausalLM) -> tuple[Shapes, Mapping[str, Any]]:
    width, shapes = target.hidden_size, Shapes()
    for head in range(_HYDRA_HEADS):
        for block in range(_HYDRA_BLOCKS):
            read = (head + 2) * width if block == 0 else width
            for name in ("linear", "res_connection") if block == 0 else ("linear",):
                shapes[f"hydra_mlp.{head}.{block}.{name}.weight"] = (width, read)
                shapes[f"hydra_mlp.{head}.{block}.{name}.bias"] = (width,)
        shapes[f"hydra_lm_head.{head}.weight"] = (target.vocab_size, width)
    return shapes, {"hydra_num_heads": _HYDRA_HEADS, "hydra_num_layers": _HYDRA_BLOCKS, "hydra_head_arch": "mlp"}


def _eagle(target: CausalLM, version: int) -> tuple[Shapes, dict[str, Any]]:
    from methods.speculative.eagle.training import spec_of

    spec = spec_of(target, version)
    return spec.shapes(), _layers(target)


def _layers(target: CausalLM) -> dict[str, Any]:
    """The configuration of layers as wide as the target's."""
    from methods.speculative.eagle.training import sizes_of_target

    sizes = sizes_of_target(target)
    return {
        "hidden_size": sizes["hidden_size"],
        "intermediate_size": sizes["intermediate_size"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "head_dim": sizes["head_dim"],
        "vocab_size": sizes["vocab_size"],
        "rms_norm_eps": sizes["rms_eps"],
        "rope_parameters": dict(sizes["rope"]),
        "max_position_embeddings": target.max_positions,
    }


def _eagle1(target: CausalLM) -> tuple[Shapes, Mapping[str, Any]]:
    shapes, config = _eagle(target, 1)
    return {**shapes, "fc.bias": (target.hidden_size,)}, config


def _eagle3(target: CausalLM) -> tuple[Shapes, Mapping[str, Any]]:
    from methods.speculative.eagle.random_network import DRAFT_TOKENS

    shapes, config = _eagle(target, 3)
    count = min(DRAFT_TOKENS, target.vocab_size)
    return {**shapes, "lm_head.weight": (count, target.hidden_size)}, {**config, "draft_vocab_size": count}


def _p_eagle(target: CausalLM) -> tuple[Shapes, Mapping[str, Any]]:
    """In the form of vLLM."""
    from methods.speculative.eagle.random_network import DRAFT_TOKENS
    from methods.speculative.eagle.training import default_taps, sizes_of_target
    from methods.speculative.p_eagle import checkpoint as p_eagle
    from methods.speculative.published.p_eagle import DEPTHS

    count, mask = min(DRAFT_TOKENS, target.vocab_size), target.vocab_size - 1
    sizes = {"draft_layers": _PARALLEL_LAYERS, **sizes_of_target(target)}
    spec = p_eagle.Spec(taps=default_taps(target.n_layers), depths=DEPTHS, mask=mask, **sizes)
    config = {**_layers(target), "parallel_drafting": True, "ptd_token_id": mask, "draft_vocab_size": count}
    return {**spec.shapes(), "lm_head.weight": (count, target.hidden_size)}, config


def _block_drafter(target: CausalLM, places: int, **heads: Any) -> tuple[Spec, dict[str, Any]]:
    from methods.speculative.eagle.training import sizes_of_target

    taps = spread_taps(target.n_layers, min(_BLOCK_TAPS, max(1, target.n_layers - 3)))
    sizes = {**sizes_of_target(target), **heads}
    spec = Spec(draft_layers=_BLOCK_LAYERS, taps=taps, block=places, mask=target.vocab_size - 1, **sizes)
    config = {"num_hidden_layers": _BLOCK_LAYERS, "num_target_layers": target.n_layers, "block_size": places}
    return spec, {**_layers(target), **config}


def _dflash(target: CausalLM) -> tuple[Shapes, Mapping[str, Any]]:
    """In the form of its authors."""
    spec, config = _block_drafter(target, _DFLASH_PLACES)
    nested = {"mask_token_id": spec.mask, "target_layer_ids": list(spec.taps)}
    return spec.shapes(target.vocab_size), {**config, "dflash_config": nested}


def _dspark(target: CausalLM) -> tuple[Shapes, Mapping[str, Any]]:
    """In the form of DeepSpec, its authors' code."""
    spec, config = _block_drafter(target, _DSPARK_PLACES, markov_rank=_MARKOV_RANK, confidence=True)
    own = {"mask_token_id": spec.mask, "target_layer_ids": list(spec.taps), "markov_rank": spec.markov_rank}
    heads = {"markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True}
    return spec.shapes(target.vocab_size), {**config, **own, **heads}


FORMATS: dict[str, Callable[[CausalLM], tuple[Shapes, Mapping[str, Any]]]] = {
    "medusa": _medusa,
    "hydra": _hydra,
    "eagle1": _eagle1,
    "eagle3": _eagle3,
    "p_eagle": _p_eagle,
    "dflash": _dflash,
    "dspark": _dspark,
}
