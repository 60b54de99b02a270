"""The static tree of heads that each propose a list: which candidate of which head is worth a node.

Cai et al. 2024 (Medusa), arXiv 2401.10774, sec. 2.3.3: measure on held-out text how often a head's candidate of each
rank is right, and add node after node, always the one most likely to be kept. The paper's value of a node is the
product of the accuracies along its path, as if heads were right independently of each other. They are not: where text
is easy, all of them are right. So the rank of the right token is recorded here for every head at every held-out
position, and a node's value is the share of positions at which its whole path was right. That is the number of tokens
the node adds to a step of the measured text, and where heads are independent it is the paper's product.

Paths are written as in Medusa: ``(0, 2)`` is the third candidate of the second head below the first candidate of the
first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from methods.engine.token_tree import Shape
from methods.speculative.budget import Costs

RANKS = 10
"""Candidates of a head that are looked at; the rank of a token that is none of them is this number."""

Path = tuple[int, ...]


TREES: dict[str, tuple[Path, ...]] = {
    # 63 nodes, 10 + 28 + 23 + 2, the best first: medusa_choices.py of the reference code, found for Vicuna 7B, and what
    # Hydra and Spec-Bench use. A node is written as its ranks in one word.
    "mc_sim_7b_63": tuple(
        tuple(map(int, node))
        for node in re.split(
            " ",
            "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 "
            "005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070",
        )
    )
}
"""Name -> published paths."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Nodes in the order in which they are worth adding, no node before its parent.

    Attributes:
        paths: of the nodes.
        values: how often each node is kept, per step; None where not measured.
    """

    paths: tuple[Path, ...]
    values: tuple[float, ...] | None = None

    def first(self, nodes: int) -> Tree:
        """The best ``nodes`` of them, fewer where there are fewer."""
        return Tree(self.paths[:nodes], None if self.values is None else self.values[:nodes])

    def within(self, levels: int) -> Tree:
        """Without the nodes that need more than ``levels`` heads."""
        kept = [place for place, path in enumerate(self.paths) if len(path) <= levels]
        values = None if self.values is None else tuple(self.values[place] for place in kept)
        return Tree(tuple(self.paths[place] for place in kept), values)

    @property
    def levels(self) -> int:
        return max(map(len, self.paths), default=0)

    @property
    def width(self) -> int:
        """Candidates needed of a head."""
        return 1 + max(max(path) for path in self.paths)

    @property
    def tokens_per_step(self) -> float | None:
        """Committed per pass of the target on the text it was measured on: the bonus, and the nodes that are kept."""
        return None if self.values is None else 1.0 + sum(self.values)

    def gains(self) -> list[float] | None:
        """The values in the order of ``shape``."""
        if self.values is None:
            return None
        of = dict(zip(self.paths, self.values, strict=True))
        return [of[path] for path in self._ordered()]

    def _ordered(self) -> list[Path]:
        return sorted(self.paths, key=lambda path: (len(path), path))

    def shape(self) -> Shape:
        """Breadth first, siblings by rank."""
        ordered = self._ordered()
        column = {path: place for place, path in enumerate(ordered)}
        parents = tuple(column[path[:-1]] if len(path) > 1 else -1 for path in ordered)
        ends = tuple(sum(len(path) <= level for path in ordered) for level in range(1, self.levels + 1))
        return Shape(parents, tuple(path[-1] for path in ordered), ends)


def search(ranks: Int[Tensor, "n P"], most: int = 256) -> Tree:
    """The greedy search: add the node that is kept most often, until there are ``most`` or none was ever right.

    No node is kept more often than its parent, so the order of adding them is their order by value. Ties go to the
    shorter path, then the smaller ranks. A head that was never right still proposes its first candidate.

    Args:
        ranks: for every position, the rank of the right token among each head's candidates; ``RANKS``: none of them.
    """
    reached = torch.ones(len(ranks), dtype=torch.bool)
    found: list[tuple[int, int, Path]] = []
    for level in range(1, ranks.shape[1] + 1):
        reached = reached & (ranks[:, level - 1].cpu() < RANKS)
        paths, counts = torch.unique(ranks[:, :level].cpu()[reached], dim=0, return_counts=True)
        found += [(-count, level, tuple(path)) for path, count in zip(paths.tolist(), counts.tolist(), strict=True)]
    best = sorted(found)[:most] or [(0, 1, (0,))]
    return Tree(tuple(path for _, _, path in best), tuple(-count / max(1, len(ranks)) for count, _, _ in best))


def accuracies(ranks: Int[Tensor, "n P"], judged: Bool[Tensor, "n P"]) -> list[list[float]]:
    """Medusa's table: how often each head's candidate of each rank is right, independent of the other heads."""
    hits = (ranks[:, :, None] == torch.arange(RANKS, device=ranks.device)) & judged[:, :, None]
    shares = hits.sum(0) / judged.sum(0).clamp(min=1)[:, None]
    return [[round(float(share), 4) for share in head] for head in shares]


def named(paths: Iterable[Sequence[int]]) -> Tree:
    """A tree given by its paths.

    Raises:
        ValueError: no paths, a rank below 0, or a node whose parent is missing.
    """
    given = [tuple(path) for path in paths]
    wrong = [
        path
        for place, path in enumerate(given)
        if not path or min(path) < 0 or path in given[:place] or (len(path) > 1 and path[:-1] not in given[:place])
    ]
    if wrong or not given:
        raise ValueError(
            "tree must be different paths of ranks from 0 on, each after its parent, got "
            f"{[list(path) for path in given]} (wrong: {[list(path) for path in wrong]}). An example: "
            "tree=[[0],[1],[0,0]]."
        )
    return Tree(tuple(given))


def planned(tree: Tree, costs: Costs) -> Tree:
    """The part of a measured tree that pays on its text, and half as much again for easier texts, no level deeper.

    Args:
        tree: with values.
        costs: of passes; ``draft``: of drafting all of the tree. Each of its levels is taken for the same share.
    """
    assert tree.values is not None, "only a measured tree can be planned"
    level_cost = costs.draft / tree.levels
    best, best_speed, tokens, levels = 1, 0.0, 1.0, 0
    for nodes, (path, value) in enumerate(zip(tree.paths, tree.values, strict=True), start=1):
        tokens, levels = tokens + value, max(levels, len(path))
        speed = tokens / (costs.time(1 + nodes) + level_cost * levels)
        if speed > best_speed:
            best, best_speed = nodes, speed
    return tree.within(tree.first(best).levels).first(best + (best + 1) // 2)
