"""What a tracker is sent of a finished run, and ``python -m bench track``, which sends runs later.

Everything is derived from the records; nothing is written into them.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from bench.analysis import metrics, pairs
from bench.config import compose, instantiate
from bench.config.schema import PathsConfig
from bench.errors import FAILED, OK, UserError
from bench.records import run_folder
from bench.records.run_folder import Sample
from bench.records.tracking import FinishedRun, Table
from bench.report import collect, compare, leaderboard
from bench.tasks import prompts
from bench.tasks.sources import Sources
from bench.utils import redact
from bench.utils.files import read_json

if TYPE_CHECKING:
    import pandas as pd

MOST_TEXTS = 200
TEXTS, SPEED_UP = "texts", "speed_up"  # tables
SPEED_UP_BY_CATEGORY, ROOFLINE = "speed_up_by_category", "roofline"  # images
TEXT_COLUMNS = (
    "prompt_id", "category", "prompt", "method text", "baseline text", "identical", "speed-up", "tokens per step",
    "acceptance", "tokens", "finish", "quality",
)  # fmt: skip
SPEED_UP_COLUMNS = ("run", "method", "series", "batch size", "speed-up", "low", "high")
_CONFIG = (
    "method", "guarantee", "model", "dataset", "dtype", "sampling", "measure", "seed", "max_new_tokens", "batch_size",
    "hardware", "versions", "git",
)  # fmt: skip
_TAGS = ("method", "guarantee", "model", "dataset", "hardware", "dtype")
_COSTS = "costs"
_NS = 1e9


def track(
    names: Sequence[str],
    results: Path | None = None,
    project: str | None = None,
    entity: str | None = None,
    mode: Literal["offline", "online"] | None = None,
    group: str | None = None,
) -> int:
    """Send finished runs; returns the exit code.

    Args:
        names: folders or ids.
        results: folder of the runs; None: where runs are written.
        project, entity, mode, group: of ``bench.records.tracking.WandbTracker``; None: as in conf/tracker/wandb.yaml.

    Raises:
        UserError: no such run, or one that is not finished.
    """
    overrides = [f"paths.results={results}"] if results else []
    cfg = compose.compose(["tracker=wandb", *overrides])
    places = [Path(place) for place in (cfg.paths.results, cfg.paths.reference) if place]
    folders = [compare.find(name, *places) for name in names]
    for folder in folders:
        _read(folder)
    given = {"project": project, "entity": entity, "mode": mode, "group": group}
    settings = cfg.tracker | {key: value for key, value in given.items() if value is not None}
    for folder in folders:
        tracker = instantiate.build_tracker(settings)
        tracker.log(partial(finished_run, folder, cfg.paths))
        if tracker.broken:
            return FAILED
        print(f"{folder.name}: sent to project {settings['project']}, {settings['mode']}")
    if settings["mode"] == "offline":
        print(f"To upload: wandb sync {settings['dir']}/wandb/offline-run-*")
    return OK


def finished_run(folder: Path, paths: PathsConfig) -> FinishedRun:
    """All that is sent of a run. Of condensed records it has no texts and steps.

    Args:
        folder: of the run.
        paths: where prompts and the records of forward passes are; nothing is downloaded.

    Raises:
        UserError: the folder has no finished run, or records that cannot be read.
    """
    manifest, summary = _read(folder)
    condensed = (folder / run_folder.PAIRS).is_file()
    samples = [] if condensed else run_folder.read_samples(folder)
    table = _conversations(pairs.read(folder).units) if condensed else per_prompt(samples)
    asked = {} if condensed else _prompt_texts(folder, manifest, paths)
    texts = {} if condensed else {TEXTS: Table(TEXT_COLUMNS, _texts(samples, table, asked))}
    kept = (run_folder.MANIFEST, run_folder.CONFIG, run_folder.SUMMARY, run_folder.PAIRS)
    files = [run_folder.samples_file(folder), *(folder / name for name in kept)]
    return FinishedRun(
        run_id=str(summary["run_id"]),
        group=f"{summary['model']}-{summary['dataset']}",
        config=redact.tree(_config(manifest)),
        tags=_tags(manifest, summary),
        summary=summary,
        prompts=_curves(table),
        tables={SPEED_UP: Table(SPEED_UP_COLUMNS, [_speed_up(summary)])} | texts,
        step_s=[ns / _NS for row in samples if _measured(row, "method") for ns in row.step_ns[1:]],
        images=_images(manifest, summary, paths),
        files=[file for file in files if file.is_file()],
        status=str(manifest["status"]),
    )


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Manifest and summary of a finished run."""
    manifest, summary = run_folder.read_manifest(folder) or {}, collect.read_summary(folder)
    if manifest.get("status") != "finished" or summary is None:
        raise UserError(
            f"{folder} must hold a finished run, got status {manifest.get('status', 'none')!r}. Repeat the command "
            "that made it to resume it."
        )
    return manifest, summary


