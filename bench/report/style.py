"""Colour of a family, mark and line of a method, the same in every figure."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cache

import yaml

from bench.config import compose
from bench.report import leaderboard

COLOURS = {  # of seaborn's "colorblind", readable on white and on black
    "baseline": "#7f7f7f",
    "speculative": "#0173b2",
    "early exit": "#de8f05",
    "non-autoregressive": "#029e73",
    "peer": "#cc78bc",
    "other": "#d55e00",
}
_MARKS = (*"os^vDPX*ph<>d8H1234x+|_", ".", "$a$", "$b$", "$c$")
_LINES = ("-", "--", "-.", ":")


@dataclass(frozen=True)
class Style:
    """Mark and line are matplotlib's letters."""

    colour: str
    mark: str
    line: str


@cache
def style_of(method: str, family: str | None = None) -> Style:
    """The colour of the family; mark and line by the method's place in its family, or by the name of a third party's.

    A variant has the style of its method, ``bild_6_1`` that of ``bild``.

    Args:
        method: its name.
        family: of ``bench.report.leaderboard``; None for that of the method's configuration.
    """
    families = _families()
    named = max((name for name in families if method == name or method.startswith(f"{name}_")), key=len, default=method)
    known = families.get(named, "other")
    alike = [name for name, each in families.items() if each == known]
    place = alike.index(named) if named in families else zlib.crc32(method.encode())
    return Style(COLOURS[family or known], _MARKS[place % len(_MARKS)], _LINES[place % len(_LINES)])


@cache
def _families() -> dict[str, str]:
    """By method of the configuration."""
    names = compose.groups().get("method", [])
    texts = {name: compose.config_file("method", name).read_text(encoding="utf-8") for name in names}
    return {name: leaderboard.family({"method": yaml.safe_load(text)}) for name, text in texts.items()}
