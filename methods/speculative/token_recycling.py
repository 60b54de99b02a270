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
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from methods.drafting import Context, Draft
from methods.engine.causal_lm import CausalLM, Output
from methods.engine.cuda_graphs import NODES, Calls, GraphedLM, Graphs, padded
from methods.engine.greedy_round import kept_nodes
from methods.engine.sampling import Sampling, top_candidates
from methods.engine.token_tree import ABSENT, Shape
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
        lines: the matrix. Those of a batch size keep their address.
    """

    def __init__(self, vocab_size: int, k: int, warm: bool, device: torch.device) -> None:
        self._warm = warm
        self.nothing = vocab_size  # one line more than there are tokens: where what is not to be learnt is written
        self.lines = torch.zeros(1, vocab_size + 1, k, dtype=torch.int32, device=device)
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}
        self.reset(1)

    def reset(self, batch: int) -> None:
        """Make room for ``batch`` rows. A warm matrix keeps its rows; further ones start as copies of the first."""
        before = self.lines
        if batch not in self._tables:
            with torch.inference_mode(False):
                rows = torch.arange(batch, device=before.device)[:, None]
                self._tables[batch] = before.new_zeros(batch, *before.shape[1:]), rows
        self.lines, self._row = self._tables[batch]
        self._rows = list(range(batch))
        if not self._warm:
            self.lines.zero_()
        elif self.lines is not before:
            both = min(batch, len(before))
            self.lines[:both], self.lines[both:] = before[:both], before[:1]

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Go on with some rows only, in this order; a warm matrix keeps the lines of the others for later texts."""
        self._rows = [self._rows[row] for row in rows]
        self._row = torch.tensor(self._rows, device=self.lines.device)[:, None]

    def forget(self, row: int) -> None:
        """Let a row know nothing, unless the matrix is warm."""
        if not self._warm:
            self.lines[self._rows[row]] = 0

    def suggest(self, row: int, text: Sequence[int]) -> None:
        """Use the bigrams of a text, latest first, as candidates of tokens that have none yet."""
        followers: dict[int, dict[int, None]] = {}  # a dict keeps the order of insertion
        for token, follower in zip(text[-2::-1], text[:0:-1], strict=True):
            followers.setdefault(token, {})[follower] = None
        if not followers:
            return
        k = self.lines.shape[2]
        tokens = torch.tensor(list(followers), device=self.lines.device)
        bigrams = self.lines.new_tensor([(list(found) + [0] * k)[:k] for found in followers.values()])
        line = self._rows[row]
        known = self.lines[line, tokens]
        self.lines[line, tokens] = torch.where(known.any(1, keepdim=True), known, bigrams)

    def learn(
        self, tokens: Int[Tensor, "B M"], candidates: Int[Tensor, "B M k"], rank: Int[Tensor, "B M"] | None = None
    ) -> None:
        """Replace the candidates of ``tokens``; of equal tokens in a row, the one with the highest ``rank`` counts."""
        if rank is not None:
            equal = tokens[:, :, None] == tokens[:, None, :]
            beaten = (equal & (rank[:, None, :] > rank[:, :, None])).any(2)
            tokens = torch.where(beaten, self.nothing, tokens)
        self.lines[self._row, tokens] = candidates.to(self.lines.dtype)

    def find(self, tokens: Int[Tensor, "B n"], ranks: Int[Tensor, "n"]) -> Int[Tensor, "B n"]:
        """The candidate of rank ``ranks[i]`` after ``tokens[:, i]``."""
        return self.lines[self._row, tokens, ranks].long()


