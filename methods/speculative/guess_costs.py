"""What passes cost that judge guesses, in rounds of a CPU's kernels (``methods.engine.guesses``)."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from time import perf_counter

import numpy as np

from methods.engine.causal_lm import CausalLM
from methods.engine.guesses import GuessedRounds, Guesses, NgramTable

_CONTEXT, _PASSES = 128, 4  # tokens before the passes that are timed, and passes of a call
_CALLS, _SECONDS = 3, 0.5  # calls of each size at least, and time that small models are timed for


def measured_costs(lm: CausalLM, guesses: int) -> list[float]:
    """Times of passes over a root and 0 to ``guesses`` guesses, over that of the root alone; none below the one before.

    The first pass of a call is not counted: it is slower than those that follow it.

    Args:
        lm: whose rounds are fused.
    """
    most = _PASSES * (1 + guesses)
    cache = lm.new_cache(1, _CONTEXT + most + guesses)
    table = _always_guessing(lm.vocab_size)
    sizes = [Guesses(max(count, 1), table, least=0.0 if count else math.inf) for count in range(1 + guesses)]
    times = [math.inf] * len(sizes)
    began, calls = perf_counter(), 0
    while calls < _CALLS or perf_counter() - began < _SECONDS:
        calls += 1
        for count, guessed in enumerate(sizes):
            cache.set_lengths([_CONTEXT])
            asked = GuessedRounds(guessed, [0], wanted=(_PASSES - 1) * (1 + count) + 1)
            ran = lm.rounds([0], cache, most, [True], (), guessed=asked)
            times[count] = min(times[count], *(end - begin for begin, end in pairwise(ran.times[:_PASSES])))
    return [slowest / times[0] for slowest in accumulate(times, max)]


def _always_guessing(vocab_size: int) -> NgramTable:
    """A table with one token after each token."""
    tokens = np.arange(vocab_size)
    return NgramTable(
        np.stack([tokens, (tokens + 1) % vocab_size, np.full(vocab_size, -1)], 1).ravel(), vocab_size, (1, 2, 2)
    )
