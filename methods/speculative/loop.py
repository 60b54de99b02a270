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
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from methods.decoder import CostAware, Decoder, Family, Guarantee, Prompts, Refillable, Rounds, Step
from methods.drafting import AcceptanceRule, Context, Draft, Drafter, RowDrafter, Verification
from methods.engine.causal_lm import CausalLM, Output
from methods.engine.cuda_graphs import GraphedLM
from methods.engine.kv_cache import Cache
from methods.engine.sampling import Sampling, argmax
from methods.engine.stopwatch import Stopwatch
from methods.rows import ComputedRows, of_rows
from methods.speculative.budget import Costs, CostsOption, Pace, Tally

MOST_NODES = 4096  # of a draft; every round would verify as many


class SpeculativeDecoder(Decoder, Refillable, CostAware):
    """A target, a drafter and a rule, run in lockstep over a batch.

    Args:
        costs: of passes, by which drafts are sized; see ``methods.speculative.budget``.

    Attributes:
        guarantee: what the rule promises.
        continuous_batching: a class whose drafter is ``RowDrafter`` may declare it.
        costs: those in use; None: every proposal is drafted whole.

    Raises:
        ValueError: costs that are none, or a drafter of more than ``MOST_NODES``.
    """

    guarantee = Guarantee.EXACT
    family: ClassVar[Family] = "speculative"

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
        self._costs_option, self.costs, self._tally = costs, Costs.given(costs), Tally()

    @property
    def costs_wanted(self) -> int:
        return 1 + self.drafter.nodes if self._costs_option == "auto" and self.costs is None else 0

    def use_costs(self, costs: Sequence[Sequence[int | float]]) -> None:
        self.costs, self._tally = Costs.of(costs), Tally()

    def forget_costs(self) -> None:
        self.costs, self._tally = Costs.given(self._costs_option), Tally()

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
        return self.decode_refilled(prompts, limit, rng, max(map(len, prompts)))

    @torch.inference_mode()
    def decode_refilled(self, prompts: list[Int[Tensor, "_"]], limit: int, rng: Generator, longest: int) -> Rounds:
        target, drafter = self.target, self.drafter
        committed = [prompt.tolist() for prompt in prompts]
        ends = [len(row) + limit for row in committed]
        cache = target.new_cache(len(prompts), self._slots(longest, limit))
        drafter.reset(committed, longest - max(map(len, committed)) + limit)
        watch = Stopwatch(target.device)

        output = target.prefill(
            [prompt.to(target.device) for prompt in prompts], cache, hidden_layers=drafter.hidden_layers
        )
        root = self.sampling.pick(output.logits[:, 0], rng)
        first = [[token] for token in root.tolist()]
        _extend(committed, first)
        context = Context(committed, root, output, None, self.sampling, rng)
        batch = _Batch(ComputedRows(len(prompts)), ends, limit, context, cache)
        pace = Pace(drafter, self.costs, self._tally, isinstance(target, GraphedLM))
        yield from self._answered(Step.undrafted(first, rows=len(first)), batch)

        while any(batch.open):
            self._drop(batch)
            watch.start()
            draft = pace.propose(context, batch.open)
            watch.stop()
            nodes, parents, levels = _nodes_of_pass(context.root, draft)
            output = target.forward(nodes, parents, cache, levels=levels, hidden_layers=drafter.hidden_layers)
            verification = self.rule(draft, output.logits[:, : 1 + draft.tokens.shape[1]], self.sampling, rng)
            if not draft.is_chain:
                cache.pack(verification.path)
            tokens, paths, context.auxiliary_tokens = _read(draft, verification, output.logits)
            open_rows, accepted = batch.open, [len(path) for path in paths]
            pace.note(paths, open_rows)
            tokens = [new if is_open else [] for new, is_open in zip(tokens, open_rows, strict=True)]
            cache.advance([len(new) for new in tokens])
            _extend(context.tokens, tokens)
            context.output, context.path = output, _rows_of(verification)
            context.root = _next_root(context.root, verification.bonus, open_rows)
            yield from self._answered(_step(draft, tokens, accepted, open_rows, watch.ns(), nodes.shape[1]), batch)

    def _answered(self, step: Step, batch: _Batch) -> Rounds:
        """Yield a step, and one more for each set of prompts that is sent in return."""
        prompts = batch.rows.take((yield batch.rows.step(step)))
        while prompts:
            prompts = batch.rows.take((yield batch.rows.step(self._admit(prompts, batch))))

    @torch.inference_mode()
    def _admit(self, prompts: Prompts, batch: _Batch) -> Step:
        """Start new prompts in some rows, with cache, context and drafter as after a prefill."""
        assert self.continuous_batching and isinstance(self.drafter, RowDrafter), "rows take no new prompts"
        rows, context = list(prompts), batch.context
        output = self.target.prefill_rows({row: prompts[row].to(self.target.device) for row in rows}, batch.cache)
        root = self.sampling.pick(output.logits[:, 0], context.rng)
        texts = {row: prompt.tolist() for row, prompt in prompts.items()}
        tokens: list[list[int]] = [[] for _ in context.tokens]
        for row, token in zip(rows, root.tolist(), strict=True):
            tokens[row], context.tokens[row] = [token], [*texts[row], token]
            batch.ends[row] = len(texts[row]) + batch.limit
        _stand_at_root(context, rows, root, output)
        self.drafter.reset_rows(texts)
        return Step.undrafted(tokens, admitted=frozenset(rows), rows=len(rows))

    def _drop(self, batch: _Batch) -> None:
        """Compute rows that have ended no longer, if that pays."""
        stay = batch.rows.leave(self.target)
        if stay is None:
            return
        batch.ends = of_rows(batch.ends, stay)
        batch.cache.select(stay)
        batch.context.keep_rows(stay)
        self.drafter.keep_rows(stay)


