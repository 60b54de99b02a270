"""Medusa: heads that guess the tokens after the next one, all from the same hidden state, and a tree of their guesses.

Cai et al. 2024, arXiv 2401.10774. Head i maps the state h after the target's final norm, z = h + SiLU(W h + b) once per
layer, and an output matrix turns z into a distribution of the token i + 2 places after the last one read (sec. 2.1.1).
The heads' candidates span a tree of fixed shape that one pass verifies (sec. 2.1.2 and 2.3.3; ``candidate_tree.py``).
The heads must be trained; the target stays as it is (Medusa-1):

    python -m bench train method=medusa model=smollm2

Published: Medusa-1 2.18x with Vicuna-7B, Medusa-2 (target trained along) 2.83x and 3.47 tokens per step; Spec-Bench
with Medusa-1 for Vicuna-7B: 1.71x on an A100, 2.31 tokens per step, by 63 nodes. Published heads are read as they are
(``checkpoint=FasterDecoding/medusa-vicuna-7b-v1.3``, or a folder), with the paper's tree. Where a pass over 64 nodes
costs three steps, as on a CPU, that tree cannot pay; ``nodes`` cuts it, and with ``costs`` the part of a measured tree
is drafted that pays, by what was kept lately (``budget.py``).

Differences: heads trained here share the target's output matrix, over a reduced vocabulary. Exact acceptance is the
default, at any temperature: the rule for drafts that were not drawn. ``acceptance=typical`` is the paper's (sec.
2.3.1); it changes the text, and the first token of a round is the argmax.

Command: ``python -m bench method=medusa dataset=mtbench``
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from methods.drafting import AcceptanceRule, Draft
from methods.engine.causal_lm import CausalLM
from methods.engine.checkpoint_files import (
    own_folder,
    read_part,
    require_shapes,
    require_target,
    target_sizes,
    write_part,
)
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.engine.linear import Linear
from methods.engine.sampling import Sampling, top_candidates
from methods.engine.token_tree import Shape
from methods.speculative.budget import Costs, CostsOption
from methods.speculative.heads import candidate_tree
from methods.speculative.heads.base import HeadsDecoder, HeadsDrafter
from methods.speculative.heads.candidate_tree import TREES, Tree
from methods.speculative.heads.launched import LaunchedHeads
from methods.speculative.published.formats import MedusaWeights, read
from methods.speculative.recorded_network import Drafted
from methods.speculative.verification import Typical, default_rule

MEASURED = "measured"

Acceptance = Literal["exact", "typical"]
Layer = tuple[Float[Tensor, "D D"], Float[Tensor, "D"]]

_NODES = 63  # of a measured tree if costs are not known: as many as the paper's tree has


@dataclass(frozen=True, slots=True)
class Heads:
    """P heads.

    Attributes:
        blocks: weight and bias of every layer of every head.
        vocabulary: what they propose from.
        outputs: [n, D] of every head; None: the target's own rows for the vocabulary.
        ranks: [positions, P] measured on held-out text, see ``candidate_tree.search``; None: not measured.
    """

    blocks: list[list[Layer]]
    vocabulary: DraftVocabulary
    outputs: list[Float[Tensor, "n D"]] | None = None
    ranks: Int[Tensor, "N P"] | None = None

    def save(self, folder: Path, target: CausalLM, facts: dict[str, Any]) -> None:
        """Write heads that use the target's output matrix."""
        assert self.outputs is None and self.ranks is not None
        tensors = {
            "blocks.weight": torch.stack([torch.stack([weight for weight, _ in head]) for head in self.blocks]),
            "blocks.bias": torch.stack([torch.stack([bias for _, bias in head]) for head in self.blocks]),
        }
        sizes = {"heads": len(self.blocks), "blocks": len(self.blocks[0])}
        save_heads(folder, target, tensors, self.vocabulary, self.ranks, sizes | facts)

    @classmethod
    def load(cls, folder: Path, target: CausalLM) -> Heads:
        """Read what ``save`` wrote.

        Raises:
            ValueError: files are missing or damaged, or belong to another target.
        """
        count, layers, tensors = read_heads(folder, "medusa", target)
        width = target.hidden_size
        shapes = {"blocks.weight": (count, layers, width, width), "blocks.bias": (count, layers, width)}
        require_heads(folder, tensors, shapes, count)
        weight, bias = (tensors[key].to(target.device, target.dtype) for key in ("blocks.weight", "blocks.bias"))
        blocks = [list(zip(*head, strict=True)) for head in zip(weight, bias, strict=True)]
        return cls(blocks, vocabulary_of(tensors, target), None, tensors["ranks"].long())

    @classmethod
    def published(cls, checkpoint: str | Path, target: CausalLM) -> Heads:
        """Read a checkpoint in a published format, from a path or a hub id.

        Raises:
            ValueError: it cannot be read, or belongs to another target.
        """
        found = read(checkpoint, target)
        if not isinstance(found, MedusaWeights):
            raise ValueError(
                f"{checkpoint} must hold heads of Medusa for method=medusa, got {type(found).__name__}. Use the method "
                "that they were made for."
            )

        def here(tensor: Tensor) -> Tensor:
            return tensor.to(target.device, target.dtype)

        blocks = [[(here(weight), here(bias)) for weight, bias in head] for head in found.blocks]
        vocabulary = DraftVocabulary.all(target.vocab_size, target.device)
        return cls(blocks, vocabulary, [here(weight) for weight in found.outputs])


