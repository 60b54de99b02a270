"""What the drafters of EAGLE, P-EAGLE, DFlash and DSpark share: their network reads the target's states in every round.

Keys and values of the committed tokens are in a cache of the network's own, the reader. A drafter may sit out rounds;
what passes of the target said in the meantime is read before the next draft. With CUDA graphs the reading and the draft
are one recorded call (``recorded_network.py``); of more than it has room for, the earlier places are read before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from methods.drafting import Context, Draft
from methods.engine.causal_lm import CausalLM, Output
from methods.engine.cuda_graphs import NODES, GraphedLM, Graphs
from methods.engine.host_copies import from_host
from methods.engine.kv_cache import Cache
from methods.engine.sampling import Sampling
from methods.speculative.draft_layers import MOST_UNREAD, Sizes, Unread
from methods.speculative.recorded_network import RecordedNetwork


@runtime_checkable
class NetworkSpec(Sizes, Protocol):
    """Sizes of a draft network of several layers."""

    @property
    def draft_layers(self) -> int: ...


@runtime_checkable
class DraftNetwork(Protocol):
    """A network in decoding; ``nbytes``: memory of its matrices by name."""

    nbytes: dict[str, int]

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def spec(self) -> NetworkSpec: ...


@runtime_checkable
class DraftGrowth(Protocol):
    """How drafts are made; ``nodes``: most of a draft."""

    nodes: int


@runtime_checkable
class DraftReader(Protocol):
    """A network over its cache; ``lengths``: places of each row that it read, perhaps with the tokens after them."""

    @property
    def cache(self) -> Cache: ...
    @property
    def lengths(self) -> list[int]: ...
    def keep_rows(self, rows: Sequence[int]) -> None: ...


N = TypeVar("N", bound=DraftNetwork)
G = TypeVar("G", bound=DraftGrowth)
R = TypeVar("R", bound=DraftReader)


class NetworkDrafter(ABC, Generic[N, G, R]):
    """Reads the committed tokens with the target's states of them, then drafts.

    Args:
        network: drafts.
        growth: makes drafts of what it says.
        taps: layers of the target whose outputs must be kept for it.
        spare: slots that a reader needs beyond the text.
    """

    def __init__(self, network: N, growth: G, taps: Sequence[int], spare: int) -> None:
        self.network, self.growth, self.nodes = network, growth, growth.nodes
        self.nbytes = network.nbytes
        self.hidden_layers = taps
        self._spare = spare
        self._reader: R | None = None
        self._unread = Unread(0)
        self._recorded: RecordedNetwork[Any] | None = None
        self._launched: Draft | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes of the network's keys and values of one token."""
        spec = self.network.spec
        return 2 * spec.draft_layers * spec.kv_heads * spec.head_dim * self.network.dtype.itemsize

    def reset(self, prompts: list[list[int]], limit: int) -> None:
        make = self._new_reader if self._recorded is None else self._recorded.reader
        self._reader = make(len(prompts), max(map(len, prompts)) + limit + self._spare)
        self._unread = Unread(len(prompts))
        self._launched = None

    def resume(self, last: Context, prompts: list[list[int]], limit: int, kept: int) -> int:
        """See ``ResumingDrafter``."""
        if self._recorded is None:  # what a recorded draft has read and the host has not noted is read again
            self.skip(last)
            if len(self._unread):
                self._read(self._made_reader(), last)
        before = self._made_reader().cache
        read = min(kept - 1, before.lengths[0])  # of the last one, the token after it may be another
        self.reset(prompts, limit)
        self._unread = Unread(1, read)
        self._made_reader().cache.continue_from(before, read)
        return read

    def keep_rows(self, rows: Sequence[int]) -> None:
        self._made_reader().keep_rows(rows)
        self._unread.keep_rows(rows)

    def propose(self, context: Context) -> Draft:
        if self._recorded is not None:
            return self._recorded_draft(context, self._recorded)
        self._unread.note(context, self._states(context.output))
        return self._draft(self._made_reader(), context)

    def launch(self, report: Int[Tensor, "B R"], output: Output, context: Context) -> Draft | None:
        """See ``LaunchedDrafter``."""
        if self._recorded is None or len(self._unread):
            return None
        self._launched = self._recorded.launch(self._made_reader(), report, output, context.sampling, context.rng)
        return self._launched

    def _recorded_draft(self, context: Context, recorded: RecordedNetwork[Any]) -> Draft:
        """The one that was launched, or one by a recorded call."""
        reader = self._made_reader()
        if self._launched is None and context.report is not None:
            self.launch(context.report, context.output, context)
        draft, self._launched = self._launched, None
        if draft is not None:
            self._unread.read_by(context)
        else:
            self._unread.note(context, self._states(context.output))
            counts, states = self._unread.take_last(NODES[-1])
            if len(self._unread):
                self._read(reader, context)
            draft = recorded.catch_up(reader, context, counts, states)
        recorded.note_read(reader, context.tokens)
        return draft

    def skip(self, context: Context) -> None:
        """Keep the states of the committed tokens, as they are not in the next context; read them once in a while."""
        if self._recorded is not None and self._launched is not None:  # it has read them
            self._recorded_draft(context, self._recorded)
            return
        self._unread.note(context, self._states(context.output))
        if len(self._unread) > MOST_UNREAD:
            self._read(self._made_reader(), context)

    def _made_reader(self) -> R:
        assert self._reader is not None, "reset comes before drafting"
        return self._reader

    def _states(self, output: Output) -> list[Float[Tensor, "B P D"]]:
        """What the network reads of a pass."""
        return [output.hidden_layers[tap] for tap in self.hidden_layers]

    @abstractmethod
    def _new_reader(self, batch: int, capacity: int) -> R:
        """An empty reader of so many rows and slots."""

    @abstractmethod
    def _read(self, reader: R, context: Context) -> object:
        """Read what was noted, ``self._unread.take()``.

        A row at its limit has nothing new; its reads are forgotten, and its draft is never used.
        """

    @abstractmethod
    def _draft(self, reader: R, context: Context) -> Draft:
        """Read what was noted, and draft."""


def tokens_after(
    context: Context, lengths: Sequence[int], counts: Sequence[int], device: torch.device
) -> Int[Tensor, "B W"]:
    """The tokens that follow the places which a network has not read: the second halves of EAGLE's pairs.

    Args:
        context: of the round.
        lengths: places that each row has read.
        counts: of new places; W is the largest, and shorter rows are padded.
        device: of the network.
    """
    rows = zip(context.tokens, lengths, counts, strict=True)
    pending = [row[length + 1 : length + 1 + count] for row, length, count in rows]
    return from_host([new + [0] * (max(counts) - len(new)) for new in pending], device)


def graphs_of(target: CausalLM, sampling: Sampling) -> Graphs | None:
    """Where drafts after rounds of this kind are recorded; None: nowhere."""
    return target.graphs if isinstance(target, GraphedLM) and sampling.greedy else None
