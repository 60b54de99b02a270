"""The interface every generation method implements, and the only thing the runner knows of it.

Shapes, everywhere in this package: B rows, T prompt length, N draft nodes, M = N + 1 scored nodes
(node 0 is the row's last committed token, whose keys and values are not in the cache yet),
V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

if TYPE_CHECKING:
    from methods.engine.causal_lm import CausalLM, Output
    from methods.engine.sampling import Sampling

ABSENT = -1  # in Draft.tokens: no node here; in Verdict.path: no further node; in parents: the root


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


@dataclass(frozen=True, slots=True)
class Scouts:
    """Nodes that are scored in the same pass as a draft and never judged: no rule sees them, no text holds them.

    They are what a drafter wants the target's opinion on without proposing it, e.g. a window of Jacobi iterations.

    Attributes:
        tokens: [B, S] ids, all present.
        parents: [B, S] column of the parent node, counted through the draft and on through the scouts; -1 is the root.
        levels: nodes on the longest path from the root to a scout.
        asked: the target's most likely token behind each of the last ``asked`` scouts comes back to the host, in the
            one read the loop makes per round (``Context.scouted``).
    """

    tokens: Int[Tensor, "B S"]
    parents: Int[Tensor, "B S"]
    levels: int
    asked: int


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree of draft tokens per row; a chain is the tree whose parents are -1, 0, 1, ...

    Children stand behind their parents (``parents[b, i] < i``).

    Attributes:
        tokens: [B, N] ids; ``ABSENT`` marks a column that holds no node in this row. Absent nodes stand
            behind the present ones, are never accepted and never drawn.
        parents: [B, N] column of the parent node; -1 is the root, the row's last committed token.
        probs: [B, N, V] float32, the distribution each node was really drawn from. None: the nodes were
            chosen deterministically (n-grams, retrieval, argmax, top-k), which the rules treat as q = 1.
        sizes: per row, how many nodes are present (host side); None: all N in every row.
        depths: per row, nodes on the longest path (host side); None: the same as ``sizes`` (a chain).
        levels: nodes on the longest path over all rows; None: N (a chain).
        width: most children a node has; None: N. Rules that try siblings in turn take as many turns.
        passes: forward passes the drafter spent.
        scouts: nodes that go through the target behind the draft and are not part of it; N does not count them.
    """

    tokens: Int[Tensor, "B N"]
    parents: Int[Tensor, "B N"]
    probs: Float[Tensor, "B N V"] | None = None
    sizes: list[int] | None = None
    depths: list[int] | None = None
    levels: int | None = None
    width: int | None = None
    passes: int = 0
    scouts: Scouts | None = None

    @classmethod
    def chain(
        cls,
        tokens: Int[Tensor, "B N"],
        probs: Float[Tensor, "B N V"] | None = None,
        sizes: list[int] | None = None,
        passes: int = 0,
    ) -> Draft:
        """One path per row."""
        batch, nodes = tokens.shape
        parents = torch.arange(-1, nodes - 1, device=tokens.device).expand(batch, nodes)
        return cls(tokens, parents, probs, sizes=sizes, passes=passes)

    @classmethod
    def chains(cls, rows: Sequence[list[int]], device: torch.device) -> Draft:
        """One path per row from ids on the host, ragged; a row may be empty."""
        width = max(len(row) for row in rows)
        padded = [row + [ABSENT] * (width - len(row)) for row in rows]
        tokens = torch.tensor(padded, dtype=torch.long, device=device).view(len(rows), width)
        return cls.chain(tokens, sizes=[len(row) for row in rows])

    @property
    def is_chain(self) -> bool:
        return self.levels is None

    @property
    def max_depth(self) -> int:
        """Nodes on the longest path over all rows: how many levels a rule has to walk."""
        return self.tokens.shape[1] if self.levels is None else self.levels

    @property
    def max_width(self) -> int:
        """Most children a node has: how many turns a rule takes on one level."""
        if self.width is not None:
            return self.width
        return min(1, self.tokens.shape[1]) if self.is_chain else self.tokens.shape[1]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verification rule decided, still on the device.

    Attributes:
        path: [B, P] columns of ``Draft.tokens`` that are kept, in order; ``ABSENT`` behind the last one.
            P = ``draft.max_depth``.
        accepted: [B] how many are kept.
        bonus: [B] the target's own token behind the kept path.
    """

    path: Int[Tensor, "B P"]
    accepted: Int[Tensor, "B"]
    bonus: Int[Tensor, "B"]


@runtime_checkable
class Rule(Protocol):
    """A verification rule: which drafted tokens may stay. Pure, vectorised over rows, no host read."""

    guarantee: ClassVar[Guarantee]

    def __call__(self, draft: Draft, logits: Float[Tensor, "B M V"], sampling: Sampling, rng: Generator) -> Verdict:
        """Judge ``draft`` by the target's ``logits``.

        ``logits[:, 0]`` are the target's for the children of the root, ``logits[:, 1 + i]`` for the children
        of draft node i. ``sampling`` turns them into the distribution the user asked for.
        """
        ...


@dataclass(slots=True)
class Context:
    """What a drafter may look at when it proposes.

    Attributes:
        tokens: per row, all committed ids, prompt included; the last one is the root.
        root: [B] the last committed ids, on the device.
        output: the target's last output (prefill or verification pass).
        path: [B, P] nodes of that pass, as rows of ``output`` (0 = its root), that were kept, root included;
            None after the prefill, where every position was kept.
        sampling: how the target's distribution is processed; a drafter that samples uses the same.
        rng: generator on the target's device.
        scouted: per row, the target's most likely tokens behind the scouts it was asked about in the last pass
            (host side); empty where that pass had none, as is that of a row which began anew behind it.
    """

    tokens: list[list[int]]
    root: Int[Tensor, "B"]
    output: Output
    path: Int[Tensor, "B P"] | None
    sampling: Sampling
    rng: Generator
    scouted: list[list[int]] = field(default_factory=list)

    @property
    def last_hidden(self) -> Float[Tensor, "B D"]:
        """The target's hidden state that the root was chosen from: behind the last kept node of the last pass."""
        hidden = self.output.hidden
        if self.path is None:  # after the prefill: the end of the prompt, and nothing else without taps
            return hidden[:, -1]
        last = (self.path >= 0).sum(1, keepdim=True) - 1
        node = self.path.gather(1, last)
        return hidden.gather(1, node[:, :, None].expand(-1, -1, hidden.shape[2]))[:, 0]


