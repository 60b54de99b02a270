"""What stands beside the ranks: equal lengths, the baseline against itself, the end of an advantage."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from bench.report import leaderboard, markdown, robustness
from bench.report.collect import Record
from tests.bench.report.test_leaderboard import DOUBTED, run
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


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ({1: 2.0, 4: 0.5}, "at 4 rows"),
        ({1: 1.5, 8: 1.2}, "beyond 8 rows"),
        ({1: 2.0, 2: 1.5, 32: 1.0}, "at 32 rows"),
        ({1: 1.5, 4: 1.05, 8: 1.2}, "at 4 rows"),  # 0.95 to 1.15
        ({1: 0.9, 8: 0.8}, "never faster"),
        ({1: 1.05, 8: 0.8}, "never shown faster"),
        ({1: 0.9, 8: 1.2}, "none at 1 row"),
    ],
)
def test_where_an_advantage_ends(speeds: dict[int, float], expected: str) -> None:
    found = leaderboard.groups([run("suffix", speed, batch_size=size) for size, speed in speeds.items()])
    ((_, lines),) = leaderboard.batch_series(found)
    assert robustness.advantage_ends(lines["suffix"]) == expected
    rows = [run("autoregressive", batch_size=size, model="other") for size in (1, 8)]
    text = markdown.to_markdown([*found, *leaderboard.groups(rows)], [])
    assert "| autoregressive |" not in text.partition("## Where advantages end")[2]
    assert "## Where advantages end" in text and f"| {expected} |" in text


def test_an_inconclusive_run_ends_an_advantage_and_is_marked() -> None:
    runs = [run("suffix", 1.5), run("suffix", 1.2, batch_size=4), run("suffix", 0.97, batch_size=16, verdict=DOUBTED)]
    runs.append(run("suffix", 9.0, valid=False, batch_size=32))
    text = "\n".join(robustness.batches(leaderboard.groups(runs)))
    assert "| suffix | 1.50x | 1.20x | 0.97x? (0.87-1.07) | at 16 rows |" in text and "B = 32" not in text


def test_a_run_without_an_interval_ends_no_advantage() -> None:
    runs = [run("suffix", 1.5), run("suffix", 0.5, batch_size=32, verdict=DOUBTED)]
    assert runs[1].summary is not None
    runs[1].summary["speedup"]["headline"] |= {"low": None, "high": None}
    assert "| 1.50x | 0.50x? (no interval) | beyond 1 row |" in "".join(robustness.batches(leaderboard.groups(runs)))
    ((_, lines),) = leaderboard.batch_series(leaderboard.groups(runs))
    assert robustness.advantage_ends(lines["suffix"][1:]) == "not known"
