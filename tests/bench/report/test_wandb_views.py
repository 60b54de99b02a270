"""The dashboard at Weights & Biases: built without a login, read back by the package that reads the service's own."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb

from bench import cli
from bench.config import compose
from bench.errors import UserError
from bench.records import tracking
from bench.report import collect, tracked_run, wandb_views

internal = pytest.importorskip("wandb_workspaces.workspaces.internal")
from wandb_workspaces import workspaces as ws  # noqa: E402

REFERENCE = Path(__file__).parents[3] / "results" / "reference"
EAGLE, GLAT = "eagle-mtbench-smollm2-736423615620", "glat-multi30k-multi30k_4_4-4775cf338971"


@pytest.fixture
def no_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def login(no_login: None, tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password " + "0" * 40 + "\n")
    (tmp_path / ".netrc").chmod(0o600)


@pytest.fixture(scope="module")
def summaries() -> list[dict[str, Any]]:
    found = (collect.read_summary(REFERENCE / name) for name in (EAGLE, GLAT))
    return [dict(tracking.scalars(summary)) for summary in found if summary]


def sent_back(view: Any) -> Any:
    """The workspace as it is read from the service."""
    model = view._to_model()
    text = model.spec.model_dump_json(by_alias=True, exclude_none=True)
    spec = internal.WorkspaceViewspec.model_validate_json(text)
    return ws.Workspace._from_model(model.model_copy(update={"spec": spec}))


def panels(view: Any, kind: str) -> list[Any]:
    return [panel for section in view.sections for panel in section.panels if type(panel).__name__ == kind]


def test_one_dashboard_survives_the_way_there_and_back(summaries: list[dict[str, Any]]) -> None:
    made = wandb_views.workspace(summaries, "me", "p")
    back = sent_back(made)
    assert (back.entity, back.project, back.name) == ("me", "p", "DecodeBench")
    assert [section.name for section in back.sections] == [
        "Speed", "Quality against speed", "Drafts", "Prompts", "Fidelity and cost", "Figures", "Texts and settings",
    ]  # fmt: skip
    charts = panels(back, "CustomChart")
    assert [chart.chart_name for chart in charts] == ["me/decodebench-speed-up", "me/decodebench-batch-size"]
    for chart in charts:
        assert set(chart.chart_fields.values()) <= set(tracked_run.SPEED_UP_COLUMNS)
    query = '"name":"summaryTable","args":[{"name":"tableKey","value":"speed_up"}]'
    assert made._to_model().spec.model_dump_json(by_alias=True, exclude_none=True).count(query) == 2
    fronts = {plot.y.name: plot.x.name for plot in panels(back, "ScatterPlot") if plot.running_ymax}
    scores = {name for name in summaries[1] if name.startswith("quality/")}
    assert "quality/bleu" in scores and fronts == dict.fromkeys(scores, "ms_per_prompt")
    (positions,) = [plot for plot in panels(back, "BarPlot") if plot.title == "acceptance by position"]
    levels = len(json.loads((REFERENCE / EAGLE / "summary.json").read_text())["acceptance_at"])
    assert [metric.name for metric in positions.metrics] == [f"acceptance_at/{level}" for level in range(levels)]
    assert levels > 2


def test_the_lines_are_of_what_is_sent_for_each_prompt(summaries: list[dict[str, Any]], tmp_path: Path) -> None:
    paths = compose.compose([f"paths.results={tmp_path}"]).paths
    sent = tracked_run.finished_run(REFERENCE / EAGLE, paths)
    lines = panels(sent_back(wandb_views.workspace(summaries, "me", "p")), "LinePlot")
    assert {str(line.x.name if hasattr(line.x, "name") else line.x) for line in lines} == {tracking.PROMPT}
    names = {getattr(metric, "name", metric) for line in lines for metric in line.y}
    assert names <= {f"{tracking.PROMPT}/{name}" for name in sent.prompts[0]} and len(names) == 4


def test_invalid_runs_and_trainings_are_filtered(summaries: list[dict[str, Any]]) -> None:
    made = wandb_views.workspace(summaries, "me", "p")
    text = json.dumps(json.loads(made._to_model().spec.model_dump_json(by_alias=True))["section"]["runSets"])
    assert '"verdict/valid"' in text and '"jobType"' in text and '"benchmark"' in text
    invalid = [summary | {"verdict/valid": False} for summary in summaries]
    with pytest.raises(UserError, match="must have a VALID run that was sent, got none"):
        wandb_views.workspace(invalid, "me", "p")
    fewer = wandb_views.workspace([summaries[0], invalid[1]], "me", "p")
    assert "Quality against speed" not in [section.name for section in fewer.sections], "only INVALID runs have BLEU"


@pytest.mark.parametrize("name", list(wandb_views.CHARTS))
def test_a_chart_names_each_of_its_columns(name: str) -> None:
    chart = wandb_views.CHARTS[name]
    assert set(re.findall(r"\$\{field:(\w+)\}", json.dumps(chart.spec))) == set(chart.fields)
    assert {"speed-up", "low", "high"} <= set(chart.fields.values()) <= set(tracked_run.SPEED_UP_COLUMNS)
    assert chart.spec["data"] == {"name": "wandb"}


def test_without_a_login_there_is_one_message(no_login: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dashboard"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "Run `wandb login`, or set out=FILE.json" in err


def test_the_dashboard_is_of_the_runs_that_were_sent(
    no_login: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, file = tmp_path / "results", tmp_path / "view.json"
    shutil.copytree(REFERENCE / GLAT, results / GLAT)
    words = ["dashboard", f"paths.results={results}", f"out={file}"]
    assert cli.main(words) == 2
    assert "must have a VALID run that was sent, got none. Run: python -m bench track" in capsys.readouterr().err
    (results / "wandb" / f"offline-run-20260101_120000-{EAGLE}").mkdir(parents=True)
    assert cli.main(words) == 0
    assert capsys.readouterr().out == f"Dashboard of 1 runs: {file}\n"
    assert "quality/bleu" not in file.read_text(), "the run with BLEU was not sent"
    (results / "wandb" / f"run-20260101_120001-{GLAT}").mkdir()
    assert cli.main(words) == 0
    content = json.loads(file.read_text())
    assert "quality/bleu" in json.dumps(content["spec"]) and set(content["charts"]) == set(wandb_views.CHARTS)
    assert cli.main([*words[:2], f"out={tmp_path}/x.csv"]) == 2
    assert cli.main(["dashboard", "dataset=mtbench"]) == 2


def test_with_a_login_the_dashboard_is_saved_and_replaced(
    summaries: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, login: None, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, asked, charts = [], [], []

    class Api:
        default_entity = "me"

        def runs(self, path: str, **filters: Any) -> list[Any]:
            asked.append((path, filters["filters"]))
            return [SimpleNamespace(summary_metrics=summary) for summary in summaries]

        def create_custom_chart(self, entity: str, name: str, *_: Any) -> str:
            if name in charts:
                raise wandb.Error("it exists")
            charts.append(name)
            return f"{entity}/{name}"

    def earlier(url: str) -> Any:
        if not saved:
            raise ValueError("not found")
        return SimpleNamespace(_internal_id="id-1")

    def keep(view: Any) -> Any:
        saved.append(view)
        return view

    monkeypatch.setattr(wandb, "Api", Api)
    monkeypatch.setattr(ws.Workspace, "save", keep)
    monkeypatch.setattr(ws.Workspace, "from_url", earlier)
    monkeypatch.setattr(ws.Workspace, "url", property(lambda view: f"https://example/{view.entity}"))
    assert wandb_views.push(None, "p") == wandb_views.push(None, "p") == "https://example/me"
    assert asked == [("me/p", {"jobType": "benchmark"})] * 2 and charts == list(wandb_views.CHARTS)
    assert [view._internal_id for view in saved] == ["", "id-1"], "the second replaces the first"
    assert len({view._internal_name for view in saved}) == 1
    assert capsys.readouterr().err.count("is not made again: it exists") == len(charts)

    def refuse(view: Any) -> Any:
        raise ValueError("no such project")

    monkeypatch.setattr(ws.Workspace, "save", refuse)
    with pytest.raises(UserError, match="refused: ValueError: no such project"):
        wandb_views.push("me", "p")


def test_a_missing_package_is_a_message(monkeypatch: pytest.MonkeyPatch, summaries: list[dict[str, Any]]) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    with pytest.raises(UserError, match=r"pip install 'decodebench\[dashboard\]'"):
        wandb_views.workspace(summaries, "me", "p")
