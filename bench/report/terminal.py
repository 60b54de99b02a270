"""One or more runs as plain text of at most 100 columns."""

from __future__ import annotations

import os
import shlex
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.analysis import audit, metrics, oracle, ranking
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
    "kernels",
    "graphs_left",
    "sampling",
    "batch_size",
    "refill",
    "refill_queue",
    "sort_by_length",
    "prefix_cache",
    "ignore_eos",
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
        *_result(summary, shown),
        *_next(config, shown),
    ]
    return "\n".join(lines)


def leaderboard(summaries: Iterable[Mapping[str, Any]]) -> str:
    """Several runs, the fastest first, those without a rank last, and why they have none.

    Raises:
        UserError: no run, or runs that differ in what makes numbers comparable.
    """
    runs = list(summaries)
    _check_comparable(runs)
    runs = ordered(runs)
    chosen = COLUMNS | (_TRANSLATION if all(map(translates, runs)) else {})
    columns = {name: [column(run).replace(MISSING, "-") for run in runs] for name, column in chosen.items()}
    columns = {name: cells for name, cells in columns.items() if name not in _SELDOM or set(cells) != {"-"}}
    table, _ = tables.fitting(columns, width(), _LEAST, [name for name in columns if name not in _LEFT])
    head = _pack([place(runs[0]), str(runs[0].get("dataset")), how(runs[0])])
    notes = without_rank(runs)
    lines = textwrap.wrap(f"Not ranked: {'; '.join(notes)}", width(), subsequent_indent="  ") if notes else []
    return "\n".join([*head, "", table, *([""] if lines else []), *lines])


