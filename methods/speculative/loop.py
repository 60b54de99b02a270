"""Draft, verify, commit: the one loop of speculative decoding (Leviathan et al. 2023, arXiv 2211.17192, alg. 1).

The drafter proposes (a chain, a tree, nothing), the rule accepts; this file has the order of events and the bookkeeping
of rows that commit different numbers of tokens. The invariant: at the start of a round the cache holds every committed
token except the last, the root. The pass scores [root, d_1 .. d_N]; row i of its logits judges the children of node i;
the row of the last kept node gives the bonus token, which is the next root. Auxiliary nodes come after d_N and are only
scored.

A row may be given another prompt between two rounds (continuous batching: Orca, Yu et al. 2022, OSDI). It is read
whole, in a step of its own and into a small cache that is then copied into the row; row and drafter are then as after
any prefill. Other rows wait meanwhile: prompts are not read in pieces together with the rounds of others.

A row whose text has ended leaves the batch between two rounds (``methods.rows``): target and drafter compute only the
others from then on. Their texts are what they would be with it, up to the rounding of passes over fewer rows; with a
temperature they draw other numbers from the same distribution.

Recorded rounds (``methods.engine.cuda_graphs``) leave on the device all that the next draft of a network reads, or the
next round where nothing is drafted. Either is launched before the host reads the last round, and so is the round over
that draft where its size depends on nothing. A CPU's kernels run
several rounds of a small model in one call where nothing is drafted: the tokens of a call come together. So run the
pauses of a search that does not pay, too. Of a single row they also run rounds with drafts, where they can make them
themselves (``RoundsDrafter``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Generator, Tensor

from methods.decoder import (
    CostAware,
    Decoder,
    Family,
    Guarantee,
    PrefixCaching,
    Prompts,
    Refillable,
    Rounds,
    Step,
    common_prefix,
)
from methods.drafting import (
    AcceptanceRule,
    Context,
    Draft,
    Drafter,
    Lookup,
    ResumingDrafter,
    RoundsDrafter,
    RowDrafter,
)
from methods.engine.causal_lm import ROUNDS_TOGETHER, CausalLM, Output
from methods.engine.cuda_graphs import GraphedLM
from methods.engine.greedy_round import Round
from methods.engine.guesses import GuessedRounds, Guesses
from methods.engine.host_copies import Reading, from_host
from methods.engine.kv_cache import Cache
from methods.engine.sampling import Sampling, top_candidates
from methods.engine.stopwatch import Stopwatch
from methods.rows import ComputedRows, guessed_steps_of, of_rows, steps_of
from methods.speculative.budget import Costs, CostsOption, Pace, Tally, Texts, Unasked
from methods.speculative.judging import Judged, judge
from methods.speculative.verification import Greedy

MOST_NODES = 4096  # of a draft; every round would verify as many


class SpeculativeDecoder(Decoder, Refillable, CostAware, PrefixCaching):
    """A target, a drafter and a rule, run in lockstep over a batch.

    Args:
        costs: of passes, by which drafts are sized; see ``methods.speculative.budget``.

    Attributes:
        guarantee: what the rule promises.
        continuous_batching: a class whose drafter is ``RowDrafter`` may declare it.
        costs: those in use; None: every proposal is drafted whole.
        candidates: how many of the most likely tokens after each node its drafter reads.

    Raises:
        ValueError: costs that are none, or a drafter of more than ``MOST_NODES``.
    """

    guarantee = Guarantee.EXACT
    family: ClassVar[Family] = "speculative"
    parallel: ClassVar[bool] = True
    candidates: int = 0

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        drafter: Drafter,
        rule: AcceptanceRule,
        costs: CostsOption = None,
    ) -> None:
        if drafter.nodes > MOST_NODES:
            raise ValueError(
                f"a draft must have at most {MOST_NODES:,} tokens, got {drafter.nodes:,}. Set a smaller draft, as "
                "method.gamma=10."
            )
        self.target, self.sampling, self.drafter, self.rule = target, sampling, drafter, rule
        self.guarantee = rule.guarantee
        self._costs_option, self.costs, self._tally, self._texts = costs, Costs.given(costs), Tally(), Texts()
        self._last: Context | None = None  # of the text that is kept

    @property
    def costs_wanted(self) -> int:
        return 1 + self.drafter.nodes if self._costs_option == "auto" and self.costs is None else 0

    def use_costs(self, costs: Sequence[Sequence[int | float]]) -> None:
        if self.costs is None:  # others come during a run
            self._tally = Tally()
        self.costs = Costs.of(costs)

    def forget_costs(self) -> None:
        self.costs, self._tally, self._texts = Costs.given(self._costs_option), Tally(), Texts()

    def stats(self) -> dict[str, Any]:
        """Of drafts that were sized: their mean number of nodes, and the share of rounds without one."""
        return self._tally.stats() if self._tally.rounds else {}

    @property
    def most_nodes(self) -> int:
        return 1 + self.drafter.nodes

    @property
    def states_read(self) -> int:
        return 1 + len(self.drafter.hidden_layers) if self.drafter.hidden_layers else 0

    def planned_caches(self, rows: int, longest: int, limit: int) -> dict[str, int]:
        slots = rows * self._slots(longest, limit)
        per_token = int(getattr(self.drafter, "token_bytes", 0))
        return {"cache": slots * self.target.token_bytes, "draft_cache": slots * per_token}

    def _slots(self, longest: int, limit: int) -> int:
        return longest + limit + 2 * (self.drafter.nodes + 1)

    def decode(self, prompts: list[Int[Tensor, "_"]], limit: int, rng: Generator) -> Iterator[Step]:
        return self._decode(prompts, limit, rng, max(map(len, prompts)), refilled=False)

    def decode_refilled(self, prompts: list[Int[Tensor, "_"]], limit: int, rng: Generator, longest: int) -> Rounds:
        return self._decode(prompts, limit, rng, longest, refilled=True)

    @torch.inference_mode()
    def _decode(
        self, prompts: list[Int[Tensor, "_"]], limit: int, rng: Generator, longest: int, refilled: bool
    ) -> Rounds:
        """See ``decode_refilled``; ``refilled``: whether rows may be given new prompts."""
        target, drafter = self.target, self._asked()
        committed = [prompt.tolist() for prompt in prompts]
        ends = [len(row) + limit for row in committed]
        cache = target.new_cache(len(prompts), self._slots(longest, limit))
        if isinstance(target, GraphedLM):
            target.graphs.expect(1 + drafter.nodes)
        kept = self._begin(drafter, committed, longest - max(map(len, committed)) + limit, cache)
        passing = Stopwatch(target.device)

        passing.start()
        read = [prompt.to(target.device) for prompt in prompts]
        output = target.prefill(read, cache, hidden_layers=drafter.hidden_layers, kept=kept)
        root = self.sampling.pick(output.logits[:, 0], rng)
        passing.stop()
        first = [[token] for token in root.tolist()]
        _extend(committed, first)
        context = Context(committed, root, output, None, self.sampling, rng, cache=cache)
        self._last = context if self.keeps_prefix and len(prompts) == 1 and not refilled else None
        batch = _Batch(ComputedRows(len(prompts)), ends, limit, context, cache, drafter)
        pace = Pace(drafter, self.costs, self._tally, isinstance(target, GraphedLM), refilled)
        first_step = Step.undrafted(first, rows=len(first), pass_ns=passing.ns(), kept=kept)
        try:
            yield from self._answered(first_step, batch)
            yield from self._rounds_after(batch, pace, refilled)
        finally:
            if self._last is context and isinstance(target, GraphedLM):  # whose buffers are used again
                context.cache, context.output = cache.snapshot(len(committed[0]) - 1), context.output.copied()

    def _rounds_after(self, batch: _Batch, pace: Pace, refilled: bool) -> Rounds:
        """All steps after the first tokens; ``refilled``: whether rows may be given new prompts."""
        target, context, cache = self.target, batch.context, batch.cache
        guesses = None if refilled else self._guesses(batch)
        if guesses is not None:
            yield from self._rounds_guessed(batch, guesses)
            return
        drafting: Stopwatch | None = None  # of the next draft, if it was launched while the host read the last round
        launched: _Launched | None = None  # the same of its round
        while any(open_rows := batch.open):
            if launched is None:
                if self._recorded and pace.rest:
                    yield from self._undrafted(batch, pace)
                    if not any(open_rows := batch.open):
                        return
                if self._drop(batch):
                    open_rows = batch.open
                if drafting is None:
                    drafting = Stopwatch(target.device)
                    drafting.start()
                    draft = pace.propose(context, open_rows)
                    drafting.stop()
                else:
                    draft = pace.propose(context, open_rows)
                passing = Stopwatch(target.device)
                launched = self._launched(draft, context.root, cache, passing)
            spent, drafting, following = drafting, None, None
            if launched is None:
                passing.start()
                nodes, output, judged = self._verify(draft, context, cache)
                passing.stop()
            else:
                made, passing = launched.made, launched.passing
                nodes, output = 1 + draft.tokens.shape[1], _output(made)
                if any(batch.open_after(1)):
                    drafting = Stopwatch(target.device)
                    drafting.start()
                    upcoming = pace.launch(made.report, output, context)
                    drafting.stop()
                    if upcoming is None:
                        drafting = None
                    elif not refilled and all(batch.open_after(1 + draft.max_depth)) and pace.whole(upcoming):
                        ahead = Stopwatch(target.device)
                        following = self._launched(upcoming, made.bonus, cache, ahead, unread=1 + draft.max_depth)
                judged = Judged.of(made, launched.reading)
            pace.note(judged.columns, open_rows)
            tokens = [new if is_open else [] for new, is_open in zip(judged.tokens, open_rows, strict=True)]
            judged.advance(cache, [len(new) for new in tokens])
            _extend(context.tokens, tokens)
            context.note(output, judged.path, judged.kept)
            context.auxiliary_tokens, context.report = judged.auxiliary_tokens, judged.report
            context.root = judged.bonus
            accepted = [len(row) for row in judged.columns]
            assert spent is not None, "every round has a draft, if an empty one"
            step = _step(draft, tokens, accepted, open_rows, (spent.ns(), passing.ns()), nodes)
            if following is not None:
                draft = pace.propose(context, open_rows, under_way=True)
            launched = following
            yield from self._answered(step, batch)

    def _begin(self, drafter: Drafter, prompts: list[list[int]], room: int, cache: Cache) -> int:
        """Begin texts of up to ``room`` tokens after the prompts; how much of the only prompt need not be read again.

        All of a kept text but its last token is in its cache; what a round that was left had begun is behind that.
        """
        last = self._last if self.keeps_prefix and len(prompts) == 1 else None
        kept = 0 if last is None else common_prefix(last.tokens[0][:-1], prompts[0])
        if last is not None and kept and isinstance(drafter, ResumingDrafter):
            kept = drafter.resume(last, prompts, room, kept)
        else:
            drafter.reset(prompts, room)
            kept = 0 if drafter.hidden_layers else kept
        if last is not None and kept:
            assert last.cache is not None, "a decode has one"
            cache.continue_from(last.cache, kept)
        return kept

    def _launched(
        self, draft: Draft, root: Int[Tensor, "B"], cache: Cache, watch: Stopwatch, unread: int = 0
    ) -> _Launched | None:
        """A recorded round over a draft, and its read under way; None: there is none (yet).

        Args:
            watch: of the pass.
            unread: tokens by which rows may have grown on the device since the host read their lengths.
        """
        target = self.target
        if not self._recorded or draft.auxiliary is not None or not isinstance(target, GraphedLM):
            return None
        given = [root[:, None], *([draft.tokens] if draft.tokens.shape[1] else [])]
        parents = None if draft.is_chain else draft.parents
        layers, wanted = self.drafter.hidden_layers, self.candidates
        watch.start()
        made = target.round(
            given, parents, cache, levels=draft.max_depth, hidden_layers=layers, candidates=wanted, unread=unread
        )
        watch.stop()
        return None if made is None else _Launched(made, Reading(made.report), watch)

    def _asked(self) -> Drafter:
        """What drafts for the next texts: nothing where a search that takes long did not pay in the last ones."""
        if self.costs is None or not isinstance(self.drafter, Lookup):
            return self.drafter
        rests = self._texts.sits_out(self.costs, self._tally.gained.pop("", None))
        return Unasked(self.drafter.nodes) if rests else self.drafter

    def _undrafted(self, batch: _Batch, pace: Pace) -> Rounds:
        """The rounds that go without a draft, where they need not come one by one."""
        if self.target.runs_rounds:
            yield from self._rounds_together(batch, pace)
        elif isinstance(self.target, GraphedLM):
            yield from self._rounds_ahead(batch, pace)

    def _rounds_together(self, batch: _Batch, pace: Pace) -> Rounds:
        """Rounds without drafts, several in a call.

        Where a row is given a new prompt before all tokens of a call are handed out, the others take them again.
        """
        target, context, cache = self.target, batch.context, batch.cache
        while pace.rest and any(open_rows := batch.open):
            if self._drop(batch):
                open_rows = batch.open
            rows = zip(context.tokens, batch.ends, open_rows, strict=True)
            most = min([ROUNDS_TOGETHER, pace.rest, *(end - len(text) for text, end, is_open in rows if is_open)])
            ran = target.rounds([text[-1] for text in context.tokens], cache, most, open_rows, target.eos_ids)
            cache.advance([len(ran.tokens) * is_open for is_open in open_rows])
            left, passes = set[int](), [end - begin for begin, end in pairwise([0, *ran.times])]
            for count, step in enumerate(steps_of(ran, open_rows, pass_ns=passes), start=1):
                pace.note_rest()
                _extend(context.tokens, step.tokens)
                yield from self._answered(step, batch, left)
                if left:
                    back = len(ran.tokens) - count
                    moved = [is_open and row not in left for row, is_open in enumerate(open_rows)]
                    kept = zip(cache.lengths, moved, strict=True)
                    cache.set_lengths([length - back * is_moved for length, is_moved in kept])
                    break
            context.root = from_host([text[-1] for text in context.tokens], context.root.device)

    def _guesses(self, batch: _Batch) -> Guesses | None:
        """How the kernels guess in several rounds of the only row in a call; None: rounds come one by one."""
        if not (self._recorded and self.target.runs_rounds and len(batch.context.tokens) == 1):
            return None
        return batch.drafter.rounds_guesses() if isinstance(batch.drafter, RoundsDrafter) else None

    def _rounds_guessed(self, batch: _Batch, guesses: Guesses) -> Rounds:
        """All rounds of the only row, several in a call, whose drafts the kernels make."""
        target, context, cache = self.target, batch.context, batch.cache
        text, state = context.tokens[0], context.last_hidden[0].clone()
        while batch.open[0]:
            left = batch.ends[0] - len(text)
            asked = GuessedRounds(guesses, text, min(ROUNDS_TOGETHER, left), state)
            most = min(left, ROUNDS_TOGETHER + guesses.nodes)
            ran = target.rounds(text[-1:], cache, most, [True], target.eos_ids, guessed=asked)
            cache.advance([len(ran.tokens)])
            for step in guessed_steps_of(ran):
                self._tally.note(step.drafted[0])
                text.extend(step.tokens[0])
                yield from self._answered(step, batch)
            context.root = from_host(text[-1:], context.root.device)

    def _rounds_ahead(self, batch: _Batch, pace: Pace) -> Rounds:
        """Recorded rounds without drafts, each launched before the host reads the one before it.

        They end where a round is not recorded (yet), at the latest with the texts. Drafters read the last one. A text
        that ends by a token takes one round more than it needs.
        """
        draft = Draft.chain(batch.context.root.new_empty(len(batch.context.tokens), 0))
        last: _Launched | None = None
        while True:
            more = pace.rest > 0 and any(batch.open_after(int(last is not None)))
            following = self._rest_launched(draft, batch) if more else None
            if following is not None:
                pace.note_rest()
            if last is not None:
                open_rows = [is_open and row not in last.left for row, is_open in enumerate(batch.open)]
                rows = last.made.read(last.reading)
                if following is None:
                    batch.context.note(_output(last.made), last.made.path, [[0]] * len(rows))
                    batch.context.report = last.made.report
                tokens = [new if is_open else [] for (_, new), is_open in zip(rows, open_rows, strict=True)]
                _extend(batch.context.tokens, tokens)
                if following is None:
                    pace.end_rest(batch.context)
                step = _step(draft, tokens, [0] * len(tokens), open_rows, (0, last.passing.ns()), 1)
                yield from self._answered(step, batch, None if following is None else following.left)
            if following is None:
                return
            last = following

    def _rest_launched(self, draft: Draft, batch: _Batch) -> _Launched | None:
        """A round without a draft; what it commits is the next root."""
        context, cache = batch.context, batch.cache
        launched = self._launched(draft, context.root, cache, Stopwatch(self.target.device))
        if launched is None:
            return None
        context.root = launched.made.bonus
        if all(open_rows := batch.open):
            cache.advanced([1] * len(open_rows))
        else:
            cache.set_lengths([length + is_open for length, is_open in zip(cache.lengths, open_rows, strict=True)])
        return launched

    def _verify(self, draft: Draft, context: Context, cache: Cache) -> tuple[int, Output, Judged]:
        """A pass over a draft, of how many nodes, and what is kept of it; ``Judged.advance`` is to follow."""
        nodes, parents, levels = _nodes_of_pass(context.root, draft)
        output = self.target.forward(nodes, parents, cache, levels=levels, hidden_layers=self.drafter.hidden_layers)
        judged = judge(draft, output, self.rule, self.sampling, context.rng)
        if not draft.is_chain:
            judged.pack(cache)
        return nodes.shape[1], output, judged

    @property
    def _recorded(self) -> bool:
        """Whether rounds are as ``GraphedLM.round`` has them."""
        return self.sampling.greedy and type(self.rule) is Greedy

    def _answered(self, step: Step, batch: _Batch, left: set[int] | None = None) -> Rounds:
        """Yield a step, and one more for each set of prompts that is sent in return.

        Args:
            left: gets the rows whose texts these prompts replace.
        """
        prompts = batch.rows.take((yield batch.rows.step(step)))
        while prompts:
            if left is not None:
                left.update(prompts)
            prompts = batch.rows.take((yield batch.rows.step(self._admit(prompts, batch))))

    @torch.inference_mode()
    def _admit(self, prompts: Prompts, batch: _Batch) -> Step:
        """Start new prompts in some rows, with cache, context and drafter as after a prefill."""
        assert self.continuous_batching and isinstance(batch.drafter, RowDrafter), "rows take no new prompts"
        rows, context = list(prompts), batch.context
        output = self.target.prefill_rows({row: prompts[row].to(self.target.device) for row in rows}, batch.cache)
        root = self.sampling.pick(output.logits[:, 0], context.rng)
        texts = {row: prompt.tolist() for row, prompt in prompts.items()}
        tokens: list[list[int]] = [[] for _ in context.tokens]
        for row, token in zip(rows, root.tolist(), strict=True):
            tokens[row], context.tokens[row] = [token], [*texts[row], token]
            batch.ends[row] = len(texts[row]) + batch.limit
        _stand_at_root(context, rows, root, output)
        batch.drafter.reset_rows(texts)
        return Step.undrafted(tokens, admitted=frozenset(rows), rows=len(rows))

    def _drop(self, batch: _Batch) -> bool:
        """Compute rows that have ended no longer, if that pays; whether it does."""
        stay = batch.rows.leave(self.target)
        if stay is None:
            return False
        batch.ends = of_rows(batch.ends, stay)
        batch.cache.select(stay)
        batch.context.keep_rows(stay)
        batch.drafter.keep_rows(stay)
        return True


@dataclass(slots=True)
class _Batch:
    """What the loop keeps of its rows; ``ends``: the lengths at their limits."""

    rows: ComputedRows
    ends: list[int]
    limit: int
    context: Context
    cache: Cache
    drafter: Drafter

    @property
    def open(self) -> list[bool]:
        """Per row, whether more of it is wanted."""
        return self.open_after(0)

    def open_after(self, tokens: int) -> list[bool]:
        """The same once so many more tokens are committed."""
        texts = zip(self.context.tokens, self.ends, self.rows.ended, strict=True)
        return [len(text) + tokens < end and not ended for text, end, ended in texts]


@dataclass(slots=True)
class _Launched:
    """A round that the host has not read.

    Attributes:
        passing: times its pass.
        left: rows that had another text then.
    """

    made: Round
    reading: Reading
    passing: Stopwatch
    left: set[int] = field(default_factory=set)


def _output(made: Round) -> Output:
    """Its states; a recorded round keeps no logits."""
    return Output(made.hidden[:, :, :0], made.hidden, made.hidden_layers, candidates=made.candidates)


def _stand_at_root(context: Context, rows: list[int], root: Int[Tensor, "n"], output: Output) -> None:
    context.root = context.root.clone()  # it may be the bonus of a verification
    context.root[rows] = root
    if context.output.logits.shape[2]:
        context.output.logits[rows, 0] = output.logits[:, 0]
    if (candidates := context.output.candidates) is not None:
        candidates[rows, 0] = top_candidates(output.logits[:, 0], candidates.shape[2])
    context.output.hidden[rows, 0] = output.hidden[:, 0]
    if context.path is not None:
        context.path = context.path.clone()  # it may be shared by rows, and by rounds
        context.path[rows] = -1
        context.path[rows, 0] = 0
    if context.report is not None:
        context.report[rows] = -1
        context.report[rows, 0], context.report[rows, 1] = root, 0
    if context.kept is not None:
        context.kept = [[0] if row in rows else nodes for row, nodes in enumerate(context.kept)]
    if context.auxiliary_tokens:
        context.auxiliary_tokens = [[] if row in rows else found for row, found in enumerate(context.auxiliary_tokens)]


def _nodes_of_pass(
    root: Int[Tensor, "B"], draft: Draft
) -> tuple[Int[Tensor, "B M"], Int[Tensor, "B nodes"] | None, int]:
    """Nodes that the target scores (root, draft and auxiliary); their parents (None: a chain); and the depth of the
    tree.
    """
    full = draft.sizes is None or min(draft.sizes) == draft.tokens.shape[1]
    drafted = [root[:, None], draft.tokens if full else draft.tokens.clamp(min=0)]
    auxiliary = draft.auxiliary
    if auxiliary is None and not draft.tokens.shape[1]:
        return drafted[0], None, 0
    if auxiliary is None:
        return torch.cat(drafted, dim=1), None if draft.is_chain else draft.parents, draft.max_depth
    nodes = torch.cat([*drafted, auxiliary.tokens], dim=1)
    return nodes, torch.cat([draft.parents, auxiliary.parents], dim=1), max(draft.max_depth, auxiliary.levels)


def _extend(committed: list[list[int]], tokens: list[list[int]]) -> None:
    for row, new in zip(committed, tokens, strict=True):
        row.extend(new)


def _step(
    draft: Draft,
    tokens: list[list[int]],
    accepted: list[int],
    open_rows: list[bool],
    times: tuple[int, int],
    nodes: int,
) -> Step:
    """The counters of a round; ``times``: of the draft, and of the pass with the rule, in nanoseconds."""
    sizes = draft.sizes if draft.sizes is not None else [draft.tokens.shape[1]] * len(tokens)
    depths = draft.depths if draft.depths is not None else ([draft.max_depth] * len(tokens) if draft.levels else sizes)
    if not all(open_rows):
        sizes, accepted, depths = (
            [n * row for n, row in zip(counts, open_rows, strict=True)] for counts in (sizes, accepted, depths)
        )
    return Step(
        tokens,
        drafted=sizes,
        accepted=accepted,
        layers=[1.0] * len(tokens),
        depth=depths,
        rows=len(tokens),
        nodes=nodes,
        draft_passes=draft.passes,
        draft_ns=times[0],
        pass_ns=times[1],
    )
