"""Verification rules that are WRONG: they look like the exact ones and change the distribution.

Each stood in a published implementation. They are kept so that the tests and the losslessness laboratory can show
that they would notice. No decoder uses them, no config can name them.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from methods.decoder import Draft, Verdict
from methods.engine.sampling import draw
from methods.speculative.verify import ExactRule, TreeWithReplacement, _behind, _Walk


class IndependentPaths(ExactRule):
    """WRONG. Every child is compared with a draw of its own; the first that matches is kept.

    What "take the longest path" amounts to when each path of a tree is verified by itself (nucleus mode of Medusa and
    of REST): with k children, one of them is kept more often than the target would emit it.
    """

    def judge(self, draft: Draft, probs: Float[Tensor, "B M V"], rng: Generator) -> Verdict:
        walk = _Walk(draft)
        for _ in range(draft.max_depth):
            behind = _behind(probs, walk.node)
            own_draws = draw(behind[:, None].expand(-1, draft.tokens.shape[1], -1), rng)
            matches = walk.children() & (draft.tokens == own_draws)
            walk.descend(matches.any(1), matches.int().argmax(1))
        return walk.verdict(draw(_behind(probs, walk.node), rng))


class UnmaskedWithoutReplacement(TreeWithReplacement):
    """WRONG. Siblings drawn without replacement, each judged by the q that still contains its earlier siblings.

    The rule for draws with replacement applied to draws without: a bias of about 0.015 that no eye can see.
    """


class UncorrectedRejection(ExactRule):
    """WRONG. Accepts as the exact rule does, but draws the token behind a rejection from p instead of max(p - q, 0)."""

    def judge(self, draft: Draft, probs: Float[Tensor, "B M V"], rng: Generator) -> Verdict:
        assert draft.probs is not None
        walk = _Walk(draft)
        for _ in range(draft.max_depth):
            candidates = walk.children()
            column = candidates.int().argmax(1)
            token = draft.tokens.gather(1, column[:, None]).clamp(min=0)
            p, q = _behind(probs, walk.node), _behind(draft.probs, column)
            luck = torch.rand(token.shape, dtype=p.dtype, device=p.device, generator=rng)
            kept = (luck * q.gather(1, token) < p.gather(1, token))[:, 0] & candidates.any(1)
            walk.descend(kept, column)
        return walk.verdict(draw(_behind(probs, walk.node), rng))
