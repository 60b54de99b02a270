"""The record of a tested promise: ``manifest.json``, ``result.json`` and the losses; its tables and its figure."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.config.identity import strip
from bench.config.schema import RunConfig, sanitise
from bench.promise.settings import PromiseConfig
from bench.report import tables
from bench.utils import files

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from bench.models.source import Loaded

FOLDER = "promise"  # in a folder of results
MANIFEST, RESULT, LOSSES = "manifest.json", "result.json", "losses.npz"
_NAMED = ("confidence", "decay", "depth", "accept")  # settings that a table names where they are not the usual


def folder_name(cfg: RunConfig, config: PromiseConfig, loaded: Loaded, part: str | None, prompts: str) -> str:
    """``<method>-<model>-<12 hex of sha256 over what defines it>``.

    Args:
        part, prompts: sha256 of the trained exits and of the prompts.
    """
    parts = {
        "config": defining(cfg),
        "promise": {key: value for key, value in asdict(config).items() if key != "record"},
        "revision": loaded.revision,
        "part": part,
        "dtype": str(loaded.lm.dtype),
        "prompts": prompts,
    }
    names = (sanitise(str(group["name"])) for group in (cfg.method, cfg.model))
    return "-".join((*names, files.json_sha256(parts)[:12]))


def defining(cfg: RunConfig) -> dict[str, Any]:
    """The configuration without the data set, since the prompts are those of a corpus."""
    return {key: value for key, value in strip(cfg.to_dict()).items() if key != "dataset"}


def write(
    folder: Path,
    cfg: RunConfig,
    config: PromiseConfig,
    loaded: Loaded,
    result: Mapping[str, Any],
    losses: Mapping[str, np.ndarray],
    begin: datetime,
    seconds: float,
) -> None:
    """All files of the record."""
    from bench.measure.manifest import circumstances

    manifest = {"config": defining(cfg), **circumstances(loaded, begin, seconds)}
    _write(folder, manifest | {"promise": asdict(config)}, result, losses)


def write_again(
    results: Path,
    config: PromiseConfig,
    earlier: Record,
    result: Mapping[str, Any],
    losses: Mapping[str, np.ndarray],
) -> Path:
    """The record of other resamplings of the same losses, which says where and when they were measured.

    Returns:
        Its folder.
    """
    promise = asdict(config) | {"record": earlier.folder.name}
    name = f"{earlier.folder.name.rpartition('-')[0]}-{files.json_sha256(promise)[:12]}"
    folder = results / FOLDER / name
    _write(folder, earlier.manifest | {"promise": promise}, result, losses)
    return folder


def _write(
    folder: Path, manifest: Mapping[str, Any], result: Mapping[str, Any], losses: Mapping[str, np.ndarray]
) -> None:
    from bench.utils import redact

    folder.mkdir(parents=True, exist_ok=True)
    argv = redact.argv(["bench", "promise", *sys.argv[2:]])
    files.write_entries(folder / MANIFEST, redact.tree({**manifest, "argv": argv}))
    np.savez_compressed(folder / LOSSES, allow_pickle=False, **losses)
    files.write_entries(folder / RESULT, dict(result))


@dataclass(frozen=True)
class Record:
    """A record that was read."""

    folder: Path
    manifest: dict[str, Any]
    result: dict[str, Any]

    @property
    def label(self) -> str:
        """The method with the settings that tell its records apart."""
        method = self.manifest["config"]["method"]
        return " ".join([str(method["name"]), *(str(method[key]) for key in _NAMED if method.get(key) is not None)])


def read(results: Path) -> list[Record]:
    """The records in a folder of results, by model and name."""
    found = [read_one(file.parent) for file in sorted((results / FOLDER).glob(f"*/{RESULT}"))]
    return sorted(found, key=lambda record: (record.manifest["model"]["name"], record.label))


def read_one(folder: Path) -> Record:
    """The record in a folder."""
    manifest, result = (json.loads((folder / name).read_text(encoding="utf-8")) for name in (MANIFEST, RESULT))
    return Record(folder, manifest, result)


def read_losses(folder: Path) -> dict[str, np.ndarray]:
    """By kind of loss, [prompts, thresholds]."""
    with np.load(folder / LOSSES, allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}


def digest(losses: Mapping[str, np.ndarray]) -> str:
    """sha256 over the losses, the same on every machine."""
    return files.json_sha256({against: table.tolist() for against, table in losses.items()})


def problems(folder: Path) -> Iterator[str]:
    """What does not fit in a record: losses that were changed, counts that contradict each other."""
    manifest, result = files.read_json(folder / MANIFEST), files.read_json(folder / RESULT)
    if not manifest or not result or not (folder / LOSSES).is_file():
        yield f"{MANIFEST if not manifest else RESULT if not result else LOSSES} is missing or cannot be read"
        return
    try:
        if digest(read_losses(folder)) != result["losses_sha256"]:
            yield f"{LOSSES} has other losses than {RESULT} says"
        for promise in result["promises"]:
            if promise["share"] != promise["broken"] / promise["draws"]:
                yield f"{RESULT} has broken: {promise['broken']} of {promise['draws']}, share: {promise['share']}"
        if result["passed"] is any(promise["kept"] is False for promise in result["promises"]):
            yield f"{RESULT} has passed: {result['passed']}, its promises say otherwise"
    except (KeyError, TypeError, ValueError, OSError) as error:
        yield f"{RESULT} cannot be read: {type(error).__name__}: {error}"


# --------------------------------------------------------------------------------------------------------- the report

HEADER = (
    "method", "loss", "tolerance", "prompts", "broken", "at most", "beyond chance", "naive", "test loss", "layers",
    "kept",
)  # fmt: skip
_MARKS = {"textual": "o", "risk": "s"}
_VERDICT = {True: "yes", False: "NO", None: "open"}


def cells(record: Record) -> Iterator[list[str]]:
    """A row of the table for each promise."""
    for promise in record.result["promises"]:
        yield [
            record.label,
            promise["against"],
            f"{promise['tolerance']:g}",
            f"{promise['calibration_prompts']} + {promise['test_prompts']}",
            f"{promise['broken']} of {promise['draws']}",
            f"{promise['high']:.1%}",
            str(promise["beyond_chance"]),
            f"{promise['naive']:.0%}",
            f"{promise['test_loss']:.4f}",
            f"{promise['layers']:.0%}",
            _VERDICT[promise["kept"]],
        ]


def render(record: Record) -> str:
    """One record as text."""
    result, manifest = record.result, record.manifest
    head = f"{manifest['model']['name']}   {record.label}   {result['corpus']['prompts']} prompts"
    rows = tables.aligned(HEADER, list(cells(record)), right=range(2, len(HEADER)))
    rest = (
        "Broken: splits whose test prompts lose more than the tolerance; at most: its share at 95 % certainty; beyond "
        "chance: splits that do so at 95 % certainty; naive: broken without the certificate."
    )
    verdict = "as promised" if result["passed"] else "NOT as promised"
    return "\n".join([head, "", rows, "", textwrap.fill(rest, 110), "", f"RESULT: {verdict}     {record.folder}/"])


def figure(ax: Axes, records: Sequence[Record]) -> None:
    """Share of broken promises by tolerance with its upper bound: a colour for each record, a mark for each loss.

    Hollow marks are of the naive choice; the dashed line is the share that the promise allows.
    """
    import matplotlib

    series, colours = list(_series(records)), matplotlib.color_sequences["tab10"]
    names = list(dict.fromkeys(record.label for record, _, _ in series))
    for number, (record, against, promises) in enumerate(series):
        look: dict[str, Any] = {"color": colours[names.index(record.label) % len(colours)], "markersize": 4}
        look["marker"] = _MARKS[against]
        shift = 1 + 0.03 * (number - (len(series) - 1) / 2)
        at = [promise["tolerance"] * shift for promise in promises]
        share = [100 * promise["share"] for promise in promises]
        above = [100 * (promise["high"] - promise["share"]) for promise in promises]
        name = f"{record.label} {against}"
        ax.errorbar(at, share, yerr=[[0] * len(at), above], linestyle="", capsize=2, label=name, **look)
        ax.plot(at, [100 * promise["naive"] for promise in promises], linestyle="", markerfacecolor="none", **look)
    if series:
        allowed = series[0][2][0]
        ax.axhline(100 * allowed["error_rate"], color="0.5", linestyle="--", linewidth=1)
        ticks = sorted({promise["tolerance"] for _, _, promises in series for promise in promises})
        ax.set(xscale="log", xticks=ticks, xticklabels=[f"{tick:g}" for tick in ticks])
        ax.minorticks_off()
    ax.set(xlabel="promised loss", ylabel="broken promises, %", ylim=(-2, None))
    ax.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _series(records: Iterable[Record]) -> Iterator[tuple[Record, str, list[dict[str, Any]]]]:
    for record in records:
        for against in dict.fromkeys(promise["against"] for promise in record.result["promises"]):
            yield record, against, [p for p in record.result["promises"] if p["against"] == against]
