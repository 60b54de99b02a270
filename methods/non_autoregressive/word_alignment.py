"""Which source token each target token translates: IBM model 2 with a diagonal prior (fast_align, Dyer et al. 2013).

p(target j | source) = sum over i of p(a_j = i) theta(t_j | s_i), where p(a_j = i) is (1 - p0) times the softmax over i
of -tension |i / n - j / m|, and p0 for no source token at all. The table theta is learnt by expectation maximisation
over all pairs of tokens at once. fast_align also learns the tension and smooths theta (variational Bayes); this does
neither.

A fertility is the number of target tokens that a source token has. Target tokens without a source belong to the source
of the token before, so that fertilities sum to the length of the target, which the decoder's input needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
NULL = -1  # no source token


@dataclass(frozen=True, slots=True)
class _Links:
    """Every source token of every target token, and after all of these one NULL for each target token.

    Attributes:
        first: by target token, its first link.
        owner: by link, its target token.
        place: by link, the place of its source token.
        prior: by link.
        entry: by link, its place in the table.
        source_of: by entry, the id of its source token.
    """

    first: Ints
    owner: Ints
    place: Ints
    prior: Floats
    entry: Ints
    source_of: Ints


def align(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    iterations: int = 5,
    tension: float = 4.0,
    null: float = 0.08,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> list[list[int]]:
    """For every pair, the place of the source token of each target token, or ``NULL``.

    Args:
        pairs: token ids, without ends; no side is empty.
        iterations: of expectation maximisation, from a uniform table.
        tension: how strongly links keep to the diagonal.
        null: probability of no source token.
    """
    links = _links(pairs, tension, null)
    table = np.ones(len(links.source_of))
    for done in range(iterations):
        progress("alignment (iterations)", done, iterations)
        score = links.prior * table[links.entry]
        score /= np.bincount(links.owner, score)[links.owner]
        counts = np.bincount(links.entry, score)
        table = counts / np.bincount(links.source_of, counts)[links.source_of]
    progress("alignment (iterations)", iterations, iterations)
    best = _likeliest(links, links.prior * table[links.entry])
    ends = np.cumsum([len(target) for _, target in pairs])
    return [part.tolist() for part in np.split(best, ends[:-1])]


def fertilities(alignment: Sequence[int], sources: int) -> list[int]:
    """How many target tokens each of ``sources`` tokens has; they sum to the length of the target."""
    aligned = [place for place in alignment if place != NULL]
    if not aligned:
        attached = [place * sources // len(alignment) for place in range(len(alignment))]
    else:
        attached, last = [], aligned[0]
        for place in alignment:
            last = last if place == NULL else place
            attached.append(last)
    counts = [0] * sources
    for place in attached:
        counts[place] += 1
    return counts


def _links(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], tension: float, null: float) -> _Links:
    lengths = np.array([(len(source), len(target)) for source, target in pairs])
    sources = np.fromiter(chain.from_iterable(source for source, _ in pairs), np.int64)
    targets = np.fromiter(chain.from_iterable(target for _, target in pairs), np.int64)
    pair = np.repeat(np.arange(len(pairs)), lengths[:, 1])  # by target token
    row = np.arange(len(targets)) - _starts(lengths[:, 1])[pair]
    count = lengths[pair, 0]
    first = _starts(count)
    owner = np.repeat(np.arange(len(targets)), count)
    place = np.arange(len(owner)) - first[owner]
    distance = np.abs((place + 1) / count[owner] - ((row + 1) / lengths[pair, 1])[owner])
    prior = np.exp(-tension * distance)
    prior *= (1 - null) / np.bincount(owner, prior)[owner]
    no_source, width = int(sources.max()) + 1, int(targets.max()) + 1
    read = np.concatenate([sources[_starts(lengths[:, 0])[pair][owner] + place], np.full(len(targets), no_source)])
    owner = np.concatenate([owner, np.arange(len(targets))])
    entries, entry = np.unique(read * width + targets[owner], return_inverse=True)
    return _Links(
        first,
        owner,
        np.concatenate([place, np.full(len(targets), NULL)]),
        np.concatenate([prior, np.full(len(targets), null)]),
        entry.reshape(-1),
        entries // width,
    )


def _starts(counts: Ints) -> Ints:
    return np.cumsum(counts) - counts


def _likeliest(links: _Links, score: Floats) -> Ints:
    """Of each target token the place of its best link; of equally good ones the first, and NULL last."""
    count, inside = len(links.first), len(score) - len(links.first)
    best = np.maximum(np.maximum.reduceat(score[:inside], links.first), score[inside:])
    hits = np.flatnonzero(score == best[links.owner])
    owners, where = np.unique(links.owner[hits], return_index=True)
    assert len(owners) == count, "every target token has a best link"
    return links.place[hits[where]]
