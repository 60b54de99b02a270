"""One or more runs as plain text of at most 100 columns."""

from __future__ import annotations

import os
import shlex
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.config import overrides
from bench.errors import UserError
from bench.report import tables
from bench.utils import stats

_WIDEST, _NARROWEST = 100, 60
MISSING = "not measured"
JOIN_KEYS = (
    "schema_version",
    "model",
    "model_revision",
    "dataset",
    "dataset_revision",
    "hardware",
    "dtype",
    "threads",
    "compile",
    "sampling",
    "batch_size",
    "refill",
    "refill_queue",
    "max_new_tokens",
)
_LABEL, _GAP = 16, "   "
Number = float | int
_LENGTHS_DIFFER = 0.01  # from here on the speed-up per token is shown, too


def width() -> int:
    """Characters of a line: those of the terminal, within limits; 100 where there is none."""
    return max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size((_WIDEST, 24)).columns))


def join_value(summary: Mapping[str, Any], key: str) -> Any:
    """The value that comparable runs share; of a data set its content."""
    found = summary.get(key)
    return str(found.get("content"))[:12] if key == "dataset_revision" and isinstance(found, Mapping) else found


def render(
    summary: Mapping[str, Any],
    path: str | Path,
    config: Mapping[str, Any] | None = None,
    reference: Mapping[str, Any] | None = None,
) -> str:
    """The table of one run.

    Args:
        summary: its summary.json.
        path: its folder.
        config: its configuration, for the commands to run next.
        reference: summary of the project's own record of such a run, perhaps on another machine.
    """
    shown = _shown(path)
    lines = [
        *_pack([place(summary), f"{summary.get('dataset')}: {plural(summary['n_prompts'], 'prompt')}", how(summary)]),
        f"{summary.get('method')} vs autoregressive, interleaved{_repeats(summary)}",
        "",
        *(line for row in _ROWS for line in row(summary)),
        *(_reference(reference, summary) if reference else []),
        "",
        *_result(summary.get("verdict"), shown),
        *_next(config, shown),
    ]
    return "\n".join(lines)


def leaderboard(summaries: Iterable[Mapping[str, Any]]) -> str:
    """Several runs, the fastest first, INVALID ones last.

    Raises:
        UserError: no run, or runs that differ in what makes numbers comparable.
    """
    runs = list(summaries)
    _check_comparable(runs)
    runs.sort(key=lambda run: (not _is_valid(run), -(run["speedup"]["total"]["value"] or 0.0)))
    columns = COLUMNS | (_TRANSLATION if all(map(translates, runs)) else {})
    right = [place for place, name in enumerate(columns) if name not in _LEFT]
    cells = [[shown.replace(MISSING, "-") for shown in (column(run) for column in columns.values())] for run in runs]
    head = _pack([place(runs[0]), str(runs[0].get("dataset")), how(runs[0])])
    return "\n".join([*head, "", tables.aligned(list(columns), cells, right)])


# ---------------------------------------------------------------------------------------------------------- one run


def place(summary: Mapping[str, Any]) -> str:
    threads = summary.get("threads")
    facts = [summary.get("hardware"), summary.get("dtype"), None if threads is None else plural(threads, "thread")]
    known = ", ".join(str(fact) for fact in facts if fact)
    return f"{summary.get('model')} ({known})" if known else str(summary.get("model"))


def how(summary: Mapping[str, Any]) -> str:
    kinds = [
        f"batch {summary.get('batch_size') or MISSING}",
        "refilled" if summary.get("refill") else "",
        f"queues of {queue} or more" if (queue := summary.get("refill_queue")) else "",
        "compiled" if summary.get("compile") else "",
    ]
    return ", ".join([*_sampling(summary.get("sampling")), *filter(None, kinds)])


def _sampling(sampling: Any) -> Iterator[str]:
    if not isinstance(sampling, Mapping):
        yield from [str(sampling)] if sampling else []
    elif not sampling.get("temperature"):
        yield "greedy"
    else:
        yield f"temperature {sampling['temperature']:g}"
        yield from [f"top-k {sampling['top_k']}"] if sampling.get("top_k") else []
        yield from [f"top-p {sampling['top_p']:g}"] if sampling.get("top_p", 1.0) < 1 else []


def _repeats(summary: Mapping[str, Any]) -> str:
    return f", {summary['n_repeats']} repeats" if summary.get("n_repeats", 1) > 1 else ""


