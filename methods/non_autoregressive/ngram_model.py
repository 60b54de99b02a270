"""An n-gram model of token ids with interpolated Kneser-Ney smoothing (Ney et al. 1994; Chen & Goodman 1999, eq. 16).

    p(w | h) = max(c(h w) - D, 0) / c(h .)  +  D N(h .) / c(h .) p(w | h'),     h' = h without its first token

c counts n-grams of the highest order as they are; shorter ones by the number of different tokens in front of them,
except at the beginning of a text, where nothing is. N(h .) is the number of different tokens after h. Below the
shortest history every token is equally likely. A history that never occurred has the probabilities of the next shorter
one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

FILE = "ngrams.npz"
_BEGIN = -1
_DISCOUNT = 0.75

Gram = tuple[int, ...]


class NgramModel:
    """Probabilities of tokens after the ones before them.

    Args:
        counts: of the n-grams of every order from 1 on, as the module's docstring defines c.
        vocabulary: number of tokens.
        end: id that ends a text.
    """

    def __init__(self, counts: Sequence[Mapping[Gram, int]], vocabulary: int, end: int) -> None:
        self.counts, self.vocabulary, self.end = counts, vocabulary, end
        self._totals, self._kinds = Counter[Gram](), Counter[Gram]()
        for gram, count in chain.from_iterable(known.items() for known in counts):
            self._totals[gram[:-1]] += count
            self._kinds[gram[:-1]] += 1
        self._known: dict[Gram, float] = {}

    @classmethod
    def learn(cls, texts: Iterable[Sequence[int]], order: int, vocabulary: int, end: int) -> NgramModel:
        """From texts without their ends.

        Args:
            order: tokens of the longest n-grams.
        """
        seen: list[Counter[Gram]] = [Counter() for _ in range(order)]
        for text in texts:
            row = (_BEGIN, *text, end)
            for size, found in enumerate(seen, 1):
                found.update(row[start : start + size] for start in range(len(row) - size + 1))
        counts: list[Mapping[Gram, int]] = []
        for size, found in enumerate(seen, 1):
            fronts = Counter(gram[1:] for gram in seen[size]) if size < order else found
            kept = {gram: count if gram[0] == _BEGIN else fronts[gram] for gram, count in found.items()}
            counts.append({gram: count for gram, count in kept.items() if gram[-1] != _BEGIN})
        return cls(counts, vocabulary, end)

    @property
    def order(self) -> int:
        """Tokens of its longest n-grams."""
        return len(self.counts)

    def log_prob(self, text: Sequence[int], token: int) -> float:
        """Of a token, or of the end, after a text, in nats."""
        history = (_BEGIN, *text)[max(0, len(text) + 2 - self.order) :]
        gram = (*history, token)
        if gram not in self._known:
            self._known[gram] = math.log(self._prob(gram))
        return self._known[gram]

    def _prob(self, gram: Gram) -> float:
        shorter = self._prob(gram[1:]) if len(gram) > 1 else 1 / self.vocabulary
        total = self._totals[gram[:-1]]
        if not total:
            return shorter
        count = self.counts[len(gram) - 1].get(gram, 0)
        return (max(count - _DISCOUNT, 0.0) + _DISCOUNT * self._kinds[gram[:-1]] * shorter) / total

    def save(self, folder: Path) -> None:
        """Write it into a folder."""
        arrays: dict[str, Any] = {"size": np.array([self.vocabulary, self.end])}
        for size, known in enumerate(self.counts, 1):
            arrays[f"grams_{size}"] = np.array(list(known), dtype=np.int32).reshape(-1, size)
            arrays[f"counts_{size}"] = np.array(list(known.values()), dtype=np.int32)
        np.savez_compressed(folder / FILE, **arrays)

    @classmethod
    def load(cls, folder: Path) -> NgramModel:
        """Read what ``save`` wrote.

        Raises:
            OSError, ValueError, KeyError: it is not there or damaged.
        """
        with np.load(folder / FILE, allow_pickle=False) as stored:
            vocabulary, end = stored["size"].tolist()
            sizes = range(1, 1 + sum(name.startswith("grams_") for name in stored.files))
            counts = [
                dict(zip(map(tuple, stored[f"grams_{n}"].tolist()), stored[f"counts_{n}"].tolist(), strict=True))
                for n in sizes
            ]
        return cls(counts, vocabulary, end)
