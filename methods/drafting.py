"""Draft, verification and drafter: what speculative methods exchange with their loop."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

if TYPE_CHECKING:
    from methods.engine.causal_lm import Output
    from methods.engine.guesses import Guesses
    from methods.engine.kv_cache import Cache
    from methods.engine.sampling import Sampling
from methods.decoder import Guarantee
from methods.engine.host_copies import from_host
from methods.engine.token_tree import ABSENT as ABSENT


@dataclass(frozen=True, slots=True)
class AuxiliaryNodes:
    """Nodes scored in the same pass as a draft but never judged or committed, e.g. a window of Jacobi iterations.

    Attributes:
        tokens: [B, S] ids, all present.
        parents: [B, S] column of the parent, counted through the draft and then these nodes; -1 is the root.
        levels: nodes on the longest path from the root to one of them.
        asked: the target's most likely token after each of the last ``asked`` nodes is read back to the host
            (``Context.auxiliary_tokens``).
    """

    tokens: Int[Tensor, "B S"]
    parents: Int[Tensor, "B S"]
    levels: int
    asked: int


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree of draft tokens per row; a chain is the tree whose parents are -1, 0, 1, ...

    Children come after their parents (``parents[b, i] < i``).

    Attributes:
        tokens: [B, N] ids; ``ABSENT`` marks a column without a node in this row. Absent nodes come after the present
            ones and are never accepted.
        parents: [B, N] column of the parent node; -1 is the root, the row's last committed token.
        probs: [B, N, V] float32, the distribution each node was drawn from. None: nodes chosen deterministically
            (n-grams, retrieval, argmax, top-k), which the rules treat as q = 1.
        sizes: per row, how many nodes are present (host side); None: all N in every row.
        depths: per row, nodes on the longest path (host side); None: the same as ``sizes`` (a chain).
        levels: nodes on the longest path over all rows; None: N (a chain).
        width: most children a node has; None: N. Rules that try siblings in turn take as many turns.
        passes: forward passes the drafter spent.
        auxiliary: nodes scored along with the draft; N does not count them.
        gains: [B, N] or ragged on the host: how likely the drafter takes each node to be kept, the product along its
            path; None: it does not say.
        source: what drafted, where a drafter has several parts; ``gains`` of each are calibrated apart.
        sources: the same of each present node, where several parts drafted one tree; None: all are ``source``'s.
        listed: ``tokens`` and ``parents`` on the host, where they are known there; see ``lists``.
    """

    tokens: Int[Tensor, "B N"]
    parents: Int[Tensor, "B N"]
    probs: Float[Tensor, "B N V"] | None = None
    sizes: list[int] | None = None
    depths: list[int] | None = None
    levels: int | None = None
    width: int | None = None
    passes: int = 0
    auxiliary: AuxiliaryNodes | None = None
    gains: Float[Tensor, "B N"] | Sequence[Sequence[float]] | None = None
    source: str = ""
    sources: Sequence[Sequence[str]] | None = None
    listed: tuple[list[list[int]], list[list[int]]] | None = None

    @classmethod
    def chain(
        cls,
        tokens: Int[Tensor, "B N"],
        probs: Float[Tensor, "B N V"] | None = None,
        sizes: list[int] | None = None,
        passes: int = 0,
    ) -> Draft:
        """One path per row."""
        parents = _chain_parents(len(tokens), tokens.shape[1], tokens.device)
        return cls(tokens, parents, probs, sizes=sizes, passes=passes)

    @classmethod
    def chains(
        cls, rows: Sequence[list[int]], device: torch.device, gains: Sequence[Sequence[float]] | None = None
    ) -> Draft:
        """One path per row from ids on the host, ragged; a row may be empty."""
        listed = padded(rows)
        tokens, above = from_host(listed, device), list(range(-1, len(listed[0]) - 1))
        parents = _chain_parents(len(rows), len(above), device)
        sizes = [len(row) for row in rows]
        return cls(tokens, parents, sizes=sizes, gains=gains, listed=(listed, [above] * len(rows)))

    def lists(self) -> tuple[list[list[int]], list[list[int]]]:
        """``tokens`` and ``parents`` on the host; to be read from the device where they are not known."""
        return self.listed or (self.tokens.tolist(), self.parents.tolist())

    @property
    def is_chain(self) -> bool:
        return self.levels is None

    @property
    def max_depth(self) -> int:
        """Nodes on the longest path over all rows."""
        return self.tokens.shape[1] if self.levels is None else self.levels

    @property
    def max_width(self) -> int:
        """Most children a node has."""
        if self.width is not None:
            return self.width
        return min(1, self.tokens.shape[1]) if self.is_chain else self.tokens.shape[1]


@lru_cache(maxsize=256)
def _chain_parents(rows: int, nodes: int, device: torch.device) -> Int[Tensor, "B N"]:
    """Columns of the parents in chains; nothing writes into it."""
    with torch.inference_mode(False):
        return torch.arange(-1, nodes - 1, device=device).expand(rows, -1)


