"""Short continuations by the whole decoder, against the target's exact joint distribution.

Of the V^h continuations of h tokens, those with at least ``floor`` probability are found by expanding the tree of
prefixes breadth first; their probabilities are exact products of the target's own conditionals. Everything
below the floor is one more outcome, "other".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from methods.decoder import Decoder, generate
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling

Sequences = dict[tuple[int, ...], float]
_WIDTH = 128  # prefixes expanded in one pass


@torch.inference_mode()
def likely_continuations(
    target: CausalLM, prompt: list[int], sampling: Sampling, horizon: int, floor: float
) -> Sequences:
    """Continuations with probability >= ``floor``, exactly: none is likelier than its prefix."""
    alive: Sequences = {(): 1.0}
    for _ in range(horizon):
        grown: Sequences = {}
        prefixes = list(alive)
        for start in range(0, len(prefixes), _WIDTH):
            part = prefixes[start : start + _WIDTH]
            for prefix, probs in zip(part, _next_probs(target, prompt, part, sampling), strict=True):
                _expand(grown, prefix, alive[prefix], probs, floor)
        alive = grown
    return alive


def _next_probs(target: CausalLM, prompt: list[int], prefixes: list[tuple[int, ...]], sampling: Sampling) -> Tensor:
    """Prompt and prefix are separate passes, since an encoder-decoder reads one and writes the other."""
    cache = target.new_cache(len(prefixes), len(prompt) + len(prefixes[0]))
    logits = target.prefill([torch.tensor(prompt, device=target.device)] * len(prefixes), cache).logits
    if prefixes[0]:
        logits = target.forward(torch.tensor(prefixes, device=target.device), None, cache).logits
    return sampling.probs(logits[:, -1])


def _expand(grown: Sequences, prefix: tuple[int, ...], mass: float, probs: Tensor, floor: float) -> None:
    joint = probs.double() * mass
    for token in (joint >= floor).nonzero()[:, 0].tolist():
        sequence = (*prefix, token)
        grown[sequence] = float(joint[token])


def drawn_continuations(
    decoder: Decoder,
    prompt: list[int],
    horizon: int,
    draws: int,
    seed: int,
    batch: int,
    device: torch.device,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[tuple[int, ...], int]:
    """Counts of the decoder's continuations, ``batch`` independent rows at a time."""
    counts: dict[tuple[int, ...], int] = {}
    rng = torch.Generator(device=device).manual_seed(seed)
    left = draws
    while left > 0:
        rows = generate(decoder, [torch.tensor(prompt)] * min(batch, left), horizon, rng=rng)
        for key in map(tuple, rows):
            counts[key] = counts.get(key, 0) + 1
        left -= len(rows)
        progress(len(rows))
    return counts


def as_arrays(exact: Sequences, counts: dict[tuple[int, ...], int]) -> tuple[npt.NDArray, npt.NDArray]:
    """Counts and probabilities of the likely continuations, in the order of ``exact``, "other" last."""
    probs = np.array([*exact.values(), max(0.0, 1.0 - sum(exact.values()))])
    known = [counts.get(sequence, 0) for sequence in exact]
    return np.array([*known, sum(counts.values()) - sum(known)], dtype=float), probs
