"""P-EAGLE: EAGLE-3 that drafts all its tokens in one pass of its network (Hui et al. 2026, arXiv 2602.01469).

EAGLE-3 needs a pass of its draft network for every level of a draft, since each reads the feature and the token of the
one before. Here both are replaced by vectors that were learnt: after the pair with the last committed token come masked
places, which all read the same input and differ by their position and by what they see before them. So a longer draft
costs next to nothing, and the network can have several layers (published: 4). The places are independent: each is right
on its own, but two need not fit together. The network must be trained; the target stays as it is:

    python -m bench train method=p_eagle model=smollm2

Published: 1.10 to 1.36 times as fast as EAGLE-3 with GPT-OSS 20B and 120B and Qwen3-Coder 30B in vLLM, drafts of 5.

Differences: batched, ragged rows. Networks trained here propose from a reduced vocabulary, with the target's frozen
embedding; the token half of a masked place is a vector of its own, not a token's embedding. ``tree=dynamic`` drafts the
most probable paths through the places (DDTree, arXiv 2604.12989) and is judged by the exact rule for drafts that were
not drawn.

Command: ``python -m bench method=p_eagle dataset=mtbench``
"""

from __future__ import annotations

from pathlib import Path

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from methods.drafting import Context, Draft
from methods.engine.causal_lm import CausalLM
from methods.engine.checkpoint_files import own_folder
from methods.engine.cuda_graphs import Graphs, Work
from methods.engine.sampling import Sampling
from methods.speculative.budget import CostsOption
from methods.speculative.dflash.trees import Growth, TreeKind, growth_of
from methods.speculative.draft_layers import MOST_UNREAD
from methods.speculative.heads.base import HeadsDecoder
from methods.speculative.network_drafter import NetworkDrafter, graphs_of, tokens_after
from methods.speculative.p_eagle.checkpoint import Part
from methods.speculative.p_eagle.network import FixedReader, Network, Reader
from methods.speculative.published.eagle import LayersCounted
from methods.speculative.recorded_network import Drafted, KeptTokens, RecordedNetwork, tensors_of
from methods.speculative.verification import rule_of_network


class PEagleDrafter(NetworkDrafter[Network, Growth, Reader]):
    """Reads pairs of the target's feature at a place and the token after it, and drafts in the same pass."""

    def __init__(self, network: Network, growth: Growth, graphs: Graphs | None = None) -> None:
        spare = MOST_UNREAD + 2 * (growth.levels + 1)
        super().__init__(network, growth, network.spec.taps, spare)
        if graphs is not None:
            self._recorded = RecordedNetwork(graphs, self._new_reader, self._work, self._states, spare)

    def _new_reader(self, batch: int, capacity: int) -> Reader:
        return Reader(self.network, batch, capacity)

    def _work(self, reader: Reader, sampling: Sampling, rng: Generator) -> Work:
        """Reading what a round kept and drafting after it, from its report and states."""

        def work(report: Tensor, *states: Tensor) -> Drafted:
            kept = KeptTokens.of(report, self.network.triton is not None)
            fixed = FixedReader(self.network, reader.cache)
            feature, masks = self.network.feature(states), self.growth.levels - 1
            hidden = fixed.draft(feature, kept.following, kept.counts, masks)
            return tensors_of(self.growth.grow(self.network, hidden, kept.context(states, sampling, rng)))

        return work

    def _draft(self, reader: Reader, context: Context) -> Draft:
        return self.growth.grow(self.network, self._read(reader, context, self.growth.levels - 1), context)

    def _read(self, reader: Reader, context: Context, masks: int = 0) -> Float[Tensor, "B n D"]:
        """Read the pairs that passes have completed, and ``masks`` masked places after them."""
        counts, states = self._unread.take()
        tokens = tokens_after(context, reader.lengths, counts, self.network.device)
        return reader.draft(self.network.feature(states), tokens, counts, masks)


class PEagle(HeadsDecoder):
    """P-EAGLE.

    Args:
        tree: ``chain``, or ``dynamic``, the most probable paths.
        gamma: depth of a draft; None: as many tokens as the network was trained to draft. A longer one is possible.
        top_k: of a dynamic tree: candidates of a node, and nodes of a level that get children.
        nodes: of a dynamic tree.
        draw: at a temperature, draw the tokens of a chain.
        block: at a temperature, judge a drawn chain as a block (Sun et al. 2024, arXiv 2403.10444).
        layers_counted: of a published network: what its numbers of layers are, see ``published.eagle``.
        costs: of passes, by which the best of these nodes are drafted; see ``methods.speculative.budget``.
        checkpoint: folder of a trained network, or a published one by path or hub id; None: the one prepared for this
            model.

    Raises:
        MissingPart: no network.
        ValueError: a network of another target or method, or an option out of range.
    """

    paper = "Hui et al. 2026, arXiv 2602.01469"

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        tree: TreeKind = "chain",
        gamma: int | None = None,
        top_k: int = 4,
        nodes: int = 8,
        draw: bool = False,
        block: bool = False,
        layers_counted: LayersCounted = "auto",
        costs: CostsOption = None,
        checkpoint: str | Path | None = None,
    ) -> None:
        folder = own_folder("p_eagle", "draft network", checkpoint)
        part = _part(folder, checkpoint, target, layers_counted)
        growth = _growth(part, tree, gamma, top_k, nodes, draw, target.device)
        rule = rule_of_network(sampling, tree, tree == "chain", draw, block)
        drafter = PEagleDrafter(Network(target, part), growth, graphs_of(target, sampling))
        super().__init__(target, sampling, drafter, rule, str(checkpoint) if folder is None else None, costs)


def _growth(
    part: Part, tree: TreeKind, gamma: int | None, top_k: int, nodes: int, draw: bool, device: torch.device
) -> Growth:
    depth = part.spec.depths if gamma is None else gamma
    if depth < 1:
        raise ValueError(f"gamma must be at least 1 or null, got {gamma}. Correct method.gamma.")
    return growth_of(tree, depth, top_k, nodes, draw, len(part.vocabulary), device)


def _part(folder: Path | None, checkpoint: str | Path | None, target: CausalLM, counted: LayersCounted) -> Part:
    if folder is None:
        from methods.speculative.published import formats, p_eagle

        part = p_eagle.of_published(formats.read(str(checkpoint), target, counted), str(checkpoint))
    elif counted != "auto":
        raise ValueError(
            f"layers_counted must be auto for a network that was trained here, got {counted}. Remove it, or name a "
            "published network as method.checkpoint."
        )
    else:
        part = Part.load(folder, target)
    part.require_taps("p_eagle", target)
    return part
