"""Records of all kinds are checked, and what was changed behind their backs is found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import cli, validate

RESULTS = Path(__file__).parents[2] / "results" / "reference"
RUN = next(RESULTS.glob("prompt_lookup-mtbench-*"))


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A run, and one experiment of each kind of the laboratory."""
    shutil.copytree(RUN, tmp_path / RUN.name)
    for kind in ("greedy", "sampling", "joint"):
        folder = next((RESULTS / "lossless").glob(f"{kind}-*"))
        shutil.copytree(folder, tmp_path / "lossless" / folder.name)
    (tmp_path / ".hydra" / "x").mkdir(parents=True)
    (tmp_path / "wandb").mkdir()
    return tmp_path


def change(folder: Path, file: str, edit: Callable[[Any], Any]) -> None:
    path = folder / file
    content = json.loads(path.read_text(encoding="utf-8"))
    edit(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def test_sound_records_are_counted(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", str(kept)]) == 0
    assert capsys.readouterr().out == f"{kept}: 1 run, 3 lossless records: ok\n"
    assert cli.main(["validate", str(kept / RUN.name), str(kept / "lossless")]) == 0


def test_the_committed_records_are_sound() -> None:
    assert [each.line() for each in validate.check(RESULTS) if each.problems] == []


@pytest.mark.parametrize(
    ("pattern", "file", "edit", "message"),
    [
        ("prompt", "summary.json", lambda s: s["speedup"]["total"].update(value=9.0), "total speed-up 9.0, the "),
        ("prompt", "summary.json", lambda s: s["verdict"].update(valid=False), "verdict.valid: false and 0 reasons"),
        ("prompt", "summary.json", lambda s: s["verdict"].update(reasons=["x"]), "verdict.valid: true and 1 reasons"),
        ("prompt", "summary.json", lambda s: s["verdict"].update(result="VALID", inconclusive=["x"]), "give INCONCLUS"),
        ("prompt", "summary.json", lambda s: s["speedup"]["headline"].update(value=9.0), "has speed-up 9.0, the "),
        ("prompt", "manifest.json", lambda m: m.update(status="failed"), "not finished: status 'failed'"),
        ("greedy", "result.json", lambda r: r["prompts"][0].update(violation=1), "True, its figures give False"),
        ("joint", "result.json", lambda r: r["cells"][0].update(p_value=0.0), "its figures give False"),
        ("sampling", "result.json", lambda r: r["cells"][0].update(p_value=0.0), "its figures give False"),
        ("sampling", "result.json", lambda r: r.pop("bound"), "cannot be read: KeyError"),
        ("greedy", "manifest.json", lambda m: m.update(experiment="joint"), "has experiment 'joint'"),
    ],
)  # fmt: skip
def test_a_changed_record_is_one_line(
    kept: Path, pattern: str, file: str, edit: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = next(each for each in [*kept.glob("*/"), *kept.glob("lossless/*")] if each.name.startswith(pattern))
    change(folder, file, edit)
    assert cli.main(["validate", str(kept)]) == 2
    line, last = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{folder}: ") and message in line
    assert last == f"{kept}: 1 run, 3 lossless records: 1 bad"
    assert cli.main(["validate", str(folder)]) == 2


def test_what_is_half_there_is_not_overlooked(kept: Path) -> None:
    (kept / RUN.name / "manifest.json").unlink()
    next((kept / "lossless").glob("greedy-*/result.json")).unlink()
    bad = {each.path.name.split("-")[0]: each.problems[0] for each in validate.check(kept) if each.problems}
    assert bad == {"prompt_lookup": "manifest.json is missing", "greedy": "result.json is missing or not JSON"}


def test_several_problems_are_counted(kept: Path) -> None:
    change(kept / RUN.name, "manifest.json", lambda m: m.update(status="failed", run_id="x"))
    (line,) = [each.line() for each in validate.check(kept) if each.problems]
    assert line.endswith("(and 1 more)")


def test_an_empty_folder_holds_no_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: no record: ok\n"


def test_a_cost_curve_is_checked(tmp_path: Path) -> None:
    folder = tmp_path / "costs" / "m-1"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    (folder / "points.jsonl").write_text('{"kind": "pass"}\nbroken\n{"kind": "pass"}\n')
    (found,) = validate.check(tmp_path)
    assert found.kind == validate.COSTS and "points.jsonl, line 2 cannot be read" in found.problems[0]
