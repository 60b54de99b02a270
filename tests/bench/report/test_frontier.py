"""Speed against quality from made records: points, which of them count, and the words around them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import cli
from bench.errors import UserError
from bench.records.run_folder import Sample
from bench.report import collect, frontier
from bench.report.frontier import Frontier, Point, frontiers
from tests.bench.report.test_commands import recorded, rows

ROOT = Path(__file__).resolve().parents[3]
FACTS = {
    "steps": 8, "tokens": 8, "layers_per_step": 20.0, "heads_per_step": 2.0, "layer_equivalents_per_step": 36.5,
    "layer_equivalents_of_the_model": 38.0, "exits": {"20": 5, "30": 3}, "confidence_share": 0.3,
}  # fmt: skip


def lossy(step_ms: float, wrong: int, score: float | None = None) -> list[Sample]:
    """Answers of nine ids, of which the method has as many others; ``score`` out of the baseline's 50."""
    made = []
    for sample in rows(step_ms):
        quality = {} if score is None else {"em": 50.0 if sample.arm == "baseline" else score}
        ids = sample.output_ids
        if sample.arm == "method" and wrong:
            ids = [*ids[:-wrong], *[900 + i for i in range(wrong)]]
        made.append(replace(sample, output_ids=ids, quality=quality))
    return made


