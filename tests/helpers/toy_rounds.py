"""The vectorised rules on the models of ``tests.helpers.enumeration``: many rounds at once, counted by their output."""

from __future__ import annotations

from typing import Literal

import torch
from scipy.stats import chisquare
from torch import Generator, Tensor

from methods.drafting import ABSENT, Draft, Verification
from tests.helpers.enumeration import Law, Model

Offering = Literal["with_replacement", "without_replacement", "top", "top_as_drawn"]


class Tables:
    """Conditional distributions of every prefix up to ``depth`` as rows of a table; a prefix is a row number."""

    def __init__(self, model: Model, vocab: int, depth: int) -> None:
        prefixes: list[tuple[int, ...]] = [()]
        for prefix in prefixes:  # grows while it is walked: breadth first, so row r has children r * vocab + 1 ...
            if len(prefix) < depth:
                prefixes += [(*prefix, token) for token in range(vocab)]
        self.vocab = vocab
        self.probs = torch.tensor([[float(x) for x in model(prefix)] for prefix in prefixes], dtype=torch.double)

    def after(self, row: Tensor, token: Tensor) -> Tensor:
        return row * self.vocab + 1 + token


def rounds(
    p: Model, q: Model, vocab: int, depth: int, children: int, rows: int, offering: Offering, rng: Generator
) -> tuple[Draft, Tensor]:
    """A draft of ``depth`` levels with ``children`` per node, and the target's logits behind every node."""
    target, drafter = Tables(p, vocab, depth), Tables(q, vocab, depth)
    prefix = torch.zeros(rows, 1, dtype=torch.long)  # of the nodes of one level
    column = torch.full((rows, 1), -1)
    behind, tokens, parents, probs = [prefix], [], [], []
    for _ in range(depth):
        dists = drafter.probs[prefix]
        chosen = _offer(dists, children, offering, rng).flatten(1)
        parents.append(column.repeat_interleave(children, dim=1))
        probs.append(dists.repeat_interleave(children, dim=1))
        first = sum(level.shape[1] for level in tokens)
        tokens.append(chosen)
        column = torch.arange(first, first + chosen.shape[1]).expand(rows, -1)
        prefix = target.after(prefix.repeat_interleave(children, dim=1), chosen)
        behind.append(prefix)
    q_probs = None if offering == "top" else torch.cat(probs, 1)
    draft = _draft(torch.cat(tokens, 1), torch.cat(parents, 1), q_probs, depth, children)
    return draft, target.probs[torch.cat(behind, 1)].log()


def _offer(dists: Tensor, children: int, offering: Offering, rng: Generator) -> Tensor:
    if offering.startswith("top"):
        return dists.sort(dim=-1, descending=True, stable=True).indices[..., :children]
    flat = dists.reshape(-1, dists.shape[-1])
    drawn = torch.multinomial(flat, children, replacement=offering == "with_replacement", generator=rng)
    return drawn.view(*dists.shape[:-1], children)


def _draft(tokens: Tensor, parents: Tensor, probs: Tensor | None, depth: int, children: int) -> Draft:
    if children == 1:
        return Draft.chain(tokens, probs)
    return Draft(tokens, parents, probs, depths=[depth] * len(tokens), levels=depth, width=children)


def as_tree(draft: Draft) -> Draft:
    """A chain that does not say it is one: the rules then take their general path."""
    return Draft(draft.tokens, draft.parents, draft.probs, draft.sizes, draft.sizes, levels=draft.max_depth, width=1)


def emissions(draft: Draft, verification: Verification, vocab: int) -> dict[tuple[int, ...], int]:
    """How often each sequence (kept tokens, then the bonus) was emitted."""
    kept = draft.tokens.gather(1, verification.path.clamp(min=0))
    emitted = torch.cat(
        [torch.where(verification.path == ABSENT, vocab, kept), torch.full_like(kept[:, :1], vocab)], dim=1
    )
    emitted.scatter_(1, verification.accepted[:, None], verification.bonus[:, None])
    found, counts = emitted.unique(dim=0, return_counts=True)
    return {
        tuple(token for token in row if token != vocab): n
        for row, n in zip(found.tolist(), counts.tolist(), strict=True)
    }


def p_value(counts: dict[tuple[int, ...], int], law: Law) -> float:
    """Chi-square of the counts against the law; 0 where something was emitted that cannot be."""
    if any(n and sequence not in law for sequence, n in counts.items()):
        return 0.0
    total = sum(counts.values()) / float(sum(law.values()))  # 32-bit probabilities sum to 1 only nearly
    cells = sorted((float(chance) * total, counts.get(sequence, 0)) for sequence, chance in law.items())
    pooled: list[tuple[float, int]] = []
    for expected, seen in cells:  # from the rarest on, so that every cell of the test expects at least 5
        if pooled and pooled[-1][0] < 5:
            expected, seen = expected + pooled[-1][0], seen + pooled[-1][1]
            pooled.pop()
        pooled.append((expected, seen))
    if len(pooled) == 1:
        return 1.0
    return float(chisquare([seen for _, seen in pooled], [expected for expected, _ in pooled]).pvalue)
