"""Speculative sampling: a cheaper model drafts, the target verifies.

Leviathan et al. 2023, arXiv 2211.17192, alg. 1; Chen et al. 2023, arXiv 2302.01318, alg. 2. The draft is a chain
of gamma tokens from a model with the target's vocabulary or another one (``universal``: Timor et al. 2025, arXiv
2502.05202), or from the target itself with sub-layers left out (Zhang et al. 2023, arXiv 2309.08168). Nothing has to be
trained.

Published: 2 to 3.4x with T5-XXL and T5-small, 1.92x to 2.46x with Chinchilla 70B and a 4B draft (gamma 4);
1.5 to 1.8x over Spec-Bench with Vicuna-7B and a 68M draft. Differences: batched rows; the drafter catches up
with what was committed in one pass instead of two; drafting may stop early when the drafter is unsure
(``confidence``), decided for the whole batch.

Command: ``python -m bench method=speculative_sampling method.draft_model=NAME``
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.engine.vocabulary import ForeignModel
from methods.speculative.draft_model import DraftModel, require_vocabulary, weights_of
from methods.speculative.loop import SpeculativeDecoder
from methods.speculative.universal import Way, foreign_drafter, way_of
from methods.speculative.verification import default_rule


class SpeculativeSampling(SpeculativeDecoder):
    """Speculative sampling with a draft model or a layer-skipped view of the target.

    Args:
        gamma: tokens drafted per round.
        draft_model: the model that drafts; None: the target without the sub-layers below.
        skip_attention, skip_mlp: 0-based layers whose sub-layer the draft leaves out, if there is no ``draft_model``.
        confidence: stop drafting once no row's most likely draft token has this probability; 0 never stops.
        block: at a temperature, judge the draft as a block (Sun et al. 2024, arXiv 2403.10444), not token by token.
        vocabulary: how a draft model with other tokens drafts: ``tli`` by the tokens that both models have, ``slem``
            through the text; ``same`` refuses it. ``auto``: same where the vocabularies are equal, else tli where the
            draft model has at least half of the target's tokens, else slem.

    Raises:
        ValueError: no drafter named, vocabularies that do not fit, or an option out of range.
    """

    continuous_batching = True
    paper = "Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318"
    needs = "a draft model"

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        gamma: int = 4,
        draft_model: CausalLM | ForeignModel | None = None,
        skip_attention: Collection[int] = (),
        skip_mlp: Collection[int] = (),
        confidence: float = 0.0,
        block: bool = False,
        vocabulary: Literal["auto", "same", "tli", "slem"] = "auto",
    ) -> None:
        if gamma < 1 or not 0.0 <= confidence < 1.0:
            raise ValueError(
                f"speculative_sampling needs gamma >= 1 and 0 <= confidence < 1, got gamma={gamma}, "
                f"confidence={confidence}."
            )
        self._way = _way(draft_model, vocabulary)
        if isinstance(draft_model, ForeignModel):
            assert self._way is not None
            drafter: DraftModel = foreign_drafter(draft_model, self._way, target.vocab_size, gamma, confidence)
        else:
            draft = _drafter(target, draft_model, skip_attention, skip_mlp)
            drafter = DraftModel(draft, target.vocab_size, gamma, confidence)
        rule = default_rule(sampling, "chain", drawn=self._way != "slem", block=block)
        super().__init__(target, sampling, drafter, rule)
        self._draft = draft_model

    @classmethod
    def needs_draft_model(cls, settings: Mapping[str, Any]) -> bool:
        """Not where layers of the target are named that the draft leaves out."""
        skipped = settings.get("skip_attention") or settings.get("skip_mlp")
        return not skipped and super().needs_draft_model(settings)

    def memory(self) -> dict[str, int | None]:
        """Memory beside the target's: the weights of the draft model."""
        return dict(weights_of(self._draft.model if isinstance(self._draft, ForeignModel) else self._draft))

    def stats(self) -> dict[str, Any]:
        """How a draft model with another vocabulary drafts, and how many tokens it shares with the target."""
        if self._way is None or not isinstance(self._draft, ForeignModel):
            return {}
        return {"vocabulary": self._way, "shared_tokens": len(self._draft.shared())}


def _way(draft: CausalLM | ForeignModel | None, vocabulary: str) -> Way | None:
    """How the drafts become tokens of the target; None where they are."""
    if isinstance(draft, ForeignModel):
        if vocabulary == "same":
            raise ValueError(
                "method.vocabulary=same needs a draft model with the target's tokens, got one with others. Set "
                "method.vocabulary=auto."
            )
        return way_of(draft) if vocabulary == "auto" else "tli" if vocabulary == "tli" else "slem"
    if vocabulary in ("tli", "slem"):
        raise ValueError(
            f"method.vocabulary={vocabulary} needs a draft model with its tokenizer, got "
            f"{'none' if draft is None else 'a model alone'}. Set method.draft_model=HUB_ID_OR_PATH, or "
            "method.vocabulary=auto."
        )
    return None


def _drafter(
    target: CausalLM, draft: CausalLM | None, skip_attention: Collection[int], skip_mlp: Collection[int]
) -> CausalLM:
    if draft is None and not (skip_attention or skip_mlp):
        raise ValueError(
            "speculative_sampling needs a drafter, got none. Name one (method.draft_model=HUB_ID_OR_PATH), or layers "
            "of the target to leave out (method.skip_attention=[..] method.skip_mlp=[..])."
        )
    if draft is None:
        return target.skip(skip_attention, skip_mlp)
    require_vocabulary(draft, target)
    return draft
