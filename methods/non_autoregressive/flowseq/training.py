"""The training of FlowSeq: see flowseq.py for what is minimised, training.py for all else."""

from __future__ import annotations

from collections.abc import Sequence

from methods.non_autoregressive.flowseq.model import FlowPass, FlowSeqStudent
from methods.non_autoregressive.network import Embedding
from methods.non_autoregressive.training import Data, StudentTraining
from methods.training.translation import Recipe


class FlowSeqTraining(StudentTraining):
    """Makes a student of ``flowseq``.

    Args:
        latent, width, inner, steps, posterior_layers, word_dropout: see ``FlowSeqStudent``.
        autoencoding, annealing, length_weight: see ``FlowSeqStudent``.
        data, beams, embedding, validation, recipe: see ``StudentTraining``.
    """

    def __init__(
        self,
        latent: int | None = None,
        width: int | None = None,
        inner: int | None = None,
        steps: Sequence[int] = (2, 1),
        posterior_layers: int = 3,
        word_dropout: float = 0.2,
        autoencoding: float = 0.25,
        annealing: float = 0.25,
        length_weight: float = 1.0,
        data: Data = "distilled",
        beams: int = 1,
        embedding: Embedding = "shared",
        validation: str | None = None,
        recipe: Recipe | None = None,
    ) -> None:
        options = {
            "latent": latent,
            "width": width,
            "inner": inner,
            "steps": list(steps),
            "posterior_layers": posterior_layers,
            "word_dropout": word_dropout,
            "autoencoding": autoencoding,
            "annealing": annealing,
            "length_weight": length_weight,
        }
        writers = {"argmax": FlowPass(), "iwd": FlowPass(3, 1, importance=4)}
        super().__init__(FlowSeqStudent, options, writers, data, beams, embedding, validation, recipe)
