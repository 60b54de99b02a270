"""Connectionist temporal classification: more places than tokens, no length model (Libovický & Helcl 2018, arXiv
1811.04719).

The decoder reads every source token ``upsample`` times and chooses a token or a blank at each place; equal neighbours
are joined, then blanks are dropped. The loss sums over all such alignments of the target (Graves et al. 2006). The
blank is the end-of-sequence id with an output vector of its own. Joining is part of the method, so ``collapse`` stays
off: two equal words with a blank between them are kept.

``blank_penalty`` is taken off the blank's logit before the choice: the loss of whole alignments leaves too much
probability to blanks, so texts get short (0 to 2 are tried on validation sentences at the end of the training, and the
best becomes part of the checkpoint).

``beam`` above 1 searches for the likeliest text instead of the likeliest alignment (``ctc_beam.py``), and with
``lm_weight`` adds a model of n-grams that the training counted in the texts it learnt.

Published: WMT14 en-de 18.42 raw and 25.52 distilled, one pass, 14.6 times the speed of a beam.

Differences: the source's embeddings are repeated before the decoder (as in GLAT's code) instead of splitting the
encoder's states in three. No label smoothing. Pairs whose target does not fit into the places are left out.

    python -m bench train method=ctc model=multi30k_4_4
    python -m bench method=ctc model=multi30k_4_4 dataset=multi30k
    python -m bench method=ctc model=multi30k_4_4 dataset=multi30k method.beam=10 method.lm_weight=0.3
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor, nn

from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling, argmax
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.non_autoregressive.ctc_beam import TOKENS, Scores, search
from methods.non_autoregressive.decoder_inputs import gather
from methods.non_autoregressive.loop import NonAutoregressive
from methods.non_autoregressive.network import Memory, Network, present_up_to
from methods.non_autoregressive.ngram_model import FILE, NgramModel
from methods.non_autoregressive.student import Batch, Candidates, Objective, Student
from methods.non_autoregressive.training import Progress, StudentTraining
from methods.training.interface import TrainingContext, require
from methods.training.losses import ctc_loss
from methods.training.translation import Pair, padded

_PENALTIES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)  # that are tried after the training


class CtcStudent(Student):
    """Every source token several times, and a token or a blank for each.

    Args:
        upsample: places per source token.
        blank_penalty: that decoding takes off the blank's logit unless a method sets another one.

    Attributes:
        ngrams: of the texts it learnt; None: none were counted.
    """

    method: ClassVar[str] = "ctc"

    def __init__(self, network: Network, upsample: int = 2, blank_penalty: float = 0.0) -> None:
        if upsample < 1:
            raise ValueError(f"upsample must be at least 1, got {upsample}. Set train.upsample.")
        super().__init__(network, {network.shape.end}, upsample=upsample, blank_penalty=blank_penalty)
        self.upsample, self.blank, self.blank_penalty = upsample, network.shape.end, blank_penalty
        self.blank_vector = nn.Parameter(torch.zeros(network.shape.width))
        self.ngrams: NgramModel | None = None

    @classmethod
    def network_options(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        return {"upsample": options["upsample"]}

    def logits(self, states: Float[Tensor, "*b D"]) -> Float[Tensor, "*b V"]:
        """Of every token, with the blank in place of the end."""
        blank = (states @ self.blank_vector.to(states.dtype)).unsqueeze(-1)
        where = torch.tensor([self.blank], device=states.device)
        found = self.network.logits(states)
        return found.index_copy_(-1, where, blank.to(found.dtype))

    def places(self, memory: Memory) -> tuple[Float[Tensor, "B T D"], Int[Tensor, "B"]]:
        """The decoder's input, and its length."""
        lengths = self.upsample * memory.content
        width = self.upsample * max(1, memory.embedded.shape[1] - 1)
        index = torch.arange(width, device=lengths.device) // self.upsample
        return gather(memory, index.expand(len(lengths), -1)), lengths

    def objective(self, batch: Batch, progress: float, smoothing: float) -> Objective:
        """See ``Student``; per token of the target, over all its alignments."""
        memory = self.read(batch)
        inputs, lengths = self.places(memory)
        present = present_up_to(lengths, inputs.shape[1])
        states = self.network.decode(inputs, present, memory)
        losses = ctc_loss(self.logits(states[present]), present, batch.targets, batch.lengths, self.blank)
        return losses.sum() / batch.lengths.sum(), {"unreachable": (losses == 0).float().mean()}


