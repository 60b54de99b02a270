"""Training of exits over a frozen model: affine maps in closed form, their distillation, and the exit classifier.

``calm``, ``free`` and ``static_depth`` use them, trained on the model's own answers: maps (``affine_maps.py``),
distilled if there is a ``recipe`` (``exit_distillation.py``), and the classifier of ``calm``
(``classifier_training.py``). Held-out dialogues judge, by depth, the untrained lens, the closed form, the distilled
maps, and the classifier's confidence.

    python -m bench train method=calm model=smollm2
    python -m bench train method=free model=smollm2 'train.exits=[20,24]'
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from methods.early_exit.affine_maps import Maps, Places, chosen_depths, compare, fit_maps, gather
from methods.early_exit.classifier_training import Loss, Weights, confidences, fit_classifier, labelled
from methods.early_exit.exit_distillation import distil
from methods.early_exit.exits import Exits, Lens, Reader, Translated
from methods.engine.causal_lm import CausalLM
from methods.training.answers import HEADS_CORPUS, AnswerRecipe
from methods.training.exit_quality import quality, summary
from methods.training.interface import Trainable, TrainingContext, require
from methods.training.trainer import TrainingConfig, discard

_CLASSIFIED = 8192  # places the classifier learns from, at most


@dataclass
class ExitTraining(Trainable):
    """Trains exits.

    Args:
        exits: depths, in layers run; None: every fourth from the middle of the model on.
        maps: fit maps; false for a model that was itself trained to exit.
        classifier: loss of the classifier that all exits share; None: no classifier.
        balance: the classifier weighs its two classes equally (``independent`` only).
        ridge: penalty on the maps in closed form, as a share of the mean variance of a state.
        tokens: of the answers to learn from; an eighth as many are held out.
        vocabulary: most tokens that distilled distributions are compared over.
        answers: the target's answers to learn from.
        recipe: of the distillation; None: the maps keep their closed form.

    Raises:
        ValueError: a number out of range, or nothing to train.
    """

    description = "exits: maps that make the states after earlier layers readable, and their classifier"
    duration = "a quarter of an hour on a CPU core for smollm2 after its answers; minutes on a GPU"
    corpus = HEADS_CORPUS

    exits: Sequence[int] | None = None
    maps: bool = True
    classifier: Loss | None = None
    balance: bool = True
    ridge: float = 1e-3
    tokens: int = 49152
    vocabulary: int = 4096
    answers: AnswerRecipe = field(default_factory=AnswerRecipe)
    recipe: TrainingConfig | None = None

    def __post_init__(self) -> None:
        require("above 0", ridge=self.ridge)
        require("at least 1", tokens=self.tokens, vocabulary=self.vocabulary)
        if not (self.maps or self.classifier):
            raise ValueError("Either maps or a classifier must be trained, got neither. Set train.maps=true.")

    @property
    def needs_answers(self) -> bool:
        """See ``Trainable``: the answers are the target's own."""
        return False

    def fit(self, context: TrainingContext) -> dict[str, Any]:
        """See ``Trainable``."""
        target = context.target
        depths = chosen_depths(self.exits, target)
        train, held_out = gather(context, depths, self.answers, self.tokens)
        readers: dict[str, Reader] = {"lens": Lens(target)}
        maps, facts = self._maps(context, train, held_out, readers)
        reader = list(readers.values())[-1]
        classifier = self._classifier(target, reader, train) if self.classifier else None
        stages = compare(target, readers, held_out)
        if classifier is not None:
            stages["classifier"] = _judged(target, reader, held_out, classifier)
        facts = {"tokens": len(train), "held_out_tokens": len(held_out)} | facts | stages
        Exits(depths, maps, classifier, facts).save(context.output, target)
        discard(context.output)
        return facts | {"summary": summary(stages)}

    def _maps(
        self, context: TrainingContext, train: Places, held_out: Places, readers: dict[str, Reader]
    ) -> tuple[Maps, dict[str, Any]]:
        """Maps and facts; a reader of each stage, as it will be stored, is added to ``readers``."""
        if not self.maps:
            return {}, {}
        target = context.target
        maps = fit_maps(target, train, self.ridge)
        facts: dict[str, Any] = {"ridge": self.ridge}
        readers["closed_form"] = _stored(target, maps)
        if self.recipe is not None:
            maps, facts["distillation"] = distil(context, maps, train, held_out, self.recipe, self.vocabulary)
            readers["distilled"] = _stored(target, maps)
        return maps, facts

    def _classifier(self, target: CausalLM, reader: Reader, train: Places) -> Weights:
        assert self.classifier is not None
        states, right = labelled(target, reader, train.first(_CLASSIFIED))
        return fit_classifier(states, right, self.classifier, self.balance)


def _stored(target: CausalLM, maps: Maps) -> Translated:
    """A reader by maps of 16 bit, as in a checkpoint."""
    rounded = {depth: (weight.half().float(), bias.half().float()) for depth, (weight, bias) in maps.items()}
    return Translated(target, Exits(tuple(maps), rounded))


@torch.inference_mode()
def _judged(target: CausalLM, reader: Reader, places: Places, classifier: Weights) -> dict[str, Any]:
    """How good the classifier's confidence is, by depth; agreement is that of what it reads."""
    states, right = labelled(target, reader, places)
    sure = confidences(states, classifier)
    return {str(depth): quality(right[place], sure[place]) for place, depth in enumerate(places.exits)}
