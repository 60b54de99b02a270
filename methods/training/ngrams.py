"""Words of a text and the runs of them, by which texts are compared."""

from __future__ import annotations

import re

_WORD = re.compile(r"[^\W_]+")


def words(text: str) -> list[str]:
    """Letters and digits in a row, in lower case."""
    return _WORD.findall(text.lower())


def ngrams(text: str, count: int) -> set[str]:
    """All runs of ``count`` words; none crosses the end of a line, so a task and its text have none in common."""
    found = (words(line) for line in text.splitlines())
    return {" ".join(line[start : start + count]) for line in found for start in range(len(line) - count + 1)}
