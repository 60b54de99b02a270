"""How many nodes to draft: as many as pay by what passes cost here, none where drafting does not pay.

A pass over more nodes takes longer, so a node pays only if it is kept often enough. The rule is that of CaDDTree: add
nodes in the order of the probability that they are kept, and take the number with the most tokens per time,
(1 + expected tokens) / (time of drafting + time of the pass). ``Costs`` has these times, measured on the machine that
decodes, ``size`` finds the number, and ``Pace`` applies both to the drafts of one decode:

- Probabilities come from the drafter (``Draft.gains``), times the ratio of what was kept to what it had expected lately
  (``Ratio``), so that an over-confident network drafts less. Where it has none, or where its tokens were drawn, they
  are how often nodes of the same depth and rank were kept lately (``Places``).
- An account (``Account``) books what each round gains over rounds without a draft, in passes over one node. Once
  ``ALLOWANCE`` is lost, rounds go without a draft, except for probes after 8, 16, 32, ... rounds. No round risks more
  than is left of the allowance, and a probe the time p of drafting and of one node, or ``RISK`` if nodes cost less.
  Each part of a drafter of several has an account of its own, so a network that does not pay sits out rounds in which
  a lookup drafts.

So over n rounds at most ALLOWANCE + p * (1 + log2(1 + n / 8)) passes over one node are lost by each part, with a probe
in 128 rounds once waits are that long: 2 passes in 128 rounds where p is a quarter of one. Drafting includes nodes that
are scored beside a draft. The bound counts by ``Costs``, not by a clock. A round that was launched before the host read
what ended the drafting is booked too.

In large batches on a CPU a trained drafter takes as long as a pass, and so does a probe. One that could not pay even if
``_MOST_KEPT`` of its nodes were kept is not asked at all (``affordable``), and one that did not pay in a text sits out
the next 1, 2, 4, ... 16 texts (``Texts``); the target then keeps no states for it. So does a search that takes as long,
beside the passes of a small model or of a GPU.

Where all nodes of a draft together cost less than the host takes to size it, as on a GPU that waits for its memory,
recorded rounds judge it whole: its probabilities are not read from the device, and its round can be launched before the
host has read the last one.

Texts stay exact at any temperature. The size depends on committed tokens and on the drafter's own scores, never on what
the target makes of the draft in flight; drawn nodes are cut by their places, not by their tokens. Rows of a batch are
verified in one pass, so they share one size and one account.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal, cast

import torch
from jaxtyping import Int
from torch import Tensor

from methods.drafting import (
    AuxiliaryNodes,
    Context,
    Draft,
    Drafter,
    LaunchedDrafter,
    Lookup,
    PartedDrafter,
    RestingDrafter,
    SkippableDrafter,
    StatelessDrafter,
    TrimmableDrafter,
)
from methods.engine.causal_lm import Output
from methods.engine.host_copies import from_host

ALLOWANCE = 0.75  # passes over one node that may be lost before rounds go without a draft
RISK = 0.1  # what a probe may cost beside the time of drafting
_RESERVE = 4.0  # of an account
_FIRST_WAIT, _LONGEST_WAIT = 8, 128  # rounds between probes
_MEMORY = 0.9  # weight of the past in a ratio, per round
_PLACES_MEMORY = 0.98
_PLACES_WEIGHT = 4.0  # rounds that the first guess about a place counts for
_MOST_RATIO = 2.0
_MOST_KEPT = 0.9  # of the nodes whose parents are kept, by the best of trained drafters
_DEAR = 0.4  # passes over one node that drafting takes, from which on losing in every text matters
_MOST_TEXTS = 16
_EVERY = 1 << 30  # rounds: all of them
_FLAT = 0.2  # passes over one node that all nodes of a draft may take together without being sized
_WEIGHED = 5e-4  # the same for each node of a row, which the host would have to weigh

CostsOption = Literal["auto"] | Sequence[Sequence[int | float]] | None
"""``auto``: as measured for the run (``methods.decoder.CostAware``), all nodes before that; pairs: see ``Costs.of``;
None: all nodes in every round."""


@dataclass(frozen=True)
class Costs:
    """Times of rounds, those of a batch of the size that is decoded, over the time of a pass over one node.

    Attributes:
        nodes: per row, ascending.
        times: of passes over so many; linear between them and after the last, the first below it.
        draft: what a round with a draft takes beside its pass.
    """

    nodes: tuple[int, ...]
    times: tuple[float, ...]
    draft: float = 0.0
    _known: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, pairs: Sequence[Sequence[int | float]]) -> Costs:
        """Read pairs (nodes of a pass, root included; its time in any unit); the pair of 0 nodes is that of drafting.

        Raises:
            ValueError: pairs that are none, or out of order.
        """
        well = all(len(pair) == 2 and pair[0] >= 0 and (pair[1] > 0 or pair[0] == 0) for pair in pairs)
        passes = [(int(pair[0]), float(pair[1])) for pair in pairs if len(pair) == 2 and pair[0] >= 1]
        ordered = all(low[0] < high[0] for low, high in zip(pairs, pairs[1:], strict=False)) if well else False
        draft = float(pairs[0][1]) if well and pairs and pairs[0][0] == 0 else 0.0
        if len(passes) < 2 or not ordered or draft < 0.0:
            raise ValueError(
                "costs must be auto, null, or two or more pairs (nodes, time) above 0, nodes ascending, where the pair "
                f"of 0 nodes is the time of drafting, got {[list(pair) for pair in pairs]}. An example: "
                "costs=[[0,0.1],[1,1.0],[16,1.4],[64,3.0]]."
            )
        nodes, times = zip(*passes, strict=True)
        made = cls(nodes, times, draft)
        unit = made.time(1)
        return cls(nodes, tuple(time / unit for time in times), draft / unit)

    @classmethod
    def given(cls, option: CostsOption) -> Costs | None:
        """Those that an option contains; None: it has none.

        Raises:
            ValueError: see ``of``, or another word than ``auto``.
        """
        return None if option is None or option == "auto" else cls.of(option)

    def time(self, nodes: int) -> float:
        """Of a pass over the root and ``nodes - 1`` more."""
        found = self._known.get(nodes)
        if found is None:
            found = self._known[nodes] = self._interpolated(nodes)
        return found

    def _interpolated(self, nodes: int) -> float:
        if len(self.nodes) == 1 or nodes <= self.nodes[0]:
            return self.times[0]
        place = min(bisect_right(self.nodes, nodes), len(self.nodes) - 1)
        (low, high), (before, after) = self.nodes[place - 1 : place + 1], self.times[place - 1 : place + 1]
        return max(before + (after - before) * (nodes - low) / (high - low), min(before, after))


def size(
    gains: Iterable[float],
    costs: Costs,
    draft: float = 0.0,
    base: int = 1,
    most: float = math.inf,
    passes: Collection[int] | None = None,
) -> int:
    """How many nodes make the fastest round; 0: none pays.

    Args:
        gains: of nodes in the order in which they are added, the probability that each is kept; of a batch, the mean
            over its rows.
        costs: of passes.
        draft: time of drafting.
        base: nodes of the pass without any of them.
        most: what a round may take longer than a pass over one node.
        passes: nodes of a pass, to choose from; None: any number.
    """
    best, tokens = 0, 1.0
    best_rate = tokens / (draft + costs.time(base))
    for nodes, gain in enumerate(gains, start=1):
        tokens += gain
        time = draft + costs.time(base + nodes)
        if time - 1.0 > most:
            break
        if tokens / time > best_rate and (passes is None or base + nodes in passes):
            best, best_rate = nodes, tokens / time
    return best


class Unasked(StatelessDrafter):
    """Drafts nothing.

    Args:
        nodes: most of a draft, those of the drafter that it replaces.
    """

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes

    def propose(self, context: Context) -> Draft:
        return Draft.chain(context.root.new_empty(len(context.tokens), 0))


def affordable(costs: Costs, nodes: int) -> bool:
    """Whether a trained drafter of so many nodes may pay."""
    tokens = accumulate(_MOST_KEPT**depth for depth in range(nodes + 1))
    return any(found > costs.draft + costs.time(passed) for passed, found in enumerate(tokens, start=1))


class Texts:
    """Which texts a drafter sits out, where drafting takes ``_DEAR`` passes over one node or more."""

    def __init__(self) -> None:
        self._wait, self._left = 1, 0

    def sits_out(self, costs: Costs, gained: float | None) -> bool:
        """Whether it sits out the next one; to be asked once a text.

        Args:
            gained: by the last one, in passes over one node; None: it did not draft there.
        """
        if costs.draft < _DEAR:
            return False
        if gained is not None:
            lost = gained < 0.0
            self._left = self._wait if lost else 0
            self._wait = min(2 * self._wait, _MOST_TEXTS) if lost else 1
        self._left -= 1
        return self._left >= 0


class Account:
    """What drafting has gained in a decode, in passes over one node; says which rounds go without a draft.

    Args:
        reserve: most that is booked of what was gained, so that a text that turns hard is noticed.
        balance: to begin with.
    """

    def __init__(self, reserve: float = _RESERVE, balance: float = 0.0) -> None:
        self.balance, self._reserve = balance, reserve
        self._wait, self._left = _FIRST_WAIT, 0

    def pause(self) -> bool:
        """Whether the next round goes without a draft; to be asked once a round."""
        self._left -= 1
        return self._left >= 0

    @property
    def rounds(self) -> int:
        """How many rounds from here on go without a draft."""
        return max(self._left, 0)

    @property
    def left(self) -> float:
        """Of what may be lost."""
        return self.balance + ALLOWANCE

    @property
    def pausing(self) -> bool:
        """Whether the next round goes without a draft, by what was booked so far."""
        return self._left > 0

    def book(self, gain: float) -> None:
        """Tokens of a round beyond the first, less its time beyond that of a pass over one node."""
        self.balance = min(self.balance + gain, self._reserve)
        if self.balance >= 0.0:
            self._wait = _FIRST_WAIT
        elif self.balance <= RISK / 2 - ALLOWANCE:
            self.balance = -ALLOWANCE
            if not self.pausing:  # the round was under way when the pause began
                self._left = self._wait
                self._wait = min(2 * self._wait, _LONGEST_WAIT)


@dataclass(slots=True)
class Ratio:
    """Tokens kept over tokens expected, an exponential average that starts at 1."""

    kept: float = 0.0
    expected: float = 0.0

    @property
    def value(self) -> float:
        return min((1.0 + self.kept) / (1.0 + self.expected), _MOST_RATIO)

    def note(self, kept: float, expected: float) -> None:
        """A round; one without a node (0, 0) lets the past fade."""
        self.kept, self.expected = _MEMORY * self.kept + kept, _MEMORY * self.expected + expected


class Places:
    """How often nodes are kept whose parents are, by depth and by rank among their siblings."""

    def __init__(self) -> None:
        self._tried: dict[tuple[int, int], float] = defaultdict(float)
        self._kept: dict[tuple[int, int], float] = defaultdict(float)

    def gains(self, parents: Sequence[int]) -> list[float]:
        """Probabilities that the nodes of a tree are kept; none above its parent's or an earlier sibling's."""
        gains: list[float] = []
        siblings: dict[int, float] = {}
        for place, parent in zip(_places(parents), parents, strict=True):
            above = gains[parent] if parent >= 0 else 1.0
            gain = min(above * self._share(place), siblings.get(parent, 1.0))
            siblings[parent] = gain
            gains.append(gain)
        return gains

    def note(self, parents: Sequence[int], path: Sequence[int]) -> None:
        """A round: which nodes of a tree were kept."""
        kept = set(path)
        judged = {-1, *kept}
        for column, (place, parent) in enumerate(zip(_places(parents), parents, strict=True)):
            if parent in judged:
                self._tried[place] = _PLACES_MEMORY * self._tried[place] + 1.0
                self._kept[place] = _PLACES_MEMORY * self._kept[place] + (column in kept)

    def fade(self) -> None:
        """A round without a draft."""
        for place in self._tried:
            self._tried[place] *= _MEMORY
            self._kept[place] *= _MEMORY

    def _share(self, place: tuple[int, int]) -> float:
        guess = 0.4 / (1 + place[1]) ** 1.5
        return (_PLACES_WEIGHT * guess + self._kept[place]) / (_PLACES_WEIGHT + self._tried[place])


def _places(parents: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Depth and rank among siblings of each node of a tree."""
    depths: list[int] = []
    children: dict[int, int] = defaultdict(int)
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        yield depths[-1], children[parent]
        children[parent] += 1


