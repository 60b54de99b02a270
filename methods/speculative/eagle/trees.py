"""The drafts of EAGLE: a chain, a tree of fixed shape, a tree shaped by the network's confidence.

All grow level by level: the logits after the nodes of a level name their children, and one pass of the draft network
over those children that have children themselves yields the features after them. Sizes are fixed, so nothing is read
from the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from methods.drafting import Context, Draft
from methods.engine.sampling import Sampling, argmax, in_float, top_candidates
from methods.engine.token_tree import Shape
from methods.speculative.eagle.network import Network, Reader

TREES: dict[str, list[list[int]]] = {
    # 25 nodes, 4 + 8 + 8 + 3 + 2 on five levels: the tree in the authors' code for version 1.
    "paper": [[4], [3, 2, 2, 1], [3, 2, 2, 1], [3], [2]],
    # 7 nodes, for hardware on which nodes cost time.
    "small": [[3], [2, 1], [1]],
}
"""Name -> numbers of children, as ``methods.engine.token_tree.Shape.of_children`` reads them."""

_FLOOR = 1e-9  # probability that any token of the draft vocabulary keeps when it is drawn from


@runtime_checkable
class Growth(Protocol):
    """How a tree grows from the feature after the root.

    Attributes:
        nodes: of the tree.
        guesses: pairs that the network reads for it.
        levels: of the tree.
    """

    nodes: int
    guesses: int
    levels: int

    def grow(self, reader: Reader, feature: Float[Tensor, "B 1 D"], context: Context) -> Draft:
        """One tree for every row."""
        ...


class Chain:
    """One path of the most likely tokens, or of drawn ones.

    Args:
        gamma: nodes.
        draw: draw each token instead of taking the most likely one.
    """

    def __init__(self, gamma: int, draw: bool) -> None:
        self.nodes, self.guesses, self.levels, self._draw = gamma, gamma - 1, gamma, draw

    def grow(self, reader: Reader, feature: Float[Tensor, "B 1 D"], context: Context) -> Draft:
        network, drawn = reader.network, self._draw and not context.sampling.greedy
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        for level in range(self.levels):
            logits, feature = network.logits(feature)
            if drawn:
                chances = _chances(logits, context.sampling)
                best = _draw_different(chances, 1, context)[..., 0]
                probs.append(_everywhere(chances, network))
            else:
                best = argmax(logits)
            tokens.append(network.vocabulary.tokens(best))
            if level + 1 < self.levels:
                feature = reader.guess(feature, tokens[-1], level)
        return Draft.chain(torch.cat(tokens, 1), torch.cat(probs, 1) if drawn else None, passes=self.levels)


class Level:
    """One level of a fixed tree: which nodes it has and which of them have children.

    Args:
        shape: the tree.
        number: of the level, 0 the first.
        open_columns: columns of the nodes with children on the levels above, in the order in which they were guessed;
            the last ``above`` of them are parents of this level.
        above: how many that are; 1, the root, for the first level.
    """

    def __init__(
        self, shape: Shape, number: int, open_columns: Sequence[int], above: int, device: torch.device
    ) -> None:
        start, end = (0, *shape.level_ends)[number : number + 2]
        parents = list(open_columns[len(open_columns) - above :]) if number else [-1]
        inner = [column for column in range(start, end) if column in shape.parents]
        self.start, self.end, self.inner = start, end, inner
        self.width = max(shape.ranks[start:end]) + 1
        of = [parents.index(shape.parents[column]) for column in range(start, end)]
        self.parents = torch.tensor(of, device=device)
        self.ranks = torch.tensor(shape.ranks[start:end], device=device)
        self.open = torch.tensor([column - start for column in inner], dtype=torch.long, device=device)
        seen = [*open_columns, *inner]
        reach = [[other in _line(shape, column) for other in seen] for column in inner]
        self.reach = torch.tensor(reach, dtype=torch.bool, device=device)[None]


class Static:
    """A tree that has the same shape in every round.

    Args:
        shape: which candidate of which node each node is.
        draw: draw the children of a node without replacement instead of taking the most likely tokens.
    """

    def __init__(self, shape: Shape, draw: bool, device: torch.device) -> None:
        self._draw, self._width = draw, shape.width
        self._levels: list[Level] = []
        opened: list[int] = []
        for number in range(len(shape.level_ends)):
            above = len(self._levels[-1].inner) if self._levels else 1
            self._levels.append(Level(shape, number, opened, above, device))
            opened = opened + self._levels[-1].inner
        self.nodes, self.guesses, self.levels = len(shape.parents), len(opened), len(self._levels)
        self._parents = torch.tensor(shape.parents, device=device)

    def grow(self, reader: Reader, feature: Float[Tensor, "B 1 D"], context: Context) -> Draft:
        network, drawn = reader.network, self._draw and not context.sampling.greedy
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        for number, level in enumerate(self._levels):
            logits, feature = network.logits(feature)
            if drawn:
                chances = _chances(logits, context.sampling)
                places = _draw_different(chances, level.width, context)
                probs.append(_everywhere(chances, network)[:, level.parents])
            else:
                places = top_candidates(logits, level.width)
            tokens.append(network.vocabulary.tokens(places[:, level.parents, level.ranks]))
            if level.inner:
                behind = feature[:, level.parents[level.open]]
                feature = reader.guess(behind, tokens[-1][:, level.open], number, level.reach)
        return Draft(
            torch.cat(tokens, 1),
            self._parents.expand(len(feature), -1),
            torch.cat(probs, 1) if drawn else None,
            levels=self.levels,
            width=self._width,
            passes=self.levels,
        )


class Dynamic:
    """A tree shaped by the network's confidence (EAGLE-2, sec. 4).

    Args:
        nodes: of the tree: the best of all candidates.
        levels: most levels.
        top_k: candidates of a node, and nodes of a level that are expanded.
    """

    def __init__(self, nodes: int, levels: int, top_k: int, device: torch.device) -> None:
        self.nodes, self.levels, self._k = nodes, levels, top_k
        self.guesses = (levels - 1) * top_k
        self._roots = torch.full((1, top_k), -1, device=device)
        self._columns = torch.arange(top_k, device=device)[None]
        self._self = torch.eye(top_k, dtype=torch.bool, device=device)[None]

    def grow(self, reader: Reader, feature: Float[Tensor, "B 1 D"], context: Context) -> Draft:
        batch, k = len(feature), self._k
        logits, feature = reader.network.logits(feature)
        scores, tokens = (found[:, 0] for found in self._candidates(reader.network, logits))
        parents, columns = self._roots.expand(batch, -1), self._columns.expand(batch, -1)
        every = [(scores, tokens, parents)]
        beam, feature, reach = (scores, tokens, columns), feature.expand(-1, k, -1), self._self.expand(batch, -1, -1)
        for level in range(self.levels - 1):
            logits, feature = reader.network.logits(reader.guess(feature, beam[1], level, reach))
            gained, tokens = self._candidates(reader.network, logits)
            scores = _below(beam[0])[:, :, None].minimum(beam[0][:, :, None] + gained).flatten(1)
            start, tokens = k + level * k * k, tokens.flatten(1)
            every.append((scores, tokens, beam[2].repeat_interleave(k, 1)))
            if level + 2 < self.levels:
                values, chosen = scores.topk(k)
                source = chosen // k
                beam = (values, tokens.gather(1, chosen), chosen + start)
                feature = feature.gather(1, source[:, :, None].expand(-1, -1, feature.shape[2]))
                seen = reach.gather(1, source[:, :, None].expand(-1, -1, reach.shape[2]))
                reach = torch.cat([seen, self._self.expand(batch, -1, -1)], dim=2)
        return self._best(*(torch.cat(parts, 1) for parts in zip(*every, strict=True)))

    def _candidates(
        self, network: Network, logits: Float[Tensor, "B m v"]
    ) -> tuple[Float[Tensor, "B m k"], Int[Tensor, "B m k"]]:
        places = top_candidates(logits, self._k)
        exact = in_float(logits)
        gained = exact.gather(2, places) - exact.logsumexp(-1, keepdim=True)
        return gained, network.vocabulary.tokens(places)

    def _best(self, scores: Float[Tensor, "B C"], tokens: Int[Tensor, "B C"], parents: Int[Tensor, "B C"]) -> Draft:
        """The best candidates in their order. A node's score is below its parent's, so the parent is one of them."""
        kept = scores.topk(self.nodes).indices.sort(1).values
        above = parents.gather(1, kept)
        columns = torch.searchsorted(kept, above.clamp(min=0))
        return Draft(
            tokens.gather(1, kept),
            torch.where(above < 0, above, columns),
            levels=self.levels,
            width=self._k,
            passes=self.levels,
        )


def _below(scores: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """The next smaller numbers: the highest score of a sure child (log q = 0), so that its parent stays ahead."""
    return scores.nextafter(torch.full_like(scores, -torch.inf))


def _chances(logits: Float[Tensor, "B m v"], sampling: Sampling) -> Float[Tensor, "B m v"]:
    """The distribution to draw from: the processed one, and a little of every token, lest siblings run out."""
    probs = sampling.probs(logits) + _FLOOR
    return probs / probs.sum(-1, keepdim=True)


def _draw_different(chances: Float[Tensor, "B m v"], count: int, context: Context) -> Int[Tensor, "B m k"]:
    """``count`` places without replacement, in the order drawn: the winners of a race of exponential clocks."""
    clocks = torch.empty_like(chances).exponential_(generator=context.rng)
    return (chances / clocks).topk(count).indices


def _everywhere(chances: Float[Tensor, "B m v"], network: Network) -> Float[Tensor, "B m V"]:
    vocabulary = network.vocabulary
    if vocabulary.full:
        return chances
    whole = chances.new_zeros(*chances.shape[:2], vocabulary.size)
    return whole.index_copy_(2, vocabulary.ids, chances)


def _line(shape: Shape, column: int) -> set[int]:
    line = set()
    while column >= 0:
        line.add(column)
        column = shape.parents[column]
    return line
