"""Records that came back: sound ones are laid beside the project's, packed; others are named."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest

from bench import validate
from bench.config.schema import checkout
from bench.errors import BAD_INPUT, OK
from bench.gpu import command, start
from bench.records import run_folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """What a job leaves: a run with its samples as they are written, a cost curve, and a checkpoint."""
    root = checkout()
    assert root is not None
    reference, home = root / "results" / "reference", tmp_path / "home"
    run = next(folder for folder in sorted(reference.iterdir()) if (folder / run_folder.PACKED).is_file())
    costs = next(iter(sorted((reference / "costs").iterdir())))
    shutil.copytree(run, home / "results" / run.name)
    shutil.copytree(costs, home / "results" / "costs" / costs.name)
    samples = gzip.decompress((run / run_folder.PACKED).read_bytes())
    (home / "results" / run.name / run_folder.SAMPLES).write_bytes(samples)
    (home / "results" / run.name / run_folder.PACKED).unlink()
    (home / "trained" / "eagle").mkdir(parents=True)
    (home / "trained" / "eagle" / "card.json").write_text("{}")
    return home


def the_run(home: Path) -> Path:
    return next(folder for folder in (home / "results").iterdir() if folder.name != "costs")


def bring(home: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    out = home.parent / "out"
    code = command.main(["import", *map(str, start.archive(home, out)), f"to={target}"])
    return code, capsys.readouterr().out


def test_finished_records_arrive_packed_and_sound(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "reference"
    code, said = bring(home, target, capsys)
    assert (code, said.count("new  ")) == (OK, 2)
    run = target / the_run(home).name
    assert (run / run_folder.PACKED).is_file()
    assert not (run / run_folder.SAMPLES).exists()
    assert all(not each.problems for each in validate.check(target))
    assert (tmp_path / "trained" / "eagle" / "card.json").is_file()
    code, said = bring(home, target, capsys)
    assert (code, said.count("here already")) == (OK, 3)


def test_an_unfinished_run_is_refused_by_name(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = the_run(home) / run_folder.MANIFEST
    file.write_text(json.dumps(json.loads(file.read_text()) | {"status": "interrupted"}))
    code, said = bring(home, tmp_path / "reference", capsys)
    assert code == BAD_INPUT
    assert f"refused      {the_run(home).name}: it is not finished" in said
    assert not (tmp_path / "reference" / the_run(home).name).exists()


def test_a_damaged_run_is_refused_by_name(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = the_run(home) / run_folder.SAMPLES
    file.write_bytes(b"\n".join(file.read_bytes().splitlines()[:-1]) + b"\n")
    code, said = bring(home, tmp_path / "reference", capsys)
    assert code == BAD_INPUT
    assert f"refused      {the_run(home).name}: " in said


def test_an_invalid_run_comes_only_if_it_is_asked_for(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.analysis.audit.result", lambda summary: "INVALID")
    monkeypatch.setattr("bench.analysis.audit.explained", lambda summary: ["the machine was busy"])
    code, said = bring(home, tmp_path / "reference", capsys)
    assert code == BAD_INPUT
    assert f"refused      {the_run(home).name}: it is INVALID: the machine was busy" in said
    code = command.main(
        ["import", str(home.parent / "out" / start.ARCHIVE), f"to={tmp_path / 'reference'}", "invalid=true"]
    )
    assert code == OK
    assert (tmp_path / "reference" / the_run(home).name).is_dir()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["import"], "import needs the files that came back"),
        (["import", "nowhere.tar.gz"], "nowhere.tar.gz must be a file"),
        (["imprt"], "Did you mean 'import'"),
        (["run", "stage=smok"], "Did you mean 'smoke'"),
        (["run", "hardware=cuda"], "hardware must be one of"),
        (["run", "limits=0.0"], "limits must be above 0"),
        (["run", "patience=3"], "Did you mean 'patience_s'"),
        (["pack", "limit_mib=0"], "limit_mib must be above 0"),
        (["probe", "outt=3"], "Did you mean 'out'"),
    ],
)
def test_mistakes_are_one_message(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(words) == BAD_INPUT
    assert said in capsys.readouterr().err
