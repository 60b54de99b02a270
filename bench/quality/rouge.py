"""ROUGE-1, -2 and -L (Lin 2004): F-measure with Porter stemming, by the rouge-score package."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from bench.quality.scorer import Scorer, percent


class RougeScorer(Scorer):
    """F-measures; the corpus value is the mean over answers, ROUGE-L is that of the whole answer, not of its lines."""

    metrics = ("rouge1", "rouge2", "rougeL")

    @cached_property
    def _rouge(self) -> Any:
        from rouge_score import rouge_scorer  # takes a second to import

        return rouge_scorer.RougeScorer(list(self.metrics), use_stemmer=True)

    def score(self, reference: Any, answer: str) -> dict[str, float]:
        found = self._rouge.score(str(reference), answer)
        return {metric: percent(found[metric].fmeasure) for metric in self.metrics}

    def notes(self) -> dict[str, str]:
        return dict.fromkeys(self.metrics, "rouge-score, F-measure, Porter stemmer")
