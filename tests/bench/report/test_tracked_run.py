"""What is sent of a run, read back with Weights & Biases' own reader; and ``python -m bench track``."""

from __future__ import annotations

import io
import json
import math
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from PIL import Image

from bench import cli
from bench.analysis import pairs
from bench.config import compose
from bench.config.schema import PathsConfig
from bench.records import run_folder
from bench.report import plots, tracked_run
from tests.helpers.offline_runs import Records, inspected, read_back, summary_of, without_account
from tests.helpers.sample_rows import both, row
from tests.helpers.sweeps import COMMON, run_folders

pytest.importorskip("wandb")

ROOT = Path(__file__).resolve().parents[3]
REFERENCE = ROOT / "results" / "reference" / "eagle-mtbench-smollm2-736423615620"
CONVERSATIONS, PROMPTS = 3, 4
SECRET = "hf_0123456789abcdefghij"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A results folder with one run that was sent when it finished."""
    results = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        without_account(patch, results.parent)
        patch.setenv("HF_TOKEN", SECRET)
        words = [
            "method=prompt_lookup",
            *COMMON,
            f"dataset.limit={CONVERSATIONS}",
            "measure.repeats=1",
            "tracker=wandb",
        ]
        assert cli.main([*words, f"paths.results={results}"]) in (0, 3)
    yield results


@pytest.fixture
def run(measured: Path) -> Path:
    (path,) = run_folders(measured)
    return path


@pytest.fixture(scope="module")
def found(measured: Path) -> Records:
    return read_back(measured)


@pytest.fixture
def paths(tmp_path: Path) -> PathsConfig:
    return compose.compose([f"paths.results={tmp_path}"]).paths


def content(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Bytes and time of every file of a record."""
    return {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in folder.iterdir()}


# ------------------------------------------------------------------------------------------------------ what is sent


def test_each_prompt_is_a_step(found: Records, run: Path) -> None:
    rows = [record["item"] for record in found["history"]]
    assert [row["_step"] for row in rows] == [row["prompt"] for row in rows] == [1, 2, 3, 4]
    summary = json.loads((run / "summary.json").read_text())
    assert rows[-1]["prompt/speedup_so_far"] == pytest.approx(summary["speedup"]["total"]["value"])
    assert all({"prompt/speedup", "prompt/tokens_per_step", "prompt/identical"} <= set(row) for row in rows)
    assert summary_of(found)["tokens_per_step"] == summary["tokens_per_step"], "of the run, not of the last prompt"


def test_the_table_has_the_texts_of_both_arms(found: Records, measured: Path, run: Path) -> None:
    (file,) = measured.glob("wandb/offline-run-*/files/media/table/texts*.json")
    table = json.loads(file.read_text())
    assert table["columns"] == list(tracked_run.TEXT_COLUMNS)
    lines = [dict(zip(table["columns"], line, strict=True)) for line in table["data"]]
    texts = {(s.prompt_id, s.arm): s.text for s in run_folder.read_samples(run) if s.phase == "measure"}
    asked = {each["question_id"]: each["turns"] for each in map(json.loads, (ROOT / "data/demo.jsonl").open())}
    assert len(lines) == PROMPTS
    for line in lines:
        name = line["prompt_id"]
        assert (line["method text"], line["baseline text"]) == (texts[name, "method"], texts[name, "baseline"])
        example, _, turn = name.partition("/")
        assert line["prompt"] == asked[example][int(turn) - 1]
        assert line["identical"] is (line["method text"] == line["baseline text"])
        assert line["speed-up"] > 0 and line["tokens per step"] >= 1


def test_the_verdict_says_why(found: Records, run: Path) -> None:
    verdict = json.loads((run / "summary.json").read_text())["verdict"]
    sent = summary_of(found)
    assert sent["verdict/valid"] is verdict["valid"]
    for name in ("reasons", "warnings"):
        assert sent.get(f"verdict/{name}", "") == "\n".join(verdict[name])
    assert verdict["reasons"] or verdict["warnings"], "a run of four prompts is not without doubt"


def test_runs_are_found_by_tags_settings_and_group(found: Records) -> None:
    (sent,) = found["run"]
    assert (sent["job_type"], sent["run_group"], sent["project"]) == ("benchmark", "random-demo", "decodebench")
    assert {"prompt_lookup", "EXACT", "speculative", "batch_size=1", "measure=quick"} <= set(sent["tags"])
    assert {"VALID", "INVALID", "INCONCLUSIVE"} & set(sent["tags"])
    config = sent["config"]["update"]
    assert (config["family"], config["guarantee"], config["batch_size"]) == ("speculative", "EXACT", 1)
    assert config["measure"]["name"] == "quick"


