"""Networks of P-EAGLE for small targets: some texts known by heart, or random."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from methods.engine.causal_lm import CausalLM
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.engine.sampling import Sampling
from methods.speculative.hybrid import Hybrid
from methods.speculative.p_eagle.checkpoint import Part, Spec
from methods.speculative.p_eagle.decoder import PEagle
from methods.speculative.p_eagle.training import PEagleLearner, PEagleTraining, begin_masks
from tests.helpers.tiny_heads import batch_of, learn_by_heart

Texts = tuple[tuple[int, ...], ...]


def spec_of(target: CausalLM, **sizes: Any) -> Spec:
    """As wide as the target: two layers, four tokens."""
    own = {name: sizes.pop(name) for name in ("mask", "norm_before_residual") if name in sizes}
    return Spec(**{**vars(PEagleTraining(**{"layers": 2, "depths": 4} | sizes).spec(target)), **own})


def random_part(spec: Spec, vocabulary: DraftVocabulary, optional: Sequence[str] = (), seed: int = 0) -> Part:
    """Weights at random, so large that every part of the network matters; ``optional``: endings of further tensors."""
    generator, further = torch.Generator().manual_seed(seed), spec.optional(len(vocabulary))
    further = {name: shape for name, shape in further.items() if optional and name.endswith(tuple(optional))}
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.3 + (1.0 if "norm" in name else 0.0)
        for name, shape in (spec.shapes() | further).items()
    }
    return Part(spec, tensors, vocabulary)


@cache
def part_of(target: CausalLM, texts: Texts, vocabulary: int | None, steps: int = 60) -> Part:
    """What a learner leaves that has seen the first of some texts; without texts random weights."""
    size, spec = target.vocab_size, spec_of(target)
    tokens = torch.tensor([token for text in texts for token in text])
    chosen = DraftVocabulary.frequent(tokens, vocabulary, size) if vocabulary else DraftVocabulary.all(size)
    if not texts:
        return random_part(spec, chosen)
    torch.manual_seed(0)
    learner = PEagleLearner(target, spec, chosen.to(target.device), rate=0.5)
    batch = batch_of(target, [list(text) for text in texts[:16]], [1] * len(texts[:16]), spec.taps)
    begin_masks(learner.network, batch)
    learn_by_heart(learner, batch, steps, 2e-2)
    return learner.part()


def p_eagle(
    target: CausalLM,
    sampling: Sampling,
    texts: Sequence[Sequence[int]] = (),
    vocabulary: int | None = None,
    steps: int = 60,
    **options: Any,
) -> PEagle:
    """The method with such a network."""
    with tempfile.TemporaryDirectory() as folder:
        part_of(target, tuple(map(tuple, texts)), vocabulary, steps).save(Path(folder))
        return PEagle(target, sampling, checkpoint=Path(folder), **options)


def hybrid(target: CausalLM, sampling: Sampling, texts: Sequence[Sequence[int]] = (), **options: Any) -> Hybrid:
    """A lookup beside such a network."""
    with tempfile.TemporaryDirectory() as folder:
        part_of(target, tuple(map(tuple, texts)), None).save(Path(folder))
        return Hybrid(target, sampling, network="p_eagle", checkpoint=Path(folder), **options)
