"""What passes cost during a run: a shared machine changes within minutes, memory and arithmetic apart.

Between prompts a few passes are timed, every ``EVERY_S`` seconds, or so seldom that it takes a fiftieth of the time.
Decoders that size their drafts get costs that have changed, and the run's cost curve, which was measured before, is
scaled to the mean of all these moments, so that the predicted speed-up is that of the machine as it was during the run.
On a CPU only: a GPU is rarely shared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bench.analysis.cost_curve import CostCurve, CostSurface
from bench.measure import draft_costs, verify_cost
from bench.measure.draft_costs import Pairs
from bench.measure.interleave import MethodArm
from methods.decoder import CostAware
from methods.engine.causal_lm import CausalLM

EVERY_S = 20.0
CHANGE = 0.05  # by which the time of a pass, over that of one node, must differ
NODES, REPEATS = (1, 2, 4, 8, 16), 5  # between them a change is taken to be smooth, where times are not
SELDOM = 50  # times as long as a look took, at least, until the next one

Times = Mapping[int, float]  # seconds of passes by their nodes


@dataclass(slots=True)
class CostWatch:
    """Times passes of a run between its prompts.

    Args:
        target: whose passes they are.
        arms: get new costs; their manifests get the scaled curve and what was found.
        batch: rows in lockstep.
        context: tokens per row, with room for as many more as the largest pass has.
        wall: seconds.
    """

    target: CausalLM
    arms: Sequence[MethodArm]
    batch: int
    context: int
    wall: Callable[[], float]
    _next: float = field(init=False)
    _moments: list[Times] = field(default_factory=list)
    _in_use: dict[str, Pairs] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._next = self.wall() + EVERY_S

    def look(self) -> None:
        """Time passes, if it is time to."""
        if (begin := self.wall()) < self._next:
            return
        curve = verify_cost.measure(self.target, self.batch, NODES, (self.context,), REPEATS)
        moment = dict(zip(curve.nodes, curve.table[0], strict=True))
        self._moments.append(moment)
        for arm in self.arms:
            if arm.error is None and "draft_costs" in arm.folder.manifest:
                self._hand_over(arm, moment)
        end = self.wall()
        self._next = end + max(EVERY_S, SELDOM * (end - begin))

    def _hand_over(self, arm: MethodArm, moment: Times) -> None:
        assert isinstance(arm.decoder, CostAware), "only those have costs"
        measured = arm.folder.manifest["draft_costs"]
        now = scaled_costs(measured, moment)
        in_use = {int(nodes): time for nodes, time in self._in_use.get(arm.name, measured) if nodes}
        if draft_costs.deviation(now, in_use) > CHANGE:
            arm.decoder.use_costs(now)
            self._in_use[arm.name] = now

    def record(self) -> None:
        """Scale the recorded cost curves; one that was scaled in an earlier part of the run from its origin."""
        if not self._moments:
            return
        for arm in self.arms:
            manifest = arm.folder.manifest
            if arm.error is not None or "cost_curve" not in manifest:
                continue
            before = manifest.get("cost_watch") or {"moments": 0, "seconds": {}}
            found = _joined(before, self._moments)
            origin = manifest.get("cost_curve_before") or manifest["cost_curve"]
            times = {int(nodes): seconds for nodes, seconds in found["seconds"].items()}
            curve = scaled_curve(CostSurface.from_manifest(origin), self.batch, self.context, times)
            arm.folder.update(cost_curve=curve.to_manifest(), cost_curve_before=origin, cost_watch=found)


def scaled_costs(costs: Pairs, moment: Times) -> list[list[float]]:
    """Costs of drafts with the passes of another moment; those of larger passes change as the largest one timed."""
    (_, drafting), *passes = costs
    known, before = zip(*passes, strict=True)
    timed = [nodes for nodes in moment if nodes <= known[-1]]
    shares = [moment[nodes] / moment[1] / np.interp(nodes, known, before) for nodes in timed]
    times = {int(nodes): time * float(np.interp(nodes, timed, shares)) for nodes, time in passes}
    return [[0.0, drafting], *draft_costs.rising(times)]


def scaled_curve(surface: CostSurface, batch: int, context: int, times: Times) -> CostSurface:
    """A cost curve with the passes of other moments, at all contexts and numbers of rows alike."""
    shares = [seconds / surface.seconds(nodes, batch, context) for nodes, seconds in times.items()]

    def scaled(curve: CostCurve) -> CostCurve:
        factors = np.interp(curve.nodes, [*times], shares)
        return replace(curve, table=tuple(tuple((np.array(row) * factors).tolist()) for row in curve.table))

    return CostSurface(tuple(map(scaled, surface.curves)))


def _joined(before: Mapping[str, Any], moments: Sequence[Times]) -> dict[str, Any]:
    """Mean seconds over the moments of an earlier part of the run and of this one."""
    count = before["moments"] + len(moments)
    sums = {
        nodes: sum(moment[nodes] for moment in moments) + before["moments"] * before["seconds"].get(str(nodes), 0.0)
        for nodes in moments[0]
    }
    return {"moments": count, "seconds": {str(nodes): total / count for nodes, total in sums.items()}}
