"""Training of draft heads on the target's states over its own answers: what all of them share.

A head is a ``Learner``, which knows its loss and what it would have drafted; a ``HeadTraining`` makes one and saves it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from methods.engine.causal_lm import CausalLM
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.training.answers import HEADS_CORPUS, AnswerRecipe
from methods.training.features import Batch, FeatureForm, Features, features
from methods.training.interface import Trainable, TrainingContext, require
from methods.training.trainer import Epochs, Point, Trainer, TrainingConfig, autocast, discard

_JUDGED = 128  # held-out dialogues of an evaluation


class Learner(nn.Module):
    """A draft head in training. Its parameters that require a gradient are trained.

    Args:
        target: the model it is trained for.
        vocabulary: what it proposes from, on the target's device.

    Attributes:
        output, output_bias: the target's output matrix for this vocabulary, in 32 bit and frozen.
    """

    output: Float[Tensor, "v D"]
    output_bias: Float[Tensor, "v"] | None

    def __init__(self, target: CausalLM, vocabulary: DraftVocabulary) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        weight, bias = target.output_rows(vocabulary.ids)
        self.register_buffer("output", weight.float(), persistent=False)
        self.register_buffer("output_bias", None if bias is None else bias.float(), persistent=False)

    def logits(self, states: Float[Tensor, "R D"]) -> Float[Tensor, "R v"]:
        """Over the draft vocabulary."""
        return F.linear(states, self.output, self.output_bias)

    def loss(self, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """What is minimised over a batch, and numbers for the curves."""
        raise NotImplementedError

    def hits(self, batch: Batch) -> tuple[Int[Tensor, "P R"], Int[Tensor, "P"]]:
        """How good its drafts are.

        Returns:
            [p, r]: how often the token p + 1 places after the root was its candidate of rank r, given that all earlier
            ones of the draft were right; and how often that was judged.
        """
        raise NotImplementedError


@dataclass(kw_only=True)
class HeadTraining(Trainable):
    """Trains a draft head.

    Args:
        vocabulary: most tokens that the head chooses among.
        answers: the target's answers to learn from.
        features: read the target's states from files, or compute them for each batch.
        recipe: of the training.

    Raises:
        ValueError: a number out of range.
    """

    corpus = HEADS_CORPUS

    vocabulary: int = 8192
    answers: AnswerRecipe = field(default_factory=AnswerRecipe)
    features: FeatureForm = "cached"
    recipe: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        require("at least 1", vocabulary=self.vocabulary)

    def layers_read(self, target: CausalLM) -> Sequence[int]:
        """Layers of the target whose states the head reads, beside the last one."""
        return ()

    @abstractmethod
    def learner(self, target: CausalLM, vocabulary: DraftVocabulary, found: Features) -> Any:
        """The untrained head, a ``Learner``."""

    @abstractmethod
    def save(self, learner: Any, found: Features, context: TrainingContext) -> dict[str, Any]:
        """Write the trained head; facts for the card."""

    @property
    def needs_answers(self) -> bool:
        """See ``Trainable``: the answers are the target's own."""
        return False

    def fit(self, context: TrainingContext) -> dict[str, Any]:
        """See ``Trainable``."""
        target = context.target
        found = features(context, self.layers_read(target), self.answers, self.features)
        vocabulary = found.vocabulary(self.vocabulary, target)
        torch.manual_seed(context.seed)
        learner = self.learner(target, vocabulary, found)
        facts = train_head(learner, found, self.recipe, context)
        coverage = {"draft_vocabulary": len(vocabulary), "held_out_coverage": found.coverage(vocabulary)}
        facts |= coverage | self.save(learner, found, context)
        discard(context.output)
        return facts


def train_head(learner: Learner, found: Features, config: TrainingConfig, context: TrainingContext) -> dict[str, Any]:
    """Train to the last step.

    Returns:
        Facts for the card: answers, parameters, steps, and the held-out acceptance with its curve.
    """
    answers = found.answers
    lengths = {row: len(answers.rows[row].prompt) + len(answers.rows[row].answer) for row in found.train}
    epochs = Epochs.shuffled(lengths, config.batch_size, context.seed)
    trainer = Trainer(config, learner, context, answers.sha256)
    trainer.run(
        lambda batch, _: learner.loss(batch),
        lambda step: found.batch(epochs.batch(step)),
        lambda: _acceptance(learner, found, config, trainer.device),
    )
    last = trainer.curve[-1] if trainer.curve else {}
    return {
        "answers": len(answers.rows),
        "answer_tokens": answers.tokens,
        "answers_sha256": answers.sha256,
        "epochs": epochs.count(trainer.step),
        "acceptance": last.get("acceptance"),
        "tokens_per_step_of_a_chain": last.get("tokens_per_step"),
        **trainer.facts,
    }


def _acceptance(learner: Learner, found: Features, config: TrainingConfig, device: torch.device) -> Point:
    rows, size = list(found.held_out)[:_JUDGED], config.batch_size
    counts = []
    for start in range(0, len(rows), size):
        batch = found.batch(rows[start : start + size])
        with autocast(config.precision, device):
            counts.append(learner.hits(batch))
    right, judged = (torch.stack(numbers).sum(0) for numbers in zip(*counts, strict=True))
    shares = right / judged.clamp(min=1)[:, None]
    acceptance = [round(float(share), 4) for share in shares[:, 0]]
    tokens, ranks = tokens_per_step(acceptance), [[round(float(x), 4) for x in row] for row in shares]
    flat = {f"held_out/acceptance_{place}": share for place, share in enumerate(acceptance, 1)}
    point = {"acceptance": acceptance, "tokens_per_step": round(tokens, 4), "ranks": ranks}
    return point, {"held_out/tokens_per_step": tokens, **flat}


def tokens_per_step(acceptance: Sequence[float]) -> float:
    """Committed per pass with a chain of which position i is kept with ``acceptance[i]``, given those before."""
    return 1.0 + sum(math.prod(acceptance[: place + 1]) for place in range(len(acceptance)))