@dataclass(slots=True)
class Tally:
    """Counted over the rounds of a decoder: all, those without a draft, and the nodes per row of their passes.

    Attributes:
        gained: by each part, as its account books it, until it is taken out.
    """

    rounds: int = 0
    undrafted: int = 0
    nodes: int = 0
    gained: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def note(self, nodes: int) -> None:
        """A round whose draft has so many nodes per row."""
        self.rounds += 1
        self.undrafted += nodes == 0
        self.nodes += nodes

    def stats(self) -> dict[str, float]:
        """Mean number of drafted nodes per round, and the share of the rounds without a draft."""
        rounds = max(self.rounds, 1)
        return {
            "nodes_per_round": round(self.nodes / rounds, 4),
            "undrafted_rounds": round(self.undrafted / rounds, 4),
        }


@dataclass(slots=True)
class _Round:
    """What is known of a round before it is judged.

    Attributes:
        trees: per row, the parents of the drafted nodes.
        gains: per row, the probabilities that they are kept, as the drafter says; None: it does not.
        sources: per row, what drafted each.
        extra: what the round takes longer than a pass over one node, by what proposed.
    """

    trees: list[list[int]]
    gains: list[list[float]] | None
    sources: list[list[str]]
    extra: dict[str, float]

    @classmethod
    def whole(cls, part: str, extra: float) -> _Round:
        """Of a draft of one part that is not sized."""
        return cls([], None, [], {part: extra})