@runtime_checkable
class Drafter(Protocol):
    """What proposes: a model, heads, a table, a search in the text so far.

    Attributes:
        nodes: the most nodes one proposal may hold, scouts included; the loop sizes the caches by it.
        taps: layers of the target whose hidden states the drafter reads from ``Context.output``.
    """

    nodes: int
    taps: Sequence[int]

    def reset(self, prompts: list[list[int]], limit: int) -> None:
        """Forget everything of earlier prompts and make room for ``limit`` tokens on top of these."""
        ...

    def propose(self, context: Context) -> Draft:
        """Propose a draft for every row; an empty draft (N = 0) means a plain autoregressive round."""
        ...


@runtime_checkable
class Renewable(Drafter, Protocol):
    """A drafter for ``Refillable`` decoders."""

    def renew(self, prompts: Mapping[int, list[int]]) -> None:
        """Forget the text of some rows; each begins anew with a prompt, as after ``reset``.

        In the next context, the last pass of such a row has one node that counts: the end of its prompt, on its path.
        """
        ...


@dataclass(frozen=True, slots=True)
class Example:
    """One dialogue of a corpus as the target reads it.

    Attributes:
        prompt: ids up to where the answer begins, chat template included.
        answer: ids of the answer, end-of-sequence token included.
    """

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True, slots=True)
class Workshop:
    """What a preparation works with.

    Attributes:
        target: the model it prepares for.
        corpus: dialogues, in a fixed order.
        folder: where the finished part goes. What an interrupted call left there is still there; notes on how it was
            made go into its folder ``making``, which is no piece of the part.
        seed: the only source of randomness.
        progress: told (stage, done, total) as the work goes on.
        log: takes one point of the curves to be followed, e.g. ``{"step": 20, "loss": 1.3}``.
        common: folder shared by all preparations for the same model and corpus, e.g. for what the target wrote.
    """

    target: CausalLM
    corpus: Sequence[Example]
    folder: Path
    seed: int
    progress: Callable[[str, int, int], None]
    log: Callable[[Mapping[str, float]], None]
    common: Path


