"""EAGLE: a draft network of one layer guesses the target's next features, and from them a chain or a tree of tokens.

Version 1 (Li et al. 2024, arXiv 2401.15077) predicts the target's last state from the one before and the token drawn
after it, and drafts a tree of fixed shape. Version 2 (Li et al. 2024, arXiv 2406.16858) lets the network's confidence
shape the tree: on each level the best nodes by the product of their probabilities are expanded, and the best of all
candidates become the draft (sec. 4). Version 3 (Li et al. 2025, arXiv 2503.01840) reads states of three layers and is
trained on features of its own. After each pass of the target the network reads the kept tokens again with the true
features. The network must be trained; the target stays as it is:

    python -m bench train method=eagle model=smollm2

Published, MT-bench, greedy: EAGLE 2.7 to 3.5x with LLaMA2-Chat 70B; EAGLE-2 3.62x and 4.98 tokens per step with
Vicuna-7B; EAGLE-3 5.58x and 6.65 with Vicuna-13B.

Differences: batched, ragged rows. Networks trained here propose from a reduced vocabulary. The dynamic tree breaks ties
so that no node is without its parent. Trees of the most likely tokens are judged by the exact rule for drafts that were
not drawn; ``draw`` draws the children of a fixed tree without replacement, as version 1 does. With ``costs`` a round
drafts the nodes that pay, by confidence and by what was kept lately (``budget.py``).

Command: ``python -m bench method=eagle dataset=mtbench``
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from methods.drafting import Context, Draft
from methods.engine.causal_lm import CausalLM, Output
from methods.engine.checkpoint_files import own_folder
from methods.engine.cuda_graphs import Graphs, Work
from methods.engine.sampling import Sampling
from methods.engine.token_tree import Shape
from methods.speculative.budget import CostsOption
from methods.speculative.draft_layers import MOST_UNREAD
from methods.speculative.eagle.checkpoint import TRAIN, Part
from methods.speculative.eagle.network import FixedReader, Network, Reader
from methods.speculative.eagle.trees import TREES, Chain, Dynamic, Growth, Static
from methods.speculative.heads.base import HeadsDecoder
from methods.speculative.network_drafter import NetworkDrafter, graphs_of, tokens_after
from methods.speculative.published.eagle import LayersCounted
from methods.speculative.ranked_tree import require_sizes
from methods.speculative.recorded_network import Drafted, KeptTokens, RecordedNetwork, tensors_of
from methods.speculative.verification import rule_of_network

_MOST_AT_ONCE = 64  # pairs that the call which drafts a tree reads; more come after a prompt, and are read before

TreeKind = Literal["auto", "chain", "static", "dynamic"]


class EagleDrafter(NetworkDrafter[Network, Growth, Reader]):
    """Reads pairs of the target's feature at a place and the token after it, then lets a tree grow after them."""

    def __init__(self, network: Network, growth: Growth, last_layer: int, graphs: Graphs | None = None) -> None:
        # After a prefill the states of all positions are there only if some layer is tapped. Slots beyond the text: a
        # row may be read late, beside one at its limit.
        spare = MOST_UNREAD + 2 * (growth.levels + 1) + growth.guesses
        super().__init__(network, growth, network.spec.taps or (last_layer,), spare)
        self._tree = network.tree(growth.sizes) if isinstance(growth, Dynamic) else None
        if graphs is not None:
            self._recorded = RecordedNetwork(graphs, self._new_reader, self._work, self._states, spare)

    def _new_reader(self, batch: int, capacity: int) -> Reader:
        return Reader(self.network, batch, capacity)

    def _work(self, reader: Reader, sampling: Sampling, rng: Generator) -> Work:
        """Reading what a recorded round kept and drafting after it, from its report and states."""

        def work(report: Tensor, *states: Tensor) -> Drafted:
            kept = KeptTokens.of(report, self.network.triton is not None)
            pairs = FixedReader(self.network, reader.cache)
            feature = pairs.read(self.network.feature(states[0], states[1:]), kept.following, kept.counts)
            return tensors_of(self.growth.grow(pairs, feature, kept.context(states, sampling, rng)))

        return work

    def _states(self, output: Output) -> list[Float[Tensor, "B P D"]]:
        """The last ones, and those of the layers that the network names."""
        return [output.hidden, *(output.hidden_layers[tap] for tap in self.network.spec.taps)]

    def _draft(self, reader: Reader, context: Context) -> Draft:
        tree, start = self._tree, reader.lengths[0] + 1
        if tree is not None and tree.mixes and (one := self._unread.take_row(_MOST_AT_ONCE)) is not None:
            states, rows = one
            return reader.grow(tree, states[1:], rows, context.tokens[0][start : start + len(rows)], mixed=False)
        counts, feature = self._new_features()
        if tree is not None and len(counts) == 1 and 0 < counts[0] <= _MOST_AT_ONCE:
            tokens = context.tokens[0][start : start + counts[0]]
            return reader.grow(tree, [feature], range(counts[0]), tokens, mixed=True)
        return self.growth.grow(reader, self._read_pairs(reader, context, feature, counts), context)

    def _read(self, reader: Reader, context: Context) -> None:
        counts, feature = self._new_features()
        self._read_pairs(reader, context, feature, counts)

    def _new_features(self) -> tuple[list[int], Float[Tensor, "B W D"]]:
        """Of the pairs that passes have completed; how many each row has."""
        counts, states = self._unread.take()
        return counts, self.network.feature(states[0], states[1:])

    def _read_pairs(
        self, reader: Reader, context: Context, feature: Float[Tensor, "B W D"], counts: list[int]
    ) -> Float[Tensor, "B 1 D"]:
        """The feature after the pair with the root."""
        return reader.read(feature, tokens_after(context, reader.lengths, counts, self.network.device), counts)


