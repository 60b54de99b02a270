"""One line of progress: a bar with the time left on a terminal, a line every 30 s elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

EVERY_S = 30.0


def stage(name: str) -> None:
    """Say what begins now: model, warm-up, ..."""
    print(f"{name} ...", file=sys.stderr, flush=True)


class Progress:
    """Counts what is done.

    Args:
        label: what is being done.
        total: how much there is.
        done: how much of it was done earlier; it does not enter the rate.
        stream: where to; standard error if None.
        clock: seconds.
        unit: what is counted.
    """

    def __init__(
        self,
        label: str,
        total: int,
        done: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        unit: str = "",
    ) -> None:
        self.label, self.total, self.done, self.clock, self.unit = label, total, done, clock, unit
        self.note = ""
        self.stream = sys.stderr if stream is None else stream
        self._first, self._began = done, clock()
        self._spoke = self._began
        self._bar = self._make_bar() if self.stream.isatty() else None

    def advance(self, count: int = 1, note: str = "") -> None:
        """``count`` more are done; ``note`` is shown beside, as in ``1.31x so far``."""
        self.done, self.note = self.done + count, note
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(count)
        elif self.clock() - self._spoke >= EVERY_S:
            self._spoke = self.clock()
            print(self.line(), file=self.stream, flush=True)

    def line(self) -> str:
        """``prompts: 17/80, 2:05 elapsed, 7:43 left, 1.31x so far``"""
        elapsed, fresh = self.clock() - self._began, self.done - self._first
        left = _minutes(elapsed / fresh * (self.total - self.done)) if fresh else "?"
        note = f", {self.note}" if self.note else ""
        return f"{self.label}: {self.done}/{self.total}, {_minutes(elapsed)} elapsed, {left} left{note}"

    def close(self) -> None:
        """Nothing more will come."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_bar(self) -> Any:
        from tqdm import tqdm

        return tqdm(
            total=self.total,
            initial=self.done,
            desc=self.label,
            file=self.stream,
            unit=self.unit,
            dynamic_ncols=True,
        )


def _minutes(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
