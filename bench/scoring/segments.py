"""Translations sentence by sentence: cased BLEU and chrF2, and two signs of damage that BLEU hides.

Parallel decoders say words twice and stop too early (Gu et al. 2018, arXiv 1711.02281); Helcl et al. 2022 (NAACL)
show that BLEU alone does not tell. So the length against the reference and adjacent repetitions are reported with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

from bench.scoring.base import Pair, percent
from bench.scoring.translation import TranslationScorer, one_line


class SegmentScorer(TranslationScorer):
    """BLEU, chrF2, length ratio and repetition rate, all over detokenised cased text.

    Args:
        language: of the translation; sacreBLEU has its own tokeniser for a few (zh, ja, ko).
    """

    metrics = ("bleu", "chrf", "length_ratio", "repetition")

    def __init__(self, language: str) -> None:
        self.language = language

    @cached_property
    def _sentence(self) -> dict[str, Any]:
        from sacrebleu.metrics import BLEU, CHRF

        return {"bleu": BLEU(effective_order=True, trg_lang=self.language), "chrf": CHRF()}

    @cached_property
    def _corpus(self) -> dict[str, Any]:
        from sacrebleu.metrics import BLEU, CHRF

        metrics = {"bleu": BLEU(trg_lang=self.language), "chrf": CHRF()}
        for metric in metrics.values():
            metric.corpus_score(["a"], [["a"]])  # a signature names the number of references, known after a first use
        return metrics

    def score(self, reference: Any, answer: str) -> dict[str, float]:
        return super().score(reference, answer) | self._signs([(reference, answer)])

    def aggregate(self, pairs: Sequence[Pair]) -> dict[str, float | None]:
        """Over a corpus all four are ratios of sums, none is a mean over sentences."""
        found = super().aggregate(pairs)
        return {**found, **self._signs(pairs)} if pairs else found

    def notes(self) -> dict[str, str]:
        return super().notes() | {
            "length_ratio": "words of the answers over words of the references, tokenised as for BLEU",
            "repetition": "words equal to the one before them over all words of the answers, tokenised as for BLEU",
        }

    def _signs(self, pairs: Sequence[Pair]) -> dict[str, float]:
        """Length ratio and repetition rate, in percent."""
        written = [self._words(answer) for _, answer in pairs]
        wanted = sum(len(self._words(str(reference))) for reference, _ in pairs)
        words = sum(map(len, written))
        twice = sum(left == right for line in written for left, right in pairwise(line))
        return {"length_ratio": percent(words / max(1, wanted)), "repetition": percent(twice / max(1, words))}

    def _words(self, text: str) -> list[str]:
        words: list[str] = self._corpus["bleu"].tokenizer(one_line(text)).split()
        return words
