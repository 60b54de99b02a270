"""Verification rules: which drafted tokens are kept, and which token of the target follows them.

EXACT rules preserve the target's greedy text, or its distribution, for every draft. RELAXED rules keep more up to a
declared tolerance. All are vectorised over rows, loop at most over the levels of a tree, and never read from the
device. In the formulas p is the target's processed distribution after a node, q the distribution its children were
drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from methods.decoder import Guarantee
from methods.drafting import ABSENT, AcceptanceRule, Draft, Verification
from methods.engine.sampling import Sampling, argmax, draw, in_blocks, in_float
from methods.engine.token_tree import with_root

_TINY = 1e-30  # keeps quotients finite in float32


class ExactRule:
    """Rules that judge by the processed distribution alone."""

    guarantee: ClassVar[Guarantee] = Guarantee.EXACT

    def __call__(
        self, draft: Draft, logits: Float[Tensor, "B M V"], sampling: Sampling, rng: Generator
    ) -> Verification:
        return self.judge(draft, sampling.probs(logits), rng)

    def bonus(self, logits: Float[Tensor, "B V"], sampling: Sampling, rng: Generator) -> Int[Tensor, "B"]:
        return sampling.pick(logits, rng)

    def judge(self, draft: Draft, probs: Float[Tensor, "B M V"], rng: Generator) -> Verification:
        """Judge by probabilities: ``probs[:, 0]`` after the root, ``probs[:, 1 + i]`` after draft node i."""
        raise NotImplementedError


class Greedy(ExactRule):
    """Keep what is the target's argmax; the bonus is the argmax after it. Stern et al. 2018, arXiv 1811.03115, sec. 3.

    Without a draft and at a temperature it draws the bonus from p, so that it serves the baseline too.
    """

    def __call__(
        self, draft: Draft, logits: Float[Tensor, "B M V"], sampling: Sampling, rng: Generator
    ) -> Verification:
        if sampling.greedy:
            return follow(draft, argmax(logits))
        assert draft.tokens.shape[1] == 0, "the greedy rule cannot judge a draft at a temperature"
        return follow(draft, sampling.pick(logits, rng))

    def judge(self, draft: Draft, probs: Float[Tensor, "B M V"], rng: Generator) -> Verification:
        return follow(draft, argmax(probs))


class DeterministicTree(ExactRule):
    """Draw t ~ p after the node; descend if t is one of its children, else emit t.

    Equal in law to accepting each child c with probability p(c) in turn and removing it from p on rejection, the
    rule for drafts that were not drawn (q = 1): n-grams, retrieval, top-k trees.
    """

    def judge(self, draft: Draft, probs: Float[Tensor, "B M V"], rng: Generator) -> Verification:
        if draft.is_chain:
            return follow(draft, draw(probs, rng))
        return self._walk(draft, probs, rng)

    def _walk(self, draft: Draft, probs: Float[Tensor, "B M V"], rng: Generator) -> Verification:
        """As ``follow``, but draws only after the nodes on the path."""
        walk = Walk(draft)
        wanted = draw(values_at(probs, walk.node), rng)
        for _ in range(draft.max_depth):
            matches = walk.children() & (draft.tokens == wanted[:, None])
            moved = walk.descend(matches.any(1), matches.int().argmax(1))
            wanted = torch.where(moved, draw(values_at(probs, walk.node), rng), wanted)
        return walk.verification(wanted)


class ChainRejection(ExactRule):
    """Accept d with probability min(1, p(d) / q(d)); on the first rejection draw from norm(max(p - q, 0)).

    Leviathan et al. 2023, arXiv 2211.17192, alg. 1; Chen et al. 2023, arXiv 2302.01318, alg. 2. A draft without
    ``probs`` is judged as what it is, deterministic.
    """

    def judge(self, draft: Draft, probs: Float[Tensor, "B M V"], rng: Generator) -> Verification:
        if draft.probs is None:
            return DeterministicTree().judge(draft, probs, rng)
        assert draft.is_chain, "this rule is defined for chains"
        p, q = _of_tokens(probs[:, :-1], draft.tokens), _of_tokens(draft.probs, draft.tokens)
        luck = torch.rand(p.shape, dtype=p.dtype, device=p.device, generator=rng)
        accepted = _leading((luck * q < p) & (draft.tokens != ABSENT))
        return _chain_verdict(draft, accepted, _draw_residual(draft, probs, accepted, rng=rng))


class BlockRejection(ExactRule):
    """Judge the chain as a block: keep the longest prefix i with u_i <= h_i. Sun et al. 2024, arXiv 2403.10444, alg. 2.

    With w_0 = 1 and w_i = min(1, w_{i-1} p(d_i) / q(d_i)): S_i = sum_x max(w_i p - q, 0) after d_i,
    h_i = S_i / (S_i + 1 - w_i), at the end of the draft h = w; the bonus is drawn from norm(max(w_i p - q, 0)).
    Never keeps less on average than ``ChainRejection``.
    """

    def judge(self, draft: Draft, probs: Float[Tensor, "B M V"], rng: Generator) -> Verification:
        if draft.probs is None:
            return DeterministicTree().judge(draft, probs, rng)
        assert draft.is_chain, "a block is a chain"
        present = draft.tokens != ABSENT
        weight = self._weights(draft, probs, present)
        q = draft.probs * present[:, :, None]
        surplus = (weight[:, :-1, None] * probs[:, :-1] - q).clamp_(min=0).sum(-1)
        goes_on = torch.cat([present, torch.zeros_like(present[:, :1])], dim=1)
        surplus = torch.cat([surplus, torch.zeros_like(surplus[:, :1])], dim=1)
        odds = torch.where(goes_on, surplus / (surplus + 1 - weight).clamp(min=_TINY), weight)[:, 1:]
        luck = torch.rand(odds.shape, dtype=odds.dtype, device=odds.device, generator=rng)
        kept = (luck < odds) & present
        place = torch.arange(1, kept.shape[1] + 1, device=kept.device)
        accepted = torch.where(kept, place, 0).amax(1) if kept.shape[1] else kept.sum(1)
        scale = weight.gather(1, accepted[:, None]).clamp(min=_TINY).reciprocal()
        return _chain_verdict(draft, accepted, _draw_residual(draft, probs, accepted, scale, rng))

    @staticmethod
    def _weights(draft: Draft, probs: Tensor, present: Bool[Tensor, "B N"]) -> Float[Tensor, "B M"]:
        assert draft.probs is not None
        p, q = _of_tokens(probs[:, :-1], draft.tokens), _of_tokens(draft.probs, draft.tokens)
        weights = [torch.ones_like(probs[:, 0, 0])]
        for ratio in torch.where(present, p / q.clamp(min=_TINY), 0.0).unbind(1):
            weights.append((weights[-1] * ratio).clamp(max=1.0))
        return torch.stack(weights, dim=1)


class TreeWithReplacement(ExactRule):
    """Siblings drawn independently from q: try them in turn, p <- norm(max(p - q, 0)) after each rejection.

    Multi-round speculative sampling: Miao et al. 2024 (SpecInfer), arXiv 2305.09781, alg. 2.
    """

    masks_siblings = False

    def judge(self, draft: Draft, probs: Float[Tensor, "B M V"], rng: Generator) -> Verification:
        if draft.probs is None:
            return DeterministicTree().judge(draft, probs, rng)
        walk = Walk(draft)
        bonus = torch.zeros_like(walk.node)
        for _ in range(draft.max_depth):
            before = walk.alive
            found, column, rest = self._try_children(walk, draft, values_at(probs, walk.node), rng)
            bonus = torch.where(before & ~found, rest, bonus)
            walk.descend(found, column)
        return walk.verification(torch.where(walk.alive, draw(values_at(probs, walk.node), rng), bonus))

    def _try_children(
        self, walk: Walk, draft: Draft, p: Float[Tensor, "B V"], rng: Generator
    ) -> tuple[Bool[Tensor, "B"], Int[Tensor, "B"], Int[Tensor, "B"]]:
        """One level: rows with a child to keep, its column, and for the others a draw from what is left of p."""
        assert draft.probs is not None
        candidates = walk.children()
        rank = candidates.cumsum(1) * candidates
        left, left_mass = p, p.sum(1, keepdim=True)
        found, chosen = torch.zeros_like(walk.alive), torch.zeros_like(walk.node)
        gone: Tensor | None = None  # earlier siblings, which q has lost
        for turn in range(1, draft.max_width + 1):
            column = (rank == turn).int().argmax(1)
            tried = ((rank == turn).any(1) & ~found)[:, None]
            token = draft.tokens.gather(1, column[:, None]).clamp(min=0)
            q, q_mass = values_at(draft.probs, column), torch.ones_like(left_mass)
            if gone is not None:
                tried = tried & ~(gone == token).any(1, keepdim=True)  # an equal sibling was judged already
                q_mass = _mass_without(q, gone).clamp(min=_TINY)
            luck = torch.rand(left_mass.shape, dtype=p.dtype, device=p.device, generator=rng)
            kept = (luck * (q.gather(1, token) / q_mass) * left_mass < left.gather(1, token)) & tried
            share = torch.where(tried & ~kept, left_mass / q_mass, 0.0)
            left, left_mass = _subtract(left, q, share, fresh=turn == 1)
            if self.masks_siblings:
                gone = token if gone is None else torch.cat([gone, token], dim=1)
            chosen, found = torch.where(kept[:, 0], column, chosen), found | kept[:, 0]
        return found, chosen, _draw_left(left, left_mass, p, rng)


class TreeWithoutReplacement(TreeWithReplacement):
    """Siblings drawn without replacement: q loses every earlier sibling and is renormalised before it judges.

    Li et al. 2024 (EAGLE), arXiv 2401.15077, sec. 3.3; Jeon et al. 2024 (RSD), arXiv 2402.14160. Judging with the
    unmasked q has a bias of some hundredths in total variation, too small to notice in texts.
    """

    masks_siblings = True


class RelaxedRule:
    """Rules that keep every node which meets a criterion; the longest kept path wins, ties go to the likelier one.

    Probabilities are the target's at the sampling temperature (at 1 when greedy), without top-k and top-p.
    The bonus is the target's argmax, so a round that keeps nothing still makes a greedy step. Among equals the lower
    id is the likelier one, as it is for the argmax.
    """

    guarantee: ClassVar[Guarantee] = Guarantee.RELAXED

    def __call__(
        self, draft: Draft, logits: Float[Tensor, "B M V"], sampling: Sampling, rng: Generator
    ) -> Verification:
        exact = in_float(logits)
        scores = exact / (sampling.temperature or 1.0)
        behind = scores[:, :-1] if draft.is_chain else _behind_parents(scores, draft.parents)
        fits = self.fits(draft.tokens.clamp(min=0), behind) & (draft.tokens != ABSENT)
        return _longest(draft, fits, _of_tokens(behind, draft.tokens) - behind.logsumexp(-1), scores.argmax(-1))

    def bonus(self, logits: Float[Tensor, "B V"], sampling: Sampling, rng: Generator) -> Int[Tensor, "B"]:
        return in_float(logits).argmax(-1)

    def fits(self, tokens: Int[Tensor, "B N"], scores: Float[Tensor, "B N V"]) -> Bool[Tensor, "B N"]:
        """Which nodes meet the criterion, given the target's unnormalised log-probabilities after their parents."""
        raise NotImplementedError


