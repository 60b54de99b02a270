"""``python -m bench dashboard``: a saved view at Weights & Biases for each table of results/, built from code.

The filters of a view select one group of comparable, VALID runs. The runs themselves are sent by ``tracker=wandb``
(offline: ``wandb sync``). Needs the extra ``dashboard``; saving a view needs a login, building it does not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from bench.errors import UserError
from bench.records import run_folder
from bench.report import terminal
from bench.report.leaderboard import ComparisonGroup

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

PROJECT = "decodebench"
_HOST = "https://api.wandb.ai"
_SPEED, _VALID = "speedup/total/value", "verdict/valid"
_COLUMNS = ("method", "guarantee", _SPEED, "tokens_per_step", "tokens_per_s", "agreement/exact")


def views(groups: Sequence[ComparisonGroup], entity: str, project: str) -> list[Workspace]:
    """The view of each table.

    Raises:
        UserError: the extra is not installed.
    """
    try:
        from wandb_workspaces import workspaces as ws
    except ImportError as error:
        raise UserError(
            f"The dashboard needs an extra package ({error}). Run: pip install 'decodebench[dashboard]'"
        ) from error
    return [
        ws.Workspace(
            entity=entity,
            project=project,
            name=group.heading,
            sections=[
                ws.Section(name=name, panels=panels, is_open=True) for name, panels in _sections(group) if panels
            ],
            runset_settings=ws.RunsetSettings(
                filters=ws.And(*_filters(group)),
                order=[ws.Ordering(ws.Summary(_SPEED), ascending=False)],
                pinned_columns=[f"summary:{name}" for name in _COLUMNS],
            ),
        )
        for group in groups
    ]


def _filters(group: ComparisonGroup) -> Iterator[Any]:
    """What the runs of a table share, as summaries have it."""
    from wandb_workspaces import workspaces as ws

    yield ws.Summary(_VALID) == True  # noqa: E712  builds an expression
    for key in terminal.JOIN_KEYS:
        value = group.first.get(key)
        parts = value if isinstance(value, Mapping) else {None: value}
        for name, part in parts.items():
            if isinstance(part, str | int | float) and (key != "dataset_revision" or name == "content"):
                yield ws.Summary(f"{key}/{name}" if name else key) == part


def _sections(group: ComparisonGroup) -> Iterator[tuple[str, list[Any]]]:
    from wandb_workspaces.reports import v2 as wr

    def scatter(title: str, x: str, y: str) -> Any:
        return wr.ScatterPlot(title=title, x=wr.SummaryMetric(x), y=wr.SummaryMetric(y))

    def bars(title: str, name: str) -> Any:
        return wr.BarPlot(title=title, metrics=[wr.SummaryMetric(name)], max_runs_to_show=len(group.rows))

    yield (
        "Speed",
        [
            bars("speed-up, total time", _SPEED),
            scatter("tokens per step against speed-up", "tokens_per_step", _SPEED),
            scatter("predicted against measured speed-up", "predicted_speedup", _SPEED),
            bars("tokens per second", "tokens_per_s"),
        ],
    )
    scores = dict.fromkeys(name for row in group.rows for name in row.summary.get("quality") or {})
    yield "Quality", [scatter(f"speed-up against {name}", _SPEED, f"quality/{name}") for name in scores]
    yield (
        "Fidelity and cost",
        [
            bars("identical to the target", "agreement/exact"),
            bars("peak memory", "peak_memory_bytes"),
            bars("time to the first token", "ttft_s/mean"),
        ],
    )
    yield "Texts and settings", [wr.MediaBrowser(media_keys=["generations"]), wr.RunComparer(diff_only=True)]


def write(found: Sequence[Workspace], file: Path) -> None:
    """The views as they would be sent, into a .json file.

    Raises:
        UserError: another ending.
    """
    if file.suffix != ".json":
        raise UserError(f"out must end in .json, got {file}.")
    models = [view._to_model() for view in found]  # the package has no public form of it
    specs = [{"name": m.display_name, "spec": json.loads(m.spec.model_dump_json(by_alias=True))} for m in models]
    with run_folder.machine_failures():
        file.write_text(json.dumps(specs, indent=1) + "\n", encoding="utf-8")


def push(groups: Sequence[ComparisonGroup], entity: str | None, project: str) -> list[str]:
    """Save the views; returns their addresses.

    Raises:
        UserError: no login, or the service refuses.
    """
    if not _has_login():
        raise UserError("Saving views needs a login at Weights & Biases. Run `wandb login`, or set out=FILE.json.")
    import wandb

    try:
        owner = entity or str(wandb.Api().default_entity)
        return [str(view.save().url) for view in views(groups, owner, project)]
    except (wandb.Error, ValueError, OSError) as error:
        raise UserError(
            f"Weights & Biases refused: {type(error).__name__}: {error}. Check entity= and project=, or set "
            "out=FILE.json to build the views only."
        ) from error


def _has_login() -> bool:
    """A key in the environment, or one that ``wandb login`` wrote for the host."""
    if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL") or _HOST).hostname or ""
    try:
        return netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, NetrcParseError):
        return False
