"""A process that is suspended while it measures: the pair is measured again, or the run is not VALID."""

from __future__ import annotations

from pathlib import Path
from random import Random

from bench.analysis.stalls import STOPPED
from tests.helpers.pauses import paused_run

RUNS, PAUSE_S = 3, 1.5
REPLACED = "measured again, as the machine stalled or the process was stopped"


def test_a_suspended_run_does_not_mislead(tmp_path: Path) -> None:
    found = [paused_run(tmp_path / str(seed), Random(seed), PAUSE_S) for seed in range(RUNS)]
    assert not [outcome.value for outcome in found if outcome.misleads]
    assert any(outcome.idle_s("stalled") > STOPPED * PAUSE_S for outcome in found)  # the pauses came while it measured
    for outcome in found:
        assert outcome.idle_s("measure") < PAUSE_S or outcome.result == "INVALID"
        again = any(sample.phase == "stalled" for sample in outcome.samples)
        assert again == any(REPLACED in warning for warning in outcome.summary["verdict"]["warnings"])