class Typical(RelaxedRule):
    """p(d) > min(epsilon, delta * exp(-H(p))). Cai et al. 2024 (Medusa), arXiv 2401.10774, sec. 2.3.1.

    The reference code adds 1e-5 to p inside the entropy; this is the formula of the paper.
    """

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3) -> None:
        if not (0 <= epsilon <= 1 and delta >= 0):
            raise ValueError(
                f"Typical acceptance needs 0 <= epsilon <= 1 and delta >= 0, got epsilon={epsilon}, delta={delta}."
            )
        self.epsilon, self.delta = epsilon, delta

    def fits(self, tokens: Int[Tensor, "B N"], scores: Float[Tensor, "B N V"]) -> Bool[Tensor, "B N"]:
        log_probs = scores.log_softmax(-1)
        entropy = torch.special.entr(log_probs.exp()).sum(-1)
        bound = (self.delta * (-entropy).exp()).clamp(max=self.epsilon)
        return _of_tokens(log_probs, tokens).exp() > bound


class TopK(RelaxedRule):
    """d is among the target's k most likely tokens; k = 1 is exact. Stern et al. 2018, arXiv 1811.03115, sec. 5.1."""

    def __init__(self, k: int = 2) -> None:
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}. k=1 is the exact rule.")
        self.k = k

    def fits(self, tokens: Int[Tensor, "B N"], scores: Float[Tensor, "B N V"]) -> Bool[Tensor, "B N"]:
        own, places = _of_tokens(scores, tokens)[:, :, None], torch.arange(scores.shape[-1], device=scores.device)
        ahead = (scores > own) | ((scores == own) & (places < tokens[:, :, None]))
        return ahead.sum(-1) < self.k


