"""Published heads of EAGLE: versions 1 and 2, which share a format, and version 3 in three dialects.

All are brought to the names of the authors' files. Layers whose states EAGLE-3 reads are counted in three ways, and an
error of one costs acceptance without any other sign:

- the authors take ``hidden_states[2], [L // 2], [L - 3]`` of transformers, where entry j is what enters layer j;
- SpecForge writes numbers of layers whose output it takes, by default 1, L // 2 - 1 and L - 4: the same states;
- speculators writes numbers as vLLM counts them, j for what enters layer j: by default 2, L // 2, L - 3 (the same).

Here a tap is the 0-based number of the layer whose output is read. Configurations converted to the form of speculators
may have kept SpecForge's default numbers; those are recognised, read as outputs, and noted. ``layers_counted`` says how
a file counts where its form does not.

A configuration with linear rope scaling and a base of its own is read with both. The authors' layer drops the base then
(cnets.py, in training too), so a head trained by their code with both drafts badly here; none is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from methods.engine.causal_lm import CausalLM
from methods.engine.draft_vocabulary import OFFSETS, DraftVocabulary
from methods.speculative.eagle.checkpoint import TRAIN, Part, Spec
from methods.speculative.published.draft_networks import draft_ids, layer_config, note_verifier, own_embedding, rows_of
from methods.speculative.published.files import Checkpoint
from methods.speculative.published.report import Report

LayersCounted = Literal["auto", "outputs", "inputs"]

_LAYER1, _LAYER3 = "layers.0.", "midlayer."
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_NOT_READ = {  # of the configurations that NVIDIA's and SpecForge's tools write, what would change the computation
    "use_aux_hidden_state": False,
    "use_input_layernorm_in_first_layer": False,
    "use_last_layernorm": False,
    "use_mtp_layernorm": True,
}


@dataclass
class EagleWeights:
    """A head of EAGLE (Li et al., arXiv 2401.15077, 2406.16858 and 2503.01840).

    Attributes:
        version: 1 (whose heads EAGLE-2 uses with another tree) or 3.
        config: of the head's layer: heads, rotary base, epsilon and so on, as transformers names them.
        tensors: by the names of the authors. 1: ``fc.weight``, perhaps ``fc.bias``, ``layers.0.*``. 3: ``fc.weight``,
            ``midlayer.*``, ``norm.weight``, ``lm_head.weight`` and ``d2t``, int64 offsets from draft ids to ids of the
            target, or None where all ids are drafted; with the flags of these names ``input_norm.weight`` and
            ``fc_norm.{i}.weight``. ``embed_tokens.weight`` only where it is not the target's embedding.
        taps: 0-based layers whose outputs are concatenated for ``fc``, in this order; empty for version 1, which reads
            the state after the final norm.
        norm_before_residual: the layer's residual is the state after ``hidden_norm``, not the one before it.
        norm_before_fc: ``input_norm`` over the concatenated states comes before ``fc``.
        fc_norm: each of the concatenated states has a norm of its own before ``fc``.
        norm_output: the state that the next draft step reads is the one after ``norm``.
        notes: what a user should know.
    """

    version: int
    config: dict[str, Any]
    tensors: dict[str, Tensor | None]
    taps: tuple[int, ...] = ()
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    notes: list[str] = field(default_factory=list)


def read_eagle1(found: Checkpoint, target: CausalLM) -> EagleWeights:
    """A head of EAGLE 1 or 2.

    Raises:
        ValueError: it does not belong to the target, or is not complete.
    """
    report = Report(found, target, "a head of EAGLE 1 or 2")
    tensors, config = dict(found.tensors), found.config
    require_config(report, config)
    hidden = rows_of(tensors, "fc.weight")
    report.require_target(hidden, int(config.get("vocab_size", 0)))
    spec = _spec(1, config, tensors, hidden)
    wanted, optional = spec.shapes(), spec.optional()
    report.require_tensors(tensors, wanted, optional)
    embedding = own_embedding(report, tensors, target)
    report.raise_problems()
    _compare_bias(found, config, tensors)
    return EagleWeights(1, dict(config), _kept(tensors, {**wanted, **optional}, embedding), notes=found.notes)


def read_eagle3(found: Checkpoint, target: CausalLM, layers_counted: LayersCounted = "auto") -> EagleWeights:
    """A head of EAGLE-3, in any of the dialects.

    Args:
        found: its files.
        target: the model that is to verify.
        layers_counted: what the numbers in the configuration are: outputs of layers, inputs of layers, or (auto) by the
            dialect.

    Raises:
        ValueError: it does not belong to the target, or is not complete.
    """
    converted = "speculators_config" in found.config
    kind = "speculators" if converted else "SpecForge" if "eagle_config" in found.config else "the authors"
    report = Report(found, target, f"a head of EAGLE-3 in the form of {kind}")
    config = flat_config(report, "eagle3") if converted else dict(found.config)
    tensors = _authors_names(found.tensors) if converted else dict(found.tensors)
    require_config(report, config)
    flags = flags_of(config)
    taps = taps_of(report, config, converted, layers_counted)
    hidden, draft = rows_of(tensors, "midlayer.post_attention_layernorm.weight"), rows_of(tensors, "lm_head.weight")
    vocab = int(config.get("vocab_size", 0))
    require_width(report, config, hidden)
    report.require_target(int(config.get("target_hidden_size") or hidden), vocab)
    spec = _spec(3, config, tensors, hidden, taps, **flags)
    wanted = spec.shapes() | {"lm_head.weight": (draft, hidden)}
    extra = {"d2t": (draft,), "t2d": (vocab,), **spec.optional()}
    del extra["fc.bias"]  # the authors' version 3 has none
    report.require_tensors(tensors, wanted, extra)
    offsets = draft_ids(report, tensors, vocab, draft)
    embedding = own_embedding(report, tensors, target)
    report.raise_problems()
    if config.get("draft_vocab_size") not in (None, draft):
        found.note(f"its configuration says draft_vocab_size {config['draft_vocab_size']}, its file has {draft}")
    kept = _kept(tensors, {**wanted, **extra}, embedding) | {"d2t": offsets}
    kept.pop("t2d", None)
    return EagleWeights(3, config, kept, taps, **flags, notes=found.notes)


# -- configurations --------------------------------------------------------------------------------------------------


def require_config(report: Report, config: Mapping[str, Any]) -> None:
    """Refuse a configuration that lacks sizes, or names a variant that is not read."""
    needed = [key for key in ("hidden_size", "num_attention_heads", "vocab_size") if key not in config]
    if needed:
        report.add(f"its config.json lacks {', '.join(needed)}")
    nested = config.get("eagle_config") or {}
    for key, odd in _NOT_READ.items():
        if nested.get(key, config.get(key)) is odd:
            report.add(f"its configuration has {key}={odd}, a variant that is not read")


def flat_config(report: Report, wanted: str) -> dict[str, Any]:
    """Of speculators: the layer's settings beside those of the head; ``wanted``: the algorithm that is read."""
    given = report.found.config
    algorithm = (given.get("speculators_config") or {}).get("algorithm", given.get("speculators_model_type"))
    if algorithm != wanted:
        report.add(f"its speculators_config names the algorithm {algorithm}; {wanted} is read")
    note_verifier(report)
    head = {key: value for key, value in given.items() if key not in ("transformer_layer_config", "speculators_config")}
    return {**head, **(given.get("transformer_layer_config") or {})}


