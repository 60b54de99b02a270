"""Autoregressive decoding, the baseline of every speed-up: the speculative loop with an empty draft.

Command: ``python -m bench method=autoregressive`` measures it against itself (the speed-up must be 1).
"""

from __future__ import annotations

import torch

from methods.drafting import Context, Draft, StatelessDrafter
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.speculative.loop import SpeculativeDecoder
from methods.speculative.verification import Greedy


class NoDraft(StatelessDrafter):
    """Proposes nothing, so every round is one token of the target."""

    nodes = 0

    def propose(self, context: Context) -> Draft:
        """The empty chain."""
        return Draft.chain(torch.empty(len(context.tokens), 0, dtype=torch.long, device=context.root.device))


class Autoregressive(SpeculativeDecoder):
    """One token per pass of the target: the greedy rule takes the argmax, others draw from its distribution."""

    family = "baseline"
    continuous_batching = True
    speed_only = True

    def __init__(self, target: CausalLM, sampling: Sampling) -> None:
        super().__init__(target, sampling, NoDraft(), Greedy())