class Distance(RelaxedRule):
    """|d - argmax p| <= epsilon, for ids on a scale (pixel intensities); 0 is exact. Stern et al. 2018, sec. 5.2."""

    def __init__(self, epsilon: int = 2) -> None:
        if epsilon < 0:
            raise ValueError(f"epsilon must be at least 0, got {epsilon}. epsilon=0 is the exact rule.")
        self.epsilon = epsilon

    def fits(self, tokens: Int[Tensor, "B N"], scores: Float[Tensor, "B N V"]) -> Bool[Tensor, "B N"]:
        return (tokens - scores.argmax(-1)).abs() <= self.epsilon


class TopBetaGap(RelaxedRule):
    """d is among the beta most likely and log p(top) - log p(d) <= tau. beta = 1 is exact.

    Xia et al. 2023 (SpecDec), arXiv 2203.16487, eq. 5-6.
    """

    def __init__(self, beta: int = 3, tau: float = 1.0) -> None:
        if beta < 1 or tau < 0:
            raise ValueError(
                f"TopBetaGap needs beta >= 1 and tau >= 0, got beta={beta}, tau={tau}. beta=1 is the exact rule."
            )
        self.top, self.tau = TopK(beta), tau

    def fits(self, tokens: Int[Tensor, "B N"], scores: Float[Tensor, "B N V"]) -> Bool[Tensor, "B N"]:
        close = scores.amax(-1) - _of_tokens(scores, tokens) <= self.tau
        return self.top.fits(tokens, scores) & close