def require_width(report: Report, config: Mapping[str, Any], hidden: int) -> None:
    """Refuse a network that is not as wide as its target."""
    if (config.get("target_hidden_size") or hidden) != hidden:
        report.add(f"its own hidden size is {hidden}, not its target's: a variant that is not read")


def flags_of(config: Mapping[str, Any]) -> dict[str, bool]:
    """The flags of ``EagleWeights``."""
    nested = config.get("eagle_config") or {}
    return {flag: bool(nested.get(flag, config.get(flag, False))) for flag in _FLAGS}


def taps_of(report: Report, config: Mapping[str, Any], converted: bool, counted: LayersCounted) -> tuple[int, ...]:
    """0-based layers whose outputs are read; ``converted``: the configuration has the form of speculators."""
    if counted != "auto":
        return _counted_taps(report, config, counted)
    return _speculators_taps(report, config) if converted else _plain_taps(report, config)


def _plain_taps(report: Report, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Of the authors and of SpecForge: outputs of the layers named, by default the authors'."""
    layers = report.target.n_layers
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if not ids:
        if "eagle_aux_hidden_state_layer_ids" in config:
            report.add(
                "eagle_aux_hidden_state_layer_ids is outside eagle_config and there is no speculators_config, so "
                "whether it counts outputs or inputs of layers is not known; method.layers_counted says it"
            )
        return _require_taps(report, _default_taps(layers), "the authors' default: 1, L // 2 - 1, L - 4")
    if list(ids) == [tap + 1 for tap in _default_taps(layers)]:
        report.found.note(
            f"its layers {list(ids)} are read as outputs, as SpecForge counts; they look like the inputs that vLLM "
            f"counts ({list(_default_taps(layers))} as outputs)"
        )
    return _require_taps(report, ids, "outputs of layers, as SpecForge counts")


def _speculators_taps(report: Report, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Of speculators: number j is what enters layer j."""
    layers = report.target.n_layers
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    if not ids:
        return _require_taps(report, _default_taps(layers), "the default: inputs of 2, L // 2, L - 3")
    if tuple(ids) == _default_taps(layers):
        report.found.note(
            f"its layers {list(ids)} are SpecForge's default, which counts outputs, and are read so; as vLLM counts, "
            f"they would be the outputs of {[number - 1 for number in ids]}"
        )
        return tuple(ids)
    taps = [number - 1 for number in ids]
    return _require_taps(report, taps, f"{list(ids)} as inputs of layers, as speculators and vLLM count, less 1")


def _counted_taps(report: Report, config: Mapping[str, Any], counted: LayersCounted) -> tuple[int, ...]:
    """As the user says."""
    name = "eagle_aux_hidden_state_layer_ids"
    ids = (config.get("eagle_config") or {}).get(name) or config.get(name) or []
    if not ids:
        report.add(f"its config.json has no {name}, which layers_counted={counted} is about")
    return _require_taps(report, [number - (counted == "inputs") for number in ids], f"{list(ids)} as {counted}")


def _default_taps(layers: int) -> tuple[int, ...]:
    return (1, layers // 2 - 1, layers - 4)


def _require_taps(report: Report, taps: Sequence[int], convention: str) -> tuple[int, ...]:
    layers = report.target.n_layers
    wrong = len(set(taps)) != len(taps) or any(not 0 <= tap < layers for tap in taps)
    if wrong or list(taps) != sorted(taps):
        report.add(
            f"it reads the outputs of layers {list(taps)} ({convention}), and the target has layers 0 to {layers - 1}; "
            "different ones of these in ascending order are possible"
        )
    return tuple(taps)


# -- tensors ---------------------------------------------------------------------------------------------------------


def _authors_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """speculators writes layers.0 for the one layer, and may keep what belongs to its verifier."""
    kept = {key: tensor for key, tensor in tensors.items() if not key.startswith("verifier_")}
    return {key.replace(_LAYER1, _LAYER3, 1) if key.startswith(_LAYER1) else key: t for key, t in kept.items()}


def _spec(
    version: int,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    hidden: int,
    taps: tuple[int, ...] = (),
    **flags: Any,
) -> Spec:
    """Its sizes, 0 where they are not known."""
    heads, layer = int(config.get("num_attention_heads") or 0), _LAYER3 if version == 3 else _LAYER1
    return Spec(
        version=version,
        hidden_size=hidden,
        intermediate_size=rows_of(tensors, f"{layer}mlp.gate_proj.weight"),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or (hidden // heads if heads else 0)),
        rms_eps=0.0,
        layers=0,
        vocab_size=int(config.get("vocab_size", 0)),
        taps=taps,
        **flags,
    )


def _kept(
    tensors: Mapping[str, Tensor], allowed: Mapping[str, tuple[int, ...]], embedding: Tensor | None
) -> dict[str, Tensor | None]:
    kept: dict[str, Tensor | None] = {key: tensor for key, tensor in tensors.items() if key in allowed}
    kept.pop("embed_tokens.weight", None)
    return kept if embedding is None else kept | {"embed_tokens.weight": embedding}


def _compare_bias(found: Checkpoint, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    said = bool(config.get("bias", True))  # the authors' code takes a missing entry for true
    if said != ("fc.bias" in tensors):
        found.note(
            f"its configuration says bias={said}, its file has {'a' if not said else 'no'} fc.bias; the file is right"
        )


def of_published(found: object, where: str, target: CausalLM) -> Part:
    """A published network as one of ours.

    Raises:
        ValueError: heads of another method, or rotary positions that are not proven.
    """
    if not isinstance(found, EagleWeights):
        kind = type(found).__name__.removesuffix("Weights")
        raise ValueError(f"{where} must hold heads of EAGLE, got heads of {kind}. Use the method of that name.")
    config, rope = layer_config(found.config, where, TRAIN)
    tensors = {name: tensor for name, tensor in found.tensors.items() if tensor is not None}
    offsets = tensors.pop(OFFSETS, None)
    layer = "midlayer" if found.version == 3 else "layers.0"
    spec = Spec(
        version=found.version,
        hidden_size=target.hidden_size,
        intermediate_size=tensors[f"{layer}.mlp.gate_proj.weight"].shape[0],
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.head_dim or target.hidden_size // config.num_attention_heads,
        rms_eps=config.rms_norm_eps,
        layers=target.n_layers,
        vocab_size=target.vocab_size,
        rope=rope,
        taps=tuple(found.taps),
        norm_before_residual=found.norm_before_residual,
        norm_before_fc=found.norm_before_fc,
        fc_norm=found.fc_norm,
        norm_output=found.norm_output,
    )
    part = Part(spec, tensors, DraftVocabulary.of_offsets(offsets, target.vocab_size))
    part.require_shapes(where)
    return part
