"""Training of exits over a model that stays as it is: maps in closed form, distilled, and the exit classifier.

What ``calm``, ``free`` and ``static_depth`` need, from the model's own answers: affine maps (``translators.py``), which
go on by gradient descent if there is a recipe with steps (``distillation.py``), and the classifier of ``calm``
(``classifier_training.py``). All is judged over other dialogues, by depth: the untrained lens, the closed form, what
was distilled, and the classifier's confidence in it.

    python -m bench.train method=calm model=smollm2
    python -m bench.train method=free model=smollm2 'train.exits=[20,24]'
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from methods.early_exit.affine_maps import Maps, Places, chosen_depths, compare, fit_maps, gather
from methods.early_exit.classifier_training import Loss, Weights, confidences, fit_classifier, labelled
from methods.early_exit.exit_distillation import distil
from methods.early_exit.exits import Exits, Lens, Reader, Translated
from methods.early_exit.training_states import HEADS_CORPUS, AnswerRecipe, Recipe
from methods.engine.causal_lm import CausalLM
from methods.training.exit_quality import quality, summary
from methods.training.interface import Workshop
from methods.training.trainer import discard

_CLASSIFIED = 8192  # places the classifier learns from, at most


class ExitTraining:
    """Makes exits.

    Args:
        exits: depths, in layers run; None: every fourth from the middle of the model on.
        maps: fit maps; false for a model that was itself trained to exit.
        classifier: fit the classifier that all exits share, by this loss; None: none.
        balance: the classifier weighs its two classes equally (``independent`` alone).
        ridge: penalty on the maps in closed form, as a share of the mean variance of a state.
        tokens: of the answers to learn from; an eighth as many are held out.
        vocabulary: most tokens that distilled distributions are compared over.
        answers: of the target, to learn from; None: the defaults.
        recipe: of the distillation; None: the maps stay in their closed form.

    Raises:
        ValueError: a number out of range, or nothing to be made.
    """

    prepares: ClassVar[str] = "exits: maps that make the states behind earlier layers readable, and what judges them"
    takes: ClassVar[str] = "a quarter of an hour on a CPU core for smollm2 once its answers are there; minutes on a GPU"
    corpus: ClassVar[str] = HEADS_CORPUS

    def __init__(
        self,
        exits: Sequence[int] | None = None,
        maps: bool = True,
        classifier: Loss | None = None,
        balance: bool = True,
        ridge: float = 1e-3,
        tokens: int = 49152,
        vocabulary: int = 4096,
        answers: AnswerRecipe | None = None,
        recipe: Recipe | None = None,
    ) -> None:
        if ridge <= 0 or min(tokens, vocabulary) < 1 or not (maps or classifier):
            raise ValueError(
                f"ridge={ridge}, tokens={tokens}, vocabulary={vocabulary}, maps={maps}, classifier={classifier} came; "
                "a ridge above 0, counts of at least 1, and maps or a classifier are allowed. Correct train.NAME."
            )
        self.exits, self.maps, self.classifier, self.balance = exits, maps, classifier, balance
        self.ridge, self.tokens, self.vocabulary = ridge, tokens, vocabulary
        self.answers, self.recipe = answers or AnswerRecipe(), recipe

    def fit(self, workshop: Workshop) -> dict[str, Any]:
        """See ``methods.training.interface.Trainable``."""
        target = workshop.target
        depths = chosen_depths(self.exits, target)
        train, held_out = gather(workshop, depths, self.answers, self.tokens)
        readers: dict[str, Reader] = {"lens": Lens(target)}
        maps, facts = self._maps(workshop, train, held_out, readers)
        reader = list(readers.values())[-1]
        classifier = self._classifier(target, reader, train) if self.classifier else None
        stages = compare(target, readers, held_out)
        if classifier is not None:
            stages["classifier"] = _judged(target, reader, held_out, classifier)
        facts = {"tokens": len(train), "held_out_tokens": len(held_out)} | facts | stages
        Exits(depths, maps, classifier, facts).save(workshop.folder, target)
        discard(workshop.folder)
        return facts | {"summary": summary(stages)}

    def _maps(
        self, workshop: Workshop, train: Places, held_out: Places, readers: dict[str, Reader]
    ) -> tuple[Maps, dict[str, Any]]:
        """Maps, facts of their making, and on the way a reader of each stage, as they are stored."""
        if not self.maps:
            return {}, {}
        target = workshop.target
        maps = fit_maps(target, train, self.ridge)
        facts: dict[str, Any] = {"ridge": self.ridge}
        readers["closed_form"] = _stored(target, maps)
        if self.recipe is not None:
            maps, facts["distillation"] = distil(workshop, maps, train, held_out, self.recipe, self.vocabulary)
            readers["distilled"] = _stored(target, maps)
        return maps, facts

    def _classifier(self, target: CausalLM, reader: Reader, train: Places) -> Weights:
        assert self.classifier is not None
        states, right = labelled(target, reader, train.first(_CLASSIFIED))
        return fit_classifier(states, right, self.classifier, self.balance)


def _stored(target: CausalLM, maps: Maps) -> Translated:
    """A reader by maps of 16 bit, which is what a part holds."""
    rounded = {depth: (weight.half().float(), bias.half().float()) for depth, (weight, bias) in maps.items()}
    return Translated(target, Exits(tuple(maps), rounded))


@torch.inference_mode()
def _judged(target: CausalLM, reader: Reader, places: Places, classifier: Weights) -> dict[str, Any]:
    """How good the classifier's confidence is, by depth; agreement is that of what it judges."""
    states, right = labelled(target, reader, places)
    sure = confidences(states, classifier)
    return {str(depth): quality(right[place], sure[place]) for place, depth in enumerate(places.exits)}
