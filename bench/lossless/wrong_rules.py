"""Verification rules that are WRONG: they look like the exact ones and change the distribution.

Those of ``CONTROLS`` but the last are from published implementations. All are negative controls of the tests and of
``bench lossless``. Each claims ``EXACT`` and is not. No decoder uses them and no config can name them. Those of
``DEEP_CONTROLS`` give the first token the right distribution: only a test of several tokens can reject them.

A rule is wrong for the draft that ``CONTROLS`` names: "top" offers the most likely tokens of q, "top_as_drawn" the
same with q attached as if they had been drawn from it. Mean total variation to the target, exact, over 60 random pairs
(p, q) of 5 tokens, 3 siblings: 0.19, 0.44, 0.53, 0.03, 0.12.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from methods.drafting import Draft, Verification
from methods.engine.sampling import draw
from methods.speculative.verification import (
    BlockRejection,
    ChainRejection,
    ExactRule,
    TreeWithoutReplacement,
    TreeWithReplacement,
    Walk,
    values_at,
)


class IndependentPaths(ExactRule):
    """WRONG. Every child is compared with its own draw; the first that matches is kept.

    This is "take the longest path" with each path of a tree verified separately (nucleus mode of Medusa and of REST):
    with k children, one of them is kept more often than the target would emit it.
    """

    def judge(self, draft: Draft, probs: Float[Tensor, "B M V"], rng: Generator) -> Verification:
        walk = Walk(draft)
        for _ in range(draft.max_depth):
            after = values_at(probs, walk.node)
            own_draws = draw(after[:, None].expand(-1, draft.tokens.shape[1], -1), rng)
            matches = walk.children() & (draft.tokens == own_draws)
            walk.descend(matches.any(1), matches.int().argmax(1))
        return walk.verification(draw(values_at(probs, walk.node), rng))


class ArgmaxAsDrawn(ChainRejection):
    """WRONG for a draft that is q's argmax with q's softmax attached instead of no ``probs``.

    The argmax is proposed with certainty, so it must be kept with probability p; this keeps it with p / q and then
    draws from a residual without the tokens whose p is below q.
    """


class TopAsDrawn(TreeWithReplacement):
    """WRONG for siblings that are the top of q with q attached: the same mistake over several children."""


class UnmaskedWithoutReplacement(TreeWithReplacement):
    """WRONG. Siblings drawn without replacement, each judged by the q that still contains its earlier siblings.

    The rule for draws with replacement applied to draws without it: a small bias.
    """


class UncorrectedRejection(ExactRule):
    """WRONG. Accepts as the exact rule does, but draws the token after a rejection from p instead of max(p - q, 0)."""

    def judge(self, draft: Draft, probs: Float[Tensor, "B M V"], rng: Generator) -> Verification:
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
        return walk.verification(draw(values_at(probs, walk.node), rng))


CONTROLS: dict[str, tuple[type[ExactRule], Literal["top", "top_as_drawn", "without_replacement", "chain"]]] = {
    "independent_paths": (IndependentPaths, "top"),
    "argmax_as_drawn": (ArgmaxAsDrawn, "top_as_drawn"),
    "top_as_drawn": (TopAsDrawn, "top_as_drawn"),
    "unmasked_without_replacement": (UnmaskedWithoutReplacement, "without_replacement"),
    "uncorrected_rejection": (UncorrectedRejection, "chain"),
}
"""Name -> the rule and the draft it is wrong for."""


class BlockWithChainResidual(BlockRejection):
    """WRONG from the second token on. Keeps what block verification keeps, then draws from max(p - q, 0).

    The residual of a block is max(w p - q, 0), where w is the weight of the kept prefix; the chain's has w = 1.
    """

    def judge(self, draft: Draft, probs: Float[Tensor, "B M V"], rng: Generator) -> Verification:
        assert draft.probs is not None
        right = super().judge(draft, probs, rng)
        p, length = values_at(probs, right.accepted), draft.tokens.shape[1]
        ended = (right.accepted == length)[:, None]
        q = values_at(draft.probs, right.accepted.clamp(max=length - 1))
        left = torch.where(ended, p, (p - q).clamp(min=0))
        return replace(right, bonus=draw(torch.where(left.sum(1, keepdim=True) > 0, left, p), rng))


class JudgedBehindRoot(TreeWithoutReplacement):
    """WRONG from the second token on. All levels of a tree are judged by the target's distribution after the root.

    What a decoder does that reads the logits of the wrong row, or whose tree mask hides the path.
    """

    def judge(self, draft: Draft, probs: Float[Tensor, "B M V"], rng: Generator) -> Verification:
        return super().judge(draft, probs[:, :1].expand_as(probs), rng)


DEEP_CONTROLS: dict[str, tuple[type[ExactRule], Literal["chain", "without_replacement"]]] = {
    "block_with_chain_residual": (BlockWithChainResidual, "chain"),
    "judged_behind_root": (JudgedBehindRoot, "without_replacement"),
}
"""Right in the first token, wrong in the next: name -> the rule and the draft it is wrong for."""
