"""The record of an experiment, and its text."""

from __future__ import annotations

import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.config.identity import strip
from bench.config.schema import RunConfig, sanitise
from bench.report import tables
from bench.utils import files

if TYPE_CHECKING:
    from bench.lossless.settings import LosslessConfig, ServedConfig
    from bench.models.source import Loaded


def defining(cfg: RunConfig) -> dict[str, Any]:
    """The configuration without the data set, since an experiment has its own prompts."""
    return {key: value for key, value in strip(cfg.to_dict()).items() if key != "dataset"}


def folder_name(experiment: str, cfg: RunConfig, config: LosslessConfig | ServedConfig, loaded: Loaded) -> str:
    """``<experiment>-<method>-<model>-<12 hex of sha256 over what defines the experiment>``."""
    parts = {"config": defining(cfg), "lab": asdict(config), "revision": loaded.revision, "dtype": str(loaded.lm.dtype)}
    if part := _part(cfg, loaded):
        parts["part"] = part["sha256"]
    names = (sanitise(str(group["name"])) for group in (cfg.method, cfg.model))
    return "-".join((experiment, *names, files.json_sha256(parts)[:12]))


def _part(cfg: RunConfig, loaded: Loaded) -> dict[str, Any] | None:
    """The checkpoint of the method, if it has one."""
    from bench.models import artifacts

    found = artifacts.find(cfg.method, loaded.name, loaded.revision, cfg.paths)
    return found.facts() if found else None


def write(
    folder: Path,
    experiment: str,
    cfg: RunConfig,
    config: LosslessConfig | ServedConfig,
    loaded: Loaded,
    result: dict[str, Any],
    begin: datetime,
    seconds: float,
) -> None:
    """``manifest.json`` and ``result.json`` in ``folder``."""
    from bench.measure.manifest import circumstances
    from bench.utils import redact

    folder.mkdir(parents=True, exist_ok=True)
    manifest = {
        "experiment": experiment,
        "lab": asdict(config),
        "config": defining(cfg),
        **({"part": part} if (part := _part(cfg, loaded)) else {}),
        "argv": redact.argv(["bench", "lossless", *sys.argv[1:]]),
        **circumstances(loaded, begin, seconds),
    }
    files.write_entries(folder / "manifest.json", redact.tree(manifest))
    files.write_entries(folder / "result.json", result)


def render(experiment: str, result: dict[str, Any], folder: Path, cfg: RunConfig) -> str:
    """The result as text."""
    table = {"greedy": _greedy, "sampling": rules_table, "rounds": rounds_table, "joint": _joint}[experiment]
    verdict = "as promised" if result["passed"] else "NOT as promised"
    head = f"{cfg.model['name']}   {experiment}   method {cfg.method['name']}"
    return "\n".join([head, "", *table(result), "", f"RESULT: {verdict}     {shown(folder)}/"])


_GREEDY = {
    "tokens": "{tokens}",
    "same": "{same}",
    "near-ties": "{near_tie}",
    "violations": "{violation}",
    "first differs": "{first}",
    "prompt": "{prompt:.40}",
}
_RULES = {
    "rule": "{rule}",
    "std deviation": "{standard_deviation:.3e}",
    "expected": "{expected_deviation:.3e}",
    "of shown": "{standard_deviation_shown:.2e}",
    "exp. of shown": "{expected_deviation_shown:.2e}",
    "TV": "{total_variation:.4f}",
    "smallest p": "{smallest_p:.2e}",
    "failed": "{failed} of {cells}",
    "verdict": "{verdict}",
}
_ROUNDS = {
    "rule": "{rule}",
    "kept": "{kept:.3f}",
    "TV": "{total_variation:.4f}",
    "expected": "{expected_total_variation:.4f}",
    "first token p": "{smallest_first_p:.2e}",
    "smallest p": "{smallest_p:.2e}",
    "failed": "{failed} of {cells}",
    "verdict": "{verdict}",
}
_JOINT = {
    "T": "{temperature:g}",
    "continuations": "{continuations}",
    "mass": "{mass:.3f}",
    "TV": "{total_variation:.4f}",
    "expected": "{expected_total_variation:.4f}",
    "p": "{p_value:.3g}",
    "prompt": "{prompt:.40}",
}
_VERDICTS = {
    (True, True): "exact: passes",
    (True, False): "exact: FAILS",
    (False, True): "wrong rule: caught",
    (False, False): "wrong rule: MISSED",
}  # by (exact, as it should)


def _greedy(result: dict[str, Any]) -> list[str]:
    rows = []
    for row in result["prompts"]:
        first = "-" if row["first_divergence"] is None else row["first_divergence"]
        rows.append(row | {"same": "yes" if row["identical"] else "no", "first": first})
    return [
        *_table(_GREEDY, rows),
        f"  {result['identical']} of {len(rows)} texts identical over {result['tokens']} tokens; "
        f"{result['violations']} tokens outside the near-tie gap of {result['near_tie_gap']:g}",
    ]


def rules_table(result: dict[str, Any]) -> list[str]:
    """The table of a sampling experiment, as lines: the first token."""
    rest = "Std deviation: over the whole vocabulary; of shown: over the most likely tokens, those of the bar charts."
    return [*_table(_RULES, _with_verdicts(result)), f"  {rest}", _bound(result)]


def rounds_table(result: dict[str, Any]) -> list[str]:
    """The table of an experiment with drafts of several levels, as lines: the first tokens together."""
    rest = "Kept: drafted tokens per round; smallest p: of all tokens together; first token p: of the first alone."
    return [*_table(_ROUNDS, _with_verdicts(result)), f"  {rest}", _bound(result)]


def _with_verdicts(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [row | {"verdict": _VERDICTS[row["exact"], row["as_it_should"]]} for row in result["rules"]]


def _bound(result: dict[str, Any]) -> str:
    return f"  A cell fails when p <= {result['bound']:.2e} (all exact tests together)."


def _joint(result: dict[str, Any]) -> list[str]:
    lines = _table(_JOINT, result["cells"])
    return lines if all(row["exact"] for row in result["cells"]) else [*lines, "  A wrong rule: it must be rejected."]


def _table(columns: dict[str, str], rows: list[dict[str, Any]]) -> list[str]:
    """Columns of words to the left, of numbers to the right."""
    cells = [[form.format(**row) for form in columns.values()] for row in rows]
    numbers = [place for place, name in enumerate(columns) if name not in ("rule", "prompt", "verdict")]
    return [f"  {line}" for line in tables.aligned(list(columns), cells, numbers).splitlines()]


def shown(path: Path) -> str:
    """Relative to the current folder if possible."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return path.name