def test_neither_secrets_nor_the_machine_are_sent(found: Records, measured: Path) -> None:
    for artifact in found["artifact"]:
        for entry in artifact["manifest"]["contents"]:
            entry.pop("local_path")  # read by the upload, not sent
    files = [*measured.glob("wandb/offline-run-*/files/**/*.json"), *run_folders(measured)[0].glob("*.*")]
    everything = json.dumps(found) + "".join(file.read_text() for file in files)
    for hidden in (SECRET, str(measured), str(Path.home()), f'"{socket.gethostname()}"', "argv=", "requirements.txt"):
        assert hidden not in everything
    assert {path.suffix for path in measured.glob("wandb/offline-run-*/files/**/*.*")} == {".json", ".png"}


def test_the_record_and_the_figure_are_attached(found: Records, measured: Path, run: Path) -> None:
    (artifact,) = [each for each in found["artifact"] if each["type"] == "record"]
    assert {entry["path"] for entry in artifact["manifest"]["contents"]} == set(content(run))
    (figure,) = measured.glob("wandb/offline-run-*/files/media/images/speed_up_by_category*.png")
    with Image.open(figure) as image:
        assert min(image.size) > 100


# ----------------------------------------------------------------------------------------------------------- numbers


def test_the_numbers_of_a_prompt() -> None:
    method = {"ms": [10, 10], "tokens": [1, 3], "depth": [0, 4], "accepted": [0, 2]}
    samples = [
        *both("1/1", {"ms": [30, 30]}, method),
        *both("2/1", {"ms": [30, 30]}, {"ms": [30, 50], "tokens": [1, 1], "depth": [0, 0], "accepted": [0, 0]}),
        replace(row("method", "3/1"), phase="warmup"),
    ]
    table = tracked_run.per_prompt(samples)
    assert list(table.index) == ["1/1", "2/1"]
    assert list(table["speedup"]) == pytest.approx([3, 0.75])
    assert list(table["speedup_so_far"]) == pytest.approx([3, 120 / 100])
    assert list(table["tokens_per_step"]) == [3, 1] and list(table["step_s"]) == pytest.approx([0.01, 0.05])
    assert table["acceptance"].iloc[0] == 0.5 and math.isnan(table["acceptance"].iloc[1]), "nothing was drafted"
    assert list(table["identical"]) == [False, True]


def test_repeats_are_averaged_and_a_batch_has_one_time() -> None:
    repeated = [
        *both("1/1", {"ms": [20, 20]}, {"ms": [10, 10]}),
        *both("1/1", {"ms": [40, 40]}, {"ms": [10, 10]}, repeat=1),
    ]
    assert list(tracked_run.per_prompt(repeated)["speedup"]) == pytest.approx([3])
    batch = {"batch": 0, "batch_size": 2}
    pair = [s for name in ("1/1", "2/1") for s in both(name, {"ms": [20, 20]}, {"ms": [10, 10]}, **batch)]
    table = tracked_run.per_prompt([*pair, *both("3/1", {"ms": [20, 20]}, {"ms": [40, 40]}, batch=1)])
    assert list(table["speedup_so_far"]) == pytest.approx([2, 2, 80 / 100])


def test_at_most_200_texts_from_all_over_the_run() -> None:
    samples = [s for i in range(1, 451) for s in both(f"{i}/1", {"ms": [2, 2]}, {"ms": [1, 1]})]
    rows = tracked_run._texts(samples, tracked_run.per_prompt(samples), {})
    assert len(rows) == 150 and [rows[0][0], rows[-1][0]] == ["1/1", "448/1"]
    assert all(len(line) == len(tracked_run.TEXT_COLUMNS) for line in rows)


def test_prompts_that_changed_since_are_left_out(run: Path, tmp_path: Path, paths: PathsConfig) -> None:
    folder = tmp_path / run.name
    folder.mkdir()
    for name, (data, _) in content(run).items():
        (folder / name).write_bytes(data)
    column = tracked_run.TEXT_COLUMNS.index("prompt")
    rows = tracked_run.finished_run(folder, paths).tables["texts"].rows
    assert all(line[column] for line in rows)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["dataset"]["revision"]["content"] = "other"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    rows = tracked_run.finished_run(folder, paths).tables["texts"].rows
    assert len(rows) == PROMPTS and not any(line[column] for line in rows)


def test_prompts_are_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DECODEBENCH_DATA", raising=False)
    paths = compose.compose([f"paths.results={tmp_path}", f"paths.cache={tmp_path}", "paths.data=null"]).paths
    rows = tracked_run.finished_run(REFERENCE, paths).tables["texts"].rows
    assert len(rows) == 160 and not any(line[tracked_run.TEXT_COLUMNS.index("prompt")] for line in rows)
    assert "asking" not in capsys.readouterr().err