@dataclass(frozen=True, slots=True)
class Foundry:
    """What the making of a whole model works with: there is no target yet.

    Attributes:
        pairs: what is read, and what is to be written, as texts in a fixed order.
        validation: other pairs, to judge the model by on the way.
        teacher: a model whose own texts are learnt from in place of those of ``pairs``, with its tokenizer; None: none.
        device: where the model is made.
        folder, seed, progress, log: see ``Workshop``.
        common: folder shared by all that learn from this teacher and these pairs.
    """

    pairs: Sequence[tuple[str, str]]
    validation: Sequence[tuple[str, str]]
    teacher: tuple[CausalLM, Any] | None
    device: torch.device
    folder: Path
    seed: int
    progress: Callable[[str, int, int], None]
    log: Callable[[Mapping[str, float]], None]
    common: Path


class MissingPart(ValueError):
    """What a decoder cannot do without is not there; the message names the command that makes it."""


@runtime_checkable
class ModelMaker(Protocol):
    """Makes a model of its own, to be loaded by name like any other. ``fit`` is given a ``Foundry``.

    Attributes:
        prepares, takes: see ``Trainable``.
        corpus: names of the pairs it learns from unless others are asked for.
        validation: names of the pairs it is judged by; None: some of the former are held out.
        learns_from_teacher: whether a teacher is needed.
    """

    prepares: ClassVar[str]
    takes: ClassVar[str]
    corpus: ClassVar[str]
    validation: str | None

    @property
    def learns_from_teacher(self) -> bool: ...

    def model_name(self, corpus: str) -> str:
        """What the model is called, e.g. ``multi30k_4_4``."""
        ...

    def fit(self, foundry: Foundry) -> dict[str, Any]:
        """See ``Trainable.fit``."""
        ...


@runtime_checkable
class PairLearner(Protocol):
    """Makes a part for a translation model out of pairs. ``fit`` is given a ``Foundry`` with that model as its teacher.

    Attributes:
        prepares, takes: see ``Trainable``.
        corpus, validation: see ``ModelMaker``.
    """

    prepares: ClassVar[str]
    takes: ClassVar[str]
    corpus: ClassVar[str]
    validation: str | None

    def fit(self, foundry: Foundry) -> dict[str, Any]:
        """See ``Trainable.fit``."""
        ...


@runtime_checkable
class Trainable(Protocol):
    """Whatever must be prepared before decoding: gradient heads, a search, a datastore, a threshold.

    Attributes:
        prepares: what it makes, for people, e.g. ``a datastore of token ids``.
        takes: how long that takes, for people, e.g. ``seconds per million tokens``.
    """

    prepares: ClassVar[str]
    takes: ClassVar[str]

    def fit(self, workshop: Workshop) -> dict[str, Any]:
        """Make the part and write it into the workshop's folder, going on from what lies there.

        Returns:
            Facts for the card beside the part: sizes, steps, acceptance. Lines under ``summary`` are printed instead.

        Raises:
            ValueError: arguments or a corpus that cannot work.
        """
        ...