_ABILITIES = (PartedDrafter, Unasked, SkippableDrafter, TrimmableDrafter, LaunchedDrafter, Lookup, RestingDrafter)
_found: dict[type[Drafter], tuple[bool, ...]] = {}


def _abilities(drafter: Drafter) -> tuple[bool, ...]:
    """Which of ``_ABILITIES`` a drafter has. A class is asked once: a protocol takes longer than a small draft."""
    kind = type(drafter)
    if kind not in _found:
        _found[kind] = tuple(isinstance(drafter, ability) for ability in _ABILITIES)
    return _found[kind]


@dataclass(slots=True)
class Pace:
    """Proposals of one decode, of the size that pays.

    Attributes:
        drafter: proposes.
        costs: of rounds; None: every proposal is drafted whole.
        tally: of the decoder.
        fixed_passes: passes have one of the sizes in ``costs`` (where those of other sizes lack a CUDA graph).
        refilled: rows may be given new prompts.
    """

    drafter: Drafter
    costs: Costs | None
    tally: Tally
    fixed_passes: bool = False
    refilled: bool = False
    _accounts: dict[str, Account] = field(default_factory=lambda: defaultdict(Account))
    _ratios: dict[str, Ratio] = field(default_factory=lambda: defaultdict(Ratio))
    _places: Places = field(default_factory=Places)
    _round: _Round | None = None
    _begun: bool = False  # the next draft was launched
    _parts: Sequence[str] = field(init=False)
    _idle: bool = field(init=False)
    _skips: bool = field(init=False)
    _trims: bool = field(init=False)
    _launches: bool = field(init=False)
    _rests: bool = field(init=False)

    def __post_init__(self) -> None:
        is_parted, self._idle, self._skips, self._trims, self._launches, searches, rests = _abilities(self.drafter)
        reads_last = rests and cast(RestingDrafter, self.drafter).reads_last
        self._rests = searches or (reads_last and self.fixed_passes and not self.refilled)
        self._parts = cast(PartedDrafter, self.drafter).parts if is_parted else ("",)

    @property
    def rest(self) -> int:
        """How many rounds from here on go without a draft, if the drafter need not see each of them: all where nothing
        is ever drafted, and pauses of a search, which reads the text alone, or of a drafter that reads the last pass.
        """
        if self._idle or not self.drafter.nodes:
            return _EVERY
        return self._accounts[self._parts[0]].rounds if self.costs is not None and self._rests else 0

    def end_rest(self, context: Context) -> None:
        """The last of these rounds."""
        if self.costs is not None and self._skips:
            cast(SkippableDrafter, self.drafter).skip(context)

    def note_rest(self) -> None:
        """One of these rounds."""
        if self.costs is None:
            return
        self._accounts[self._parts[0]].pause()
        self._ratios[self._parts[0]].note(0.0, 0.0)
        self._places.fade()
        self.tally.note(0)

    def propose(self, context: Context, open_rows: Sequence[bool], under_way: bool = False) -> Draft:
        """A draft for every row.

        Args:
            open_rows: whether more of a row is wanted; what the others would keep does not count.
            under_way: the round over the draft that was launched is launched too, see ``whole``.
        """
        if self.costs is None:
            return self.drafter.propose(context)
        paused = [] if under_way else self._paused()
        for part in paused:  # what was kept before a pause says less about what is kept after it
            self._ratios[part].note(0.0, 0.0)
        if len(paused) == len(self._parts):
            self._begun = False
            cast(SkippableDrafter, self.drafter).skip(context)
            self._round = None
            self._places.fade()
            draft = Draft.chain(context.root.new_empty(len(context.tokens), 0))
        else:
            draft = self._cut(self._proposed(context, paused), open_rows, self.costs)
        self.tally.note(draft.tokens.shape[1])
        return draft

    def launch(self, report: Int[Tensor, "B R"], output: Output, context: Context) -> Draft | None:
        """Let the drafter begin its next draft before the host has read a round; see ``LaunchedDrafter``.

        A draft that is then not asked for, because that round ends in a pause, is lost.
        """
        if not self._launches or self._accounts[self._parts[-1]].pausing:
            return None
        begun = cast(LaunchedDrafter, self.drafter).launch(report, output, context)
        self._begun = begun is not None
        return begun

    def whole(self, draft: Draft) -> bool:
        """Whether a draft is judged whole whatever it says, so that its round can be launched at once."""
        if draft.auxiliary is not None or len(self._parts) > 1:
            return False
        return self.costs is None or self._flat(draft, self.costs)

    def _flat(self, draft: Draft, costs: Costs) -> bool:
        """Whether a recorded draft of one part is not worth being sized."""
        beside = draft.auxiliary.tokens.shape[1] if draft.auxiliary else 0
        more = costs.time(1 + beside + draft.tokens.shape[1]) - costs.time(1 + beside)
        most = _FLAT + _WEIGHED * draft.tokens.numel()
        return self.fixed_passes and draft.tokens.shape[1] > 0 and len(self._parts) == 1 and more <= most

    def _paused(self) -> list[str]:
        """Parts that sit out the next round; to be asked once a round."""
        return [part for part in self._parts if self._idle or (self._skips and self._accounts[part].pause())]

    def _proposed(self, context: Context, paused: Collection[str]) -> Draft:
        if not paused:
            return self.drafter.propose(context)
        asked = [part for part in self._parts if part not in paused]
        return cast(PartedDrafter, self.drafter).propose_by(context, asked)

    def note(self, paths: Sequence[Sequence[int]], open_rows: Sequence[bool]) -> None:
        """What was kept of the last proposal: per row, the columns of the nodes."""
        if self._round is None:
            return
        made, rows = self._round, [row for row, is_open in enumerate(open_rows) if is_open]
        kept = defaultdict[str, float](float)
        for row in rows:
            for column in paths[row]:
                kept[made.sources[row][column] if made.sources else self._parts[0]] += 1.0 / len(rows)
        if made.trees and made.gains is None:
            for row in rows:
                self._places.note(made.trees[row], paths[row])
        elif made.gains is not None:
            expected = defaultdict[str, float](float)
            for row in rows:
                for source, gain in zip(made.sources[row], made.gains[row], strict=True):
                    expected[source] += gain / len(rows)
            for source in expected or made.extra:  # of a round that drafts no node the past of all fades
                self._ratios[source].note(kept[source], expected[source])
        for part, extra in made.extra.items():
            gained = kept[part] if len(made.extra) > 1 else sum(kept.values())
            self._accounts[part].book(gained - extra)
            self.tally.gained[part] += gained - extra
        self._round = None

    def _cut(self, draft: Draft, open_rows: Sequence[bool], costs: Costs) -> Draft:
        """The best nodes of a proposal, as many as pay."""
        begun, self._begun = self._begun, False
        most, beside = draft.tokens.shape[1], draft.auxiliary.tokens.shape[1] if draft.auxiliary else 0
        if self._flat(draft, costs):
            self._round = _Round.whole(self._parts[0], costs.draft + costs.time(1 + beside + most) - 1.0)
            return draft
        trees = _trees(draft)
        scores, sources = _scores(draft, trees), _sources(draft, trees)
        if scores is None:
            gains = [self._places.gains(tree) for tree in trees]
        else:
            gains = [self._calibrated(*row) for row in zip(scores, sources, trees, strict=True)]
        offered = [draft.source] if draft.source in self._parts else self._parts
        if begun and self._parts[-1] not in offered:  # it has drafted in vain
            offered = [*offered, self._parts[-1]]
        drafting = costs.draft if self._parts[-1] in offered else 0.0
        probe = drafting + max(RISK + costs.time(1 + beside), costs.time(2 + beside)) - 1.0
        allowed = max(sum(self._accounts[part].left for part in offered), probe)
        passes = costs.nodes if self.fixed_passes else None
        ranked = [_ranked(row) for row in gains]
        nodes = size(_mean_gains(gains, ranked, open_rows, most), costs, drafting, 1 + beside, allowed, passes)
        if nodes == most:
            self._round = _Round(trees, scores, sources, _extra(offered, sources, costs, drafting, 1 + beside, nodes))
            return draft
        chosen = [sorted(row[:nodes]) for row in ranked]  # no gain is above that of a parent, which comes first
        kept = [_subtree(tree, columns) for tree, columns in zip(trees, chosen, strict=True)]
        told = None if scores is None else [[row[c] for c in own] for row, own in zip(scores, chosen, strict=True)]
        names = [[row[c] for c in own] for row, own in zip(sources, chosen, strict=True)]
        self._round = _Round(kept, told, names, _extra(offered, names, costs, drafting, 1 + beside, nodes))
        return self._trimmed(draft, chosen, kept, nodes)

    def _calibrated(self, scores: Sequence[float], sources: Sequence[str], parents: Sequence[int]) -> list[float]:
        """Probabilities of a tree's nodes by what was kept of each source lately; none above its parent's."""
        gains: list[float] = []
        for score, source, parent in zip(scores, sources, parents, strict=True):
            gains.append(min(gains[parent] if parent >= 0 else 1.0, self._ratios[source].value * score))
        return gains

    def _trimmed(self, draft: Draft, chosen: list[list[int]], trees: list[list[int]], nodes: int) -> Draft:
        """Only the chosen columns; a row with fewer nodes than that keeps columns without a node."""
        filled = [own + list(range(len(own), nodes)) for own in chosen]
        columns = from_host(filled, draft.tokens.device).view(len(filled), nodes)
        if self._trims:
            cast(TrimmableDrafter, self.drafter).trim(columns)
        tokens, probs, listed = draft.tokens.gather(1, columns), draft.probs, None
        if probs is not None:
            probs = probs.gather(1, columns[:, :, None].expand(-1, -1, probs.shape[2]))
        parents = [tree + [-1] * (nodes - len(tree)) for tree in trees]
        if draft.listed is not None:
            listed = [[row[c] for c in own] for row, own in zip(draft.listed[0], filled, strict=True)], parents
        sizes = [len(tree) for tree in trees]
        if draft.auxiliary is None and all(_is_chain(tree) for tree in trees):
            return replace(Draft.chain(tokens, probs, sizes, draft.passes), listed=listed)
        depths = [max((depth + 1 for depth, _ in _places(tree)), default=0) for tree in trees]
        return replace(
            draft,
            tokens=tokens,
            parents=from_host(parents, columns.device).view(len(trees), nodes),
            probs=probs,
            sizes=sizes,
            depths=depths,
            levels=max(depths),
            width=max((tree.count(parent) for tree in trees for parent in set(tree)), default=0),
            auxiliary=draft.auxiliary and _moved(draft.auxiliary, draft.tokens.shape[1], nodes),
            gains=None,
            sources=None,
            listed=listed,
        )


