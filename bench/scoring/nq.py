"""Open questions with several right answers: Natural Questions (Lee et al. 2019, arXiv 1906.00300).

Exact match after the normalisation of SQuAD (Rajpurkar et al. 2016, arXiv 1606.05250): lower case, no punctuation,
no articles, single blanks. It punishes a full sentence around the right answer, so the share of answers that
contain a right one is reported beside it.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Any

from bench.scoring.base import Scorer, percent

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class NQScorer(Scorer):
    """Against a list of accepted answers; exact match looks at the first line of what the model wrote."""

    metrics = ("exact_match", "contains_answer")

    def score(self, reference: Any, answer: str) -> dict[str, float]:
        accepted = {normalise(text) for text in _texts(reference)} - {""}
        first_line = next((line for line in answer.splitlines() if line.strip()), "")
        words = f" {normalise(answer)} "
        return {
            "exact_match": percent(normalise(first_line) in accepted),
            "contains_answer": percent(any(f" {text} " in words for text in accepted)),
        }

    def notes(self) -> dict[str, str]:
        return {
            "exact_match": "first line, SQuAD normalisation, any accepted answer",
            "contains_answer": "an accepted answer is among the words of the answer, SQuAD normalisation",
        }


def normalise(text: str) -> str:
    """Lower case without punctuation and articles, words separated by single blanks."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _texts(reference: Any) -> Sequence[str]:
    return [reference] if isinstance(reference, str) else reference
