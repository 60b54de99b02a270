"""NAT with fertilities (Gu, Bradbury, Xiong, Li & Socher 2018, ICLR, arXiv 1711.02281).

Every source token has a fertility, the number of target tokens it becomes; the decoder reads each token's embedding
that many times and writes all positions in one pass. Fertilities sum to the length of the target and are a latent
variable that decides between translations. In training an aligner gives them (word_alignment.py); the two losses are
those of tokens and fertilities. Every decoder layer has a positional attention.

``decoding``: ``argmax`` takes the likeliest fertility of every token, ``average`` the rounded mean, ``npd`` (noisy
parallel decoding) the likeliest and ``samples - 1`` drawn ones, among which the teacher chooses; ``rescore=false`` uses
the student's own scores. ``finetune`` adds the three terms of sec. 4.3 (nat_finetuning.py).

Published: WMT14 en-de 17.35, 17.69 fine-tuned, 18.66 with 10 samples; 15.6 times the speed of a beam of 4. IWSLT16:
uniform copy 20.72, fertilities 24.02, positional attention 25.20, fine-tuning 26.52.

Differences: cross-attention reads the encoder's top layer, 16 classes of fertility instead of 50, positional attention
starts as zero because the decoder starts as the teacher's, and targets without a source token belong to the token
before them.

    python -m bench train method=nat model=multi30k_4_4
    python -m bench method=nat model=multi30k_4_4 dataset=multi30k method.decoding=npd method.samples=10
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Generator, Tensor, nn

from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.non_autoregressive.decoder_inputs import gather
from methods.non_autoregressive.loop import NonAutoregressive
from methods.non_autoregressive.nat_finetuning import Finetuning, three_terms
from methods.non_autoregressive.network import Memory, Network, present_up_to
from methods.non_autoregressive.student import Batch, Candidates, Objective, Student, fill
from methods.non_autoregressive.training import Progress, StudentTraining
from methods.non_autoregressive.word_alignment import align, fertilities
from methods.training.interface import require
from methods.training.translation import Pair

Decoding = Literal["argmax", "average", "npd"]
_MOST_PER_TOKEN = 2  # of the source, so many tokens of the target at most


class NatStudent(Student):
    """Fertilities, then one pass over so many copies.

    Args:
        classes: of fertility; the last one includes larger ones.
        positional: the positional attention.
        fertility_weight: of the fertilities' loss, where the tokens' is 1.
        finetune: the last part of the training; None: none.
    """

    method: ClassVar[str] = "nat"

    def __init__(
        self,
        network: Network,
        classes: int = 16,
        positional: bool = True,
        fertility_weight: float = 1.0,
        finetune: Mapping[str, float] | None = None,
    ) -> None:
        if classes < 2:
            raise ValueError(f"classes must be at least 2, got {classes}. Set train.classes.")
        finetune = None if finetune is None else dict(finetune)
        super().__init__(
            network, classes=classes, positional=positional, fertility_weight=fertility_weight, finetune=finetune
        )
        self.fertility_weight = fertility_weight
        self.finetuning = None if finetune is None else Finetuning(**finetune)
        self.fertility = nn.Linear(network.shape.width, classes)
        self.teacher: list[Seq2SeqLM] = []  # in a list: it is no part of the student

    @classmethod
    def network_options(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        return {"positional": options["positional"], "blind": True}

    def objective(self, batch: Batch, progress: float, smoothing: float) -> Objective:
        """See ``Student``; the notes of the batch are the aligner's fertilities."""
        memory = self.read(batch)
        assert batch.notes is not None, "the training annotates its pairs with fertilities"
        inputs = copies(memory, batch.notes, batch.targets.shape[1])
        states, present = self.network.decode(inputs, batch.present, memory), batch.present
        loss, right = self.token_loss(states[present], batch.targets[present], smoothing)
        logits, content = self.fertility(memory.states), present_up_to(memory.content, batch.sources.shape[1])
        wanted = batch.notes.clamp(max=logits.shape[-1] - 1)
        fertility_loss = F.cross_entropy(logits[content].float(), wanted[content])
        numbers = {"tokens_loss": loss.detach(), "right": right, "fertility_loss": fertility_loss.detach()}
        losses = {"tokens": loss, "fertility": self.fertility_weight * fertility_loss}
        if self.finetuning is not None and progress >= 1 - self.finetuning.share:
            total = losses["tokens"] + losses["fertility"]
            return three_terms(self, self.finetuning, self.teacher[0], batch, memory, states, total, numbers)
        return losses, numbers

    def limited(self, memory: Memory, wished: Int[Tensor, "B K S"], probs: Float[Tensor, "B S C"]) -> Tensor:
        """Fertilities of [B, K, S] limited to a possible text: none after the source, at least one token, and not too
        many.
        """
        inside = present_up_to(memory.content, wished.shape[2])[:, None]
        kept = wished.masked_fill(~inside, 0)
        silent = kept.sum(2, keepdim=True) == 0
        mean = self.expected(probs).masked_fill(~inside[:, 0], -torch.inf)
        loudest = F.one_hot(mean.argmax(1), wished.shape[2])[:, None]
        kept = torch.where(silent, loudest, kept)
        most = (_MOST_PER_TOKEN * memory.content).clamp(max=self.network.shape.positions)[:, None, None]
        return kept.cumsum(2).minimum(most).diff(dim=2, prepend=torch.zeros_like(kept[:, :, :1]))

    def copies(self, memory: Memory, fertility: Int[Tensor, "B S"]) -> tuple[Float[Tensor, "B T D"], Int[Tensor, "B"]]:
        """The decoder's input under these fertilities, and its length."""
        lengths = fertility.sum(1)
        return copies(memory, fertility, int(lengths.max())), lengths

    def expected(self, probs: Float[Tensor, "*b C"]) -> Float[Tensor, "*b"]:
        """Mean fertility."""
        return probs @ torch.arange(probs.shape[-1], device=probs.device, dtype=probs.dtype)


