"""``python -m bench.cost model=...``: what rounds of a model cost on this machine, and what that makes of a method.

The grid is measured in ``bench.cost.measure``, recorded by ``bench.cost.records``, set against the hardware's limits in
``bench.cost.roofline``; ``what-if`` (``bench.cost.what_if``) puts recorded acceptance and a recorded curve together. Here is the
command line. Nothing here imports torch before something is measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from bench.config import compose
from bench.config.typecheck import check_arguments, did_you_mean
from bench.cost.settings import Grid, Question
from bench.errors import INTERRUPTED, OK, UserError, report_failure
from bench.report.terminal import plural

_HELP = """\
What rounds of a model cost on this machine: time over nodes, rows and context; drafts; the hardware's own limits.

Try:
  python -m bench.cost model=smollm2                               the verify-cost curve, in some minutes
  python -m bench.cost model=smollm2 method=prompt_lookup          and what a proposal of the method costs
  python -m bench.cost model=random model.like=llama3_8b           the curve of a large model without its weights
  python -m bench.cost what-if results/RUN                         a run's speed-up as its own curve predicts it
  python -m bench.cost what-if results/RUN curve=results/costs/ID batch=1,4,16      on another device or batch size
  python -m bench.cost what-if results/RUN gamma=2,4,8             for other draft lengths of a chain

Settings of a measurement:
  nodes=[1,2,4,8,16,32,64]   scored nodes per row
  batches=[1,2,4,8,16,32]    rows in lockstep
  contexts=[128,512,2048]    committed tokens per row
  repeats=7                  timed rounds per point, interleaved over the whole grid
  matrix=N                   rows of the square product that measures the peak; left out: 2048, on a GPU 8192
  prompts=8                  prompts whose drafts are timed, of dataset=NAME, max_new_tokens each
  and method, model, dataset, sampling, hardware, paths and seed as in python -m bench
  --fresh                    forget what was measured before for this model and machine

Settings of a prediction:
  curve=FOLDER               a folder of this command, or of a run; left out: the run's own curve
  batch=N[,N]                rows in lockstep; left out: as recorded
  gamma=N[,N]                draft length of a chain; left out: the recorded rounds, priced one by one
  draft_ms=X                 time of a proposal there; left out: from the curve's folder, else as recorded

