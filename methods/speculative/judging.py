"""From the scores of a pass to what is committed: the tokens on the host, and the kept nodes where drafters read them.

A round reads from the device once. On a CPU a read costs nothing and an operator as much as walking a small tree, so
the host judges greedy drafts there, and at a temperature those that were not drawn; elsewhere the rule does, on the
device. Both keep the same nodes, or the same with the same probability.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from methods.drafting import AcceptanceRule, Draft
from methods.engine.causal_lm import Output
from methods.engine.greedy_round import Round
from methods.engine.host_copies import Reading, from_host
from methods.engine.kv_cache import Cache
from methods.engine.sampling import Sampling, argmax
from methods.speculative.verification import DeterministicTree, Greedy, walk_on_host


@dataclass(frozen=True, slots=True)
class Judged:
    """What a round keeps.

    Attributes:
        columns: per row, the columns of the kept draft nodes.
        tokens: per row, the kept tokens and the bonus.
        bonus: [B] on the device.
        path, kept: [B, P] and on the host, see ``Context``.
        auxiliary_tokens: see ``Context``.
        report: of a recorded round (``greedy_round.Round``), which has moved the cache's lengths; None: there was none.
    """

    columns: list[list[int]]
    tokens: list[list[int]]
    bonus: Int[Tensor, "B"]
    path: Int[Tensor, "B P"]
    auxiliary_tokens: list[list[int]]
    report: Int[Tensor, "B R"] | None = None

    @property
    def kept(self) -> list[list[int]]:
        """The places of the kept nodes among the states of the pass: a recorded round has no others."""
        if self.report is not None:
            return [list(range(1 + len(row))) for row in self.columns]
        return [[0, *(column + 1 for column in row)] for row in self.columns]

    @classmethod
    def of(cls, made: Round, reading: Reading | None = None) -> Judged:
        """What a recorded round kept; ``reading``: of its report, if it is under way."""
        rows = made.read(reading)
        columns, tokens = [row[0] for row in rows], [row[1] for row in rows]
        return cls(columns, tokens, made.bonus, made.path, [], made.report)

    def pack(self, cache: Cache) -> None:
        """Put the kept nodes of a tree together in the cache."""
        if len(self.columns) == 1:
            cache.pack_row(self.columns[0])
        else:
            cache.pack(self.path[:, 1:] - 1)

    def advance(self, cache: Cache, counts: Sequence[int]) -> None:
        """Make so many tokens of each row part of the cache; of a row of which no more is wanted none."""
        if self.report is None:
            cache.advance(counts)
        elif all(counts):
            cache.advanced(counts)
        else:
            cache.set_lengths([length + count for length, count in zip(cache.lengths, counts, strict=True)])


def judge(draft: Draft, output: Output, rule: AcceptanceRule, sampling: Sampling, rng: Generator) -> Judged:
    """Judge a draft by the target's logits after its nodes and the auxiliary ones."""
    asked, logits = draft.auxiliary.asked if draft.auxiliary else 0, output.logits
    greedy = sampling.greedy and type(rule) is Greedy
    if not draft.tokens.shape[1] and not asked:
        best = output.best if greedy else None
        return _without_draft(rule.bonus(logits[:, 0], sampling, rng) if best is None else best[:, 0])
    if logits.device.type == "cpu" and greedy:
        return _on_host(draft, argmax(logits) if output.best is None else output.best, asked)
    if logits.device.type == "cpu" and type(rule) is DeterministicTree and not asked:
        return _drawn_on_host(draft, logits, sampling, rng)
    return _on_device(draft, logits, rule, sampling, rng, asked)


def _without_draft(bonus: Int[Tensor, "B"]) -> Judged:
    tokens = [[token] for token in bonus.tolist()]
    return Judged([[] for _ in tokens], tokens, bonus, _counting(1, bonus.device).expand(len(tokens), -1), [])


