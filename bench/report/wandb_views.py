"""``python -m bench dashboard``: one workspace at Weights & Biases for the VALID runs of a project, built from code.

It shows the runs that were sent, by ``tracker=wandb`` or ``python -m bench track`` (offline ones after ``wandb sync``),
and its panels follow from what these measured. Needs the extra ``dashboard``; saving needs a login, building does not.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from bench.errors import UserError
from bench.records.tracking import PROMPT, scalars
from bench.report import collect
from bench.report.tracked_run import ROOFLINE, SPEED_UP, SPEED_UP_BY_CATEGORY, TEXTS
from bench.utils import files

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

PROJECT = "decodebench"
NAME = "DecodeBench"
_HOST = "https://api.wandb.ai"
_VIEW = "nw-decodebench-v"  # internal name of the saved workspace; its address has ?nw=decodebench
_SPEED, _VALID, _QUALITY, _POSITION = "speedup/headline/value", "verdict/valid", "quality/", "acceptance_at/"
_COLUMNS = ("method", "guarantee", "batch_size", _SPEED, "tokens_per_step", "tokens_per_s", "agreement/exact")
_MOST_RUNS, _MOST_POSITIONS = 100, 8
_VEGA_LITE = {"$schema": "https://vega.github.io/schema/vega-lite/v5.json", "data": {"name": "wandb"}}


@dataclass(frozen=True)
class Chart:
    """A figure over the tables SPEED_UP of all runs.

    Attributes:
        spec: in Vega-Lite, with ``${field:name}`` for columns.
        fields: the column of each name.
    """

    spec: dict[str, Any]
    fields: dict[str, str]


def _axis(name: str, kind: str, title: str, **more: Any) -> dict[str, Any]:
    return {"field": f"${{field:{name}}}", "type": kind, "title": title, **more}


_VALUE = _axis("value", "quantitative", "speed-up, 95 % interval")
_HUE = {"field": "${field:colour}", "type": "nominal"}


def _interval(of: str) -> dict[str, Any]:
    """A line from ``low`` to ``high``, over bars in black."""
    ends = {of: _axis("low", "quantitative", str(_VALUE["title"])), f"{of}2": {"field": "${field:high}"}}
    return {"mark": "rule", "encoding": ends | ({"color": {"value": "black"}} if of == "x" else {})}


def _coloured(spec: Mapping[str, Any], column: str) -> Chart:
    shown = {"value": "speed-up", "low": "low", "high": "high", "run": "run", "batch": "batch size", "colour": column}
    text = json.dumps(spec)
    return Chart({**_VEGA_LITE, **spec}, {name: of for name, of in shown.items() if f"${{field:{name}}}" in text})


CHARTS = {
    "decodebench-speed-up": _coloured(
        {
            "encoding": {"y": _axis("run", "nominal", "", sort="-x")},
            "layer": [{"mark": "bar", "encoding": {"x": _VALUE, "color": _HUE}}, _interval("x")],
        },
        "method",
    ),
    "decodebench-batch-size": _coloured(
        {
            "encoding": {
                "x": _axis("batch", "quantitative", "batch size", scale={"type": "log", "base": 2}),
                "color": _HUE,
            },
            "layer": [{"mark": {"type": "line", "point": True}, "encoding": {"y": _VALUE}}, _interval("y")],
        },
        "series",
    ),
}


def sent(results: Path, reference: Path | None = None) -> list[dict[str, Any]]:
    """Summaries of the runs that were sent from this machine, flat as they are sent.

    Args:
        results: folder of the user's runs, with the local files of Weights & Biases.
        reference: folder of other records.
    """
    names = (re.fullmatch(r"(?:offline-)?run-\d+_\d+-(.+)", path.name) for path in results.glob("wandb/*run-*"))
    folders = [
        root / name for name in sorted({found[1] for found in names if found}) for root in (results, reference) if root
    ]
    return [dict(scalars(summary)) for folder in folders if (summary := collect.read_summary(folder))]


def workspace(summaries: Iterable[Mapping[str, Any]], entity: str, project: str) -> Workspace:
    """The dashboard of a project.

    Args:
        summaries: of the runs that were sent, flat.
        entity, project: there.

    Raises:
        UserError: no VALID run, or the extra is not installed.
    """
    try:
        from wandb_workspaces import workspaces as ws
    except ImportError as error:
        raise UserError(
            f"The dashboard needs an extra package ({error}). Run: pip install 'decodebench[dashboard]'"
        ) from error
    valid = [summary for summary in summaries if summary.get(_VALID)]
    if not valid:
        raise UserError(
            f"Project {project} must have a VALID run that was sent, got none. Run: python -m bench track RUN, or any "
            "run with tracker=wandb; then `wandb sync` if it was offline."
        )
    made = ws.Workspace(
        entity=entity,
        project=project,
        name=NAME,
        sections=[
            ws.Section(name=name, panels=panels, is_open=True) for name, panels in _sections(valid, entity) if panels
        ],
        runset_settings=ws.RunsetSettings(
            filters=ws.And(ws.Metric("JobType") == "benchmark", ws.Summary(_VALID) == True),  # noqa: E712
            order=[ws.Ordering(ws.Summary(_SPEED), ascending=False)],
            pinned_columns=[f"summary:{name}" for name in _COLUMNS],
        ),
    )
    made._internal_name = _VIEW  # the package has no public way to choose it
    return made


def _sections(summaries: Sequence[Mapping[str, Any]], entity: str) -> Iterator[tuple[str, list[Any]]]:
    from wandb_workspaces.reports import v2 as wr

    measured = sorted({name for summary in summaries for name in summary})
    positions = [f"{_POSITION}{place}" for place in range(_MOST_POSITIONS)]
    drafted = [wr.SummaryMetric(name) for name in positions if name in measured]

    def chart(name: str) -> Any:
        table = {"summaryTable": {"tableKey": SPEED_UP}}
        return wr.CustomChart(query=table, chart_name=f"{entity}/{name}", chart_fields=CHARTS[name].fields)

    def scatter(title: str, x: str, y: str, **more: Any) -> Any:
        return wr.ScatterPlot(title=title, x=wr.SummaryMetric(x), y=wr.SummaryMetric(y), **more)

    def bars(title: str, *metrics: Any) -> Any:
        return wr.BarPlot(title=title, metrics=list(metrics), max_runs_to_show=_MOST_RUNS)

    def lines(title: str, name: str) -> Any:
        return wr.LinePlot(title=title, x=PROMPT, y=[f"{PROMPT}/{name}"], title_x=PROMPT, max_runs_to_show=_MOST_RUNS)

    yield "Speed", [chart(name) for name in CHARTS]
    yield (
        "Quality against speed",
        [
            scatter(
                f"{name.removeprefix(_QUALITY)} (the line is the Pareto front)",
                "ms_per_prompt",
                name,
                log_x=True,
                running_ymax=True,
            )
            for name in measured
            if name.startswith(_QUALITY)
        ],
    )
    yield (
        "Drafts",
        [
            *([bars("acceptance by position", *drafted)] if drafted else []),
            scatter("tokens per step against speed-up", "tokens_per_step", _SPEED),
            scatter("predicted against measured speed-up", "predicted_speedup", _SPEED),
        ],
    )
    yield (
        "Prompts",
        [
            lines("speed-up so far", "speedup_so_far"),
            lines("tokens per step", "tokens_per_step"),
            lines("acceptance", "acceptance"),
            lines("seconds of a step, median", "step_s"),
        ],
    )
    yield (
        "Fidelity and cost",
        [
            bars("identical to the target", wr.SummaryMetric("agreement/exact")),
            bars("peak memory", wr.SummaryMetric("peak_memory_bytes")),
            bars("time to the first token", wr.SummaryMetric("ttft_s/mean")),
        ],
    )
    yield "Figures", [wr.MediaBrowser(media_keys=[SPEED_UP_BY_CATEGORY, ROOFLINE])]
    yield "Texts and settings", [wr.WeavePanelSummaryTable(table_name=TEXTS), wr.RunComparer(diff_only=True)]


def write(made: Workspace, file: Path) -> None:
    """Workspace and charts as they would be sent, into a .json file.

    Raises:
        UserError: another ending, or a file that cannot be there.
    """
    if file.suffix != ".json":
        raise UserError(f"out must end in .json, got {file}.")
    model = made._to_model()  # the package has no public form of it
    content = {"name": model.display_name, "spec": json.loads(model.spec.model_dump_json(by_alias=True))}
    charts = {name: chart.spec for name, chart in CHARTS.items()}
    files.write_output(file, json.dumps(content | {"charts": charts}, indent=1) + "\n")


def push(entity: str | None, project: str) -> str:
    """Save the dashboard of the runs in a project; returns its address.

    Raises:
        UserError: no login, no run there, or the service refuses.
    """
    if not _has_login():
        raise UserError(
            "Saving a dashboard needs a login at Weights & Biases. Run `wandb login`, or set out=FILE.json."
        )
    import wandb

    try:
        api = wandb.Api()
        owner = entity or str(api.default_entity)
        runs = api.runs(f"{owner}/{project}", filters={"jobType": "benchmark"}, lazy=False)
        made = workspace([dict(run.summary_metrics) for run in runs], owner, project)
        for name, chart in CHARTS.items():
            _create_chart(api, owner, name, chart.spec)
        made._internal_id = _earlier(owner, project)
        return str(made.save().url)
    except (wandb.Error, ValueError, OSError) as error:
        raise UserError(
            f"Weights & Biases refused: {type(error).__name__}: {error}. Check entity= and project=, or set "
            "out=FILE.json to build the dashboard only."
        ) from error


def _earlier(entity: str, project: str) -> str:
    """Id of the dashboard that was saved before, which is then replaced; empty if there is none."""
    from wandb_workspaces import workspaces as ws

    try:
        return str(ws.Workspace.from_url(f"https://wandb.ai/{entity}/{project}?nw={_VIEW[3:-2]}")._internal_id)
    except ValueError:
        return ""


def _create_chart(api: Any, entity: str, name: str, spec: Mapping[str, Any]) -> None:
    """A failure is a warning: the chart may exist already, and the other panels need none."""
    import wandb

    try:
        api.create_custom_chart(entity, name, name.replace("-", " "), "vega2", "private", dict(spec))
    except wandb.Error as error:
        print(f"warning: chart {entity}/{name} is not made again: {error}", file=sys.stderr)


def _has_login() -> bool:
    """A key in the environment, or one that ``wandb login`` wrote for the host."""
    if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL") or _HOST).hostname or ""
    try:
        return netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, NetrcParseError):
        return False