def _trees(draft: Draft) -> list[list[int]]:
    """Per row, the parents of the nodes that are present."""
    rows, most = draft.tokens.shape
    sizes = [most] * rows if draft.sizes is None else draft.sizes
    if draft.is_chain:
        return [list(range(-1, count - 1)) for count in sizes]
    parents = draft.parents.tolist() if draft.listed is None else draft.listed[1]
    return [row[:count] for row, count in zip(parents, sizes, strict=True)]


def _scores(draft: Draft, trees: Sequence[Sequence[int]]) -> list[list[float]] | None:
    """Probabilities that the drafter gives its nodes; None: it does not, or they were drawn, and must not be chosen by
    what was drawn.
    """
    if draft.gains is None or draft.probs is not None:
        return None
    rows = draft.gains.tolist() if isinstance(draft.gains, Tensor) else draft.gains
    found = []
    for row, tree in zip(rows, trees, strict=True):
        scores: list[float] = []
        for score, parent in zip(row, tree, strict=False):
            scores.append(min(float(score), scores[parent] if parent >= 0 else 1.0))
        found.append(scores)
    return found


def _sources(draft: Draft, trees: Sequence[Sequence[int]]) -> list[list[str]]:
    """What drafted each node."""
    if draft.sources is None:
        return [[draft.source] * len(tree) for tree in trees]
    return [list(row) for row in draft.sources]


