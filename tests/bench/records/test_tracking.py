"""An offline run read back with Weights & Biases' own reader, and failures that stay harmless."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from bench.config import instantiate
from bench.errors import UserError
from bench.records import run_folder, tracking
from tests.helpers.offline_runs import inspected, read_back, summary_of, without_account
from tests.helpers.sweeps import COMMON, FILES, outputs, run_folders, start

wandb = pytest.importorskip("wandb")

RUN_ID = "eagle-mtbench-smollm2-3f9a1c22d0b4"
_FILE = io.BytesIO()
Image.new("RGB", (2, 2)).save(_FILE, "png")
PNG = _FILE.getvalue()
RUN = tracking.FinishedRun(
    run_id=RUN_ID,
    group="smollm2-mtbench",
    config={"method": {"name": "eagle", "gamma": 4}, "seed": 7},
    tags=["eagle", "cpu " * 30],
    summary={
        "speedup": {"total": {"value": 1.5}},
        "energy_j_per_token": None,
        "acceptance_at": [1.0, 0.5],
        "verdict": {"valid": False, "reasons": ["It is loud.", "It is slow."]},
    },
    prompts=[{"speedup": 2.0, "speedup_so_far": 2.0}, {"speedup": 1.0, "speedup_so_far": 1.5}],
    tables={"texts": tracking.Table(["prompt", "text"], [["a", "b"]])},
    step_s=[0.1, 0.2, 0.1],
    images={"roofline": PNG},
)


@pytest.fixture(autouse=True)
def no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_account(monkeypatch, tmp_path)
    monkeypatch.delenv(tracking.SWEEP, raising=False)


def test_an_offline_run_is_what_was_logged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "manifest.json"
    file.write_text("{}")
    tracker = tracking.WandbTracker(project="p", group="mine", dir=str(tmp_path))
    tracker.log(lambda: replace(RUN, files=[file]))
    assert not tracker.broken
    assert capfd.readouterr() == ("", "")  # nothing between the user and the table

    found = read_back(tmp_path)
    (run,) = found["run"]
    assert (run["run_id"], run["project"], run["run_group"], run["job_type"]) == (RUN_ID, "p", "mine", "benchmark")
    assert run["tags"] == ["eagle", ("cpu " * 30)[:64]] and not run.get("host")
    config = run["config"]["update"]
    assert (config["method"], config["seed"]) == ({"name": "eagle", "gamma": 4}, 7)

    logged = summary_of(found)
    assert logged["speedup/total/value"] == 1.5 and logged["acceptance_at/1"] == 0.5
    assert logged["verdict/valid"] is False and logged["verdict/reasons"] == "It is loud.\nIt is slow."
    assert not any("energy" in key for key in logged)  # not measured, so not there

    first, second = (record["item"] for record in found["history"])
    assert [row["_step"] for row in (first, second)] == [row["prompt"] for row in (first, second)] == [1, 2]
    assert [row["prompt/speedup_so_far"] for row in (first, second)] == [2.0, 1.5]
    assert sum(second["step_s.values"]) == 3 and second["step_s._type"] == "histogram"
    assert second["roofline._type"] == "image-file" and "step_s._type" not in first
    (image,) = (tmp_path / "wandb").glob("offline-run-*/files/media/images/roofline*.png")
    assert image.read_bytes()[:4] == b"\x89PNG"
    (table,) = (tmp_path / "wandb").glob("offline-run-*/files/media/table/texts*.json")
    assert json.loads(table.read_text()) == {"columns": ["prompt", "text"], "data": [["a", "b"]]}
    (artifact,) = [each for each in found["artifact"] if each["type"] == "record"]
    assert artifact["name"] == f"record-{RUN_ID}"
    assert [entry["path"] for entry in artifact["manifest"]["contents"]] == ["manifest.json"]
    assert found["exit"][0]["exit_code"] == 0


def test_a_run_that_is_sent_again_has_the_same_id_and_the_same_rows(tmp_path: Path) -> None:
    for _ in range(2):
        tracking.WandbTracker(dir=str(tmp_path)).log(lambda: RUN)
        time.sleep(1.1)  # the name of the local folder has the second
    first, second = (inspected(run) for run in sorted((tmp_path / "wandb").glob("offline-run-*")))
    for found in (first, second):
        assert found["run"][0]["run_id"] == RUN_ID and found["run"][0]["run_group"] == "smollm2-mtbench"
        assert "resume" not in json.dumps(found["run"]), "it would append to what is there"
    rows = [[record["item"]["prompt/speedup"] for record in found["history"]] for found in (first, second)]
    assert rows[0] == rows[1] == [2.0, 1.0]


def test_points_of_a_training_have_its_step(tmp_path: Path) -> None:
    tracker = tracking.WandbTracker(dir=str(tmp_path))
    tracker.start("eagle-1", "smollm2-dolly", {}, [], "train")
    points = [{"step": 10, "loss": 3.0}, {"step": 20, "loss": 2.0}, {"step": 20, "bleu": 9.0}, {"step": 5, "gain": 1.0}]
    for point in points:
        tracker.log_point(point)
    tracker.finish("finished")
    found = read_back(tmp_path)
    rows = [record["item"] for record in found["history"]]
    assert [(row["_step"], row.get("loss"), row.get("bleu")) for row in rows[:2]] == [(10, 3.0, None), (20, 2.0, 9.0)]
    assert rows[2]["step"] == 5 and rows[2]["gain"] == 1.0, "another stage starts from 0 again"
    assert found["run"][0]["job_type"] == "train" and found["run"][0]["run_group"] == "smollm2-dolly"
    assert {"name": "step", "options": {"defined": True}} in found["metric"]


def test_the_runs_of_a_sweep_have_one_group(tmp_path: Path) -> None:
    groups = []
    words = ["sweep=batch", "seed=1,2", "resume=auto"]
    for number, line in enumerate((words, [*reversed(words[:2]), "cluster=slurm"], ["seed=1,2"]), start=1):
        with tracking.grouped(line):
            tracker = tracking.WandbTracker(dir=str(tmp_path / str(number)))
            tracker.start(RUN_ID, "smollm2-mtbench", {}, [], "benchmark")
            tracker.finish("finished")
        (run,) = read_back(tmp_path / str(number))["run"]
        groups.append(run["run_group"])
        assert run["run_id"] == RUN_ID, "a job that is put back into the queue goes on with its own run"
    assert groups[0] == groups[1] != groups[2] and groups[0].startswith("batch-") and groups[2].startswith("sweep-")
    assert tracking.SWEEP not in os.environ


@pytest.mark.slow
def test_a_job_killed_while_it_is_sent_is_sent_again_as_the_same_run(tmp_path: Path) -> None:
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
    assert list(results.glob("wandb/offline-run-*/files/media/table/texts*.json"))
    (artifact,) = [each for each in last["artifact"] if each["type"] == "record"]
    assert {entry["path"] for entry in artifact["manifest"]["contents"]} == FILES
    assert last["exit"][0]["exit_code"] == 0
    assert not run_folder.left_open(path), "the run counts as done"


def test_two_runs_in_one_process_are_two_runs_there(tmp_path: Path) -> None:
    for number, status in enumerate(("finished", "failed"), start=1):
        tracker = tracking.WandbTracker(dir=str(tmp_path / str(number)))
        tracker.log(lambda: replace(RUN, run_id=f"run-{number}", status=status))  # noqa: B023  called at once
    first, second = (read_back(tmp_path / str(number)) for number in (1, 2))
    assert [run["run_id"] for run in (*first["run"], *second["run"])] == ["run-1", "run-2"]
    assert (first["exit"][0]["exit_code"], second["exit"][0]["exit_code"]) == (0, 1)


def test_a_tracker_that_fails_warns_once_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: Any) -> None:
        raise RuntimeError("no connection")

    monkeypatch.setattr(wandb, "init", fail)
    tracking.WandbTracker(dir=str(tmp_path)).log(lambda: RUN)
    said = capsys.readouterr().err
    assert said.count("warning:") == 1 and "RuntimeError: no connection" in said and "tracker=none" in said


def test_a_record_that_cannot_be_read_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def make() -> tracking.FinishedRun:
        raise UserError("samples.jsonl is damaged.")

    tracking.WandbTracker(dir=str(tmp_path)).log(make)
    assert "samples.jsonl is damaged." in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    tracker = tracking.WandbTracker(dir=str(tmp_path / "file" / "x"))
    tracker.log(lambda: RUN)
    assert tracker.broken and "warning:" in capsys.readouterr().err


def test_a_missing_package_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    tracking.WandbTracker(dir=str(tmp_path)).log(lambda: RUN)
    assert "warning:" in capsys.readouterr().err


def test_an_interrupt_is_not_swallowed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(**_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(wandb, "init", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tracking.WandbTracker(dir=str(tmp_path)).log(lambda: RUN)


def test_importing_this_module_does_not_import_wandb() -> None:
    code = "import sys, bench.records.tracking; assert not {'wandb', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_no_tracker_makes_nothing() -> None:
    def make() -> tracking.FinishedRun:
        raise AssertionError("not wanted")

    tracking.NoTracker().log(make)


@pytest.mark.parametrize("tracker", [tracking.NoTracker(), tracking.WandbTracker()])
def test_both_are_trackers(tracker: Any) -> None:
    assert isinstance(tracker, tracking.Tracker)


def test_scalars_have_their_path() -> None:
    tree = {"a": {"b": 1.5, "c": None}, "d": [0.5, 0.25], "e": "x", "f": [], "g": ["one", "two"], "h": True}
    numbers = {"a/b": 1.5, "d/0": 0.5, "d/1": 0.25}
    assert dict(tracking.scalars(tree)) == numbers | {"e": "x", "g": "one\ntwo", "h": True}


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
