"""``python -m bench list methods``: what each method promises and needs, and whether it can run here."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

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
    rows, refused = [], []
    for name in compose.every_group()["method"]:
        cfg = compose.compose([*words, f"method={name}"])
        kind = instantiate.method_class(cfg.method)
        if found := preconditions.check(cfg, known):
            refused.append((name, " ".join(found), name))
        ready = "no" if found else "yes"
        rows.append([name, kind.family.replace("_", "-"), kind.guarantee.value, kind.needs, ready])
    header = [*_HEADER, f"runs on {compose.compose(list(words)).model['name']}"]
    texts = (f"{', '.join(names)}: {reason}" for reason, names in preconditions.by_reason(refused))
    lines = (line for text in texts for line in textwrap.wrap(text, terminal.width(), subsequent_indent="    "))
    return "\n".join([tables.aligned(header, rows), "", *lines]).rstrip()
