"""Lookahead decoding: n-grams from a window of parallel Jacobi iterations, verified in the same pass.

Fu et al. 2024, arXiv 2402.02057, sec. 3 and alg. 2. A window of N - 1 levels and W columns holds guesses of future
tokens: level 0 is one run of tokens after the root, level l of a column the target's output for the levels below. Each
pass computes one more level, so every column yields an n-gram: its token on level 0, the key, and the N - 1 that
follow. The pool keeps the last G n-grams of a key; those of the root are the draft. The window's nodes are auxiliary.
No training is needed.

Published: up to 1.8x on MT-bench on one A100, with N = 5, W = G = 15 for 7B. Spec-Bench with Vicuna-7B and 5, 7, 7:
1.34x on an A100, 1.64 tokens per step. It trades (N - 1)(W + G) nodes a pass for fewer steps, which a CPU cannot hide:
the YAML file has a smaller window than the constructor, which has the published values. With ``costs`` as many of the
n-grams' nodes are drafted as pay, and where window and n-grams do not pay together, rounds go without both
(``budget.py``).

With ``pool_from_prompt`` the pool also has the n-grams of the prompt and, as in the paper's code, of the text that is
written: on 8 prompts of Spec-Bench (96 tokens each, W = N = 3, G = 4) SmolLM2 in float32 writes 1.60 tokens per step
with them and 1.53 with those of the prompt alone, the same texts.

Differences: n-grams with a common beginning share nodes (a trie); the first window has tokens of the prompt at even
distances on all levels; an n-gram that is accepted in full is followed by the target's own token; of several tokens
that are kept at once the paper's code adds the last one again and again, here each enters in its turn.

Command: ``python -m bench method=lookahead dataset=spec_bench``
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from methods.drafting import AuxiliaryNodes, Context, Draft, ragged
from methods.engine.causal_lm import CausalLM
from methods.engine.host_copies import from_host
from methods.engine.sampling import Sampling
from methods.engine.token_tree import trie
from methods.rows import of_rows
from methods.speculative.budget import CostsOption
from methods.speculative.loop import SpeculativeDecoder
from methods.speculative.verification import default_rule


class Window:
    """The lookahead window of one row: level l, column j is a guess for the token j + l after the root.

    Args:
        prompt: gives the first guesses, its tokens at even distances.
        width: W, columns.
        levels: N - 1.
    """

    def __init__(self, prompt: Sequence[int], width: int, levels: int) -> None:
        guesses = width + levels - 1
        first = [prompt[place * len(prompt) // guesses] for place in range(guesses)]
        self.levels = [first[level : level + width] for level in range(levels)]

    def anchor(self, root: int) -> None:
        """Set column 0 of level 0 to the last committed token, which is no guess."""
        self.levels[0][0] = root

    def grams(self, found: Sequence[int]) -> list[tuple[int, ...]]:
        """The n-gram of every column, completed by the target's tokens after the last level."""
        return list(zip(*self.levels, found, strict=True))

    def advance(self, found: Sequence[int]) -> None:
        """Drop the oldest level: every guess is now one token nearer to the root, however many were committed."""
        self.levels = [*self.levels[1:], list(found)]

    def auxiliary(self) -> list[int]:
        """All guesses, level by level, the root left out."""
        return [token for level in self.levels for token in level][1:]


def auxiliary_parents(width: int, levels: int) -> list[int]:
    """Parents within the auxiliary, -1 for the root: level 0 is a chain, the others hang below their column."""
    return [*range(-1, width - 2), *range(-1, (levels - 1) * width - 1)]