def _speed_up(summary: Mapping[str, Any]) -> list[str]:
    speedup, total = summary["speedup"], summary["speedup"]["total"]
    details = [
        f"95 % {_interval(total)}",
        "total time" if interval(total) == MISSING else f"total time, {plural(total['n'], 'pair')}",
        f"predicted {times(summary['predicted_speedup'])}",
    ]
    per_token = speedup.get("per_token")
    if per_token and total["value"] and abs(per_token / total["value"] - 1) > _LENGTHS_DIFFER:
        details.append(f"per token {times(per_token)}")
    if latency := speedup.get("latency"):
        details.append(f"latency {times(latency['value'])}, 95 % {_interval(latency)}")
    return _row("speed-up", times(total["value"]), details)


def _steps(summary: Mapping[str, Any]) -> list[str]:
    if summary["acceptance_rate"] is None:
        return _row("tokens/step", number(summary["tokens_per_step"]), ["nothing was drafted"])
    at = " ".join(number(share) for share in summary["acceptance_at"][:8])
    more = " .." if len(summary["acceptance_at"]) > 8 else ""
    details = [f"acceptance {number(summary['acceptance_rate'])}", f"by position {at}{more}"]
    return _row("tokens/step", number(summary["tokens_per_step"]), details)


def _layers(summary: Mapping[str, Any]) -> list[str]:
    share = summary["layers_per_token"]
    details = ["of the target's layers", *_exits(summary)]
    return [] if share in (None, 1.0) and not details[1:] else _row("layers/token", number(share), details)


def _exits(summary: Mapping[str, Any]) -> Iterator[str]:
    """The cost of early exit."""
    facts = summary.get("method_facts") or {}
    if (cost := facts.get("layer_equivalents_per_token")) is not None:
        yield f"{cost:.1f} of {facts['layer_equivalents_of_the_model']:.1f} layer-equivalents"
        yield f"{facts['heads_per_token']:.2f} output matrices"
    if (share := facts.get("confidence_share")) is not None:
        yield f"{_percent(share)} of the time on confidence"


def _promise(summary: Mapping[str, Any]) -> list[str]:
    found = summary.get("calibration")
    return _row("promise", "", [found["explanation"]]) if found else []


def _rate(summary: Mapping[str, Any]) -> list[str]:
    details = [
        f"was {rate_number(summary['baseline_tokens_per_s'])}",
        f"TTFT {_seconds(summary['ttft_s']['mean'])}  TPOT {_seconds(summary['tpot_s']['mean'])}  "
        f"p90 step {_seconds(summary['step_s']['p90'])}",
    ]
    return _row("tokens/s", rate_number(summary["tokens_per_s"]), details)


def _memory(summary: Mapping[str, Any]) -> list[str]:
    peak, before = summary["peak_memory_bytes"], summary["baseline"]["peak_memory_bytes"]
    more = None if peak is None or before is None else round((peak - before) / 2**20)  # an integer has no -0
    details = [] if more is None else [f"{more:+d} MiB against the baseline"]
    shared = {name: size for name, size in summary.get("memory", {}).items() if name in ("weights", "cache")}
    own = {name.replace("_", " "): size for name, size in summary.get("own_bytes", {}).items() if size is not None}
    details += [f"{name} {size / 2**20:.0f} MiB" for name, size in (shared | own).items()]
    return _row("memory", MISSING if peak is None else f"{peak / 2**20:.0f} MiB", details)


def _ahead(summary: Mapping[str, Any]) -> list[str]:
    """Compiled functions and captured graphs, and how many of them within measured time."""
    details = []
    for kind, count, noun in (("compiled", "functions", "compiled function"), ("graphs", "captured", "graph")):
        if found := summary.get("made_ahead", {}).get(kind):
            before, late = found["before"], found["in_all"][count] - found["before"][count]
            details.append(f"{plural(before[count], noun)} in {before['seconds']:.1f} s")
            details += [f"{late} more while measuring"] if late else []
    return _row("made ahead", "", details) if details else []


def _energy(summary: Mapping[str, Any]) -> list[str]:
    spent, before = summary["energy_j_per_token"], summary["baseline"]["energy_j_per_token"]
    return [] if spent is None else _row("energy/token", f"{spent:.3g} J", [f"was {_quantity(before, '.3g', ' J')}"])


