"""What is trained, and what a training works with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from methods.engine.causal_lm import CausalLM


@dataclass(frozen=True, slots=True)
class Example:
    """One dialogue of a corpus as the target reads it.

    Attributes:
        prompt: ids up to where the answer begins, chat template included.
        answer: ids of the answer, end-of-sequence token included.
    """

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True, slots=True)
class Workshop:
    """What a preparation works with.

    Attributes:
        target: the model it prepares for.
        corpus: dialogues, in a fixed order.
        folder: where the finished part goes. What an interrupted call left there is still there; notes on how it was
            made go into its folder ``making``, which is no piece of the part.
        seed: the only source of randomness.
        progress: told (stage, done, total) as the work goes on.
        log: takes one point of the curves to be followed, e.g. ``{"step": 20, "loss": 1.3}``.
        common: folder shared by all preparations for the same model and corpus, e.g. for what the target wrote.
    """

    target: CausalLM
    corpus: Sequence[Example]
    folder: Path
    seed: int
    progress: Callable[[str, int, int], None]
    log: Callable[[Mapping[str, float]], None]
    common: Path


@dataclass(frozen=True, slots=True)
class Foundry:
    """What the making of a whole model works with: there is no target yet.

    Attributes:
        pairs: what is read, and what is to be written, as texts in a fixed order.
        validation: other pairs, to judge the model by on the way.
        teacher: a model whose own texts are learnt from in place of those of ``pairs``, with its tokenizer; None: none.
        device: where the model is made.
        folder, seed, progress, log: see ``Workshop``.
        common: folder shared by all that learn from this teacher and these pairs.
    """

    pairs: Sequence[tuple[str, str]]
    validation: Sequence[tuple[str, str]]
    teacher: tuple[CausalLM, Any] | None
    device: torch.device
    folder: Path
    seed: int
    progress: Callable[[str, int, int], None]
    log: Callable[[Mapping[str, float]], None]
    common: Path


@runtime_checkable
class ModelMaker(Protocol):
    """Makes a model of its own, to be loaded by name like any other. ``fit`` is given a ``Foundry``.

    Attributes:
        prepares, takes: see ``Trainable``.
        corpus: names of the pairs it learns from unless others are asked for.
        validation: names of the pairs it is judged by; None: some of the former are held out.
        learns_from_teacher: whether a teacher is needed.
    """

    prepares: ClassVar[str]
    takes: ClassVar[str]
    corpus: ClassVar[str]
    validation: str | None

    @property
    def learns_from_teacher(self) -> bool: ...

    def model_name(self, corpus: str) -> str:
        """What the model is called, e.g. ``multi30k_4_4``."""
        ...

    def fit(self, foundry: Foundry) -> dict[str, Any]:
        """See ``Trainable.fit``."""
        ...


@runtime_checkable
class PairLearner(Protocol):
    """Makes a part for a translation model out of pairs. ``fit`` is given a ``Foundry`` with that model as its teacher.

    Attributes:
        prepares, takes: see ``Trainable``.
        corpus, validation: see ``ModelMaker``.
    """

    prepares: ClassVar[str]
    takes: ClassVar[str]
    corpus: ClassVar[str]
    validation: str | None

    def fit(self, foundry: Foundry) -> dict[str, Any]:
        """See ``Trainable.fit``."""
        ...


@runtime_checkable
class Trainable(Protocol):
    """Whatever must be prepared before decoding: gradient heads, a search, a datastore, a threshold.

    Attributes:
        prepares: what it makes, for people, e.g. ``a datastore of token ids``.
        takes: how long that takes, for people, e.g. ``seconds per million tokens``.
    """

    prepares: ClassVar[str]
    takes: ClassVar[str]

    def fit(self, workshop: Workshop) -> dict[str, Any]:
        """Make the part and write it into the workshop's folder, going on from what lies there.

        Returns:
            Facts for the card beside the part: sizes, steps, acceptance. Lines under ``summary`` are printed instead.

        Raises:
            ValueError: arguments or a corpus that cannot work.
        """
        ...
