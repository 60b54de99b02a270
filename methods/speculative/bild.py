"""Big Little Decoder: a little model writes while it is sure, and the big one takes over elsewhere and corrects it.

Kim et al. 2023, arXiv 2302.07863. Fallback: the little model writes greedily until the probability of its most likely
token is below ``fallback``; there the big model takes over. It scores all pending tokens in one pass. Rollback: at the
first of them whose cross-entropy under the big model is above ``rollback``, the text is cut and continued with the big
model's own token (sec. 3). The text is a mixture of both models, so its quality must be checked. No training is needed.

Published, on one T4 at batch 1, with mT5 and T5, small and large: 1.85 times the speed without loss and 2.12 times at a
loss of one point (BLEU on IWSLT 2017 and WMT 2014 de-en, ROUGE-L on XSum and CNN/DailyMail). Thresholds of the authors'
code: fallback 0.6, rollback 5 (2 to 5 work), at most 10 pending tokens.

Differences: the first token of a text is the big model's; the little model stops at the end of a sequence; each row of
a batch hands over where it is unsure itself, while the others write on.

Command: ``python -m bench model=multi30k_4_4 dataset=multi30k method=bild method.draft_model=NAME``
"""

from __future__ import annotations

from jaxtyping import Bool, Float, Int
from torch import Tensor, stack, tensor, where

from methods.decoder import Guarantee
from methods.drafting import ABSENT, Context, Draft
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling, argmax
from methods.speculative.draft_model import DraftModel, require_vocabulary, weights_of
from methods.speculative.loop import SpeculativeDecoder
from methods.speculative.verification import RelaxedRule


class Rollback(RelaxedRule):
    """-log p(d) <= threshold under the big model."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def fits(self, tokens: Int[Tensor, "B N"], scores: Float[Tensor, "B N V"]) -> Bool[Tensor, "B N"]:
        own = scores.gather(2, tokens[:, :, None])[:, :, 0]
        return scores.logsumexp(-1) - own <= self.threshold


class LittleModel(DraftModel):
    """Writes greedily, each row until it is unsure, at its end, or at ``most`` tokens."""

    def __init__(self, model: CausalLM, vocab_size: int, most: int, fallback: float) -> None:
        super().__init__(model, vocab_size, most, confidence=0.0)
        self.fallback = fallback

    def propose(self, context: Context) -> Draft:
        logits = self._catch_up(context)
        sizes, writing = [0] * len(logits), [True] * len(logits)
        columns: list[Tensor] = []
        passes = 1
        while True:
            token, sure = argmax(logits), logits.float().softmax(-1).amax(-1) >= self.fallback
            written, is_sure = stack([token, sure.long()]).tolist()  # who hands over is decided token by token
            writing = [on and bool(yes) for on, yes in zip(writing, is_sure, strict=True)]
            if not any(writing):
                break
            columns.append(where(tensor(writing, device=token.device), token, ABSENT))
            sizes = [size + on for size, on in zip(sizes, writing, strict=True)]
            writing = [on and new not in self.model.eos_ids for on, new in zip(writing, written, strict=True)]
            if len(columns) == self.nodes or not any(writing):
                break
            logits = self._next(token)
            passes += 1
        tokens = stack(columns, dim=1) if columns else context.root.new_empty(len(logits), 0)
        return Draft.chain(tokens, sizes=sizes, passes=passes)


class Bild(SpeculativeDecoder):
    """Big Little Decoder; greedy, and RELAXED.

    Args:
        target: the big model.
        sampling: must be greedy.
        draft_model: the little model, with the target's vocabulary.
        fallback: the big model takes over where the little one's most likely token is less probable.
        rollback: most cross-entropy of a pending token under the big model, in nats.
        most: pending tokens after which the big model takes over in any case.

    Raises:
        ValueError: no little model, one of another vocabulary, sampling at a temperature, or an option out of range.
    """

    guarantee = Guarantee.RELAXED
    continuous_batching = True
    greedy_only = True
    paper = "Kim et al. 2023, arXiv 2302.07863"
    needs = "a draft model"

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        draft_model: CausalLM | None = None,
        fallback: float = 0.6,
        rollback: float = 5.0,
        most: int = 10,
    ) -> None:
        if not 0 <= fallback <= 1 or rollback < 0 or most < 1:
            raise ValueError(
                f"bild needs 0 <= fallback <= 1, rollback >= 0 and most >= 1, got fallback={fallback}, "
                f"rollback={rollback}, most={most}. The published ones are 0.6, 5 and 10."
            )
        if not sampling.greedy:
            raise ValueError(
                f"bild must be greedy, got temperature={sampling.temperature}. Set sampling.temperature=0, or use "
                "method=speculative_sampling."
            )
        if draft_model is None:
            raise ValueError(
                "bild needs a little model with the target's vocabulary, got none. Name one: "
                "method.draft_model=HUB_ID_OR_FOLDER."
            )
        require_vocabulary(draft_model, target)
        little = LittleModel(draft_model, target.vocab_size, most, fallback)
        super().__init__(target, sampling, little, Rollback(rollback))
        self._own = weights_of(draft_model)

    def memory(self) -> dict[str, int | None]:
        return dict(self._own)
