"""Token trees: from parents to depths and to which node sees which.

A pass over a tree scores M = N + 1 nodes: node 0 is the root (the last committed token), node 1 + i is draft node i. A
chain is the tree in which every node is the parent of the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

ABSENT = -1  # in tokens: no node here; in paths: no further node; in parents: the root
Nodes = Int[Tensor, "B M"]  # ids of a pass, the root in front
Parents = Int[Tensor, "B N"] | None  # draft columns of the parents, -1 for the root; None: a chain


def with_root(parents: Int[Tensor, "B N"]) -> Int[Tensor, "B M"]:
    """Parents as nodes of the pass; the root is its own parent."""
    root = parents.new_zeros(parents.shape[0], 1)
    return torch.cat([root, parents + 1], dim=1)


def ancestors(parents: Int[Tensor, "B N"], levels: int) -> Bool[Tensor, "B M M"]:
    """[b, i, j]: node j is on the path from the root to node i, both ends included.

    Args:
        parents: draft columns of the parents, -1 for the root.
        levels: an upper bound of the depth; the closure takes log2(levels) products.
    """
    nodes = with_root(parents)
    batch, count = nodes.shape
    reach = torch.eye(count, device=nodes.device).expand(batch, count, count).clone()
    reach.scatter_(2, nodes.unsqueeze(2), 1.0)
    for _ in range(closure_steps(levels)):
        reach = torch.bmm(reach, reach).clamp_(max=1.0)
    return reach.bool()


def ancestors_on_host(parents: Sequence[Sequence[int]]) -> Bool[Tensor, "B M M"]:
    """``ancestors`` on a CPU, where a few operators take longer: a node sees itself and what its parent sees."""
    lines: list[bytearray] = []
    count = len(parents[0]) + 1
    for row in parents:
        first = len(lines) + 1  # the place of node 0 among the lines, and one more: parents are counted from -1
        lines.append(bytearray([1, *[0] * (count - 1)]))
        for node, parent in enumerate(row, start=1):
            line = lines[first + parent].copy()
            line[node] = 1
            lines.append(line)
    return torch.frombuffer(bytearray().join(lines), dtype=torch.bool).view(len(parents), count, count)


def places_on_host(parents: Sequence[Sequence[int]], roots: Sequence[int]) -> list[list[int]]:
    """Positions of the nodes of each row, from that of its root: [b, i] is ``roots[b]`` and the depth of node i."""
    places = []
    for row, root in zip(parents, roots, strict=True):
        line = [root]
        for parent in row:
            line.append(line[parent + 1] + 1)
        places.append(line)
    return places


def closure_steps(levels: int) -> int:
    """Products that the closure over so many levels takes."""
    return max(levels - 1, 0).bit_length()


def depths(reach: Bool[Tensor, "B M M"]) -> Int[Tensor, "B M"]:
    """Nodes between each node and the root; 0 for the root."""
    return reach.sum(2) - 1


@dataclass(frozen=True, slots=True)
class Shape:
    """A tree that is the same in every round: which candidate of which node each node is. Nodes are breadth first.

    Attributes:
        parents: column of each node's parent, -1 for the root.
        ranks: each node is its parent's candidate of this rank, 0 the most likely.
        level_ends: nodes on the first level, on the first two, and so on.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    level_ends: tuple[int, ...]

    @classmethod
    def of_children(cls, counts: Sequence[Sequence[int]]) -> Shape:
        """Build a tree from numbers of children.

        Args:
            counts: ``counts[l][i]``: children of the i-th node on level l; level 0 is the root alone. Nodes after the
                last one named have none.

        Raises:
            ValueError: a level that names more nodes than the one before has, or that adds none.
        """
        parents: list[int] = []
        ranks: list[int] = []
        ends = [0]
        level = [-1]
        for children in counts:
            if len(children) > len(level) or min(children, default=0) < 0 or sum(children) < 1:
                raise ValueError(
                    "Each level must have at most one number of children per node, none below 0, not all 0, got "
                    f"{list(children)} for {len(level)} nodes. Correct the tree."
                )
            for parent, count in zip(level, children, strict=False):
                parents += [parent] * count
                ranks += range(count)
            level = list(range(ends[-1], len(parents)))
            ends.append(len(parents))
        return cls(tuple(parents), tuple(ranks), tuple(ends[1:]))

    @classmethod
    def chosen(
        cls, setting: str, given: str | list[list[int]], trees: Mapping[str, list[list[int]]], most: int
    ) -> Shape:
        """A tree by its name, or by numbers of children.

        Args:
            setting: its name, for messages.
            most: children that a node can have.

        Raises:
            ValueError: an unknown name, a tree without nodes, or one that is too wide.
        """
        if isinstance(given, str) and given not in trees:
            raise ValueError(
                f"{setting} must be {', '.join(trees)} or numbers of children, e.g. [[3],[2,1]], got {given}."
            )
        shape = cls.of_children(trees[given] if isinstance(given, str) else given)
        if not 1 <= shape.width <= most:
            raise ValueError(
                f"Nodes must have 1 to {most} children, the tokens that can be proposed, got {shape.width} with "
                f"{setting}={given}. Name a tree with nodes, or a narrower one."
            )
        return shape

    @property
    def width(self) -> int:
        """Most children a node has."""
        return max(self.ranks, default=-1) + 1


def trie(paths: Iterable[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Token sequences merged by their common beginnings: tokens, and columns of the parents (-1 the root).

    Nodes are in the order in which they are first needed, so children come after parents.
    """
    columns: dict[tuple[int, int], int] = {}
    for path in paths:
        parent = -1
        for token in path:
            parent = columns.setdefault((parent, token), len(columns))
    return [token for _, token in columns], [parent for parent, _ in columns]
