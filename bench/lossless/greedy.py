"""Greedy identity: the target alone and the method at temperature 0, token by token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.measure.agreement import check
from methods.decoder import Decoder, generate
from methods.engine.causal_lm import CausalLM


@dataclass(frozen=True, slots=True)
class Identity:
    """One prompt, decoded twice.

    Attributes:
        tokens: number of tokens, up to the end-of-sequence token or the limit.
        identical: whether all are equal.
        first_divergence: index of the first that differs; None if none does.
        exact, near_tie, violation: the method's tokens under teacher forcing: the target's argmax, within the near-tie
            gap of it, or neither.
        max_gap: largest difference of log-probability between the argmax and the method's token.
    """

    prompt: str
    tokens: int
    identical: bool
    first_divergence: int | None
    exact: int
    near_tie: int
    violation: int
    max_gap: float


def compare_prompt(
    baseline: Decoder, method: Decoder, lm: CausalLM, name: str, prompt: list[int], limit: int, tolerance: float
) -> Identity:
    wanted, found = (decode(d, prompt, limit, lm) for d in (baseline, method))
    length = min(len(wanted), len(found))
    differs = [i for i in range(length) if wanted[i] != found[i]]
    first = differs[0] if differs else (length if len(wanted) != len(found) else None)
    report = check(lm, prompt, found, tolerance)
    return Identity(
        name, len(found), first is None, first, report.exact, report.near_ties, report.violations, report.max_gap
    )


def decode(decoder: Decoder, prompt: list[int], limit: int, lm: CausalLM) -> list[int]:
    """Ids of one prompt, up to the end-of-sequence token or the limit."""
    rng = torch.Generator(lm.device).manual_seed(0)
    return generate(decoder, [torch.tensor(prompt)], limit, lm.eos_ids, rng)[0]
