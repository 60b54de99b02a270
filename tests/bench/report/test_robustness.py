"""What stands beside the ranks: equal lengths, the baseline against itself, the end of an advantage."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from bench.report import leaderboard, robustness
from bench.report.collect import Record
from tests.bench.report.test_leaderboard import run
from tests.helpers.sample_rows import both


def with_samples(root: Path, record: Record, method: dict[str, Any], low: float, high: float) -> Record:
    """A record with one prompt on which the baseline writes 4 tokens in 40 ms."""
    folder = root / record.path.name
    folder.mkdir()
    lines = [json.dumps(asdict(sample)) for sample in both("1/1", {"ms": [10] * 4}, method)]
    (folder / "samples.jsonl").write_text("\n".join(lines) + "\n")
    assert record.summary is not None
    record.summary["speedup"]["headline"] |= {"low": low, "high": high}
    return replace(record, path=folder)


def test_a_rank_that_the_lengths_made_has_a_regret(tmp_path: Path) -> None:
    # Over the two tokens that both arms wrote: 20 ms against 16, and 20 against 10
    first = with_samples(tmp_path, run("suffix", 2.0), {"ms": [8, 8]}, 1.9, 2.1)
    second = with_samples(tmp_path, run("mine", 1.5), {"ms": [5, 5]}, 1.4, 1.6)
    (group,) = leaderboard.groups([first, second])
    found = robustness.over_equal_lengths(group)
    assert found is not None and found.speeds == pytest.approx({"suffix": 1.25, "mine": 2.0})
    assert found.regret == pytest.approx(0.6) and found.change == ("suffix", pytest.approx(0.625))
    assert "ranks change, a speed-up is 60.0% too low among 2 EXACT runs" in str(found)


def test_ties_have_no_order_to_lose(tmp_path: Path) -> None:
    first = with_samples(tmp_path, run("suffix", 2.0), {"ms": [8, 8]}, 1.5, 2.1)
    second = with_samples(tmp_path, run("mine", 1.9), {"ms": [5, 5]}, 1.4, 2.0)
    (group,) = leaderboard.groups([first, second])
    found = robustness.over_equal_lengths(group)
    assert found is not None and found.regret == 0 and "no rank changes among 2 EXACT runs" in str(found)
    (alone,) = leaderboard.groups([first, run("mine", 1.9)])
    assert robustness.over_equal_lengths(alone) is None, "one has no samples"


def test_noise_counts_intervals_and_wrong_verdicts() -> None:
    rows = [run("autoregressive", speed, threads=place) for place, speed in enumerate((1.0, 1.01, 1.3))]
    rows += [run("autoregressive", 9.0, valid=False), run("suffix", 3.0)]
    found = robustness.noise(leaderboard.groups(rows))
    assert "3 runs, 1.00x to 1.30x; 2 of 3 intervals hold 1, and 1 of 3 VALID runs are outside 0.98 to 1.02." in found
    assert robustness.noise(leaderboard.groups([run("suffix", 2.0)])) == ""
