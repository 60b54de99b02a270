"""The costs by which a decoder sizes its drafts: measured before the clock of a run starts, and recorded with it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from scipy.optimize import isotonic_regression
from torch import Generator

from bench.analysis.cost_curve import CostCurve
from bench.measure import verify_cost
from methods.decoder import CostAware, Decoder
from methods.engine.causal_lm import CausalLM

ROUNDS = 24  # most tokens that are decoded for the time of drafting
_DIGITS = 4


def wanted(decoder: Decoder) -> int:
    """Most nodes of a pass whose time the decoder wants to know; 0: none."""
    return decoder.costs_wanted if isinstance(decoder, CostAware) else 0


def passes(
    target: CausalLM,
    decoders: Sequence[Decoder],
    batch: int,
    context: int,
    repeats: int = 15,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> CostCurve:
    """Passes of the target, up to the largest that one of the decoders wants to know of.

    Args:
        batch: rows in lockstep.
        context: tokens per row, at least 1; with ``ROUNDS`` and twice the most nodes they fit into the model's context.
    """
    sizes = {nodes for decoder in decoders for nodes in verify_cost.grid(wanted(decoder))}
    return verify_cost.measure(target, batch, sorted({1, *sizes}), (context,), repeats, clock=clock)


def measure(
    target: CausalLM, decoder: Decoder, curve: CostCurve, clock: Callable[[], int] = time.perf_counter_ns
) -> list[list[float]]:
    """Costs in the form of ``CostAware.use_costs``: of ``passes``, and the time of drafting, which this measures.

    Times rise with the nodes: where noise has it otherwise, the nearest rising ones in the sense of least squares.
    """
    drafting, sizes = _drafting(target, decoder, curve, clock), verify_cost.grid(wanted(decoder))
    times = isotonic_regression([curve.seconds(nodes, curve.batch, curve.contexts[0]) for nodes in sizes]).x.tolist()
    found = [(0, drafting), *zip(sizes, times, strict=True)]
    return [[float(nodes), round(seconds / times[0], _DIGITS)] for nodes, seconds in found]


def _drafting(target: CausalLM, decoder: Decoder, curve: CostCurve, clock: Callable[[], int]) -> float:
    """Seconds by which a round with a draft exceeds its pass, the median over rounds of a random text.

    Where a decoder drafts in two ways, as ``hybrid``, rounds count in which a network drafts.
    """
    prompts = list(verify_cost.random_tokens(target, curve.batch, curve.contexts[0], seed=0))
    steps = iter(decoder.decode(prompts, ROUNDS, Generator(target.device).manual_seed(0)))
    rounds: list[tuple[bool, float]] = []
    next(steps)
    while len(rounds) < ROUNDS:
        start = clock()
        step = next(steps, None)
        if step is None:
            break
        seconds = (clock() - start) / 1e9
        if step.nodes > 1:
            rounds.append((step.draft_passes > 0, seconds - curve.seconds(step.nodes, curve.batch, curve.contexts[0])))
    with_passes = [seconds for passes, seconds in rounds if passes]
    chosen = with_passes or [seconds for _, seconds in rounds]
    return max(statistics.median(chosen[1:] or chosen or [0.0]), 0.0)  # the first round reads the prompt
