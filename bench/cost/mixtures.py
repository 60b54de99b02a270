"""Choices among the drafts of several recorded runs, as text: perfect knowledge (``oracle``) and routing by length."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.analysis import oracle
from bench.analysis.oracle import MARK, Run
from bench.cost import what_if
from bench.errors import UserError
from bench.report import tables

if TYPE_CHECKING:
    from bench.cost.settings import WhatIfQuery


def answer(asked: WhatIfQuery) -> str:
    """The rows of ``bench.analysis.oracle`` for the runs that are named.

    Raises:
        UserError: a folder without a run, one whose rounds cannot be mixed with others, runs that share no text, or no
            cost curve.
    """
    folders = [Path(name) for name in asked.oracle or asked.route or ()]
    if len(set(folders)) < len(folders):
        raise UserError("A run can be named once only. Name different folders.")
    runs = [_read(folder) for folder in folders]
    _require_one_setting(runs)
    curve = what_if.own_curve(folders[0], runs[0].manifest) if asked.curve is None else what_if.read_curve(asked.curve)
    for run in runs[1:] if asked.curve is None and asked.oracle else ():
        what_if.own_curve(Path(run.name), run.manifest)
    price = None if asked.curve is None else curve.price
    rows = oracle.routed_rows(runs[0], runs[1], price) if asked.route else oracle.oracle_rows(runs, price)
    if not rows or (len(runs) > 1 and rows[-1]["oracle"] == oracle.LENGTH):
        raise UserError("These runs share no text. Name runs over the same prompts.")
    names = [f"{run.method}: {run.name}" for run in runs]
    told = _routes(rows) if asked.route else _oracles(rows)
    head = f"{MARK}: computed from the recorded rounds of these runs; not measured, and never ranked."
    return "\n".join([head, *names, f"curve of {curve.where}", "", textwrap.indent(told, "  "), "", *_notes(rows)])


def _read(folder: Path) -> Run:
    run = Run(str(folder), *what_if.read_run(folder))
    if reason := run.unfit():
        raise UserError(f"{folder} cannot be used: {reason}. Name another run.")
    return run


def _require_one_setting(runs: Sequence[Run]) -> None:
    """Runs are compared over one text, which one model writes."""
    for what, key in (("model", "model"), ("data set", "dataset")):
        found = sorted({str(run.manifest[key]["name"]) for run in runs})
        if len(found) > 1:
            raise UserError(f"All runs must have the same {what}, got {', '.join(found)}. Name others.")


def _oracles(rows: Sequence[Mapping[str, Any]]) -> str:
    header = ["oracle", "drafts of", "draft length", "tokens/round", "recorded", "speed-up", "of decoding"]
    cells = [
        [
            row["oracle"],
            row["method"] or "-",
            "varies" if row["draft_length"] is None else str(row["draft_length"]),
            f"{row['tokens_per_step']:.2f}",
            "-" if row["recorded"] is None else f"{row['recorded']:.2f}x",
            f"{row['speedup']:.2f}x",
            f"{row['decode_speedup']:.2f}x",
        ]
        for row in rows
    ]
    return tables.aligned(header, cells, range(2, len(header)))


def _routes(rows: Sequence[Mapping[str, Any]]) -> str:
    """One row per threshold, the best one marked."""
    best = max(rows, key=lambda row: row["speedup"])
    header = ["first from", "its rounds", "tokens/round", "speed-up", "at most", "of decoding", ""]
    cells = [
        [
            str(row["draft_length"]),
            f"{row['rounds'][0]:.0%}",
            f"{row['tokens_per_step']:.2f}",
            f"{row['speedup']:.2f}x",
            f"{row['most']:.2f}x",
            f"{row['decode_speedup']:.2f}x",
            "best" if row is best else "",
        ]
        for row in rows
    ]
    return tables.aligned(header, cells, range(len(header) - 1))


def _notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    last = rows[-1]
    notes = []
    if last["most"] is not None:
        notes.append(f"The better of the two alone, on the same texts: {last['recorded']:.2f}x.")
    if last["coverage"] < 1:
        notes.append(
            f"Rows over several runs cover the {last['coverage']:.0%} of the tokens before the texts of the runs part."
        )
    return notes
