"""Decoding of the non-autoregressive family with the interface of all methods.

The target of a run is the autoregressive teacher: the baseline, and the reference of agreement. The method is a network
of its own, so the guarantee is INDEPENDENT_MODEL and only its quality can be judged. The teacher takes part only to
rescore candidates (``rescore``); its pass is then inside the measured time, and its memory is reported besides the
student's.

A batch is written in one step: encoder, length, passes, rescoring, choice. Texts end with the end-of-sequence token.
``Step.draft_passes`` counts passes of the student's decoder, ``target_passes`` those of the teacher's (one to rescore,
else none), ``layers`` is the share of the target's layers that a pass runs, ``nodes`` the positions of a pass in a row,
all candidates together.

``collapse`` joins equal neighbours, which one-pass methods write where they hesitate between two places. It adds points
of BLEU to a weak method, so it is off by default, and every record contains the setting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Generator, Tensor

from methods.decoder import Decoder, Guarantee, Step
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.engine.stopwatch import Stopwatch
from methods.non_autoregressive import rescoring
from methods.non_autoregressive.student import Candidates, Student, Writer, load_student, pad_sources


@dataclass(frozen=True, slots=True)
class Written:
    """Texts of a batch, without ends, and their cost.

    Attributes:
        candidates: per source.
        passes: of the student's decoder.
        rescorings: passes of the teacher's.
        positions: per row, of a pass.
        rescoring_ns: wall time of those of the teacher.
    """

    texts: list[list[int]]
    candidates: int
    passes: int
    rescorings: int
    positions: int
    rescoring_ns: int = field(default=0, compare=False)


@torch.inference_mode()
def write(
    student: Student,
    writer: Writer,
    sources: Sequence[Int[Tensor, "_"]],
    rng: Generator,
    rescorer: Seq2SeqLM | None = None,
    collapse: bool = False,
) -> Written:
    """Translate a batch of any size, ragged.

    Args:
        rescorer: chooses among candidates; None: the student's own scores do.
        collapse: join equal neighbours.

    Raises:
        ValueError: see ``pad_sources``.
    """
    network = student.network
    rows, lengths, whole = pad_sources(sources, network.shape.positions, network.positions.device)
    found = writer(student, network.encode(rows, lengths, whole), rng)
    rescored = rescorer is not None and found.lengths.shape[1] > 1
    watch = Stopwatch(found.tokens.device)
    scores = found.scores
    if rescorer is not None and rescored:
        watch.start()
        scores = rescoring.score(rescorer, sources, found.tokens, found.lengths)
        watch.stop()
    texts = _best(found, scores)
    if collapse:
        texts = [[token for token, _ in groupby(text)] for text in texts]
    time = watch.ns() if rescored else 0
    return Written(texts, found.lengths.shape[1], found.passes, int(rescored), found.positions, time)


def _best(found: Candidates, scores: Tensor) -> list[list[int]]:
    row = torch.arange(len(scores), device=scores.device)
    choice = scores.argmax(1)
    chosen = torch.cat([found.lengths[row, choice, None], found.tokens[row, choice]], 1).tolist()
    return [tokens[:length] for length, *tokens in chosen]


@dataclass(slots=True)
class DecodeStats:
    """Cost of decoding since the decoder was made; passes count once for every row of their batch."""

    sentences: int = 0
    batches: int = 0
    tokens: int = 0
    repeats: int = 0
    passes: int = 0
    batch_passes: int = 0
    rescorings: int = 0
    rescoring_ns: int = 0
    empty: int = 0

    def add(self, written: Written) -> None:
        """Take in a batch."""
        rows = len(written.texts)
        self.sentences += rows
        self.batches += 1
        self.tokens += sum(map(len, written.texts))
        self.repeats += sum(one == two for text in written.texts for one, two in pairwise(text))
        self.empty += sum(not text for text in written.texts)
        self.batch_passes += written.passes
        self.passes += rows * written.passes
        self.rescorings += rows * written.rescorings
        self.rescoring_ns += written.rescoring_ns

    def stats(self, student_layers: int, teacher_layers: int) -> dict[str, Any]:
        """Per sentence and per token; those of a teacher are its decoder's layers per token, one pass each."""
        if not self.tokens:
            return {}
        layers = self.passes * student_layers + self.rescorings * teacher_layers
        return {
            "sentences": self.sentences,
            "tokens": self.tokens,
            "iterations": self.batch_passes / self.batches,
            "passes_per_token": self.passes / self.tokens,
            "decoder_layer_passes_per_token": layers / self.tokens,
            "decoder_layer_passes_per_token_of_the_teacher": teacher_layers,
            "rescoring_passes_per_sentence": self.rescorings / self.sentences,
            "rescoring_seconds_per_sentence": self.rescoring_ns / 1e9 / self.sentences,
            "repeated_tokens": self.repeats / self.tokens,
            "empty_texts": self.empty,
        }


