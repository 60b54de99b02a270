"""Draft networks in rounds of fixed shape: reading what the target kept, and the draft after it, are one recorded call.

A drafter's own passes are many small operators, whose launches take longer than they do on a GPU. After a recorded
round of the target (``methods.engine.greedy_round``) all that the network reads is on the device and has a fixed shape,
so all its operators can be replayed by one launch. What it has to read after a prefill, or after rounds that it sat
out, is put into the form that a round has, filled up to one of ``NODES``.
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
from methods.engine.cuda_graphs import NODES, Calls, Graphs, Work, bucket, padded
from methods.engine.greedy_round import kept_nodes
from methods.engine.host_copies import from_host
from methods.engine.kv_cache import Cache
from methods.engine.sampling import Sampling
from methods.engine.token_tree import ABSENT

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
    def of(cls, report: Int[Tensor, "B R"], triton: bool = False) -> KeptTokens:
        """From the report of a recorded round.

        Args:
            triton: a kernel of Triton's reads it.
        """
        if triton:
            from methods.engine import triton_trees  # needs a package that not every machine has

            return cls(*triton_trees.kept_tokens(report), report[:, 0])
        path = kept_nodes(report)
        tokens = report[:, 1 + path.shape[1] :]
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
        return self._call(reader, [report, *self._states(output)], sampling, rng)

    def catch_up(
        self, reader: R, context: Context, counts: Sequence[int], states: Sequence[Float[Tensor, "B W D"]]
    ) -> Draft:
        """Like ``launch``, of the last ``counts[b]`` places before each root, at most as many as ``NODES`` has."""
        width, rows = padded(max(1, *counts)), zip(context.tokens, counts, strict=True)
        report = from_host([_report(text, max(count, 1), width) for text, count in rows], reader.cache.length.device)
        filled = [F.pad(each, (0, 0, 0, width - each.shape[1])) for each in states]
        return self._call(reader, [report, *filled], context.sampling, context.rng)

    def _call(self, reader: R, inputs: Sequence[Tensor], sampling: Sampling, rng: Generator) -> Draft:
        self._sampled, cache = (sampling, rng), reader.cache
        calls = self._readers[cache.batch][1]
        draft: Draft = calls(self._work(reader, sampling, rng), inputs, [cache.length])
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

    def prepare(self, slots: Mapping[int, int]) -> None:
        """See ``methods.engine.cuda_graphs.RecordedDrafts``."""
        seen = [inputs for _, calls in self._readers.values() for inputs in calls.inputs(1)]
        if self._sampled is None or not seen:
            return
        widths = {*NODES, *(inputs[1].shape[1] for inputs in seen)}
        report, *states = seen[0]
        for batch, length in slots.items():
            reader = self.reader(batch, length + self._spare)
            for width in sorted(widths, reverse=True):  # the first one's work space is enough for the others
                inputs = [each.new_zeros(batch, width, each.shape[2]) for each in states]
                inputs = [report.new_zeros(batch, 2 * width), *inputs]
                self._readers[batch][1].record(self._work(reader, *self._sampled), inputs, [reader.cache.length])


def _report(text: Sequence[int], count: int, width: int) -> list[int]:
    """That of a round which had a chain of so many nodes and kept the last ``count`` tokens before the root."""
    kept, tokens = range(count), text[-count:-1]
    return [text[-1], *kept, *[ABSENT] * (width - count), *tokens, *[ABSENT] * (width - count)]