def early(root: Path, method: str, samples: list[Sample], *words: str, **changes: Any) -> Path:
    usual = {"guarantee": "RELAXED", "agreement": None, "n_prompts": 25}
    return recorded(root, method, samples, *words, **usual | changes)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Lookup, which loses nothing, and four that do: a faster one, a slower one, one that a fixed depth beats."""
    recorded(tmp_path, "prompt_lookup", rows(25))
    early(tmp_path, "static_depth", lossy(18, 3), "method.depth=24", method_facts=FACTS)
    early(tmp_path, "calm", lossy(14, 2), "method.threshold=0.5", method_facts=FACTS)
    early(tmp_path, "calm", lossy(36, 1), "method.threshold=0.9", method_facts=FACTS)
    early(tmp_path, "free", lossy(21, 4), "method.threshold=0.5")
    return tmp_path


def only(found: list[Frontier]) -> Frontier:
    assert len(found) == 1
    return found[0]


def by_name(found: Frontier) -> dict[str, tuple[Point, str]]:
    return {f"{p.method} {p.setting}".strip(): (p, found.counts(i)) for i, p in enumerate(found.points)}


def test_a_run_in_both_folders_is_two_points(results: Path) -> None:
    both = [*collect.read(results), *collect.read(results, "reference")]
    found = only(frontiers(both))
    assert sorted(point.source for point in found.points) == ["own"] * 5 + ["reference"] * 5


def test_points_hold_what_the_records_say(results: Path) -> None:
    points = by_name(only(frontiers(collect.read(results))))
    assert list(points) == [
        "calm threshold=0.5", "static_depth depth=24", "free threshold=0.5", "prompt_lookup", "calm threshold=0.9",
    ]  # fmt: skip
    fast = points["calm threshold=0.5"][0]
    assert fast.rouge_l == fast.quality == pytest.approx(7 / 9) and fast.metric == "rouge_l" and fast.full == 1.0
    assert (fast.layer_equivalents, fast.length_ratio, fast.certified) == (36.5, 1.0, None)
    assert fast.confidence == 0.3
    assert fast.speed == pytest.approx(collect.read_summary(results / fast.run_id)["speedup"]["total"]["value"])  # type: ignore[index]


def test_a_point_counts_if_it_beats_what_loses_nothing_and_what_decides_nothing(results: Path) -> None:
    points = by_name(only(frontiers(collect.read(results))))
    assert points["calm threshold=0.5"][1] == "yes"
    assert points["prompt_lookup"][1] == "", "what loses nothing has nothing to show"
    assert points["calm threshold=0.9"][1] == "no: exact", "a static depth of that quality does not exist"
    assert points["free threshold=0.5"][1] == "no: static depth", "better and faster is a fixed depth"
    assert points["static_depth depth=24"][1] == "yes"


def test_only_points_that_nothing_is_better_than_are_on_the_frontier(results: Path) -> None:
    found = only(frontiers(collect.read(results)))
    on = {p.method + p.setting for p in found.points if p.run_id in frontier.on_frontier(found.points)}
    assert on == {"calmthreshold=0.5", "prompt_lookup"}


def test_overlapping_intervals_are_open_and_missing_rivals_are_named(tmp_path: Path) -> None:
    early(tmp_path, "calm", lossy(25, 2), "method.threshold=0.5")
    assert only(frontiers(collect.read(tmp_path))).counts(0) == "exact not measured; static depth not measured"
    recorded(tmp_path, "prompt_lookup", rows(25))
    early(tmp_path, "static_depth", lossy(25, 2), "method.depth=24")
    found = by_name(only(frontiers(collect.read(tmp_path))))
    assert found["calm threshold=0.5"][1] == "exact open; static depth open"


def of_one_kind(samples: list[Sample]) -> list[Sample]:
    return [replace(sample, category="qa") for sample in samples]


def test_scores_of_the_data_set_stand_for_quality_where_there_are_any(tmp_path: Path) -> None:
    early(tmp_path, "static_depth", of_one_kind(lossy(18, 1, 30.0)), "method.depth=24")
    early(tmp_path, "calm", of_one_kind(lossy(21, 3, 49.0)), "method.threshold=0.5")
    recorded(tmp_path, "suffix", of_one_kind(lossy(28, 0, 50.0)))
    scored = by_name(only(frontiers(collect.read(tmp_path))))
    assert scored["calm threshold=0.5"][0].quality == 49.0 and scored["calm threshold=0.5"][1] == "yes"
    with pytest.raises(UserError, match="one of em"):
        frontiers(collect.read(tmp_path), metric="bleu")


def test_no_one_score_stands_for_prompts_of_several_kinds(tmp_path: Path) -> None:
    early(tmp_path, "calm", lossy(21, 3, 49.0), "method.threshold=0.5")
    assert only(frontiers(collect.read(tmp_path))).points[0].metric == "rouge_l"
    for name in ("em", "rouge_l"):
        assert only(frontiers(collect.read(tmp_path), metric=name)).points[0].metric == name


def test_invalid_runs_are_shown_and_beat_nobody(results: Path) -> None:
    (folder,) = results.glob("prompt_lookup-*")
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"verdict": {"valid": False, "reasons": ["a"]}}))
    found = only(frontiers(collect.read(results)))
    points = by_name(found)
    assert points["calm threshold=0.9"][1] == "no: baseline" or "exact not measured" in points["calm threshold=0.9"][1]
    assert frontier.cells(found)[-1][-1] == "INVALID"
    assert not any(p.run_id == folder.name for p in found.points if p.run_id in frontier.on_frontier(found.points))


def test_trained_weights_must_beat_the_original_ones_too(tmp_path: Path) -> None:
    other = {"model": {"name": "native", "revision": "r9"}}
    early(tmp_path, "calm", lossy(14, 0), "method.threshold=0.5", **other)
    early(tmp_path, "static_depth", lossy(30, 3), "method.depth=24", **other)
    recorded(tmp_path, "prompt_lookup", rows(25), **other)
    recorded(tmp_path, "suffix", rows(10))

    def verdict(original: str | None) -> str:
        found = frontiers(collect.read(tmp_path), original)
        assert len(found) == 1, "a group without losses is no frontier"
        return by_name(found[0])["calm threshold=0.5"][1]

    assert verdict(None) == "yes" and verdict("smollm2") == "no: original"
    assert verdict("gone") == "original not measured"


def test_settings_name_what_differs_and_a_chosen_threshold(tmp_path: Path) -> None:
    chosen = {"threshold": 0.65, "certified": True, "explanation": "threshold 0.65: ..", "corpus": {"sha256": "c"}}
    words = ["method.calibration.tolerance=0.05"]
    early(tmp_path, "calm", lossy(20, 1), *words, calibration=chosen)
    early(tmp_path, "calm", lossy(21, 1), "method.threshold=0.9", "method.decay=paper")
    points = {p.setting: p for p in only(frontiers(collect.read(tmp_path))).points}
    assert set(points) == {
        "threshold=0.65 decay=none tolerance=0.05",
        "threshold=0.9 decay=paper tolerance=None",
    }
    assert points["threshold=0.65 decay=none tolerance=0.05"].certified is True


def test_the_own_checkpoint_of_a_method_is_not_named_beside_another_one(tmp_path: Path) -> None:
    early(tmp_path, "calm", lossy(20, 1))
    early(tmp_path, "calm", lossy(21, 1), "method.checkpoint=runs/other")
    points = {p.setting for p in only(frontiers(collect.read(tmp_path))).points}
    assert points == {"threshold=0.9", "threshold=0.9 checkpoint=runs/other"}


def test_the_command_prints_or_writes_the_tables(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["frontier", f"paths.results={results}"]) == 0
    out = capsys.readouterr().out
    assert "mtbench, smollm2" in out and "quality: rouge_l" in out and "no: static depth" in out
    file = results / "f.md"
    assert cli.main(["frontier", f"paths.results={results}", "method=calm,prompt_lookup", f"out={file}"]) == 0
    assert file.read_text().count("\n| calm |") == 2 and "static_depth" not in file.read_text()
    assert cli.main(["frontier", f"paths.results={results}", "out=f.txt"]) == 2
    assert cli.main(["frontier", f"paths.results={results}", "method=nothing"]) == 0
    assert "sweep=frontier" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------- the notebook


@pytest.mark.parametrize("recordless", [True, False])
def test_the_notebook_runs_on_few_records_and_says_what_is_missing(
    recordless: bool, results: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "none" if recordless else results
    folder.mkdir(exist_ok=True)
    environment = {"DECODEBENCH_RESULTS": str(folder), "MPLBACKEND": "agg", "HOME": str(tmp_path), "PATH": ""}
    done = subprocess.run(
        [sys.executable, str(ROOT / "notebooks" / "early_exit.py")],
        env=environment | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT / "notebooks",
    )
    assert done.returncode == 0, done.stderr
    assert "python -m bench sweep=frontier" in done.stdout if recordless else "calm" in done.stdout
    assert "method.calibration.tolerance" in done.stdout, "no calibrated run, and it does not say so"
