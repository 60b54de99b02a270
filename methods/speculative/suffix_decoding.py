"""Suffix decoding: draft what most often followed the longest ending of the text that occurred in it before.

A suffix automaton over prompt and output grows by one token at a time in amortised constant time (Blumer et al. 1985);
the suffix link of the whole text is its longest ending that occurs elsewhere. It drafts in SAM decoding (Hu et al.
2024, arXiv 2411.10666), as does a suffix tree with frequencies in SuffixDecoding (Oliaro et al. 2024, arXiv
2411.04975). Here the automaton of the first has the counts of the second: the draft follows the most frequent
transition, at most ``factor`` times the match's length and ``gamma`` tokens, and ends where the product of the relative
frequencies falls below ``min_prob``. With ``costs`` the path ends where a further token costs more than it is likely to
save (``budget.py``). No training is needed.

``matches=all`` scores every match length, as Arctic Inference does for SuffixDecoding: of the paths after all of them
the one with the highest sum of probabilities is drafted. Replayed over 8,849 recorded tokens it keeps what the longest
match keeps (1.648 tokens per step each on MT-bench, 1.719 on Spec-Bench).

Published: SAM decoding on Spec-Bench: 2.27x together with Token Recycling; with EAGLE-2, Vicuna-7B, 2.73x on an A100.
Tree depth 24, factor 1 and token probability 0.1 are vLLM's defaults for SuffixDecoding. Differences: only the text so
far is searched, no corpus and no earlier answers; a chain instead of a tree; no second drafter where nothing matches. A
draft continues beyond the end of the text, of equally frequent tokens the latest is drafted, and of matches of all
lengths the 32 longest are scored.

Command: ``python -m bench method=suffix dataset=spec_bench``
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from methods.drafting import Context, Continuation, Draft
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.rows import of_rows
from methods.speculative.budget import CostsOption
from methods.speculative.loop import SpeculativeDecoder
from methods.speculative.verification import default_rule

Matches = Literal["longest", "all"]

_COUNTED = 32  # endings of the text whose occurrences are counted per token: periodic text has very many


class SuffixAutomaton:
    """All substrings of a growing text.

    A state represents the substrings that end at the same places of the text. State 0 is the empty string, state
    ``whole`` the text itself. The suffix link of a state leads to its longest ending that ends at further places too.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.whole = 0
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._count = [0]  # places at which the state's strings end
        self._newest = [0]  # the last of these places
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self._append(token)
            self._count_endings()

    def match(self) -> tuple[int, int]:
        """State and length of the longest ending of the text that also occurs elsewhere in it."""
        state = max(self._link[self.whole], 0)
        return state, self._length[state]

    def shorter(self, state: int) -> tuple[int, int]:
        """State and length of the longest ending of a state's strings that other places have too."""
        state = max(self._link[state], 0)
        return state, self._length[state]

    def likeliest(self, state: int) -> tuple[int, int, float]:
        """The most frequent token after a state's strings (of equals the latest), the state it leads to, its share.

        After the end of the text there is none; its longest ending that occurs elsewhere is used instead.
        """
        while not self._next[state]:
            state = self._link[state]
        count, newest = self._count, self._newest
        behind = self._next[state]
        if len(behind) == 1:
            token, reached = next(iter(behind.items()))
            return token, reached, 1.0
        token, reached = max(behind.items(), key=lambda item: (count[item[1]], newest[item[1]]))
        return token, reached, count[reached] / sum(count[other] for other in behind.values())

    def _append(self, token: int) -> None:
        new = self._add({}, self._length[self.whole] + 1, 0)
        state = self.whole
        while state != -1 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state != -1:
            self._link[new] = self._split(state, token)
        self.whole = new

    def _split(self, state: int, token: int) -> int:
        """The state of ``state``'s longest string and ``token``, taken out of the one it shares with longer strings."""
        found = self._next[state][token]
        if self._length[found] == self._length[state] + 1:
            return found
        clone = self._add(dict(self._next[found]), self._length[state] + 1, self._link[found])
        self._count[clone], self._newest[clone] = self._count[found], self._newest[found]
        self._link[found] = clone
        while state != -1 and self._next[state].get(token) == found:
            self._next[state][token] = clone
            state = self._link[state]
        return clone

    def _add(self, behind: dict[int, int], length: int, link: int) -> int:
        self._next.append(behind)
        self._length.append(length)
        self._link.append(link)
        self._count.append(0)
        self._newest.append(0)
        return len(self._next) - 1

    def _count_endings(self) -> None:
        state, place = self.whole, self._length[self.whole]
        for _ in range(_COUNTED):
            if state <= 0:
                break
            self._count[state] += 1
            self._newest[state] = place
            state = self._link[state]


