"""Condensed runs: the same speed-ups and comparisons from a tenth of the bytes, and a clear message for all else."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

from bench import cli, validate
from bench.analysis import metrics, pairs
from bench.errors import UserError
from bench.records import run_folder
from bench.report import compare, frontier

RESULTS = Path(__file__).parents[3] / "results" / "reference"


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two comparable runs that kept their samples."""
    found = [min(RESULTS.glob(f"{method}-spec_bench-*/samples*")).parent for method in ("prompt_lookup", "suffix")]
    return [Path(shutil.copytree(path, tmp_path / path.name)) for path in found]


def comparison(runs: list[Path]) -> list[str]:
    """Without the interval of BLEU, which needs the texts."""
    lines = compare.compare(*map(compare.Run.read, runs), n_resamples=200).splitlines()
    return [line for line in lines if "bleu of B" not in line and "note: BLEU" not in line]


def test_a_condensed_run_compares_as_before(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    before, text, similar = pairs.read(runs[0]), comparison(runs), frontier.similarity_to_baseline(runs[0])
    size = run_folder.samples_file(runs[0]).stat().st_size
    assert cli.main(["condense", str(runs[0])]) == 0 and pairs.condense(runs[0]) is False
    assert {file.name for file in runs[0].iterdir()} == {
        "config.yaml",
        "manifest.json",
        "summary.json",
        "pairs.json.gz",
    }
    assert (runs[0] / run_folder.PAIRS).stat().st_size < size / 3
    after = pairs.read(runs[0])
    pd.testing.assert_frame_equal(after.units, before.units, check_dtype=False, check_names=False)
    assert (after.prompts, after.baseline, after.texts) == (before.prompts, before.baseline, before.texts)
    kept, had = (metrics.equal_work(found.units, "per_token", 300, 0) for found in (after, before))
    for key in ("headline", "novel"):
        assert {kept[key][end] for end in ("value", "low", "high")} != {None}
        assert kept[key] == {
            name: value if isinstance(value, str | None) else pytest.approx(value) for name, value in had[key].items()
        }
    assert comparison(runs) == text
    assert similar is not None and frontier.similarity_to_baseline(runs[0]) == similar
    capsys.readouterr()
    assert cli.main(["validate", str(runs[0].parent)]) == 0
    assert "2 runs (samples not kept of 1): ok" in capsys.readouterr().out


def test_what_needs_samples_says_that_they_are_not_kept(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    pairs.condense(runs[0])
    with pytest.raises(UserError, match=r"samples of prompt_lookup-spec_bench-\S+ are not kept.*--fresh"):
        run_folder.read_samples(runs[0])
    assert cli.main(["cost", "what-if", str(runs[0])]) == 2
    assert "are not kept" in capsys.readouterr().err


def test_a_condensed_summary_is_still_checked(runs: list[Path]) -> None:
    pairs.condense(runs[0])
    summary = runs[0] / "summary.json"
    summary.write_text(re.sub(r'("total": \{\s*"value": )[0-9.]+', r"\g<1>9.0", summary.read_text(), count=1))
    *_, found = validate.check_one(runs[0]).problems
    assert "speed-up 9.0, the samples" in found


def test_pairs_of_before_have_no_lengths(runs: list[Path]) -> None:
    pairs.condense(runs[0])
    file = runs[0] / run_folder.PAIRS
    found = json.loads(gzip.decompress(file.read_bytes()))
    found["units"] = {name: found["units"][name] for name in ("unit", "baseline_s", "method_s", "category")}
    del found["texts"]
    file.write_bytes(gzip.compress(json.dumps(found).encode()))
    units = pairs.read(runs[0]).units
    total = json.loads((runs[0] / run_folder.SUMMARY).read_text())["speedup"]["total"]
    assert metrics.interval(units, "total", 100, 0).value == pytest.approx(total["value"])
    missing = metrics.equal_work(units, "per_token", 100, 0)
    assert missing["headline"]["value"] is None and "were not kept" in missing["headline"]["reason"]
    assert missing["novel"]["value"] is None and metrics.predictability(units)["n_novel"] is None


def test_only_sound_finished_runs_are_condensed(runs: list[Path]) -> None:
    (runs[1] / run_folder.PACKED).unlink()
    with pytest.raises(UserError, match="cannot be condensed"):
        pairs.condense(runs[1])
    pairs.condense(runs[0])
    (runs[0] / run_folder.PAIRS).write_bytes(b"torn")
    with pytest.raises(UserError, match="is damaged"):
        pairs.read(runs[0])
