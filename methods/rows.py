"""Which rows of a batch are computed: a row leaves once its text has ended, if that pays the copy of the caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING, TypeVar

from methods.decoder import Prompts, RowChanges, Step

if TYPE_CHECKING:
    from methods.engine.causal_lm import CausalLM
    from methods.engine.fused_layers import Ran

T = TypeVar("T")


class ComputedRows:
    """The rows that a decode computes, numbered anew whenever some leave.

    Attributes:
        places: of each computed row, which one of the caller's it is.
        ended: per computed row, whether nothing more is wanted of it.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.places = list(range(count))
        self.ended = [False] * count

    def take(self, changes: RowChanges | None) -> Prompts:
        """Note which texts have ended; returns the new prompts by computed row."""
        prompts = {}
        for place, prompt in (changes or {}).items():
            assert place in self.places, f"row {place} takes no new prompt: its text was said to have ended"
            row = self.places.index(place)
            self.ended[row] = prompt is None
            if prompt is not None:
                prompts[row] = prompt
        return prompts

    def below(self, limit: int, counts: Sequence[int]) -> list[bool]:
        """Per computed row, whether more is wanted of it: its text has not ended and has fewer tokens than allowed."""
        return [count < limit and not ended for count, ended in zip(counts, self.ended, strict=True)]

    def leave(self, lm: CausalLM) -> list[int] | None:
        """Drop the rows that have ended, if that pays.

        Returns:
            The computed rows that stay, by their numbers so far; None: all stay.
        """
        if not any(self.ended):
            return None
        stay = [row for row, ended in enumerate(self.ended) if not ended]
        if not lm.pays_to_drop(len(stay), len(self.ended)):
            return None
        self.places, self.ended = of_rows(self.places, stay), [False] * len(stay)
        return stay

    def step(self, step: Step) -> Step:
        """A step of the computed rows with an entry for each of the caller's, in which nothing happened to others."""
        if len(self.places) == self._count:
            return step
        return replace(
            step,
            tokens=[tokens or [] for tokens in self._spread(step.tokens)],
            drafted=[count or 0 for count in self._spread(step.drafted)],
            accepted=[count or 0 for count in self._spread(step.accepted)],
            layers=[share or 0.0 for share in self._spread(step.layers)],
            depth=[count or 0 for count in self._spread(step.depth)],
            admitted=frozenset(self.places[row] for row in step.admitted),
        )

    def _spread(self, values: Sequence[T]) -> list[T | None]:
        own = dict(zip(self.places, values, strict=True))
        return [own.get(place) for place in range(self._count)]


def of_rows(values: Sequence[T], rows: Sequence[int]) -> list[T]:
    """The values of some rows, in the order of ``rows``."""
    return [values[row] for row in rows]


def one_each(tokens: Sequence[int], rows: Sequence[bool]) -> list[list[int]]:
    """The tokens of a step that commits one per row, none where ``rows`` says that no more is wanted."""
    return [[token] if is_open else [] for token, is_open in zip(tokens, rows, strict=True)]


def steps_of(
    ran: Ran,
    rows: Sequence[bool],
    layers: Sequence[float] | None = None,
    nodes: Sequence[int] | None = None,
    pass_ns: Sequence[int] | None = None,
) -> Iterator[Step]:
    """The steps of several rounds in one call, one token per row; ``rows`` are those of which more is wanted.

    Args:
        layers, nodes, pass_ns: of each round, see ``Step``.
    """
    count, none, alone = len(rows), [0] * len(rows), list(rows) == [True]
    of_rounds = layers or repeat(1.0), nodes or repeat(1), pass_ns or repeat(None)
    for tokens, end, share, scored, passed in zip(ran.tokens, ran.ends_ns, *of_rounds):  # noqa: B905, some never end
        new = [tokens] if alone else one_each(tokens, rows)
        yield Step(new, none, none, [share] * count, none, nodes=scored, pass_ns=passed, at_ns=end, rows=count)


def guessed_steps_of(ran: Ran) -> Iterator[Step]:
    """The steps of several rounds with guesses in one call, of one row."""
    begin, before = 0, 0
    for found, end, at_ns in zip(ran.guessed, ran.times, ran.ends_ns, strict=True):
        tokens = [token for (token,) in ran.tokens[begin : begin + found.tokens]]
        yield Step(
            [tokens],
            drafted=[found.nodes],
            accepted=[found.kept],
            layers=[1.0],
            depth=[found.depth],
            nodes=1 + found.nodes,
            draft_ns=found.guessing_ns,
            pass_ns=end - before - found.guessing_ns,
            at_ns=at_ns,
            rows=1,
        )
        begin, before = begin + found.tokens, end