def ragged(rows: Sequence[list[int]], device: torch.device) -> Int[Tensor, "B N"]:
    """Rows from the host, ``ABSENT`` after their ends; all may be empty."""
    return from_host(padded(rows), device)


def padded(rows: Sequence[list[int]]) -> list[list[int]]:
    """Rows of one length, ``ABSENT`` after their ends."""
    width = max(map(len, rows))
    return [row + [ABSENT] * (width - len(row)) for row in rows]


@dataclass(frozen=True, slots=True)
class Continuation:
    """What a search in the text found to follow, on the host.

    Attributes:
        tokens: ids, in order; empty if nothing was found.
        match: tokens of the ending of the text that occurred before.
        expected: tokens of the path that will be kept if the text repeats itself: the sum over the path of the product
            of relative frequencies up to each token (SuffixDecoding, Oliaro et al. 2024, arXiv 2411.04975, sec. 4).
        gains: how likely each token is kept, see ``Draft.gains``.
    """

    tokens: list[int]
    match: int = 0
    expected: float = 0.0
    gains: list[float] | None = None


@dataclass(frozen=True, slots=True)
class Verification:
    """What a verification rule decided, still on the device.

    Attributes:
        path: [B, P] columns of ``Draft.tokens`` that are kept, in order; ``ABSENT`` after the last one.
            P = ``draft.max_depth``.
        accepted: [B] how many are kept.
        bonus: [B] the target's own token after the kept path.
    """

    path: Int[Tensor, "B P"]
    accepted: Int[Tensor, "B"]
    bonus: Int[Tensor, "B"]


@runtime_checkable
class AcceptanceRule(Protocol):
    """Decides which drafted tokens are kept. Pure, vectorised over rows, no host read."""

    guarantee: ClassVar[Guarantee]

    def __call__(
        self, draft: Draft, logits: Float[Tensor, "B M V"], sampling: Sampling, rng: Generator
    ) -> Verification:
        """Judge ``draft`` by the target's ``logits``.

        ``logits[:, 0]`` are for the children of the root, ``logits[:, 1 + i]`` for the children of draft node i.
        ``sampling`` turns them into the distribution the user asked for.
        """
        ...

    def bonus(self, logits: Float[Tensor, "B V"], sampling: Sampling, rng: Generator) -> Int[Tensor, "B"]:
        """The token after the root where nothing was drafted: what judging an empty draft gives."""
        ...


@dataclass(slots=True)
class Context:
    """What a drafter can read when it proposes.

    Attributes:
        tokens: per row, all committed ids, prompt included; the last one is the root.
        root: [B] the last committed ids, on the device.
        output: the target's last output (prefill or verification pass).
        path: [B, P] nodes of that pass, as rows of ``output`` (0 = its root), that were kept, root included; None after
            the prefill, where every position was kept.
        sampling: how the target's distribution is processed; a drafter that samples uses the same.
        rng: generator on the target's device.
        auxiliary_tokens: per row, the target's most likely tokens after the auxiliary nodes of the last pass (host
            side); empty where that pass had none, or the row got a new prompt after it.
        kept: ``path`` on the host, without what fills it up; None where it is not known there.
        report: of the last pass, if it was a recorded round (``methods.engine.greedy_round``): bonus, path and the
            tokens of its draft nodes, on the device.
        cache: the target's, of all committed tokens but the last; a drafter that writes behind its ends sets the
            lengths back. None outside a decode.
    """

    tokens: list[list[int]]
    root: Int[Tensor, "B"]
    output: Output
    path: Int[Tensor, "B P"] | None
    sampling: Sampling
    rng: Generator
    auxiliary_tokens: list[list[int]] = field(default_factory=list)
    kept: list[list[int]] | None = None
    report: Int[Tensor, "B R"] | None = None
    cache: Cache | None = None

    def note(self, output: Output, path: Int[Tensor, "B P"], kept: list[list[int]]) -> None:
        """A pass of the target, and what was kept of it."""
        self.output, self.path, self.kept = output, path, kept

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order."""
        chosen = list(rows)
        self.tokens = [self.tokens[row] for row in chosen]
        self.root, self.output = self.root[chosen], self.output.of_rows(chosen)
        if self.path is not None:
            self.path = self.path[chosen]
        if self.auxiliary_tokens:
            self.auxiliary_tokens = [self.auxiliary_tokens[row] for row in chosen]
        if self.kept is not None:
            self.kept = [self.kept[row] for row in chosen]
        self.report = None

    @property
    def last_hidden(self) -> Float[Tensor, "B D"]:
        """The target's hidden state after the last kept node of the last pass, from which the root was chosen."""
        hidden = self.output.hidden
        if self.path is None:  # after the prefill: the end of the prompt, and nothing else without hidden_layers
            return hidden[:, -1]
        ends = {nodes[-1] for nodes in self.kept or ()}
        if len(ends) == 1:
            return hidden[:, ends.pop()]
        last = (self.path >= 0).sum(1, keepdim=True) - 1
        node = self.path.gather(1, last)
        return hidden.gather(1, node[:, :, None].expand(-1, -1, hidden.shape[2]))[:, 0]


