"""Training of the heads of method=blockwise on the target's own answers.

The target is frozen, so its states over its answers are computed once and read from files. The paper minimises the mean
of the heads' losses and draws one of them for each batch, because all did not fit into memory (Stern et al. 2018, arXiv
1811.03115, sec. 6). Here they do, the logits being a few thousand wide, and all heads share the states and the first
layer: each batch trains every head (``heads_per_step: all``). ``one`` is the paper's way, whose gradient is the same in
expectation.

Command: ``python -m bench train method=blockwise model=smollm2``
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from methods.engine.causal_lm import CausalLM
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.speculative.heads.blockwise import Heads, Shape, states
from methods.training.features import Batch, Features
from methods.training.head_trainer import HeadTraining, Learner
from methods.training.interface import TrainingContext, require

HeadsPerStep = Literal["all", "one"]


class BlockwiseLearner(Learner):
    """Heads 2 to k over a frozen target.

    They start as head 1: the second layer is zero, so every head's state is the target's own.

    Args:
        target, vocabulary: see ``Learner``.
        k: tokens of a block.
        hidden: units of the layer that the heads share.
        per_step: train all heads with each batch, or one drawn at random.
    """

    def __init__(
        self, target: CausalLM, vocabulary: DraftVocabulary, k: int, hidden: int, per_step: HeadsPerStep
    ) -> None:
        super().__init__(target, vocabulary)
        self.shape = Shape(k, hidden, target.hidden_size, target.n_layers, target.vocab_size)
        self.per_step = per_step
        self.first = nn.Linear(target.hidden_size, hidden, device=target.device)
        self.second = nn.Linear(hidden, self.n_heads * target.hidden_size, device=target.device)
        nn.init.zeros_(self.second.weight)
        nn.init.zeros_(self.second.bias)

    @property
    def n_heads(self) -> int:
        """Those that are trained: all but the first, the target's."""
        return self.shape.k - 1

    def heads(self) -> Heads:
        """The current heads."""
        first, second = ((layer.weight.detach(), layer.bias.detach()) for layer in (self.first, self.second))
        return Heads(self.shape, first, second, self.vocabulary)

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor | float]]:
        """Mean cross-entropy of the heads that are trained (sec. 6 of the paper).

        A token outside the draft vocabulary cannot be proposed, so it does not count.
        """
        rows, labels, judged = self._places(batch)
        proposed = states(rows, self.first, self.second)
        taught = range(self.n_heads) if self.per_step == "all" else [int(torch.randint(self.n_heads, ()))]
        losses = {}
        for head in taught:
            wanted = self.vocabulary.of(labels[:, head]).masked_fill(~judged[:, head], -1)
            losses[head] = _cross_entropy(self.logits(proposed[:, head]), wanted)
        curves: dict[str, Tensor | float] = {f"loss_{head + 2}": loss.detach() for head, loss in losses.items()}
        return torch.stack(list(losses.values())).mean(), curves

    def hits(self, batch: Batch) -> tuple[Int[Tensor, "P 1"], Int[Tensor, "P"]]:
        """See ``Learner.hits``; only the first rank is ever proposed."""
        rows, labels, judged = self._places(batch)
        proposed = states(rows, self.first, self.second)
        alive = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        right, count = [], []
        for head in range(self.n_heads):
            best = self.vocabulary.tokens(self.logits(proposed[:, head]).argmax(-1))
            alive = alive & judged[:, head]
            count.append(alive.sum())
            alive = alive & (best == labels[:, head])
            right.append(alive.sum())
        return torch.stack(right)[:, None], torch.stack(count)

    def _places(self, batch: Batch) -> tuple[Float[Tensor, "R D"], Int[Tensor, "R n"], Bool[Tensor, "R n"]]:
        """States to propose from, what each head should propose there, and whether the answer is that long.

        The states are those from which the target writes the answer: after the prompt, and after each of its tokens.
        """
        _, written = batch.shifted(1)
        ahead = [batch.shifted(2 + head) for head in range(self.n_heads)]
        labels = torch.stack([tokens[written] for tokens, _ in ahead], dim=1)
        judged = torch.stack([valid[written] for _, valid in ahead], dim=1)
        return batch.hidden[written], labels, judged


@dataclass(kw_only=True)
class BlockwiseTraining(HeadTraining):
    """Trains heads 2 to k.

    Args:
        k: tokens of a block, the target's own included.
        hidden: units of the layer that the heads share; None: the target's hidden size for each of them.
        heads_per_step: see ``BlockwiseLearner``.
        vocabulary, answers, features, recipe: see ``HeadTraining``.
    """

    description = "heads that propose the next tokens from the target's last state"
    duration = "under an hour on two CPU cores for smollm2, half of it the target's answers"

    k: int = 4
    hidden: int | None = None
    heads_per_step: HeadsPerStep = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        require("at least 2", k=self.k)
        require("at least 1", hidden=self.hidden)

    def learner(self, target: CausalLM, vocabulary: DraftVocabulary, found: Features) -> BlockwiseLearner:
        """See ``HeadTraining``."""
        hidden = self.hidden or (self.k - 1) * target.hidden_size
        return BlockwiseLearner(target, vocabulary, self.k, hidden, self.heads_per_step)

    def save(self, learner: BlockwiseLearner, found: Features, context: TrainingContext) -> dict[str, Any]:
        """See ``HeadTraining``."""
        learner.heads().save(context.output)
        return {}


def _cross_entropy(logits: Float[Tensor, "R v"], wanted: Int[Tensor, "R"]) -> Float[Tensor, ""]:
    """Mean over the rows whose place in the vocabulary is known (not -1); 0 where there is none."""
    total = F.cross_entropy(logits.float(), wanted, ignore_index=-1, reduction="sum")
    return total / (wanted >= 0).sum().clamp(min=1)
