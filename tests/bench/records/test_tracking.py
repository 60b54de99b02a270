"""An offline run read back with Weights & Biases' own reader, and failures that stay harmless."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from bench.analysis import metrics
from bench.analysis.audit import audit
from bench.config import instantiate
from bench.errors import UserError
from bench.records import run_folder, tracking
from tests.helpers.sample_rows import both, row
from tests.helpers.sweeps import COMMON, FILES, outputs, run_folders, start

wandb = pytest.importorskip("wandb")

RUN_ID = "eagle-mtbench-smollm2-3f9a1c22d0b4"
SAMPLES = [s for i in range(1, 4) for s in both(f"{i}/1", {"ms": [10] * 5}, {"ms": [10, 8, 6], "tokens": [1, 2, 2]})]
MANIFEST = {"method": {"name": "eagle", "gamma": 4}, "seed": 7, "status": "finished", "argv": ["s3cret"]}


def summary() -> dict[str, Any]:
    derived = metrics.summarise(SAMPLES, guarantee="EXACT", n_bootstrap=100)
    names = {"run_id": RUN_ID, "method": "eagle", "model": "smollm2", "dataset": "mtbench", "hardware": "cpu " * 30}
    return names | derived | {"verdict": asdict(audit(SAMPLES, derived))}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder; Weights & Biases keeps its caches beside it and sees no account."""
    for name in ("CACHE", "DATA", "CONFIG"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name.lower()))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    path = tmp_path / RUN_ID
    path.mkdir()
    (path / "samples.jsonl").write_text("".join(json.dumps(asdict(sample)) + "\n" for sample in SAMPLES))
    return path


def read_back(root: Path) -> dict[str, list[dict[str, Any]]]:
    """Records of the one offline run below a folder, by type, as Weights & Biases' reader prints them."""
    (run,) = (root / "wandb").glob("offline-run-*")
    return inspected(run)


