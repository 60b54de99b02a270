"""Mask-predict: a masked language model of the target, run repeatedly (Ghazvininejad et al. 2019, arXiv 1904.09324).

Training masks n of T target tokens, n drawn uniformly from 1 to T, and learns those. Decoding starts with masks
everywhere at a predicted length; pass i of I (from 0) writes the masked places, and before each further one the floor(T
(I - i) / I) places of least probability are masked again. ``length_beam`` lengths are tried; the best mean
log-probability wins. Passes end early when no row has a place left to mask.

Published: WMT14 en-de, distilled, 18.05 with 1 iteration and 27.03 with 10 (raw 10.64 and 24.61), length beam 5.

Differences: the length is predicted from the mean of the encoder's states, to which its loss does not reach, and begin
and end are not part of the target.

    python -m bench train method=cmlm model=multi30k_4_4
    python -m bench method=cmlm model=multi30k_4_4 dataset=multi30k method.iterations=10 method.length_beam=5
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Generator

from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.non_autoregressive.decoder_inputs import Masks
from methods.non_autoregressive.loop import NonAutoregressive
from methods.non_autoregressive.network import Memory, Network, present_up_to
from methods.non_autoregressive.student import (
    Batch,
    Candidates,
    LengthStudent,
    Objective,
    lowest,
    mean_over,
)
from methods.non_autoregressive.training import StudentTraining
from methods.training.interface import require


class CmlmStudent(LengthStudent):
    """A masked language model of the target."""

    method: ClassVar[str] = "cmlm"

    def __init__(self, network: Network, length_weight: float = 0.1) -> None:
        super().__init__(network, Masks(network.shape.width), length_weight)

    def objective(self, batch: Batch, progress: float, smoothing: float) -> Objective:
        """See ``Student``; of the masked tokens."""
        memory, present = self.read(batch), batch.present
        lots = torch.rand(present.shape, device=present.device).masked_fill(~present, torch.inf)
        count = 1 + (torch.rand(len(present), device=present.device) * batch.lengths).long()
        masked = lowest(lots, count.minimum(batch.lengths))
        masks = self.inputs(memory, batch.lengths, present.shape[1])
        inputs = torch.where(masked[:, :, None], masks, self.network.embed(batch.targets))
        return self.supervise(memory, inputs, batch, masked, smoothing)


@dataclass(frozen=True, slots=True)
class MaskPredict:
    """Write, mask the least likely tokens, and write those again.

    Attributes:
        iterations: I, most passes.
        length_beam: lengths that are tried.
    """

    iterations: int = 4
    length_beam: int = 1

    def __call__(self, student: LengthStudent, memory: Memory, rng: Generator) -> Candidates:
        lengths = student.lengths.best(memory, self.length_beam)
        flat, width = lengths.flatten(), int(lengths.max())
        many, present = memory.repeat(self.length_beam), present_up_to(flat, width)
        blank = inputs = student.inputs(many, flat, width)
        masked = present
        tokens = torch.zeros_like(present, dtype=torch.long)
        log_probs = torch.full(present.shape, torch.inf, dtype=inputs.dtype, device=inputs.device)
        scored = self.iterations > 1 or self.length_beam > 1  # else not needed
        passes = 0
        while passes < self.iterations and width * (self.iterations - passes) // self.iterations:
            if passes:
                masked = lowest(log_probs, flat * (self.iterations - passes) // self.iterations)
                inputs = torch.where(masked[:, :, None], blank, student.network.embed(tokens))
            states = student.network.decode(inputs, None if len(flat) == 1 else present, many)
            tokens[masked], log_probs[masked] = student.choose(states[masked], scored)
            passes += 1
        scores = mean_over(log_probs, flat).view(lengths.shape)
        return Candidates(tokens.view(*lengths.shape, width), lengths, scores, passes, self.length_beam * width)


class Cmlm(NonAutoregressive):
    """Mask-predict.

    Args:
        target, sampling: see ``NonAutoregressive``, as for ``rescore``, ``collapse`` and ``checkpoint``.
        iterations: most passes.
        length_beam: lengths that are tried; the best mean log-probability wins, the student's or the teacher's.

    Raises:
        ValueError: no iteration, no length or too many, or see ``NonAutoregressive``.
    """

    paper = "Ghazvininejad et al. 2019, arXiv 1904.09324"
    kind = CmlmStudent

    student: CmlmStudent

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        iterations: int = 4,
        length_beam: int = 1,
        rescore: bool = False,
        collapse: bool = False,
        checkpoint: str | Path | None = None,
    ) -> None:
        require("at least 1", "method", iterations=iterations, length_beam=length_beam)
        writer = MaskPredict(iterations, length_beam)
        super().__init__(target, sampling, writer, rescore, collapse, checkpoint)
        self.student.lengths.require(length_beam)


@dataclass(kw_only=True)
class CmlmTraining(StudentTraining):
    """Trains a student of ``cmlm``; arguments: see ``LengthStudent`` and ``StudentTraining``."""

    kind = CmlmStudent
    writers = {f"iterations_{count}": MaskPredict(count) for count in (4, 1, 10)} | {
        f"iterations_{count}_length_beam_5": MaskPredict(count, 5) for count in (1, 4, 10)
    }

    length_weight: float = 0.1