@runtime_checkable
class Drafter(Protocol):
    """Proposes drafts: a model, heads, a table, a search in the text so far.

    Attributes:
        nodes: the most nodes of one proposal, auxiliary included; the loop sizes the caches by it.
        hidden_layers: layers of the target whose hidden states the drafter reads from ``Context.output``.
    """

    nodes: int
    hidden_layers: Sequence[int]

    def reset(self, prompts: list[list[int]], limit: int) -> None:
        """Forget earlier prompts and make room for ``limit`` tokens on top of these."""
        ...

    def propose(self, context: Context) -> Draft:
        """Propose a draft for every row; an empty draft (N = 0) means a plain autoregressive round."""
        ...

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order; the texts of the others have ended.

        It can come before the first proposal. The next context has the rows that stay.
        """
        ...


@runtime_checkable
class RowDrafter(Drafter, Protocol):
    """A drafter for ``Refillable`` decoders."""

    def reset_rows(self, prompts: Mapping[int, list[int]]) -> None:
        """Forget the text of some rows; each starts with a new prompt, as after ``reset``.

        In the next context, the path of such a row has one node of the last pass: the end of its prompt.
        """
        ...


@runtime_checkable
class ResumingDrafter(Drafter, Protocol):
    """A drafter that reads the target's states, for decoders with ``PrefixCaching``."""

    def resume(self, last: Context, prompts: list[list[int]], limit: int, kept: int) -> int:
        """As ``reset``, but keep what was read of the beginning that the only prompt has in common with the last text.

        Args:
            last: of that text, after its last round.
            kept: tokens in common.

        Returns:
            From which token on, ``kept`` at most, the first ``Context.output`` must have states.
        """
        ...


class StatelessDrafter:
    """Base of drafters that keep nothing between rounds."""

    hidden_layers: Sequence[int] = ()

    def reset(self, prompts: list[list[int]], limit: int) -> None:
        """Nothing to forget."""

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Nothing to drop."""

    def reset_rows(self, prompts: Mapping[int, list[int]]) -> None:
        """Nothing to forget."""

    def skip(self, context: Context) -> None:
        """Nothing to read."""


@runtime_checkable
class Lookup(Drafter, Protocol):
    """A drafter that searches the text so far."""

    def find(self, row: int, tokens: list[int]) -> Continuation:
        """What may follow the text of a row."""
        ...


@runtime_checkable
class RoundsDrafter(Drafter, Protocol):
    """A drafter that a CPU's kernels can draft with inside several rounds of one row, see ``CausalLM.rounds``."""

    def rounds_guesses(self) -> Guesses | None:
        """How they guess; None: they cannot."""
        ...


@runtime_checkable
class SkippableDrafter(Drafter, Protocol):
    """A drafter that need not propose in every round."""

    def skip(self, context: Context) -> None:
        """Read what the last pass committed, in the place of ``propose``."""
        ...


@runtime_checkable
class RestingDrafter(SkippableDrafter, Protocol):
    """A drafter that may sit out many rounds at once.

    Attributes:
        reads_last: of rounds in which nothing is drafted it need see the last one alone.
    """

    reads_last: bool


@runtime_checkable
class PartedDrafter(SkippableDrafter, Protocol):
    """A drafter of several parts, each of which may sit out a round.

    Attributes:
        parts: their names, as in ``Draft.source``; the last one is the one that takes time.
    """

    parts: Sequence[str]

    def propose_by(self, context: Context, parts: Collection[str]) -> Draft:
        """Propose by these parts, at least one; the others read what the last pass committed."""
        ...


@runtime_checkable
class LaunchedDrafter(SkippableDrafter, Protocol):
    """A drafter that can draft on the device before the host knows what the last pass kept."""

    def launch(self, report: Int[Tensor, "B R"], output: Output, context: Context) -> Draft | None:
        """Begin the draft that ``propose`` returns next, or that ``skip`` drops; of several parts the last one's.

        Args:
            report, output: of a recorded round of the target, see ``methods.engine.greedy_round``.
            context: of that round; the host does not know yet what follows it.

        Returns:
            That draft, which lasts until the next one; None: ``propose`` does all.
        """
        ...


@runtime_checkable
class TrimmableDrafter(Drafter, Protocol):
    """A drafter that must know which of its nodes the target scores."""

    def trim(self, columns: Int[Tensor, "B n"]) -> None:
        """Only these columns of the last proposal are drafted, in this order."""
        ...