def copies(memory: Memory, fertility: Int[Tensor, "B S"], width: int) -> Float[Tensor, "B T D"]:
    """Every source embedding as often as its fertility, in order; undefined after their sum."""
    place = torch.arange(width, device=fertility.device).expand(len(fertility), -1).contiguous()
    return gather(memory, torch.searchsorted(fertility.cumsum(1), place, right=True))


@dataclass(frozen=True, slots=True)
class FertilityPass:
    """One pass for each choice of fertilities.

    Attributes:
        decoding: how they are chosen.
        samples: with ``npd``, how many choices; the likeliest is one of them.
    """

    decoding: Decoding = "argmax"
    samples: int = 1

    def __call__(self, student: NatStudent, memory: Memory, rng: Generator) -> Candidates:
        probs = student.fertility(memory.states).softmax(-1)
        fertility = student.limited(memory, self.wished(student, probs, rng), probs)
        many = memory.repeat(fertility.shape[1])
        inputs, lengths = student.copies(many, fertility.flatten(0, 1))
        return fill(student, many, inputs, lengths.view(fertility.shape[:2]))

    def wished(self, student: NatStudent, probs: Float[Tensor, "B S C"], rng: Generator) -> Int[Tensor, "B K S"]:
        """Fertilities by the head, without limits."""
        if self.decoding == "average":
            return student.expected(probs).round().long()[:, None]
        best = probs.argmax(-1)[:, None]
        if self.decoding == "argmax" or self.samples == 1:
            return best
        drawn = torch.multinomial(probs.flatten(0, 1).float(), self.samples - 1, replacement=True, generator=rng)
        return torch.cat([best, drawn.view(*probs.shape[:2], -1).transpose(1, 2)], 1)


class Nat(NonAutoregressive):
    """NAT with fertilities.

    Args:
        decoding: how fertilities are chosen.
        samples: with ``npd``, translations among which is chosen.

    Raises:
        ValueError: no sample, or see ``NonAutoregressive``.
    """

    paper = "Gu et al. 2018, arXiv 1711.02281"
    kind = NatStudent

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        decoding: Decoding = "argmax",
        samples: int = 10,
        rescore: bool = True,
        collapse: bool = False,
        checkpoint: str | Path | None = None,
    ) -> None:
        require("at least 1", "method", samples=samples)
        rescored = rescore and decoding == "npd" and samples > 1
        writer = FertilityPass(decoding, samples)
        super().__init__(target, sampling, writer, rescored, collapse, checkpoint)


@dataclass(kw_only=True)
class NatTraining(StudentTraining):
    """Trains a student of ``nat``; arguments: see ``NatStudent`` and ``StudentTraining``."""

    kind = NatStudent
    writers = {"argmax": FertilityPass(), "average": FertilityPass("average")}

    classes: int = 16
    positional: bool = True
    fertility_weight: float = 1.0
    finetune: Finetuning | None = None

    def options(self, pairs: Sequence[Pair]) -> dict[str, Any]:
        """See ``StudentTraining``."""
        return super().options(pairs) | {"finetune": None if self.finetune is None else asdict(self.finetune)}

    def student(self, target: Seq2SeqLM, pairs: Sequence[Pair], progress: Progress) -> Student:
        """See ``StudentTraining``; fine-tuning uses the teacher."""
        made = super().student(target, pairs, progress)
        assert isinstance(made, NatStudent)
        made.teacher.append(target)
        return made

    def annotate(self, pairs: Sequence[Pair], progress: Progress) -> list[list[int]]:
        """Fertilities of the source tokens, with 0 for the end."""
        content = [(source[:-1] or source, target) for source, target in pairs]
        found = align(content, progress=progress)
        return [
            (fertilities(alignment, len(source)) + [0])[: len(pair[0])]
            for alignment, (source, _), pair in zip(found, content, pairs, strict=True)
        ]
