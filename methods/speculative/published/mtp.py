"""The module for multi-token prediction that a model ships, in the names of DeepSeek-V3, which GLM-4.5 has too.

The model's weights have it as a layer after the last one, ``model.layers.{L}``: a layer of the model's own kind,
``enorm`` and ``hnorm``, the norms of its two inputs, ``eh_proj``, which mixes them, ``shared_head.norm``, and copies of
the model's embedding and output matrix. transformers leaves it out when it loads the model, so it is read from the
files. Any other form is refused: several modules, matrices that are no copies, a family without a test.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from methods.engine import causal_layers
from methods.engine.causal_layers import Layer
from methods.engine.causal_lm import CausalLM
from methods.speculative.published.draft_networks import own_embedding
from methods.speculative.published.files import Checkpoint, tensors_within
from methods.speculative.published.report import Report

_EMBEDDING, _OUTPUT = "embed_tokens.weight", "shared_head.head.weight"
_AROUND = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
PROVEN = ("llama", "qwen3", "qwen3_moe", "glm4_moe")  # families whose drafts are tested against transformers' layers
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
_SAMPLED, _EQUAL = 64, 0.999


@dataclass(frozen=True)
class MtpWeights:
    """A module.

    Attributes:
        layer: its decoder layer.
        tensors: the rest, in the target's type, by the names of ``_AROUND``.
    """

    layer: Layer
    tensors: Mapping[str, Tensor]


def read_mtp(target: CausalLM) -> MtpWeights:
    """The module in the files of the target.

    Raises:
        ValueError: there is none or an incomplete one, or one of another form.
    """
    if target.config.model_type not in PROVEN:
        raise ValueError(
            f"A model whose own module drafts must be of a family that is proven ({', '.join(PROVEN)}), got "
            f"'{target.config.model_type}'. Choose a model of one of these, or another method."
        )
    first, revision = target.n_layers, getattr(target.config, "_commit_hash", None)
    found = tensors_within(target.name, f"model.layers.{first}.", revision)
    if "eh_proj.weight" not in found:
        raise ValueError(
            f"The model must ship a module for multi-token prediction (model.layers.{first}.eh_proj.weight, as GLM-4.5 "
            f"does), got {target.name} without one. Choose another model, or another method."
        )
    report = Report(Checkpoint(target.name, {}, found), target, "a module for multi-token prediction")
    if tensors_within(target.name, f"model.layers.{first + 1}.", revision):
        report.add("it has several modules, of which each drafts one token; a single one is read")
    width, vocab = target.hidden_size, target.vocab_size
    wanted: dict[str, tuple[int, ...]] = {**dict.fromkeys(_AROUND, (width,)), "eh_proj.weight": (width, 2 * width)}
    module = _empty_layer(target)
    inner = {name: tensor for name, tensor in found.items() if name not in (*wanted, _EMBEDDING, _OUTPUT)}
    stacked = _stacked(inner)
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    copies = {_EMBEDDING: (vocab, width), _OUTPUT: (vocab, width)}
    around = {name: tensor for name, tensor in found.items() if name in (*wanted, *copies)}
    report.require_tensors({**around, **stacked}, {**wanted, **shapes}, copies)
    _require_copies(report, around, target)
    report.raise_problems()
    module.load_state_dict({name: _placed(name, tensor, target) for name, tensor in stacked.items()}, assign=True)
    layer = causal_layers.read_layer(module.eval(), "auto", target.config, first - 1)
    return MtpWeights(layer, {name: _placed(name, found[name], target) for name in wanted})


def _empty_layer(target: CausalLM) -> nn.Module:
    """A layer of the class that the model's last one has in transformers, without memory."""
    modelling = importlib.import_module(type(target.config).__module__.replace("configuration_", "modeling_"))
    kinds: list[Any] = [
        kind
        for name, kind in inspect.getmembers(modelling, inspect.isclass)
        if name.endswith("DecoderLayer") and kind.__module__ == modelling.__name__
    ]
    with torch.device("meta"):
        layer: nn.Module = kinds[0](target.config, target.n_layers - 1)
    return layer


def _stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices of single experts as transformers holds them: all of a layer in one tensor, gates above ups.

    Without experts, and where one is missing or has another shape, all stays as it is.
    """
    by_part: dict[str, dict[int, Tensor]] = {"gate": {}, "up": {}, "down": {}}
    for name, tensor in tensors.items():
        if match := _EXPERT.fullmatch(name):
            by_part[match[2]][int(match[1])] = tensor
    count = len(by_part["gate"])
    whole = all(sorted(found) == list(range(count)) for found in by_part.values())
    alike = all(len({tensor.shape for tensor in found.values()}) == 1 for found in by_part.values())
    if not whole or not alike:
        return dict(tensors)
    gate, up, down = (torch.stack([found[expert] for expert in range(count)]) for found in by_part.values())
    kept = {name: tensor for name, tensor in tensors.items() if not _EXPERT.fullmatch(name)}
    return {**kept, "mlp.experts.gate_up_proj": torch.cat([gate, up], 1), "mlp.experts.down_proj": down}


def _require_copies(report: Report, tensors: Mapping[str, Tensor], target: CausalLM) -> None:
    notes = len(report.found.notes)
    own = own_embedding(report, tensors, target)
    if own is not None and len(report.found.notes) > notes:
        report.add("its token embedding is its own, a variant that is not read")
    output = tensors.get(_OUTPUT)
    if output is None or tuple(output.shape) != (target.vocab_size, target.hidden_size):
        return
    ids = torch.linspace(0, target.vocab_size - 1, min(_SAMPLED, target.vocab_size)).long()
    theirs = target.output_rows(ids.to(target.device))[0].float().cpu()
    if float(torch.cosine_similarity(output[ids].float(), theirs, dim=-1).mean()) < _EQUAL:
        report.add("its output matrix is its own, a variant that is not read")


def _placed(name: str, tensor: Tensor, target: CausalLM) -> Tensor:
    """On the target's device and in its type, but for what balances the experts, which stays in 32 bit."""
    kept = torch.float32 if name.endswith("e_score_correction_bias") else target.dtype
    return tensor.to(target.device, kept)