class MinimumBlock(RelaxedRule):
    """At least ``length`` drafted tokens stay in each round, whatever ``rule`` says. Stern et al. 2018, sec. 5.3.

    Stern's block counts the first token of a round as well, so his length l is l - 1 here. Length 0 is ``rule`` itself.
    """

    def __init__(self, length: int, rule: RelaxedRule) -> None:
        if length < 0:
            raise ValueError(f"length must be at least 0, got {length}.")
        self.length, self.rule = length, rule

    def __call__(
        self, draft: Draft, logits: Float[Tensor, "B M V"], sampling: Sampling, rng: Generator
    ) -> Verification:
        assert draft.is_chain, "a minimum block is defined for chains"
        return super().__call__(draft, logits, sampling, rng)

    def fits(self, tokens: Int[Tensor, "B N"], scores: Float[Tensor, "B N V"]) -> Bool[Tensor, "B N"]:
        forced = torch.arange(tokens.shape[1], device=tokens.device) < self.length
        return self.rule.fits(tokens, scores) | forced


RULES: dict[str, type] = {
    "greedy": Greedy,
    "chain": ChainRejection,
    "block": BlockRejection,
    "tree_with_replacement": TreeWithReplacement,
    "tree_without_replacement": TreeWithoutReplacement,
    "deterministic_tree": DeterministicTree,
    "typical": Typical,
    "top_k": TopK,
    "distance": Distance,
    "top_beta_gap": TopBetaGap,
    "minimum_block": MinimumBlock,
}


def default_rule(
    sampling: Sampling, shape: Literal["chain", "tree"], drawn: bool, *, block: bool = False
) -> AcceptanceRule:
    """The exact rule for a draft.

    Args:
        sampling: greedy decoding needs no other rule.
        shape: of the drafts.
        drawn: whether it draws from a distribution it reports (``Draft.probs``).
        block: judge a drawn chain as a block, not token by token.
    """
    if sampling.greedy:
        return Greedy()
    if not drawn:
        return DeterministicTree()
    if shape == "tree":
        return TreeWithoutReplacement()
    return BlockRejection() if block else ChainRejection()


def rule_of_network(sampling: Sampling, tree: str, chain: bool, draw: bool, block: bool) -> AcceptanceRule:
    """The exact rule for the drafts of a network, by the options of its method.

    Args:
        sampling: see ``default_rule``.
        tree: the option, for the message.
        chain: whether that is a chain.
        draw, block: the options.

    Raises:
        ValueError: only a drawn chain can be judged as a block.
    """
    if block and not (chain and draw):
        raise ValueError(
            f"block=true needs tree=chain and draw=true, got tree={tree}, draw={draw}. Set method.tree=chain and "
            "method.draw=true, or method.block=false."
        )
    return default_rule(sampling, "chain" if chain else "tree", draw, block=block)


# -- walking down a tree ----------------------------------------------------------------------------------------------