class RecyclingDrafter:
    """Fills a tree of fixed shape from the matrix, and the matrix from whatever the target has scored."""

    hidden_layers: Sequence[int] = ()
    reads_last = True

    def __init__(
        self, shape: Shape, vocab_size: int, warm: bool, device: torch.device, graphs: Graphs | None = None
    ) -> None:
        self.nodes = len(shape.parents)
        self._shape, self._k = shape, shape.width
        self._matrix = CandidateMatrix(vocab_size, self._k, warm, device)
        self._parents = torch.tensor(shape.parents, device=device)
        self._ranks = torch.tensor(shape.ranks, device=device)
        self._scored = torch.empty(0, 1, dtype=torch.long, device=device)
        self._calls = None if graphs is None else Calls(graphs)
        self._draft: Draft | None = None  # what was launched
        if graphs is not None:
            graphs.drafts.add(self)

    def reset(self, prompts: list[list[int]], limit: int) -> None:
        self._draft = None
        self._matrix.reset(len(prompts))
        for row, prompt in enumerate(prompts):
            self._matrix.suggest(row, prompt)
        self._scored = torch.tensor([[prompt[-1]] for prompt in prompts], device=self._parents.device)

    def keep_rows(self, rows: Sequence[int]) -> None:
        self._matrix.keep_rows(rows)
        self._scored = self._scored[list(rows)]

    def reset_rows(self, prompts: Mapping[int, list[int]]) -> None:
        if self._draft is not None:  # what the last pass said of the other rows is learnt
            self._draft = None
            self._scored.fill_(self._matrix.nothing)
        for row, prompt in prompts.items():
            self._matrix.forget(row)
            self._matrix.suggest(row, prompt)
            self._scored[row] = self._matrix.nothing  # whatever else that pass scored in this row is of another text
            self._scored[row, 0] = prompt[-1]

    def propose(self, context: Context) -> Draft:
        draft, self._draft = self._draft, None
        if draft is not None:
            return draft
        path = context.path if context.report is None else kept_nodes(context.report)
        return self._recycled(context.root, context.output, path)

    def launch(self, report: Int[Tensor, "B R"], output: Output, context: Context) -> Draft | None:
        """See ``LaunchedDrafter``."""
        self._draft = self._recycled(report[:, 0], output, kept_nodes(report))
        return self._draft

    def _recycled(self, root: Int[Tensor, "B"], output: Output, path: Int[Tensor, "B P"] | None) -> Draft:
        """Learn from a pass of which the nodes of a path were kept, and draft."""
        candidates = output.candidates
        if candidates is None:
            candidates = top_candidates(output.logits, self._k)
        if self._calls is None:
            self._scored, draft = self._learnt(root, self._scored, candidates, path)[1]
            return draft
        path = torch.zeros_like(self._scored[:, :1]) if path is None else path
        width = padded(self._scored.shape[1])
        scored, path = _wide(self._scored, width, self._matrix.nothing), _wide(path, width, ABSENT)
        if candidates.shape[1] != width:
            candidates = F.pad(candidates, (0, 0, 0, width - candidates.shape[1]))
        inputs = [root, scored, candidates, path]
        self._scored, draft = self._calls(self._learnt, inputs, [self._matrix.lines])
        return draft

    def _learnt(
        self,
        root: Int[Tensor, "B"],
        scored: Int[Tensor, "B M"],
        candidates: Int[Tensor, "B C k"],
        path: Int[Tensor, "B P"] | None,
    ) -> tuple[tuple[Tensor, ...], tuple[Int[Tensor, "B N"], Draft]]:
        """What a call renews, and the nodes of the next pass with their draft."""
        self._matrix.learn(scored, candidates, _authority(scored, path))
        nodes, levels = self._fill(root), len(self._shape.level_ends)
        parents = self._parents.expand(len(nodes), -1)
        return (nodes,), (nodes, Draft(nodes[:, 1:], parents, levels=levels, width=self._shape.width))

    def prepare(self, slots: Mapping[int, int]) -> None:
        """See ``methods.engine.cuda_graphs.RecordedDrafts``."""
        if self._calls is None or not self._calls.inputs(1):
            return
        most = padded(1 + self.nodes)
        for batch in slots:
            self._matrix.reset(batch)
            for width in {most, *(nodes for nodes in NODES if nodes < most)}:
                scored = torch.zeros(batch, width, dtype=torch.long, device=self._parents.device)
                inputs = [scored[:, 0], scored, scored[:, :, None].expand(-1, -1, self._k), scored]
                self._calls.record(self._learnt, inputs, [self._matrix.lines])

    def trim(self, columns: Int[Tensor, "B n"]) -> None:
        """Learn only after these columns, which are those that the target scores."""
        self._scored = torch.cat([self._scored[:, :1], self._scored.gather(1, columns + 1)], dim=1)

    def skip(self, context: Context) -> None:
        """Of the rounds until the next proposal only the last one is learned from, beside what was launched."""
        self._draft = None
        self._scored = context.root[:, None].clone()

    def _fill(self, root: Int[Tensor, "B"]) -> Int[Tensor, "B M"]:
        nodes = root[:, None].repeat(1, 1 + self.nodes)
        start = 0
        for end in self._shape.level_ends:
            parents = nodes[:, self._parents[start:end] + 1]
            nodes[:, 1 + start : 1 + end] = self._matrix.find(parents, self._ranks[start:end])
            start = end
        return nodes


def _wide(columns: Int[Tensor, "B M"], width: int, filling: int) -> Int[Tensor, "B W"]:
    more = width - columns.shape[1]
    return F.pad(columns, (0, more), value=filling) if more else columns


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
        graphs = target.graphs if isinstance(target, GraphedLM) else None
        drafter, self.candidates = RecyclingDrafter(shape, target.vocab_size, warm, target.device, graphs), shape.width
        super().__init__(target, sampling, drafter, default_rule(sampling, "tree", drawn=False), costs)
