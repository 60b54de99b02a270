"""REST: draft what followed the last words in a datastore.

He et al. 2023, arXiv 2311.08252. The longest ending of the text, ``max_ngram`` to ``min_ngram`` tokens, that occurs in
the datastore is looked up (sec. 3.1); the continuations of its occurrences become a trie weighted by how many of them
share a prefix, and the ``nodes`` most frequent prefixes are the draft, a tree (sec. 3.2). No model drafts. The
datastore must be prepared, of text like the text to be written; by default of the target's own answers that come with
the project:

    python -m bench train method=rest model=smollm2

Published: 1.62x to 2.36x with Code Llama on HumanEval and Vicuna on MT-bench, 7B and 13B, one A6000; Spec-Bench with
Vicuna-7B: 1.48x on an A100, 1.28x on a 3090, 1.82 and 1.63 tokens per step. Endings of 16 to 2 tokens, continuations of
10, 5000 occurrences and 64 nodes are those of the paper's code, and the defaults here. Where a pass over 65 nodes costs
several steps, as on a CPU, that tree cannot pay; the YAML file names a small one, and with ``costs`` those of its nodes
are drafted that pay (``budget.py``), by how often nodes of their depth and rank were kept lately. Sized by
the counts, calibrated in different ways, drafts were 2 to 9 % slower over recorded texts of MT-bench and Spec-Bench.

Differences: drafts are judged by the exact rule for trees that were not drawn; at a temperature the paper's code keeps
the longest of several paths sampled apart, which changes the distribution. No ending and no continuation crosses the
border of a document. Of more than ``occurrences`` places, evenly spaced ones are read in the order of their
continuations, so shares are kept and a run repeats. Ties between prefixes go to the shorter one, then to the smaller
ids. The paper's code cuts the tree further (``cut=true``), which its text does not say: half as many nodes for
somewhat fewer tokens per step, over recorded texts of MT-bench 2.6 nodes and 1.40 instead of 5.1 and 1.43 at
``nodes=8``, 13.1 and 1.51 instead of 25.3 and 1.52 at 64.

Command: ``python -m bench method=rest dataset=mtbench``
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt32

from methods.drafting import Context, Draft, StatelessDrafter, padded
from methods.engine.causal_lm import CausalLM
from methods.engine.checkpoint_files import part_folder
from methods.engine.host_copies import from_host
from methods.engine.sampling import Sampling
from methods.speculative.budget import CostsOption
from methods.speculative.loop import SpeculativeDecoder
from methods.speculative.rest_datastore import LONGEST, SEPARATOR, Datastore
from methods.speculative.verification import default_rule


@dataclass(slots=True)
class Tree:
    """Prefixes of continuations as nodes, parents before children.

    Attributes:
        tokens: the last token of each prefix.
        parents: node of the prefix without it; -1 for a prefix of one token.
        depths: tokens of each prefix.
        counts: continuations that begin with it.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)


def frequent_prefixes(paths: UInt32[np.ndarray, "K d"], most: int) -> Tree:
    """The ``most`` most frequent prefixes of some continuations.

    A prefix is at least as frequent as a longer one that begins with it and wins ties against it. So the tree grows
    from its root by the best child of any of its nodes.

    Args:
        paths: continuations in lexicographic order; one ends at its first SEPARATOR.
        most: nodes wanted.
    """
    tree = Tree()
    behind = _children(paths, 0, len(paths), 0, -1, most)
    while behind and len(tree.tokens) < most:
        count, depth, start, token, parent = heappop(behind)
        node = len(tree.tokens)
        tree.tokens.append(token)
        tree.parents.append(parent)
        tree.depths.append(depth)
        tree.counts.append(-count)
        for child in _children(paths, start, start - count, depth, node, most - node - 1):
            heappush(behind, child)
    return tree


