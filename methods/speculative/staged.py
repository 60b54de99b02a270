"""Staged speculative decoding: a copy of the target in 4 bits drafts in the target's cache, and lookups draft for it.

Three models of rising cost judge each other (Spector & Re 2023, arXiv 2308.04623): a suffix automaton of the text
proposes, the copy keeps what it would have written and adds a token, and after ``gamma`` tokens or so the target
judges the chain in one pass. The copy has the target's layers with weights rounded to 4 bits, as in QSpec (Zhao et al.
2024, arXiv 2410.11305), where both share one cache too: the copy needs no prefill and no cache of its own, and the pass
that judges a draft overwrites what drafting wrote. Its output matrix has 4 bits, too, and the target's gives the logits
that are largest by it; at a temperature, where all logits count, it has 8 bits. Nothing is trained.

Where a lookup alone promises more tokens per time than a chain, as after a long match, the target judges it at once.
``lookup=false`` is the copy alone. At a temperature the copy's tokens are drawn, nothing is looked up, and the
chain is judged by rejection, token by token or as a block.

How many tokens a chain has follows from how many were kept lately, from the time a token of the copy takes, and
from what passes cost (``costs``): n tokens have the most tokens per time, (1 + k + k^2 + .. + k^n) / (n c + v(1 + n)),
for a share k that is kept. An account bounds what drafts can lose (``budget.py``).

Published: staged 3.16x with GPT-2-L (762M), a small draft model and n-grams; QSpec up to 1.64x over the same 4-bit
weights with 16-bit inputs. Differences: chains instead of trees; n-grams come from the text alone; weights of the copy
are in blocks of 32 numbers with a scale and a zero each, and inputs in 8 bits, by C++ kernels of a CPU.

The embedded SmolLM2-135M is read from a file of 4-bit numbers, so its copy loses only what the rounding of inputs
loses: 98 of 100 tokens are kept whose predecessors were. With weights that lie on no grid it is 81.

Command: ``python -m bench method=staged dataset=mtbench``
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from methods.drafting import Context, Continuation, Draft
from methods.engine.causal_lm import CausalLM
from methods.engine.fused_layers import Drawing
from methods.engine.kv_cache import Cache
from methods.engine.sampling import Sampling, draw
from methods.rows import of_rows
from methods.speculative.budget import Account, Costs, CostsOption, Ratio, size
from methods.speculative.loop import SpeculativeDecoder
from methods.speculative.suffix_decoding import SuffixDrafter
from methods.speculative.verification import default_rule, walk_on_host

_FIRST_SHARE = 0.95  # of the copy's tokens that are kept, a guess
_GUESSED = 4.0  # drafted tokens that it counts for
_MEMORY = 0.97  # weight of the past per round
_RESERVE = 12.0  # of the account: a chain that fails costs several passes
_LIKELY = 0.3  # how likely a token of a lookup must be, for the copy to judge it
_FACTOR, _MIN_PROB = 1.0, 0.1  # of lookups, see ``SuffixDecoding``


class ChainLength:
    """How many tokens of a chain to draft, by what was kept lately.

    Attributes:
        most: tokens of a chain.
        costs: of passes, and of drafting ``most`` tokens; None: every chain has as many.
        account: of what chains gain.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.costs: Costs | None = None
        self.reset()

    def reset(self) -> None:
        """Start new texts, and forget the others."""
        self.account = Account(_RESERVE)
        self._kept, self._judged = _FIRST_SHARE * _GUESSED, _GUESSED
        self._passes, self._tokens = 1.0, 1.0

    @property
    def share(self) -> float:
        """Of the tokens whose predecessors were kept, those that were kept too."""
        return self._kept / self._judged

    @property
    def each(self) -> float:
        """Time of drafting a token, in passes of the target over one node."""
        assert self.costs is not None
        return self.costs.draft / self.most * self._passes / self._tokens

    def pauses(self) -> bool:
        """Whether the next round goes without a draft; to be asked once a round."""
        return self.costs is not None and self.account.pause()

    def choose(self, room: int) -> tuple[int, float]:
        """Tokens of the next chain, at most ``room``, and the tokens per time of a round with it.

        Time is in passes over one node, and without costs it is not known: the chain is whole, and its rate infinite.
        """
        most = min(self.most, room)
        if self.costs is None or most < 1:
            return max(most, 0), math.inf if most > 0 else 1.0
        share, left = self.share, self.account.left
        best, best_rate, tokens, kept = 1, 0.0, 1.0, 1.0
        for count in range(1, most + 1):
            kept *= share
            tokens += kept
            extra = self._extra(count)
            if count > 1 and extra > left:
                break
            rate = tokens / (1.0 + extra)
            if rate > best_rate:
                best, best_rate = count, rate
        return best, best_rate

    def _extra(self, count: int) -> float:
        assert self.costs is not None
        return count * self.each + self.costs.time(1 + count) - 1.0

    def note_drafted(self, tokens: int, passes: int) -> None:
        """A chain of so many tokens took so many passes of the copy."""
        self._passes = _MEMORY * self._passes + passes
        self._tokens = _MEMORY * self._tokens + tokens

    def note_kept(self, drafted: int, kept: float, rejected: float) -> None:
        """A chain was judged: of the mean row so many tokens were kept, and one or none was rejected."""
        self._kept = _MEMORY * self._kept + kept
        self._judged = _MEMORY * self._judged + kept + rejected
        if self.costs is not None:
            self.account.book(kept - self._extra(drafted))

    def note_found(self, drafted: int, kept: float) -> None:
        """The same of tokens that a lookup found, which took no time."""
        if self.costs is not None:
            self.account.book(kept - (self.costs.time(1 + drafted) - 1.0))