class NonAutoregressive(Decoder):
    """A student that writes in the target's place.

    Args:
        target: its teacher.
        sampling: must be greedy.
        writer: decode loop.
        rescore: let the target choose among several candidates.
        collapse: join equal neighbours.
        checkpoint: folder of a student; None: the one prepared for this target.

    Raises:
        ValueError: a temperature, no student, or a target of another kind.
    """

    guarantee = Guarantee.INDEPENDENT_MODEL
    family = "non_autoregressive"
    model_kind = "seq2seq"
    one_pass = True
    greedy_only = True
    trainable = True
    needs = "training"

    kind: ClassVar[type[Student]]

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        writer: Writer,
        rescore: bool,
        collapse: bool,
        checkpoint: str | Path | None,
    ) -> None:
        if not sampling.greedy:
            raise ValueError(
                f"{self.kind.method} must be greedy, as it writes the likeliest tokens, got "
                f"temperature={sampling.temperature}. Set sampling=greedy, or choose another method."
            )
        self.student, self.made = load_student(self.kind, target, checkpoint)
        assert isinstance(target, Seq2SeqLM), "a student is refused for any other"
        self._bytes = self.student.own_bytes()
        self.student.settle(target)
        self.target, self.writer, self.rescore, self.collapse = target, writer, rescore, collapse
        self.counters = DecodeStats()

    def decode(self, prompts: list[Int[Tensor, "_"]], limit: int, rng: Generator) -> Iterator[Step]:
        """See ``methods.decoder.Decoder.decode``; one step, after which every text has ended."""
        written = write(self.student, self.writer, prompts, rng, self.target if self.rescore else None, self.collapse)
        self.counters.add(written)
        end = self.student.network.shape.end
        yield Step.undrafted(
            [[*text, end] for text in written.texts],
            len(self.student.network.decoder) / self.target.n_layers,
            nodes=written.positions,
            target_passes=written.rescorings,
            draft_passes=written.passes,
        )

    def memory(self) -> dict[str, int | None]:
        """The student's memory, and what it uses of the teacher's.

        Without rescoring that is at most embedding and output matrix, with it the whole teacher.
        """
        target, shape = self.target, self.student.network.shape
        matrices = 2 * shape.vocabulary * shape.width * target.dtype.itemsize
        teacher = 0 if self.student.network.own else matrices
        if self.rescore:
            teacher = target.weight_bytes + target.encoder_bytes
        return {"student": self._bytes, "of_the_teacher": teacher}

    def stats(self) -> dict[str, Any]:
        """The student's training, its settings, and the cost of its texts."""
        asked = {"rescored_by_teacher": self.rescore, "repeats_collapsed": self.collapse}
        layers = len(self.student.network.encoder), len(self.student.network.decoder)
        sizes = {"encoder_layers": layers[0], "decoder_layers": layers[1], "student_bytes": self._bytes}
        return self.made | asked | sizes | self.counters.stats(layers[1], self.target.n_layers)