def _config(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {key: manifest[key] for key in _CONFIG if key in manifest} | {"family": leaderboard.family(manifest)}


def _tags(manifest: Mapping[str, Any], summary: Mapping[str, Any]) -> list[str]:
    measure = (manifest.get("measure") or {}).get("name")
    named = [str(summary[key]) for key in _TAGS if summary.get(key)]
    settings = {"batch_size": summary.get("batch_size"), "measure": measure}
    return [
        *named, leaderboard.family(manifest), *(f"{key}={value}" for key, value in settings.items() if value),
        collect.result(summary),
    ]  # fmt: skip


def _speed_up(summary: Mapping[str, Any]) -> list[Any]:
    """The row of SPEED_UP_COLUMNS; without an interval both of its ends are the value."""
    found = metrics.headline(summary)
    ends = [found["value"] if found[end] is None else found[end] for end in ("low", "high")]
    series = ", ".join(str(summary[key]) for key in ("method", "model", "dataset"))
    return [summary["run_id"], summary["method"], series, summary["batch_size"], found["value"], *ends]


# ---------------------------------------------------------------------------------------------------------- prompts


def per_prompt(samples: Sequence[Sample]) -> pd.DataFrame:
    """One row per measured prompt, by its id, in the order they were decoded; NaN where a method has no such number.

    Repeats are averaged. ``speedup`` is of the prompt's batch, ``speedup_so_far`` of all batches up to it. Also
    ``tokens_per_step``, ``acceptance``, median ``step_s`` and ``identical``, whether both arms wrote the same tokens.
    """
    import numpy as np
    import pandas as pd

    rows = metrics.paired(metrics.frame(samples)).sort_values(["batch", "repeat"], kind="stable")
    done = metrics.batches(rows)
    weighted = (done["batch_ns"] / _NS * done["weight"]).groupby([done["batch"], done["arm"]]).sum()
    seconds = weighted.unstack("arm").sort_index()
    method = rows[rows["arm"] == "method"]
    steps = metrics.rounds(method).assign(prompt=np.repeat(method["prompt_id"].to_numpy(), method["step_ns"].map(len)))
    decode, drafts = steps[steps["step"] > 0], steps[steps["depth"] > 0]
    first = rows[rows["repeat"] == rows["repeat"].min()]
    written = first.assign(ids=first["output_ids"].map(tuple)).pivot(index="prompt_id", columns="arm", values="ids")
    table = method.drop_duplicates("prompt_id").set_index("prompt_id")[["category", "batch"]]
    speeds = pd.DataFrame({"speedup": _ratio(seconds), "speedup_so_far": _ratio(seconds.cumsum())})
    return table.join(speeds, on="batch").assign(
        tokens_per_step=_quotient(decode, "tokens", "target_passes"),
        acceptance=_quotient(drafts, "accepted", "drafted"),
        step_s=decode.groupby("prompt")["ns"].median() / _NS,
        identical=written["method"] == written["baseline"],
    )


def _ratio(seconds: pd.DataFrame) -> pd.Series:
    return seconds["baseline"] / seconds["method"]


def _quotient(steps: pd.DataFrame, above: str, below: str) -> pd.Series:
    """Of the sums over the steps of each prompt; NaN for none."""
    sums = steps.groupby("prompt")[[above, below]].sum()
    return (sums[above] / sums[below].where(sums[below] > 0)).astype(float)


def _conversations(units: pd.DataFrame) -> pd.DataFrame:
    """As ``per_prompt``, of records that have only the times of conversations."""
    seconds = units[["baseline_s", "method_s"]].rename(columns=lambda name: name.removesuffix("_s"))
    return units[["category"]].assign(speedup=_ratio(seconds), speedup_so_far=_ratio(seconds.cumsum()))


def _curves(table: pd.DataFrame) -> list[dict[str, float]]:
    """The numbers of each row, without those that were not measured."""
    numbers = table.drop(columns=["category", "batch"], errors="ignore").astype(float)
    return [{str(key): value for key, value in row.dropna().items()} for _, row in numbers.iterrows()]


def _texts(samples: Sequence[Sample], table: pd.DataFrame, asked: Mapping[str, str]) -> list[list[Any]]:
    """Rows of TEXT_COLUMNS: the first repeat of at most MOST_TEXTS prompts, spread evenly over the run."""
    written = {
        arm: {row.prompt_id: row for row in samples if _measured(row, arm) and row.repeat == 0}
        for arm in ("method", "baseline")
    }
    every = -(-len(table) // MOST_TEXTS) or 1
    found = []
    for name, numbers in table.iloc[::every].iterrows():
        own, before = written["method"][str(name)], written["baseline"][str(name)]
        known = [
            None if value != value else float(value) for value in numbers[["speedup", "tokens_per_step", "acceptance"]]
        ]
        scores = " ".join(f"{metric}={value:.4g}" for metric, value in own.quality.items())
        texts = [asked.get(own.prompt_id), own.text, before.text]
        facts = [own.n_output_tokens, own.finish, scores]
        found.append([own.prompt_id, own.category, *texts, bool(numbers["identical"]), *known, *facts])
    return found


def _measured(row: Sample, arm: str) -> bool:
    return row.phase == "measure" and row.arm == arm


def _prompt_texts(folder: Path, manifest: Mapping[str, Any], paths: PathsConfig) -> dict[str, str]:
    """What the user says, by id of the prompt; empty where the data is not on this machine, or is not the same."""
    config = yaml.safe_load((folder / run_folder.CONFIG).read_text(encoding="utf-8"))
    try:
        task = instantiate.build_task(config["dataset"])
        examples = task.load(Sources(paths.data, paths.cache, fetch=False))
    except UserError:
        return {}
    if task.revision.get("content") != (manifest["dataset"].get("revision") or {}).get("content"):
        return {}
    return {prompts.prompt_id(each, turn): text for each in examples for turn, text in enumerate(each.turns)}


# ----------------------------------------------------------------------------------------------------------- images


def _images(manifest: Mapping[str, Any], summary: Mapping[str, Any], paths: PathsConfig) -> dict[str, bytes]:
    roofline = _roofline(manifest, paths)
    return {SPEED_UP_BY_CATEGORY: forest_plot(summary)} | ({ROOFLINE: roofline} if roofline else {})


def forest_plot(summary: Mapping[str, Any]) -> bytes:
    """PNG of the speed-up of each category with its interval."""
    from matplotlib.figure import Figure

    from bench.report import plots

    figure = Figure(figsize=(7, 1.2 + 0.35 * len(summary["speedup"]["by_category"])), layout="constrained")
    plots.categories(figure.subplots(), summary)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=110)
    return png.getvalue()


def _roofline(manifest: Mapping[str, Any], paths: PathsConfig) -> bytes | None:
    """The figure of ``python -m bench cost`` for the same model and machine, the user's own before the reference."""
    for results in filter(None, (paths.results, paths.reference)):
        for file in sorted(Path(results, _COSTS).glob(f"*/{run_folder.MANIFEST}")):
            image = file.with_name("roofline.png")
            if image.is_file() and _device(read_json(file) or {}) == _device(manifest):
                return image.read_bytes()
    return None


def _device(manifest: Mapping[str, Any]) -> tuple[object, ...]:
    """Model, number type and machine."""
    model, machine = manifest.get("model") or {}, manifest.get("hardware") or {}
    known = [model.get("name"), model.get("weights"), model.get("revision"), manifest.get("dtype")]
    return (*known, run_folder.device_name(machine), machine.get("threads"))