def test_the_figure_of_forward_passes_is_of_the_same_machine(run: Path, tmp_path: Path, paths: PathsConfig) -> None:
    manifest, png = json.loads((run / "manifest.json").read_text()), io.BytesIO()
    Image.new("RGB", (3, 3)).save(png, "png")
    for name, threads in (("ours", manifest["hardware"]["threads"]), ("others", 99)):
        folder = tmp_path / "costs" / name
        folder.mkdir(parents=True)
        hardware = manifest["hardware"] | {"threads": threads}
        (folder / "manifest.json").write_text(json.dumps(manifest | {"hardware": hardware}))
        (folder / "roofline.png").write_bytes(png.getvalue() if name == "ours" else b"")
    assert tracked_run.finished_run(run, paths).images["roofline"] == png.getvalue()
    (tmp_path / "costs" / "ours" / "roofline.png").unlink()
    assert set(tracked_run.finished_run(run, paths).images) == {"speed_up_by_category"}


def test_condensed_records_have_curves_and_no_texts(run: Path, tmp_path: Path, paths: PathsConfig) -> None:
    folder = tmp_path / run.name
    folder.mkdir()
    for name, (data, _) in content(run).items():
        (folder / name).write_bytes(data)
    whole = tracked_run.finished_run(folder, paths)
    assert pairs.condense(folder)
    sent = tracked_run.finished_run(folder, paths)
    assert set(sent.tables) == {"speed_up"} and not sent.step_s
    assert len(sent.prompts) == CONVERSATIONS
    assert sent.prompts[-1]["speedup_so_far"] == pytest.approx(whole.prompts[-1]["speedup_so_far"])
    assert {file.name for file in sent.files} == {"manifest.json", "config.yaml", "summary.json", "pairs.json.gz"}


def test_the_figure_has_each_category_and_its_interval() -> None:
    summary = json.loads((REFERENCE / "summary.json").read_text())
    ratios = summary["speedup"]["by_category"] | {"all": summary["speedup"]["headline"]}
    summary["speedup"]["by_category"]["empty"] = {"value": None, "low": None, "high": None, "n": 0}
    ax = Figure().subplots()
    plots.categories(ax, summary)
    assert [label.get_text().partition("  ")[0] for label in ax.get_yticklabels()] == list(ratios)
    lines = [line for line in ax.get_lines() if len(line.get_xdata()) == 2]
    drawn = [list(line.get_xdata()) for line in lines if line.get_ydata()[0] == line.get_ydata()[1]]
    known = [[r["low"], r["high"]] for r in ratios.values() if r["low"] is not None]
    assert known and all(interval in drawn for interval in known)


# ------------------------------------------------------------------------------------------------------------- track


def test_a_finished_run_is_sent_later_and_its_record_stays(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_account(monkeypatch, tmp_path)
    before = {folder: content(folder) for folder in (run, REFERENCE)}
    words = ["track", str(run), REFERENCE.name[:-3], f"paths.results={tmp_path}", "project=mine", "mode=offline"]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert f"{run.name}: sent to project mine, offline" in out and "wandb sync" in out
    assert {folder: content(folder) for folder in before} == before
    sent = {found["run"][0]["run_id"]: found for found in map(inspected, tmp_path.glob("wandb/offline-run-*"))}
    assert set(sent) == {run.name, REFERENCE.name}
    assert all(found["run"][0]["project"] == "mine" for found in sent.values())
    history = [record["item"] for record in sent[REFERENCE.name]["history"]]
    assert len(history) == 160 and 0 < history[0]["prompt/acceptance"] < 1
    assert history[-1]["roofline._type"] == "image-file", "there is a reference record of its model and machine"


def test_sending_a_finished_run_again_leaves_its_summary(measured: Path, run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    summary |= {"verdict": {"valid": True, "reasons": [], "warnings": []}}  # of a steady machine
    (run / "summary.json").write_text(json.dumps(summary))  # laid out as by an earlier version
    before = content(run)
    words = ["method=prompt_lookup", *COMMON, f"dataset.limit={CONVERSATIONS}", "measure.repeats=1"]
    assert cli.main([*words, f"paths.results={measured}"]) in (0, 3)
    assert content(run) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "track needs runs"),
        (["no-such-run"], "'no-such-run' must name one run"),
        (["RUN", "mode=onlin"], "mode"),
        (["RUN", "projct=x"], "Unknown setting 'projct'. Did you mean 'project'?"),
    ],
)
def test_what_cannot_be_sent_is_one_message(
    words: list[str], message: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = [str(run) if word == "RUN" else word for word in words]
    assert cli.main(["track", *named, f"paths.results={tmp_path}"]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and not list(tmp_path.iterdir())


def test_an_unfinished_run_is_refused_before_any_is_sent(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / "manifest.json").write_text('{"status": "running"}')
    assert cli.main(["track", str(run), str(cut), f"paths.results={tmp_path}"]) == 2
    assert "must hold a finished run, got status 'running'" in capsys.readouterr().err
    assert not (tmp_path / "wandb").exists()


def test_a_service_that_fails_fails_the_command(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import wandb

    def fail(**_: Any) -> None:
        raise OSError("no connection")

    monkeypatch.setattr(wandb, "init", fail)
    assert cli.main(["track", str(run), f"paths.results={tmp_path}"]) == 1
    assert "no connection" in capsys.readouterr().err