class NgramPool:
    """The last ``most`` distinct n-grams of every first token."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._grams: dict[int, dict[tuple[int, ...], None]] = {}  # a dict keeps the order of insertion

    def add(self, gram: tuple[int, ...]) -> None:
        """Remember an n-gram as the newest of its first token."""
        known = self._grams.setdefault(gram[0], {})
        known.pop(gram[1:], None)
        known[gram[1:]] = None
        if len(known) > self._most:
            del known[next(iter(known))]

    def find(self, token: int) -> list[tuple[int, ...]]:
        """What followed ``token``, newest first."""
        return list(reversed(self._grams.get(token, ())))


class LookaheadDrafter:
    """Drafts n-grams from the pool and advances the window."""

    hidden_layers: Sequence[int] = ()

    def __init__(self, window: int, ngram: int, guesses: int, pool_from_prompt: bool) -> None:
        self._width, self._levels, self._guesses = window, ngram - 1, guesses
        self._pool_from_prompt = pool_from_prompt
        self._auxiliary_parents = auxiliary_parents(window, self._levels)
        self.nodes = len(self._auxiliary_parents) + guesses * self._levels
        self._windows: list[Window] = []
        self._pools: list[NgramPool] = []
        self._pooled: list[int] = []  # tokens of each text whose n-grams are in its pool

    def reset(self, prompts: list[list[int]], limit: int) -> None:
        self._windows = [Window(prompt, self._width, self._levels) for prompt in prompts]
        self._pools = [NgramPool(self._guesses) for _ in prompts]
        self._pooled = [0] * len(prompts)

    def keep_rows(self, rows: Sequence[int]) -> None:
        self._windows, self._pools = of_rows(self._windows, rows), of_rows(self._pools, rows)
        self._pooled = of_rows(self._pooled, rows)

    def reset_rows(self, prompts: Mapping[int, list[int]]) -> None:
        for row, prompt in prompts.items():
            self._windows[row] = Window(prompt, self._width, self._levels)
            self._pools[row], self._pooled[row] = NgramPool(self._guesses), 0

    def propose(self, context: Context) -> Draft:
        self._learn(context)
        for window, tokens in zip(self._windows, context.tokens, strict=True):
            window.anchor(tokens[-1])
        tries = [trie(pool.find(row[-1])) for pool, row in zip(self._pools, context.tokens, strict=True)]
        return self._draft(tries, context.root.device)

    def skip(self, context: Context) -> None:
        """Learn what was asked for and what was committed; the window then waits."""
        self._learn(context)

    def _learn(self, context: Context) -> None:
        if context.auxiliary_tokens:
            for window, pool, found in zip(self._windows, self._pools, context.auxiliary_tokens, strict=True):
                if not found:  # begun anew: nothing was asked for this text yet
                    continue
                for gram in window.grams(found):
                    pool.add(gram)
                window.advance(found)
        if self._pool_from_prompt:
            self._read(context.tokens)

    def _read(self, texts: list[list[int]]) -> None:
        for row, (pool, text) in enumerate(zip(self._pools, texts, strict=True)):
            for end in range(max(self._pooled[row], self._levels), len(text)):
                pool.add(tuple(text[end - self._levels : end + 1]))
            self._pooled[row] = len(text)

    def _draft(self, tries: list[tuple[list[int], list[int]]], device: torch.device) -> Draft:
        sizes = [len(tokens) for tokens, _ in tries]
        depths = [self._levels if size else 0 for size in sizes]
        width = max(sizes)
        tokens, parents = (ragged(rows, device) for rows in zip(*tries, strict=True))
        return Draft(
            tokens,
            parents,
            sizes=sizes,
            depths=depths,
            levels=max(depths),
            width=min(self._guesses, width),
            auxiliary=self._auxiliary(width, device),
        )

    def _auxiliary(self, drafted: int, device: torch.device) -> AuxiliaryNodes:
        parents = [parent + drafted if parent >= 0 else parent for parent in self._auxiliary_parents]
        return AuxiliaryNodes(
            tokens=from_host([window.auxiliary() for window in self._windows], device),
            parents=from_host(parents, device).expand(len(self._windows), -1),
            levels=self._width + self._levels - 2,
            asked=self._width,
        )


class Lookahead(SpeculativeDecoder):
    """Lookahead decoding: ``window`` columns, n-grams of ``ngram`` tokens, up to ``guesses`` of them verified.

    Args:
        sampling: how the target's distribution is processed; the window always follows the argmax.
        window: W, columns of the window.
        ngram: N, tokens of an n-gram, the key included; the window has N - 1 levels.
        guesses: G, n-grams kept per first token and verified per round.
        pool_from_prompt: the pool has the n-grams of the text too, those of the prompt from the start.
        costs: of passes, by which drafts are sized; see ``methods.speculative.budget``.

    Raises:
        ValueError: an option out of range.
    """

    continuous_batching = True
    paper = "Fu et al. 2024, arXiv 2402.02057"

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        window: int = 15,
        ngram: int = 5,
        guesses: int = 15,
        pool_from_prompt: bool = False,
        costs: CostsOption = None,
    ) -> None:
        if window < 1 or ngram < 3 or guesses < 1:
            raise ValueError(
                f"lookahead needs window >= 1, ngram >= 3 and guesses >= 1, got window={window}, ngram={ngram}, "
                f"guesses={guesses}. Published values are 15, 5 and 15; for no draft at all use method=autoregressive."
            )
        drafter = LookaheadDrafter(window, ngram, guesses, pool_from_prompt)
        super().__init__(target, sampling, drafter, default_rule(sampling, "tree", drawn=False), costs)
