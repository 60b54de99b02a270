"""Loops, repeated lines and distinct 4-grams of answers."""

from __future__ import annotations

import pytest

from bench.analysis.degeneration import degeneration, longest_loop
from tests.helpers.sample_rows import row


@pytest.mark.parametrize(
    ("ids", "tokens"),
    [
        ([], 0),
        ([1, 2, 3, 4], 0),
        ([1, 1], 2),
        ([9, 1, 2, 3, 1, 2, 3, 1, 8], 7),  # a period of 3, cut short in its third time
        ([1, 2, 3, 1, 2, 9], 0),  # no period is repeated as a whole
        ([*range(64), *range(64)], 128),
        ([*range(65), *range(65)], 0),  # longer periods are not searched for
        ([5, 5, 5, 7, 8, 7, 8, 7, 8], 6),
    ],
)
def test_longest_loop(ids: list[int], tokens: int) -> None:
    assert longest_loop(ids) == tokens


def test_each_answer_is_judged_by_itself() -> None:
    def written(arm: str, prompt: str, ids: list[int], text: str) -> object:
        return row(arm, prompt, ms=[1] * len(ids), output_ids=ids, text=text)

    samples = [
        written("method", "1/1", [1, 2, 1, 2, 1, 2], "a\n\na \nb"),
        written("method", "2/1", [1, 2, 1, 2, 3, 4], "a"),  # what another answer said is no repetition
        written("baseline", "1/1", [1, 2, 3], "\n"),
        row("method", "3/1", ms=[1] * 4, output_ids=[1] * 4, text="a\na", error="x"),
        row("method", "4/1", ms=[1] * 4, output_ids=[1] * 4, text="a\na", phase="warmup"),
    ]
    found = degeneration(samples)  # type: ignore[arg-type]
    # 1 2 1 2, 2 1 2 1, 1 2 1 2 and 1 2 1 2, 2 1 2 3, 1 2 3 4: 5 of 6
    assert found["method"] == {"distinct_4": 5 / 6, "longest_loop": 5.0, "repeated_lines": 0.25}
    assert found["baseline"] == {"distinct_4": None, "longest_loop": 0.0, "repeated_lines": None}
