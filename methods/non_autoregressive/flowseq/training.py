"""Training of a student of ``flowseq``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from methods.non_autoregressive.flowseq.model import FlowPass, FlowSeqStudent
from methods.non_autoregressive.training import StudentTraining


@dataclass(kw_only=True)
class FlowSeqTraining(StudentTraining):
    """Trains a student of ``flowseq``.

    Args:
        latent, width, inner, steps, posterior_layers, word_dropout: see ``FlowSeqStudent``.
        autoencoding, annealing, length_weight: see ``FlowSeqStudent``.
        data, beams, embedding, validation, recipe: see ``StudentTraining``.
    """

    kind = FlowSeqStudent
    writers = {"argmax": FlowPass(), "iwd": FlowPass(3, 1, importance=4)}

    latent: int | None = None
    width: int | None = None
    inner: int | None = None
    steps: Sequence[int] = (2, 1)
    posterior_layers: int = 3
    word_dropout: float = 0.2
    autoencoding: float = 0.25
    annealing: float = 0.25
    length_weight: float = 0.1
