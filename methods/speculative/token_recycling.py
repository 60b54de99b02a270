"""Token recycling: candidates that the target rejected are kept and drafted later.

Luo et al. 2024, arXiv 2408.08696, sec. 3. A matrix holds, for every token, the k tokens the target last found most
likely after it. A tree of fixed shape is filled from it breadth first: the node of rank r below token t is the matrix's
r-th candidate for t. The pass that verifies the tree scores all its nodes, and their candidates go back into the
matrix. Nothing is trained.

Published: about 2x with Vicuna and Code Llama, 7B to 33B; Spec-Bench with Vicuna-7B: 2.22x on an A100, 2.73 tokens per
step, with a tree of 80 nodes and 8 candidates. Where a pass over 81 nodes costs five steps, as on a CPU, that tree
cannot pay; ``tree="small"`` has 7 nodes, and with ``costs`` those are drafted that pay (``budget.py``).

Differences: the matrix is cleared with each prompt, so results do not depend on the order of prompts (``warm=true``
keeps it), and every row has its own. Where a pass holds a token more than once, the last occurrence on the kept path
counts, else the one highest in the tree. Of tokens not yet scored, the prompt's bigrams are the candidates.

Command: ``python -m bench method=token_recycling dataset=spec_bench``
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from methods.drafting import Context, Draft
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling, top_candidates
from methods.engine.token_tree import Shape
from methods.speculative.budget import CostsOption
from methods.speculative.loop import SpeculativeDecoder
from methods.speculative.verification import default_rule

TREES: dict[str, list[list[int]]] = {
    # 80 nodes, 8 + 21 + 25 + 15 + 8 + 3 on six levels: the tree of the paper's experiments, as Spec-Bench runs it.
    "paper": [
        [8],
        [8, 4, 3, 2, 1, 1, 1, 1],
        [8, 3, 2, 1, 1, 1, 1, 1, 2, 1, 0, 0, 1, 0, 0, 1, 0, 1, 1],
        [5, 2, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1],
        [3, 1, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 1],
        [2, 0, 0, 1],
    ],
    # 7 nodes, those of the 80 that SmolLM2-135M kept most often, over prompts of dolly and of GSM8K's train split.
    "small": [[3], [2, 1], [1]],
}
"""Name -> numbers of children, as ``methods.engine.token_tree.Shape.of_children`` reads them."""


class CandidateMatrix:
    """For every row and every token, the k tokens last found most likely after it, the likeliest first.

    Args:
        vocab_size: tokens.
        k: candidates per token.
        warm: whether ``reset`` keeps the content.

    Attributes:
        nothing: marks a token without known candidates.
    """

    def __init__(self, vocab_size: int, k: int, warm: bool, device: torch.device) -> None:
        self._warm = warm
        self.nothing = vocab_size  # one line more than there are tokens: where what is not to be learnt is written
        self._lines = torch.zeros(1, vocab_size + 1, k, dtype=torch.int32, device=device)
        self._set_rows([0])

    def reset(self, batch: int) -> None:
        """Make room for ``batch`` rows. A warm matrix keeps its rows; further ones start as copies of the first."""
        if not self._warm:
            self._lines = self._lines.new_zeros(batch, *self._lines.shape[1:])
        elif batch != len(self._lines):
            more = self._lines[:1].expand(max(batch - len(self._lines), 0), -1, -1)
            self._lines = torch.cat([self._lines[:batch], more])
        self._set_rows(range(batch))

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Go on with some rows only, in this order; a warm matrix keeps the lines of the others for later texts."""
        self._set_rows([self._rows[row] for row in rows])

    def _set_rows(self, rows: Sequence[int]) -> None:
        self._rows = list(rows)
        self._row = torch.tensor(self._rows, device=self._lines.device)[:, None]

    def forget(self, row: int) -> None:
        """Let a row know nothing, unless the matrix is warm."""
        if not self._warm:
            self._lines[self._rows[row]] = 0

    def suggest(self, row: int, text: Sequence[int]) -> None:
        """Use the bigrams of a text, latest first, as candidates of tokens that have none yet."""
        followers: dict[int, dict[int, None]] = {}  # a dict keeps the order of insertion
        for token, follower in zip(text[-2::-1], text[:0:-1], strict=True):
            followers.setdefault(token, {})[follower] = None
        if not followers:
            return
        k = self._lines.shape[2]
        tokens = torch.tensor(list(followers), device=self._lines.device)
        bigrams = self._lines.new_tensor([(list(found) + [0] * k)[:k] for found in followers.values()])
        line = self._rows[row]
        known = self._lines[line, tokens]
        self._lines[line, tokens] = torch.where(known.any(1, keepdim=True), known, bigrams)

    def learn(
        self, tokens: Int[Tensor, "B M"], candidates: Int[Tensor, "B M k"], rank: Int[Tensor, "B M"] | None = None
    ) -> None:
        """Replace the candidates of ``tokens``; of equal tokens in a row, the one with the highest ``rank`` counts."""
        if rank is not None:
            equal = tokens[:, :, None] == tokens[:, None, :]
            beaten = (equal & (rank[:, None, :] > rank[:, :, None])).any(2)
            tokens = torch.where(beaten, self.nothing, tokens)
        self._lines[self._row, tokens] = candidates.to(self._lines.dtype)

    def find(self, tokens: Int[Tensor, "B n"], ranks: Int[Tensor, "n"]) -> Int[Tensor, "B n"]:
        """The candidate of rank ``ranks[i]`` after ``tokens[:, i]``."""
        return self._lines[self._row, tokens, ranks].long()