def follow(draft: Draft, wanted: Int[Tensor, "B M"]) -> Verification:
    """Descend while a child is what its parent wants; ``wanted`` holds the target's token after every node."""
    if draft.is_chain:
        accepted = _leading(draft.tokens == wanted[:, :-1])
        return _chain_verdict(draft, accepted, wanted.gather(1, accepted[:, None])[:, 0])
    return follow_tree(draft, wanted)


def follow_tree(draft: Draft, wanted: Int[Tensor, "B M"]) -> Verification:
    """``follow`` for any shape; the chain's short cut is tested against it."""
    walk = Walk(draft)
    for _ in range(draft.max_depth):
        matches = walk.children() & (draft.tokens == wanted.gather(1, walk.node[:, None]))
        walk.descend(matches.any(1), matches.int().argmax(1))
    return walk.verification(wanted.gather(1, walk.node[:, None])[:, 0])


def walk_on_host(tokens: Sequence[int], parents: Sequence[int] | None, wanted: Sequence[int]) -> list[int]:
    """``follow`` for one row that is on the host: the columns kept, in order.

    Args:
        parents: columns of the parents; None: a chain.
        wanted: the target's token after the root and after every node.
    """
    kept: list[int] = []
    if parents is None:
        for column, token in enumerate(tokens):
            if token != wanted[column]:
                break
            kept.append(column)
        return kept
    last, want = -1, wanted[0]
    for column, token in enumerate(tokens):  # children come after their parents
        if token == want and parents[column] == last:
            kept.append(column)
            last, want = column, wanted[column + 1]
    return kept


class Walk:
    """The path of every row from its root down: its current node, and whether it still moves."""

    def __init__(self, draft: Draft) -> None:
        rows, device = draft.tokens.shape[0], draft.tokens.device
        self.draft = draft
        self.node = torch.zeros(rows, dtype=torch.long, device=device)  # 0 is the root, 1 + i draft node i
        self.alive = torch.ones(rows, dtype=torch.bool, device=device)
        self._path: list[Tensor] = []

    def children(self) -> Bool[Tensor, "B N"]:
        """Present children of the rows' current nodes."""
        present = self.draft.tokens != ABSENT
        return (self.draft.parents + 1 == self.node[:, None]) & present & self.alive[:, None]

    def descend(self, found: Bool[Tensor, "B"], column: Int[Tensor, "B"]) -> Bool[Tensor, "B"]:
        """Move the rows that found a child to its column; the others stop."""
        self.alive = self.alive & found
        self._path.append(torch.where(self.alive, column, ABSENT))
        self.node = torch.where(self.alive, column + 1, self.node)
        return self.alive

    def verification(self, bonus: Int[Tensor, "B"]) -> Verification:
        empty = self.node.new_empty(len(self.node), 0)
        path = torch.stack(self._path, dim=1) if self._path else empty
        return Verification(path, (path != ABSENT).sum(1), bonus)


def _longest(
    draft: Draft, fits: Bool[Tensor, "B N"], log_probs: Float[Tensor, "B N"], best: Int[Tensor, "B M"]
) -> Verification:
    """The longest path of fitting nodes from the root; ties go to the larger sum of ``log_probs``."""
    parents = with_root(draft.parents)
    fits, step = F.pad(fits, (1, 0), value=True), F.pad(torch.ones_like(draft.parents), (1, 0))
    gain = F.pad(log_probs.clamp(min=-1 / _TINY), (1, 0))  # finite: a rule may keep what the target forbids
    alive, depth, likelihood = fits, torch.zeros_like(step), torch.zeros_like(gain)
    for _ in range(draft.max_depth):
        alive = fits & alive.gather(1, parents)
        depth = step + depth.gather(1, parents)
        likelihood = gain + likelihood.gather(1, parents)
    accepted = torch.where(alive, depth, 0).amax(1)
    end = torch.where(alive & (depth == accepted[:, None]), likelihood, -torch.inf).argmax(1)
    path = _path_to(end, parents, accepted, draft.max_depth)
    return Verification(path, accepted, best.gather(1, end[:, None])[:, 0])


def _path_to(
    end: Int[Tensor, "B"], parents: Int[Tensor, "B M"], length: Int[Tensor, "B"], levels: int
) -> Int[Tensor, "B P"]:
    upward = end.new_full((len(end), levels), ABSENT)
    for level in range(levels):
        upward[:, level] = end - 1
        end = parents.gather(1, end[:, None])[:, 0]
    order = length[:, None] - 1 - torch.arange(levels, device=end.device)
    return torch.where(order >= 0, upward.gather(1, order.clamp(min=0)), ABSENT)


