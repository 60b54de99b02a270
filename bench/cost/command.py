"""``python -m bench cost``: the cost of a forward pass on this machine, and what that predicts for a method.

``measure`` measures the grid, ``records`` records it, ``roofline`` compares it with the limits of the hardware,
``what_if`` combines recorded acceptance with a recorded curve, ``mixtures`` the drafts of several runs. Nothing here
imports torch before a measurement.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.config import compose, options
from bench.config.typecheck import did_you_mean
from bench.cost.settings import Grid, WhatIfQuery
from bench.errors import OK, UserError
from bench.report import tables
from bench.report.terminal import plural

WHAT_IF = "what-if"
FRESH = "--fresh"
_OF_A_RUN = ("method", "model", "dataset", "sampling", "hardware", "tracker", "paths", "seed", "max_new_tokens")
_SUMMARY = """\
Measures the time of a forward pass over nodes, rows and context; with method=NAME also of its drafts; and the limits
of the hardware. what-if predicts the speed-up of a recorded run with another curve, batch size or draft length; with
oracle= and route= that of choices among the drafts of several runs, which no method makes.

method, model, dataset, sampling, hardware, paths, seed and max_new_tokens are as in python -m bench.
--fresh discards earlier measurements of this model on this machine; without it, the same command resumes them."""
_EXAMPLES = (
    "python -m bench cost model=smollm2                               the verify-cost curve, in some minutes",
    "python -m bench cost model=smollm2 method=prompt_lookup          and the cost of the method's drafts",
    "python -m bench cost model=random model.like=llama3_8b           the curve of a large model without its weights",
    "python -m bench cost what-if results/RUN                         a run's speed-up, predicted by its own curve",
    "python -m bench cost what-if results/RUN curve=results/costs/ID batch=1,4,16      on another device or batch size",
    "python -m bench cost what-if results/RUN gamma=2,4,8             for other draft lengths of a chain",
    "python -m bench cost what-if oracle=results/A,results/B          what the drafts of these runs would allow",
    "python -m bench cost what-if route=results/A,results/B           A's draft where it is long enough, else B's",
)


def help_text() -> str:
    return options.help_text(
        "cost [key=value ...] [--fresh]\n       python -m bench cost what-if RUN [key=value ...]",
        _SUMMARY,
        _EXAMPLES,
        {"Options": Grid, "Options of what-if": WhatIfQuery},
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure or predict; returns the exit code."""
    return options.command(_main, help_text, argv, measures=False)


def _main(words: list[str]) -> int:
    if words and words[0] == WHAT_IF:
        from bench.cost import acceptance, mixtures, what_if

        asked = query(words[1:])
        if asked.run and asked.run.is_file():
            print(acceptance.answer(asked))
        else:
            print(what_if.answer(asked) if asked.run else mixtures.answer(asked))
    else:
        _measure(words)
    return OK


def _measure(words: Sequence[str]) -> None:
    grid, overrides, fresh = split(words)
    named = any(word.startswith("method=") for word in overrides)
    cfg = compose.compose(overrides if named else ["method=autoregressive", *overrides])
    if named and cfg.method["name"] == "autoregressive":
        raise UserError("method must be one that drafts, got autoregressive. Leave method=NAME out.")
    from bench.config import instantiate

    instantiate.check(cfg)
    from bench.cost.measure import run
    from bench.cost.records import read_summary
    from bench.measure import preconditions

    preconditions.require(preconditions.check(cfg, speed_only=True))
    path = run(cfg, grid, method=named, fresh=fresh)
    print(render(read_summary(path), path))


def split(words: Sequence[str]) -> tuple[Grid, list[str], bool]:
    """The grid, the words that configure model, machine and method, and whether to discard earlier measurements.

    Raises:
        UserError: an unknown setting or option, a value of the wrong type.
    """
    grid, others = options.parse(Grid, [word for word in words if word != FRESH])
    known = (*options.keys(Grid), *_OF_A_RUN, "max_context")
    for word in others:
        key, equals, _ = word.partition("=")
        if key == "batch_size":
            raise UserError("batch_size has no effect here: batches=[...] are measured. Leave it out.")
        if not equals and (hint := did_you_mean(word, (WHAT_IF, FRESH))):
            raise UserError(f"Cannot read '{word}'.{hint} (python -m bench cost --help)")
        if not equals or key.lstrip("+~").split(".")[0] not in known:
            options.refuse([word], "cost", known)
    return grid, others, FRESH in words