def ordered(runs: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Comparable runs, the fastest first; then those without a rank, VALID ones first and INVALID ones last."""
    reasons = {id(run): reason for run, reason in zip(runs, ranking.in_table(runs), strict=True)}

    def place_of(run: Mapping[str, Any]) -> tuple[bool, int, float]:
        known = audit.RESULTS.index(audit.result(run))
        return bool(reasons[id(run)]), known, -(metrics.headline(run)["value"] or 0.0)

    return sorted(runs, key=place_of)


def without_rank(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """VALID runs of a table that have no rank in it, each with the first reason."""
    reasons = zip(runs, ranking.in_table(runs), strict=True)
    apart = [(run, reason) for run, reason in reasons if reason and audit.result(run) == "VALID"]
    return [f"{run.get('method')} ({reason.partition('; ')[0]})" for run, reason in apart]


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
        "prompts by length" if summary.get("sort_by_length") else "",
        "prefix cached" if summary.get("prefix_cache") else "",
        "ends ignored" if summary.get("ignore_eos") else "",
        "compiled" if summary.get("compile") else "",
        "no CUDA graphs" if summary.get("graphs_left") else "",
        f"{summary['kernels']} kernels" if summary.get("kernels") else "",
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
    speedup, found = summary["speedup"], metrics.headline(summary)
    of, other = ("per token", "total") if found["of"] == "per_token" else ("total time", "per_token")
    details = [
        f"95 % {_interval(found)}",
        of if interval(found) == MISSING else f"{of}, {plural(found['n'], 'pair')}",
        f"predicted {times(summary['predicted_speedup'])}",
    ]
    beside = speedup["total"]["value"] if other == "total" else speedup.get(other)
    if beside and found["value"] and abs(beside / found["value"] - 1) > _LENGTHS_DIFFER:
        details.append(f"{'total time' if other == 'total' else 'per token'} {times(beside)}")
    if latency := speedup.get("latency"):
        details.append(f"latency {times(latency['value'])}, 95 % {_interval(latency)}")
    return _row("speed-up", times(found["value"]), details)


def _spread(summary: Mapping[str, Any]) -> list[str]:
    """How far the speed-up depends on the conversation: on those without repetition, and on the slowest."""
    speedup, floor = summary["speedup"], summary["speedup"].get("floor")
    if not floor or floor["minimum"] is None:
        return []
    details = [f"worst {times(floor['minimum'])}", f"{_share(floor['slower_share'])} of the conversations slower"]
    if (value := novel(summary)) is not None:
        return _row("novel text", times(value), [f"95 % {_interval(speedup['novel'])}", *details])
    return _row("conversations", "", details)


def novel(summary: Mapping[str, Any]) -> Number | None:
    """The speed-up on novel text; None over fewer conversations than an interval takes, which show nothing."""
    found = summary["speedup"].get("novel") or {}
    return found.get("value") if (found.get("n") or 0) >= stats.FEWEST_PAIRS else None


def _repetition(summary: Mapping[str, Any]) -> list[str]:
    """Repetition in the texts, where the method may change them."""
    found = summary.get("degeneration")
    if not found or summary["guarantee"] == "EXACT":
        return []
    own, before = found["method"], found["baseline"]
    details = [
        f"{name} {form(own[key])} (was {form(before[key])})"
        for key, name, form in (
            ("distinct_4", "distinct 4-grams", number),
            ("longest_loop", "loops of tokens", rate_number),
            ("repeated_lines", "repeated lines", _percent),
        )
    ]
    return _row("repetition", "", details)


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
    if not (found := summary.get("calibration")):
        return []
    here = found.get("measured")
    loss = [f"loss on these prompts {_loss(here)}, promised at most {here['tolerance']:.3g}"] if here else []
    return _row("promise", "", [found["explanation"], *loss])


def _loss(measured: Mapping[str, Any]) -> str:
    between = "" if measured["low"] is None else f" ({measured['low']:.3f}-{measured['high']:.3f})"
    return f"{measured['value']:.3f}{between}"


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
    details += [f"planned {planned / 2**20:.0f} MiB"] if (planned := summary.get("memory", {}).get("planned")) else []
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


def _device(summary: Mapping[str, Any]) -> list[str]:
    """Where the time of a round goes; of a plain one, where the method does not time its own."""
    if not (found := summary.get("device_time")):
        return []
    before, own = found["baseline"], found.get("method")
    shown = own or before
    details = [
        f"draft {_seconds(shown['draft_s'])}  pass {_seconds(shown['pass_s'])}  host {_seconds(shown['host_s'])}",
        f"busy {_percent(shown['busy_share'])}" + (f" (was {_percent(before['busy_share'])})" if own else ""),
    ]
    if (rate := shown["pass_bytes_per_s"]) is not None:
        peak = shown["pass_share_of_peak"]
        details.append(f"{rate / 1e9:,.1f} GB/s" + (f", {_percent(peak)} of the measured peak" if peak else ""))
    return _row("round" if own else "plain round", _seconds(shown["round_s"]), details)


def _profile(summary: Mapping[str, Any]) -> list[str]:
    """Structure of the rounds that were traced."""
    found = summary.get("profile", {}).get("method") or {}
    if not found.get("rounds"):
        return []
    details = [f"{found['operations']:.0f} operations"]
    if found["busy_share"] is not None:
        details += [f"{found['launches']:.1f} launches", f"busy {_percent(found['busy_share'])}"]
    return _row("traced round", f"{found['round_us']:,.0f} us", details)


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
    _spread,
    _steps,
    _layers,
    _promise,
    _rate,
    _device,
    _profile,
    _sentences,
    _memory,
    _ahead,
    _energy,
    _agreement,
    _quality,
    _repetition,
)


def _result(summary: Mapping[str, Any], path: str) -> Iterator[str]:
    verdict = summary.get("verdict")
    if verdict is None:
        yield f"RESULT: not judged     {path}"
        return
    outcome, reasons = audit.result(summary), audit.explained(summary)
    counted = f" - {plural(len(reasons), 'reason')}" if reasons else ""
    mark = f" {oracle.MARK}" if oracle.is_oracle(summary) else ""
    yield f"RESULT: {outcome}{mark}{counted}     {path}"
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
    found = metrics.headline(reference)
    details = [f"95 % {interval(found)}", f"measured on {place(reference).partition('(')[2].rstrip(')')}"]
    if reference["n_prompts"] != summary["n_prompts"]:
        details.append(plural(reference["n_prompts"], "prompt"))
    if reference.get("max_new_tokens") != summary.get("max_new_tokens"):
        details.append(f"up to {reference['max_new_tokens']} tokens each")
    return _row("reference", times(found["value"]), details)


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


def _identical(run: Mapping[str, Any]) -> str:
    """Share of the texts that are the baseline's to the token, of methods that promise it."""
    return _share((run.get("agreement") or {}).get("identical_to_baseline")) if run["guarantee"] == "EXACT" else "-"


COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "method": lambda run: str(run.get("method")),
    "guarantee": lambda run: str(run["guarantee"]).replace("INDEPENDENT_MODEL", "INDEPENDENT"),
    "speed-up": lambda run: times(metrics.headline(run)["value"]),
    "95 %": lambda run: interval(metrics.headline(run)),
    "novel": lambda run: times(novel(run)),
    "worst": lambda run: times((run["speedup"].get("floor") or {}).get("minimum")),
    "slower": lambda run: _share((run["speedup"].get("floor") or {}).get("slower_share")),
    "tokens/step": lambda run: number(run["tokens_per_step"]),
    "tokens/s": lambda run: rate_number(run["tokens_per_s"]),
    "memory": lambda run: _quantity(run["peak_memory_bytes"], ".0f", " MiB", scale=2**20),
    "agreement": lambda run: _percent((run.get("agreement") or {}).get("exact")),
    "identical": _identical,
    "result": lambda run: f"{audit.result(run)} {oracle.MARK}" if oracle.is_oracle(run) else audit.result(run),
}
_TRANSLATION: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "BLEU": lambda run: number(run["quality"]["bleu"]),
    "was": lambda run: number(run["baseline"]["quality"].get("bleu")),
    "sentences/s": lambda run: rate_number(run.get("prompts_per_s")),
}
_LEFT = ("method", "guarantee", "result")
_SELDOM = ("novel", "worst", "slower", "identical")  # left out where no run has them
# Left out in this order where a table would be too wide.
_LEAST = ("memory", "identical", "slower", "tokens/s", "worst", "tokens/step", "agreement")


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


def _share(share: Number | None) -> str:
    return _quantity(share, ".0f", " %", scale=0.01)


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