class MedusaModel:
    """Heads ready for decoding: matrices packed, with one product for the common input of all heads.

    Attributes:
        nbytes: of its matrices, by name.
    """

    def __init__(self, target: CausalLM, heads: Heads, used: int) -> None:
        blocks = heads.blocks[:used]
        self._count = used
        made = target.draft_linear
        self._first = made([head[0][0] for head in blocks], [head[0][1] for head in blocks])
        self._rest = [
            [made([head[layer][0]], [head[layer][1]]) for head in blocks] for layer in range(1, len(blocks[0]))
        ]
        self._outputs = output_products(target, heads.vocabulary, heads.outputs, used)
        layers = [self._first, *(product for layer in self._rest for product in layer)]
        self.nbytes = {"heads": _bytes(layers), "draft_output_matrix": _bytes(self._outputs)}

    def __call__(self, rows: Float[Tensor, "B D"]) -> Float[Tensor, "B P n"]:
        """Every head's logits over the draft vocabulary."""
        state = rows[:, None] + F.silu(self._first(rows)).view(len(rows), self._count, -1)
        for layer in self._rest:
            updates = [product(state[:, head].contiguous()) for head, product in enumerate(layer)]
            state = state + F.silu(torch.stack(updates, 1))
        if len(self._outputs) == 1:
            return self._outputs[0](state.flatten(0, 1)).view(len(rows), self._count, -1)
        logits = [product(state[:, head].contiguous()) for head, product in enumerate(self._outputs)]
        return torch.stack(logits, 1)


class MedusaDrafter(LaunchedHeads):
    """Fills a tree of fixed shape with the heads' candidates; a node's token does not depend on its parent."""

    def __init__(self, target: CausalLM, heads: Heads, tree: Tree) -> None:
        super().__init__(target)
        shape = tree.shape()
        self.model = MedusaModel(target, heads, tree.levels)
        self.nodes, self._width, self._triton = len(shape.parents), tree.width, target.kernels == "triton"
        self.nbytes = self.model.nbytes
        self._layout, self._gains = Layout(shape, target.device), tree.gains()
        self._vocabulary = heads.vocabulary
        depth = [len(path) - 1 for path in sorted(tree.paths, key=lambda path: (len(path), path))]
        place = torch.tensor(depth) * self._width + torch.tensor(shape.ranks)
        self._place = place.to(target.device)  # of each node among the candidates of all heads

    def _drafted(self, state: Float[Tensor, "B D"], root: Int[Tensor, "B"]) -> Drafted:
        candidates = top_candidates(self.model(state), self._width, self._triton)
        tokens = self._vocabulary.tokens(candidates.flatten(1)[:, self._place])
        return (tokens,), self._layout.draft(tokens, 1, self._gains)