# -- small pieces -----------------------------------------------------------------------------------------------------


def _leading(kept: Bool[Tensor, "B N"]) -> Int[Tensor, "B"]:
    return kept.long().cumprod(1).sum(1)


def _chain_verdict(draft: Draft, accepted: Int[Tensor, "B"], bonus: Int[Tensor, "B"]) -> Verification:
    columns = torch.arange(draft.tokens.shape[1], device=accepted.device)
    return Verification(torch.where(columns < accepted[:, None], columns, ABSENT), accepted, bonus)


def _of_tokens(values: Float[Tensor, "B N V"], tokens: Int[Tensor, "B N"]) -> Float[Tensor, "B N"]:
    return values.gather(2, tokens.clamp(min=0)[:, :, None])[:, :, 0]


def values_at(values: Float[Tensor, "B n V"], place: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
    """Row ``place[b]`` of each row's distributions; a view where all of them are one and the same."""
    if values.shape[1] == 1 or values.stride(1) == 0:
        return values[:, 0]
    return values[torch.arange(len(place), device=place.device), place]


def _draw_residual(
    draft: Draft,
    probs: Float[Tensor, "B M V"],
    column: Int[Tensor, "B"],
    scale: Float[Tensor, "B 1"] | None = None,
    rng: Generator | None = None,
) -> Int[Tensor, "B"]:
    """Draw from max(p - scale q, 0) at a chain's end in front of ``column``; from p where the draft has ended."""
    assert draft.probs is not None and rng is not None
    nodes = draft.tokens.shape[1]
    if nodes == 0:
        return draw(probs[:, 0], rng)
    inside = column.clamp(max=nodes - 1)
    present = (column[:, None] < nodes) & (draft.tokens.gather(1, inside[:, None]) != ABSENT)
    share = present.to(probs.dtype)
    share = share if scale is None else share * scale
    p = values_at(probs, column)
    left, mass = _subtract(p, values_at(draft.probs, inside), share)
    return _draw_left(left, mass, p, rng)


def _subtract(
    p: Float[Tensor, "B V"],
    q: Float[Tensor, "B V"],
    share: Float[Tensor, "B 1"],
    fresh: bool = True,
) -> tuple[Float[Tensor, "B V"], Float[Tensor, "B 1"]]:
    """max(p - share q, 0) and its mass. q need not be masked: a rejected sibling has nothing left to lose.

    Args:
        fresh: make a new tensor; otherwise p is overwritten.
    """
    left = torch.addcmul(p, q, share, value=-1.0) if fresh else p.addcmul_(q, share, value=-1.0)
    left.clamp_(min=0)
    return left, left.sum(1, keepdim=True)


def _draw_left(
    left: Float[Tensor, "B V"], mass: Float[Tensor, "B 1"], p: Float[Tensor, "B V"], rng: Generator
) -> Int[Tensor, "B"]:
    """One draw per row; from p where rounding left nothing (p = q, and a rejection that had no probability).

    Overwrites ``left``: where vocabularies are large, new memory costs more than sums.
    """
    return draw(left.addcmul_(p, (mass <= 0).to(p.dtype)), rng)


def _mass_without(q: Float[Tensor, "B V"], gone: Int[Tensor, "B k"]) -> Float[Tensor, "B 1"]:
    """Mass of q beside the tokens ``gone``: a sum without them, for 1 - q(gone) loses it where q is almost sure."""
    blocks = in_blocks(q)
    size = blocks.shape[2]
    touched = gone // size
    inside = blocks.gather(1, touched[:, :, None].expand(-1, -1, size))
    places = touched[:, :, None] * size + torch.arange(size, device=q.device)
    is_gone = (places[:, :, :, None] == gone[:, None, None, :]).any(-1)
    whole = blocks[:1] if q.stride(0) == 0 else blocks  # rows that share one q are summed once
    sums = whole.sum(2).expand(len(q), -1).scatter(1, touched, inside.masked_fill(is_gone, 0.0).sum(2))
    return sums.sum(1, keepdim=True)


def _behind_parents(scores: Float[Tensor, "B M V"], parents: Int[Tensor, "B N"]) -> Float[Tensor, "B N V"]:
    return scores.gather(1, (parents + 1)[:, :, None].expand(-1, -1, scores.shape[-1]))