class SuffixDrafter:
    """Drafts along the automaton of each row."""

    hidden_layers: Sequence[int] = ()

    def __init__(
        self, gamma: int, factor: float, min_match: int, min_prob: float, matches: Matches = "longest"
    ) -> None:
        self.nodes, self._matches = gamma, matches
        self._factor, self._min_match, self._min_prob = factor, min_match, min_prob
        self._automata: list[SuffixAutomaton] = []
        self._read: list[int] = []

    def reset(self, prompts: list[list[int]], limit: int) -> None:
        self._automata = [SuffixAutomaton(prompt) for prompt in prompts]
        self._read = [len(prompt) for prompt in prompts]

    def keep_rows(self, rows: Sequence[int]) -> None:
        self._automata, self._read = of_rows(self._automata, rows), of_rows(self._read, rows)

    def reset_rows(self, prompts: Mapping[int, list[int]]) -> None:
        for row, prompt in prompts.items():
            self._automata[row], self._read[row] = SuffixAutomaton(prompt), len(prompt)

    def propose(self, context: Context) -> Draft:
        found = [self.find(row, tokens) for row, tokens in enumerate(context.tokens)]
        gains = [path.gains or [] for path in found]
        return Draft.chains([path.tokens for path in found], context.root.device, gains)

    def skip(self, context: Context) -> None:
        """Nothing to do: the next search reads what was committed."""

    def _updated(self, row: int, tokens: list[int]) -> SuffixAutomaton:
        automaton = self._automata[row]
        automaton.extend(tokens[self._read[row] :])
        self._read[row] = len(tokens)
        return automaton

    def find(self, row: int, tokens: list[int]) -> Continuation:
        """What followed most often an ending of the text that occurred before."""
        automaton = self._updated(row, tokens)
        state, length = automaton.match()
        best = Continuation([])
        for _ in range(1 if self._matches == "longest" else _COUNTED):
            if length < self._min_match:
                break
            path = self._path(automaton, state, length)
            best = path if not best.match or path.expected > best.expected else best
            state, length = automaton.shorter(state)
        return best

    def _path(self, automaton: SuffixAutomaton, state: int, length: int) -> Continuation:
        """The most frequent path after a match.

        A text that has repeated m tokens repeats one more with probability m / (m + 1) (Laplace's rule of succession),
        and by that much a token's relative frequency counts.
        """
        draft: list[int] = []
        gains: list[float] = []
        prob, expected = 1.0, 0.0
        for _ in range(min(self.nodes, int(self._factor * length))):
            token, state, share = automaton.likeliest(state)
            prob *= share
            if prob < self._min_prob:
                break
            draft.append(token)
            gains.append(prob * length / (length + len(draft)))
            expected += prob
        return Continuation(draft, length, expected, gains)


class SuffixDecoding(SpeculativeDecoder):
    """Suffix decoding with a chain of up to ``gamma`` tokens.

    Args:
        gamma: most tokens drafted per round.
        factor: tokens drafted per token of the match.
        min_match: shortest ending of the text that is taken for a match.
        min_prob: a draft ends where the product of its tokens' relative frequencies falls below this.
        matches: draft after the ``longest`` match, or of ``all`` after the one with the highest score.
        costs: of passes, by which drafts are sized; see ``methods.speculative.budget``.

    Raises:
        ValueError: an option out of range.
    """

    continuous_batching = True
    paper = "Hu et al. 2024, arXiv 2411.10666; Oliaro et al. 2024, arXiv 2411.04975"

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        gamma: int = 24,
        factor: float = 1.0,
        min_match: int = 1,
        min_prob: float = 0.1,
        matches: Matches = "longest",
        costs: CostsOption = None,
    ) -> None:
        if gamma < 1 or min_match < 1 or not 0.0 <= min_prob <= 1.0:
            raise ValueError(
                f"suffix needs gamma >= 1, min_match >= 1 and 0 <= min_prob <= 1, got gamma={gamma}, "
                f"min_match={min_match}, min_prob={min_prob}. For no draft at all use method=autoregressive."
            )
        if not 1.0 <= factor * min_match < math.inf:
            raise ValueError(
                "factor times min_match, the tokens drafted after the shortest match, must be finite and at least 1, "
                f"got factor={factor} and min_match={min_match}. Change one of the two."
            )
        drafter = SuffixDrafter(gamma, factor, min_match, min_prob, matches)
        super().__init__(target, sampling, drafter, default_rule(sampling, "chain", drawn=False), costs)
