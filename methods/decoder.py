"""The interface every generation method implements, and the only thing the runner knows of it.

Shapes, everywhere in this package: B rows, T prompt length, N draft nodes, M = N + 1 scored nodes
(node 0 is the row's last committed token, whose keys and values are not in the cache yet),
V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int
from torch import Generator, Tensor

if TYPE_CHECKING:
    pass


class Guarantee(str, Enum):
    """What a method promises of its output; every run measures whether the promise was kept."""

    EXACT = "EXACT"  # greedy: the target's own tokens; sampling: the target's own distribution
    RELAXED = "RELAXED"  # the target's output up to a declared tolerance
    INDEPENDENT_MODEL = "INDEPENDENT_MODEL"  # another model's output; only its quality can be judged


@dataclass(frozen=True, slots=True)
class Step:
    """What one round committed. Everything that is reported derives from these counters.

    The first step of a decode is the prefill: it commits the first token(s), in our loop exactly one. With refilled
    rows (``Refillable``) so is every step that reads the prompts of some rows, while the others wait.

    Attributes:
        tokens: per row, the ids committed in this round, in order; empty for a row at its limit or one that waits.
        drafted: per row, draft nodes that were judged.
        accepted: per row, draft tokens that were kept (the bonus token is not one of them).
        layers: per row, layers run per committed token over layers of the target; 1.0 unless layers were skipped.
        depth: per row, nodes on the longest drafted path; equal to ``drafted`` for a chain.
        nodes: M of the target pass, padding and scouts included: what the pass cost.
        target_passes: forward passes of the target in this round.
        draft_passes: forward passes of the drafter in this round.
        draft_ns: wall time spent proposing, or None where it was not measured.
        at_ns: ``time.perf_counter_ns()`` at which the tokens became available. Only decoders that wrap a
            blocking call set it; for every other one the runner reads the clock itself.
        admitted: rows whose next prompt was read in this step, which did nothing else; empty for any other step.
    """

    tokens: list[list[int]]
    drafted: list[int]
    accepted: list[int]
    layers: list[float]
    depth: list[int]
    nodes: int = 1
    target_passes: int = 1
    draft_passes: int = 0
    draft_ns: int | None = None
    at_ns: int | None = None
    admitted: frozenset[int] = frozenset()


Prompts = Mapping[int, Tensor]  # ids by row
Rounds = abc.Generator[Step, Prompts | None, None]  # takes the prompts that begin before the next step


@runtime_checkable
class Decoder(Protocol):
    """A generation method bound to a target model.

    ``decode`` is a generator. It yields one ``Step`` a round and never ends by itself before every row has
    committed ``limit`` tokens; the runner stops it earlier when all rows have produced an end-of-sequence
    token. A row at its limit commits nothing more, so later steps hold an empty list for it. The last step
    of a row may overshoot the limit: the runner trims, a method does not.

    A decoder with parts of its own beside the target (a datastore, heads) may have ``own_bytes() -> dict[str, int |
    None]``, bytes by name; the runner records them after the measurement. One with a part that others made may have
    ``doubt(acceptance) -> str | None``: told per prompt of the warm-up how often each position of its drafts was kept,
    it returns a warning where that is implausible for such a part. One may also have ``facts() -> dict``, plain JSON
    values on its own work that no step can tell, and ``probe(prompts, limit, rng) -> dict``, more of them from decoding
    once more behind the measurement; they are recorded as they are. ``Calibrated`` has what may be chosen before it.
    One that writes the text of a model of its own, to the letter, has that as ``verifier``; a run checks it, greedily.
    """

    guarantee: Guarantee

    def decode(self, prompts: list[Int[Tensor, "T"]], limit: int, rng: Generator) -> Iterator[Step]:
        """Decode ``prompts`` in lockstep, one row each.

        Args:
            prompts: token ids, one 1-D integer tensor of length >= 1 per row, ragged.
            limit: most tokens wanted per row; the method sizes its buffers by it.
            rng: the only source of randomness, on the target's device.
        """
        ...


@runtime_checkable
class Refillable(Protocol):
    """A decoder whose rows can be given a new prompt while others go on (continuous batching, Orca, Yu et al. 2022).

    Attributes:
        refills: whether it really can; a class that inherits the method may not be able to.
    """

    refills: ClassVar[bool]

    def decode_refilled(self, prompts: list[Int[Tensor, "T"]], limit: int, rng: Generator, longest: int) -> Rounds:
        """As ``Decoder.decode``, but new prompts may be sent in place of ``next``: each replaces the text of its row.

        They are read at once, in a step of their own (``Step.admitted``) that commits their first tokens. What becomes
        of a row does not depend on what it or any other row held before.

        Args:
            prompts: those that the rows begin with.
            limit: most tokens wanted per prompt.
            rng: see ``Decoder.decode``.
            longest: tokens of the longest prompt that will come; the method sizes its buffers by it.
        """
        ...


@runtime_checkable
class Calibrator(Protocol):
    """Chooses a threshold by what texts lose at it on calibration prompts.

    Attributes:
        promise: its settings, of which the benchmark reads ``against``, ``metric``, ``corpus``, ``prompts``, ``seed``.
        thresholds: to be tried in this order, the safest first; all below 1, which stands for the full model.
        fewest: prompts without which nothing can be promised.
    """

    promise: Any
    thresholds: Sequence[float]
    fewest: int

    def planned(self) -> int:
        """How many prompts to take, if the settings do not say."""
        ...

    def complete(self, losses: Float[np.ndarray, "prompts tried"]) -> bool:
        """Whether the losses at the thresholds tried so far decide."""
        ...

    def choose(self, losses: Float[np.ndarray, "prompts tried"]) -> dict[str, Any]:
        """Plain JSON values to be recorded; of them ``threshold`` is the choice, ``explanation`` a sentence on it."""
        ...


@runtime_checkable
class Calibrated(Protocol):
    """A decoder with a threshold that the benchmark finds before the run, if ``calibrator`` is not None."""

    calibrator: Calibrator | None

    def use(self, threshold: float) -> None:
        """Decode with this threshold from now on, as if the decoder had been made with it; 1 is the full model."""
        ...
