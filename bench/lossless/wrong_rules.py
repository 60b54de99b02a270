"""Verification rules that are WRONG: they look like the exact ones and change the distribution.

All but the last stood in published implementations. They are kept so that the tests and the losslessness laboratory
can show that they would notice. Each claims ``EXACT``, as its models did, and none keeps the claim. No decoder uses
them, no config can name them: they are not in ``verify.RULES``.

A rule is wrong together with a draft. ``CONTROLS`` says which: "top" offers the most likely tokens of q,
"top_as_drawn" the same with q attached as if they had been drawn from it, the others what they say. Mean total
variation to the target, exact, over 60 random pairs (p, q) of 5 tokens, 3 siblings: 0.19, 0.44, 0.53, 0.03, 0.12.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from methods.drafting import Draft, Verdict
from methods.engine.sampling import draw
from methods.speculative.verification import ChainRejection, ExactRule, TreeWithReplacement, Walk, values_at


class IndependentPaths(ExactRule):
    """WRONG. Every child is compared with a draw of its own; the first that matches is kept.

    What "take the longest path" amounts to when each path of a tree is verified by itself (nucleus mode of Medusa and
    of REST): with k children, one of them is kept more often than the target would emit it.
    """

    def judge(self, draft: Draft, probs: Float[Tensor, "B M V"], rng: Generator) -> Verdict:
        walk = Walk(draft)
        for _ in range(draft.max_depth):
            behind = values_at(probs, walk.node)
            own_draws = draw(behind[:, None].expand(-1, draft.tokens.shape[1], -1), rng)
            matches = walk.children() & (draft.tokens == own_draws)
            walk.descend(matches.any(1), matches.int().argmax(1))
        return walk.verdict(draw(values_at(probs, walk.node), rng))


class ArgmaxAsDrawn(ChainRejection):
    """WRONG for a draft that is q's argmax with q's softmax attached, instead of no ``probs`` at all.

    The argmax comes with certainty, so it has to be kept with probability p; this keeps it with p / q and then draws
    from a residual in which tokens below q can never appear.
    """


class TopAsDrawn(TreeWithReplacement):
    """WRONG for siblings that are the top of q with q attached: the same mistake over several children."""


class UnmaskedWithoutReplacement(TreeWithReplacement):
    """WRONG. Siblings drawn without replacement, each judged by the q that still contains its earlier siblings.

    The rule for draws with replacement applied to draws without: a bias of some hundredths that no eye can see.
    """


class UncorrectedRejection(ExactRule):
    """WRONG. Accepts as the exact rule does, but draws the token behind a rejection from p instead of max(p - q, 0)."""

    def judge(self, draft: Draft, probs: Float[Tensor, "B M V"], rng: Generator) -> Verdict:
        assert draft.probs is not None
        walk = Walk(draft)
        for _ in range(draft.max_depth):
            candidates = walk.children()
            column = candidates.int().argmax(1)
            token = draft.tokens.gather(1, column[:, None]).clamp(min=0)
            p, q = values_at(probs, walk.node), values_at(draft.probs, column)
            luck = torch.rand(token.shape, dtype=p.dtype, device=p.device, generator=rng)
            kept = (luck * q.gather(1, token) < p.gather(1, token))[:, 0] & candidates.any(1)
            walk.descend(kept, column)
        return walk.verdict(draw(values_at(probs, walk.node), rng))


CONTROLS: dict[str, tuple[type[ExactRule], Literal["top", "top_as_drawn", "without_replacement", "chain"]]] = {
    "independent_paths": (IndependentPaths, "top"),
    "argmax_as_drawn": (ArgmaxAsDrawn, "top_as_drawn"),
    "top_as_drawn": (TopAsDrawn, "top_as_drawn"),
    "unmasked_without_replacement": (UnmaskedWithoutReplacement, "without_replacement"),
    "uncorrected_rejection": (UncorrectedRejection, "chain"),
}
"""Name -> the rule and the draft it is wrong for."""