def _on_host(draft: Draft, wanted: Int[Tensor, "B M"], asked: int) -> Judged:
    """Greedy verification.

    Args:
        wanted: the target's token after every node.
    """
    columns, tokens, auxiliary = [], [], []
    for row, drafted, parents in _read(draft, wanted):
        kept = walk_on_host(drafted, None if draft.is_chain else parents, row)
        columns.append(kept)
        tokens.append([*(drafted[column] for column in kept), row[kept[-1] + 1 if kept else 0]])
        auxiliary.append(row[len(row) - asked :])
    ends = [kept[-1] + 1 if kept else 0 for kept in columns]
    bonus = wanted[:, ends[0]] if len(ends) == 1 else wanted.gather(1, from_host(ends, wanted.device)[:, None])[:, 0]
    return Judged(columns, tokens, bonus, _path(columns, wanted.device), auxiliary if asked else [])


def _read(draft: Draft, wanted: Int[Tensor, "B M"]) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Of each row what is wanted, the drafted tokens and their parents, in one read."""
    if draft.listed is not None:
        yield from zip(wanted.tolist(), *draft.listed, strict=True)
        return
    first, second = wanted.shape[1], wanted.shape[1] + draft.tokens.shape[1]
    for row in torch.cat([wanted, draft.tokens, draft.parents], dim=1).tolist():
        yield row[:first], row[first:second], row[second:]


def _drawn_on_host(draft: Draft, logits: Float[Tensor, "B M V"], sampling: Sampling, rng: Generator) -> Judged:
    """``DeterministicTree`` at a temperature: only nodes on the kept paths are drawn after, of all rows at once."""
    children = []
    for drafted, parents in zip(*draft.lists(), strict=True):
        every = reversed([*zip(parents, drafted, range(len(parents)), strict=True)])  # of equal nodes the first counts
        children.append({(parent, token): column for parent, token, column in every})
    columns: list[list[int]] = [[] for _ in children]
    tokens: list[list[int]] = [[] for _ in children]
    rows, ends = list(range(len(children))), [-1] * len(children)  # those whose paths go on, and where each path ends
    while rows:
        after = [1 + ends[row] for row in rows]
        scores = logits[0, after[0]][None] if len(children) == 1 else logits[rows, after]
        drawn = list(zip(rows, sampling.pick(scores, rng).tolist(), strict=True))
        rows = []
        for row, token in drawn:
            tokens[row].append(token)
            if (column := children[row].get((ends[row], token))) is not None:
                columns[row].append(column)
                ends[row] = column
                rows.append(row)
    bonus = from_host([new[-1] for new in tokens], logits.device)
    return Judged(columns, tokens, bonus, _path(columns, logits.device), [])


def _path(columns: Sequence[Sequence[int]], device: torch.device) -> Int[Tensor, "B P"]:
    """The kept path as rows of the pass: the root, then node 1 + column; -1 after the end."""
    most = max(map(len, columns))
    if all(len(row) == most and list(row) == list(range(most)) for row in columns):
        return _counting(most + 1, device).expand(len(columns), -1)
    rows = [[0, *(column + 1 for column in row), *[-1] * (most - len(row))] for row in columns]
    return from_host(rows, device)


@lru_cache(maxsize=256)
def _counting(count: int, device: torch.device) -> Int[Tensor, "1 n"]:
    """The path of a chain; nothing writes into it."""
    with torch.inference_mode(False):
        return torch.arange(count, device=device)[None]


def _on_device(
    draft: Draft,
    logits: Float[Tensor, "B M V"],
    rule: AcceptanceRule,
    sampling: Sampling,
    rng: Generator,
    asked: int,
) -> Judged:
    verification = rule(draft, logits[:, : 1 + draft.tokens.shape[1]], sampling, rng)
    kept = draft.tokens.gather(1, verification.path.clamp(min=0))
    parts = [verification.accepted[:, None], verification.bonus[:, None], kept, verification.path]
    if asked:
        parts.append(argmax(logits[:, -asked:]))
    report = torch.cat(parts, dim=1).tolist()
    deepest = kept.shape[1]
    tokens = [row[2 : 2 + row[0]] + [row[1]] for row in report]
    columns = [row[2 + deepest : 2 + deepest + row[0]] for row in report]
    nodes = torch.where(verification.path >= 0, verification.path + 1, verification.path)
    path = torch.cat([torch.zeros_like(verification.bonus)[:, None], nodes], dim=1)
    return Judged(columns, tokens, verification.bonus, path, [row[-asked:] for row in report] if asked else [])
