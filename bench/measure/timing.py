"""Time one decode, and cut its output at the end of text and at the limit."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from torch import Generator, Tensor

from bench.errors import RunFailed
from bench.measure.instruments import Instruments, Reading
from methods.decoder import Decoder, Refillable, RowChanges, Step, next_step


@dataclass(slots=True)
class Row:
    """One row's output up to the first end-of-sequence token, which counts as output, or the limit.

    Attributes:
        place: which of the decoder's rows it is.
        first: the step in which its prompt was read.
        counts: tokens kept of each step from then on until the row finished.
    """

    limit: int
    eos_ids: Collection[int]
    place: int = 0
    first: int = 0
    ids: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    finish: Literal["eos", "length"] | None = None

    def take(self, tokens: Sequence[int]) -> None:
        """Append what a step committed, unless the row has finished."""
        if self.finish:
            return
        before = len(self.ids)
        for token in tokens[: self.limit - before]:
            self.ids.append(token)
            if token in self.eos_ids:
                self.finish = "eos"
                break
        if len(self.ids) == self.limit:
            self.finish = self.finish or "length"
        self.counts.append(len(self.ids) - before)


@dataclass(slots=True)
class Timed:
    """A decode of one batch, or of one queue, by one arm.

    Attributes:
        start_ns: the request, on the clock of ``ends_ns``.
        ends_ns: when the tokens of each step had become available.
        steps: as the method reported them, up to the one in which the last row finished.
        rows: one per prompt.
        reading: what the other instruments saw, over the whole batch.
        wall_ns: the timed section as a whole.
    """

    start_ns: int
    ends_ns: list[int]
    steps: list[Step]
    rows: list[Row]
    reading: Reading
    wall_ns: int

    @property
    def step_ns(self) -> list[int]:
        """Time of each step; the first one is the prefill."""
        begins = [self.start_ns, *self.ends_ns]
        return [end - begin for begin, end in zip(begins, self.ends_ns, strict=False)]

    @property
    def batch_ns(self) -> int:
        """Request to the moment the last row had finished."""
        return self.ends_ns[-1] - self.start_ns


def timed_decode(
    decoder: Decoder,
    prompts: list[Tensor],
    limit: int,
    eos_ids: Collection[int],
    rng: Generator,
    instruments: Instruments,
    places: int | None = None,
) -> Timed:
    """Decode a batch, or a queue, until every row has finished, reading the clock once per step.

    The decoder is sent the rows that have finished, so that it can drop them; what that takes is in the measured time.

    The device is synchronised before the first and after the last step, in between only by what the method itself
    needs; garbage is collected before and not during.

    Args:
        places: rows at a time; a waiting prompt takes the place of a finished row, so the decoder must be
            ``Refillable``. None: a row for each prompt.

    Raises:
        RunFailed: the method stopped before every row had finished.
    """
    eos = frozenset(eos_ids)
    at_once = len(prompts) if places is None else min(places, len(prompts))
    rows = [Row(limit, eos, place) for place in range(at_once)]
    waiting = deque(prompts[at_once:])
    steps: list[Step] = []
    ends: list[int] = []
    clock = instruments.clock
    with _no_collection(), instruments.watch() as reading:
        start = clock()
        decode = _begin(decoder, prompts, limit, rng, at_once if places is not None else None)
        changes: dict[int, Tensor | None] = {}
        active = list(rows)
        try:
            while (step := _next(decode, changes)) is not None:
                ends.append(clock() if step.at_ns is None else step.at_ns)
                steps.append(step)
                changes = {}
                for row in _commit(active, step):
                    changes[row.place] = waiting.popleft() if waiting else None
                    if changes[row.place] is not None:
                        active[row.place] = Row(limit, eos, row.place, len(steps))
                        rows.append(active[row.place])
                if all(row.finish for row in active):
                    break
        finally:
            _close(decode)
        instruments.synchronise()
        stop = clock()
    if waiting or not all(row.finish for row in rows):
        lengths = ", ".join(str(len(row.ids)) for row in rows)
        raise RunFailed(
            f"{type(decoder).__name__} stopped after {lengths} of {limit} tokens without an end-of-sequence token. Its "
            "decode() must continue until every row has reached the limit."
        )
    if steps[-1].at_ns is None:
        ends[-1] = stop  # work the method left running on the device belongs to its last step
    return Timed(start, ends, steps, rows, reading, stop - start)


def _begin(decoder: Decoder, prompts: list[Tensor], limit: int, rng: Generator, places: int | None) -> Iterator[Step]:
    if places is None:
        return decoder.decode(prompts, limit, rng)
    assert isinstance(decoder, Refillable), f"{type(decoder).__name__} cannot begin rows anew"
    return decoder.decode_refilled(prompts[:places], limit, rng, max(map(len, prompts)))


def _next(decode: Iterator[Step], changes: RowChanges) -> Step | None:
    """The next step, after what changed was sent; None if the decoder has stopped."""
    step, begun = next_step(decode, changes), {row for row, prompt in changes.items() if prompt is not None}
    assert not begun or (step and step.admitted == begun), "prompts are read at once, in a step of their own"
    return step


def _close(decode: Iterator[Step]) -> None:
    """Let a generator free its buffers now; a plain iterator has nothing to close."""
    close = getattr(decode, "close", None)
    if close is not None:
        close()


def _commit(rows: list[Row], step: Step) -> list[Row]:
    """Give every row its tokens; returns those that have finished with this step."""
    before = [row for row in rows if not row.finish]
    for row, tokens in zip(rows, step.tokens, strict=True):
        row.take(tokens)
    return [row for row in before if row.finish]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Switch garbage collection off inside."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