@dataclass(slots=True)
class _Batch:
    """What the loop keeps of its rows; ``ends``: the lengths at their limits."""

    rows: ComputedRows
    ends: list[int]
    limit: int
    context: Context
    cache: Cache

    @property
    def open(self) -> list[bool]:
        """Per row, whether more of it is wanted."""
        texts = zip(self.context.tokens, self.ends, self.rows.ended, strict=True)
        return [len(text) < end and not ended for text, end, ended in texts]


def _stand_at_root(context: Context, rows: list[int], root: Int[Tensor, "n"], output: Output) -> None:
    context.root = context.root.clone()  # it may be the bonus of a verification
    context.root[rows] = root
    context.output.logits[rows, 0] = output.logits[:, 0]
    context.output.hidden[rows, 0] = output.hidden[:, 0]
    if context.path is not None:
        context.path[rows] = -1
        context.path[rows, 0] = 0
    if context.auxiliary_tokens:
        context.auxiliary_tokens = [[] if row in rows else found for row, found in enumerate(context.auxiliary_tokens)]


def _nodes_of_pass(
    root: Int[Tensor, "B"], draft: Draft
) -> tuple[Int[Tensor, "B M"], Int[Tensor, "B nodes"] | None, int]:
    """Nodes that the target scores (root, draft and auxiliary); their parents (None: a chain); and the depth of the
    tree.
    """
    drafted = [root[:, None], draft.tokens.clamp(min=0)]
    auxiliary = draft.auxiliary
    if auxiliary is None:
        return torch.cat(drafted, dim=1), None if draft.is_chain else draft.parents, draft.max_depth
    nodes = torch.cat([*drafted, auxiliary.tokens], dim=1)
    return nodes, torch.cat([draft.parents, auxiliary.parents], dim=1), max(draft.max_depth, auxiliary.levels)


def _read(
    draft: Draft, verification: Verification, logits: Float[Tensor, "B M V"]
) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Kept tokens, bonus included; the columns of those that were drafted; tokens after the ``asked`` auxiliary nodes.

    The one device-to-host read of a round.
    """
    kept = draft.tokens.gather(1, verification.path.clamp(min=0))
    parts = [verification.accepted[:, None], verification.bonus[:, None], kept, verification.path]
    asked = draft.auxiliary.asked if draft.auxiliary else 0
    if asked:
        parts.append(argmax(logits[:, -asked:]))
    report = torch.cat(parts, dim=1).tolist()
    deepest = kept.shape[1]
    tokens = [row[2 : 2 + row[0]] + [row[1]] for row in report]
    paths = [row[2 + deepest : 2 + deepest + row[0]] for row in report]
    return tokens, paths, [row[-asked:] for row in report] if asked else []


def _rows_of(verification: Verification) -> Int[Tensor, "B P"]:
    """The kept path as rows of the pass: the root, then node 1 + column; -1 after the end."""
    nodes = torch.where(verification.path >= 0, verification.path + 1, verification.path)
    return torch.cat([torch.zeros_like(verification.bonus)[:, None], nodes], dim=1)


def _next_root(root: Int[Tensor, "B"], bonus: Int[Tensor, "B"], open_rows: list[bool]) -> Int[Tensor, "B"]:
    return bonus if all(open_rows) else torch.where(torch.tensor(open_rows, device=root.device), bonus, root)


def _extend(committed: list[list[int]], tokens: list[list[int]]) -> None:
    for row, new in zip(committed, tokens, strict=True):
        row.extend(new)


def _step(
    draft: Draft, tokens: list[list[int]], accepted: list[int], open_rows: list[bool], draft_ns: int, nodes: int
) -> Step:
    sizes = draft.sizes if draft.sizes is not None else [draft.tokens.shape[1]] * len(tokens)
    depths = draft.depths if draft.depths is not None else ([draft.max_depth] * len(tokens) if draft.levels else sizes)
    return Step(
        tokens,
        drafted=[n * row for n, row in zip(sizes, open_rows, strict=True)],
        accepted=[n * row for n, row in zip(accepted, open_rows, strict=True)],
        layers=[1.0] * len(tokens),
        depth=[n * row for n, row in zip(depths, open_rows, strict=True)],
        rows=len(tokens),
        nodes=nodes,
        draft_passes=draft.passes,
        draft_ns=draft_ns,
    )