@dataclass(frozen=True, slots=True)
class CtcPass:
    """The likeliest token or blank at every place, joined.

    Attributes:
        blank_penalty: taken off the blank's logit; None: the student's own.
    """

    blank_penalty: float | None = None

    def __call__(self, student: CtcStudent, memory: Memory, rng: Generator) -> Candidates:
        logits, present = self.read(student, memory)
        tokens = torch.full_like(present, student.blank, dtype=torch.long)
        tokens[present] = argmax(logits)
        packed, count = join(tokens, present, student.blank)
        return _single(packed, count, present.shape[1])

    def read(self, student: CtcStudent, memory: Memory) -> tuple[Float[Tensor, "N V"], Bool[Tensor, "B T"]]:
        """Logits that decoding chooses from, of all places of all rows, and where these N places are."""
        inputs, lengths = student.places(memory)
        present = present_up_to(lengths, inputs.shape[1])
        states = student.network.decode(inputs, None if len(lengths) == 1 else present, memory)
        logits = student.logits(states[present]).index_fill_(-1, student.barred, -torch.inf)
        logits[..., student.blank] -= student.blank_penalty if self.blank_penalty is None else self.blank_penalty
        return logits, present


@dataclass(frozen=True, slots=True)
class CtcBeam:
    """The likeliest text, summed over its alignments, by a beam search (``ctc_beam.py``).

    Attributes:
        beam: texts that are kept at each place.
        scores: what counts beside the student's probability.
        blank_penalty: see ``CtcPass``.
    """

    beam: int
    scores: Scores = Scores()
    blank_penalty: float | None = None

    def __call__(self, student: CtcStudent, memory: Memory, rng: Generator) -> Candidates:
        logits, present = CtcPass(self.blank_penalty).read(student, memory)
        log_probs = logits.float().log_softmax(-1)
        blanks = log_probs[..., student.blank].tolist()
        log_probs[..., student.blank] = -torch.inf
        near = log_probs.topk(min(TOKENS, log_probs.shape[-1] - 1), dim=-1)
        tokens, sure, ends = near.indices.tolist(), near.values.tolist(), present.sum(1).cumsum(0).tolist()
        texts = [
            search(blanks[a:b], tokens[a:b], sure[a:b], self.beam, self.scores, student.ngrams)
            for a, b in pairwise([0, *ends])
        ]
        count = torch.tensor([len(text) for text in texts], device=present.device)
        return _single(padded(texts, present.device, student.blank, max(1, *map(len, texts))), count, present.shape[1])


def _single(tokens: Int[Tensor, "B T"], count: Int[Tensor, "B"], places: int) -> Candidates:
    """One candidate per source, after one pass over so many places."""
    scores = torch.zeros(count[:, None].shape, device=count.device)
    return Candidates(tokens[:, None], count[:, None], scores, 1, places)


def join(
    tokens: Int[Tensor, "B T"], present: Bool[Tensor, "B T"], blank: int
) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B"]]:
    """Join equal neighbours, then drop blanks: the rest to the left of each row, and its length."""
    again = torch.zeros_like(present)
    again[:, 1:] = tokens[:, 1:] == tokens[:, :-1]
    kept = present & (tokens != blank) & ~again
    order = (~kept).to(torch.uint8).argsort(dim=1, stable=True)
    return tokens.gather(1, order), kept.sum(1)


