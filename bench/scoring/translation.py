"""BLEU (Papineni et al. 2002) and chrF2 (Popović 2015) by sacreBLEU (Post 2018, arXiv 1804.08771)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from bench.scoring.base import Pair, Scorer, percent
from bench.utils import stats

_RESAMPLES, _SEED = 1000, 0


class TranslationScorer(Scorer):
    """Sentence scores for one answer, corpus scores for many: the corpus BLEU is no mean of sentence BLEUs.

    Sentence BLEU uses the effective order, without which a short sentence scores 0 for want of 4-grams.
    """

    metrics: ClassVar[tuple[str, ...]] = ("bleu", "chrf")
    language: str = ""  # sacreBLEU has a tokeniser of its own for a few (zh, ja, ko)

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

    def load(self) -> None:
        _ = self._sentence, self._corpus

    def score(self, reference: Any, answer: str) -> dict[str, float]:
        line = one_line(answer)
        return {name: float(m.sentence_score(line, [str(reference)]).score) for name, m in self._sentence.items()}

    def aggregate(self, pairs: Sequence[Pair]) -> dict[str, float | None]:
        if not pairs:
            return dict.fromkeys(self.metrics)
        lines, references = [one_line(answer) for _, answer in pairs], [[str(reference) for reference, _ in pairs]]
        return {name: float(m.corpus_score(lines, references).score) for name, m in self._corpus.items()}

    def change(self, before: Sequence[Pair], after: Sequence[Pair]) -> dict[str, stats.Interval]:
        """Of BLEU: the paired bootstrap over segments (Koehn 2004, EMNLP, section 3), percentiles of 1,000 resamples.

        Raises:
            ValueError: the two do not answer the same references.
        """
        if [reference for reference, _ in before] != [reference for reference, _ in after]:
            raise ValueError(f"{len(before)} and {len(after)} answers to other references cannot be compared.")
        if not before:
            return {}
        counts = [self._counts(pairs) for pairs in (before, after)]
        value, n = self._bleu(counts[1].sum(0)) - self._bleu(counts[0].sum(0)), len(before)
        if n < stats.FEWEST_FOR_BOOTSTRAP:
            reason = f"{n} segments are too few for an interval, {stats.FEWEST_FOR_BOOTSTRAP} are needed"
            return {"bleu": stats.Interval(value, n=n, reason=reason)}
        drawn = np.random.default_rng(_SEED).integers(n, size=(_RESAMPLES, n))
        old, new = (np.array([self._bleu(rows[lot].sum(0)) for lot in drawn]) for rows in counts)
        tail = 100 * (1 - stats.CONFIDENCE) / 2
        low, high = np.percentile(new - old, [tail, 100 - tail])
        return {"bleu": stats.Interval(value, float(low), float(high), n, "percentile")}

    def _counts(self, pairs: Sequence[Pair]) -> NDArray[np.int64]:
        """By segment: matches and n-grams of each order, length and reference length."""
        bleu = self._sentence["bleu"]
        scores = [bleu.sentence_score(one_line(answer), [str(reference)]) for reference, answer in pairs]
        return np.array([[*found.counts, *found.totals, found.sys_len, found.ref_len] for found in scores])

    def _bleu(self, counts: NDArray[np.int64]) -> float:
        """Of a corpus whose ``_counts`` add up to these."""
        bleu, (length, reference) = self._corpus["bleu"], counts[8:].tolist()
        found = bleu.compute_bleu(counts[:4].tolist(), counts[4:8].tolist(), length, reference, bleu.smooth_method)
        return float(found.score)

    def notes(self) -> dict[str, str]:
        """The signatures of the corpus scores; that of a sentence has ``eff:yes``."""
        return {name: str(metric.get_signature()) for name, metric in self._corpus.items()}


class SegmentScorer(TranslationScorer):
    """BLEU, chrF2, length ratio and repetition rate, all over detokenised cased text.

    Args:
        language: of the translation; sacreBLEU has its own tokeniser for a few (zh, ja, ko).
    """

    metrics = ("bleu", "chrf", "length_ratio", "repetition")

    def __init__(self, language: str) -> None:
        self.language = language

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


def one_line(text: str) -> str:
    """Line breaks and runs of blanks as one blank: a translation is one segment."""
    return " ".join(text.split())
