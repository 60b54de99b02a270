"""Progress without a terminal."""

from __future__ import annotations

import pytest

from bench.utils.progress import EVERY_S, Progress, stage


def test_a_line_every_half_minute_with_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    stage("warming up")
    with Progress("measuring", 10, done=2, clock=lambda: now[0], unit=" prompts") as progress:
        progress.advance(1, "1.20x so far")
        now[0] = EVERY_S
        progress.advance(1, "1.31x so far")
    assert capsys.readouterr().err.splitlines() == [
        "warming up ...",
        "measuring: 4/10, 0:30 elapsed, 1:30 left, 1.31x so far",
    ]