def cut_prefixes(tree: Tree, most: int) -> Tree:
    """The tree that the paper's code makes of the most frequent prefixes (``cut_to_choices``).

    Every prefix counts the different tokens on its path, those it shares with other prefixes too. While the sum exceeds
    ``most``, the prefix that counts most is removed; of equals, here, the less frequent one. What is left is completed
    to a tree.
    """
    tokens: list[frozenset[int]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        tokens.append((tokens[parent] if parent >= 0 else frozenset()) | {token})
    total, kept = sum(map(len, tokens)), [True] * len(tokens)
    for node in sorted(range(len(tokens)), key=lambda node: (-len(tokens[node]), -node)):
        if total <= most:
            break
        total, kept[node] = total - len(tokens[node]), False
    for node in reversed(range(len(tokens))):
        if kept[node] and tree.parents[node] >= 0:
            kept[tree.parents[node]] = True
    nodes = [node for node, stays in enumerate(kept) if stays]
    places = {node: place for place, node in enumerate(nodes)} | {-1: -1}
    return Tree(
        [tree.tokens[node] for node in nodes],
        [places[tree.parents[node]] for node in nodes],
        [tree.depths[node] for node in nodes],
        [tree.counts[node] for node in nodes],
    )


def _children(
    paths: UInt32[np.ndarray, "K d"], start: int, stop: int, depth: int, parent: int, most: int
) -> list[tuple[int, int, int, int, int]]:
    """The tokens at ``depth`` of ``paths[start:stop]``, which share all before: the most frequent ones, best first.

    Returns:
        (-count, depth, first path, token, parent) each; the first three are the order in which nodes enter the tree.
    """
    if depth == paths.shape[1]:
        return []
    column = paths[start:stop, depth].tolist()
    counts = Counter(column)
    counts.pop(SEPARATOR, None)
    return [
        (-count, depth + 1, start + bisect_left(column, token), token, parent)
        for token, count in counts.most_common(most)
    ]


def as_draft(trees: Sequence[Tree], device: torch.device) -> Draft:
    """A tree per row; chains where no row branches, which cost the target no mask."""
    width = max((max(Counter(tree.parents).values(), default=0) for tree in trees), default=0)
    if width <= 1:
        return Draft.chains([tree.tokens for tree in trees], device)
    # padding is -1, in parents too, as for children of the root
    tokens, parents = padded([tree.tokens for tree in trees]), padded([tree.parents for tree in trees])
    depths = [max(tree.depths, default=0) for tree in trees]
    return Draft(
        from_host(tokens, device),
        from_host(parents, device),
        sizes=[len(tree.tokens) for tree in trees],
        depths=depths,
        levels=max(depths),
        width=width,
        listed=(tokens, parents),
    )


class RestDrafter(StatelessDrafter):
    """Drafts from a datastore."""

    def __init__(
        self,
        store: Datastore,
        nodes: int,
        max_ngram: int,
        min_ngram: int,
        continuation: int,
        occurrences: int,
        cut: bool = False,
    ) -> None:
        self.nodes, self.store, self._cut = nodes, store, cut
        self._longest, self._shortest = max_ngram, min_ngram
        self._continuation, self._occurrences = continuation, occurrences

    def propose(self, context: Context) -> Draft:
        return as_draft([self._tree(text) for text in context.tokens], context.root.device)

    def _tree(self, text: list[int]) -> Tree:
        match = self.store.find(text, self._longest, self._shortest)
        if match is None:
            return Tree()
        paths = self.store.continuations(match, self._continuation, self._occurrences)
        tree = frequent_prefixes(paths, self.nodes)
        return cut_prefixes(tree, self.nodes) if self._cut else tree


class Rest(SpeculativeDecoder):
    """REST with a tree of up to ``nodes`` tokens.

    Args:
        nodes: most tokens drafted per round.
        max_ngram: longest ending that is looked up; longer ones are preferred.
        min_ngram: shortest ending that is looked up.
        continuation: most tokens read after an occurrence, the depth of the tree.
        occurrences: most occurrences read per round.
        cut: cut the tree further, as the paper's code does, see ``cut_prefixes``.
        costs: of passes, by which the best nodes of the tree are drafted; see ``methods.speculative.budget``.
        checkpoint: folder of a datastore; None: the one prepared for this model.

    Raises:
        ValueError: an option out of range, or no datastore that fits.
    """

    continuous_batching = True
    paper = "He et al. 2023, arXiv 2311.08252"
    trainable = True
    needs = "a datastore"

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        nodes: int = 64,
        max_ngram: int = 16,
        min_ngram: int = 2,
        continuation: int = 10,
        occurrences: int = 5000,
        cut: bool = False,
        costs: CostsOption = None,
        checkpoint: str | Path | None = None,
    ) -> None:
        if min(nodes, occurrences) < 1 or not 1 <= continuation <= LONGEST:
            raise ValueError(
                f"rest needs nodes and occurrences of at least 1 and continuation from 1 to {LONGEST}, got "
                f"nodes={nodes}, continuation={continuation}, occurrences={occurrences}. For no draft at all use "
                "method=autoregressive."
            )
        if not 1 <= min_ngram <= max_ngram <= LONGEST:
            raise ValueError(
                f"n-grams need 1 <= min_ngram <= max_ngram <= {LONGEST}, got min_ngram={min_ngram}, "
                f"max_ngram={max_ngram}. Change one of the two."
            )
        store = Datastore.load(part_folder("rest", "datastore", checkpoint), target.vocab_size)
        drafter = RestDrafter(store, nodes, max_ngram, min_ngram, continuation, occurrences, cut)
        super().__init__(target, sampling, drafter, default_rule(sampling, "tree", drawn=False), costs)
        self._store = store

    def memory(self) -> dict[str, int | None]:
        """Bytes of the mapped files, and how many of them are resident now."""
        return {"datastore_mapped": self._store.mapped_bytes, "datastore_resident": self._store.resident_bytes()}
