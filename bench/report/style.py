"""Colour, mark and line of a method, the same in every figure."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cache

from bench.config import compose

# seaborn's "colorblind", written out: a report needs no plotting library
COLOURS = (
    "#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc", "#ca9161", "#fbafe4", "#949494", "#ece133", "#56b4e9",
)  # fmt: skip
_MARKS, _LINES = "osD^vP", ("-", "--", "-.", ":")


@dataclass(frozen=True)
class Style:
    """Mark and line are matplotlib's letters."""

    colour: str
    mark: str
    line: str


@cache
def style_of(method: str) -> Style:
    """By its place in the list of methods; for a third-party method by its name."""
    known = compose.groups().get("method", [])
    place = known.index(method) if method in known else zlib.crc32(method.encode())
    turn, colour = divmod(place, len(COLOURS))
    return Style(COLOURS[colour], _MARKS[turn % len(_MARKS)], _LINES[turn % len(_LINES)])
