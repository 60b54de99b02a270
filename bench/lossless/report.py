"""What an experiment leaves behind, and what it prints."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.config.schema import RunConfig, identity, sanitise
from bench.utils import files

if TYPE_CHECKING:
    from bench.lossless.experiments import Lab
    from bench.models.source import Loaded


def defining(cfg: RunConfig) -> dict[str, Any]:
    """What of the run's configuration an experiment depends on: it brings its own prompts."""
    return {key: value for key, value in identity(cfg).items() if key != "dataset"}


def folder_name(experiment: str, cfg: RunConfig, lab: Lab, loaded: Loaded) -> str:
    """``<experiment>-<method>-<model>-<12 hex of sha256 over what defines the experiment>``."""
    parts = {"config": defining(cfg), "lab": asdict(lab), "revision": loaded.revision, "dtype": str(loaded.lm.dtype)}
    if part := _part(cfg, loaded):
        parts["part"] = part["sha256"]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    names = (sanitise(str(group["name"])) for group in (cfg.method, cfg.model))
    return "-".join((experiment, *names, digest[:12]))


def _part(cfg: RunConfig, loaded: Loaded) -> dict[str, Any] | None:
    """What was prepared for the method, if it takes such a part."""
    from bench.models import artifacts

    found = artifacts.find(cfg.method, loaded.name, loaded.revision, cfg.paths)
    return found.facts() if found else None


def write(
    folder: Path,
    experiment: str,
    cfg: RunConfig,
    lab: Lab,
    loaded: Loaded,
    result: dict[str, Any],
    begin: datetime,
    seconds: float,
) -> None:
    """``manifest.json`` and ``result.json`` in ``folder``."""
    from bench.utils import machine, redact

    folder.mkdir(parents=True, exist_ok=True)
    manifest = {
        "experiment": experiment,
        "lab": asdict(lab),
        "config": defining(cfg),
        "model": {"name": loaded.name, "revision": loaded.revision, "sha256": loaded.sha256},
        **({"part": part} if (part := _part(cfg, loaded)) else {}),
        "dtype": str(loaded.lm.dtype).removeprefix("torch."),
        "hardware": machine.facts(loaded.lm.device),
        "versions": machine.versions(),
        "git": machine.git_state(),
        "argv": redact.argv(["bench.lossless", *sys.argv[1:]]),
        "started_at": begin.isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
    }
    files.write_json(folder / "manifest.json", redact.tree(manifest))
    files.write_json(folder / "result.json", result)


def render(experiment: str, result: dict[str, Any], folder: Path, cfg: RunConfig) -> str:
    """The result as text."""
    body: Callable[[dict[str, Any]], list[str]] = {"greedy": _greedy, "sampling": rules_table, "joint": _joint}[
        experiment
    ]
    verdict = "as promised" if result["passed"] else "NOT as promised"
    head = f"{cfg.model['name']}   {experiment}   method {cfg.method['name']}"
    return "\n".join([head, "", *body(result), "", f"RESULT: {verdict}     {_shown(folder)}/"])


def _greedy(result: dict[str, Any]) -> list[str]:
    lines = [f"  {'tokens':>6}  {'same':>5}  {'near-ties':>9}  {'violations':>10}  {'first differs':>13}  prompt"]
    for row in result["prompts"]:
        first = "-" if row["first_divergence"] is None else str(row["first_divergence"])
        same = "yes" if row["identical"] else "no"
        counts = f"  {row['tokens']:>6}  {same:>5}  {row['near_tie']:>9}  {row['violation']:>10}"
        lines.append(f"{counts}  {first:>13}  {row['prompt'][:40]}")
    lines.append(
        f"  {result['identical']} of {len(result['prompts'])} texts identical over {result['tokens']} tokens; "
        f"{result['violations']} tokens outside the near-tie gap of {result['near_tie_gap']:g}"
    )
    return lines


def rules_table(result: dict[str, Any]) -> list[str]:
    """The table "rule, standard deviation, expected, verdict" of a sampling experiment, as lines."""
    lines = [f"  {'rule':36}{'std deviation':>14}{'expected':>11}{'TV':>9}{'smallest p':>12}{'failed':>9}   verdict"]
    for row in result["rules"]:
        kind = "exact" if row["exact"] else "wrong rule"
        caught = (
            ("passes" if row["exact"] else "caught") if row["as_it_should"] else "FAILS" if row["exact"] else "MISSED"
        )
        lines.append(
            f"  {row['rule']:36}{row['standard_deviation']:>14.3e}{row['expected_deviation']:>11.3e}"
            f"{row['total_variation']:>9.4f}{row['smallest_p']:>12.2e}{row['failed']:>4} of {row['cells']:<2}"
            f"  {kind}: {caught}"
        )
    lines.append(f"  A cell fails when p <= {result['bound']:.2e} (all exact tests together).")
    return lines


def _joint(result: dict[str, Any]) -> list[str]:
    lines = [f"  {'T':>4}  {'told apart':>10}  {'mass':>6}  {'TV':>7}  {'expected':>8}  {'p':>9}  prompt"]
    for row in result["cells"]:
        lines.append(
            f"  {row['temperature']:>4g}  {row['continuations']:>10}  {row['mass']:>6.3f}"
            f"  {row['total_variation']:>7.4f}  {row['expected_total_variation']:>8.4f}  {row['p_value']:>9.3g}"
            f"  {row['prompt'][:40]}"
        )
    return lines


def _shown(path: Path) -> str:
    """Relative to the current folder where possible."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return path.name