def query(words: Sequence[str]) -> WhatIfQuery:
    """The query of ``what-if``.

    Raises:
        UserError: no run, an unknown setting, a value of the wrong type.
    """
    folders = [word for word in words if "=" not in word and not word.startswith("-")]
    several = any(word.startswith(("oracle=", "route=")) for word in words)
    if len(folders) != 1 and not (several and not folders):
        raise UserError(
            f"what-if needs the folder of one run, got {len(folders)}: python -m bench cost what-if results/RUN"
        )
    run = Path(folders[0]) if folders else None
    found, others = options.parse(WhatIfQuery, (word for word in words if word not in folders), run=run)
    options.refuse(others, f"cost {WHAT_IF}", options.keys(WhatIfQuery))
    return found


# ------------------------------------------------------------------------------------------------------- the report


def render(summary: Mapping[str, Any], path: Path) -> str:
    """A cost record as text: limits, curves, drafts, and what failed."""
    machine = ", ".join([summary["hardware"], summary["dtype"], plural(summary["threads"], "thread")])
    parts = (
        _limits(summary),
        *_curves(summary),
        _invariance(summary),
        _drafts(summary),
        _failures(summary),
        f"{path}/",
    )
    return "\n\n".join([f"{summary['model']['name']}   {machine}", *filter(None, parts)])


def _limits(summary: Mapping[str, Any]) -> str:
    from bench.cost import roofline

    if (limits := roofline.limits(summary["peaks"])) is None:
        return ""
    share = [p["bandwidth_utilisation"] for p in summary["points"] if (p["batch"], p["nodes"]) == (1, 1)]
    single = f"; one row, one node: {max(share):.0%} of the bandwidth" if share else ""
    return f"measured limits: {limits}{single}"


def _curves(summary: Mapping[str, Any]) -> list[str]:
    """One table per context: nodes by batch size; milliseconds, and the cost relative to a round of one node."""
    points = {(p["context"], p["nodes"], p["batch"]): p["seconds"] for p in summary["points"]}
    contexts, nodes, batches = (sorted({key[i] for key in points}) for i in range(3))

    def cell(context: int, count: int, batch: int) -> str:
        seconds, single = (points.get((context, n, batch)) for n in (count, 1))
        return "-" if seconds is None else f"{seconds * 1e3:,.2f}" + (f" {seconds / single:6.2f}" if single else "")

    found = []
    for context in contexts:
        rows = [[str(count), *(cell(context, count, batch) for batch in batches)] for count in nodes]
        title = f"round in ms at {context:,} tokens of context, and its cost in rounds of one node"
        found.append(f"{title}\n{_table(['nodes', *(plural(batch, 'row') for batch in batches)], rows)}")
    return found


def _invariance(summary: Mapping[str, Any]) -> str:
    from bench.cost import invariance

    found = summary.get("invariance")
    return invariance.render(found) if found else ""


def _drafts(summary: Mapping[str, Any]) -> str:
    rows = [
        [
            found["method"]["name"],
            str(found["batch"]),
            f"{found['seconds'] * 1e3:.3f}",
            f"{found['median'] * 1e3:.3f}",
            f"{found['passes']:.1f}",
            f"{found['rounds']:,}",
        ]
        for found in summary["drafts"]
    ]
    header = ["method", "rows", "mean", "median", "passes", "rounds"]
    return f"proposals in ms\n{_table(header, rows, first=1)}" if rows else ""


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], first: int = 0) -> str:
    """Columns from ``first`` on are numbers."""
    return textwrap.indent(tables.aligned(header, rows, range(first, len(header))), "  ")


def _failures(summary: Mapping[str, Any]) -> str:
    lines = ["not measured:"] if summary["failed"] else []
    for failed in summary["failed"]:
        where = ", ".join(f"{key} {value}" for key, value in failed.items() if key != "error")
        lines.append(f"  {where}: {failed['error']}")
    return "\n".join(lines)
