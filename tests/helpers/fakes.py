"""A model of 25 lines, a clock that only moves when told, and a task: the runner is tested without any network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Generator, Tensor

from bench.measure.instruments import Instruments
from methods.decoder import Decoder, Guarantee, Prompts, Refillable, Rounds, Step

EOS = 0


class FakeClock:
    """Nanoseconds that pass only through ``spend``."""

    def __init__(self) -> None:
        self.now = 1_000

    def __call__(self) -> int:
        return self.now

    def spend(self, ns: int) -> None:
        self.now += ns


class FakeDecoder(Decoder, Refillable):
    """Writes (last id + 1) modulo 100, ``width`` ids a step; 50 ns per prompt id, then ``step_ns`` a step."""

    guarantee = Guarantee.EXACT
    continuous_batching = True

    def __init__(self, clock: FakeClock, width: int = 1, step_ns: int = 100, wrap: int = 100) -> None:
        self.clock, self.width, self.step_ns, self.wrap = clock, width, step_ns, wrap
        self.calls: list[tuple[list[list[int]], int, int]] = []
        self.closed = 0

    def decode(self, prompts: list[Tensor], limit: int, rng: Generator) -> Iterator[Step]:
        return self.decode_refilled(prompts, limit, rng, 0)

    def decode_refilled(self, prompts: list[Tensor], limit: int, rng: Generator, longest: int) -> Rounds:
        rows = [prompt.tolist() for prompt in prompts]
        ends = [len(row) + limit for row in rows]
        self.calls.append(([list(row) for row in rows], limit, rng.initial_seed()))
        try:
            self.clock.spend(50 * max(map(len, rows)))
            new = yield self._step(rows, ends, 1)
            while True:
                while fresh := {row: prompt for row, prompt in (new or {}).items() if prompt is not None}:
                    new = yield self._begin(rows, ends, fresh, limit)
                self.clock.spend(self.step_ns)
                new = yield self._step(rows, ends, self.width)
        finally:
            self.closed += 1

    def _begin(self, rows: list[list[int]], ends: list[int], new: Prompts, limit: int) -> Step:
        self.clock.spend(50 * max(map(len, new.values())))
        for row, prompt in new.items():
            rows[row], ends[row] = prompt.tolist(), len(prompt) + limit
        closed = [end if row in new else 0 for row, end in enumerate(ends)]
        return replace(self._step(rows, closed, 1), admitted=frozenset(new))

    def _step(self, rows: list[list[int]], ends: list[int], width: int) -> Step:
        widths = [width if len(row) < end else 0 for row, end in zip(rows, ends, strict=True)]
        new = [[(row[-1] + 1 + i) % self.wrap for i in range(n)] for row, n in zip(rows, widths, strict=True)]
        for row, tokens in zip(rows, new, strict=True):
            row.extend(tokens)
        kept = [max(0, len(tokens) - 1) for tokens in new]
        return Step(new, kept, kept, [1.0] * len(rows), kept, nodes=width)


class FakeTokenizer:
    """A word is a number and its own id."""

    chat_template: str | None = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return " ".join(str(i) for i in ids if i != EOS or not skip_special_tokens)


@dataclass(frozen=True)
class FakeExample:
    id: str
    turns: list[str]
    category: str = "any"
    reference: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)


class FakeTask:
    """Turns as messages; an answer scores its number of words."""

    revision = "1"

    def messages(self, example: FakeExample, turn: int, history: Sequence[str]) -> list[dict[str, str]]:
        messages = []
        for asked, answered in zip(example.turns, history, strict=False):
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return [*messages, {"role": "user", "content": example.turns[turn]}]

    def score(self, example: FakeExample, turn: int, text: str) -> dict[str, float]:
        return {"words": len(text.split())}


def instruments(clock: FakeClock) -> Instruments:
    """Meters of a CPU whose clock is the fake one."""
    return Instruments(torch.device("cpu"), clock=clock, cpu_clock=clock, offset=lambda: 0)


def examples(count: int, turns: int = 1) -> list[FakeExample]:
    """Prompts of different lengths that end in different ids."""
    return [
        FakeExample(str(number), [" ".join(str(1 + number % 7 + i) for i in range(1 + number % 4))] * turns)
        for number in range(count)
    ]