class Layout:
    """The shape of every draft, in the form that the loop and the rules need."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self._parents = torch.tensor([shape.parents], device=device)
        self._levels = len(shape.level_ends)
        self._chain = shape.parents == tuple(range(-1, len(shape.parents) - 1))
        self._width = max(shape.parents.count(parent) for parent in shape.parents)

    def draft(self, tokens: Int[Tensor, "B N"], passes: int, gains: list[float] | None = None) -> Draft:
        """A draft of this shape; a chain, which costs the target no mask, where no node has two children."""
        every = None if gains is None else [gains] * len(tokens)
        if self._chain:
            return replace(Draft.chain(tokens, passes=passes), gains=every)
        parents = self._parents.expand(len(tokens), -1)
        return Draft(tokens, parents, levels=self._levels, width=self._width, passes=passes, gains=every)


def rule_of(acceptance: Acceptance, sampling: Sampling, epsilon: float, delta: float) -> AcceptanceRule:
    """The rule of an acceptance.

    Raises:
        ValueError: an unknown one, or constants out of range.
    """
    if acceptance not in ("exact", "typical"):
        raise ValueError(f"acceptance must be exact or typical, got {acceptance}. Set method.acceptance.")
    typical = Typical(epsilon, delta)
    return typical if acceptance == "typical" else default_rule(sampling, "tree", drawn=False)


# -- choosing the tree ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TreeChoice:
    """The options that say which tree is drafted; see ``Medusa``.

    Attributes:
        heads: how many there are.
        vocabulary: tokens that each proposes from.

    Raises:
        ValueError: a number of nodes below 1.
    """

    wanted: str | Sequence[Sequence[int]]
    nodes: int | Literal["auto"]
    ranks: Int[Tensor, "N P"] | None
    heads: int
    vocabulary: int

    def __post_init__(self) -> None:
        if not (self.nodes == "auto" or (isinstance(self.nodes, int) and self.nodes >= 1)):
            raise ValueError(
                f"nodes must be auto or at least 1, got {self.nodes}. For no draft use method=autoregressive."
            )

    def tree(self, costs: Costs | None) -> Tree:
        """The tree by these costs.

        Raises:
            ValueError: an unknown or impossible tree, or one the heads cannot fill.
        """
        if self.wanted == MEASURED and self.ranks is not None:
            tree = candidate_tree.search(self.ranks)
            if self.nodes != "auto":
                return tree.first(self.nodes)
            return tree.first(_NODES) if costs is None else candidate_tree.planned(tree.first(_NODES), costs)
        tree = _written(self.wanted, self.heads)
        if tree.levels > self.heads or tree.width > self.vocabulary:
            raise ValueError(
                f"tree must need at most {self.heads} heads and {self.vocabulary} candidates of each, got "
                f"{self.wanted}, which needs {tree.levels} heads and {tree.width} candidates. Name a smaller tree."
            )
        return tree if self.nodes == "auto" else tree.first(self.nodes)


class StaticTreeDecoder(HeadsDecoder):
    """A decoder with heads and a tree of fixed shape, which is chosen anew when costs become known.

    Args:
        choice: of the tree.
        make: the drafter of a tree.

    Attributes:
        tree: which is drafted at most.
    """

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        choice: TreeChoice,
        make: Callable[[Tree], HeadsDrafter],
        rule: AcceptanceRule,
        published: str | None,
        costs: CostsOption,
    ) -> None:
        given = Costs.given(costs)
        self._choice, self.tree = choice, choice.tree(given)
        self._make = make if costs == "auto" else None  # it holds the weights, which the drafter has in another form
        super().__init__(target, sampling, make(self.tree), rule, published, costs)
        if given is not None:
            self.costs = self._for_tree(given)

    def use_costs(self, costs: Sequence[Sequence[int | float]]) -> None:
        super().use_costs(costs)
        assert self.costs is not None
        if self._make is not None:
            self.tree = self._choice.tree(self.costs)
            self.drafter = self._heads = self._make(self.tree)
            self._make = None
        self.costs = self._for_tree(self.costs)

    def _for_tree(self, costs: Costs) -> Costs:
        """With the time of drafting this tree, of those for the one that is drafted without costs."""
        whole = self._choice.tree(None)
        return replace(costs, draft=costs.draft * self.tree.levels / whole.levels)


def _written(wanted: str | Sequence[Sequence[int]], heads: int) -> Tree:
    if not isinstance(wanted, str):
        return candidate_tree.named(wanted)
    name = next(iter(TREES)) if wanted == MEASURED else wanted
    if name not in TREES:
        raise ValueError(
            f"tree must be {MEASURED}, {', '.join(TREES)} or paths of ranks, e.g. [[0],[1],[0,0]], got {wanted}. Set "
            "method.tree."
        )
    return Tree(TREES[name]).within(heads)


class Medusa(StaticTreeDecoder):
    """Medusa with a static tree.

    Args:
        tree: ``measured``, by the heads' own candidates on held-out text (for published heads, which have no
            measurement, the paper's tree); a name in ``candidate_tree.TREES``; or paths of ranks, each after its
            parent, e.g. ``[[0],[1],[0,0]]``.
        nodes: most of its nodes that are drafted, the best ones; ``auto``: as many as may pay by ``costs`` (63 of a
            measured tree without them), all of a tree whose nodes were not measured.
        costs: of passes, by which drafts are sized; see ``methods.speculative.budget``.
        acceptance: ``exact``, or ``typical``: keep what the target finds likely enough; that changes the text.
        epsilon, delta: of the typical acceptance: p > min(epsilon, delta * exp(-entropy)).
        checkpoint: folder of trained heads, or published ones by path or hub id; None: those prepared for this model.

    Raises:
        ValueError: no heads, heads of another target, or an option out of range.
    """

    continuous_batching = True
    paper = "Cai et al. 2024, arXiv 2401.10774"

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        tree: str | Sequence[Sequence[int]] = MEASURED,
        nodes: int | Literal["auto"] = "auto",
        costs: CostsOption = None,
        acceptance: Acceptance = "exact",
        epsilon: float = 0.09,
        delta: float = 0.3,
        checkpoint: str | Path | None = None,
    ) -> None:
        folder = own_folder("medusa", "heads", checkpoint)
        heads = Heads.load(folder, target) if folder is not None else Heads.published(str(checkpoint), target)
        choice = TreeChoice(tree, nodes, heads.ranks, len(heads.blocks), len(heads.vocabulary))
        rule = rule_of(acceptance, sampling, epsilon, delta)
        published = str(checkpoint) if folder is None else None
        super().__init__(target, sampling, choice, partial(MedusaDrafter, target, heads), rule, published, costs)


# -- products ---------------------------------------------------------------------------------------------------------


def output_products(
    target: CausalLM,
    vocabulary: DraftVocabulary,
    outputs: Sequence[Float[Tensor, "n D"]] | None,
    used: int,
    biases: Sequence[Float[Tensor, "n"] | None] | None = None,
) -> list[Linear]:
    """One product for all heads that share the target's output matrix; else one per head."""
    if outputs is None:
        weight, bias = target.output_rows(vocabulary.ids)
        return [target.draft_linear([weight], [bias])]
    return [target.draft_linear([outputs[head]], [biases[head] if biases else None]) for head in range(used)]


