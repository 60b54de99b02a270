"""DFlash and DSpark: a network of a few layers drafts a whole block of tokens in one pass.

The pass reads the last committed token and masked places after it, which see one another and the target's states of all
tokens before; so a longer draft costs next to nothing, where EAGLE takes a pass for each token. The places of DFlash
(Chen et al. 2026, arXiv 2602.06036) are independent: each is right on its own, but two need not fit together. DSpark
(Cheng et al. 2026, arXiv 2607.05147) adds a Markov head, by which the logits of a place depend on the token before it,
and a confidence head, which ends a draft where it is no longer worth verifying. The network must be trained; the target
stays as it is:

    python -m bench train method=dspark model=smollm2

Published: DFlash 4.86x and 6.49 tokens per step with Qwen3-8B, H200, greedy; DSpark 3.72 tokens per step on MT-bench
with Qwen3-8B, where EAGLE-3 has 2.66 after the same training.

Differences: batched, ragged rows. Networks trained here propose from a reduced vocabulary and may have a vector of
their own for masked places. ``tree=dynamic`` drafts the most probable paths of a block (DDTree, arXiv 2604.12989; with
a Markov head PCTree, arXiv 2608.02123) and is judged by the exact rule for drafts that were not drawn. With
``confidence`` a chain ends where the product of the confidence head's probabilities falls below it; the authors'
threshold is for each token alone. Of the Markov heads the plain one is there, not the gated or recurrent one.

Command: ``python -m bench method=dspark dataset=mtbench``
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch
from torch import Generator, Tensor

from methods.drafting import Context, Draft
from methods.engine.causal_lm import CausalLM
from methods.engine.checkpoint_files import own_folder, training_command
from methods.engine.cuda_graphs import Graphs, Work
from methods.engine.sampling import Sampling
from methods.speculative.budget import CostsOption
from methods.speculative.dflash.checkpoint import Kind, Part
from methods.speculative.dflash.network import FixedReader, Network, Reader
from methods.speculative.dflash.trees import Growth, TreeKind, growth_of
from methods.speculative.heads.base import HeadsDecoder
from methods.speculative.network_drafter import NetworkDrafter, graphs_of
from methods.speculative.recorded_network import Drafted, KeptTokens, RecordedNetwork, tensors_of
from methods.speculative.verification import rule_of_network


class BlockDrafter(NetworkDrafter[Network, Growth, Reader]):
    """Reads the target's states of the committed tokens, then drafts from one pass over a block."""

    def __init__(self, network: Network, growth: Growth, graphs: Graphs | None = None) -> None:
        spare = 2 * (growth.levels + 1) + network.spec.block
        super().__init__(network, growth, network.spec.taps, spare)
        if graphs is not None and growth.fixed:
            self._recorded = RecordedNetwork(graphs, self._new_reader, self._work, self._states, spare)

    def _new_reader(self, batch: int, capacity: int) -> Reader:
        return Reader(self.network, batch, capacity)

    def _work(self, reader: Reader, sampling: Sampling, rng: Generator) -> Work:
        """Reading what a recorded round kept and drafting after it, from its report and states."""

        def work(report: Tensor, *states: Tensor) -> Drafted:
            kept = KeptTokens.of(report, self.network.triton is not None)
            fixed = FixedReader(self.network, reader.cache)
            fixed.read(states, kept.counts)
            hidden = fixed.block(kept.bonus)[:, : self.growth.levels]
            return tensors_of(self.growth.grow(self.network, hidden, kept.context(states, sampling, rng)))

        return work

    def _draft(self, reader: Reader, context: Context) -> Draft:
        self._read(reader, context)
        return self.growth.grow(self.network, reader.block(context.root)[:, : self.growth.levels], context)

    def _read(self, reader: Reader, context: Context) -> None:
        counts, states = self._unread.take()
        reader.read(states, counts)


