"""The numbers of the report's charts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.analysis import metrics
from bench.report import chart_data, leaderboard
from bench.report.collect import Record
from tests.helpers.sample_rows import both

PAIRS = [sample for i in range(6) for sample in both(f"{i}/1", {"ms": [9] * 5}, {"ms": [9, 8, 6], "tokens": [1, 2, 2]})]
PEAKS = {"triad": {"best": 3e10}, "sum": {"best": 4e10}, "matmul": {"best": 8e11}}
POINT = {"batch": 1, "context": 128, "nodes": 2, "seconds": 0.01, "flops": 6e8, "bytes": 3e8}


def record(folder: Path, method: str, **changes: Any) -> Record:
    summary = metrics.summarise(PAIRS, guarantee="RELAXED", n_bootstrap=100) | {
        "run_id": method, "method": method, "model": "m", "model_revision": "1", "dataset": "d", "batch_size": 1,
        "max_new_tokens": 64, "verdict": {"valid": True, "reasons": []}, "agreement": {"exact": 0.75},
    }  # fmt: skip
    return Record(folder / f"{method}-{len(changes)}", {"status": "finished"}, summary | changes)


def drawn(*records: Record) -> dict[str, Any]:
    ids = {each.path: each.path.name for each in records}
    return chart_data.charts(leaderboard.groups(records), ids)


def test_quality_is_the_score_if_the_prompts_are_of_one_kind(tmp_path: Path) -> None:
    scored: dict[str, Any] = {"quality": {"bleu": 30}, "baseline": {"quality": {"bleu": 31}, "tokens_per_s": 1.0}}
    first, second = record(tmp_path, "calm", **scored), record(tmp_path, "eagle", **scored)
    (table,) = drawn(first, second)["tables"]
    assert (table["metric"], table["before"]) == ("BLEU", 31.0)
    assert [row["quality"] for row in table["rows"]] == [30.0, 30.0]


def test_without_a_score_quality_is_the_agreement_with_the_target(tmp_path: Path) -> None:
    (table,) = drawn(record(tmp_path, "calm"), record(tmp_path, "eagle"))["tables"]
    assert table["metric"] == "tokens identical to the target (%)" and table["before"] is None
    assert [row["quality"] for row in table["rows"]] == [75.0, 75.0]


def test_a_line_over_batch_sizes_keeps_one_name(tmp_path: Path) -> None:
    doubted = {"valid": True, "reasons": [], "inconclusive": ["x"]}
    found = drawn(record(tmp_path, "calm"), record(tmp_path, "calm", batch_size=8, verdict=doubted))["batches"]
    shown = [(row["label"], row["batch"], row["result"]) for row in found[0]["rows"]]
    assert shown == [("calm", 1, "VALID"), ("calm", 8, "INCONCLUSIVE")]


def test_the_roofline_is_that_of_the_cost_records_beside_the_runs(tmp_path: Path) -> None:
    (tmp_path / "costs" / "m").mkdir(parents=True)
    summary = {"model": {"name": "m"}, "hardware": "A CPU", "dtype": "bfloat16", "peaks": PEAKS, "points": [POINT]}
    (tmp_path / "costs" / "m" / "summary.json").write_text(json.dumps(summary))
    (roof,) = drawn(record(tmp_path, "calm"))["roofs"]
    assert (roof["bandwidth"], roof["flops"], roof["source"]) == (40.0, 800.0, "own"), "the better memory probe"
    assert [(point["intensity"], point["rate"], point["ms"]) for point in roof["points"]] == [(2.0, 60.0, 10.0)]


@pytest.mark.parametrize("summary", [{"points": [POINT]}, {"peaks": PEAKS}, {"peaks": {"sum": PEAKS["sum"]}}])
def test_a_cost_record_without_limits_or_points_has_no_roofline(tmp_path: Path, summary: dict[str, Any]) -> None:
    (tmp_path / "costs" / "m").mkdir(parents=True)
    (tmp_path / "costs" / "m" / "summary.json").write_text(json.dumps(summary))
    assert drawn(record(tmp_path, "calm"))["roofs"] == []
