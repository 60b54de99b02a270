"""``python -m bench list methods``: what each method promises and needs, and whether it can run here."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from bench.config import compose, instantiate
from bench.measure import preconditions
from bench.report import tables, terminal

_HEADER = ("method", "family", "guarantee", "needs")


def methods(words: Sequence[str] = ()) -> str:
    """A table of the methods of conf/method, and below it why some of them cannot run.

    Args:
        words: settings to check them with, such as ``model=multi30k_4_4``.

    Raises:
        UserError: a wrong word.
    """
    known: preconditions.Known = {}
    rows, reasons = [], {}
    for name in compose.every_group()["method"]:
        cfg = compose.compose([*words, f"method={name}"])
        kind = instantiate.method_class(cfg.method)
        if found := preconditions.check(cfg, known):
            reasons[name] = " ".join(found)
        ready = "no" if found else "yes"
        rows.append([name, kind.family.replace("_", "-"), kind.guarantee.value, kind.needs, ready])
    header = [*_HEADER, f"runs on {compose.compose(list(words)).model['name']}"]
    return "\n".join([tables.aligned(header, rows), "", *_grouped(reasons)]).rstrip()


def _grouped(reasons: dict[str, str]) -> Iterator[str]:
    """One line for all methods with the same reason."""
    groups: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        groups.setdefault(reason.replace(f"method={name}", "method=..."), []).append(name)
    for reason, names in groups.items():
        text = f"{', '.join(names)}: {reasons[names[0]] if len(names) == 1 else reason}"
        yield from textwrap.wrap(text, terminal.width(), subsequent_indent="    ")
