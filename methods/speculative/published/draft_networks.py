"""What published draft networks have in common: sizes of layers, draft ids, an embedding, the name of a verifier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from methods.engine.causal_layers import PROVEN_ROPE
from methods.engine.causal_lm import CausalLM
from methods.speculative.published.report import Report, other_name

_SAMPLED = 64  # rows of the embedding that are compared with the target's
_UNRELATED, _EQUAL = 0.5, 0.999  # cosines of embeddings

_OF_LLAMA = (  # of a published configuration, what a network's layer depends on
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
)


def layer_config(given: Mapping[str, Any], where: str, train: str) -> tuple[LlamaConfig, dict[str, Any]]:
    """The settings of a network's layers, and its rotary positions as transformers has them.

    Raises:
        ValueError: rotary positions that are not proven; ``train``: the command that trains a network instead.
    """
    config = LlamaConfig(**{key: given[key] for key in _OF_LLAMA if given.get(key) is not None})
    rope = dict(config.rope_parameters)  # type: ignore[arg-type]
    if rope.get("rope_type") not in PROVEN_ROPE:
        raise ValueError(
            f"{where} must have rotary positions that are proven ({', '.join(PROVEN_ROPE)}), got type "
            f"{rope.get('rope_type')}. Choose another network, or train one: {train}."
        )
    return config, rope


def note_verifier(report: Report) -> None:
    """Note that a network in the form of speculators names another model than the target."""
    verifier = ((report.found.config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    theirs, ours = (str(name).rstrip("/").rpartition("/")[2].lower() for name in (verifier, report.target.name))
    if verifier and theirs != ours:
        report.found.note(other_name(verifier, report.target))


def rows_of(tensors: Mapping[str, Tensor], key: str) -> int:
    """Rows of a tensor; 0 where it is missing."""
    return tensors[key].shape[0] if key in tensors and tensors[key].dim() else 0


def draft_ids(report: Report, tensors: Mapping[str, Tensor], vocab: int, draft: int) -> Tensor | None:
    """Offsets from draft ids to the target's, checked; None where both are the same."""
    offsets = tensors.get("d2t")
    if offsets is None:
        if draft != vocab and draft and vocab:
            report.add(f"d2t is missing, and lm_head.weight has {draft} rows for a vocabulary of {vocab}")
        return None
    if offsets.dim() != 1 or len(offsets) != draft:
        return None  # its shape is reported already
    ids = torch.arange(draft) + offsets.long()
    if draft and (int(ids.min()) < 0 or int(ids.max()) >= vocab):
        report.add(f"d2t leads to ids from {int(ids.min())} to {int(ids.max())} of a vocabulary of {vocab}")
    elif bool((ids.diff() <= 0).any()):
        report.add("d2t leads to repeated or unordered ids; each draft id stands for one id, in ascending order")
    elif draft < vocab and not bool(offsets.any()) and "t2d" not in tensors:
        report.add(f"d2t is zero throughout, so it was never filled: {draft} draft ids are not the first of {vocab}")
    else:
        _compare_t2d(report, tensors, ids, vocab)
    return offsets.long() if bool(offsets.any()) or draft < vocab else None


def _compare_t2d(report: Report, tensors: Mapping[str, Tensor], ids: Tensor, vocab: int) -> None:
    marked = tensors.get("t2d")
    if marked is not None and tuple(marked.shape) == (vocab,) and not torch.equal(marked.bool().nonzero()[:, 0], ids):
        report.add(f"t2d marks {int(marked.bool().sum())} ids that are not the {len(ids)} which d2t leads to")


def own_embedding(
    report: Report, tensors: Mapping[str, Tensor], target: CausalLM, key: str = "embed_tokens.weight"
) -> Tensor | None:
    """The stored embedding where it is not the target's; a file may hold a copy of the target's."""
    stored = tensors.get(key)
    if stored is None or tuple(stored.shape) != (target.vocab_size, target.hidden_size):
        return None
    ids = torch.linspace(0, target.vocab_size - 1, min(_SAMPLED, target.vocab_size)).long()
    ours = target.embed(ids.to(target.device)).float().cpu()
    cosine = float(torch.cosine_similarity(stored[ids].float(), ours, dim=-1).mean())
    if cosine >= _EQUAL:
        return None
    if cosine < _UNRELATED:
        report.add(f"its token embedding is that of another model (mean cosine with the target's {cosine:.2f})")
    else:
        report.found.note(f"its token embedding is its own (mean cosine with the target's {cosine:.3f})")
    return stored
