"""Hydra heads: Medusa's heads, each of which also reads the tokens drafted before the one it proposes.

Ankner et al. 2024, arXiv 2402.05109. Head i reads the target's state h after its final norm, the embedding of the root
and those of the i tokens after it (sec. 3). Its first block takes these (i + 2) D numbers to D, z = R x + r + SiLU(W x
+ b), further ones add SiLU(W z + b), and an output matrix turns z into a distribution. The children of a node depend on
it, so the tree is filled level by level, one small pass of the heads each. The heads must be trained; the target stays
as it is:

    python -m bench train method=hydra_heads model=smollm2

In Hydra++ (sec. 4) the state h is what a decoder layer of its own makes of the target's states of the whole text
(``hydra_prefix.py``; ``train.prefix=true``). Its heads have four layers in the paper (``train.blocks=4``).

Published (Hydra++): 2.70x with Vicuna-7B on MT-bench, one A100, 1.27x to 1.31x over Medusa; Spec-Bench with Vicuna-7B:
2.07x on an A100, 3.26 tokens per step, by 63 nodes. Published heads of both are read as they are; those that attend to
states in another way (``cross-attn``, ``eagle-attn``), that read no tokens, or a state of an earlier layer
(``hidden_state_offset``) are refused.

Differences: rows of a batch with a prefix layer take no new prompts (``measure.refill``). Heads trained here share the
target's output matrix, over a reduced vocabulary. Drafts are judged by the exact rule for drafts that were not drawn;
``acceptance=typical`` is Medusa's. Tree and options are Medusa's, see ``medusa.py``.

Command: ``python -m bench method=hydra_heads dataset=mtbench``
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from methods.drafting import Context, Draft
from methods.engine.causal_lm import CausalLM, Output
from methods.engine.checkpoint_files import own_folder
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.engine.sampling import Sampling, top_candidates
from methods.engine.token_tree import Shape
from methods.speculative.budget import CostsOption
from methods.speculative.heads.candidate_tree import Tree
from methods.speculative.heads.hydra_prefix import Prefix, prefix_shapes
from methods.speculative.heads.launched import LaunchedHeads
from methods.speculative.heads.medusa import (
    MEASURED,
    Acceptance,
    Layout,
    StaticTreeDecoder,
    TreeChoice,
    output_products,
    read_heads,
    require_heads,
    rule_of,
    save_heads,
    vocabulary_of,
)
from methods.speculative.published.formats import HydraWeights, read
from methods.speculative.recorded_network import Drafted

_PREFIX = "prefix."  # of tensors in a file of ours


@dataclass(frozen=True, slots=True)
class Block:
    """One layer of a head: ``R x + r + SiLU(W x + b)``.

    Attributes:
        weight, bias: W and b.
        residual, residual_bias: R and r; None: x itself, and nothing.
    """

    weight: Float[Tensor, "D I"]
    bias: Float[Tensor, "D"]
    residual: Float[Tensor, "D I"] | None = None
    residual_bias: Float[Tensor, "D"] | None = None


@dataclass(frozen=True, slots=True)
class Heads:
    """P heads.

    Attributes:
        blocks: the layers of every head; the first one reads (i + 2) D numbers.
        vocabulary: what they propose from.
        outputs: [n, D] and bias of every head; None: the target's own rows for the vocabulary.
        ranks: [positions, P] measured on held-out text, see ``candidate_tree.search``; None: not measured.
        prefix: of Hydra++, the tensors of the layer before the heads (``hydra_prefix.py``).
    """

    blocks: list[list[Block]]
    vocabulary: DraftVocabulary
    outputs: list[tuple[Float[Tensor, "n D"], Float[Tensor, "n"] | None]] | None = None
    ranks: Int[Tensor, "N P"] | None = None
    prefix: Mapping[str, Tensor] | None = None

    def save(self, folder: Path, target: CausalLM, facts: dict[str, Any]) -> None:
        """Write heads that use the target's output matrix."""
        assert self.outputs is None and self.ranks is not None
        tensors: dict[str, Tensor] = {}
        for key, (head, block, name) in _keys(len(self.blocks), len(self.blocks[0])).items():
            tensors[key] = getattr(self.blocks[head][block], name)
        tensors |= {_PREFIX + name: tensor for name, tensor in (self.prefix or {}).items()}
        sizes = {"heads": len(self.blocks), "blocks": len(self.blocks[0])}
        save_heads(folder, target, tensors, self.vocabulary, self.ranks, sizes | facts)

    @classmethod
    def load(cls, folder: Path, target: CausalLM) -> Heads:
        """Read what ``save`` wrote.

        Raises:
            ValueError: files are missing or damaged, or belong to another target.
        """
        count, layers, tensors = read_heads(folder, "hydra_heads", target)
        keys, width = _keys(count, layers), target.hidden_size
        shapes = {key: _shape(head, block, name, width) for key, (head, block, name) in keys.items()}
        prefixed = any(key.startswith(_PREFIX) for key in tensors)
        shapes |= {_PREFIX + name: shape for name, shape in prefix_shapes(target).items()} if prefixed else {}
        require_heads(folder, tensors, shapes, count)
        blocks: list[list[dict[str, Tensor]]] = [[{} for _ in range(layers)] for _ in range(count)]
        for key, (head, block, name) in keys.items():
            blocks[head][block][name] = tensors[key].to(target.device, target.dtype)
        heads = [[Block(**block) for block in head] for head in blocks]
        prefix = {key.removeprefix(_PREFIX): tensors[key] for key in shapes if key.startswith(_PREFIX)}
        return cls(heads, vocabulary_of(tensors, target), None, tensors["ranks"].long(), prefix or None)

    @classmethod
    def published(cls, checkpoint: str | Path, target: CausalLM) -> Heads:
        """Read a checkpoint in the published format, from a path or a hub id.

        Raises:
            ValueError: it cannot be read, or belongs to another target.
        """
        found = read(checkpoint, target)
        if not isinstance(found, HydraWeights):
            raise ValueError(
                f"{checkpoint} must hold heads of Hydra for method=hydra_heads, got {type(found).__name__}. Use the "
                "method that they were made for."
            )

        def here(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(target.device, target.dtype)

        blocks = [[Block(*map(here, block)) for block in head] for head in found.blocks]  # type: ignore[arg-type]
        outputs: Any = [(here(weight), here(bias)) for weight, bias in found.outputs]
        return cls(blocks, DraftVocabulary.all(target.vocab_size, target.device), outputs, prefix=found.prefix)


def _keys(heads: int, blocks: int) -> dict[str, tuple[int, int, str]]:
    keys = {}
    for head in range(heads):
        for block in range(blocks):
            for name in ("weight", "bias", *(("residual", "residual_bias") if block == 0 else ())):
                keys[f"heads.{head}.blocks.{block}.{name}"] = (head, block, name)
    return keys


def _shape(head: int, block: int, name: str, width: int) -> tuple[int, ...]:
    if name.endswith("bias"):
        return (width,)
    return (width, (head + 2) * width if block == 0 else width)


class HydraHead:
    """One head ready for decoding: W and R of the first block are one product."""

    def __init__(self, target: CausalLM, blocks: Sequence[Block]) -> None:
        first, made = blocks[0], target.draft_linear
        assert first.residual is not None, "the first block changes the width"
        rest_bias = torch.zeros_like(first.bias) if first.residual_bias is None else first.residual_bias
        self._first = made([first.weight, first.residual], [first.bias, rest_bias])
        self._rest = [
            (
                made([block.weight], [block.bias]),
                None if block.residual is None else made([block.residual], [block.residual_bias]),
            )
            for block in blocks[1:]
        ]
        self.nbytes = sum(product.nbytes for pair in [(self._first, None), *self._rest] for product in pair if product)

    def __call__(self, inputs: Float[Tensor, "R I"]) -> Float[Tensor, "R D"]:
        update, state = self._first(inputs).chunk(2, dim=-1)
        state = state + F.silu(update)
        for layer, own in self._rest:
            state = (state if own is None else own(state)) + F.silu(layer(state))
        return state


@dataclass(frozen=True, slots=True)
class Level:
    """How one level of the tree is made from the one above it.

    Attributes:
        open: of the nodes above, those that have children here.
        above, rank: of every node here, its parent's place among those and its rank among the parent's candidates.
        width: candidates needed of a parent.
    """

    open: Int[Tensor, "k"]
    above: Int[Tensor, "m"]
    rank: Int[Tensor, "m"]
    width: int


def levels_of(shape: Shape, device: torch.device) -> list[Level]:
    """The levels of a tree, from the root's children on."""
    found, first, start = [], -1, 0  # the first node of the level above, and the first of this one
    for end in shape.level_ends:
        parents, ranks = shape.parents[start:end], shape.ranks[start:end]
        opened = sorted(set(parents))
        numbers = ([parent - first for parent in opened], [opened.index(parent) for parent in parents], ranks)
        places, above, rank = (torch.tensor(row, device=device) for row in numbers)
        found.append(Level(places, above, rank, max(ranks) + 1))
        first, start = start, end
    return found


class HydraDrafter(LaunchedHeads):
    """Fills a tree of fixed shape level by level: every node's children are candidates given the path to it."""

    def __init__(self, target: CausalLM, heads: Heads, tree: Tree) -> None:
        super().__init__(target)
        shape = tree.shape()
        self.nodes = len(shape.parents)
        self._target, self._vocabulary, self._triton = target, heads.vocabulary, target.kernels == "triton"
        self._layout, self._levels = Layout(shape, target.device), levels_of(shape, target.device)
        self._gains = tree.gains()
        self._heads = [HydraHead(target, head) for head in heads.blocks[: tree.levels]]
        outputs = None if heads.outputs is None else [weight for weight, _ in heads.outputs]
        biases = None if heads.outputs is None else [bias for _, bias in heads.outputs]
        self._outputs = output_products(target, heads.vocabulary, outputs, tree.levels, biases)
        self.nbytes = {
            "heads": sum(head.nbytes for head in self._heads),
            "draft_output_matrix": sum(product.nbytes for product in self._outputs),
        }

    def _drafted(self, state: Float[Tensor, "B D"], root: Int[Tensor, "B"]) -> Drafted:
        begin = torch.cat([state, self._target.embed(root)], 1)
        inputs = begin[:, None]  # what the path to each node says
        drafted = []
        for number, level in enumerate(self._levels):
            inputs = inputs[:, level.open]
            tokens = self._candidates(number, inputs, level.width)[:, level.above, level.rank]
            drafted.append(tokens)
            if number + 1 < len(self._levels):
                inputs = torch.cat([inputs[:, level.above], self._target.embed(tokens)], 2)
        every = torch.cat(drafted, 1)
        return (every,), self._layout.draft(every, len(self._levels), self._gains)

    def _candidates(self, head: int, inputs: Float[Tensor, "B k I"], width: int) -> Int[Tensor, "B k width"]:
        output = self._outputs[min(head, len(self._outputs) - 1)]
        logits = output(self._heads[head](inputs.flatten(0, 1)))
        return self._vocabulary.tokens(top_candidates(logits.view(*inputs.shape[:2], -1), width, self._triton))


class PrefixedHydraDrafter(HydraDrafter):
    """Hydra++: the heads read what the prefix layer makes of the text's states."""

    reads_last = False

    def __init__(self, target: CausalLM, heads: Heads, tree: Tree) -> None:
        super().__init__(target, heads, tree)
        assert heads.prefix is not None
        self._prefix = Prefix(target, heads.prefix, self.nodes)
        self.hidden_layers = (target.n_layers - 1,)  # a prefill then returns the states of all places
        self.nbytes["prefix_layer"] = self._prefix.nbytes

    def reset(self, prompts: list[list[int]], limit: int) -> None:
        self._prefix.reset(prompts, limit)

    def resume(self, last: Context, prompts: list[list[int]], limit: int, kept: int) -> int:
        """See ``ResumingDrafter``."""
        return self._prefix.resume(last, prompts, limit, kept)

    def keep_rows(self, rows: Sequence[int]) -> None:
        self._prefix.keep_rows(rows)

    def reset_rows(self, prompts: Mapping[int, list[int]]) -> None:
        """Refuse.

        Raises:
            ValueError: the states of a prompt are known only where the whole batch begins.
        """
        raise ValueError(
            "measure.refill must be false with Hydra++ heads, whose prefix layer reads the states of whole prompts, "
            "got true. Set measure.refill=false, or use heads without a prefix layer."
        )

    def skip(self, context: Context) -> None:
        self._prefix.skip(context)

    def launch(self, report: Int[Tensor, "B R"], output: Output, context: Context) -> Draft | None:
        """Nothing: the prefix layer reads what the host knows of a round."""

    def _state(self, context: Context) -> Float[Tensor, "B D"]:
        return self._prefix.state(context)


class HydraHeads(StaticTreeDecoder):
    """Hydra heads with a static tree.

    Args:
        target: model that verifies, and whose states and embeddings the heads read.
        tree, nodes, costs, acceptance, epsilon, delta: see ``methods.speculative.heads.medusa.Medusa``.
        checkpoint: folder of trained heads, or published ones by path or hub id; None: those prepared for this model.

    Raises:
        ValueError: no heads, heads of another target, or an option out of range.
    """

    continuous_batching = True
    paper = "Ankner et al. 2024, arXiv 2402.05109"

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
        folder = own_folder("hydra_heads", "heads", checkpoint)
        heads = Heads.load(folder, target) if folder is not None else Heads.published(str(checkpoint), target)
        choice = TreeChoice(tree, nodes, heads.ranks, len(heads.blocks), len(heads.vocabulary))
        rule = rule_of(acceptance, sampling, epsilon, delta)
        published = str(checkpoint) if folder is None else None
        drafter = HydraDrafter if heads.prefix is None else PrefixedHydraDrafter
        super().__init__(target, sampling, choice, partial(drafter, target, heads), rule, published, costs)