class StagedDrafter:
    """Drafts a chain by a copy that shares the target's cache.

    Args:
        light: the copy.
        gamma: most tokens of a chain.
        lookup: in the text, for the copy and for the target; None: none.
        alone: without costs, tokens that must match for a lookup to draft without the copy.

    Attributes:
        length: of the chains.
        rounds: by what drafted.
        copied, kept: tokens that the copy drafted in all texts, and those that the mean row kept.
    """

    hidden_layers: Sequence[int] = ()

    def __init__(self, light: CausalLM, gamma: int, lookup: SuffixDrafter | None, alone: int) -> None:
        self.light, self.length = light, ChainLength(gamma)
        self._lookup, self._alone = lookup, alone
        self.nodes = gamma if lookup is None else max(gamma, lookup.nodes)
        self.rounds = {"copy": 0, "lookup": 0, "none": 0}
        self.copied, self.kept = 0, 0.0
        self._ratio = Ratio()
        self._ends: list[int] = []
        self._probs: Tensor | None = None  # of the last tokens drawn
        self._lengths: list[int] = []  # of the texts when the last draft was made
        self._last: tuple[str, int, float] = "none", 0, 0.0  # what drafted it, its tokens, and how many were expected

    def reset(self, prompts: list[list[int]], limit: int) -> None:
        self.length.reset()
        self._ratio = Ratio()
        self._ends, self._lengths, self._last = [len(prompt) + limit for prompt in prompts], [], ("none", 0, 0.0)
        if self._lookup is not None:
            self._lookup.reset(prompts, limit)

    def keep_rows(self, rows: Sequence[int]) -> None:
        self._ends, self._lengths = of_rows(self._ends, rows), of_rows(self._lengths, rows) if self._lengths else []
        if self._lookup is not None:
            self._lookup.keep_rows(rows)

    def propose(self, context: Context) -> Draft:
        texts = context.tokens
        self._learn(texts)
        if self.length.pauses():
            chain, found = 0, None
        else:
            room = max(end - len(text) for end, text in zip(self._ends, texts, strict=True)) - 1
            chain, rate = self.length.choose(room)
            found = self._found(texts, rate) if context.sampling.greedy else None
        if found is not None:
            draft = Draft.chains([path.tokens for path in found], context.root.device)
            self._last = "lookup", draft.tokens.shape[1], sum(sum(path.gains or []) for path in found) / len(found)
        elif chain:
            draft = self._drafted(context, chain)
            self._last = "copy", draft.tokens.shape[1], 0.0
        else:
            draft = Draft.chain(context.root.new_empty(len(texts), 0))
            self._last = "none", 0, 0.0
        self._lengths = [len(text) for text in texts]
        self.rounds[self._last[0]] += 1
        return draft

    def _learn(self, texts: Sequence[list[int]]) -> None:
        """What was kept of the last draft; rows that have ended do not count."""
        source, drafted, expected = self._last
        grown = [len(text) - before - 1 for text, before in zip(texts, self._lengths, strict=False)]
        counted = [count for count in grown if count >= 0]
        if not drafted or not counted:
            return
        kept = sum(counted) / len(counted)
        if source == "copy":
            rejected = sum(count < drafted for count in counted) / len(counted)
            self.length.note_kept(drafted, kept, rejected)
            self.copied, self.kept = self.copied + drafted, self.kept + kept
        else:
            self._ratio.note(kept, expected)
            self.length.note_found(drafted, kept)

    def _found(self, texts: Sequence[list[int]], rate: float) -> list[Continuation] | None:
        """Paths that go to the target without the copy: those of which more is expected per time than of a chain.

        Without costs, those after ``alone`` tokens that match in every row.
        """
        if self._lookup is None:
            return None
        found, costs = [self._lookup.find(row, text) for row, text in enumerate(texts)], self.length.costs
        if costs is None:
            return None if any(path.match < self._alone for path in found) else found
        counts = [size([self._ratio.value * gain for gain in path.gains or []], costs) for path in found]
        cut = [_cut(path, count) for path, count in zip(found, counts, strict=True)]
        expected = self._ratio.value * sum(sum(path.gains or []) for path in cut) / len(cut)
        return cut if (1.0 + expected) / costs.time(1 + max(counts)) > rate else None

    def _drafted(self, context: Context, count: int) -> Draft:
        cache = context.cache
        assert cache is not None, "the loop makes the cache before it asks for a draft"
        lengths = cache.lengths
        if not self.light.rounds_fused or not (context.sampling.greedy or context.sampling.keeps_all):
            draft = self._one_by_one(context, cache, count)
        elif not context.sampling.greedy:
            draft = self._drawn(context, cache, count)
        elif len(lengths) == 1 and self._lookup is not None:
            tokens, passes = self._staged(self._lookup, context.tokens[0], cache, count)
            draft = replace(Draft.chains([tokens], context.root.device), passes=passes)
        else:
            roots = context.root.tolist()
            ran = self.light.rounds(roots, cache, count, [True] * len(roots), self._ends_of(roots))
            chains = [list(row) for row in zip(*ran.tokens, strict=True)]
            draft = replace(Draft.chains(chains, context.root.device), passes=len(ran.tokens))
        cache.set_lengths(lengths)  # what was drafted is not committed
        self.length.note_drafted(draft.tokens.shape[1], draft.passes)
        return draft

    def _ends_of(self, rows: Sequence[int] | Tensor) -> Sequence[int]:
        """Tokens with which a draft ends: those that end a text that drafts alone."""
        return tuple(self.light.eos_ids) if len(rows) == 1 else ()

    def _staged(self, lookup: SuffixDrafter, text: list[int], cache: Cache, most: int) -> tuple[list[int], int]:
        """The copy's likeliest tokens, and its passes: each over what a lookup found, or over one token."""
        light, cursor, found, passes = self.light, lookup.cursor(0, text), list[int](), 0
        while len(found) < most and not (found and found[-1] in light.eos_ids):
            path, root = cursor.find(), found[-1] if found else text[-1]
            likely = sum(gain >= _LIKELY for gain in path.gains or [])
            tried = path.tokens[: min(likely, most - len(found) - 1)]
            if tried:
                state = light.begin(torch.tensor([[root, *tried]]), None, cache)
                best = light.run_to_logits(state, light.n_layers).best[0].tolist()
                new = best[: 1 + len(walk_on_host(tried, None, best))]
            else:
                new = light.rounds([root], cache, 1, [True], ()).tokens[0]
            passes += 1
            cache.advance([len(new)])
            cursor.read(new)
            found += new
        ended = next((at + 1 for at, token in enumerate(found) if token in light.eos_ids), len(found))
        return found[:ended], passes

    def _drawn(self, context: Context, cache: Cache, count: int) -> Draft:
        """Tokens drawn in one call of the kernels."""
        light, roots, sampling = self.light, context.root.tolist(), context.sampling
        luck = torch.rand(count, len(roots), dtype=torch.float64, generator=context.rng)
        if self._probs is None or self._probs.shape[:2] != (self.length.most, len(roots)):
            self._probs = torch.empty(self.length.most, len(roots), light.vocab_size)
        drawing = Drawing(sampling.temperature, luck, self._probs)
        moves, ends = [True] * len(roots), self._ends_of(roots)
        ran = light.rounds(roots, cache, count, moves, ends, drawing=drawing)
        probs = self._probs[: len(ran.tokens)].transpose(0, 1)
        return Draft.chain(torch.tensor(ran.tokens).T.contiguous(), probs, passes=len(ran.tokens))

    def _one_by_one(self, context: Context, cache: Cache, count: int) -> Draft:
        """Tokens by a pass of torch each; drawn at a temperature."""
        light, sampling, root = self.light, context.sampling, context.root
        tokens, probs, ends = list[Tensor](), list[Tensor](), self._ends_of(root)
        while len(tokens) < count and not (tokens and ends and int(root) in ends):
            logits = light.forward(root[:, None], None, cache).logits[:, 0]
            cache.advance([1] * len(root))
            if sampling.greedy:
                root = sampling.pick(logits, context.rng)
            else:
                probs.append(sampling.probs(logits))
                root = draw(probs[-1], context.rng)
            tokens.append(root)
        drawn = torch.stack(probs, dim=1) if probs else None
        return Draft.chain(torch.stack(tokens, dim=1), drawn, passes=len(tokens))


