"""Draft networks of EAGLE for small targets: some texts known by heart, or random."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from methods.engine.causal_lm import CausalLM
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.engine.sampling import Sampling
from methods.speculative.eagle.checkpoint import Part
from methods.speculative.eagle.decoder import Eagle
from methods.speculative.eagle.training import EagleLearner, spec_of
from methods.speculative.hybrid import Hybrid
from tests.helpers.tiny_heads import batch_of, learn_by_heart


def eagle_learner(
    target: CausalLM,
    version: int,
    texts: Sequence[Sequence[int]] = (),
    vocabulary: int | None = None,
    steps: int = 40,
) -> EagleLearner:
    """A learner that has seen some texts; without texts, one with random weights."""
    size = target.vocab_size
    tokens = torch.tensor([token for text in texts for token in text])
    chosen = DraftVocabulary.frequent(tokens, vocabulary, size) if vocabulary else DraftVocabulary.all(size)
    torch.manual_seed(0)
    spec = spec_of(target, version)
    learner = EagleLearner(target, spec, chosen.to(target.device), 2, noise=0.0, classification=1.0)
    if texts:
        batch = batch_of(target, [list(text) for text in texts], [1] * len(texts), spec.taps)
        learn_by_heart(learner, batch, steps)
    else:
        with torch.no_grad():
            for parameter in learner.parameters():
                parameter.normal_(0.0, 0.3)
    return learner


@cache
def part_of(target: CausalLM, version: int, texts: tuple[tuple[int, ...], ...], vocabulary: int | None) -> Part:
    """What such a learner leaves."""
    return eagle_learner(target, version, texts, vocabulary).part()


def eagle(
    target: CausalLM,
    sampling: Sampling,
    version: Literal[1, 2, 3],
    texts: Sequence[Sequence[int]] = (),
    vocabulary: int | None = None,
    **options: Any,
) -> Eagle:
    """The method with such a network."""
    with tempfile.TemporaryDirectory() as folder:
        part_of(target, 3 if version == 3 else 1, tuple(map(tuple, texts)), vocabulary).save(Path(folder))
        return Eagle(target, sampling, version, checkpoint=Path(folder), **options)


def hybrid(target: CausalLM, sampling: Sampling, texts: Sequence[Sequence[int]] = (), **options: Any) -> Hybrid:
    """A lookup beside such a network."""
    with tempfile.TemporaryDirectory() as folder:
        part_of(target, 3, tuple(map(tuple, texts)), None).save(Path(folder))
        return Hybrid(target, sampling, checkpoint=Path(folder), **options)
