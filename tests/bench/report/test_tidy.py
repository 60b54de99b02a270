"""collect: the tables of runs, metrics, categories and samples, how they are sorted, shown and written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from bench import cli
from bench.records import schemas
from bench.report import collect, tidy
from tests.bench.report.test_commands import recorded, rows

ROOT = Path(__file__).parents[3]
REFERENCE = ROOT / "results" / "reference"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Three runs: two settings of one method, and another method."""
    recorded(tmp_path, "prompt_lookup", rows(25))
    recorded(tmp_path, "prompt_lookup", rows(15), "method.gamma=5")
    recorded(tmp_path, "suffix", rows(19, prompts=4))
    for file in tmp_path.glob("*/summary.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"acceptance_at": [0.5, 0.25]}))
    return tmp_path


def table(what: Any, results: Path) -> pd.DataFrame:
    return pd.DataFrame(tidy.table(what, collect.read(results)))


# --------------------------------------------------------------------------------------------------------- the tables


def test_the_long_table_has_every_number_once_with_interval_and_unit(results: Path) -> None:
    found = table("long", results)
    assert list(found) == [
        "run",
        "setting",
        "method",
        "model",
        "dataset",
        "category",
        "metric",
        "value",
        "low",
        "high",
        "unit",
    ]
    assert not found.duplicated(["run", "category", "metric"]).any() and found["value"].notna().all()
    summary = json.loads((results / "prompt_lookup-mtbench-1" / "summary.json").read_text())
    mine = found[found["run"] == "prompt_lookup-mtbench-1"].set_index(["metric", "category"])
    headline, maths = summary["speedup"]["headline"], summary["speedup"]["by_category"]["maths"]
    assert mine.loc[("speedup.headline", "all"), ["value", "low", "high"]].tolist() == [
        headline[k] for k in ("value", "low", "high")
    ]
    assert mine.loc[("speedup.headline", "maths"), "value"] == maths["value"]
    low, high = summary["speedup"]["geometric_interval"]
    assert mine.loc[("speedup.geometric", "all"), ["low", "high"]].tolist() == [low, high]
    assert mine.loc[("acceptance_at.2", "all"), "value"] == 0.25
    units = mine["unit"].xs("all", level="category")
    wanted = {
        "speedup.total": "ratio",
        "acceptance_at.1": "share",
        "baseline.ttft_s.mean": "s",
        "tokens_per_s": "tokens/s",
    }
    assert {name: units[name] for name in wanted} == wanted
    assert set(found["setting"]) == {"gamma=10", "gamma=5", ""}
    assert "schema_version" not in set(found["metric"]) and "batch_size" not in set(found["metric"])


def test_every_committed_number_has_a_unit() -> None:
    found = table("long", REFERENCE)
    open_by_design = found["metric"].str.startswith("method_facts.")
    assert found.loc[(found["unit"] == "") & ~open_by_design, "metric"].unique().tolist() == []
    assert found["run"].nunique() > 100


def test_intervals_of_few_pairs_are_left_out(results: Path) -> None:
    found = table("categories", results).set_index(["run", "category"])
    assert found.loc[("suffix-mtbench-2", "maths"), "n"] == 2 and pd.isna(
        found.loc[("suffix-mtbench-2", "maths"), "low"]
    )
    assert found.loc[("prompt_lookup-mtbench-0", "maths"), ["low", "high"]].notna().all()
    file = results / "suffix-mtbench-2" / "summary.json"
    summary = json.loads(file.read_text())
    summary["speedup"]["by_category"]["maths"] |= {"low": 0.01, "high": 90.0}  # as earlier versions recorded it
    file.write_text(json.dumps(summary))
    again = table("categories", results).set_index(["run", "category"])
    assert pd.isna(again.loc[("suffix-mtbench-2", "maths"), "high"])


def test_samples_are_a_row_for_each_prompt_and_arm(results: Path) -> None:
    found = table("samples", results)
    assert len(found) == 2 * (25 + 25 + 4) and set(found["arm"]) == {"method", "baseline"}
    assert not {"text", "output_ids", "step_ns", "prompt_ids"} & set(found)
    seconds = found.groupby(["run", "arm"])["latency_s"].sum()
    summary = json.loads((results / "suffix-mtbench-2" / "summary.json").read_text())
    ratio = seconds["suffix-mtbench-2", "baseline"] / seconds["suffix-mtbench-2", "method"]
    assert ratio == pytest.approx(summary["speedup"]["total"]["value"])


def test_filters_take_columns_of_the_runs_and_of_the_table(results: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "t.csv"
    words = ["what=long", "method=suffix", "metric=speedup.*,ttft_s.p50", "category=all", f"out={out}"]
    assert cli.main(["collect", f"paths.results={results}", *words]) == 0
    found = pd.read_csv(out)
    assert (
        set(found["method"]) == {"suffix"}
        and "ttft_s.p50" in set(found["metric"])
        and "alpha" not in set(found["metric"])
    )


def test_runs_without_samples_are_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [
        f"paths.results={REFERENCE}",
        "what=samples",
        "dataset=mtbench,multi30k",
        "method=eagle,nat",
        f"out={tmp_path}/s.parquet",
    ]
    assert cli.main(["collect", *words]) == 0
    assert re.search(r"^\d+ runs? left out, whose samples are not kept\.$", capsys.readouterr().err, re.MULTILINE)
    assert set(pd.read_parquet(tmp_path / "s.parquet")["method"]) == {"eagle"}


# ------------------------------------------------------------------------------------------------------------ sorting


def test_rows_are_sorted_and_those_without_a_value_come_last(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tidy.table("runs", collect.read(results))
    found.append({"run_id": "open", "method": "a"})
    assert [row["run_id"][-1] for row in tidy.order(found, "-speedup.total.value")] == ["1", "2", "0", "n"]
    assert [row["run_id"][-1] for row in tidy.order(found, "speedup.total.value")] == ["0", "2", "1", "n"]
    assert cli.main(["collect", f"paths.results={results}", "sort=speed"]) == 2
    assert "No run has a column 'speed'" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------- on the terminal


def test_the_table_shows_where_runs_differ_and_fits(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tidy.table("runs", collect.read(results))
    wide = collect.text(found, 200).splitlines()
    assert wide[0] == "All: dataset mtbench, model smollm2, dtype float32, batch 1"
    assert wide[2].split()[:4] == ["method", "setting", "speed-up", "95"]
    assert wide[3].split()[:3] == ["prompt_lookup", "gamma=10", "1.40x"]
    assert wide[3].split()[-2:] == ["VALID", "prompt_lookup-mtbench-0"]
    assert wide[5].split()[:3] == ["suffix", "1.68x", "-"], "4 pairs have no interval"
    for width in (100, 80, 60, 40, 20):
        text = collect.text(found, width)
        assert max(map(len, text.splitlines())) <= width
    assert "Not shown: " in collect.text(found, 60)
    monkeypatch.setenv("COLUMNS", "70")
    assert max(map(len, collect.text(found).splitlines())) <= 70


# ------------------------------------------------------------------------------------------------------------ writing


def test_lists_stay_lists_in_parquet_and_are_json_in_csv(results: Path, tmp_path: Path) -> None:
    for ending in ("parquet", "csv", "json"):
        assert cli.main(["collect", f"paths.results={results}", f"out={tmp_path}/t.{ending}"]) == 0
    summary = json.loads((results / "suffix-mtbench-2" / "summary.json").read_text())
    wanted = summary["acceptance_at"]
    parquet, csv = pd.read_parquet(tmp_path / "t.parquet"), pd.read_csv(tmp_path / "t.csv")
    assert parquet["acceptance_at"].iloc[2].tolist() == wanted and json.loads(csv["acceptance_at"][2]) == wanted
    assert json.loads((tmp_path / "t.json").read_text())[2]["acceptance_at"] == wanted


def test_lists_of_several_kinds_are_text(tmp_path: Path) -> None:
    collect.write([{"a": [1, "x"], "b": [1, None, 0.5]}, {"a": None, "b": None}], tmp_path / "t.parquet")
    found = pd.read_parquet(tmp_path / "t.parquet")
    assert found["a"][0] == '[1, "x"]' and found["b"][0].tolist()[::2] == [1.0, 0.5]


@pytest.mark.parametrize("command", ["collect", "report", "frontier"])
@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("folder.md", "Is a directory"),
        ("file.txt/t.md", "Not a directory"),
        ("/proc/t.md", ""),
        ("x" * 300 + ".md", "too long"),
    ],
)
def test_a_file_that_cannot_be_there_is_one_message(
    command: str, place: str, reason: str, results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder.md").mkdir()
    (tmp_path / "file.txt").touch()
    assert cli.main([command, f"paths.results={results}", f"out={tmp_path / place}"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"out must be a file that can be written, got {tmp_path / place} (") and reason in err
    assert "Traceback" not in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("module", ["bench", "bench.train", "bench.cost", "bench.lossless"])
def test_help_into_a_closed_pipe_is_silent(module: str) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], stdout=write, stderr=subprocess.PIPE, cwd=ROOT, timeout=300
    )
    os.close(write)
    assert done.stderr == b""


def test_the_schema_names_what_the_long_table_shows(results: Path) -> None:
    keys = {field.key for field in schemas.fields("summary")}
    shown = {re.sub(r"\.\d+$", "", name) for name in table("long", results)["metric"]}
    assert {name for name in shown if name not in keys} == set()
