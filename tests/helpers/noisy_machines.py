"""Runs on simulated machines: both arms decode on one clock that drifts, stalls or shares its processor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import pi, sin
from random import Random
from typing import Any

from bench.analysis import metrics, stalls
from bench.analysis.audit import AuditResult, audit
from bench.records.run_folder import Sample
from tests.helpers.sample_rows import MS, row

ROUND_MS, READ_MS = 10.0, 40.0
LONGEST_S = 60.0  # a run takes about 30 s
_REMEASURED = 2  # at most so often


@dataclass
class Machine:
    """A processor.

    Attributes:
        noise: standard deviation of the log of a round's time.
        jitter: likewise of a whole batch.
        drift: the speed swings this share around its mean, once in a minute.
        stalls: moments at which nothing runs, seconds, and for how long.
        bursts: moments from which on another program takes half of the processor, and for how long.
    """

    rng: Random
    noise: float = 0.02
    jitter: float = 0.005
    drift: float = 0.0
    stalls: dict[float, float] = field(default_factory=dict)
    bursts: dict[float, float] = field(default_factory=dict)
    now: float = 0.0

    def batch_speed(self) -> float:
        return self.rng.lognormvariate(0, self.jitter)

    def step(self, ms: float) -> tuple[float, float]:
        """Wall and processor time of a step that takes ``ms`` on a quiet machine."""
        share = 0.5 if any(begin <= self.now < begin + long for begin, long in self.bursts.items()) else 1.0
        cpu = ms * self.rng.lognormvariate(0, self.noise) / (1 + self.drift * sin(2 * pi * self.now / LONGEST_S))
        wall, begin = cpu / share, self.now
        self.now += wall / 1000
        for moment in [moment for moment in self.stalls if begin <= moment < self.now]:
            wall += 1000 * (held := self.stalls.pop(moment))
            self.now += held
        return wall, cpu


def quiet(rng: Random) -> Machine:
    return Machine(rng)


def jittery(rng: Random) -> Machine:
    return Machine(rng, noise=0.1, jitter=0.04)


def drifting(rng: Random) -> Machine:
    return Machine(rng, drift=0.4)


def stalling(rng: Random) -> Machine:
    """About two stalls of 0.5 to 4 s in a run."""
    return Machine(rng, stalls=dict(_moments(rng, every=15, shortest=0.5, longest=4)))


def bursty(rng: Random) -> Machine:
    """Another program takes half of the processor for 1 to 4 s at a time, a quarter of the run in all."""
    return Machine(rng, bursts=dict(_moments(rng, every=10, shortest=1, longest=4)))


NOISY: dict[str, Callable[[Random], Machine]] = {each.__name__: each for each in (jittery, drifting, stalling, bursty)}


def _moments(rng: Random, every: float, shortest: float, longest: float) -> list[tuple[float, float]]:
    found, moment = [], 0.0
    while (moment := moment + rng.expovariate(1 / every)) < LONGEST_S:
        found.append((moment, rng.uniform(shortest, longest)))
    return found


def run(machine: Machine, *, speedup: float = 1.0, pairs: int = 20, again: bool = True) -> list[Sample]:
    """A run of texts of 32 to 96 rounds; the method's rounds take 1 / ``speedup`` of the baseline's.

    Args:
        again: stalled pairs are measured again, as a run does.
    """
    lengths = [machine.rng.randint(32, 96) for _ in range(pairs)]
    found = [sample for place in range(pairs) for sample in _pair(machine, place, lengths[place], speedup)]
    for _ in range(_REMEASURED if again else 0):
        held = {batch for batch, *_ in stalls.stalled(found)}
        found = [sample for sample in found if sample.batch not in held]
        found += [sample for place in sorted(held) for sample in _pair(machine, place, lengths[place], speedup)]
    return found


def _pair(machine: Machine, place: int, length: int, speedup: float) -> list[Sample]:
    """Both arms in random order."""
    arms = ["baseline", "method"]
    machine.rng.shuffle(arms)
    return [_decode(machine, arm, place, length, speedup if arm == "method" else 1.0) for arm in arms]


def _decode(machine: Machine, arm: str, place: int, length: int, speedup: float) -> Sample:
    luck = machine.batch_speed()
    steps = [machine.step(luck * ms / speedup) for ms in (READ_MS, *[ROUND_MS] * length)]
    cpu_ns = round(sum(cpu for _, cpu in steps) * MS)
    return row(arm, f"{place + 1}/1", ms=[wall for wall, _ in steps], batch=place, cpu_ns=cpu_ns)


def judged(samples: list[Sample]) -> tuple[dict[str, Any], AuditResult]:
    """Summary and verdict of a run of an EXACT method on one thread of four."""
    agreement = {"exact": 1.0, "violation": 0.0, "n_violations": 0}
    summary = metrics.summarise(samples, guarantee="EXACT", agreement=agreement, n_bootstrap=500)
    return summary, audit(samples, summary, {"hardware": {"threads": 1, "logical_cores": 4}})
