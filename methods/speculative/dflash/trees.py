"""The drafts of DFlash and DSpark: a chain, or the tree of the most probable paths through a block.

A pass gives the logits of all places at once. Without a Markov head the places are independent, so that tree is the one
that a heap over sums of log-probabilities yields (DDTree, Ringel and Romano 2026, arXiv 2604.12989); with one, the
logits of a place depend on the token before it, and the tree grows level by level over the best nodes (PCTree, arXiv
2608.02123). Both grow by ``methods.speculative.ranked_tree``, which reads nothing from the device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from methods.drafting import ABSENT, Context, Draft
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.engine.sampling import Sampling, argmax, draw, log_probs_of
from methods.engine.triton_layers import TritonLayers
from methods.speculative.ranked_tree import Beam, RankedTree, require_sizes

TreeKind = Literal["chain", "dynamic"]


@runtime_checkable
class BlockHeads(Protocol):
    """What makes tokens of the states at the places of a block; see ``methods.speculative.dflash.network.Network``."""

    vocabulary: DraftVocabulary
    triton: TritonLayers | None

    def logits(self, hidden: Float[Tensor, "B M D"]) -> Float[Tensor, "B M v"]:
        """Logits over the draft vocabulary, without what depends on the token before."""
        ...

    def bias(self, before: Int[Tensor, "B M"]) -> Float[Tensor, "B M v"] | None:
        """What the token before adds to them; None: nothing."""
        ...

    def confidence(self, hidden: Float[Tensor, "B M D"], before: Int[Tensor, "B M"]) -> Float[Tensor, "B M"] | None:
        """How likely the tokens of places are kept; None: it is not known."""
        ...


@runtime_checkable
class Growth(Protocol):
    """How a draft is made of a block.

    Attributes:
        nodes: most of a draft.
        levels: of a draft; so many places are read.
        fixed: its size is always the same.
    """

    nodes: int
    levels: int
    fixed: bool

    def grow(self, network: BlockHeads, hidden: Float[Tensor, "B n D"], context: Context) -> Draft:
        """A draft for every row, from what the network's heads read at the first ``levels`` places."""
        ...


class Chain:
    """One path of the most likely tokens, or of drawn ones.

    Args:
        gamma: nodes.
        draw: at a temperature, draw each token instead of taking the most likely one.
        confidence: the chain ends before the token with which the product of the confidence head's probabilities falls
            below it; 0: it never ends early. That product does not depend on the token itself, so that what is drawn
            keeps its distribution. The lengths are read from the device.
    """

    def __init__(self, gamma: int, draw: bool, confidence: float = 0.0) -> None:
        self.nodes = self.levels = gamma
        self._draw, self._least, self.fixed = draw, confidence, confidence == 0.0

    def grow(self, network: BlockHeads, hidden: Float[Tensor, "B n D"], context: Context) -> Draft:
        drawn = self._draw and not context.sampling.greedy
        chosen, logits, probs = _path(network, hidden, context, drawn)
        tokens = network.vocabulary.tokens(chosen)
        before = torch.cat([context.root[:, None], tokens[:, :-1]], dim=1)
        confidence = network.confidence(hidden, before)
        kept = None if confidence is None else confidence.cumprod(1)
        sizes = None
        if self._least > 0.0 and kept is not None:
            present = kept >= self._least
            sizes = present.sum(1).tolist()
            tokens = tokens.where(present, ABSENT)[:, : max(sizes)]
        width = tokens.shape[1]
        if probs is not None:
            return Draft.chain(tokens, network.vocabulary.everywhere(probs[:, :width]), sizes, passes=1)
        kept = _likelihood(logits, chosen).cumprod(1) if kept is None else kept
        return replace(Draft.chain(tokens, sizes=sizes, passes=1), gains=kept[:, :width])


class Dynamic:
    """The tree of the most probable paths; without a Markov head and with ``top_k = nodes`` it is DDTree's.

    Args:
        nodes: of the tree.
        levels: most levels.
        top_k: candidates of a node, and nodes of a level that get children.
    """

    def __init__(self, nodes: int, levels: int, top_k: int, device: torch.device) -> None:
        self.nodes, self.levels, self.fixed = nodes, levels, True
        self._tree = RankedTree(nodes, levels, top_k, device)

    def grow(self, network: BlockHeads, hidden: Float[Tensor, "B n D"], context: Context) -> Draft:
        logits = network.logits(hidden)

        def after(level: int, before: Int[Tensor, "B m"]) -> Float[Tensor, "B m2 v"]:
            own, bias = logits[:, level : level + 1], network.bias(before)
            return own if bias is None else own + bias

        def expand(beam: Beam) -> Float[Tensor, "B m v"]:
            return after(beam.level + 1, beam.tokens)

        roots = after(0, context.root[:, None])
        return self._tree.grow(network.vocabulary, roots, expand, 1, network.triton is not None)


def _path(
    network: BlockHeads, hidden: Float[Tensor, "B n D"], context: Context, drawn: bool
) -> tuple[Int[Tensor, "B n"], Float[Tensor, "B n v"], Float[Tensor, "B n v"] | None]:
    """Places of a path in the draft vocabulary, the logits they are chosen by, and what they are drawn from."""
    logits = network.logits(hidden)
    bias = network.bias(context.root[:, None])
    if bias is None:
        places, probs = _picked(logits, context, drawn)
        return places, logits, probs
    chosen: list[Tensor] = []
    chances: list[Tensor] = []
    for own in logits.split(1, dim=1):
        if chosen:
            bias = network.bias(network.vocabulary.tokens(chosen[-1]))
        assert bias is not None
        places, probs = _picked(own.add_(bias), context, drawn)
        chosen.append(places)
        chances += [] if probs is None else [probs]
    return torch.cat(chosen, 1), logits, torch.cat(chances, 1) if drawn else None


def _picked(
    logits: Float[Tensor, "B m v"], context: Context, drawn: bool
) -> tuple[Int[Tensor, "B m"], Float[Tensor, "B m v"] | None]:
    if not drawn:
        return argmax(logits), None
    sampling: Sampling = context.sampling
    probs = sampling.probs(logits)
    return draw(probs, context.rng), probs


def _likelihood(logits: Float[Tensor, "B n v"], places: Int[Tensor, "B n"]) -> Float[Tensor, "B n"]:
    return log_probs_of(logits, places[:, :, None])[:, :, 0].exp()


# -- choosing ---------------------------------------------------------------------------------------------------------


def growth_of(
    tree: TreeKind,
    depth: int,
    top_k: int,
    nodes: int,
    draw: bool,
    vocabulary: int,
    device: torch.device,
    confidence: float = 0.0,
) -> Growth:
    """The growth by the options of a method whose network drafts ``depth`` tokens from ``vocabulary`` in a pass.

    Raises:
        ValueError: sizes that make no tree, or a tree that is to be drawn.
    """
    if tree == "chain":
        return Chain(depth, draw, confidence)
    require_sizes(nodes, depth, top_k, vocabulary, draw, ("dynamic", "chain"))
    return Dynamic(nodes, depth, top_k, device)
