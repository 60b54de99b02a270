"""A draft tree of the most probable paths, grown level by level (EAGLE-2, Li et al. 2024, arXiv 2406.16858, sec. 4).

On each level the best nodes by the product of their probabilities get children, and the best of all candidates become
the draft. A node's score is below its parent's, so no node is without its parent. On a GPU sizes are fixed and nothing
is read from the device; on a CPU, where that costs nothing, a tree may end at a level whose paths are unlikely.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

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
        batch, k = len(logits), self._k
        scores, tokens = (found[:, 0] for found in self._candidates(vocabulary, logits, triton))
        parents, columns = self._roots.expand(batch, -1), self._columns.expand(batch, -1)
        every = [(scores, tokens, parents)]
        beam, levels = Beam(0, tokens, None), 1
        for level in range(self.levels - 1):
            if self._ends(scores):
                break
            levels += 1
            gained, tokens = self._candidates(vocabulary, expand(beam), triton)
            scores = _below(scores)[:, :, None].minimum(scores[:, :, None] + gained).flatten(1)
            start, tokens = k + level * k * k, tokens.expand(-1, k, -1).flatten(1)
            every.append((scores, tokens, columns.repeat_interleave(k, 1)))
            if level + 2 < self.levels:
                chosen = top_candidates(scores, k)  # of equal ones the first, where the kernels find them
                scores = scores.gather(1, chosen)
                beam, columns = Beam(level + 1, tokens.gather(1, chosen), chosen // k), chosen + start
        scores, tokens, parents = (torch.cat(parts, 1) for parts in zip(*every, strict=True))
        return self._best(scores, tokens, parents, levels, passes - self.levels + levels)

    def _ends(self, scores: Float[Tensor, "B n"]) -> bool:
        """Whether paths of these scores are too unlikely for another level."""
        return self._least > -math.inf and bool((scores.amax(1) < self._least).all())

    def _candidates(
        self, vocabulary: DraftVocabulary, logits: Float[Tensor, "B m v"], triton: bool
    ) -> tuple[Float[Tensor, "B m k"], Int[Tensor, "B m k"]]:
        gained, places = top_log_probs(logits, self._k, triton)
        return gained, vocabulary.tokens(places)

    def _best(
        self,
        scores: Float[Tensor, "B C"],
        tokens: Int[Tensor, "B C"],
        parents: Int[Tensor, "B C"],
        levels: int,
        passes: int,
    ) -> Draft:
        kept = top_candidates(scores, min(self.nodes, scores.shape[1])).sort(1).values
        above = parents.gather(1, kept)
        columns = torch.searchsorted(kept, above.clamp(min=0))
        columns = torch.where(above < 0, above, columns)
        return tree_of(tokens.gather(1, kept), columns, scores.gather(1, kept), levels, self._k, passes)


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