def _agreement(summary: Mapping[str, Any]) -> list[str]:
    found = summary.get("agreement")
    if not found or found.get("exact") is None:
        return _row("agreement", MISSING, [found["reason"]] if found and found.get("reason") else [])
    count = found.get("n_violations")
    wrong = f"{found['violation']:.1%} violations".replace("%", " %") if count is None else plural(count, "violation")
    details = ["identical to the target", f"{_percent(found['near_tie'])} near-ties", wrong]
    if own := found.get("verifier"):
        details.append(f"{_percent(own['exact'])} identical to its own model")
    return _row("agreement", _percent(found["exact"]), details)


def translates(summary: Mapping[str, Any]) -> bool:
    """Whether answers are translations; only their scorer counts repetitions."""
    return {"bleu", "repetition"} <= set(summary.get("quality", {}))


def _sentences(summary: Mapping[str, Any]) -> list[str]:
    """For translations, whose prompts are sentences."""
    rate, before = summary.get("prompts_per_s"), summary["baseline"].get("prompts_per_s")
    if rate is None or not translates(summary):
        return []
    return _row(
        "sentences/s",
        rate_number(rate),
        [f"was {rate_number(before)}", f"{summary['ms_per_prompt']:.3g} ms per sentence"],
    )


def _quality(summary: Mapping[str, Any]) -> list[str]:
    scores, before = summary["quality"], summary["baseline"]["quality"]
    changes = summary.get("quality_change") or {}
    details = [
        f"{name} {number(value)} (was {number(before.get(name))}{_change(changes.get(name))})"
        for name, value in scores.items()
    ]
    signature = (summary.get("quality_notes") or {}).get("bleu") if translates(summary) else None
    signed = _row("sacreBLEU", "", [signature]) if signature else []
    return [*_row("quality", *(("", details) if details else (MISSING, []))), *signed]


def _change(found: Mapping[str, Any] | None) -> str:
    return f", change {points(found)}" if found and found["low"] is not None else ""


_ROWS: tuple[Callable[[Mapping[str, Any]], list[str]], ...] = (
    _speed_up,
    _steps,
    _layers,
    _promise,
    _rate,
    _sentences,
    _memory,
    _ahead,
    _energy,
    _agreement,
    _quality,
)


def _result(verdict: Mapping[str, Any] | None, path: str) -> Iterator[str]:
    if verdict is None:
        yield f"RESULT: not judged     {path}"
        return
    reasons = verdict["reasons"]
    outcome = "VALID" if verdict["valid"] else f"INVALID - {plural(len(reasons), 'reason')}"
    yield f"RESULT: {outcome}     {path}"
    for number, reason in enumerate(reasons, start=1):
        yield from textwrap.wrap(reason, width(), initial_indent=f"  {number}. ", subsequent_indent="     ")
    for warning in verdict.get("warnings") or []:
        yield from textwrap.wrap(f"warning: {warning}", width(), initial_indent="  ", subsequent_indent="     ")


def _next(config: Mapping[str, Any] | None, path: str) -> list[str]:
    """Commands that work as they are printed."""
    compared = {overrides.command(config, "-m", method="glob(*)"): "compare all methods"} if config else {}
    folder = [word for word in overrides.words(config) if word.startswith("paths.results=")] if config else []
    commands = compared | {shlex.join(["python", "-m", "bench", "report", *folder]): "all runs on one page"}
    commands[f"python -m bench validate {path}"] = "check the records"
    column = max((len(command) for command in commands if len(command) <= width() - 28), default=0)
    return [
        f"{'Next:' if i == 0 else '':7}{command:{column}}  {purpose}"
        for i, (command, purpose) in enumerate(commands.items())
    ]


def _reference(reference: Mapping[str, Any], summary: Mapping[str, Any]) -> list[str]:
    """What the project measured, and in what its run was different."""
    total = reference["speedup"]["total"]
    details = [f"95 % {interval(total)}", f"measured on {place(reference).partition('(')[2].rstrip(')')}"]
    if reference["n_prompts"] != summary["n_prompts"]:
        details.append(plural(reference["n_prompts"], "prompt"))
    if reference.get("max_new_tokens") != summary.get("max_new_tokens"):
        details.append(f"up to {reference['max_new_tokens']} tokens each")
    return _row("reference", times(total["value"]), details)


def _row(label: str, value: str, details: Sequence[str]) -> list[str]:
    """A label, its value and what belongs to it, wrapped under the details."""
    head = f"  {label:{_LABEL}}"
    first, *more = _pack([f"{value:8}", *details] if value else list(details), len(head))
    return [(head + first).rstrip(), *(" " * len(head) + line for line in more)]


