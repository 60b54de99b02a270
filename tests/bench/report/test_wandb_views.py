"""Views at Weights & Biases: built without a login, read back by the package that reads the service's own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import cli
from bench.errors import UserError
from bench.records import tracking
from bench.report import collect, leaderboard, terminal, wandb_views

internal = pytest.importorskip("wandb_workspaces.workspaces.internal")
from wandb_workspaces import workspaces as ws  # noqa: E402

RESULTS = Path(__file__).parents[3] / "results" / "reference"


@pytest.fixture
def no_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture(scope="module")
def groups() -> list[leaderboard.ComparisonGroup]:
    return leaderboard.groups(collect.read(RESULTS))


def test_a_view_for_each_table_survives_the_way_there_and_back(groups: list[leaderboard.ComparisonGroup]) -> None:
    for group, view in zip(groups, wandb_views.views(groups, "me", "p"), strict=True):
        model = view._to_model()
        sent = model.spec.model_dump_json(by_alias=True, exclude_none=True)
        spec = internal.WorkspaceViewspec.model_validate_json(sent)
        back = ws.Workspace._from_model(model.model_copy(update={"spec": spec}))
        assert (back.entity, back.project, back.name) == ("me", "p", group.heading)
        names = [section.name for section in back.sections if section.name != "Quality"]
        assert names == ["Speed", "Fidelity and cost", "Texts and settings"]
        kinds = [type(panel).__name__ for section in back.sections for panel in section.panels]
        assert {"BarPlot", "ScatterPlot", "RunComparer", "MediaBrowser"} == set(kinds)
        (scatter, *_) = [p for section in back.sections for p in section.panels if type(p).__name__ == "ScatterPlot"]
        assert (scatter.x.name, scatter.y.name) == ("tokens_per_step", "speedup/total/value")


def test_a_view_holds_only_what_may_stand_in_one_table(groups: list[leaderboard.ComparisonGroup]) -> None:
    for group in groups:
        wanted: dict[str, Any] = {filter.key.name: filter.value for filter in wandb_views._filters(group)}
        assert wanted.pop("verdict/valid") is True
        named = {name.partition("/")[0] for name in wanted}
        assert named == {key for key in terminal.JOIN_KEYS if group.first.get(key) is not None}
        for row in group.rows:
            logged = dict(tracking.scalars(row.summary))
            assert {name: logged[name] for name in wanted} == wanted, "as the tracker sends them"


def test_without_a_login_there_is_one_message(no_login: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dashboard", f"paths.results={RESULTS}"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "Run `wandb login`, or set out=FILE.json" in err


def test_views_are_written_without_a_login(no_login: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "views.json"
    assert cli.main(["dashboard", f"paths.results={RESULTS}", "dataset=mtbench", f"out={file}"]) == 0
    specs = json.loads(file.read_text())
    assert capsys.readouterr().out == f"{len(specs)} views: {file}\n"
    assert specs and all(each["name"].startswith("mtbench") for each in specs)
    assert cli.main(["dashboard", f"paths.results={RESULTS}", f"out={tmp_path}/x.csv"]) == 2


def test_with_a_login_views_are_saved(
    groups: Any, monkeypatch: pytest.MonkeyPatch, no_login: None, tmp_path: Path
) -> None:
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password " + "0" * 40 + "\n")
    (tmp_path / ".netrc").chmod(0o600)
    sent = []

    def keep(view: Any) -> Any:
        sent.append(view)
        return view

    monkeypatch.setattr(ws.Workspace, "save", keep)
    monkeypatch.setattr(ws.Workspace, "url", property(lambda view: f"https://example/{view.entity}"))
    assert wandb_views.push(groups, "me", "p") == ["https://example/me"] * len(groups) and len(sent) == len(groups)

    def refuse(view: Any) -> Any:
        raise ValueError("no such project")

    monkeypatch.setattr(ws.Workspace, "save", refuse)
    with pytest.raises(UserError, match="refused: ValueError: no such project"):
        wandb_views.push(groups, "me", "p")


def test_no_run_and_no_package_are_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: Any, capsys: Any
) -> None:
    assert cli.main(["dashboard", f"paths.results={tmp_path}"]) == 2
    assert "No finished run to show" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    with pytest.raises(UserError, match=r"pip install 'decodebench\[dashboard\]'"):
        wandb_views.views(groups, "me", "p")