def _extra(
    parts: Sequence[str], sources: Sequence[Sequence[str]], costs: Costs, drafting: float, base: int, nodes: int
) -> dict[str, float]:
    """What a round takes longer than a pass over one node, by what proposed: the nodes of each part after those of the
    parts before it; the last one pays the time of drafting.
    """
    extra, before = {}, 1.0
    for last, part in enumerate(parts, start=1):
        own = max(sum(source in parts[:last] for source in row) for row in sources)
        after = costs.time(base + (own if last < len(parts) else nodes))
        extra[part], before = after - before, after
    extra[parts[-1]] += drafting
    return extra


def _ranked(gains: Sequence[float]) -> list[int]:
    """Columns of a row, the best first, and of equal ones the first."""
    return sorted(range(len(gains)), key=lambda column: -gains[column])


def _mean_gains(
    gains: Sequence[Sequence[float]], ranked: Sequence[Sequence[int]], open_rows: Sequence[bool], nodes: int
) -> list[float]:
    """Of the n-th best node, the mean over the rows of which more is wanted."""
    rows = zip(gains, ranked, open_rows, strict=True)
    ordered = [[row[column] for column in columns] for row, columns, is_open in rows if is_open]
    if len(ordered) == 1:
        return ordered[0]
    return [sum(row[place] for row in ordered if place < len(row)) / len(ordered) for place in range(nodes)]


def _subtree(parents: Sequence[int], columns: Sequence[int]) -> list[int]:
    """Parents among the chosen columns."""
    place = {column: number for number, column in enumerate(columns)} | {-1: -1}
    return [place[parents[column]] for column in columns]


def _is_chain(parents: Sequence[int]) -> bool:
    return all(parent == column - 1 for column, parent in enumerate(parents))


def _moved(auxiliary: AuxiliaryNodes, before: int, now: int) -> AuxiliaryNodes:
    """Behind a draft of ``now`` columns instead of ``before``."""
    parents = auxiliary.parents
    return replace(auxiliary, parents=torch.where(parents >= before, parents - (before - now), parents))