class DFlash(HeadsDecoder):
    """DFlash: the places of a block are drafted independently.

    Args:
        tree: ``chain``, or ``dynamic``, the most probable paths.
        gamma: depth of a draft; None: as many tokens as the network drafts.
        top_k: of a dynamic tree: candidates of a node, and nodes of a level that get children.
        nodes: of a dynamic tree.
        draw: at a temperature, draw the tokens of a chain.
        block: at a temperature, judge a drawn chain as a block (Sun et al. 2024, arXiv 2403.10444).
        costs: of passes, by which the best of these nodes are drafted; see ``methods.speculative.budget``.
        checkpoint: folder of a trained network, or a published one by path or hub id; None: the one prepared for this
            model.

    Raises:
        MissingPart: no network.
        ValueError: a network of another target or method, or an option out of range.
    """

    kind: ClassVar[Kind] = "dflash"
    paper = "Chen et al. 2026, arXiv 2602.06036; Ringel and Romano 2026, arXiv 2604.12989"

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
        costs: CostsOption = None,
        checkpoint: str | Path | None = None,
    ) -> None:
        growth = (tree, gamma, top_k, nodes, 0.0)
        self._make(target, sampling, growth, (draw, block), costs, checkpoint)

    def _make(
        self,
        target: CausalLM,
        sampling: Sampling,
        growth: tuple[TreeKind, int | None, int, int, float],
        drawing: tuple[bool, bool],
        costs: CostsOption,
        checkpoint: str | Path | None,
    ) -> None:
        tree, (draw, block) = growth[0], drawing
        folder = own_folder(self.kind, "draft network", checkpoint)
        part = self._part(folder, checkpoint, target)
        grown = _growth(part, *growth, draw, target.device)
        rule = rule_of_network(sampling, tree, tree == "chain", draw, block)
        drafter = BlockDrafter(Network(target, part), grown, graphs_of(target, sampling))
        super().__init__(target, sampling, drafter, rule, str(checkpoint) if folder is None else None, costs)

    def _part(self, folder: Path | None, checkpoint: str | Path | None, target: CausalLM) -> Part:
        if folder is not None:
            part = Part.load(folder, target, self.kind)
        else:
            from methods.speculative.published import dflash, formats

            part = dflash.of_published(formats.read(str(checkpoint), target), str(checkpoint), self.kind)
        part.require_taps(self.kind, target)
        if part.spec.kind != self.kind:
            raise ValueError(
                f"The checkpoint of method={self.kind} must be one of that method, got one of {part.spec.kind}. Use "
                f"method={part.spec.kind}, or train another: {training_command(self.kind)}."
            )
        return part


class DSpark(DFlash):
    """DSpark: a Markov head makes tokens depend on those before them, a confidence head may end a draft.

    Args:
        tree: ``chain``, or ``dynamic``, the most probable paths.
        gamma: depth of a draft; None: as many tokens as the network drafts.
        top_k: of a dynamic tree: candidates of a node, and nodes of a level that get children.
        nodes: of a dynamic tree.
        confidence: a chain ends where the product of the confidence head's probabilities falls below it; 0: never.
        draw: at a temperature, draw the tokens of a chain.
        block: at a temperature, judge a drawn chain as a block (Sun et al. 2024, arXiv 2403.10444).
        costs: of passes, by which the best of these nodes are drafted; see ``methods.speculative.budget``.
        checkpoint: folder of a trained network, or a published one by path or hub id; None: the one prepared for this
            model.

    Raises:
        MissingPart: no network.
        ValueError: a network of another target or method, or an option out of range.
    """

    kind = "dspark"
    paper = "Cheng et al. 2026, arXiv 2607.05147"

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        tree: TreeKind = "chain",
        gamma: int | None = None,
        top_k: int = 4,
        nodes: int = 8,
        confidence: float = 0.0,
        draw: bool = False,
        block: bool = False,
        costs: CostsOption = None,
        checkpoint: str | Path | None = None,
    ) -> None:
        growth = (tree, gamma, top_k, nodes, confidence)
        self._make(target, sampling, growth, (draw, block), costs, checkpoint)


def _growth(
    part: Part,
    tree: TreeKind,
    gamma: int | None,
    top_k: int,
    nodes: int,
    confidence: float,
    draw: bool,
    device: torch.device,
) -> Growth:
    spec = part.spec
    depth = gamma if gamma is not None else spec.drafted
    if not 1 <= depth <= spec.drafted:
        raise ValueError(
            f"gamma must be 1 to {spec.drafted}, the tokens that this network drafts in a pass, or null, got {gamma}. "
            "Correct method.gamma."
        )
    if not (confidence == 0.0 or (tree == "chain" and spec.confidence and 0.0 < confidence < 1.0)):
        raise ValueError(
            "confidence must be 0, or for tree=chain and a network with a confidence head a number below 1, got "
            f"confidence={confidence}, tree={tree} and a network {'with' if spec.confidence else 'without'} that head. "
            "Set method.confidence=0."
        )
    return growth_of(tree, depth, top_k, nodes, draw, len(part.vocabulary), device, confidence)
