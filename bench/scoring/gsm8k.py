"""GSM8K (Cobbe et al. 2021, arXiv 2110.14168): is the final number right?

Two readings of an answer, both reported since they differ by many points for models that ignore the format:
strict takes the number after the first ``####``, the mark of the data set; flexible takes the last number of
the text. Numbers are compared as numbers, so 18, 18.0, $18 and "18." are equal, which string comparison denies.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from bench.scoring.base import Scorer, percent

_SIGN = r"(?:(?<![\w)\]])-)?"  # after a number or a bracket it is a minus between two numbers
_NUMBER = re.compile(rf"{_SIGN}\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_MARKED = re.compile(rf"####\s*({_NUMBER.pattern})")


class Gsm8kScorer(Scorer):
    """Exact match of the final number; a reference is an answer of the data set, or the number alone."""

    metrics = ("exact_match_strict", "exact_match_flexible")

    def score(self, reference: Any, answer: str) -> dict[str, float]:
        marked = marked_number(str(reference))
        wanted = last_number(str(reference)) if marked is None else marked
        found = {"exact_match_strict": marked_number(answer), "exact_match_flexible": last_number(answer)}
        return {metric: percent(number is not None and number == wanted) for metric, number in found.items()}

    def notes(self) -> dict[str, str]:
        return {
            "exact_match_strict": "number after the first ####",
            "exact_match_flexible": "last number of the answer",
        }


def marked_number(text: str) -> Decimal | None:
    """The number after the first ``####``, or None."""
    found = _MARKED.search(text)
    return _decimal(found[1]) if found else None


def last_number(text: str) -> Decimal | None:
    """The last number of the text, or None."""
    found = _NUMBER.findall(text)
    return _decimal(found[-1]) if found else None


def _decimal(digits: str) -> Decimal:
    return Decimal(re.sub(r"[$,\s]", "", digits))
