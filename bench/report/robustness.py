"""How far the ranks of tables hold: over texts of equal length, and against noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.analysis import audit, equal_lengths
from bench.records import run_folder
from bench.report import leaderboard, terminal
from bench.report.leaderboard import ComparisonGroup, Row
from bench.report.terminal import plural

_EXACT = leaderboard.GUARANTEES[0]
_SEEN = 0.0005  # of a speed-up: a smaller change is 0.0% in one decimal


# ------------------------------------------------------------------------------------------------------ equal lengths


@dataclass(frozen=True, slots=True)
class EqualLengths:
    """The EXACT rows of a table, see ``bench.analysis.equal_lengths``.

    Attributes:
        speeds: by label, the speed-up over equal lengths; of ranked rows whose samples are kept.
        change: label and factor of the speed-up that changes most.
        regret: by how much the speed-up of a row is at most below that of a row with a lower rank; 0: the ranks hold.
            Rows whose intervals overlap have no order to lose.
    """

    speeds: dict[str, float]
    change: tuple[str, float]
    regret: float

    def __str__(self) -> str:
        name, factor = self.change
        ranks = "no rank changes" if not self.regret else f"ranks change, a speed-up is {self.regret:.1%} too low"
        moved = f"the speed-up that changes most is that of {name}, by {factor - 1:+.1%}"
        if abs(factor - 1) < _SEEN:
            moved = "no speed-up changes by 0.1%"
        return (
            f"Over equal lengths, each prompt timed up to the end of the shorter text, {ranks} among "
            f"{plural(len(self.speeds), 'EXACT run')}; {moved}."
        )


def over_equal_lengths(group: ComparisonGroup) -> EqualLengths | None:
    """None where fewer than two EXACT rows can be timed so."""
    timed = [(row, speed) for row in group.ranked if row.guarantee == _EXACT if (speed := _equalised(row))]
    if len(timed) < 2:
        return None
    changes = {row.label: speed / (row.speed or speed) for row, speed in timed}
    most = max(changes.items(), key=lambda item: (round(abs(math.log(item[1])), 6), item[0]))
    lost = [
        slower / faster - 1
        for place, (above, faster) in enumerate(timed)
        for below, slower in timed[place + 1 :]
        if _apart(above, below)
    ]
    return EqualLengths({row.label: speed for row, speed in timed}, most, max([0.0, *lost]))


def _equalised(row: Row) -> float | None:
    kept = run_folder.samples_file(row.record.path).is_file()
    return equal_lengths.speedup(run_folder.read_samples(row.record.path)) if kept else None


def _apart(above: Row, below: Row) -> bool:
    """Whether the intervals of two rows leave their order in no doubt."""
    low, high = above.headline["low"], below.headline["high"]
    return low is not None and high is not None and bool(low > high)


# -------------------------------------------------------------------------------------------------------------- noise


def noise(groups: Sequence[ComparisonGroup]) -> str:
    """One sentence on the runs of the baseline against itself; empty without one that has an interval."""
    rows = [row for group in groups for row in group.rows if row.method == "autoregressive"]
    rows = [row for row in rows if audit.result(row.summary) != "INVALID" and row.headline["low"] is not None]
    if not rows:
        return ""
    hold = sum(row.headline["low"] <= 1 <= row.headline["high"] for row in rows)
    speeds = [row.speed or 1.0 for row in rows]
    valid = [row.speed or 1.0 for row in rows if audit.result(row.summary) == "VALID"]
    wrong = sum(not audit.SAME[0] <= speed <= audit.SAME[1] for speed in valid)
    return (
        f"The baseline against itself: {plural(len(rows), 'run')}, {terminal.times(min(speeds))} to "
        f"{terminal.times(max(speeds))}; {hold} of {len(rows)} intervals hold 1, and {wrong} of {len(valid)} VALID "
        f"runs are outside {audit.SAME[0]} to {audit.SAME[1]}."
    )
