"""Training of the heads of method=medusa on the target's own answers.

Medusa-1, Cai et al. 2024, arXiv 2401.10774, sec. 2.2.1: the target is frozen, and the loss is the sum over the heads of
a cross-entropy, weighted by ``decay`` to the power of the head's number. The label of head i is the token i + 2 places
after the state it reads, at the states from which the target writes its answers; the reference code intends to leave
the prompts out as well, but has an ``or`` in place of an ``and``. A token outside the draft vocabulary cannot be
proposed: it is not part of the loss, and counts as a miss wherever heads are judged.

``labels=hard`` learns the answers, which are the target's greedy ones, so their tokens are what has to be proposed.
``soft`` learns the target's distribution at the place of the label, over the draft vocabulary, which says more where
the target is undecided, and is what to match at a temperature.

Heads have no parameters in common, so ``decay`` hardly matters to AdamW, which normalises the gradient; it does where
the gradient is clipped. 1.0 is the reference code's; the paper has 0.8 for training the target along.

Command: ``python -m bench train method=medusa model=smollm2``
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from methods.engine.causal_lm import CausalLM
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.speculative.heads.candidate_tree import RANKS, accuracies, search
from methods.speculative.heads.medusa import Heads
from methods.training.draft_training import DraftTraining
from methods.training.features import Batch, Features
from methods.training.head_trainer import Learner
from methods.training.interface import TrainingContext, require
from methods.training.losses import CROSS_ENTROPY, DraftLoss, draft_loss_of_states

Labels = Literal["hard", "soft"]

_MEASURED = 512  # held-out dialogues for the choice of the tree


@dataclass(frozen=True, slots=True)
class DraftStates:
    """The places of a batch from which something can be drafted: after the prompt, and after tokens of the answer.

    Attributes:
        hidden: the target's state there, from which the next token, the root, is chosen, or what heads read for it.
        tokens: the root and the P tokens after it; column i + 1 is the label of head i.
        judged: whether the answer is long enough for each head's label.
        later: the target's states from which the labels were chosen.
    """

    hidden: Float[Tensor, "n D"]
    tokens: Int[Tensor, "n Q"]
    judged: Bool[Tensor, "n P"]
    later: Float[Tensor, "n P D"]

    @classmethod
    def of(cls, batch: Batch, heads: int, read: Float[Tensor, "B T D"] | None = None) -> DraftStates:
        """Every place whose root and at least one label are tokens of the answer; ``read``: states that heads read."""
        rows, places = (batch.shifted(1)[1] & batch.shifted(2)[1]).nonzero(as_tuple=True)
        ahead = places[:, None] + torch.arange(1, heads + 2, device=places.device)
        inside = ahead < batch.tokens.shape[1]
        ahead = torch.where(inside, ahead, 0)
        judged = (inside & batch.answered[rows[:, None], ahead])[:, 1:]
        tokens = batch.tokens[rows[:, None], ahead]
        hidden = (batch.hidden if read is None else read)[rows, places]
        return cls(hidden, tokens, judged, batch.hidden[rows[:, None], ahead[:, :-1]])


@runtime_checkable
class TreeHeads(Protocol):
    """Trained heads that fill a tree."""

    def save(self, folder: Path, target: CausalLM, facts: dict[str, Any]) -> None:
        """Write them into a folder, with what is known of them."""
        ...


class HeadsLearner(Learner):
    """Heads that propose through the target's output matrix over a draft vocabulary: what Medusa and Hydra share.

    A subclass says which state each head multiplies with that matrix.

    Args:
        target, vocabulary: see ``Learner``.
        heads: P.
        labels: see the file's docstring.
        decay: weight of a head's loss over that of the head before.
        draft_loss: of a head.
    """

    def __init__(
        self,
        target: CausalLM,
        vocabulary: DraftVocabulary,
        heads: int,
        labels: Labels,
        decay: float,
        draft_loss: DraftLoss,
    ) -> None:
        super().__init__(target, vocabulary)
        self.heads, self.labels, self.decay, self.draft_loss = heads, labels, decay, draft_loss

    def states(self, places: DraftStates) -> Iterator[Float[Tensor, "n D"]]:
        """Head by head, what is multiplied with the output matrix."""
        raise NotImplementedError

    def trained(self, ranks: Int[Tensor, "N P"]) -> TreeHeads:
        """The current heads, with the measured ranks."""
        raise NotImplementedError

    def places(self, batch: Batch) -> DraftStates:
        """The places to draft from."""
        return DraftStates.of(batch, self.heads)

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor | float]]:
        """Sum of the heads' losses, each a mean over the tokens that can be proposed."""
        places = self.places(batch)
        labels = self.vocabulary.of(places.tokens[:, 1:]).masked_fill(~places.judged, -1)
        losses = []
        for head, state in enumerate(self.states(places)):
            counted = labels[:, head] >= 0
            taught = self._soft(places.later[counted, head]) if self.labels == "soft" else labels[counted, head]
            products = [(state[counted], self.output)]
            losses.append(draft_loss_of_states(self.draft_loss, products, self.output_bias, taught)[0])
        curves: dict[str, Tensor | float] = {f"loss_{head + 2}": loss.detach() for head, loss in enumerate(losses)}
        return torch.stack([self.decay**head * loss for head, loss in enumerate(losses)]).sum(), curves

    def hits(self, batch: Batch) -> tuple[Int[Tensor, "P R"], Int[Tensor, "P"]]:
        """See ``Learner.hits``: earlier tokens are right where the first candidates of the heads before were.

        The heads' accuracies regardless of the others, Medusa's table, are ``candidate_tree.accuracies`` of ``ranks``.
        """
        ranks, judged = self.ranks(batch)
        before = F.pad((ranks == 0).long().cumprod(1)[:, :-1], (1, 0), value=1).bool()
        reached = before & judged
        right = (ranks[:, :, None] == torch.arange(RANKS, device=ranks.device)) & reached[:, :, None]
        return right.sum(0), reached.sum(0)

    def ranks(self, batch: Batch) -> tuple[Int[Tensor, "n P"], Bool[Tensor, "n P"]]:
        """The rank of the right token among each head's candidates, ``RANKS`` for none; and where that was judged."""
        places = self.places(batch)
        labels = self.vocabulary.of(places.tokens[:, 1:]).masked_fill(~places.judged, -1)
        found = []
        for head, state in enumerate(self.states(places)):
            logits = self.logits(state)
            best = logits.topk(min(RANKS, logits.shape[1])).indices == labels[:, head, None]
            found.append(torch.where(best.any(1), best.int().argmax(1), RANKS))
        return torch.stack(found, 1), places.judged

    @torch.no_grad()
    def _soft(self, state: Float[Tensor, "n D"]) -> Float[Tensor, "n v"]:
        """The target's distribution over the draft vocabulary."""
        return self.logits(state).float().softmax(-1)


