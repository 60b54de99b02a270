"""Published networks of P-EAGLE, as speculators writes them and as vLLM reads them.

The tensors are those of EAGLE-3, with ``mask_hidden`` and further layers. The configurations differ:

| | speculators | vLLM (amazon's networks, NeMo AutoModel) |
|---|---|---|
| sign | speculators_model_type or algorithm peagle | parallel_drafting, or mask_hidden alone |
| token of masked places | mask_token_id, earlier ptd_token_id | pard_token or ptd_token_id |
| tokens of a draft | speculative_tokens of the first proposal method | the user says it |
| tapped layers, flags | as of EAGLE-3 there | as of EAGLE-3 of the authors and of SpecForge |
| first layer | layers.0.* | layers.0.* or midlayer.* |

Where nothing says how many tokens a network drafts, it is 5, as published results have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from methods.engine.causal_lm import CausalLM
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.speculative.p_eagle.checkpoint import MASK_HIDDEN, TRAIN, Part, Spec
from methods.speculative.published.draft_networks import draft_ids, layer_config, own_embedding, rows_of
from methods.speculative.published.eagle import (
    LayersCounted,
    flags_of,
    flat_config,
    require_config,
    require_width,
    taps_of,
)
from methods.speculative.published.files import Checkpoint
from methods.speculative.published.report import Report

DEPTHS = 5  # of a draft, in the paper's results
_MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")
_OUTPUT, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"


@dataclass
class PEagleWeights:
    """A network of P-EAGLE (Hui et al. 2026, arXiv 2602.01469).

    Attributes:
        part: the network in the form of this project.
        notes: what a user should know.
    """

    part: Part
    notes: list[str] = field(default_factory=list)


def is_parallel(found: Checkpoint) -> bool:
    """Whether tensors or configuration are those of such a network."""
    return MASK_HIDDEN in found.tensors or found.config.get("speculators_model_type") == "peagle"


def read_p_eagle(found: Checkpoint, target: CausalLM, layers_counted: LayersCounted = "auto") -> PEagleWeights:
    """A network of P-EAGLE, in both forms.

    Args:
        layers_counted: see ``read_eagle3``.

    Raises:
        ValueError: it does not belong to the target, or is not complete.
    """
    converted = "speculators_model_type" in found.config or "speculators_config" in found.config
    report = Report(found, target, f"a network of P-EAGLE in the form of {'speculators' if converted else 'vLLM'}")
    config = flat_config(report, "peagle") if converted else dict(found.config)
    require_config(report, config)
    tensors = _named(found.tensors)
    spec = _spec(report, config, tensors, taps_of(report, config, converted, layers_counted))
    drafts, vocab = rows_of(tensors, _OUTPUT), int(config.get("vocab_size", 0))
    require_width(report, config, spec.hidden_size)
    report.require_target(int(config.get("target_hidden_size") or spec.hidden_size), vocab)
    wanted = spec.shapes() | {_OUTPUT: (drafts, spec.hidden_size)}
    optional = {**spec.optional(drafts), "d2t": (drafts,), "t2d": (vocab,)}
    report.require_tensors(tensors, wanted, optional)
    offsets, embedding = draft_ids(report, tensors, vocab, drafts), own_embedding(report, tensors, target)
    report.raise_problems()
    kept = {name: tensors[name] for name in (*wanted, *optional) if name in tensors and name not in ("d2t", "t2d")}
    kept.pop(_EMBEDDING, None)
    if embedding is not None:
        kept[_EMBEDDING] = embedding
    part = Part(spec, kept, DraftVocabulary.of_offsets(offsets, target.vocab_size))
    return PEagleWeights(part, found.notes)


def of_published(found: object, where: str) -> Part:
    """A published network as one of ours.

    Raises:
        ValueError: heads of another method.
    """
    if not isinstance(found, PEagleWeights):
        kind = type(found).__name__.removesuffix("Weights")
        raise ValueError(f"{where} must hold a network of P-EAGLE, got heads of {kind}. Use the method of that name.")
    return found.part


def _named(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names of ``Spec``; without the verifier's tensors, and a norm that vLLM gives later layers and never uses."""
    found = {}
    for key, tensor in tensors.items():
        name = key.replace("midlayer.", "layers.0.", 1) if key.startswith("midlayer.") else key
        unused = name.endswith(".hidden_norm.weight") and not name.startswith("layers.0.")
        if not name.startswith("verifier_") and not unused:
            found[name] = tensor.flatten() if name == MASK_HIDDEN else tensor
    return found


def _spec(report: Report, config: Mapping[str, Any], tensors: Mapping[str, Tensor], taps: tuple[int, ...]) -> Spec:
    """Its sizes, 0 where they are not known."""
    hidden, heads = rows_of(tensors, "norm.weight"), int(config.get("num_attention_heads") or 0)
    flags, eps, rope = flags_of(config), 0.0, dict[str, Any]()
    for name in ("norm_before_fc", "norm_output"):
        if flags[name]:
            report.add(f"its configuration has {name}=True, a variant that is not read")
    if heads and hidden:
        layers, rope = layer_config(config, report.found.name, TRAIN)
        eps = layers.rms_norm_eps
    mask = next((config[key] for key in _MASK_TOKENS if config.get(key) is not None), None)
    if mask is None:
        report.add(f"its config.json has none of {', '.join(_MASK_TOKENS)}, the token of masked places")
    return Spec(
        draft_layers=1 + max((int(name.split(".")[1]) for name in tensors if name.startswith("layers.")), default=0),
        hidden_size=hidden,
        intermediate_size=rows_of(tensors, "layers.0.mlp.gate_proj.weight"),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or (hidden // heads if heads else 0)),
        rms_eps=eps,
        layers=report.target.n_layers,
        vocab_size=int(config.get("vocab_size", 0)),
        taps=taps,
        depths=_depths(report.found.config),
        mask=int(mask or 0),
        fc_norm=flags["fc_norm"],
        norm_before_residual=flags["norm_before_residual"],
        rope=rope,
    )


def _depths(config: Mapping[str, Any]) -> int:
    proposals = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return int(proposals[0].get("speculative_tokens") or config.get("num_speculative_tokens") or DEPTHS)
