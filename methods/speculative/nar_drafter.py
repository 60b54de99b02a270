"""A non-autoregressive student drafts, its teacher verifies: the text is the teacher's own.

Any student of methods/non_autoregressive can be the drafter. SpecDec (Xia et al. 2023, arXiv 2203.16487) trains a
drafter for this use; here a student that translates on its own continues a text.

``redraft=false``: the student translates the source once, by its own decode loop. The draft continues its translation
from the place of least edit distance to the committed text (of equal places, the one whose token is the last committed
one, then the furthest), so a word that the teacher inserts, drops or replaces does not spoil the rest. Works with every
student and costs no pass per round.

``redraft=true``: before every round one pass of the student's decoder reads the committed tokens in their places and
blank input after them, as in its training (cmlm, glat and depa). The predicted length stays.

After the student's last token the end of the sequence is drafted. Drafts are not drawn, so the exact rules for such
drafts hold at a temperature. The student's encoder reads the source once, which counts as a pass of the drafter.

    python -m bench train method=glat model=multi30k_4_4
    python -m bench method=specdec_nat method.drafter=glat model=multi30k_4_4 dataset=multi30k
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Generator, Tensor

from methods.drafting import Context, Draft
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.non_autoregressive.cmlm import CmlmStudent, MaskPredict
from methods.non_autoregressive.ctc import CtcPass, CtcStudent
from methods.non_autoregressive.depa import DepaStudent
from methods.non_autoregressive.flowseq.model import FlowPass, FlowSeqStudent
from methods.non_autoregressive.glat import GlatStudent
from methods.non_autoregressive.loop import write
from methods.non_autoregressive.nat import FertilityPass, NatStudent
from methods.non_autoregressive.network import present_up_to
from methods.non_autoregressive.student import (
    LengthStudent,
    OnePass,
    Student,
    Writer,
    load_student,
    pad_sources,
)
from methods.rows import of_rows
from methods.speculative.heads.base import HeadsDecoder
from methods.speculative.verification import default_rule
from methods.training.interface import require
from methods.training.translation import padded

Name = Literal["nat", "glat", "cmlm", "ctc", "depa", "flowseq"]

_STUDENTS: Mapping[str, tuple[type[Student], Writer]] = {
    "nat": (NatStudent, FertilityPass()),
    "glat": (GlatStudent, OnePass()),
    "cmlm": (CmlmStudent, MaskPredict()),
    "ctc": (CtcStudent, CtcPass()),
    "depa": (DepaStudent, OnePass()),
    "flowseq": (FlowSeqStudent, FlowPass()),
}


@runtime_checkable
class Continuation(Protocol):
    """A student's continuation of committed texts."""

    def read(self, sources: Sequence[Int[Tensor, "_"]], rng: Generator) -> int:
        """Read the sources of a batch; returns the passes that took."""
        ...

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Go on with some of the sources only, in this order."""
        ...

    def behind(self, texts: Sequence[Sequence[int]], most: int) -> tuple[list[list[int]], int]:
        """Up to ``most`` tokens after each text, its end included, and the passes that took."""
        ...


class Alignment:
    """A growing text, and the place at which a guess of it continues.

    Args:
        guess: tokens, without the end, which a text in progress has not reached.
    """

    def __init__(self, guess: Sequence[int]) -> None:
        self.guess = list(guess)
        self._cost = list(range(len(guess) + 1))  # edit distance of the text to so many tokens of the guess
        self._read, self._last = 0, -1

    def follow(self, text: Sequence[int]) -> None:
        """Add the new tokens of the text."""
        for token in text[self._read :]:
            before, self._last = self._cost, token
            self._cost = [before[0] + 1]
            for place, guessed in enumerate(self.guess):
                kept = before[place] + (guessed != token)
                self._cost.append(min(kept, before[place + 1] + 1, self._cost[place] + 1))
        self._read = len(text)

    @property
    def rest(self) -> list[int]:
        """The guess after the current place."""
        places = range(len(self._cost))
        return self.guess[min(places, key=lambda n: (self._cost[n], not self._meets(n), -n)) :]

    def _meets(self, place: int) -> bool:
        return place > 0 and self.guess[place - 1] == self._last


class OneGuess:
    """One translation of each source, continued at the place of the text."""

    def __init__(self, student: Student, writer: Writer) -> None:
        self._student, self._writer, self._guesses = student, writer, list[Alignment]()

    def read(self, sources: Sequence[Int[Tensor, "_"]], rng: Generator) -> int:
        written = write(self._student, self._writer, sources, rng)
        self._guesses = [Alignment(text) for text in written.texts]
        return 1 + written.passes

    def keep_rows(self, rows: Sequence[int]) -> None:
        self._guesses = of_rows(self._guesses, rows)

    def behind(self, texts: Sequence[Sequence[int]], most: int) -> tuple[list[list[int]], int]:
        for guess, text in zip(self._guesses, texts, strict=True):
            guess.follow(text)
        end = self._student.network.shape.end
        return [[*guess.rest, end][:most] for guess in self._guesses], 0


class Completion:
    """A new translation for every text, which the student reads."""

    def __init__(self, student: LengthStudent) -> None:
        self._student = student

    def read(self, sources: Sequence[Int[Tensor, "_"]], rng: Generator) -> int:
        student = self._student
        network = student.network
        device = network.positions.device
        rows, counts, whole = pad_sources(sources, network.shape.positions, device)
        self._memory = network.encode(rows, counts, whole)
        self._lengths = student.lengths.best(self._memory)[:, 0]
        self._counts: list[int] = self._lengths.tolist()
        self._blank = student.inputs(self._memory, self._lengths, max(self._counts))
        self._present = present_up_to(self._lengths, max(self._counts))
        return 1

    def keep_rows(self, rows: Sequence[int]) -> None:
        chosen = list(rows)
        self._memory, self._counts = self._memory.of_rows(chosen), of_rows(self._counts, chosen)
        self._lengths, self._blank, self._present = (t[chosen] for t in (self._lengths, self._blank, self._present))

    def behind(self, texts: Sequence[Sequence[int]], most: int) -> tuple[list[list[int]], int]:
        student, width, device = self._student, self._blank.shape[1], self._lengths.device
        shown = [text[:width] for text in texts]
        if all(len(text) >= count for text, count in zip(shown, self._counts, strict=True)):
            return [[student.network.shape.end] for _ in texts], 0
        given = torch.tensor([len(text) for text in shown], device=device)
        read = student.network.embed(padded(shown, device, 0, width))
        inputs = torch.where(present_up_to(given, width)[:, :, None], read, self._blank)
        states = student.network.decode(inputs, self._present, self._memory)
        place = (given[:, None] + torch.arange(most, device=device)).clamp(max=width - 1)
        wanted = states.gather(1, place[:, :, None].expand(-1, -1, states.shape[2]))
        tokens: list[list[int]] = student.choose(wanted, scored=False)[0].tolist()
        rest = [max(0, count - len(text)) for text, count in zip(shown, self._counts, strict=True)]
        ended = [[*row[:left], student.network.shape.end] for row, left in zip(tokens, rest, strict=True)]
        return [row[:most] for row in ended], 1


class StudentDrafter:
    """Drafts a chain of up to ``nodes`` tokens.

    Args:
        continuation: the use of the student.
        nodes: most tokens of a draft.
        ends: tokens after which nothing is drafted.
        nbytes: memory of the student.
    """

    hidden_layers: Sequence[int] = ()

    def __init__(self, continuation: Continuation, nodes: int, ends: Sequence[int], nbytes: int) -> None:
        self.nodes, self.nbytes = nodes, {"student": nbytes}
        self._continuation, self._ends = continuation, frozenset(ends)
        self._sources: list[list[int]] = []
        self._has_read = False

    def reset(self, prompts: list[list[int]], limit: int) -> None:
        self._sources, self._has_read = [list(prompt) for prompt in prompts], False

    def keep_rows(self, rows: Sequence[int]) -> None:
        self._sources = of_rows(self._sources, rows)
        if self._has_read:
            self._continuation.keep_rows(rows)

    def propose(self, context: Context) -> Draft:
        device, passes = context.root.device, 0
        if context.path is None:
            sources = [torch.tensor(source, device=device) for source in self._sources]
            passes, self._has_read = self._continuation.read(sources, context.rng), True
        texts = [row[len(source) :] for row, source in zip(context.tokens, self._sources, strict=True)]
        rows, more = self._continuation.behind(texts, self.nodes)
        open_rows = [row if self._ends.isdisjoint(text) else [] for row, text in zip(rows, texts, strict=True)]
        return replace(Draft.chains(open_rows, device), passes=passes + more)


class SpecDecNat(HeadsDecoder):
    """Speculative decoding with a non-autoregressive student.

    Args:
        target: the student's teacher, which verifies.
        drafter: the method whose student drafts.
        redraft: run the student again before every round, with the text so far in its input.
        block: most tokens of a draft.
        checkpoint: folder of a student; None: the one prepared for this target.

    Raises:
        ValueError: no student, a block below one, or ``redraft`` with a student that cannot read the text so far.
    """

    model_kind = "seq2seq"
    checkpoint_of = "drafter"
    paper = "Xia et al. 2023, arXiv 2203.16487"

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        drafter: Name = "glat",
        redraft: bool = False,
        block: int = 6,
        checkpoint: str | Path | None = None,
    ) -> None:
        require("at least 1", "method", block=block)
        kind, writer = _STUDENTS[drafter]
        if redraft and not issubclass(kind, LengthStudent):
            raise ValueError(
                f"redraft must be false with drafter={drafter}, which cannot read the text so far (glat, cmlm and depa "
                "can), got true. Set method.redraft=false, or method.drafter to one of these."
            )
        student, self._made = load_student(kind, target, checkpoint)
        nbytes = student.own_bytes()
        student.settle(target)
        asked = Completion(student) if isinstance(student, LengthStudent) and redraft else OneGuess(student, writer)
        found = StudentDrafter(asked, block, target.eos_ids, nbytes)
        super().__init__(target, sampling, found, default_rule(sampling, "chain", drawn=False))

    def stats(self) -> dict[str, Any]:
        """How the student was made."""
        return dict(self._made)
