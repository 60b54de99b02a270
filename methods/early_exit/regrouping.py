"""Rows of a batch that wait at a depth until enough others are there: the loop of ``method.regroup``.

Tokens leave at different depths, so the layers above an exit run for few rows, each time over all of their weights.
Here a row that does not leave waits at its exit, and the rows that left read their next tokens; the layers above run
once ``least`` rows wait for them (dynamic rebatching, the buffers of DREX). A row's text is the one that it has alone:
its cache does not grow while it waits, and passes of the kernels take rows of any length (``CausalLM.run_to_exits``).
A row that has waited for ``PATIENCE`` runs is run in any case, with those beside it, so that none comes last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter_ns

import torch
from jaxtyping import Int
from torch import Generator, Tensor

from methods.decoder import Step
from methods.early_exit.loop import EarlyExitDecoder
from methods.engine.causal_lm import CausalLM
from methods.rows import ComputedRows, of_rows

PATIENCE = 8


class Waiting:
    """Where the pending tokens of the rows are.

    Attributes:
        depths: per row, layers that its token has run.
        hidden: [B, 1, D] states there; of rows at depth 0 undefined.
    """

    def __init__(self, target: CausalLM, rows: int, least: int) -> None:
        self.depths, self._waited, self._least = [0] * rows, [0] * rows, least
        self.hidden = torch.zeros(rows, 1, target.hidden_size, dtype=target.dtype, device=target.device)

    def chosen(self, open_rows: Sequence[bool]) -> list[int]:
        """The rows that are run next, all of one depth: the deepest that are enough or have waited for long; else those
        at the beginning; else the most.
        """
        groups: dict[int, list[int]] = {}
        for row, depth in enumerate(self.depths):
            if open_rows[row]:
                groups.setdefault(depth, []).append(row)
        for depth in sorted(groups, reverse=True):
            rows = groups[depth]
            if depth and (len(rows) >= self._least or max(self._waited[row] for row in rows) >= PATIENCE):
                return rows
        return groups.get(0) or max(groups.values(), key=len)

    def go(self, rows: Sequence[int], depths: Sequence[int]) -> None:
        """Note to which depths some rows got; the others have waited once more."""
        went = dict(zip(rows, depths, strict=True))
        for row, depth in enumerate(self.depths):
            self._waited[row] = 0 if row in went else self._waited[row] + bool(depth)
            self.depths[row] = went.get(row, depth)

    def select(self, rows: list[int]) -> None:
        """Keep these rows, in this order."""
        self.depths, self._waited = of_rows(self.depths, rows), of_rows(self._waited, rows)
        self.hidden = self.hidden[rows]


@torch.inference_mode()
def decode_regrouped(
    decoder: EarlyExitDecoder, prompts: list[Int[Tensor, "_"]], limit: int, rng: Generator, least: int
) -> Iterator[Step]:
    """See ``Decoder.decode``; a step has tokens of the rows that left in it."""
    target, policy = decoder.target, decoder.policy
    cache = target.new_cache(len(prompts), max(len(prompt) for prompt in prompts) + limit)
    policy.reset(limit)
    root = decoder.sampling.pick(decoder.read_prompts(prompts, cache), rng)
    roots, batch, waiting = root.tolist(), ComputedRows(len(prompts)), Waiting(target, len(prompts), least)
    batch.take(
        (yield Step.undrafted([[token] for token in roots], decoder.share(decoder.prompt_depth), rows=len(roots)))
    )
    done, ran, began = [1] * len(prompts), 0, perf_counter_ns()
    while any(rows := batch.below(limit, done)):
        if (stay := batch.leave(target)) is not None:
            cache.select(stay)
            waiting.select(stay)
            root, roots, done, rows = root[stay], of_rows(roots, stay), of_rows(done, stay), of_rows(rows, stay)
        group = waiting.chosen(rows)
        first, runs = waiting.depths[group[0]], [row in set(group) for row in range(len(rows))]
        rule = decoder.kernel_rule(roots, done)
        assert rule is not None, "the kernels judge"
        last = min((stop for stop in rule.stops if stop > first), default=policy.deepest)
        state = target.begin(root[:, None], None, cache)
        if first:
            state.hidden = waiting.hidden
        found = target.run_to_exits(state, policy.deepest, rule, runs, first, last)
        ends = last == policy.deepest
        depths = [(depth or (last if ends else 0)) if runs[row] else 0 for row, depth in enumerate(found.depths)]
        decoder.count_part(found, depths, first, last, rule)
        ran += last - first
        waiting.hidden[group] = found.hidden[group]
        waiting.go(group, [0 if depths[row] else last for row in group])
        if not any(depths):
            continue
        new = decoder.sampling.pick(decoder.logits_of(found, depths), rng)
        leaves = [depth > 0 for depth in depths]
        root = torch.where(torch.tensor(leaves, device=new.device), new, root)
        roots = root.tolist()
        cache.advance([int(left) for left in leaves])
        done = [count + left for count, left in zip(done, leaves, strict=True)]
        tokens = [[token] if left else [] for token, left in zip(roots, leaves, strict=True)]
        step = Step.undrafted(tokens, decoder.share(min(ran, target.n_layers)), rows=len(group))
        ran = 0
        decoder.counters.spent_ns += perf_counter_ns() - began
        batch.take((yield batch.step(step)))
        began = perf_counter_ns()