class Ctc(NonAutoregressive):
    """One pass over several places per source token.

    Args:
        target, sampling, collapse, checkpoint: see ``NonAutoregressive``; there is one candidate.
        blank_penalty: taken off the blank's logit; None: what the training found best on validation sentences.
        beam: texts that a search keeps; 1: the likeliest token at every place, without a search.
        lm_weight, length_bonus: see ``ctc_beam.Scores``; they need a search.

    Raises:
        ValueError: a negative number, weights without a search, a weight of n-grams that the checkpoint does not
            have, or see ``NonAutoregressive``.
    """

    paper = "Libovicky & Helcl 2018, arXiv 1811.04719"
    kind = CtcStudent

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        blank_penalty: float | None = None,
        beam: int = 1,
        lm_weight: float = 0.0,
        length_bonus: float = 0.0,
        collapse: bool = False,
        checkpoint: str | Path | None = None,
    ) -> None:
        require("at least 0", "method", blank_penalty=blank_penalty, lm_weight=lm_weight)
        require("at least 1", "method", beam=beam)
        if beam == 1 and (lm_weight or length_bonus):
            raise ValueError(
                f"lm_weight and length_bonus must be 0 without a search, got {lm_weight} and {length_bonus}. Set "
                "method.beam=10."
            )
        search = beam > 1 or lm_weight or length_bonus
        writer = CtcBeam(beam, Scores(lm_weight, length_bonus), blank_penalty) if search else CtcPass(blank_penalty)
        super().__init__(target, sampling, writer, False, collapse, checkpoint)
        if lm_weight:
            assert isinstance(self.student, CtcStudent) and checkpoint is not None
            self.student.ngrams = _ngrams(Path(checkpoint).expanduser())


def _ngrams(folder: Path) -> NgramModel:
    """Those of a checkpoint.

    Raises:
        ValueError: it has none, or they cannot be read.
    """
    try:
        return NgramModel.load(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"With method.lm_weight the checkpoint must have {FILE}, which a training writes today, got none that can "
            f"be read in {folder}: {error}. Train it again (python -m bench train method=ctc model=MODEL), or set "
            "method.lm_weight=0."
        ) from error


@dataclass(kw_only=True)
class CtcTraining(StudentTraining):
    """Trains a student of ``ctc``.

    Args:
        ngram: tokens of the longest n-grams that are counted in the texts it learns.
        upsample: see ``CtcStudent``; the others: see ``StudentTraining``.

    Raises:
        ValueError: a number out of range.
    """

    kind = CtcStudent
    writers = {
        "one_pass": CtcPass(),
        "beam_10": CtcBeam(10),
        "beam_10_ngrams": CtcBeam(10, Scores(lm_weight=0.3, length_bonus=0.3)),
    }

    upsample: int = 2
    ngram: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        require("at least 1", ngram=self.ngram)

    def options(self, pairs: Sequence[Pair]) -> dict[str, Any]:
        """See ``StudentTraining``."""
        return {"upsample": self.upsample}

    def student(self, target: Seq2SeqLM, pairs: Sequence[Pair], progress: Progress) -> Student:
        """See ``StudentTraining``."""
        made = super().student(target, pairs, progress)
        assert isinstance(made, CtcStudent)
        end = made.network.shape.end
        made.ngrams = NgramModel.learn((text for _, text in pairs), self.ngram, target.vocab_size, end)
        return made

    def save(self, student: Student, context: TrainingContext) -> None:
        """See ``StudentTraining``; and the n-grams."""
        super().save(student, context)
        assert isinstance(student, CtcStudent) and student.ngrams is not None
        student.ngrams.save(context.output)

    def choose(self, student: Student, bleu: Callable[[], float]) -> dict[str, Any]:
        """See ``StudentTraining``: the blank's penalty."""
        assert isinstance(student, CtcStudent)
        found = {}
        for student.blank_penalty in _PENALTIES:
            found[student.blank_penalty] = round(bleu(), 2)
        student.blank_penalty = max(found, key=found.__getitem__)
        student.options["blank_penalty"] = student.blank_penalty
        return {"blank_penalty": student.blank_penalty, "bleu_by_blank_penalty": {str(k): v for k, v in found.items()}}

    def fits(self, pair: Pair) -> bool:
        """Whether the source has a place for every token, and for a blank between equal ones."""
        source, target = pair
        needed = len(target) + sum(one == two for one, two in pairwise(target))
        return needed <= self.upsample * max(1, len(source) - 1)
