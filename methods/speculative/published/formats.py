"""Published draft heads, by their own formats: Medusa, Hydra and Hydra++, EAGLE 1 to 3, P-EAGLE, DFlash and DSpark.

``read`` tells the formats apart by the names of their tensors and checks everything against the target before a head is
used: a head of another model, or one read with layers off by one, would decode correctly and slowly.

| format | file | names |
|---|---|---|
| Medusa-1 | medusa_lm_head.pt, .safetensors | {i}.{j}.linear.weight, .bias; {i}.{last}.weight |
| Medusa-2 | the same beside a whole model, or medusa_head.{i}... among its weights | the same |
| Hydra | hydra_lm_head.pt | hydra_mlp.{i}.{j}.linear.*, .res_connection.*; hydra_lm_head.{i}[.1].weight, .bias |
| Hydra++ | the same | the same and prefix_embeding_layer.layers.0.*, prefix_embeding_layer.norm.weight |
| EAGLE 1, 2 | pytorch_model.bin, model.safetensors | fc.*, layers.0.*, embed_tokens.weight |
| EAGLE-3, authors and SpecForge | the same | fc.weight, midlayer.*, norm.weight, lm_head.weight, d2t, t2d |
| EAGLE-3, speculators | model.safetensors | the same with layers.0.* for midlayer.* |
| P-EAGLE | the same | those of EAGLE-3, mask_hidden, layers.{i}.* |
| DFlash, DSpark | model.safetensors | fc.weight, hidden_norm.weight, layers.{i}.*, norm.weight, markov_head.* |

Numbers of heads and layers are counted: published configurations of Medusa name 2 heads where the file has 5. Anything
that is not known is refused with what was recognised.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from methods.engine.causal_lm import CausalLM
from methods.speculative.heads.hydra_prefix import prefix_shapes
from methods.speculative.published import random_heads
from methods.speculative.published.dflash import DFlashWeights, is_block_drafter, read_dflash
from methods.speculative.published.draft_networks import own_embedding
from methods.speculative.published.eagle import EagleWeights, LayersCounted, read_eagle1, read_eagle3
from methods.speculative.published.files import WITHIN, Checkpoint, read_checkpoint
from methods.speculative.published.p_eagle import PEagleWeights, is_parallel, read_p_eagle
from methods.speculative.published.report import Report, other_name

__all__ = ["DFlashWeights", "EagleWeights", "HydraWeights", "MedusaWeights", "PEagleWeights", "check_plausible", "read"]

LEAST_ACCEPTANCE = 0.15

_MEDUSA_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(?:weight|bias)")
_MEDUSA_OUTPUT = re.compile(r"(\d+)\.(\d+)\.weight")
_HYDRA_BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.linear\.weight")
_HYDRA_OUTPUT = re.compile(r"hydra_lm_head\.(\d+)(\.\d+)?\.weight")
_EMBEDDED = "input_embed_fn.weight"
_PREFIX = "prefix_embeding_layer."  # sic
_KNOWN = (
    "Medusa 1 and 2, Hydra (mlp), Hydra++ (prefix-mlp), EAGLE 1 and 2, EAGLE-3 of the authors, of SpecForge and of "
    "speculators, P-EAGLE, DFlash and DSpark"
)

Block = tuple[Tensor, Tensor]
HydraBlock = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


@dataclass
class MedusaWeights:
    """Heads of Medusa (Cai et al. 2024, arXiv 2401.10774, sec. 2.1); head i predicts token t + 2 + i from state t.

    Attributes:
        blocks: head by head, the residual blocks z + SiLU(W z + b): W [H, H] and b [H].
        outputs: head by head, the output matrix [V, H].
        notes: what a user should know.
    """

    blocks: list[list[Block]]
    outputs: list[Float[Tensor, "V H"]]
    notes: list[str] = field(default_factory=list)


@dataclass
class HydraWeights:
    """Heads of Hydra (Ankner et al. 2024, arXiv 2402.05109); head i reads the state and the tokens up to t + 1 + i.

    Attributes:
        blocks: head by head R z + SiLU(W z + b): W, b, R and the bias of R. The first block of head i maps (i + 2) H
            values to H; the others keep H, and their R is the identity: None.
        outputs: head by head, the output matrix [V, H] and its bias.
        prefix: of Hydra++, the decoder layer that makes the state which the heads read of the target's states: names
            as in ``methods.speculative.heads.hydra_prefix``; None: the heads read the target's last state.
        notes: what a user should know.
    """

    blocks: list[list[HydraBlock]]
    outputs: list[tuple[Float[Tensor, "V H"], Float[Tensor, "V"] | None]]
    prefix: dict[str, Tensor] | None = None
    notes: list[str] = field(default_factory=list)


def read(
    where: str | Path, target: CausalLM, layers_counted: LayersCounted = "auto"
) -> MedusaWeights | HydraWeights | EagleWeights | PEagleWeights | DFlashWeights:
    """Read a published head, on the CPU and in the type of its file.

    Args:
        where: a folder, a file or a hub id; or ``random:FORMAT``, see ``random_heads``.
        target: the model that is to verify.
        layers_counted: of EAGLE-3 and P-EAGLE, see ``read_eagle3``.

    Raises:
        ValueError: nothing that can be read, an unknown format, or a head that does not belong to the target.
    """
    named = str(where)
    found = random_heads.checkpoint(named, target) if named.startswith(random_heads.PREFIX) else read_checkpoint(where)
    if any(key.startswith("hydra_") for key in found.tensors) or "hydra_head_arch" in found.config:
        return _read_hydra(found, target)
    if any(_MEDUSA_BLOCK.fullmatch(key.removeprefix(WITHIN)) for key in found.tensors):
        return _read_medusa(found, target)
    if is_parallel(found):
        return read_p_eagle(found, target, layers_counted)
    if is_block_drafter(found):
        return read_dflash(found, target)
    if any(key.startswith("midlayer.") for key in found.tensors) or "speculators_config" in found.config:
        return read_eagle3(found, target, layers_counted)
    if "fc.weight" in found.tensors and any(key.startswith("layers.0.") for key in found.tensors):
        return read_eagle1(found, target)
    keys = ", ".join(sorted(found.tensors)[:6])
    raise ValueError(
        f"{found.name} must be of a known format ({_KNOWN}), got {len(found.tensors)} tensors of another one ({keys}, "
        "..). Name a head of one of these, or one that was trained here."
    )


# -- Medusa -----------------------------------------------------------------------------------------------------------


def _read_medusa(found: Checkpoint, target: CausalLM) -> MedusaWeights:
    tensors = {key.removeprefix(WITHIN): tensor for key, tensor in found.tensors.items()}
    report = Report(found, target, "heads of Medusa")
    heads, layers = _counts(tensors, _MEDUSA_BLOCK)
    hidden, vocab = _sizes(tensors, "0.0.linear.weight", f"0.{layers}.weight")
    report.require_target(hidden, vocab)
    wanted: dict[str, tuple[int, ...]] = {}
    for head in range(heads):
        for layer in range(layers):
            wanted[f"{head}.{layer}.linear.weight"] = (hidden, hidden)
            wanted[f"{head}.{layer}.linear.bias"] = (hidden,)
        wanted[f"{head}.{layers}.weight"] = (vocab, hidden)
    report.require_tensors(tensors, wanted)
    if found.whole_model:
        report.require_same_model()
    report.raise_problems()
    _compare_count(found, "medusa_num_heads", heads)
    _compare_count(found, "medusa_num_layers", layers)
    if not found.whole_model:
        _compare_name(found, target)
    blocks = [
        [(tensors[f"{head}.{layer}.linear.weight"], tensors[f"{head}.{layer}.linear.bias"]) for layer in range(layers)]
        for head in range(heads)
    ]
    return MedusaWeights(blocks, [tensors[f"{head}.{layers}.weight"] for head in range(heads)], found.notes)


def _counts(keys: Mapping[str, Tensor], pattern: re.Pattern[str]) -> tuple[int, int]:
    """How many heads there are, and how many blocks the first has: the rest is checked against it."""
    places = [match.groups() for match in map(pattern.fullmatch, keys) if match]
    heads = {int(head) for head, _ in places}
    return max(heads) + 1, len({int(layer) for head, layer in places if int(head) == 0})


def _sizes(tensors: Mapping[str, Tensor], inner: str, output: str) -> tuple[int, int]:
    """Hidden size and vocabulary that a head was made for; 0 where the tensor is missing."""
    return tuple(tensors[key].shape[0] if key in tensors else 0 for key in (inner, output))  # type: ignore[return-value]


def _compare_count(found: Checkpoint, key: str, counted: int) -> None:
    named = found.config.get(key)
    if named not in (None, counted):
        found.note(f"its configuration says {key} {named}, its file has {counted}; the file is right")


def _compare_name(found: Checkpoint, target: CausalLM) -> None:
    base = found.config.get("base_model_name_or_path")
    if base and Path(str(base)).name.lower() != Path(target.name).name.lower():
        found.note(other_name(base, target))


# -- Hydra ------------------------------------------------------------------------------------------------------------


def _read_hydra(found: Checkpoint, target: CausalLM) -> HydraWeights:
    tensors = found.tensors
    prefixed = _require_mlp(found)
    report = Report(found, target, "heads of Hydra++" if prefixed else "heads of Hydra")
    heads, layers = _counts(tensors, _HYDRA_BLOCK)
    places = {head: _hydra_places(tensors, head) for head in range(heads)}
    outputs = {int(m[1]): f"hydra_lm_head.{m[1]}{m[2] or ''}" for m in map(_HYDRA_OUTPUT.fullmatch, tensors) if m}
    hidden = tensors[f"hydra_mlp.0.{places[0][0]}.linear.weight"].shape[0] if places[0] else 0
    vocab = tensors[f"{outputs[0]}.weight"].shape[0] if 0 in outputs else 0
    report.require_target(hidden, vocab)
    wanted, optional = _hydra_shapes(places, outputs, layers, hidden, vocab)
    prefix = {_prefix_key(name): name for name in prefix_shapes(target)} if prefixed else {}
    wanted |= {key: prefix_shapes(target)[name] for key, name in prefix.items()}
    # modules of the authors' heads that hold a copy of the target's embedding, and one that is never used
    optional |= dict.fromkeys([_EMBEDDED, *([f"{_PREFIX}embed_tokens.weight"] if prefixed else [])], (vocab, hidden))
    report.require_tensors(tensors, wanted, optional)
    own_embedding(report, tensors, target, _EMBEDDED)
    report.raise_problems()
    _compare_count(found, "hydra_num_heads", heads)
    _compare_count(found, "hydra_num_layers", layers)
    _compare_name(found, target)
    blocks = [[_hydra_block(tensors, f"hydra_mlp.{head}.{j}") for j in places[head]] for head in range(heads)]
    ends = [(tensors[f"{outputs[head]}.weight"], tensors.get(f"{outputs[head]}.bias")) for head in range(heads)]
    read_before = {name: tensors[key] for key, name in prefix.items()} if prefixed else None
    return HydraWeights(blocks, ends, read_before, found.notes)


def _require_mlp(found: Checkpoint) -> bool:
    """Of Hydra's architectures only the feed-forward ones that read the drafted tokens; whether it is Hydra++."""
    arch = str(found.config.get("hydra_head_arch", "mlp"))
    if any(key.startswith(_PREFIX) for key in found.tensors):
        arch = "prefix-mlp"
    odd = "" if arch in ("mlp", "prefix-mlp") else arch
    if not found.config.get("grounded_heads", True):
        odd = f"{arch} with grounded_heads=false"
    elif found.config.get("hidden_state_offset"):
        odd = f"{arch} with hidden_state_offset={found.config['hidden_state_offset']}"
    if odd:
        raise ValueError(
            "Heads of Hydra must be of the architecture mlp or prefix-mlp, with grounded heads that read the target's "
            f"last state (hidden_state_offset 0), got {odd} in {found.name}. Choose such heads, or train some: "
            "python -m bench train method=hydra_heads model=MODEL."
        )
    if not any(map(_HYDRA_BLOCK.fullmatch, found.tensors)):
        keys = ", ".join(sorted(found.tensors)[:6])
        raise ValueError(
            f"Heads of Hydra must have hydra_mlp.0.*.linear.weight, got {keys}, .. in {found.name}. Fetch it again."
        )
    return arch == "prefix-mlp"