class RecyclingDrafter:
    """Fills a tree of fixed shape from the matrix, and the matrix from whatever the target has scored."""

    hidden_layers: Sequence[int] = ()

    def __init__(self, shape: Shape, vocab_size: int, warm: bool, device: torch.device) -> None:
        self.nodes = len(shape.parents)
        self._shape, self._k = shape, shape.width
        self._matrix = CandidateMatrix(vocab_size, self._k, warm, device)
        self._parents = torch.tensor(shape.parents, device=device)
        self._ranks = torch.tensor(shape.ranks, device=device)
        self._scored = torch.empty(0, 1, dtype=torch.long, device=device)

    def reset(self, prompts: list[list[int]], limit: int) -> None:
        self._matrix.reset(len(prompts))
        for row, prompt in enumerate(prompts):
            self._matrix.suggest(row, prompt)
        self._scored = torch.tensor([[prompt[-1]] for prompt in prompts], device=self._parents.device)

    def keep_rows(self, rows: Sequence[int]) -> None:
        self._matrix.keep_rows(rows)
        self._scored = self._scored[list(rows)]

    def reset_rows(self, prompts: Mapping[int, list[int]]) -> None:
        for row, prompt in prompts.items():
            self._matrix.forget(row)
            self._matrix.suggest(row, prompt)
            self._scored[row] = self._matrix.nothing  # whatever else that pass scored in this row is of another text
            self._scored[row, 0] = prompt[-1]

    def propose(self, context: Context) -> Draft:
        candidates = top_candidates(context.output.logits, self._k)
        self._matrix.learn(self._scored, candidates, _authority(self._scored, context.path))
        self._scored = self._fill(context.root)
        return Draft(
            self._scored[:, 1:],
            self._parents.expand(len(self._scored), -1),
            levels=len(self._shape.level_ends),
            width=self._shape.width,
        )

    def trim(self, columns: Int[Tensor, "B n"]) -> None:
        """Learn only after these columns, which are those that the target scores."""
        self._scored = torch.cat([self._scored[:, :1], self._scored.gather(1, columns + 1)], dim=1)

    def skip(self, context: Context) -> None:
        """Of the rounds until the next proposal only the last one is learned from."""
        self._scored = context.root[:, None].clone()

    def _fill(self, root: Int[Tensor, "B"]) -> Int[Tensor, "B M"]:
        nodes = root[:, None].repeat(1, 1 + self.nodes)
        start = 0
        for end in self._shape.level_ends:
            parents = nodes[:, self._parents[start:end] + 1]
            nodes[:, 1 + start : 1 + end] = self._matrix.find(parents, self._ranks[start:end])
            start = end
        return nodes


def _authority(tokens: Int[Tensor, "B M"], path: Int[Tensor, "B P"] | None) -> Int[Tensor, "B M"]:
    """Rank of each node's candidates if a pass holds a token twice: the last on the kept path, else the first in the
    tree.
    """
    batch, count = tokens.shape
    place = torch.arange(count, device=tokens.device).expand(batch, -1)
    if path is None:
        return place
    kept = torch.zeros(batch, count + 1, dtype=torch.bool, device=tokens.device)
    kept.scatter_(1, torch.where(path >= 0, path, count), True)
    return torch.where(kept[:, :count], count + place, -place)


class TokenRecycling(SpeculativeDecoder):
    """Token recycling with a static tree.

    Args:
        target: model that verifies and whose candidates are kept.
        tree: a name in ``TREES``, or numbers of children, level by level and breadth first, e.g. ``[[3], [2, 1]]``.
            The matrix keeps as many candidates as the tree is wide.
        warm: keep the matrix from prompt to prompt. The output stays exact, but its speed depends on earlier prompts.
        costs: of passes, by which the best nodes of the tree are drafted; see ``methods.speculative.budget``.

    Raises:
        ValueError: an unknown tree, one without nodes, or one wider than the vocabulary.
    """

    continuous_batching = True
    reads_logits = True
    paper = "Luo et al. 2024, arXiv 2408.08696"

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        tree: str | list[list[int]] = "paper",
        warm: bool = False,
        costs: CostsOption = None,
    ) -> None:
        shape = Shape.chosen("tree", tree, TREES, target.vocab_size)
        drafter = RecyclingDrafter(shape, target.vocab_size, warm, target.device)
        super().__init__(target, sampling, drafter, default_rule(sampling, "tree", drawn=False), costs)
