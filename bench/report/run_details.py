"""What the HTML report shows of a run when its row is opened: formatted text, ready to be shown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from bench.analysis import audit
from bench.config import compose, overrides
from bench.config.identity import MOVED_NAMES
from bench.errors import UserError
from bench.records import lookup, run_folder
from bench.report import terminal
from bench.report.chart_data import SCORES
from bench.report.leaderboard import Row
from bench.utils.text import flatten

_SAMPLES, _TEXT, _LIST = 3, 1500, 12  # prompts shown of a run, characters of a text, items of a list
_TIMES = {
    "ttft_s": "time to first token",
    "tpot_s": "time per output token",
    "step_s": "time of a step",
    "latency_s": "time of a prompt",
}
_RATES = {
    "acceptance_rate": "acceptance",
    "alpha": "acceptance per token (alpha)",
    "draft_share": "share of time in drafting",
    "layers_per_token": "layers per token, as a share",
    "tokens_per_step": "tokens per step",
    "energy_j_per_token": "energy per token (J)",
    "n_prompts": "prompts",
    "n_repeats": "repeats",
}
_AGREEMENT = {
    "exact": "identical to the target",
    "near_tie": "near-ties",
    "violation": "violations",
    "identical_to_baseline": "texts identical to the baseline's",
}
Fact = tuple[str, str]


def details(row: Row) -> dict[str, Any]:
    """Lists of name and text by part of the page, the command that repeats the run, and some of its texts."""
    summary = row.summary
    verdict = summary.get("verdict") or {}
    return {
        "reasons": audit.explained(summary),
        "warnings": verdict.get("warnings", []),
        "command": _command(row.record.path),
        "agreement": list(_agreement(summary.get("agreement") or {})),
        "numbers": list(_numbers(summary)),
        "categories": [
            [name, terminal.times(found["value"]), terminal.interval(found), str(found["n"])]
            for name, found in summary["speedup"].get("by_category", {}).items()
        ],
        "samples": list(_samples(row)),
        "manifest": [
            (name, _written(value))
            for name, value in flatten(row.record.manifest)
            if not name.startswith(f"{run_folder.DIGEST}.")
        ],
    }


def _command(folder: Path) -> str | None:
    """From the stored configuration; a path that hides a machine's folders is given by its last part.

    None without a configuration, or for a method that conf/ does not have.
    """
    try:
        config = yaml.load((folder / run_folder.CONFIG).read_text(encoding="utf-8"), Loader=lookup.LOADER)
    except (OSError, yaml.YAMLError):
        return None
    method = config.get("method") if isinstance(config, Mapping) else None
    name = method.get("name") if isinstance(method, Mapping) else None
    known = MOVED_NAMES["method"].get(str(name), name) in compose.groups()["method"]
    return overrides.command(config).replace(".../", "") if known else None


def _numbers(summary: Mapping[str, Any]) -> Iterator[Fact]:
    for key, name in _TIMES.items():
        found = summary.get(key) or {}
        shown = [f"{part} {_seconds(found[part])}" for part in ("mean", "p50", "p90") if found.get(part) is not None]
        if shown:
            yield name, ", ".join(shown)
    for key, name in _RATES.items():
        if (value := summary.get(key)) is not None:
            yield name, _written(value)
    for arm, found in (summary.get("device_time") or {}).items():
        parts = [f"{name} {_seconds(found[f'{name}_s'])}" for name in ("draft", "pass", "host")]
        yield f"round of the {arm}", f"{_seconds(found['round_s'])}: {', '.join(parts)}"
    if positions := summary.get("acceptance_at"):
        yield "acceptance by position", " ".join(f"{share:.2f}" for share in positions[:_LIST])
    before = summary["baseline"].get("quality") or {}
    for name, value in (summary.get("quality") or {}).items():
        yield SCORES.get(name, name), f"{terminal.number(value)} (baseline {terminal.number(before.get(name))})"
    for name, change in (summary.get("quality_change") or {}).items():
        yield f"{SCORES.get(name, name)}, change", terminal.points(change)


def _agreement(found: Mapping[str, Any]) -> Iterator[Fact]:
    for key, name in _AGREEMENT.items():
        if (value := found.get(key)) is not None:
            yield name, f"{value:.2%}".replace("%", " %")
    for key, name in (("n_violations", "violations, tokens"), ("n_tokens", "tokens"), ("max_gap", "largest gap")):
        if (value := found.get(key)) is not None:
            yield name, _written(value)
    if found.get("reason"):
        yield "why not measured", str(found["reason"])


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.3g} ms"


def _written(value: Any) -> str:
    """A value as a reader wants it: four digits, and long lists and texts cut."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, list):
        more = [f"... {len(value) - _LIST} more"] if len(value) > _LIST else []
        return ", ".join([*map(_written, value[:_LIST]), *more])
    if isinstance(value, Mapping):
        return "; ".join(f"{name} {_written(inner)}" for name, inner in flatten(value))
    return _cut(str(value))


def _cut(text: str) -> str:
    return f"{text[:_TEXT]} ..." if len(text) > _TEXT else text


def _samples(row: Row) -> Iterator[dict[str, Any]]:
    """What both arms wrote to the first prompts."""
    found: dict[str, dict[str, Any]] = {}
    for line in _lines(run_folder.samples_file(row.record.path)):
        if line.get("phase") != "measure" or line.get("repeat"):
            continue
        prompt = str(line.get("prompt_id"))
        if prompt not in found and len(found) == _SAMPLES:
            break
        shown = found.setdefault(prompt, {"prompt": prompt, "category": str(line.get("category")), "arms": {}})
        shown["arms"][f"{line.get('arm')}, {line.get('n_output_tokens')} tokens"] = _cut(str(line.get("text")))
    yield from found.values()


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """Rows one by one; a torn one ends them."""
    try:
        for line in run_folder.read_lines(file) if file.is_file() else ():
            yield dict(json.loads(line))
    except (UserError, ValueError, TypeError):
        return
