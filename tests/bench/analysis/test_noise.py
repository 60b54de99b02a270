"""Noise alone is never a VALID speed-up, and a real one is VALID: simulated runs, 40 of each kind of machine."""

from __future__ import annotations

from random import Random

import pytest

from bench.analysis import metrics
from bench.analysis.audit import SAME
from tests.helpers.noisy_machines import NOISY, judged, quiet, run

RUNS = 40
WRONG = 2  # of 40 intervals of 95 % may miss the truth


@pytest.mark.parametrize("kind", NOISY)
def test_the_baseline_against_itself_is_not_faster(kind: str) -> None:
    shown, missed = [], 0
    for seed in range(RUNS):
        summary, verdict = judged(run(NOISY[kind](Random(seed))))
        headline = metrics.headline(summary)
        if verdict.result == "VALID":
            shown += [] if SAME[0] <= headline["value"] <= SAME[1] else [(seed, headline)]
            missed += not headline["low"] <= 1 <= headline["high"]
    assert not shown and missed <= WRONG


def test_stalls_that_are_left_are_not_valid() -> None:
    """A fifth of the pairs stalls, too many to be measured again."""
    for seed in range(3):
        machine = quiet(Random(seed))
        machine.stalls = {2.0 + 6 * place: 3.0 for place in range(4)}
        _, verdict = judged(run(machine, again=False))
        assert verdict.result == "INVALID" and verdict.noisy and "stalled" in verdict.reasons[0]


def test_a_real_speed_up_on_a_quiet_machine_is_valid() -> None:
    for seed in range(5):
        summary, verdict = judged(run(quiet(Random(seed)), speedup=1.3))
        headline = metrics.headline(summary)
        assert verdict.result == "VALID" and headline["low"] <= 1.3 <= headline["high"] and not verdict.warnings