def _pack(parts: Sequence[str], indent: int = 0) -> list[str]:
    """Fill lines with parts; a part longer than a line is wrapped."""
    room, lines = width() - indent, [""]
    for part in parts:
        for piece in [part] if len(part) <= room else textwrap.wrap(part, room):
            joined = f"{lines[-1]}{_GAP}{piece}" if lines[-1] else piece
            if len(joined) <= room:
                lines[-1] = joined
            else:
                lines.append(piece)
    return [line.rstrip() for line in lines]


# ------------------------------------------------------------------------------------------------------ several runs


def _is_valid(run: Mapping[str, Any]) -> bool:
    return bool((run.get("verdict") or {}).get("valid"))


COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "method": lambda run: str(run.get("method")),
    "guarantee": lambda run: str(run["guarantee"]).replace("INDEPENDENT_MODEL", "INDEPENDENT"),
    "speed-up": lambda run: times(run["speedup"]["total"]["value"]),
    "95 %": lambda run: interval(run["speedup"]["total"]),
    "tokens/step": lambda run: number(run["tokens_per_step"]),
    "tokens/s": lambda run: rate_number(run["tokens_per_s"]),
    "memory": lambda run: _quantity(run["peak_memory_bytes"], ".0f", " MiB", scale=2**20),
    "agreement": lambda run: _percent((run.get("agreement") or {}).get("exact")),
    "result": lambda run: "VALID" if _is_valid(run) else "INVALID",
}
_TRANSLATION: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "BLEU": lambda run: number(run["quality"]["bleu"]),
    "was": lambda run: number(run["baseline"]["quality"].get("bleu")),
    "sentences/s": lambda run: rate_number(run.get("prompts_per_s")),
}
_LEFT = ("method", "guarantee", "result")


def _check_comparable(runs: Sequence[Mapping[str, Any]]) -> None:
    if not runs:
        raise UserError("A leaderboard needs at least one run, got none. Run: python -m bench")
    differing = {key: list(dict.fromkeys(str(join_value(run, key)) for run in runs)) for key in JOIN_KEYS}
    if named := "; ".join(f"{key}: {', '.join(found)}" for key, found in differing.items() if len(found) > 1):
        raise UserError(
            f"Runs of one table must share {', '.join(JOIN_KEYS)}; these differ in {named}. Make one table for each."
        )


# ---------------------------------------------------------------------------------------------------------- numbers


def _quantity(value: Number | None, form: str, unit: str = "", scale: Number = 1) -> str:
    return MISSING if value is None else f"{value / scale:{form}}{unit}"


def number(value: Number | None) -> str:
    return _quantity(value, ".2f")


def times(value: Number | None) -> str:
    return _quantity(value, ".2f", "x")


def _percent(share: Number | None) -> str:
    return _quantity(share, ".1f", " %", scale=0.01)


def rate_number(value: Number | None) -> str:
    return _quantity(value, ".1f" if value is None or value < 1000 else ",.0f")


def _seconds(value: Number | None) -> str:
    return _quantity(value, ".2f", " s") if value is None or value >= 0.1 else f"{value * 1000:.3g} ms"


def points(found: Mapping[str, Any]) -> str:
    """A difference of two percentages with its interval."""
    span = "no interval" if found["low"] is None else f"95 % {found['low']:+.2f} to {found['high']:+.2f}"
    return f"{found['value']:+.2f}, {span}"


def interval(bounds: Mapping[str, Any]) -> str:
    """``1.15-1.44``; older records have one of fewer than 5 pairs, too, which says nothing."""
    low, high = bounds["low"], bounds["high"]
    few = (bounds.get("n") or stats.FEWEST_PAIRS) < stats.FEWEST_PAIRS
    return MISSING if low is None or high is None or few else f"{low:.2f}-{high:.2f}"


def _interval(bounds: Mapping[str, Any]) -> str:
    """As ``interval``; where there is none, with the number of pairs."""
    shown = interval(bounds)
    return f"{shown} ({plural(bounds['n'] or 0, 'pair')})" if shown == MISSING else shown


def plural(count: int, noun: str) -> str:
    """``1 row``, ``2 rows``"""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _shown(path: str | Path) -> str:
    """Relative to the current folder, if below it."""
    given = os.fspath(path).rstrip("/")
    relative = os.path.relpath(given)
    return f"{given if relative.startswith('..') else relative}/"
