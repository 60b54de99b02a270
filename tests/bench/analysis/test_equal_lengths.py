"""The speed-up up to the end of the shorter text of each prompt."""

from __future__ import annotations

import pytest

from bench.analysis import equal_lengths
from tests.helpers.sample_rows import both, row


def test_the_longer_text_is_timed_up_to_the_end_of_the_shorter() -> None:
    found = both("1/1", {"ms": [10, 20, 30, 40]}, {"ms": [8, 12], "tokens": [1, 2]})  # 3 of 4 tokens: 60 ms against 20
    found += both("2/1", {"ms": [10, 10]}, {"ms": [5, 10], "tokens": [1, 2]})  # 2 of 3 tokens: 20 ms against 5 + 10 / 2
    assert equal_lengths.speedup(found) == pytest.approx((60 + 20) / (20 + 10))


def test_equal_texts_have_the_speed_up_of_total_time() -> None:
    found = both("1/1", {"ms": [10, 20, 30]}, {"ms": [15, 5], "tokens": [1, 2]})
    assert equal_lengths.speedup(found) == pytest.approx(60 / 20)


def test_what_cannot_be_timed_so() -> None:
    assert equal_lengths.speedup([row("method"), row("baseline", "2/1")]) is None, "no prompt of both arms"
    assert equal_lengths.speedup(both("1/1", {}, {}, batch_size=2)) is None, "rounds of a batch are not a row's own"
    failed = [*both("1/1", {"ms": [10, 10]}, {"ms": [5, 5]}), *both("2/1", {}, {}, error="broken")]
    assert equal_lengths.speedup(failed) == pytest.approx(2.0)
