"""Whole rounds over drafts of several levels, where every outcome has a known probability.

Target and drafter keep few tokens after each prefix (top-k), so the distributions after all prefixes of a draft can be
computed beforehand, and the joint distribution of the first ``levels + 1`` tokens is a product of them. The drafts and
the target's rows depend on the prefix, as they do in decoding: only so is block verification more than the chain rule,
and only so are the lower levels of a tree judged at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from bench.lossless.sampling import Arrangement
from methods.drafting import Draft
from methods.engine.sampling import draw

_LEAST = 1e-7  # a lower probability is rounding, or the floor that a drafter gives to every token
_ROWS = 8192  # rounds judged at once
Distributions = Callable[[list[int]], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Tables:
    """p and q after every prefix of up to ``levels`` tokens.

    A token is a number among those that p or q contains after its own prefix; rules compare siblings only, so ids mean
    nothing to them. Prefixes are in breadth-first order: that of row r followed by token t is row r W + 1 + t.

    Attributes:
        ids: [rows, W] ids of the tokens; -1 where a prefix has fewer.
        target, draft: [rows, W] probabilities; 0 in all places after a prefix that nothing can draft or write.
        levels: of the drafts.
    """

    ids: Int[Tensor, "rows W"]
    target: Float[Tensor, "rows W"]
    draft: Float[Tensor, "rows W"]
    levels: int

    @property
    def width(self) -> int:
        return self.ids.shape[1]

    def after(self, row: Int[Tensor, "*b"], token: Int[Tensor, "*b"]) -> Int[Tensor, "*b"]:
        return row * self.width + 1 + token

    def joint(self) -> Float[Tensor, "n"]:
        """Probability of each continuation of ``levels + 1`` tokens, float64, in the order of ``continuations``."""
        mass, start = torch.ones(1, dtype=torch.double), 0
        for _ in range(self.levels + 1):
            rows = self.target[start : start + len(mass)].double()
            start += len(mass)
            mass = (mass[:, None] * rows / rows.sum(1, keepdim=True).clamp(min=_LEAST)).flatten()
        return mass

    def continuations(self) -> Iterator[list[int]]:
        """Ids of each continuation; -1 in those that cannot be."""
        for tokens in itertools.product(range(self.width), repeat=self.levels + 1):
            row, found = 0, []
            for token in tokens:
                found.append(int(self.ids[row, token]))
                row = row * self.width + 1 + token
            yield found


def tables_of(distributions: Distributions, levels: int) -> Tables:
    """Ask for p and q, over the whole vocabulary, after every prefix that either of them allows.

    Args:
        distributions: p and q after a prefix of token ids.
        levels: of the drafts.
    """
    found: dict[tuple[int, ...], tuple[Tensor, Tensor, list[int]]] = {}
    reached: list[tuple[int, ...]] = [()]
    for prefix in reached:  # grows while it is walked: breadth first
        p, q = (_cleaned(each) for each in distributions(list(prefix)))
        allowed = ((p > 0) | (q > 0)).nonzero()[:, 0].tolist()
        found[prefix] = p, q, allowed
        if len(prefix) < levels:
            reached += [(*prefix, token) for token in allowed]
    width = max(len(allowed) for _, _, allowed in found.values())
    count = sum(width**level for level in range(levels + 1))
    ids, target, draft = torch.full((count, width), -1), torch.zeros(count, width), torch.zeros(count, width)
    rows: dict[tuple[int, ...], int] = {(): 0}
    for prefix, (p, q, kept) in found.items():
        row, n = rows[prefix], len(kept)
        ids[row, :n], target[row, :n], draft[row, :n] = torch.tensor(kept), p[kept].float(), q[kept].float()
        rows |= {(*prefix, token): row * width + 1 + place for place, token in enumerate(kept)}
    return Tables(ids, target, draft, levels)


def _cleaned(probs: Float[Tensor, "V"]) -> Float[Tensor, "V"]:
    kept = torch.where(probs < _LEAST, 0.0, probs.cpu().double())
    return kept / kept.sum()


@torch.inference_mode()
def rounds(
    tables: Tables,
    arrangement: Arrangement,
    draws: int,
    rng: Generator,
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[Int[Tensor, "n"], float]:
    """Counts of the first ``levels + 1`` tokens, in the order of ``Tables.continuations``, and drafted tokens kept.

    A round that ends earlier is completed by the target alone.

    Returns:
        The counts, and the mean number of drafted tokens that a round keeps.
    """
    horizon = tables.levels + 1
    counts = torch.zeros(tables.width**horizon, dtype=torch.long)
    kept = 0
    for start in range(0, draws, _ROWS):
        rows = min(_ROWS, draws - start)
        draft, behind = offer(tables, arrangement, rows, rng)
        verdict = arrangement.rule.judge(draft, tables.target[behind], rng)
        path = draft.tokens.gather(1, verdict.path.clamp(min=0))
        row, outcome = torch.zeros(rows, dtype=torch.long), torch.zeros(rows, dtype=torch.long)
        for place in range(horizon):
            token = torch.where(verdict.accepted == place, verdict.bonus, draw(tables.target[row], rng))
            if place < tables.levels:
                token = torch.where(verdict.accepted > place, path[:, place], token)
                row = tables.after(row, token)
            outcome = outcome * tables.width + token
        counts += torch.bincount(outcome, minlength=len(counts))
        kept += int(verdict.accepted.sum())
        progress(rows)
    return counts, kept / draws


def offer(tables: Tables, arrangement: Arrangement, rows: int, rng: Generator) -> tuple[Draft, Int[Tensor, "B M"]]:
    """Independent drafts, every node with as many children, and the prefix behind the root and each node."""
    children = arrangement.children
    prefix, column = torch.zeros(rows, 1, dtype=torch.long), torch.full((rows, 1), -1)
    behind, tokens, parents, probs = [prefix], list[Tensor](), list[Tensor](), list[Tensor]()
    for _ in range(tables.levels):
        q = tables.draft[prefix]
        chosen = _children(q, arrangement, rng)
        first = sum(level.shape[1] for level in tokens)
        tokens.append(chosen)
        parents.append(column.repeat_interleave(children, 1))
        probs.append(q.repeat_interleave(children, 1))
        column = torch.arange(first, first + chosen.shape[1]).expand(rows, -1)
        prefix = tables.after(prefix.repeat_interleave(children, 1), chosen)
        behind.append(prefix)
    drawn = torch.cat(probs, 1) if arrangement.kind != "top" else None
    if children == 1:
        return Draft.chain(torch.cat(tokens, 1), drawn), torch.cat(behind, 1)
    depth = [tables.levels] * rows
    tree = Draft(torch.cat(tokens, 1), torch.cat(parents, 1), drawn, depths=depth, levels=tables.levels, width=children)
    return tree, torch.cat(behind, 1)


def _children(q: Float[Tensor, "B m W"], arrangement: Arrangement, rng: Generator) -> Int[Tensor, "B n"]:
    """The children of all nodes of a level, those of one node beside each other."""
    kind, count = arrangement.kind, arrangement.children
    if kind in ("top", "top_as_drawn"):
        return q.topk(count).indices.flatten(1)
    different = kind == "without_replacement"
    chosen = torch.multinomial(q.flatten(0, 1), count, replacement=not different, generator=rng)
    return chosen.view(len(q), -1)