class MedusaLearner(HeadsLearner):
    """Heads that read one state of the target. Their layers start as zero, so they start as the target's own head."""

    def __init__(
        self,
        target: CausalLM,
        vocabulary: DraftVocabulary,
        heads: int,
        blocks: int,
        labels: Labels = "hard",
        decay: float = 1.0,
        draft_loss: DraftLoss = CROSS_ENTROPY,
    ) -> None:
        super().__init__(target, vocabulary, heads, labels, decay, draft_loss)
        width = target.hidden_size
        self.weight = nn.Parameter(torch.zeros(blocks, heads, width, width, device=target.device))
        self.bias = nn.Parameter(torch.zeros(blocks, heads, width, device=target.device))

    def states(self, places: DraftStates) -> Iterator[Float[Tensor, "n D"]]:
        """z + SiLU(W z + b), layer by layer, from the last state."""
        for head in range(self.heads):
            state = places.hidden
            for weight, bias in zip(self.weight[:, head], self.bias[:, head], strict=True):
                state = state + F.silu(F.linear(state, weight, bias))
            yield state

    def trained(self, ranks: Int[Tensor, "N P"]) -> Heads:
        """The current heads."""
        weight, bias = self.weight.detach().transpose(0, 1), self.bias.detach().transpose(0, 1)
        blocks = [list(zip(*head, strict=True)) for head in zip(weight, bias, strict=True)]
        return Heads(blocks, self.vocabulary, None, ranks)


@dataclass(kw_only=True)
class HeadsTraining(DraftTraining):
    """Trains heads that fill a tree of fixed shape: what Medusa and Hydra share.

    Args:
        heads: P; head i proposes the token i + 1 places after the root.
        blocks: residual layers of each.
        labels: ``hard``, the target's answers, or ``soft``, its distributions; None: as the paper.
        decay: weight of a head's loss over that of the head before.
        loss, top_k, top_k_weight: see ``DraftLoss``.
        vocabulary, answers, features, recipe: see ``HeadTraining``.
    """

    duration = "one or two hours on two CPU cores for smollm2, its answers included; minutes on a GPU"
    paper_labels: ClassVar[Labels]

    heads: int = 4
    blocks: int = 1
    labels: Labels | None = None
    decay: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require("at least 1", heads=self.heads, blocks=self.blocks)
        require("above 0", decay=self.decay)

    @abstractmethod
    def learner(self, target: CausalLM, vocabulary: DraftVocabulary, found: Features) -> HeadsLearner:
        """See ``HeadTraining``."""

    def save(self, learner: HeadsLearner, found: Features, context: TrainingContext) -> dict[str, Any]:
        """See ``HeadTraining``."""
        ranks, measured = measure(learner, found, self.recipe.batch_size)
        learner.trained(ranks).save(context.output, context.target, measured)
        return measured


@dataclass(kw_only=True)
class MedusaTraining(HeadsTraining):
    """Trains the heads of Medusa."""

    description = "heads that each propose one of the next tokens, and the tree that suits them"
    paper_labels = "hard"

    def learner(self, target: CausalLM, vocabulary: DraftVocabulary, found: Features) -> MedusaLearner:
        """See ``HeadTraining``."""
        labels = self.labels or self.paper_labels
        return MedusaLearner(target, vocabulary, self.heads, self.blocks, labels, self.decay, self.draft_loss)


@torch.no_grad()
def measure(learner: HeadsLearner, found: Features, batch_size: int) -> tuple[Int[Tensor, "N P"], dict[str, Any]]:
    """The ranks of the right tokens over held-out answers, and facts about the heads.

    Where the answer ends before a head's label, nothing is right: a draft beyond the end is not accepted.
    """
    learner.eval()
    rows = list(found.held_out)[:_MEASURED]
    groups = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    parts = [learner.ranks(found.batch(group)) for group in groups]
    ranks, judged = (torch.cat(part).cpu() for part in zip(*parts, strict=True))
    tree = search(ranks)
    return ranks, {
        "accuracies": accuracies(ranks, judged),
        "positions": len(ranks),
        "held_out_coverage": found.coverage(learner.vocabulary),
        "tokens_per_step_of_trees": {
            str(nodes): round(tree.first(nodes).tokens_per_step or 1.0, 4) for nodes in (1, 3, 7, 15, 31, 63)
        },
    }