def _cut(path: Continuation, count: int) -> Continuation:
    return replace(path, tokens=path.tokens[:count], gains=(path.gains or [])[:count])


class Staged(SpeculativeDecoder):
    """A copy of the target in 4 bits drafts, with the help of lookups in the text.

    Args:
        gamma: most tokens of a chain.
        lookup: whether endings of the text are looked up.
        alone: without costs, tokens that must match for a lookup to draft without the copy.
        block: at a temperature, judge a chain as a block (Sun et al. 2024, arXiv 2403.10444), not token by token.
        costs: of passes, by which chains are sized; ``auto``: as measured; None: all of ``gamma`` tokens.

    Raises:
        ValueError: no 4-bit weights for this model or here (see ``CausalLM.rounded``), or an option out of range.
    """

    model_kind = "causal"
    paper = "Spector and Re 2023, arXiv 2308.04623; Zhao et al. 2024, arXiv 2410.11305"

    drafter: StagedDrafter

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        gamma: int = 16,
        lookup: bool = True,
        alone: int = 4,
        block: bool = False,
        costs: CostsOption = None,
    ) -> None:
        if min(gamma, alone) < 1:
            raise ValueError(
                f"staged needs gamma >= 1 and alone >= 1, got gamma={gamma}, alone={alone}. Set method.gamma=16 and "
                "method.alone=4 or so."
            )
        light = target.rounded(0, "screened" if sampling.greedy else "int8")
        search = SuffixDrafter(max(gamma, 24), _FACTOR, 1, _MIN_PROB) if lookup else None
        drafter = StagedDrafter(light, gamma, search, alone)
        super().__init__(target, sampling, drafter, default_rule(sampling, "chain", drawn=True, block=block))
        self._chain_costs, drafter.length.costs = costs, Costs.given(costs)

    @property
    def costs_wanted(self) -> int:
        return 1 + self.drafter.nodes if self._chain_costs == "auto" and self.drafter.length.costs is None else 0

    def use_costs(self, costs: Sequence[Sequence[int | float]]) -> None:
        self.drafter.length.costs = Costs.of(costs)

    def forget_costs(self) -> None:
        self.drafter.length.costs = Costs.given(self._chain_costs)

    def memory(self) -> dict[str, int | None]:
        """Memory of the copy."""
        return {"copy": self.drafter.light.int4_bytes + self.drafter.light.output_bytes}

    def stats(self) -> dict[str, Any]:
        """Shares of the rounds by what drafted, and of the copy's tokens that were kept."""
        drafter, total = self.drafter, max(sum(self.drafter.rounds.values()), 1)
        shares = {f"rounds_by_{name}": round(count / total, 4) for name, count in drafter.rounds.items()}
        return shares | {"kept_of_the_copy": round(drafter.kept / max(drafter.copied, 1), 4)}
