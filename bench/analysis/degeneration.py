"""Repetition in what both arms wrote: how far text degenerates into loops (Holtzman et al. 2020, arXiv 1904.09751)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from bench.records.run_folder import Sample

NGRAM = 4
LONGEST_PERIOD = 64  # tokens; the time of the search grows with it
ARMS = ("method", "baseline")


def degeneration(samples: Iterable[Sample]) -> dict[str, dict[str, float | None]]:
    """Of each arm, over the measured answers of the first repeat: ``distinct_4``, ``longest_loop``, ``repeated_lines``.

    Returns:
        By arm ``distinct_4``, distinct over all 4-grams of tokens within an answer; ``longest_loop``, tokens of an
        answer in its longest loop, the mean over answers; ``repeated_lines``, share of the non-empty lines that stood
        before in the same answer. None where no answer has a 4-gram or a line, or there is no answer.
    """
    latest = {
        (row.arm, row.prompt_id): row  # an attempt that was measured again is replaced by the later one
        for row in samples
        if row.phase == "measure" and row.repeat == 0 and row.error is None
    }
    return {arm: _of_arm([row for row in latest.values() if row.arm == arm]) for arm in ARMS}


def _of_arm(rows: Sequence[Sample]) -> dict[str, float | None]:
    ngrams = [list(zip(*(row.output_ids[first:] for first in range(NGRAM)), strict=False)) for row in rows]
    lines = [[line.strip() for line in row.text.splitlines() if line.strip()] for row in rows]
    loops = [longest_loop(row.output_ids) for row in rows]
    repeated = _distinct(lines)
    return {
        "distinct_4": _distinct(ngrams),
        "longest_loop": sum(loops) / len(loops) if loops else None,
        "repeated_lines": None if repeated is None else 1.0 - repeated,
    }


def _distinct(answers: Sequence[Sequence[Any]]) -> float | None:
    """Distinct items within each answer over all items."""
    total = sum(map(len, answers))
    return sum(len(set(answer)) for answer in answers) / total if total else None


def longest_loop(ids: Sequence[int]) -> int:
    """Tokens in the longest run that repeats a period of 1 to 64 tokens at least once as a whole; 0 without one."""
    tokens, longest = np.asarray(ids), 0
    for period in range(1, min(LONGEST_PERIOD, len(tokens) // 2) + 1):
        differs = np.flatnonzero(tokens[period:] != tokens[:-period])
        ends = np.concatenate([[-1], differs, [len(tokens) - period]])
        same = int(np.diff(ends).max()) - 1
        if same >= period:
            longest = max(longest, same + period)
    return longest
