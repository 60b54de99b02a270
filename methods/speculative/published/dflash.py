"""Published networks of DFlash and DSpark, as their authors, DeepSpec and speculators write them.

The tensors have the same names in all three. The configurations differ:

| | authors of DFlash | DeepSpec | speculators |
|---|---|---|---|
| block size | block_size, there or in dflash_config | block_size | block_size |
| token of masked places | dflash_config.mask_token_id | mask_token_id | mask_token_id |
| tapped layers | dflash_config.target_layer_ids | target_layer_ids | aux_hidden_state_layer_ids |
| ... which count | outputs of layers | outputs of layers | inputs of layers, as vLLM does |
| the anchor's place predicts | no | yes | sample_from_anchor; by default only for DSpark |
| heads | none | markov_rank, enable_confidence_head | the same |

A network with another computation is refused: sliding windows, the gated or recurrent Markov head, a limit on logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from methods.engine.causal_lm import CausalLM
from methods.engine.checkpoint_files import training_command
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.speculative.dflash.checkpoint import MARKOV_ROWS, Part, Spec
from methods.speculative.published.draft_networks import draft_ids, layer_config, note_verifier, own_embedding, rows_of
from methods.speculative.published.files import Checkpoint
from methods.speculative.published.report import Report

_NESTED = "dflash_config"  # where the authors have what they add to the configuration of a language model
_READ = ("block_size", "mask_token_id", "target_layer_ids")  # of it
_LAYERS = "transformer_layer_config"  # where speculators has the configuration of the layers
_OUTPUT, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"
_PLAIN: dict[str, tuple[Any, ...]] = {  # settings that change the computation, with the values that do not
    "hidden_act": ("silu",),
    "is_causal": (False,),
    "final_logit_softcapping": (),
    "output_multiplier": (1.0,),
    "input_embedding_scale": (1.0,),
    "markov_head_type": ("vanilla",),
    "projector_type": ("dflash",),
    "shift_label": (False,),
}


@dataclass
class DFlashWeights:
    """A network of DFlash (Chen et al. 2026, arXiv 2602.06036) or DSpark (Cheng et al. 2026, arXiv 2607.05147).

    Attributes:
        part: the network in the form of this project.
        notes: what a user should know.
    """

    part: Part
    notes: list[str] = field(default_factory=list)


def is_block_drafter(found: Checkpoint) -> bool:
    """Whether tensors are those of such a network: EAGLE-3 has no norm of this name outside of its layer."""
    return "hidden_norm.weight" in found.tensors and "fc.weight" in found.tensors


def read_dflash(found: Checkpoint, target: CausalLM) -> DFlashWeights:
    """A network of DFlash or DSpark, in any of the three forms.

    Raises:
        ValueError: it does not belong to the target, or is not complete.
    """
    converted = "speculators_model_type" in found.config or "speculators_config" in found.config
    kind = "speculators" if converted else "the authors of DFlash" if _NESTED in found.config else "DeepSpec"
    report = Report(found, target, f"a block drafter in the form of {kind}")
    if converted:
        note_verifier(report)
    config = {**found.config, **(found.config.get(_LAYERS) or {}), **(found.config.get(_NESTED) or {})}
    _require_plain(report, config)
    tensors = {key: tensor for key, tensor in found.tensors.items() if not key.startswith("verifier_")}
    hidden, vocab = rows_of(tensors, "norm.weight"), int(config.get("vocab_size", 0))
    report.require_target(hidden, vocab)
    drafts = rows_of(tensors, _OUTPUT) or rows_of(tensors, "d2t") or vocab
    spec = _spec(report, config, tensors, kind)
    wanted, optional = spec.shapes(drafts), {**spec.optional(drafts), "d2t": (drafts,), "t2d": (vocab,)}
    report.require_tensors(tensors, wanted, optional)
    offsets, embedding = draft_ids(report, tensors, vocab, drafts), own_embedding(report, tensors, target)
    report.raise_problems()
    kept = {name: tensors[name] for name in (*wanted, *optional) if name in tensors and name not in ("d2t", "t2d")}
    kept.pop(_EMBEDDING, None)
    if embedding is not None:
        kept[_EMBEDDING] = embedding
    vocabulary = DraftVocabulary.of_offsets(offsets, target.vocab_size)
    return DFlashWeights(_without_copy(Part(spec, kept, vocabulary), target), found.notes)


def of_published(found: object, where: str, method: str) -> Part:
    """A published network as one of ours; ``method``: that wants it.

    Raises:
        ValueError: heads of another method.
    """
    if not isinstance(found, DFlashWeights):
        kind = type(found).__name__.removesuffix("Weights")
        raise ValueError(
            f"{where} must hold a network of method={method}, got heads of {kind}. Use the method of that name."
        )
    return found.part


def _require_plain(report: Report, config: Mapping[str, Any]) -> None:
    needed = [key for key in ("hidden_size", "num_attention_heads", "vocab_size", "block_size") if key not in config]
    if needed:
        report.add(f"its config.json lacks {', '.join(needed)}")
    for key, plain in _PLAIN.items():
        if config.get(key) is not None and config[key] not in plain:
            report.add(f"its configuration has {key}={config[key]}, a variant that is not read")
    unknown = set(report.found.config.get(_NESTED) or {}) - {*_READ, *_PLAIN}
    if unknown:
        report.add(f"its {_NESTED} has {', '.join(sorted(unknown))}, of which nothing is known")
    if "sliding_attention" in (config.get("layer_types") or ()):
        report.add("its layers have sliding windows, a variant that is not read")
    layers = config.get("num_target_layers")
    if layers not in (None, report.target.n_layers):
        report.add(f"it is for a model of {layers} layers, the target has {report.target.n_layers}")


def _spec(report: Report, config: Mapping[str, Any], tensors: Mapping[str, Tensor], kind: str) -> Spec:
    """Sizes by the configuration; the head size and those of matrices by the file."""
    target = report.target
    layers, rope = layer_config(config, report.found.name, training_command("dflash"))
    rank = tensors[MARKOV_ROWS].shape[1] if MARKOV_ROWS in tensors and tensors[MARKOV_ROWS].dim() == 2 else 0
    if rank != int(config.get("markov_rank") or 0):
        report.add(f"its configuration says markov_rank {config.get('markov_rank') or 0}, its file has {rank}")
    confidence = bool(config.get("enable_confidence_head", False))
    mask = config.get("mask_token_id")
    if not isinstance(mask, int) or not 0 <= mask < target.vocab_size:
        report.add(f"mask_token_id must be a token of the target, it is {mask}")
        mask = 0
    if int(config.get("block_size") or 0) < 2:
        report.add(f"block_size must be at least 2, it is {config.get('block_size')}")
    heads = layers.num_attention_heads
    return Spec(
        draft_layers=int(config.get("num_hidden_layers") or 0),
        hidden_size=target.hidden_size,
        intermediate_size=rows_of(tensors, "layers.0.mlp.gate_proj.weight"),
        heads=heads,
        kv_heads=layers.num_key_value_heads or heads,
        head_dim=rows_of(tensors, "layers.0.self_attn.q_norm.weight") or int(config.get("head_dim") or 0),
        rms_eps=layers.rms_norm_eps,
        layers=target.n_layers,
        vocab_size=target.vocab_size,
        taps=_taps(report, config, kind),
        block=int(config.get("block_size") or 0),
        mask=mask,
        sample_from_anchor=_from_anchor(config, kind),
        markov_rank=rank,
        confidence=confidence,
        confidence_reads_markov=confidence and bool(config.get("confidence_head_with_markov", kind == "speculators")),
        rope=rope,
    )


def _from_anchor(config: Mapping[str, Any], kind: str) -> bool:
    if kind == "speculators":
        return bool(config.get("sample_from_anchor", config.get("speculators_model_type") == "dspark"))
    return kind == "DeepSpec"


def _taps(report: Report, config: Mapping[str, Any], kind: str) -> tuple[int, ...]:
    """0-based layers whose outputs are read."""
    converted, layers = kind == "speculators", report.target.n_layers
    key = "aux_hidden_state_layer_ids" if converted else "target_layer_ids"
    given = config.get(key) or []
    taps = [int(number) - converted for number in given]
    if not taps or taps != sorted(set(taps)) or taps[0] < 0 or taps[-1] >= layers:
        report.add(
            f"{key} must be different numbers of layers in ascending order, {int(converted)} to "
            f"{layers - 1 + converted}, it is {list(given) or 'missing'}"
        )
    return tuple(taps)


def _without_copy(part: Part, target: CausalLM) -> Part:
    """Without an output matrix that is a copy of the target's rows."""
    own = part.tensors.get(_OUTPUT)
    if own is None:
        return part
    weight, bias = target.output_rows(part.vocabulary.ids.to(target.device))
    if bias is not None or not torch.equal(weight.to(own.dtype).cpu(), own):
        return part
    return Part(part.spec, {name: tensor for name, tensor in part.tensors.items() if name != _OUTPUT}, part.vocabulary)
