"""The three-term fine-tuning of NAT (Gu et al. 2018, section 4.3).

RKL(f) = sum over t and v of p_student(v | x, f) * -log p_teacher(v | y'_<t, x), where y' is what the student writes
under the fertilities f, and the teacher is frozen. Then

    L = weight * (REINFORCE of RKL(f) - RKL(f_average), f drawn, + RKL(f_aligner)) + (1 - weight) * L_distillation

The first term trains the fertilities only, the second the rest by back-propagation. The reward is centred over the
batch and multiplied by 0.1, as in the released code. The paper fine-tunes at a small constant rate; here it is the last
part of the training, in which the rate falls to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from methods.engine.seq2seq_lm import Seq2SeqLM, Source
from methods.non_autoregressive.network import Memory, present_up_to
from methods.non_autoregressive.rescoring import teacher_log_probs
from methods.non_autoregressive.student import Batch, Objective
from methods.training.interface import require

_REWARD = 0.1
_LEAST_LOG_PROB = -50.0  # in place of the teacher's -inf for tokens that it never writes


@dataclass(frozen=True, slots=True)
class Finetuning:
    """When, and with which weight.

    Attributes:
        share: of the steps, at the end.
        weight: lambda, of the two new terms.
    """

    share: float = 0.2
    weight: float = 0.25

    def __post_init__(self) -> None:
        require("above 0 and at most 1", share=self.share)
        require("from 0 to 1", weight=self.weight)


def three_terms(
    student: Any,
    settings: Finetuning,
    teacher: Seq2SeqLM,
    batch: Batch,
    memory: Memory,
    states: Float[Tensor, "B T D"],
    distillation: Tensor,
    numbers: Mapping[str, Any],
) -> Objective:
    """The loss of section 4.3.

    Args:
        student: a ``NatStudent``.
        states: its decoder's under the aligner's fertilities.
        distillation: its ordinary loss on the batch.
        numbers: to follow.
    """
    rows = [row[:count] for row, count in zip(batch.sources, batch.source_lengths.tolist(), strict=True)]
    with torch.autocast(teacher.device.type, enabled=False):  # its products are packed for its own type
        source = teacher.encode(rows)
    aligned = reverse_kl(student, teacher, source, states, batch.lengths)
    logits = student.fertility(memory.states).float()
    probs = logits.detach().softmax(-1)
    drawn = torch.multinomial(probs.flatten(0, 1), 1).view(probs.shape[:2])
    mean = student.expected(probs).round().long()
    with torch.no_grad():
        costs = [_cost(student, teacher, source, memory, wished[:, None], probs) for wished in (drawn, mean)]
    reward = costs[1] - costs[0]
    reward = _REWARD * (reward - reward.mean())
    content = present_up_to(memory.content, drawn.shape[1])
    log_prob = logits.log_softmax(-1).gather(2, drawn[:, :, None])[:, :, 0].masked_fill(~content, 0.0)
    reinforce = -(reward[:, None] * log_prob).sum() / content.sum()
    backward = aligned.sum() / batch.lengths.sum()
    loss = settings.weight * (reinforce + backward) + (1 - settings.weight) * distillation
    return loss, {**numbers, "reverse_kl": backward.detach(), "reverse_kl_drawn": costs[0].mean()}


def reverse_kl(
    student: Any,
    teacher: Seq2SeqLM,
    source: Source,
    states: Float[Tensor, "B T D"],
    lengths: Int[Tensor, "B"],
) -> Float[Tensor, "B"]:
    """RKL of each row; gradients flow into the student alone."""
    log_probs = student.logits(states).float().log_softmax(-1)
    written, _ = student.choose(states.detach(), scored=False)
    with torch.autocast(teacher.device.type, enabled=False):
        heard = teacher_log_probs(teacher, source, written)[:, :-1].clone().clamp(min=_LEAST_LOG_PROB)
    costs = -(log_probs.exp() * heard).sum(-1)
    return costs.masked_fill(~present_up_to(lengths, costs.shape[1]), 0.0).sum(1)


def _cost(
    student: Any,
    teacher: Seq2SeqLM,
    source: Source,
    memory: Memory,
    wished: Int[Tensor, "B 1 S"],
    probs: Float[Tensor, "B S C"],
) -> Float[Tensor, "B"]:
    inputs, lengths = student.copies(memory, student.limited(memory, wished, probs)[:, 0])
    states = student.network.decode(inputs, present_up_to(lengths, inputs.shape[1]), memory)
    return reverse_kl(student, teacher, source, states, lengths) / lengths
