"""Scores of an answer against a reference. All are percentages: an exact match is 100.0, ROUGE and BLEU are 0 to 100.

``Scorer`` is the interface; ``SCORERS`` names every implementation that needs nothing but references.
"""

from __future__ import annotations

from bench.scoring.base import Pair, Scorer
from bench.scoring.gsm8k import Gsm8kScorer
from bench.scoring.humaneval import HumanEvalScorer
from bench.scoring.nq import NQScorer
from bench.scoring.rouge import RougeScorer
from bench.scoring.translation import SegmentScorer, TranslationScorer

SCORERS: dict[str, type[Scorer]] = {
    "gsm8k": Gsm8kScorer,
    "humaneval": HumanEvalScorer,
    "nq": NQScorer,
    "rouge": RougeScorer,
    "translation": TranslationScorer,
}

__all__ = [
    "SCORERS",
    "Gsm8kScorer",
    "HumanEvalScorer",
    "NQScorer",
    "Pair",
    "RougeScorer",
    "Scorer",
    "SegmentScorer",
    "TranslationScorer",
]
