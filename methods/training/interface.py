"""What can be trained, and what a training works with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

if TYPE_CHECKING:
    from methods.engine.causal_lm import CausalLM
    from methods.training.answer_memo import AnswerMemo

_RULES: dict[str, Callable[[Any], bool]] = {
    "at least 1": lambda value: value >= 1,
    "at least 2": lambda value: value >= 2,
    "at least 0": lambda value: value >= 0,
    "above 0": lambda value: value > 0,
    "from 0 to below 1": lambda value: 0 <= value < 1,
    "from 0 to 1": lambda value: 0 <= value <= 1,
    "above 0 and at most 1": lambda value: 0 < value <= 1,
}


def require(rule: str, group: Literal["train", "method"] = "train", /, **values: Any) -> None:
    """Check some settings of a group against a rule of ``_RULES``; None is allowed.

    Raises:
        ValueError: naming the first setting that breaks the rule.
    """
    for name, value in values.items():
        if value is not None and not _RULES[rule](value):
            raise ValueError(f"{name} must be {rule}, got {value}. Set {group}.{name}.")


@dataclass(frozen=True, slots=True)
class Example:
    """One dialogue of a corpus as the target reads it.

    Attributes:
        prompt: ids up to where the answer begins, chat template included.
        answer: ids of the answer, end-of-sequence token included; empty where the corpus has none.
    """

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingContext:
    """What a training works with.

    Attributes:
        output: folder of the result; files of an interrupted run are still there. Its subfolder ``training_log`` is not
            part of the result.
        shared_cache: folder shared by all trainings with the same model and corpus.
        model: the target or teacher, with its tokenizer; None: a model is made from scratch.
        examples: dialogues in a fixed order (``Trainable.learns_from``).
        pairs: source and target texts in a fixed order, likewise.
        validation: further pairs; empty: some of ``pairs`` are held out.
        memo: answers of the model that come with the project; None: it has none of this model.
        seed: the only source of randomness.
        device: where the training runs.
        report_progress: takes stage, done, total.
        log: takes one point of the training curves, e.g. ``{"step": 20, "loss": 1.3}``.
    """

    output: Path
    shared_cache: Path
    model: CausalLM | None = None
    tokenizer: Any = None
    examples: Sequence[Example] = ()
    pairs: Sequence[tuple[str, str]] = ()
    validation: Sequence[tuple[str, str]] = ()
    memo: AnswerMemo | None = None
    seed: int = 0
    device: torch.device = torch.device("cpu")
    report_progress: Callable[[str, int, int], None] = lambda stage, done, total: None
    log: Callable[[Mapping[str, float]], None] = lambda point: None

    @property
    def target(self) -> CausalLM:
        """The model, which must be there."""
        if self.model is None:
            raise ValueError("This training needs a model, got none. Set model=NAME.")
        return self.model


class Trainable(ABC):
    """Whatever is made before decoding: draft heads, a search, a datastore, a model.

    Attributes:
        makes: a checkpoint that a method uses with a model, a model that is loaded by name, a difference of a model's
            weights, or a corpus.
        learns_from: what the context holds; nothing: there is no corpus.
        description: what is made, e.g. ``a datastore of token ids``.
        duration: how long that takes, e.g. ``seconds per million tokens``.
        corpus: default corpus; None: the general one.
        teaching, teacher_kind, usual_teacher: the settings with which a training of a model needs another one, the kind
            of that one, and an example.
        validation: corpus of pairs for validation; None: that of the corpus.
    """

    makes: ClassVar[Literal["checkpoint", "model", "difference", "corpus"]] = "checkpoint"
    learns_from: ClassVar[Literal["dialogues", "pairs", "nothing"]] = "dialogues"
    description: ClassVar[str]
    duration: ClassVar[str]
    corpus: ClassVar[str | None] = None
    teaching: ClassVar[str] = "train.data=distilled and train.begin=model"
    teacher_kind: ClassVar[Literal["causal", "seq2seq"]] = "seq2seq"
    usual_teacher: ClassVar[str] = "multi30k_4_4"
    validation: str | None = None

    @property
    def needs_model(self) -> bool:
        """Whether the context must have a model."""
        return self.makes != "model"

    @property
    def needs_answers(self) -> bool:
        """Whether each line of the corpus must have an answer; one that decodes its own answers needs none."""
        return True

    def model_name(self, of: str) -> str:
        """Name of the model that is made, e.g. ``multi30k_4_4``; ``of``: the corpus, or the model of a difference."""
        raise NotImplementedError

    @abstractmethod
    def fit(self, context: TrainingContext) -> dict[str, Any]:
        """Write the result into ``context.output``; an interrupted call is resumed.

        Returns:
            Facts for the card: sizes, steps, acceptance. Lines under ``summary`` are printed instead.

        Raises:
            ValueError: settings or a corpus that cannot work.
        """
