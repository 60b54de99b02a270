"""ROUGE-1, -2 and -L (Lin 2004): F-measure with Porter stemming, by the rouge-score package; ROUGE-L of ids here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from bench.scoring.base import Scorer, percent


class RougeScorer(Scorer):
    """F-measures; the corpus value is the mean over answers, ROUGE-L is that of the whole answer, not of its lines."""

    metrics = ("rouge1", "rouge2", "rougeL")

    @cached_property
    def _rouge(self) -> Any:
        from rouge_score import rouge_scorer  # takes a second to import

        return rouge_scorer.RougeScorer(list(self.metrics), use_stemmer=True)

    def load(self) -> None:
        self._rouge.score("a", "a")

    def score(self, reference: Any, answer: str) -> dict[str, float]:
        found = self._rouge.score(str(reference), answer)
        return {metric: percent(found[metric].fmeasure) for metric in self.metrics}

    def notes(self) -> dict[str, str]:
        return dict.fromkeys(self.metrics, "rouge-score, F-measure, Porter stemmer")


def rouge_l(reference: Sequence[int], written: Sequence[int]) -> float:
    """F-measure of the longest common subsequence of two lists of ids, in [0, 1]: how far one text is the other.

    Of ids and not of words: it needs no language, and sees what a decoder did. Two empty texts are the same.
    """
    if not reference or not written:
        return float(len(reference) == len(written))
    return 2 * common_subsequence(reference, written) / (len(reference) + len(written))


def common_subsequence(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common subsequence, with one bit per element of ``a`` (Hyyro 2004)."""
    places: dict[int, int] = {}
    for place, token in enumerate(a):
        places[token] = places.get(token, 0) | 1 << place
    row = whole = (1 << len(a)) - 1
    for token in b:
        matched = row & places.get(token, 0)
        row = ((row + matched) | (row - matched)) & whole
    return len(a) - row.bit_count()
