"""Tables from token ids to exit depths, made before decoding (HASH-EE, Sun et al. 2022).

A table cuts the token types that were seen in a corpus into as many buckets as there are depths; the first bucket exits
at the smallest. Unseen types and special ones are not cut and always take the whole model.

    random              a permutation of the types by the seed
    frequency           the most frequent types first (arXiv 2203.01670, the default there)
    mutual_information  I(1[x = v]; next token), the largest first. The paper's labels are classes of a text; where text
                        is generated the label of a token is the next one
    clustered           k-means of the input embeddings, clusters in order of the sum of their norms, the smallest first
    learnt              first the types after which a model's own exits settle early (``settling_depths``). The paper
                        has none: it argues that difficulty need not be learnt, and this is the table to compare with

``balance`` says in what the buckets are equal. ``types`` is the paper's: as many types in each. Texts are Zipfian, so
nearly all running tokens then fall into the first bucket; ``mass`` gives each bucket the same share of the running
tokens of the corpus, as far as whole types allow. Clusters are filled up to that size, types that have most to lose
elsewhere first; ``none`` leaves k-means as it is, and is for clusters alone.

Equal corpus, seed and settings give an equal table (Python's ``hash``, which differs between processes, is not used);
``HashTable.checksum`` shows it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float, Int

Kind = Literal["random", "frequency", "mutual_information", "clustered", "learnt"]
Balance = Literal["types", "mass", "none"]

TABLE, CONFIG = "hash_table.npy", "hash_table.json"
_ROUNDS = 50  # of k-means, at most
_PRIOR = 4.0  # tokens of the mean depth that each type is taken to have had before the first


@dataclass(frozen=True)
class HashTable:
    """Depth by token id.

    Attributes:
        depths: [V] layers of a step that reads this id.
        layers: of the target.
        facts: how it was made, as plain JSON values.
    """

    depths: Int[np.ndarray, "V"]
    layers: int
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def checksum(self) -> str:
        """sha256 of the depths, the same on every machine."""
        return hashlib.sha256(self.depths.astype("<i4").tobytes()).hexdigest()

    def save(self, folder: Path) -> None:
        """Write both files into a folder."""
        np.save(folder / TABLE, self.depths.astype("<i4"))
        config = {"layers": self.layers, "sha256": self.checksum, "facts": self.facts}
        (folder / CONFIG).write_text(json.dumps(config) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> HashTable:
        """Read a table.

        Raises:
            ValueError: files are missing, damaged or do not belong together.
        """
        try:
            config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            table = cls(np.load(folder / TABLE, allow_pickle=False), int(config["layers"]), config.get("facts", {}))
            whole = table.checksum == config["sha256"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _unreadable(folder, f"{type(error).__name__}: {error}") from None
        if not whole or table.depths.ndim != 1 or table.depths.min() < 1 or table.depths.max() > table.layers:
            raise _unreadable(folder, "its checksum or its depths are wrong")
        return table


@dataclass(frozen=True)
class Corpus:
    """Statistics of running tokens.

    Attributes:
        counts: [V] how often each id occurs.
        pairs: [P, 2] different pairs of neighbouring ids.
        pair_counts: [P] how often each occurs.
    """

    counts: Int[np.ndarray, "V"]
    pairs: Int[np.ndarray, "P 2"]
    pair_counts: Int[np.ndarray, "P"]

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], vocab_size: int) -> Corpus:
        """Count; pairs do not reach from one text into the next.

        Raises:
            ValueError: there is no token, or one outside the vocabulary.
        """
        rows = [np.asarray(text, dtype=np.int64) for text in texts if len(text)]
        tokens = np.concatenate(rows) if rows else np.empty(0, np.int64)
        if not len(tokens) or tokens.min() < 0 or tokens.max() >= vocab_size:
            raise ValueError(
                f"A corpus must have at least one token and only ids below {vocab_size}, got {len(tokens)} tokens. "
                "Name a corpus that was tokenised for this model."
            )
        coded = np.concatenate([row[:-1] * vocab_size + row[1:] for row in rows])
        pairs, pair_counts = np.unique(coded, return_counts=True)
        split = np.stack([pairs // vocab_size, pairs % vocab_size], axis=1)
        return cls(np.bincount(tokens, minlength=vocab_size), split, pair_counts)


def make_table(
    kind: Kind,
    depths: Sequence[int],
    corpus: Corpus,
    layers: int,
    *,
    balance: Balance = "types",
    special: Collection[int] = (),
    seed: int = 0,
    embeddings: Float[np.ndarray, "V D"] | None = None,
    settling: Float[np.ndarray, "V"] | None = None,
) -> HashTable:
    """Cut the types of a corpus into a bucket for each depth.

    Args:
        kind: see the head of this file.
        depths: ascending, one per bucket, ``layers`` at most.
        corpus: counted tokens.
        layers: of the target: the depth of unseen and special types.
        balance: in what buckets are equal; ``none`` for clusters alone.
        special: ids that always take the whole model: end-of-sequence, chat markers, padding.
        seed: of the permutation and of the first cluster centres.
        embeddings: of the clusters.
        settling: of ``learnt``, see ``settling_depths``.

    Raises:
        ValueError: more buckets than types, or a balance that this kind does not have.
    """
    seen = corpus.counts.copy()
    seen[list(special)] = 0
    types = np.flatnonzero(seen)
    if len(types) < len(depths) or (balance == "none" and kind != "clustered"):
        raise ValueError(
            "There must be at least one token type per bucket, and balance=none only with kind=clustered, got "
            f"{len(types)} types for {len(depths)} buckets, kind={kind}, balance={balance}. Name a larger corpus or "
            "fewer depths, or set train.balance=types."
        )
    weights = np.ones(len(types)) if balance == "types" else seen[types].astype(np.float64)
    rng = np.random.default_rng(seed)
    if kind == "clustered":
        assert embeddings is not None, "clusters are made of embeddings"
        chosen = _clusters(embeddings[types], len(depths), None if balance == "none" else weights, rng)
    else:
        chosen = _cut(_order(kind, types, corpus, settling, rng), weights, len(depths))
    table = np.full(len(seen), layers, dtype=np.int64)
    table[types] = np.asarray(depths)[chosen]
    share = [float(corpus.counts[types[chosen == bucket]].sum() / seen.sum()) for bucket in range(len(depths))]
    facts = {
        "kind": kind,
        "balance": balance,
        "depths": list(depths),
        "types": np.bincount(chosen, minlength=len(depths)).tolist(),
        "mass": share,
        "mean_depth": float((table * corpus.counts).sum() / corpus.counts.sum()),
    }
    return HashTable(table, layers, facts)


def even_depths(buckets: int, layers: int) -> tuple[int, ...]:
    """Depths of ``buckets`` exits spread evenly over the model, the last one its end.

    Raises:
        ValueError: more buckets than layers.
    """
    if buckets > layers:
        raise ValueError(f"buckets must be at most {layers}, the layers of the model, got {buckets}.")
    return tuple(round(layers * (bucket + 1) / buckets) for bucket in range(buckets))


def mutual_information(types: Int[np.ndarray, "n"], corpus: Corpus) -> Float[np.ndarray, "n"]:
    """I(1[x = v]; y) in nats for each type v, over pairs (x, y) of neighbouring tokens.

    With c(v, y) pairs, c(v) of them beginning with v, c(y) ending with y and n in all: the sum over y of
    c(v,y)/n log(c(v,y) n / (c(v) c(y))) and, for pairs that begin with anything else, of
    (c(y) - c(v,y))/n log((c(y) - c(v,y)) n / ((n - c(v)) c(y))).
    """
    size, n = len(corpus.counts), float(corpus.pair_counts.sum())
    first, second = corpus.pairs.T
    count = corpus.pair_counts.astype(np.float64)
    begins, ends = np.bincount(first, count, size), np.bincount(second, count, size)
    rest = ends[second] - count
    here = count * np.log(count * n / (begins[first] * ends[second]))
    # a y that v never precedes adds c(y) / n log(n / (n - c(v))): summed over all y, corrected where v does precede
    never = np.log(n / np.maximum(n - begins[first], 1.0))
    others = rest * (np.log(np.maximum(rest, 1.0) / ends[second]) + never) - ends[second] * never
    found = np.bincount(first, here + others, size)
    return (found / n + np.log(n / np.maximum(n - begins, 1.0)))[types]


def settling_depths(
    tokens: Int[np.ndarray, "N"],
    agrees: Bool[np.ndarray, "N E"],
    depths: Sequence[int],
    layers: int,
    vocab_size: int,
) -> Float[np.ndarray, "V"]:
    """By type, the mean depth from which on all exits have the whole model's token.

    The mean of few tokens says little, so each type begins with four tokens of the mean over all, which a type that was
    never read keeps.

    Args:
        tokens: ids that were read.
        agrees: whether the exit at each depth has the token that the whole model has there.
        depths: of the exits, ascending.
        layers: of the model, where a token settles that no exit has.
    """
    settled = np.logical_and.accumulate(agrees[:, ::-1], axis=1).sum(axis=1)  # trailing exits that agree
    steps = np.array([*depths, layers], dtype=np.float64)
    reached = steps[len(depths) - settled]
    total = np.bincount(tokens, reached, vocab_size) + _PRIOR * reached.mean()
    return total / (np.bincount(tokens, minlength=vocab_size) + _PRIOR)


def _order(
    kind: Kind,
    types: Int[np.ndarray, "n"],
    corpus: Corpus,
    settling: Float[np.ndarray, "V"] | None,
    rng: np.random.Generator,
) -> Int[np.ndarray, "n"]:
    if kind == "random":
        return rng.permutation(len(types))
    if kind == "learnt":
        assert settling is not None, "a learnt table is made of the depths at which tokens settle"
        return np.argsort(settling[types], kind="stable")
    score = corpus.counts[types] if kind == "frequency" else mutual_information(types, corpus)
    return np.argsort(-score, kind="stable")


def _cut(order: Int[np.ndarray, "n"], weights: Float[np.ndarray, "n"], buckets: int) -> Int[np.ndarray, "n"]:
    """The bucket of each type, by the position of its middle; no bucket stays empty."""
    chosen = np.empty(len(order), np.int64)
    share, passed, bucket, held = weights.sum() / buckets, 0.0, 0, 0
    for taken, place in enumerate(order):
        full = passed + weights[place] / 2 > share * (bucket + 1)
        needed = len(order) - taken <= buckets - 1 - bucket  # one type for each bucket that is still empty
        if held and bucket < buckets - 1 and (full or needed):
            bucket, held = bucket + 1, 0
        chosen[place] = bucket
        passed, held = passed + weights[place], held + 1
    return chosen


def _clusters(
    vectors: Float[np.ndarray, "n D"], buckets: int, weights: Float[np.ndarray, "n"] | None, rng: np.random.Generator
) -> Int[np.ndarray, "n"]:
    """k-means; clusters are numbered by the sum of the norms in them."""
    vectors = vectors.astype(np.float32)
    centres = _spread(vectors, buckets, rng)
    chosen = np.full(len(vectors), -1)
    for _ in range(_ROUNDS):
        distance = _distances(vectors, centres)
        new = distance.argmin(1) if weights is None else _fill_up(distance, weights)
        if (new == chosen).all():
            break
        chosen = new
        for bucket in range(buckets):
            if (chosen == bucket).any():
                centres[bucket] = vectors[chosen == bucket].mean(0)
    norms = np.bincount(chosen, np.linalg.norm(vectors, axis=1), minlength=buckets)
    rank = np.empty(buckets, np.int64)
    rank[np.argsort(norms, kind="stable")] = np.arange(buckets)
    return rank[chosen]


def _spread(vectors: Float[np.ndarray, "n D"], buckets: int, rng: np.random.Generator) -> Float[np.ndarray, "k D"]:
    """First centres: each further one with a probability that grows with its squared distance (k-means++)."""
    centres = [vectors[rng.integers(len(vectors))]]
    while len(centres) < buckets:
        nearest = _distances(vectors, np.stack(centres)).min(1).astype(np.float64)
        total = nearest.sum()
        odds = nearest / total if total > 0 else np.full(len(vectors), 1 / len(vectors))
        centres.append(vectors[rng.choice(len(vectors), p=odds)])
    return np.stack(centres)


def _distances(vectors: Float[np.ndarray, "n D"], centres: Float[np.ndarray, "k D"]) -> Float[np.ndarray, "n k"]:
    squares = (vectors**2).sum(1)[:, None] - 2 * vectors @ centres.T + (centres**2).sum(1)
    return np.maximum(squares, 0)


def _fill_up(distance: Float[np.ndarray, "n k"], weights: Float[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
    """Nearest centre with room; the types that lose most at their second nearest choose first."""
    buckets = distance.shape[1]
    room = np.full(buckets, weights.sum() / buckets)
    wishes = distance.argsort(1, kind="stable")
    ranked = np.take_along_axis(distance, wishes, 1)
    lost = ranked[:, min(1, buckets - 1)] - ranked[:, 0]
    chosen = np.empty(len(distance), np.int64)
    for place in np.argsort(-lost, kind="stable"):
        free = [bucket for bucket in wishes[place] if room[bucket] >= weights[place] / 2]
        chosen[place] = free[0] if free else room.argmax()
        room[chosen[place]] -= weights[place]
    return chosen


def _unreadable(folder: Path, why: str) -> ValueError:
    return ValueError(
        f"{folder} must hold a hash table, {TABLE} and {CONFIG}, and cannot be read ({why}). Name "
        "another, or make one: python -m bench train method=hash_ee model=MODEL."
    )