def _prefix_key(name: str) -> str:
    return f"{_PREFIX}{'' if name == 'norm.weight' else 'layers.0.'}{name}"


def _hydra_places(tensors: Mapping[str, Tensor], head: int) -> list[int]:
    """Places of the blocks of a head in its sequence: a dropout before each of them takes a place of its own."""
    found = (match for match in map(_HYDRA_BLOCK.fullmatch, tensors) if match)
    return sorted(int(match[2]) for match in found if int(match[1]) == head)


def _hydra_shapes(
    places: Mapping[int, Sequence[int]], outputs: Mapping[int, str], layers: int, hidden: int, vocab: int
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    wanted: dict[str, tuple[int, ...]] = {}
    optional: dict[str, tuple[int, ...]] = {}
    for head, blocks in places.items():
        # a head with fewer blocks than the first lacks the first's last ones
        for number, place in enumerate([*blocks, *places[0][len(blocks) : layers]]):
            width = (head + 2) * hidden if number == 0 else hidden
            for name in ("linear", "res_connection") if number == 0 else ("linear",):
                wanted[f"hydra_mlp.{head}.{place}.{name}.weight"] = (hidden, width)
                wanted[f"hydra_mlp.{head}.{place}.{name}.bias"] = (hidden,)
        output = outputs.get(head, f"hydra_lm_head.{head}")
        wanted[f"{output}.weight"] = (vocab, hidden)
        optional[f"{output}.bias"] = (vocab,)
    return wanted, optional


def _hydra_block(tensors: Mapping[str, Tensor], name: str) -> HydraBlock:
    rest = f"{name}.res_connection"
    weight, bias = tensors[f"{name}.linear.weight"], tensors[f"{name}.linear.bias"]
    return weight, bias, tensors.get(f"{rest}.weight"), tensors.get(f"{rest}.bias")


# -- a loaded head that drafts next to nothing ----------------------------------------------------------------------


def check_plausible(name: str, acceptance: Sequence[Sequence[float]], least: float = LEAST_ACCEPTANCE) -> str | None:
    """A warning if a loaded head drafts far worse than any published one does on its own target.

    The first drafted token of published heads is right half of the time and more (Medusa about 0.5 to 0.6, EAGLE 0.7 to
    0.8). A head of another model, fed with the wrong layers, or under a chat template that it was not trained on, is
    right now and then by frequent words alone. Fifteen in a hundred lies between the two, five standard errors above
    the latter at 0.05 over some 150 rounds, which three prompts have.

    Args:
        name: of the head.
        acceptance: per prompt, how often the first, second, .. drafted token was accepted where it was judged; a prompt
            without any round is empty.
        least: of the mean over the prompts at the first position, what does not warn.

    Returns:
        The warning, or None if all is well or nothing was measured.
    """
    first = [positions[0] for positions in acceptance if positions]
    if not first or (mean := sum(first) / len(first)) >= least:
        return None
    return (
        f"{name} drafts implausibly badly: of the first tokens it drafts {mean:.0%} are accepted over {len(first)} "
        f"prompts, where published heads reach half and more and {least:.0%} is the least that is believed. The text "
        "is right, the speed is not that of the method. Check that the head was trained for this very model, that the "
        "chat template is the one it was trained with, and for EAGLE-3 the layer ids in its config.json."
    )
