"""Prompt lookup: draft the tokens that followed an earlier occurrence of the last words (Saxena 2023).

The last n tokens, n from ``max_ngram`` down to ``min_ngram``, are looked up in the text so far; the tokens that
followed them there are the draft. No training is needed. A continuation that reaches the end of the text continues with
the draft itself, as in LZ77, so a text that repeats with a short period is drafted in full. With ``costs`` a draft
has as many tokens as pay by how often those of its places were kept lately (``budget.py``); without, as published,
``gamma``.

Published: 2.4x on summarisation and question answering over a context, Mistral-7B on one A100, greedy (the author's
notes); 1.66x over Spec-Bench with Vicuna-7B. Differences: an index of n-grams instead of a search (the same matches,
constant time); a choice between the first and the last occurrence; a continuation shorter than ``gamma`` is used rather
than dropped; no draft at all where nothing matches.

Command: ``python -m bench method=prompt_lookup dataset=spec_bench``
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from methods.drafting import Context, Continuation, Draft
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.rows import of_rows
from methods.speculative.budget import CostsOption
from methods.speculative.loop import SpeculativeDecoder
from methods.speculative.verification import default_rule


class NgramIndex:
    """The positions of each n-gram of one text, updated while the text grows.

    An n-gram enters the index only once a token follows it, so the end of the text never matches itself.
    """

    def __init__(self, sizes: Sequence[int], pick: Literal["first", "last"]) -> None:
        self._places: dict[tuple[int, ...], int] = {}
        self._sizes, self._last = sizes, pick == "last"
        self._seen = 0

    def extend(self, tokens: list[int], stop: int) -> None:
        """Index the n-grams of ``tokens`` that are followed by a token before ``stop``."""
        for follower in range(max(self._seen, 1), stop):
            for size in self._sizes:
                if size <= follower:
                    gram = tuple(tokens[follower - size : follower])
                    if self._last or gram not in self._places:
                        self._places[gram] = follower
        self._seen = stop

    def find(self, tokens: list[int]) -> tuple[int, int] | None:
        """Index of the token after an earlier occurrence of the longest known ending of ``tokens``, and its length."""
        for size in self._sizes:
            place = self._places.get(tuple(tokens[-size:]))
            if place is not None:
                return place, size
        return None


class PromptLookupDrafter:
    """Drafts by looking up the last tokens in the text so far."""

    hidden_layers: Sequence[int] = ()

    def __init__(
        self,
        gamma: int,
        max_ngram: int,
        min_ngram: int,
        scope: Literal["text", "prompt"],
        pick: Literal["first", "last"],
    ) -> None:
        self.nodes = gamma
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._scope, self._pick = scope, pick
        self._index: list[NgramIndex] = []
        self._prompt_lengths: list[int] = []

    def reset(self, prompts: list[list[int]], limit: int) -> None:
        self._index = [NgramIndex(self._sizes, self._pick) for _ in prompts]
        self._prompt_lengths = [len(prompt) for prompt in prompts]

    def keep_rows(self, rows: Sequence[int]) -> None:
        self._index, self._prompt_lengths = of_rows(self._index, rows), of_rows(self._prompt_lengths, rows)

    def reset_rows(self, prompts: Mapping[int, list[int]]) -> None:
        for row, prompt in prompts.items():
            self._index[row] = NgramIndex(self._sizes, self._pick)
            self._prompt_lengths[row] = len(prompt)

    def skip(self, context: Context) -> None:
        """Nothing to do: the next search reads what was committed."""

    def propose(self, context: Context) -> Draft:
        drafts = [self.find(row, tokens).tokens for row, tokens in enumerate(context.tokens)]
        return Draft.chains(drafts, context.root.device)

    def find(self, row: int, tokens: list[int]) -> Continuation:
        """What followed the ending of the text at the one occurrence that counts."""
        end = len(tokens) if self._scope == "text" else self._prompt_lengths[row]
        self._index[row].extend(tokens, end)
        found = self._index[row].find(tokens)
        if found is None:
            return Continuation([])
        place, size = found
        followed = tokens[place : place + self.nodes]
        draft = (followed * -(-self.nodes // len(followed)))[: self.nodes]
        return Continuation(draft, size, float(len(draft)))


class PromptLookup(SpeculativeDecoder):
    """Prompt lookup with a chain of up to ``gamma`` tokens.

    Args:
        gamma: most tokens drafted per round.
        max_ngram: longest ending that is looked up; longer ones are tried first.
        min_ngram: shortest ending that is looked up.
        scope: look in the whole text so far, or in the prompt alone.
        pick: of several occurrences, the first or the last.
        costs: of passes, by which drafts are sized; see ``methods.speculative.budget``.
    """

    continuous_batching = True
    paper = "Saxena 2023"

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        gamma: int = 10,
        max_ngram: int = 3,
        min_ngram: int = 1,
        scope: Literal["text", "prompt"] = "text",
        pick: Literal["first", "last"] = "last",
        costs: CostsOption = None,
    ) -> None:
        if gamma < 1:
            raise ValueError(f"gamma must be at least 1, got {gamma}. For no draft use method=autoregressive.")
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(
                f"n-grams need 1 <= min_ngram <= max_ngram, got min_ngram={min_ngram}, max_ngram={max_ngram}. Change "
                "one of the two."
            )
        drafter = PromptLookupDrafter(gamma, max_ngram, min_ngram, scope, pick)
        super().__init__(target, sampling, drafter, default_rule(sampling, "chain", drawn=False), costs)
