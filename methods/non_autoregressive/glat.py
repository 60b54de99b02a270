"""Vanilla and glancing training: one pass over copies of the source (GLAT, Qian et al. 2021, ACL, arXiv 2008.07905).

Vanilla NAT learns every token from the copied source alone, so tokens are guessed independently and translations get
mixed. Glancing shows the decoder N = floor(ratio * Hamming distance) tokens of the target, drawn at random, and only
the others are learnt. Both passes drop the same units. The ratio falls from 0.5 to 0.3 during training; 0 is vanilla
NAT.

Published: WMT14 en-de 25.21, de-en 29.84, distilled, at 15.3 times the speed of a beam of 4; vanilla NAT 19.99 with the
same code.

Differences: layers and tied embedding of the teacher, and the length's loss does not reach the encoder.

    python -m bench train method=glat model=multi30k_4_4
    python -m bench train method=glat model=multi30k_4_4 'train.ratio=[0,0]' train.copy=uniform out=FOLDER    (vanilla)
    python -m bench method=glat model=multi30k_4_4 dataset=multi30k method.length_beam=5 method.rescore=true
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling, argmax
from methods.non_autoregressive.decoder_inputs import Copy, copy_of
from methods.non_autoregressive.loop import NonAutoregressive
from methods.non_autoregressive.network import Memory, Network
from methods.non_autoregressive.student import Batch, LengthStudent, Objective, OnePass, Student, lowest
from methods.non_autoregressive.training import StudentTraining
from methods.training.interface import require


class GlatStudent(LengthStudent):
    """One pass over copies of the source.

    Args:
        copy: of the source.
        ratio: of glancing, at the begin and the end of the training.
        positional: a positional attention, and no position sees itself: ``nat`` without fertilities.
        length_weight: see ``LengthStudent``.
    """

    method: ClassVar[str] = "glat"

    def __init__(
        self,
        network: Network,
        copy: Copy = "soft",
        ratio: Sequence[float] = (0.5, 0.3),
        positional: bool = False,
        length_weight: float = 0.1,
    ) -> None:
        if len(ratio) != 2 or not all(0 <= share <= 1 for share in ratio):
            raise ValueError(f"ratio must be two shares from 0 to 1, got {list(ratio)}. Set train.ratio.")
        own: dict[str, Any] = {"copy": copy, "ratio": list(ratio), "positional": positional}
        super().__init__(network, copy_of(copy), length_weight, **own)
        self.ratio = tuple(ratio)

    @classmethod
    def network_options(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        return {"positional": options["positional"], "blind": options["positional"]}

    def objective(self, batch: Batch, progress: float, smoothing: float) -> Objective:
        """See ``Student``; of the tokens that were not shown."""
        begin, end = self.ratio
        ratio = begin + (end - begin) * progress
        if not ratio:
            return super().objective(batch, progress, smoothing)
        memory = self.read(batch)
        inputs = self.inputs(memory, batch.lengths, batch.targets.shape[1])
        shown = self.glance(memory, inputs, batch, ratio)
        inputs = torch.where(shown[:, :, None], self.network.embed(batch.targets), inputs)
        loss, numbers = self.supervise(memory, inputs, batch, batch.present & ~shown, smoothing)
        return loss, {**numbers, "shown": shown.sum() / batch.lengths.sum()}

    @torch.no_grad()
    def glance(self, memory: Memory, inputs: Float[Tensor, "B T D"], batch: Batch, ratio: float) -> Bool[Tensor, "B T"]:
        """Which tokens of the target are shown: the more, the further the first guess is from it."""
        present, device = batch.present, inputs.device
        lots = torch.rand(present.shape, device=device)
        with torch.random.fork_rng(
            devices=[device] if device.type == "cuda" else []
        ):  # the same dropout in both passes
            states = self.network.decode(inputs, present, memory)
        wrong = torch.zeros_like(present)
        wrong[present] = argmax(self.logits(states[present])) != batch.targets[present]
        return lowest(lots.masked_fill(~present, torch.inf), (ratio * wrong.sum(1)).floor().long())


class Glat(NonAutoregressive):
    """One pass, over the likeliest length or several.

    Args:
        length_beam: lengths that are tried; the best mean log-probability wins, the student's or the teacher's.

    Raises:
        ValueError: no length or too many, or see ``NonAutoregressive``.
    """

    paper = "Qian et al. 2021, arXiv 2008.07905"
    kind: ClassVar[type[Student]] = GlatStudent

    student: GlatStudent

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        length_beam: int = 1,
        rescore: bool = False,
        collapse: bool = False,
        checkpoint: str | Path | None = None,
    ) -> None:
        require("at least 1", "method", length_beam=length_beam)
        super().__init__(target, sampling, OnePass(length_beam), rescore, collapse, checkpoint)
        self.student.lengths.require(length_beam)


@dataclass(kw_only=True)
class GlatTraining(StudentTraining):
    """Trains a student of ``glat``; arguments: see ``GlatStudent`` and ``StudentTraining``."""

    kind = GlatStudent
    writers = {"one_pass": OnePass(), "length_beam_5": OnePass(5)}

    copy: Copy = "soft"
    ratio: Sequence[float] = (0.5, 0.3)
    positional: bool = False
    length_weight: float = 0.1