An interrupted measurement goes on with the same command. Exit codes: 0 fine, 1 failed, 2 bad input, 130 interrupted."""

WHAT_IF = "what-if"
FRESH = "--fresh"
_KEPT = "What was measured is kept; the same command goes on"
_OF_A_RUN = ("method", "model", "dataset", "sampling", "hardware", "tracker", "paths", "seed", "max_new_tokens")
_MORE_OF_A_RUN = ("max_context",)
_LISTS = frozenset({"nodes", "batches", "contexts", "batch", "gamma"})


def main(argv: Sequence[str] | None = None) -> int:
    """Measure or predict; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if "-h" in words or "--help" in words:
            return _show(_HELP)
        if words and words[0] == WHAT_IF:
            return _predict(words[1:])
        return _measure(words)
    except KeyboardInterrupt:
        print(f"Interrupted. {_KEPT}.", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        return report_failure(error)


def _measure(words: Sequence[str]) -> int:
    grid, overrides, fresh = split(words)
    named = any(word.startswith("method=") for word in overrides)
    cfg = compose.compose(overrides if named else ["method=autoregressive", *overrides], costs_only=True)
    if named and cfg.method["name"] == "autoregressive":
        raise UserError("method=autoregressive drafts nothing; its round is the curve itself. Leave method=NAME out.")
    from bench.config import instantiate

    instantiate.check(cfg)
    from bench.cost.measure import run
    from bench.cost.records import read_summary

    path = run(cfg, grid, method=named, fresh=fresh)
    return _show(render(read_summary(path), path))


def _predict(words: Sequence[str]) -> int:
    from bench.cost.what_if import answer

    return _show(answer(question(words)))


def _show(text: str) -> int:
    print(text)
    return OK


# -------------------------------------------------------------------------------------------------- the command line


def split(words: Sequence[str]) -> tuple[Grid, list[str], bool]:
    """The grid, the words that configure model, machine and method, and whether to begin anew.

    Raises:
        UserError: an unknown setting or option, a value of the wrong type.
    """
    own = [field.name for field in fields(Grid)]
    settings: dict[str, Any] = {}
    overrides: list[str] = []
    for word in words:
        key, equals, value = word.partition("=")
        if word == FRESH:
            continue
        if equals and key in own:
            settings[key] = _read(key, value)
        elif key.lstrip("+~").split(".")[0] in (*_OF_A_RUN, *_MORE_OF_A_RUN) and equals:
            overrides.append(word)
        else:
            raise _unknown(word, key, (*own, *_OF_A_RUN))
    return Grid(**_checked(Grid, settings)), overrides, FRESH in words


def question(words: Sequence[str]) -> Question:
    """What ``what-if`` was asked.

    Raises:
        UserError: no run, an unknown setting, a value of the wrong type.
    """
    own = [field.name for field in fields(Question) if field.name != "run"]
    settings: dict[str, Any] = {}
    folders: list[str] = []
    for word in words:
        key, equals, value = word.partition("=")
        if equals and key in own:
            settings[key] = Path(value) if key == "curve" else _read(key, value)
        elif equals or word.startswith("-"):
            raise _unknown(word, key, own)
        else:
            folders.append(word)
    if len(folders) != 1:
        raise UserError(
            f"what-if takes the folder of one run, and {len(folders)} came. Name one: "
            "python -m bench.cost what-if results/RUN"
        )
    return Question(run=Path(folders[0]), **_checked(Question, settings, provided={"run"}))


def _read(key: str, value: str) -> Any:
    """A value as YAML reads it; ``1,4`` is a list."""
    import yaml

    try:
        return yaml.safe_load(f"[{value}]" if "," in value and not value.startswith("[") else value)
    except yaml.YAMLError:
        raise UserError(
            f"{key} came as '{value}'; it cannot be read. Set {key}=VALUE or {key}=[VALUE,VALUE]."
        ) from None


def _checked(kind: type, settings: Mapping[str, Any], provided: Collection[str] = ()) -> dict[str, Any]:
    """Settings of the right types; a single number stands for a list of one."""
    alone = {key for key, value in settings.items() if isinstance(value, int) and key in _LISTS}
    listed = {key: [value] if key in alone else value for key, value in settings.items()}
    checked = check_arguments(kind, listed, provided=provided)
    return {key: tuple(value) if isinstance(value, list) else value for key, value in checked.items()}


def _unknown(word: str, key: str, known: Iterable[str]) -> UserError:
    if "=" not in word:
        hint = did_you_mean(word, (WHAT_IF, FRESH)) or " A setting is written key=value."
        return UserError(f"Cannot read '{word}'.{hint} (python -m bench.cost --help)")
    if key == "batch_size":
        return UserError("batch_size does not matter here: batches=[...] are measured. Leave it out.")
    return UserError(f"Unknown setting '{key}'.{did_you_mean(key, known)} (python -m bench.cost --help)")


# ------------------------------------------------------------------------------------------------------- the report


def render(summary: Mapping[str, Any], path: Path) -> str:
    """A cost record as text: limits, curves, drafts, and what failed."""
    machine = ", ".join([summary["hardware"], summary["dtype"], plural(summary["threads"], "thread")])
    place = f"{summary['model']['name']}   {machine}"
    parts: list[Callable[[Mapping[str, Any]], list[str]]] = [_peak_lines, _curve_lines, _draft_lines, _failed_lines]
    lines = [place, *(line for part in parts for line in part(summary))]
    return "\n".join([*lines, "", f"{path}/"])


def _peak_lines(summary: Mapping[str, Any]) -> list[str]:
    from bench.cost import roofline

    if (limits := roofline.limits(summary["peaks"])) is None:
        return []
    share = [p["bandwidth_utilisation"] for p in summary["points"] if (p["batch"], p["nodes"]) == (1, 1)]
    single = f"; one row, one node: {max(share):.0%} of the bandwidth" if share else ""
    return [f"measured limits: {limits}{single}"]


def _curve_lines(summary: Mapping[str, Any]) -> list[str]:
    """One table per context: rows are nodes, columns are batch sizes, cells milliseconds and cost in single nodes."""
    points = {(p["context"], p["nodes"], p["batch"]): p for p in summary["points"]}
    contexts, nodes, batches = (sorted({key[i] for key in points}) for i in range(3))
    lines = []
    for context in contexts:
        lines += ["", f"round in ms at {context:,} tokens of context, and how many rounds of one node it costs"]
        lines.append("  nodes" + "".join(f"{plural(batch, 'row'):>15}" for batch in batches))
        for count in nodes:
            cells = (_cell(points, context, count, batch) for batch in batches)
            lines.append(f"  {count:>5}" + "".join(f"{cell:>15}" for cell in cells))
    return lines


def _cell(points: Mapping[tuple[int, int, int], Mapping[str, Any]], context: int, nodes: int, batch: int) -> str:
    found, single = points.get((context, nodes, batch)), points.get((context, 1, batch))
    if found is None:
        return "-"
    cost = f" {found['seconds'] / single['seconds']:6.2f}" if single else ""
    return f"{found['seconds'] * 1e3:,.2f}{cost}"


def _draft_lines(summary: Mapping[str, Any]) -> list[str]:
    lines = ["", "proposals in ms, mean and median"] if summary["drafts"] else []
    for found in summary["drafts"]:
        times = f"{found['seconds'] * 1e3:8.3f} {found['median'] * 1e3:8.3f}"
        lines.append(
            f"  {found['method']['name']:24} {plural(found['batch'], 'row'):>8} {times}   "
            f"{found['passes']:.1f} passes, {found['rounds']:,} rounds"
        )
    return lines


def _failed_lines(summary: Mapping[str, Any]) -> list[str]:
    lines = ["", "not measured:"] if summary["failed"] else []
    for failed in summary["failed"]:
        where = ", ".join(f"{key} {value}" for key, value in failed.items() if key != "error")
        lines.append(f"  {where}: {failed['error']}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
