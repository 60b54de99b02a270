"""Records of all kinds are checked, and what was changed behind their backs is found."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import cli, validate
from bench.records import digests, run_folder
from bench.report import collect
from tests.helpers.records import with_samples

RESULTS = Path(__file__).parents[2] / "results" / "reference"
RUN = with_samples("suffix-mtbench-*")


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A run, and one experiment of each kind of the laboratory."""
    shutil.copytree(RUN, tmp_path / RUN.name)
    for kind in ("greedy", "sampling", "joint"):
        folder = min((RESULTS / "lossless").glob(f"{kind}-*"))
        shutil.copytree(folder, tmp_path / "lossless" / folder.name)
    (tmp_path / ".hydra" / "x").mkdir(parents=True)
    (tmp_path / "wandb").mkdir()
    return tmp_path


def _json_of(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


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
    assert all("digest" in _json_of(file) for file in RESULTS.glob("*/manifest.json"))


def test_committed_summaries_follow_from_manifest_and_samples() -> None:
    """Of every tenth run that has samples; tests/hostile checks all."""
    some = sorted(file.parent for file in RESULTS.glob(f"*/{run_folder.PACKED}"))[::10]
    assert [each.line() for each in (validate.check_one(folder, derive=True) for folder in some) if each.problems] == []


def summary(edit: Callable[[Any], Any]) -> Callable[[Path], None]:
    return lambda folder: change(folder, "summary.json", edit)


def manifest(edit: Callable[[Any], Any]) -> Callable[[Path], None]:
    return lambda folder: change(folder, "manifest.json", edit)


def samples(edit: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Of the first measured row of the method."""

    def act(folder: Path) -> None:
        rows = [json.loads(line) for line in run_folder.read_lines(folder / run_folder.PACKED) if line]
        edit(next(row for row in rows if row["phase"] == "measure" and row["arm"] == "method"))
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (folder / run_folder.PACKED).write_bytes(gzip.compress(text.encode()))

    return act


def config(folder: Path) -> None:
    file = folder / run_folder.CONFIG
    file.write_text(file.read_text().replace("max_new_tokens: 128", "max_new_tokens: 256"))


EDITS: dict[str, Callable[[Path], Any]] = {
    "summary.json verdict": summary(lambda s: s["verdict"].update(valid=False, result="INVALID", reasons=["x"])),
    "summary.json tokens per second": summary(lambda s: s.update(tokens_per_s=99.0)),
    "summary.json interval": summary(lambda s: s["speedup"]["headline"].update(low=1.5)),
    "summary.json agreement": summary(lambda s: s["agreement"].update(exact=0.5)),
    "summary.json memory": summary(lambda s: s["memory"].update(weights=1)),
    "summary.json method": summary(lambda s: s.update(method="eagle")),
    "summary.json total speed-up": summary(lambda s: s["speedup"]["total"].update(value=9.0)),
    "manifest.json method": manifest(lambda m: m["method"].update(name="eagle")),
    "manifest.json agreement": manifest(lambda m: m["agreement"].update(exact=0.5)),
    "manifest.json hardware": manifest(lambda m: m["hardware"].update(cpu="another")),
    "manifest.json model": manifest(lambda m: m["model"].update(sha256="0" * 64)),
    "manifest.json done": manifest(lambda m: m.update(n_done=999)),
    "manifest.json run_id": manifest(lambda m: m.update(run_id="another")),
    "samples.jsonl ids": samples(lambda row: row["output_ids"].__setitem__(0, 17)),
    "samples.jsonl text": samples(lambda row: row.update(text="another")),
    "samples.jsonl times": samples(lambda row: row.update(batch_ns=row["batch_ns"] * 2)),
    "config.yaml": config,
    "the folder is called": lambda folder: folder.rename(folder.with_name("another")),
}


@pytest.mark.parametrize("what", EDITS)
def test_every_edit_of_a_record_is_found_by_name(
    what: str, kept: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(kept / "lossless")
    EDITS[what](kept / RUN.name)
    assert cli.main(["validate", str(kept)]) == 2
    line, last = capsys.readouterr().out.splitlines()
    assert what.split()[0] in line and last.endswith("1 run: 1 bad")
    if "samples" not in what and "folder" not in what:
        (record,) = collect.read(kept)
        assert record.summary is None and what.split()[0] in record.problem  # so no table ranks it


def test_a_changed_summary_is_derived_again(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    EDITS["summary.json verdict"](kept / RUN.name)
    assert cli.main(["report", f"paths.results={kept}"]) == 0
    assert _json_of(kept / RUN.name / "summary.json") == _json_of(RUN / "summary.json")
    assert cli.main(["validate", str(kept / RUN.name)]) == 0


@pytest.mark.parametrize("what", ["samples.jsonl times", "manifest.json agreement", "config.yaml"])
def test_no_summary_is_derived_from_changed_records(what: str, kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    EDITS[what](kept / RUN.name)
    before = (kept / RUN.name / "summary.json").read_bytes()
    assert cli.main(["report", "rebuild=true", f"paths.results={kept}"]) == 0
    assert f"{what.split()[0]} was changed after the run ended" in capsys.readouterr().err
    assert (kept / RUN.name / "summary.json").read_bytes() == before


@pytest.mark.parametrize(
    ("key", "edit"),
    [
        ("tokens_per_s 99.0", EDITS["summary.json tokens per second"]),
        ("memory.weights 1", EDITS["summary.json memory"]),
        ("agreement.exact 0.5", EDITS["manifest.json agreement"]),
        ("verdict.noisy true", summary(lambda s: s["verdict"].update(noisy=True))),
    ],
)
def test_without_digests_a_summary_must_follow_from_manifest_and_samples(
    key: str, edit: Callable[[Path], Any], kept: Path
) -> None:
    folder = kept / RUN.name
    change(folder, "manifest.json", lambda m: m.pop("digest"))
    assert "has no digests" in validate.check_one(folder).problems[0]
    edit(folder)
    name, _, value = key.partition(" ")
    (problem,) = validate.check_one(folder).problems
    assert f"summary.json has {name}" in problem and (value in problem or "manifest" in key)


def test_packing_adds_digests_to_a_sound_record_once(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = kept / RUN.name
    change(folder, "manifest.json", lambda m: m.pop("digest"))
    assert cli.main(["pack", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}: packed already, digests added\n"
    assert validate.check_one(folder).problems == [] and "added_at" in _json_of(folder / "manifest.json")["digest"]
    assert cli.main(["pack", str(folder)]) == 0 and capsys.readouterr().out == f"{folder}: packed already\n"
    change(folder, "manifest.json", lambda m: m.pop("digest"))
    EDITS["summary.json memory"](folder)
    assert cli.main(["pack", str(folder)]) == 2
    assert "cannot get digests: summary.json has memory.weights 1" in capsys.readouterr().err


def test_condensing_renews_the_digests_of_an_unchanged_record(kept: Path) -> None:
    folder = kept / RUN.name
    EDITS["samples.jsonl text"](folder)
    assert cli.main(["condense", str(folder)]) == 2
    shutil.rmtree(folder)
    shutil.copytree(RUN, folder)
    assert cli.main(["condense", str(folder)]) == 0 and validate.check_one(folder).problems == []
    EDITS["summary.json interval"](folder)
    assert "summary.json was changed" in validate.check_one(folder).problems[0]


def test_many_records_are_checked_within_their_time(tmp_path: Path) -> None:
    """In less than twice the processor time that their samples take to be unpacked and hashed, as they must be."""
    for place in range(50):
        copy = shutil.copytree(RUN, tmp_path / f"run-{place}")
        content = _json_of(copy / "manifest.json")
        content.pop("digest")
        text = digests.resealed(copy, content | {"run_id": copy.name})
        (copy / "manifest.json").write_text(text)
    samples = [*tmp_path.glob("*/samples.jsonl.gz")]
    assert len(samples) == 50
    turns = [(_processor_s(lambda: _checked(tmp_path)), _processor_s(lambda: _hashed(samples))) for _ in range(3)]
    assert min(check / least for check, least in turns) < 2


def _checked(results: Path) -> None:
    assert not [each for each in validate.check(results) if each.problems]


def _hashed(files: list[Path]) -> None:
    for file in files:
        hashlib.sha256(gzip.decompress(file.read_bytes()))


def _processor_s(work: Callable[[], None]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


@pytest.mark.parametrize(
    ("pattern", "file", "edit", "message"),
    [
        ("suffix", "summary.json", lambda s: s["speedup"]["total"].update(value=9.0), "total speed-up 9.0, the "),
        ("suffix", "summary.json", lambda s: s["verdict"].update(valid=False), "verdict.valid: false and 0 reasons"),
        ("suffix", "summary.json", lambda s: s["verdict"].update(reasons=["x"]), "verdict.valid: true and 1 reasons"),
        ("suffix", "summary.json", lambda s: s["verdict"].update(result="VALID", inconclusive=["x"]), "give INCONCLUS"),
        ("suffix", "summary.json", lambda s: s["speedup"]["headline"].update(value=9.0), "has speed-up 9.0, the "),
        ("suffix", "manifest.json", lambda m: m.update(status="failed"), "not finished: status 'failed'"),
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
    if (folder / "summary.json").exists():
        change(folder, "manifest.json", lambda m: m.pop("digest"))
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
    assert bad == {"suffix": "manifest.json is missing", "greedy": "result.json is missing or not JSON"}


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
