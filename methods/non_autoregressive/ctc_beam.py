"""Beam search over the places of ``ctc``, with an n-gram model of the target language if wanted.

A text has many alignments: other places of its blanks, and tokens that are repeated. The likeliest token at every place
finds the likeliest alignment; the search sums over those of a text (prefix search: Hannun et al. 2014, arXiv 1408.2873,
alg. 1). Kept are the texts of the best

    log p(text so far | source) + a log p_ngrams(text so far) + b * tokens

at each place; the last pass over them adds the n-gram model's probability of the end. Kasner et al. 2020 (arXiv
2004.03227) add such a model to the students of ``ctc``, whose tokens do not see one another.

The search runs on the host, text by text, over the ``TOKENS`` likeliest tokens of each place and the blank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from methods.non_autoregressive.ngram_model import NgramModel

TOKENS = 8  # per place, besides the blank
_NEVER = -float("inf")


@dataclass(frozen=True, slots=True)
class Scores:
    """What the search maximises beside the student's own probability.

    Attributes:
        lm_weight: a, of the log-probability by n-grams; 0: they are not asked.
        length_bonus: b, per token.
    """

    lm_weight: float = 0.0
    length_bonus: float = 0.0


@dataclass(slots=True)
class _Prefix:
    """Log-probability of a text, over its alignments that end with a blank and over the others; and its bonus."""

    blank: float = _NEVER
    token: float = _NEVER
    bonus: float = 0.0

    @property
    def total(self) -> float:
        return float(np.logaddexp(self.blank, self.token))


def search(
    blanks: Sequence[float],
    tokens: Sequence[Sequence[int]],
    log_probs: Sequence[Sequence[float]],
    beam: int,
    scores: Scores,
    ngrams: NgramModel | None,
) -> list[int]:
    """The best text of one source.

    Args:
        blanks: per place, log-probability of the blank.
        tokens: per place, the tokens that may be written there.
        log_probs: theirs.
        beam: texts that are kept at each place.
        ngrams: needed if they have a weight.
    """

    def bonus(text: tuple[int, ...], token: int) -> float:
        own = scores.lm_weight * ngrams.log_prob(text, token) if ngrams and scores.lm_weight else 0.0
        return own + scores.length_bonus

    kept: dict[tuple[int, ...], _Prefix] = {(): _Prefix(blank=0.0)}
    for blank, near, sure in zip(blanks, tokens, log_probs, strict=True):
        found: dict[tuple[int, ...], _Prefix] = defaultdict(_Prefix)
        for text, prefix in kept.items():
            total, same = prefix.total, found[text]
            same.bonus = prefix.bonus
            same.blank = float(np.logaddexp(same.blank, total + blank))
            for token, log_prob in zip(near, sure, strict=True):
                again = bool(text) and token == text[-1]
                if again:  # without a blank between them the two are one
                    same.token = float(np.logaddexp(same.token, prefix.token + log_prob))
                longer = (*text, token)
                other = found[longer]
                other.token = float(np.logaddexp(other.token, (prefix.blank if again else total) + log_prob))
                other.bonus = prefix.bonus + bonus(text, token)
        ranked = sorted(found.items(), key=lambda item: item[1].total + item[1].bonus, reverse=True)
        kept = dict(ranked[:beam])
    end = scores.lm_weight if ngrams else 0.0

    def value(text: tuple[int, ...]) -> float:
        last = end * ngrams.log_prob(text, ngrams.end) if ngrams and end else 0.0
        return kept[text].total + kept[text].bonus + last

    best: tuple[int, ...] = max(kept, key=value)
    return list(best)