def inspected(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Records of an offline run."""
    command = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode and "No such command" in done.stderr:
        pytest.skip("this release of wandb has no reader for offline runs")
    assert not done.returncode, done.stderr
    found: dict[str, list[dict[str, Any]]] = {}
    for line in done.stdout.splitlines():
        record = json.loads(line)
        found.setdefault(record["type"], []).append(record[record["type"]])
    return found


def test_an_offline_run_is_what_was_logged(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tracker = tracking.WandbTracker(project="p", group="sweep-1", dir=str(tmp_path))
    tracker.log(summary(), MANIFEST, folder)
    assert not tracker.broken
    assert capfd.readouterr() == ("", "")  # nothing between the user and the table

    found = read_back(tmp_path)
    (run,) = found["run"]
    assert (run["run_id"], run["project"], run["run_group"], run["job_type"]) == (RUN_ID, "p", "sweep-1", "benchmark")
    assert {"eagle", "mtbench", "smollm2"} <= set(run["tags"]) and max(map(len, run["tags"])) <= 64
    config = run["config"]["update"]
    assert (config["method"], config["seed"]) == ({"name": "eagle", "gamma": 4}, 7)
    assert "s3cret" not in json.dumps(found)

    logged: dict[str, Any] = {}
    for part in found["summary"]:
        logged |= part["update"]
    # baseline 50 ms, method 24 ms, the same in all three prompts
    assert logged["speedup/total/value"] == pytest.approx(50 / 24)
    assert logged["tokens_per_step"] == 2.0 and logged["acceptance_at/0"] == 1.0
    assert logged["verdict/valid"] is True
    assert not any("energy" in key for key in logged)  # not measured, so not there

    (history,) = found["history"]
    assert history["item"]["step_s._type"] == "histogram"
    assert sum(history["item"]["step_s.values"]) == 6  # two rounds in each of three prompts
    (table,) = (tmp_path / "wandb").glob("offline-run-*/files/media/table/generations*.json")
    texts = json.loads(table.read_text())
    assert [line[0] for line in texts["data"]] == ["1/1", "2/1", "3/1"]
    assert texts["data"][0][2] == SAMPLES[1].text
    artifacts = {artifact["type"]: artifact for artifact in found["artifact"]}
    assert artifacts["samples"]["name"] == f"samples-{RUN_ID}"
    assert [entry["path"] for entry in artifacts["samples"]["manifest"]["contents"]] == ["samples.jsonl"]
    assert found["exit"][0]["exit_code"] == 0


def test_the_runs_of_a_sweep_have_one_group(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tracking.SWEEP, raising=False)
    groups = []
    words = ["sweep=batch", "seed=1,2", "resume=auto"]
    for number, line in enumerate((words, [*reversed(words[:2]), "cluster=slurm"], ["seed=1,2"]), start=1):
        with tracking.grouped(line):
            tracker = tracking.WandbTracker(dir=str(tmp_path / str(number)))
            tracker.start(RUN_ID, {}, [])
            tracker.finish("finished")
        (run,) = read_back(tmp_path / str(number))["run"]
        groups.append(run["run_group"])
        assert run["run_id"] == RUN_ID, "a job that is put back into the queue goes on with its own run"
    assert groups[0] == groups[1] != groups[2] and groups[0].startswith("batch-") and groups[2].startswith("sweep-")
    assert tracking.SWEEP not in os.environ


def test_the_artifact_holds_the_whole_record(folder: Path, tmp_path: Path) -> None:
    for name in ("manifest.json", "config.yaml", "summary.json"):
        (folder / name).write_text("{}")
    tracking.WandbTracker(dir=str(tmp_path)).log(summary(), MANIFEST, folder)
    (artifact,) = [each for each in read_back(tmp_path)["artifact"] if each["type"] == "samples"]
    names = {entry["path"] for entry in artifact["manifest"]["contents"]}
    assert names == {"samples.jsonl", "manifest.json", "config.yaml", "summary.json"}


@pytest.mark.slow
def test_a_job_killed_while_it_is_told_goes_on_as_the_same_run(folder: Path, tmp_path: Path) -> None:
    results, words = tmp_path / "results", [*COMMON, "measure.repeats=1", "tracker=wandb"]
    environment = {name: value for name, value in os.environ.items() if name.startswith("WANDB_")}
    command = ["-m", *words, f"paths.results={results}"]
    process = start(command, tmp_path / "said", environment)
    while process.is_alive() and not any(file.stat().st_size for file in results.glob("wandb/offline-run-*/*.wandb")):
        time.sleep(0.005)
    process.kill()
    process.join()
    (path,) = run_folders(results)
    manifest = run_folder.read_manifest(path)
    assert process.exitcode == -signal.SIGKILL and manifest and manifest["status"] == "finished"

    process = start(command, tmp_path / "again", environment)
    process.join()
    again = (tmp_path / "again").read_text()
    assert process.exitcode in (0, 3) and "Plan: 1 job: 1 cut. To run: 1" in again and "warning: W" not in again, again
    assert list(outputs(results)) == [path.name]
    first, last = map(inspected, sorted(results.glob("wandb/offline-run-*")))
    runs = [*first.get("run", []), *last["run"]]
    assert {run["run_id"] for run in runs} == {path.name}
    (group,) = {run["run_group"] for run in runs}
    assert group.startswith("sweep-")
    assert any("speedup/total/value" in part["update"] for part in last["summary"])
    assert list(results.glob("wandb/offline-run-*/files/media/table/generations*.json"))
    (artifact,) = [each for each in last["artifact"] if each["type"] == "samples"]
    assert {entry["path"] for entry in artifact["manifest"]["contents"]} == FILES
    assert last["exit"][0]["exit_code"] == 0
    process = start(command, tmp_path / "third", environment)
    process.join()
    assert (tmp_path / "third").read_text() == "Plan: 1 job: 1 done. Nothing to run.\n"


def test_two_runs_in_one_process_are_two_runs_there(folder: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        tracker = tracking.WandbTracker(dir=str(tmp_path / str(number)))
        tracker.start(f"run-{number}", {}, [])
        tracker.log_summary({"x": number})
        tracker.finish("failed" if number == 2 else "finished")
    first, second = (read_back(tmp_path / str(number)) for number in (1, 2))
    assert [run["run_id"] for run in (*first["run"], *second["run"])] == ["run-1", "run-2"]
    assert second["exit"][0]["exit_code"] == 1


def test_a_tracker_that_fails_warns_once_and_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: Any) -> None:
        raise RuntimeError("no connection")

    monkeypatch.setattr(wandb, "init", fail)
    tracking.WandbTracker(dir=str(folder)).log(summary(), MANIFEST, folder)
    said = capsys.readouterr().err
    assert said.count("warning:") == 1 and "RuntimeError: no connection" in said and "tracker=none" in said


def test_a_folder_that_cannot_be_written_is_a_warning(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = tracking.WandbTracker(dir=str(folder / "samples.jsonl" / "x"))
    tracker.log(summary(), MANIFEST, folder)
    assert tracker.broken and "warning:" in capsys.readouterr().err


def test_a_missing_package_is_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    tracking.WandbTracker(dir=str(folder)).log(summary(), MANIFEST, folder)
    assert "warning:" in capsys.readouterr().err


def test_an_interrupt_is_not_swallowed(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def interrupt(**_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(wandb, "init", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tracking.WandbTracker(dir=str(folder)).start("x", {}, [])


def test_importing_this_module_does_not_import_wandb() -> None:
    code = "import sys, bench.records.tracking; assert not {'wandb', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_no_tracker_reads_and_writes_nothing(tmp_path: Path) -> None:
    tracking.NoTracker().log(summary(), MANIFEST, tmp_path / "not there")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tracker", [tracking.NoTracker(), tracking.WandbTracker()])
def test_both_are_trackers(tracker: Any) -> None:
    assert isinstance(tracker, tracking.Tracker)


def test_at_most_200_texts_from_all_over_the_run() -> None:
    rows = [row("method", f"{i}/1") for i in range(1, 451)]
    table = tracking.generations([*rows, *(replace(sample, repeat=1) for sample in rows)])
    assert len(table) == 150 and [table[0][0], table[-1][0]] == ["1/1", "448/1"]
    assert len(tracking.generations(rows[:200])) == 200
    assert tracking.generations([]) == []
    assert all(len(line) == len(tracking._COLUMNS) for line in table)


def test_scalars_have_their_path() -> None:
    tree = {"a": {"b": 1.5, "c": None}, "d": [0.5, 0.25], "e": "x", "f": [], "g": ["word"], "h": True}
    assert dict(tracking.scalars(tree)) == {"a/b": 1.5, "d/0": 0.5, "d/1": 0.25, "e": "x", "h": True}


@pytest.mark.parametrize(("name", "kind"), [("none", tracking.NoTracker), ("wandb", tracking.WandbTracker)])
def test_configs_build_trackers(name: str, kind: type, tmp_path: Path) -> None:
    from bench.config import compose

    cfg = compose.compose([f"tracker={name}", f"paths.results={tmp_path}"])
    tracker = instantiate.build_tracker(cfg.tracker)
    assert type(tracker) is kind
    if name == "wandb":
        assert (tracker.mode, tracker.dir) == ("offline", str(tmp_path))


def test_a_mode_that_does_not_exist_is_refused() -> None:
    from bench.config import compose

    with pytest.raises(UserError, match="tracker.mode"):
        instantiate.check(compose.compose(["tracker=wandb", "tracker.mode=onlin"]))