class Eagle(HeadsDecoder):
    """EAGLE 1, 2 and 3.

    Args:
        version: 1, 2 or 3; must be that of the trained network, of which 1 and 2 share one.
        tree: ``chain``; ``static``, the fixed tree ``shape``; ``dynamic``, shaped by confidence; ``auto``: static for
            version 1, else dynamic.
        gamma: nodes of a chain.
        shape: of a static tree: a name in ``TREES``, or numbers of children, level by level and breadth first.
        depth: levels of a dynamic tree.
        top_k: of a dynamic tree: candidates of a node, and nodes that are expanded on a level.
        nodes: of a dynamic tree.
        confidence: of a dynamic tree on a CPU: it grows no further level once no path to one is as probable.
        draw: at a temperature, draw the nodes of a chain or a static tree.
        block: at a temperature, judge a drawn chain as a block (Sun et al. 2024, arXiv 2403.10444).
        layers_counted: of a published version 3: what its numbers of layers are, see ``published.eagle.read_eagle3``.
        costs: of passes, by which the best of these nodes are drafted; see ``methods.speculative.budget``.
        checkpoint: folder of a trained network, or a published one by path or hub id; None: the one prepared for this
            model.

    Raises:
        MissingPart: no network.
        ValueError: a network of another target or version, or an option out of range.
    """

    paper = "Li et al. 2024, arXiv 2401.15077; Li et al. 2024, arXiv 2406.16858; Li et al. 2025, arXiv 2503.01840"

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        version: Literal[1, 2, 3] = 3,
        tree: TreeKind = "auto",
        gamma: int = 4,
        shape: str | list[list[int]] = "paper",
        depth: int = 6,
        top_k: int = 10,
        nodes: int = 59,
        confidence: float = 0.0,
        draw: bool = False,
        block: bool = False,
        layers_counted: LayersCounted = "auto",
        costs: CostsOption = None,
        checkpoint: str | Path | None = None,
    ) -> None:
        folder = own_folder("eagle", "draft network", checkpoint)
        found = _part(folder, checkpoint, target, layers_counted)
        _require_version(version, found.spec.version)
        kind = tree if tree != "auto" else ("static" if version == 1 else "dynamic")
        dynamic = (nodes, depth, top_k, confidence)
        growth = _growth(kind, gamma, shape, dynamic, draw, len(found.vocabulary), target.device)
        found.require_taps("eagle", target)
        drafter = EagleDrafter(Network(target, found), growth, target.n_layers - 1, graphs_of(target, sampling))
        rule = rule_of_network(sampling, tree, kind == "chain", draw, block)
        super().__init__(target, sampling, drafter, rule, str(checkpoint) if folder is None else None, costs)


def _growth(
    kind: str,
    gamma: int,
    shape: str | list[list[int]],
    dynamic: tuple[int, int, int, float],
    draw: bool,
    vocabulary: int,
    device: torch.device,
) -> Growth:
    if kind == "chain":
        if gamma < 1:
            raise ValueError(f"gamma must be at least 1, got {gamma}. Set method.gamma=4 or so.")
        return Chain(gamma, draw)
    if kind == "static":
        return Static(Shape.chosen("shape", shape, TREES, vocabulary), draw, device)
    nodes, depth, top_k, confidence = dynamic
    require_sizes(nodes, depth, top_k, vocabulary, draw)
    if not 0.0 <= confidence < 1.0:
        raise ValueError(f"confidence must be from 0 to below 1, got {confidence}. Set method.confidence=0.2 or so.")
    return Dynamic(nodes, depth, top_k, device, confidence)


# -- where the network comes from -------------------------------------------------------------------------------------


def _require_version(wanted: int, found: int) -> None:
    if (3 if wanted == 3 else 1) != found:
        theirs = "3" if found == 3 else "1 (which version 2 uses too)"
        raise ValueError(
            f"version must be that of the trained network, {theirs}, got {wanted}. Set method.version={found}, or "
            f"train the other: {TRAIN} train.version={wanted} force=true."
        )


def _part(folder: Path | None, checkpoint: str | Path | None, target: CausalLM, counted: LayersCounted) -> Part:
    if folder is not None:
        if counted != "auto":
            raise ValueError(
                f"layers_counted must be auto for a network that was trained here, got {counted}. Remove it, or name a "
                "published network as method.checkpoint."
            )
        return Part.load(folder, target)
    from methods.speculative.published import eagle, formats

    return eagle.of_published(formats.read(str(checkpoint), target, counted), str(checkpoint), target)
