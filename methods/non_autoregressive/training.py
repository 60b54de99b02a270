"""Making a student of this family: the teacher's translations (or the references), its weights, and one course.

Sequence-level distillation (Kim & Rush 2016) is worth more to one-pass methods than most of their ideas, about five
BLEU, so it is the default; ``data=raw`` learns from the references, and every record says which it was. All students of
one teacher share its translations. They begin with the weights of its encoder and decoder, learn with its loop, and the
average of their best checkpoints by validation BLEU is kept. Decoding for that BLEU is what measurements run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Generator, Tensor

from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.non_autoregressive.loop import write
from methods.non_autoregressive.network import Embedding, Network, Shape
from methods.non_autoregressive.student import Batch, Objective, Student, Writer, save_student
from methods.training.distillation import translations
from methods.training.interface import Foundry
from methods.training.trainer import SAVE_EVERY_S, attention_over_short_rows, autocast, discard
from methods.training.translation import BleuJudge, Pair, PairCourse, Recipe, padded, split

Data = Literal["raw", "distilled"]
Progress = Callable[[str, int, int], None]

_SAVE_EVERY_S = SAVE_EVERY_S


class StudentTraining:
    """Makes a student.

    Args:
        kind: its class.
        options: of its constructor.
        writers: decode loops by name. The first one is judged along the training, all of them in the end.
        data: learn the references, or what the teacher translates.
        beams: of those translations; 1 is greedy.
        embedding: the teacher's, frozen (``shared``), or an ``own`` one that begins as it.
        validation: corpus of pairs to judge by; None: the corpus' own (``NAME_val``), else every thirtieth pair.
        recipe: of the training; None: the defaults.

    Raises:
        ValueError: no beam.
    """

    prepares: ClassVar[str] = "a network that writes translations in parallel, for a translation model"
    takes: ClassVar[str] = "about an hour of one CPU core for Multi30k, and minutes for its teacher's translations"
    corpus: ClassVar[str] = "multi30k"

    def __init__(
        self,
        kind: type[Student],
        options: Mapping[str, Any],
        writers: Mapping[str, Writer],
        data: Data,
        beams: int,
        embedding: Embedding,
        validation: str | None,
        recipe: Recipe | None,
    ) -> None:
        if beams < 1:
            raise ValueError(f"beams={beams} came; at least 1, which is greedy, is needed. Set train.beams.")
        self.kind, self.options, self.writers = kind, dict(options), dict(writers)
        self.data, self.beams, self.embedding = data, beams, embedding
        self.validation, self.recipe = validation, recipe or Recipe()

    def fits(self, pair: Pair) -> bool:
        """Whether a pair can be learnt; the others are left out."""
        return True

    def annotate(self, pairs: Sequence[Pair], progress: Progress) -> list[list[int]] | None:
        """What the objective wants to know of each source token of each pair, computed once; None: nothing."""
        return None

    def fit(self, foundry: Foundry) -> dict[str, Any]:
        """See ``methods.training.interface.PairLearner``."""
        target, tokenizer = _teacher(foundry)
        train, validation = split(foundry)
        found = self._read(target, tokenizer, train, foundry)
        pairs = [pair for pair in found if self.fits(pair)]
        if not pairs:
            raise ValueError(
                f"No pair of the corpus can be learnt: {len(train)} came, {len(found)} have a translation of at most "
                f"{target.max_positions} tokens, and none of these fits. Name a larger corpus, or another teacher."
            )
        torch.manual_seed(foundry.seed)
        student = self.student(target, pairs, foundry.progress).to(foundry.device)
        notes = self.annotate(pairs, foundry.progress)
        course = _Course(student, pairs, notes, partial(self._bleu, student, tokenizer, validation), self, foundry)
        course.run()
        facts = self._facts(student, tokenizer, validation, course.average())
        save_student(student, foundry.folder, target, self.origin())
        discard(foundry.folder)
        course.discard_checkpoints()
        return facts | {"pairs_left_out": len(train) - len(pairs)}

    def student(self, target: Seq2SeqLM, pairs: Sequence[Pair], progress: Progress) -> Student:
        """With the teacher's weights, and random ones where it has none.

        Args:
            pairs: what it will learn from.
            progress: told how far what has to be prepared from them is.
        """
        assert target.hf is not None, "who loads the target of a training keeps its weights"
        teacher: Any = target.hf
        embedding = teacher.get_input_embeddings().weight.detach().float()
        own, options = self.embedding == "own", self.kind.network_options(self.options)
        network = Network(Shape.of(target), embedding, own, self.recipe.dropout, **options)
        network.start_from(teacher)
        student: Student = self.kind(network, **self.options)
        return student

    def _read(
        self, target: Seq2SeqLM, tokenizer: Any, train: Sequence[tuple[str, str]], foundry: Foundry
    ) -> list[Pair]:
        """Ids; a source without a translation, and what is too long, is left out. Targets have no end."""
        sources: list[list[int]] = [tokenizer(source)["input_ids"] for source, _ in train]
        if self.data == "distilled":
            targets = translations(target, sources, self.beams, foundry.common, foundry.progress)
        else:
            written: list[list[int]] = [tokenizer(text)["input_ids"] for _, text in train]
            targets = [ids[:-1] if ids[-1:] == [target.eos_ids[0]] else ids for ids in written]
        longest = target.max_positions
        return [pair for pair in zip(sources, targets, strict=True) if pair[1] and max(map(len, pair)) <= longest]

    def origin(self) -> dict[str, Any]:
        """What it learnt from and how: facts for the card, and for every record of the student."""
        return {"data": self.data} | ({"teacher_beams": self.beams} if self.data == "distilled" else {})

    def _bleu(
        self,
        student: Student,
        tokenizer: Any,
        validation: Sequence[tuple[str, str]],
        name: str | None = None,
        collapse: bool = False,
    ) -> float:
        """Validation BLEU of a decode loop, as the student is now."""
        writer = self.writers[name or next(iter(self.writers))]
        device, positions = student.network.positions.device, student.network.shape.positions
        judge = BleuJudge(tokenizer, validation)

        def texts(sources: list[Tensor], limit: int) -> list[list[int]]:
            return write(student, writer, sources, Generator(device).manual_seed(0), None, collapse).texts

        student.eval()
        return judge.score(judge.write_all(texts, positions, device))

    def _facts(
        self, student: Student, tokenizer: Any, validation: Sequence[tuple[str, str]], facts: dict[str, Any]
    ) -> dict[str, Any]:
        scores = {
            name: {
                "plain": round(self._bleu(student, tokenizer, validation, name), 2),
                "repeats_collapsed": round(self._bleu(student, tokenizer, validation, name, True), 2),
            }
            for name in self.writers
        }
        return {**self.origin(), "validation_bleu": scores, **facts}


class _Course(PairCourse):
    """The training of one student."""

    def __init__(
        self,
        student: Student,
        pairs: Sequence[Pair],
        notes: Sequence[Sequence[int]] | None,
        score: Callable[[], float],
        maker: StudentTraining,
        foundry: Foundry,
    ) -> None:
        self.student, self.notes = student, notes
        super().__init__(student, pairs, score, maker.recipe, foundry, _SAVE_EVERY_S)

    def loss(self) -> Objective:
        """The student's objective on the batch of this step."""
        self.student.train()
        recipe = self.recipe
        with autocast(recipe.precision, self.device), attention_over_short_rows(self.device):
            return self.student.objective(self.batch(self.rows()), self.step / recipe.steps, recipe.label_smoothing)

    def batch(self, rows: Sequence[int]) -> Batch:
        """Pairs of these numbers as one batch."""
        sources, targets = ([self.pairs[row][side] for row in rows] for side in (0, 1))
        notes = None if self.notes is None else padded([self.notes[row] for row in rows], self.device, 0)
        lengths = (torch.tensor([len(row) for row in side], device=self.device) for side in (sources, targets))
        source_lengths, target_lengths = lengths
        return Batch(
            padded(sources, self.device, 0), source_lengths, padded(targets, self.device, 0), target_lengths, notes
        )


def _teacher(foundry: Foundry) -> tuple[Seq2SeqLM, Any]:
    """The model that is learnt from, with its tokenizer.

    Raises:
        ValueError: no model that students can be made for.
    """
    assert foundry.teacher is not None, "a student is made for a model"
    target, tokenizer = foundry.teacher
    Shape.of(target)
    assert isinstance(target, Seq2SeqLM), "others are refused"
    return target, tokenizer
