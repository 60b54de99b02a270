"""A draft network of EAGLE-3 with random weights, in the sizes that published heads have: it costs time and guesses
nothing.
"""

from __future__ import annotations

import torch

from methods.engine.causal_lm import CausalLM
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.speculative.eagle.checkpoint import Part
from methods.speculative.eagle.training import spec_of

DRAFT_TOKENS = 32_000  # of published heads (Li et al. 2025, arXiv 2503.01840, sec. 4)
_SPREAD = 0.02


def random_part(target: CausalLM, seed: int = 0, draft_tokens: int = DRAFT_TOKENS) -> Part:
    """A network whose layer is as those of the target, with an output matrix of its own.

    Args:
        draft_tokens: that it proposes from, at most all of the target's.
    """
    spec, count = spec_of(target, 3), min(draft_tokens, target.vocab_size)
    generator = torch.Generator().manual_seed(seed)
    shapes = {**spec.shapes(), "lm_head.weight": (count, spec.hidden_size)}
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * _SPREAD
        for name, shape in shapes.items()
    }
    return Part(spec, tensors, DraftVocabulary(torch.arange(count), target.vocab_size))
