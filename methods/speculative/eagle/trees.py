"""The drafts of EAGLE: a chain, a tree of fixed shape, a tree shaped by the network's confidence.

All grow level by level: the logits after the nodes of a level name their children, and one pass of the draft network
over those children that have children themselves yields the features after them. Sizes are fixed, so nothing is read
from the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from methods.drafting import Context, Draft
from methods.engine.fused_tree import TreeSizes
from methods.engine.sampling import Sampling, argmax, log_probs_of, top_candidates
from methods.engine.token_tree import Shape
from methods.speculative.eagle.network import FixedReader, Reader
from methods.speculative.ranked_tree import Beam, RankedTree

TREES: dict[str, list[list[int]]] = {
    # 25 nodes, 4 + 8 + 8 + 3 + 2 on five levels: the tree in the authors' code for version 1.
    "paper": [[4], [3, 2, 2, 1], [3, 2, 2, 1], [3], [2]],
    # 7 nodes, for hardware on which nodes cost time.
    "small": [[3], [2, 1], [1]],
}
"""Name -> numbers of children, as ``methods.engine.token_tree.Shape.of_children`` reads them."""

Pairs = Reader | FixedReader
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

    def grow(self, reader: Pairs, feature: Float[Tensor, "B 1 D"], context: Context) -> Draft:
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

    def grow(self, reader: Pairs, feature: Float[Tensor, "B 1 D"], context: Context) -> Draft:
        network, drawn = reader.network, self._draw and not context.sampling.greedy
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        shares: list[Tensor] = []
        for level in range(self.levels):
            logits, feature = network.logits(feature)
            if drawn:
                chances = _chances(logits, context.sampling)
                best = _draw_different(chances, 1, context)[..., 0]
                probs.append(network.vocabulary.everywhere(chances))
            else:
                best = argmax(logits)
                shares.append(log_probs_of(logits, best[..., None])[..., 0])
            tokens.append(network.vocabulary.tokens(best))
            if level + 1 < self.levels:
                feature = reader.guess(feature, tokens[-1], level)
        draft = Draft.chain(torch.cat(tokens, 1), torch.cat(probs, 1) if drawn else None, passes=self.levels)
        return draft if drawn else replace(draft, gains=torch.cat(shares, 1).cumsum(1).exp())


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

    def grow(self, reader: Pairs, feature: Float[Tensor, "B 1 D"], context: Context) -> Draft:
        network, drawn = reader.network, self._draw and not context.sampling.greedy
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        for number, level in enumerate(self._levels):
            logits, feature = network.logits(feature)
            if drawn:
                chances = _chances(logits, context.sampling)
                places = _draw_different(chances, level.width, context)
                probs.append(network.vocabulary.everywhere(chances)[:, level.parents])
            else:
                places = top_candidates(logits, level.width, network.triton is not None)
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
    """A tree shaped by the network's confidence (EAGLE-2, sec. 4): see ``methods.speculative.ranked_tree``."""

    def __init__(self, nodes: int, levels: int, top_k: int, device: torch.device, confidence: float = 0.0) -> None:
        self.nodes, self.levels, self.guesses = nodes, levels, (levels - 1) * top_k
        least = math.log(confidence) if confidence else -math.inf
        self.sizes = TreeSizes(nodes, levels, top_k, least)
        self._tree = RankedTree(nodes, levels, top_k, device, least)
        self._self = torch.eye(top_k, dtype=torch.bool, device=device)[None]

    def grow(self, reader: Pairs, feature: Float[Tensor, "B 1 D"], context: Context) -> Draft:
        logits, feature = reader.network.logits(feature)
        if isinstance(reader, FixedReader) and reader.follows(self.guesses):
            return self._followed(reader, logits, feature)
        states = feature.expand(-1, self._self.shape[1], -1)
        own = reach = self._self.expand(len(feature), -1, -1)

        def expand(beam: Beam) -> Float[Tensor, "B k v"]:
            nonlocal states, reach
            if beam.source is not None:
                source = beam.source[:, :, None]
                states = states.gather(1, source.expand(-1, -1, states.shape[2]))
                reach = torch.cat([reach.gather(1, source.expand(-1, -1, reach.shape[2])), own], dim=2)
            logits, states = reader.network.logits(reader.guess(states, beam.tokens, beam.level, reach))
            return logits

        network = reader.network
        return self._tree.grow(network.vocabulary, logits, expand, self.levels, network.triton is not None)

    def _followed(self, reader: FixedReader, logits: Float[Tensor, "B 1 v"], feature: Float[Tensor, "B 1 D"]) -> Draft:
        """``grow`` where kernels look up the ancestors of a level."""
        network, states = reader.network, feature

        def expand(beam: Beam) -> Float[Tensor, "B k v"]:
            nonlocal states
            logits, states = network.logits(reader.follow(states, beam.tokens, beam.level, beam.source))
            return logits

        return self._tree.grow(network.vocabulary, logits, expand, self.levels, True)


def _chances(logits: Float[Tensor, "B m v"], sampling: Sampling) -> Float[Tensor, "B m v"]:
    """The distribution to draw from: the processed one, and a little of every token, lest siblings run out."""
    probs = sampling.probs(logits) + _FLOOR
    return probs / probs.sum(-1, keepdim=True)


def _draw_different(chances: Float[Tensor, "B m v"], count: int, context: Context) -> Int[Tensor, "B m k"]:
    """``count`` places without replacement, in the order drawn: the winners of a race of exponential clocks."""
    clocks = torch.empty_like(chances).exponential_(generator=context.rng)
    return (chances / clocks).topk(count).indices


def _line(shape: Shape, column: int) -> set[int]:
    line = set()
    while column >= 0:
        line.add(column)
        column = shape.parents[column]
    return line
