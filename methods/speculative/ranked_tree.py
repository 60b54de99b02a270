"""A draft tree of the most probable paths, grown level by level (EAGLE-2, Li et al. 2024, arXiv 2406.16858, sec. 4).

On each level the best nodes by the product of their probabilities get children, and the best of all candidates become
the draft. A node's score is below its parent's, so no node is without its parent. On a GPU sizes are fixed and nothing
is read from the device; on a CPU, where that costs nothing, a tree may end at a level whose paths are unlikely.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from methods.drafting import Draft
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.engine.sampling import top_candidates, top_log_probs


@dataclass(frozen=True, slots=True)
class Beam:
    """The nodes of a level that get children.

    Attributes:
        level: number of the level, 0 the first.
        tokens: [B, k] ids.
        source: [B, k] which node of the last beam is the parent of each; None on the first level.
    """

    level: int
    tokens: Int[Tensor, "B k"]
    source: Int[Tensor, "B k"] | None


class TorchPaths:
    """The candidates of a growing tree, by torch's operators.

    Args:
        roots, columns: [B, k] -1, and 0, 1, ..

    Attributes:
        beam: of the last level; there is none of one that was added as the last.
        scores: of the beam: log-probabilities of the paths to its nodes.
    """

    beam: Beam
    scores: Float[Tensor, "B k"]

    def __init__(self, roots: Int[Tensor, "B k"], columns: Int[Tensor, "B k"], vocabulary: DraftVocabulary) -> None:
        self._roots, self._columns, self._vocabulary = roots, columns, vocabulary
        self._levels: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, gained: Float[Tensor, "B m k"], places: Int[Tensor, "B m k"], last: bool) -> None:
        """A level: the children of the beam's nodes.

        Args:
            gained: log-probabilities of the children of each node; ``m = 1``: they share theirs, or it is the first
                level.
            places: of the children in the draft vocabulary.
            last: nothing grows after it.
        """
        tokens, k, level = self._vocabulary.tokens(places), gained.shape[2], len(self._levels)
        if not level:
            self.scores, self.beam = gained[:, 0], Beam(0, tokens[:, 0], None)
            self._levels.append((self.scores, self.beam.tokens, self._roots))
            return
        scores = _below(self.scores)[:, :, None].minimum(self.scores[:, :, None] + gained).flatten(1)
        tokens = tokens.expand(-1, k, -1).flatten(1)
        self._levels.append((scores, tokens, self._columns.repeat_interleave(k, 1)))
        if not last:
            chosen = top_candidates(scores, k)  # of equal ones the first, where the kernels find them
            self.scores = scores.gather(1, chosen)
            self.beam = Beam(level, tokens.gather(1, chosen), chosen // k)
            self._columns = chosen + (k + (level - 1) * k * k)

    def best(self, nodes: int) -> tuple[Int[Tensor, "B N"], Int[Tensor, "B N"], Float[Tensor, "B N"]]:
        """Tokens, parents and probabilities of the best candidates, in the order in which they were added."""
        scores, tokens, parents = (torch.cat(parts, 1) for parts in zip(*self._levels, strict=True))
        kept = top_candidates(scores, min(nodes, scores.shape[1])).sort(1).values
        above = parents.gather(1, kept)
        columns = torch.searchsorted(kept, above.clamp(min=0))
        return tokens.gather(1, kept), torch.where(above < 0, above, columns), scores.gather(1, kept).exp()


class KernelPaths:
    """``TorchPaths`` by Triton's kernels: one of each level, and one of the best nodes.

    Args:
        levels: most levels.
    """

    beam: Beam
    scores: Float[Tensor, "B k"]

    def __init__(self, batch: int, k: int, levels: int, vocabulary: DraftVocabulary) -> None:
        from methods.engine import triton_trees

        self._kernels: Any = triton_trees
        self._ids = None if vocabulary.full else vocabulary.ids
        self._room = triton_trees.Candidates.room(batch, k + (levels - 1) * k * k, vocabulary.ids.device)
        self._above: Any = None
        self._count, self._level = 0, 0

    def add(self, gained: Float[Tensor, "B m k"], places: Int[Tensor, "B m k"], last: bool) -> None:
        """See ``TorchPaths``."""
        k, above = gained.shape[2], self._above
        found = self._kernels.next_level(above, gained, places, self._ids, self._room, self._count, not last)
        if found is not None:
            self.scores = found.scores
            self.beam = Beam(self._level, found.tokens, None if above is None else found.source)
        self._above, self._count, self._level = found, self._count + (k if above is None else k * k), self._level + 1

    def best(self, nodes: int) -> tuple[Int[Tensor, "B N"], Int[Tensor, "B N"], Float[Tensor, "B N"]]:
        """See ``TorchPaths``."""
        found: tuple[Tensor, Tensor, Tensor] = self._kernels.best_nodes(self._room, self._count, nodes)
        return found


class RankedTree:
    """How such a tree grows.

    Args:
        nodes: of the tree: the best of all candidates.
        levels: most levels.
        top_k: candidates of a node, and nodes of a level that get children.
        least: on a CPU, log-probability of a level's best path below which no further level grows, in any row.
    """

    def __init__(self, nodes: int, levels: int, top_k: int, device: torch.device, least: float = -math.inf) -> None:
        self.nodes, self.levels, self._k = nodes, levels, top_k
        self._least = least if device.type == "cpu" else -math.inf
        self._roots = torch.full((1, top_k), -1, device=device)
        self._columns = torch.arange(top_k, device=device)[None]

    def grow(
        self,
        vocabulary: DraftVocabulary,
        logits: Float[Tensor, "B 1 v"],
        expand: Callable[[Beam], Float[Tensor, "B m v"]],
        passes: int,
        triton: bool = False,
    ) -> Draft:
        """The tree of every row.

        Args:
            vocabulary: of the logits.
            logits: after the root.
            expand: the logits after the nodes of a beam, or one row that all of them share; called for each level but
                the last.
            passes: of the draft network for all levels; the draft reports one less for each that did not grow.
            triton: Triton's kernels find the candidates.
        """
        paths, levels = self._paths(len(logits), vocabulary, triton), 1
        paths.add(*top_log_probs(logits, self._k, triton), last=False)
        while levels < self.levels and not self._ends(paths.scores):
            gained, places = top_log_probs(expand(paths.beam), self._k, triton)
            levels += 1
            paths.add(gained, places, last=levels == self.levels)
        tokens, parents, gains = paths.best(self.nodes)
        passes += levels - self.levels
        return Draft(tokens, parents, levels=levels, width=self._k, passes=passes, gains=gains)

    def _paths(self, batch: int, vocabulary: DraftVocabulary, triton: bool) -> TorchPaths | KernelPaths:
        if triton:
            from methods.engine import triton_trees  # needs a package that not every machine has

            if triton_trees.takes(self._k, self.levels):
                return KernelPaths(batch, self._k, self.levels, vocabulary)
        return TorchPaths(self._roots.expand(batch, -1), self._columns.expand(batch, -1), vocabulary)

    def _ends(self, scores: Float[Tensor, "B n"]) -> bool:
        """Whether paths of these scores are too unlikely for another level."""
        return self._least > -math.inf and bool((scores.amax(1) < self._least).all())


def tree_of(
    tokens: Int[Tensor, "B N"],
    parents: Int[Tensor, "B N"],
    scores: Float[Tensor, "B N"],
    levels: int,
    width: int,
    passes: int,
) -> Draft:
    """The draft of such a tree; ``scores``: log-probabilities of the paths to its nodes."""
    return Draft(tokens, parents, levels=levels, width=width, passes=passes, gains=scores.exp())


def require_sizes(
    nodes: int, levels: int, top_k: int, vocabulary: int, drawn: bool, kinds: tuple[str, str] = ("dynamic", "static")
) -> None:
    """Refuse sizes that make no tree; ``kinds``: what the option ``tree`` calls it, and a kind that can be drawn.

    Raises:
        ValueError: a tree without a node on some level, or with more nodes than there are candidates.
    """
    most = top_k + (levels - 1) * top_k**2
    if drawn or levels < 1 or not 1 <= top_k <= vocabulary or not levels <= nodes <= most:
        raise ValueError(
            f"tree={kinds[0]} needs depth >= 1, 1 <= top_k <= {vocabulary} (the draft vocabulary), depth <= nodes <= "
            f"top_k + (depth - 1) top_k^2 and draw=false, got depth={levels}, top_k={top_k}, nodes={nodes}, "
            f"draw={drawn}. Correct method.depth, method.top_k and method.nodes, or set method.tree={kinds[1]} to draw."
        )


def _below(scores: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """The next smaller numbers: the highest score of a sure child (log q = 0), so that its parent stays ahead."""
    return scores.nextafter(torch.full_like(scores, -torch.inf))
