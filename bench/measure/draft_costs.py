"""The costs by which a decoder sizes its drafts: measured before the clock of a run starts, and recorded with it.

A moment in which other work runs makes passes over some sizes slower than over others, and costs of such a moment would
spoil the whole run. So they are compared with a second measurement, the run's own cost curve; where the two differ,
a third decides (``settled``).
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from scipy.optimize import isotonic_regression
from torch import Generator

from bench.analysis.cost_curve import CostCurve, CostSurface
from bench.measure import verify_cost
from methods.autoregressive import Autoregressive
from methods.decoder import CostAware, Decoder, Step
from methods.engine.causal_lm import CausalLM
from methods.engine.cuda_graphs import GraphedLM
from methods.engine.sampling import Sampling

ROUNDS = 24  # most tokens that are decoded for the time of drafting
TOLERANCE = 0.15  # by which times of passes, over that of one node, may differ between two quiet moments
Pairs = Sequence[Sequence[float]]  # in the form of ``CostAware.use_costs``
_DIGITS = 4
_DECODES = 3  # of which the fastest counts


def wanted(decoder: Decoder) -> int:
    """Most nodes of a pass whose time the decoder wants to know; 0: none."""
    return decoder.costs_wanted if isinstance(decoder, CostAware) else 0


def passes(
    target: CausalLM,
    decoders: Sequence[Decoder],
    batch: int,
    context: int,
    repeats: int = 9,
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


def relative(curve: CostCurve | CostSurface, sizes: Sequence[int], batch: int, context: int) -> dict[int, float]:
    """Times of passes over that of one node, by their number of nodes."""
    one = curve.seconds(1, batch, context)
    return {nodes: curve.seconds(nodes, batch, context) / one for nodes in sizes}


def deviation(costs: Pairs, other: Mapping[int, float]) -> float:
    """By how much the time of a pass differs at most between two measurements, as a share."""
    shares = [abs(time / other[int(nodes)] - 1.0) for nodes, time in costs if int(nodes) in other]
    return max(shares, default=0.0)


def settled(first: Pairs, own: Mapping[int, float], again: Pairs) -> list[list[float]]:
    """Of three measurements of passes the one in the middle at every size; of two of drafting the shorter time.

    Noise only prolongs drafting; passes it may also make seem cheap, where it falls on those over one node. A decoder
    that drafts fewer nodes by now lacks some sizes in the third: of two times the lower one counts, and its first time
    of drafting, which is that of all nodes.
    """
    third = {int(nodes): time for nodes, time in again}
    times = {
        int(nodes): [time, *(each[int(nodes)] for each in (own, third) if int(nodes) in each)] for nodes, time in first
    }
    middle = {nodes: statistics.median_low(found) for nodes, found in times.items() if nodes}
    drafting = min(first[0][1], third[0]) if third.keys() >= times.keys() else first[0][1]
    return [[0.0, drafting], *rising(middle)]


def rising(times: Mapping[int, float]) -> list[list[float]]:
    """Pairs of times by nodes in ascending order; no larger pass takes less."""
    most = itertools.accumulate(times.values(), max)
    return [[float(nodes), round(time, _DIGITS)] for nodes, time in zip(times, most, strict=True)]


def _drafting(target: CausalLM, decoder: Decoder, curve: CostCurve, clock: Callable[[], int]) -> float:
    """Seconds by which a round with a draft exceeds its pass, the median over rounds of a random text; and by which a
    pass exceeds a plain round.

    A pass is timed by the round itself, where the decoder does: a large pass of another moment may have taken half as
    long. Where a decoder drafts in two ways, as ``hybrid``, rounds count in which a network drafts. A search that finds
    nothing in this text takes time beside plain rounds that need not come one by one.
    """
    saved = max(curve.seconds(1, curve.batch, curve.contexts[0]) - _plain(target, curve, clock), 0.0)
    decodes = _DECODES if isinstance(target, GraphedLM) else 1  # the first ones record what the last one replays
    return max(min(_beside(target, decoder, curve, clock, saved > 0.0) for _ in range(decodes)), 0.0) + saved


def _beside(target: CausalLM, decoder: Decoder, curve: CostCurve, clock: Callable[[], int], searches: bool) -> float:
    """Seconds of a round of a decode beside its pass; ``searches``: those that draft nothing count if no other does."""
    steps = _rounds(target, decoder, curve)
    rounds: list[tuple[bool, bool, float]] = []
    while len(rounds) < ROUNDS:
        start = clock()
        step = next(steps, None)
        if step is None:
            break
        seconds = (clock() - start) / 1e9
        own = None if step.pass_ns is None else step.pass_ns / 1e9
        spent = curve.seconds(step.nodes, curve.batch, curve.contexts[0]) if own is None else own
        rounds.append((step.draft_passes > 0, step.nodes > 1, seconds - spent))
    with_passes = [seconds for passes, _, seconds in rounds if passes]
    with_drafts = [seconds for _, drafted, seconds in rounds if drafted]
    chosen = with_passes or with_drafts or [seconds for *_, seconds in rounds if searches]
    return statistics.median(chosen[1:] or chosen or [0.0])  # the first round reads the prompt


def _rounds(target: CausalLM, decoder: Decoder, curve: CostCurve) -> Iterator[Step]:
    """Rounds over a random text of the curve's context, whose prompts have been read."""
    prompts = list(verify_cost.random_tokens(target, curve.batch, curve.contexts[0], seed=0))
    steps = iter(decoder.decode(prompts, ROUNDS, Generator(target.device).manual_seed(0)))
    next(steps)
    return steps


def _plain(target: CausalLM, curve: CostCurve, clock: Callable[[], int]) -> float:
    """Seconds of a round that nothing is asked for a draft in: less than those of its pass where such rounds are
    launched ahead, or several are one call.
    """
    seconds = curve.seconds(1, curve.batch, curve.contexts[0])
    if not (target.runs_rounds or isinstance(target, GraphedLM)):
        return seconds
    decoder = Autoregressive(target, Sampling())
    for _ in range(_DECODES):
        steps = _rounds(target, decoder, curve)
        start = clock()
        rounds = sum(1 for _ in steps)
        seconds = min(seconds, (clock() - start) / 1e9 / rounds) if rounds else seconds
    return seconds