def _bytes(products: Sequence[Linear]) -> int:
    return sum(product.nbytes for product in products)


# -- files ------------------------------------------------------------------------------------------------------------


def save_heads(
    folder: Path,
    target: CausalLM,
    tensors: dict[str, Tensor],
    vocabulary: DraftVocabulary,
    ranks: Int[Tensor, "N P"],
    facts: dict[str, Any],
) -> None:
    """Write trained heads: weights in 16 bit, the draft vocabulary, the measured ranks, and the sizes of the target."""
    whole = {"vocabulary": vocabulary.ids.to(torch.int32), "ranks": ranks.to(torch.uint8)}
    write_part(folder, tensors | whole, facts | target_sizes(target))


def read_heads(folder: Path, method: str, target: CausalLM) -> tuple[int, int, dict[str, Tensor]]:
    """What ``save_heads`` wrote: numbers of heads and blocks, and the tensors.

    Raises:
        ValueError: files are missing or damaged, or belong to another target.
    """
    wanted = ("heads", "blocks", *target_sizes(target))
    config, tensors = read_part(folder, method, lambda found: {key: int(found[key]) for key in wanted})
    heads, blocks = config.pop("heads"), config.pop("blocks")
    require_target(folder, method, config, target)
    return heads, blocks, tensors


def require_heads(folder: Path, tensors: dict[str, Tensor], weights: dict[str, tuple[int, ...]], heads: int) -> None:
    """Refuse a file that holds other tensors than its configuration announces.

    Raises:
        ValueError: naming those that differ.
    """
    found = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    free = {"vocabulary": found.get("vocabulary", (0,))[:1], "ranks": (*found.get("ranks", ())[:1], heads)}
    require_shapes(folder, tensors, weights | free)


def vocabulary_of(tensors: dict[str, Tensor], target: CausalLM) -> DraftVocabulary:
    """The draft vocabulary of a part, on the target's device."""
    return DraftVocabulary(tensors["vocabulary"].long().to(target.device), target.vocab_size)
