"""Training of the students of this family.

They learn the teacher's translations, which is worth about five BLEU to one-pass methods (Kim & Rush 2016), or the
references with ``data=raw``; every record says which. They start with the weights of the teacher's encoder and decoder,
and the mean of the best checkpoints by validation BLEU is saved. Measurements decode by the same code as validation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Generator, Tensor

from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.non_autoregressive.loop import write
from methods.non_autoregressive.network import Embedding, Network, Shape
from methods.non_autoregressive.student import Batch, LengthStudent, Objective, Student, Writer, save_student
from methods.training.distillation import GROUP, translations
from methods.training.interface import Trainable, TrainingContext, require
from methods.training.trainer import attention_over_short_rows, discard
from methods.training.translation import BleuJudge, Pair, TranslationConfig, padded, split, train_on_pairs

Data = Literal["raw", "distilled"]
Progress = Callable[[str, int, int], None]


@dataclass(kw_only=True)
class StudentTraining(Trainable):
    """Trains a student. The fields of a subclass are the options of its student's constructor.

    Args:
        data: learn the references, or the teacher's translations.
        beams: of those translations; 1 is greedy.
        embedding: the teacher's, frozen (``shared``), or an ``own`` one that starts as a copy.
        validation: corpus of pairs for validation; None: that of the corpus (``NAME_val``), else every thirtieth pair.
        recipe: of the training.

    Attributes:
        kind: class of the student.
        writers: decode loops by name. The first one is evaluated during the training, all of them at the end.

    Raises:
        ValueError: no beam.
    """

    learns_from = "pairs"
    description = "a network that writes translations in parallel, for a translation model"
    duration = "about an hour of one CPU core for Multi30k, and minutes for its teacher's translations"
    corpus = "multi30k"
    kind: ClassVar[type[Student]]
    writers: ClassVar[Mapping[str, Writer]]

    data: Data = "distilled"
    beams: int = 1
    embedding: Embedding = "shared"
    validation: str | None = None
    recipe: TranslationConfig = field(default_factory=TranslationConfig)

    def __post_init__(self) -> None:
        require("at least 1", beams=self.beams)

    def options(self, pairs: Sequence[Pair]) -> dict[str, Any]:
        """Of the student's constructor."""
        shared = {shared.name for shared in fields(StudentTraining)}
        return {own.name: getattr(self, own.name) for own in fields(self) if own.name not in shared}

    def fits(self, pair: Pair) -> bool:
        """Whether a pair can be learnt; others are left out."""
        return True

    def choose(self, student: Student, bleu: Callable[[], float]) -> dict[str, Any]:
        """Set what is decided on validation sentences after the training; facts for the card.

        Args:
            bleu: of the student as it is.
        """
        return {}

    def annotate(self, pairs: Sequence[Pair], progress: Progress) -> list[list[int]] | None:
        """What the objective needs to know of each source token of each pair, computed once; None: nothing."""
        return None

    def fit(self, context: TrainingContext) -> dict[str, Any]:
        """See ``Trainable``."""
        target, recipe, device = context.target, self.recipe, context.device
        Shape.of(target)
        assert isinstance(target, Seq2SeqLM), "other models are refused by Shape"
        train, validation = split(context)
        found, same = self._read(target, train, context)
        pairs = [pair for pair in found if self.fits(pair)]
        if not pairs:
            raise ValueError(
                f"At least one pair must be learnable, got none of {len(train)}: {len(found)} have a translation of at "
                f"most {target.max_positions} tokens, and none of these fits. Name a larger corpus, or another teacher."
            )
        torch.manual_seed(context.seed)
        student = self.student(target, pairs, context.report_progress).to(device)
        notes = self.annotate(pairs, context.report_progress)
        judge = BleuJudge(context.tokenizer, validation)

        def loss(rows: list[int], step: int) -> Objective:
            batch = batch_of([pairs[row] for row in rows], notes and [notes[row] for row in rows], device)
            with attention_over_short_rows(device):
                return student.objective(batch, step / recipe.steps, recipe.label_smoothing)

        def bleu(name: str, collapse: bool = False) -> float:
            def texts(sources: list[Tensor], limit: int) -> list[list[int]]:
                rng = Generator(device).manual_seed(0)
                return write(student, self.writers[name], sources, rng, None, collapse).texts

            return judge.score(texts, student.network.shape.positions, device)

        first = next(iter(self.writers))
        facts = train_on_pairs(student, pairs, recipe, context, loss, lambda: {"bleu": bleu(first)})
        student.eval()
        facts |= self.choose(student, lambda: bleu(first)) | self._lengths(student, pairs, validation, context)
        kinds = {"plain": False, "repeats_collapsed": True}
        scores = {name: {k: round(bleu(name, c), 2) for k, c in kinds.items()} for name in self.writers}
        self.save(student, context)
        discard(context.output)
        left_out = {"pairs_left_out": len(train) - len(pairs)}
        return {**self.origin(student), **same, "validation_bleu": scores, **facts, **left_out}

    def student(self, target: Seq2SeqLM, pairs: Sequence[Pair], progress: Progress) -> Student:
        """With the teacher's weights, and random ones where it has none; ``pairs`` are what it will learn."""
        assert target.hf is not None, "the target of a training keeps its Hugging Face weights"
        teacher: Any = target.hf
        embedding, options = teacher.get_input_embeddings().weight.detach().float(), self.options(pairs)
        own, shared = self.embedding == "own", self.kind.network_options(options)
        network = Network(Shape.of(target), embedding, own, self.recipe.dropout, **shared)
        network.start_from(teacher)
        return self.kind(network, **options)

    def save(self, student: Student, context: TrainingContext) -> None:
        """Write the trained student."""
        save_student(student, context.output, context.target, self.origin(student))

    def _read(
        self, target: Seq2SeqLM, train: Sequence[tuple[str, str]], context: TrainingContext
    ) -> tuple[list[Pair], dict[str, float]]:
        """Ids, and facts about them. Pairs without a text or with too long a side are left out; targets have no end."""
        known = _ids(train, context)
        sources, targets = [source for source, _ in known], [text for _, text in known]
        facts = {}
        if self.data == "distilled":
            targets = translations(context, sources, self.beams)
            equal = sum(one == two for one, (_, two) in zip(targets, known, strict=True))
            facts["distilled_equal_reference"] = round(100 * equal / len(targets), 2)
        longest = target.max_positions
        pairs = [pair for pair in zip(sources, targets, strict=True) if pair[1] and max(map(len, pair)) <= longest]
        return pairs, facts

    @torch.inference_mode()
    def _lengths(
        self, student: Student, pairs: Sequence[Pair], validation: Sequence[tuple[str, str]], context: TrainingContext
    ) -> dict[str, Any]:
        """Loss of the length head on the references of validation, beside that of the frequencies it learnt."""
        if not isinstance(student, LengthStudent):
            return {}
        longest = student.network.shape.positions
        judged = [pair for pair in _ids(validation, context) if pair[1] and max(map(len, pair)) <= longest]
        losses = []
        for start in range(0, len(judged), GROUP):
            batch = batch_of(judged[start : start + GROUP], None, context.device)
            losses.append(float(student.lengths.loss(student.read(batch), batch.lengths)[0]) * len(batch.lengths))
        learnt, asked = ([len(text) - max(1, len(source) - 1) for source, text in side] for side in (pairs, judged))
        by_frequency = student.lengths.frequency_loss(learnt, asked)
        found = {"head": sum(losses) / len(judged), "frequencies": by_frequency}
        return {"validation_length_loss": {name: round(loss, 3) for name, loss in found.items()}}

    def origin(self, student: Student) -> dict[str, Any]:
        """What it learnt from and how: facts for the card, and for every record of the student."""
        return {"data": self.data} | ({"teacher_beams": self.beams} if self.data == "distilled" else {})


def _ids(pairs: Sequence[tuple[str, str]], context: TrainingContext) -> list[Pair]:
    """Of both sides, the end on the source's alone."""
    target, tokenizer = context.target, context.tokenizer
    found = ((tokenizer(source)["input_ids"], tokenizer(text)["input_ids"]) for source, text in pairs)
    return [(source, ids[:-1] if ids[-1:] == [target.eos_ids[0]] else ids) for source, ids in found]


def batch_of(pairs: Sequence[Pair], notes: Sequence[Sequence[int]] | None, device: torch.device) -> Batch:
    """Some pairs, padded."""
    sources, targets = ([pair[side] for pair in pairs] for side in (0, 1))
    counts = [torch.tensor([len(row) for row in side], device=device) for side in (sources, targets)]
    padded_notes = None if notes is None else padded(notes, device, 0)
    return Batch(padded(sources, device, 0), counts[0], padded(targets, device, 0), counts[1], padded_notes)
