"""BLEU (Papineni et al. 2002) and chrF2 (Popović 2015) by sacreBLEU (Post 2018, arXiv 1804.08771)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

from bench.quality.scorer import Pair, Scorer


class TranslationScorer(Scorer):
    """Sentence scores for one answer, corpus scores for many: the corpus BLEU is no mean of sentence BLEUs.

    Sentence BLEU uses the effective order, without which a short sentence scores 0 for want of 4-grams.
    """

    metrics: ClassVar[tuple[str, ...]] = ("bleu", "chrf")

    @cached_property
    def _sentence(self) -> dict[str, Any]:
        from sacrebleu.metrics import BLEU, CHRF

        return {"bleu": BLEU(effective_order=True), "chrf": CHRF()}

    @cached_property
    def _corpus(self) -> dict[str, Any]:
        from sacrebleu.metrics import BLEU, CHRF

        metrics = {"bleu": BLEU(), "chrf": CHRF()}
        for metric in metrics.values():
            metric.corpus_score(["a"], [["a"]])  # a signature names the number of references, known after a first use
        return metrics

    def score(self, reference: Any, answer: str) -> dict[str, float]:
        line = one_line(answer)
        return {name: float(m.sentence_score(line, [str(reference)]).score) for name, m in self._sentence.items()}

    def aggregate(self, pairs: Sequence[Pair]) -> dict[str, float | None]:
        if not pairs:
            return dict.fromkeys(self.metrics)
        lines, references = [one_line(answer) for _, answer in pairs], [[str(reference) for reference, _ in pairs]]
        return {name: float(m.corpus_score(lines, references).score) for name, m in self._corpus.items()}

    def notes(self) -> dict[str, str]:
        """The signatures of the corpus scores; that of a sentence has ``eff:yes``."""
        return {name: str(metric.get_signature()) for name, metric in self._corpus.items()}


def one_line(text: str) -> str:
    """Line breaks and runs of blanks as one blank: a translation is one segment."""
    return " ".join(text.split())
