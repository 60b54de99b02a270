"""Draft networks in rounds of fixed shape: reading what the target kept, and the draft after it, are one recorded call.

A drafter's own passes are many small operators, whose launches take longer than they do on a GPU. After a recorded
round of the target (``methods.engine.greedy_round``) all that the network reads is on the device and has a fixed shape,
so all its operators can be replayed by one launch. After a prefill, and after rounds that were sat out, the drafter
reads as it does without graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Generator, Tensor

from methods.drafting import Context, Draft
from methods.engine.causal_lm import Output
from methods.engine.cuda_graphs import Calls, Graphs, Work, bucket
from methods.engine.kv_cache import Cache
from methods.engine.sampling import Sampling

Drafted = tuple[tuple[Tensor, ...], Draft]  # the tensors that a replay renews, and the draft that has them


def tensors_of(draft: Draft) -> Drafted:
    """A draft that was not drawn, and its tensors."""
    assert draft.probs is None and draft.sizes is None, "such a draft has no fixed shape"
    gains = [draft.gains] if isinstance(draft.gains, Tensor) else []
    return (draft.tokens, draft.parents, *gains), draft


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """What a round kept, on the device; the first ``counts[b]`` places of each row.

    Attributes:
        following: the tokens after them, of which the last is the bonus.
        counts: of places.
        bonus: the next root.
    """

    following: Int[Tensor, "B P"]
    counts: Int[Tensor, "B"]
    bonus: Int[Tensor, "B"]

    @classmethod
    def of(cls, report: Int[Tensor, "B R"]) -> KeptTokens:
        """From the report of a recorded round."""
        levels = (report.shape[1] - 2) // 2
        path, tokens = report[:, 1 : 2 + levels], report[:, 2 + levels :]
        counts = (path >= 0).sum(1)
        following = F.pad(tokens, (0, 1)).scatter(1, counts[:, None] - 1, report[:, :1])
        return cls(following.clamp(min=0), counts, report[:, 0])

    def context(self, states: Sequence[Float[Tensor, "B P D"]], sampling: Sampling, rng: Generator) -> Context:
        """What a draft may depend on beside these, for the functions that make one."""
        hidden = states[0]
        return Context([], self.bonus, Output(hidden[:, :, :0], hidden), None, sampling, rng)


@runtime_checkable
class NetworkReader(Protocol):
    """A draft network over a cache of its own."""

    @property
    def cache(self) -> Cache: ...
    def reserve(self, positions: int) -> None: ...


R = TypeVar("R", bound=NetworkReader)


class RecordedNetwork(Generic[R]):
    """The recorded drafts of a network. A batch size has one reader, whose cache keeps its address, for all texts.

    Args:
        graphs: of the target.
        make: a reader of a batch size and a capacity.
        work: what is recorded, over a reader; how tokens are sampled.
        states: what the network reads of a pass of the target.
        spare: slots that a reader needs beyond the text.
    """

    def __init__(
        self,
        graphs: Graphs,
        make: Callable[[int, int], R],
        work: Callable[[R, Sampling, Generator], Work],
        states: Callable[[Output], Sequence[Tensor]],
        spare: int,
    ) -> None:
        self._graphs, self._make, self._work, self._states, self._spare = graphs, make, work, states, spare
        self._readers: dict[int, tuple[R, Calls]] = {}
        self._sampled: tuple[Sampling, Generator] | None = None  # None: nothing was drafted so far
        graphs.drafts.add(self)

    def reader(self, batch: int, capacity: int) -> R:
        """An empty one."""
        known = self._readers.get(batch)
        if known is None or known[0].cache.capacity < capacity:
            with torch.inference_mode(False):
                made = self._make(batch, bucket(capacity))
            made.reserve(2 * made.cache.capacity)  # a longer table would take another place
            self._readers[batch] = known = made, Calls(self._graphs)
        known[0].cache.reset()
        return known[0]

    def launch(
        self, reader: R, report: Int[Tensor, "B R"], output: Output, sampling: Sampling, rng: Generator
    ) -> Draft:
        """Read what a round kept, and draft; ``note_read`` must follow once the host knows what that was."""
        self._sampled, cache = (sampling, rng), reader.cache
        calls, inputs = self._readers[cache.batch][1], [report, *self._states(output)]
        draft: Draft = calls(self._work(reader, *self._sampled), inputs, [cache.length])
        return draft

    @staticmethod
    def note_read(reader: R, texts: Sequence[Sequence[int]]) -> None:
        """The reader has read all tokens of these texts but their roots."""
        cache = reader.cache
        counts = [len(text) - 1 - length for text, length in zip(texts, cache.lengths, strict=True)]
        if all(counts):
            cache.advanced(counts)
        else:  # a row at its limit has read what is not part of its text
            cache.set_lengths([length + count for length, count in zip(cache.lengths, counts, strict=True)])

    def prepare(self, longest: Mapping[int, int]) -> None:
        """See ``methods.engine.cuda_graphs.RecordedDrafts``."""
        if self._sampled is None:
            return
        seen = [calls for _, calls in self._readers.values()]
        for batch, length in longest.items():
            reader = self.reader(batch, length + self._spare)
            for inputs in [each for calls in seen for each in calls.inputs(batch)]:
                self._readers[batch][1].record(self._work(reader, *self._sampled), inputs, [reader.cache.length])
