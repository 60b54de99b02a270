"""Staged speculative decoding: a copy of the target in 4 bits drafts in the target's cache, and lookups draft for it.

Three models of rising cost judge each other (Spector & Re 2023, arXiv 2308.04623): what followed the same words before
in the text is guessed, the copy keeps what it would have written and adds a token, and after ``gamma`` tokens or so the
target judges the chain in one pass. The copy has the target's layers with weights rounded to 4 bits, as in QSpec (Zhao
et al. 2024, arXiv 2410.11305), where both share one cache too: the copy needs no prefill and no cache of its own, and
the pass that judges a draft overwrites what drafting wrote. Its output matrix has 4 bits, too, and the target's gives
the logits that are largest by it, 8 when greedy and 64 at a temperature. Nothing is trained.

A pass of the copy judges as many guesses as pay by its own costs, which are timed when the target's are; all passes of
a draft are one call of the kernels (``methods.engine.guesses``). Where a lookup alone promises more tokens per time
than a chain, as after a long match, the target judges it at once. ``lookup=false`` is the copy alone. At a temperature
the copy's tokens are drawn, which decides which guesses are kept, and the chain is judged by rejection, token by token
or as a block. Its length depends on guesses and on tokens before its last one, never on what the target makes of it.

How many tokens a chain has follows from how many were kept lately, from the time a token of the copy takes, and
from what passes cost (``costs``): n tokens have the most tokens per time, (1 + k + k^2 + .. + k^n) / (n c + v(1 + n)),
for a share k that is kept. Accounts bound what chains and lookups can lose (``budget.py``).

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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from methods.drafting import Context, Continuation, Draft
from methods.engine.causal_lm import CausalLM
from methods.engine.fused_layers import Drawing
from methods.engine.guesses import GuessedRounds, Guesses, NgramTable
from methods.engine.kv_cache import Cache
from methods.engine.sampling import Sampling, draw
from methods.rows import of_rows
from methods.speculative.budget import Account, Costs, CostsOption, Ratio, size
from methods.speculative.guess_costs import measured_costs
from methods.speculative.loop import SpeculativeDecoder
from methods.speculative.suffix_decoding import SuffixDrafter
from methods.speculative.verification import default_rule

_FIRST_SHARE = 0.95  # of the copy's tokens that are kept, a guess
_GUESSED = 4.0  # drafted tokens that it counts for
_SCREENED, _SCREENED_DRAWN = 8, 64  # logits that the target's output matrix gives the copy: greedy, at a temperature
_MEMORY = 0.97  # weight of the past per round
_RESERVE = 12.0  # of the account: a chain that fails costs several passes
_CARRIED = 4.0  # most of it that the next text begins with
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
        self._kept, self._judged = _FIRST_SHARE * _GUESSED, _GUESSED
        self.account = Account(_RESERVE)
        self.reset()

    def reset(self) -> None:
        """Start new texts: some of what the last ones gained may be lost in them."""
        self.account = Account(_RESERVE, min(max(self.account.balance, 0.0), _CARRIED))
        self._kept, self._judged = self.share * _GUESSED, _GUESSED
        self._passes, self._tokens, self._spent = 1.0, 1.0, 0.0

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
        """Whether the next round goes without a chain; to be asked once a round."""
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

    def note_drafted(self, tokens: int, passes: int | float) -> None:
        """A chain of so many tokens took as long as so many passes of the copy over one node."""
        self._passes = _MEMORY * self._passes + passes
        self._tokens = _MEMORY * self._tokens + tokens
        self._spent = passes

    def note_kept(self, drafted: int, kept: float, rejected: float) -> None:
        """The last chain was judged: of the mean row so many tokens were kept, and one or none was rejected."""
        self._kept = _MEMORY * self._kept + kept
        self._judged = _MEMORY * self._judged + kept + rejected
        if self.costs is not None:
            took = self._spent * self.costs.draft / self.most
            self.account.book(kept - (took + self.costs.time(1 + drafted) - 1.0))


class _Made(NamedTuple):
    """The last draft: what made it, its tokens, passes of the copy, and how many tokens were expected to be kept."""

    source: str = "none"
    tokens: int = 0
    passes: int = 0
    expected: float = 0.0


class StagedDrafter:
    """Drafts a chain by a copy that shares the target's cache.

    Args:
        light: the copy.
        gamma: most tokens of a chain.
        lookup: in the text, for the copy and for the target; None: none.
        alone: without costs, tokens that must match for a lookup to draft without the copy.
        guesses: for the copy; None: it writes token by token.

    Attributes:
        length: of the chains.
        rounds: by what drafted.
        copied, kept: tokens that the copy drafted in all texts, and those that the mean row kept.
        passes: of the copy that drafted them.
        judged: most nodes of a draft.
    """

    hidden_layers: Sequence[int] = ()

    def __init__(
        self, light: CausalLM, gamma: int, lookup: SuffixDrafter | None, alone: int, guesses: Guesses | None
    ) -> None:
        self.light, self.length, self.guesses = light, ChainLength(gamma), guesses
        self._lookup, self._alone = lookup, alone
        self.judged = gamma if lookup is None else max(gamma, lookup.nodes)
        self.nodes = self.judged if guesses is None else max(self.judged, gamma + guesses.nodes)
        self.rounds = {"copy": 0, "lookup": 0, "none": 0}
        self.copied, self.kept, self.passes = 0, 0.0, 0
        self._ratio, self._lookups = Ratio(), Account()  # of what was found in the text
        self._ends: list[int] = []
        self._probs: Tensor | None = None  # of the last tokens drawn
        self._lengths: list[int] = []  # of the texts when the last draft was made
        self._last = _Made()

    def reset(self, prompts: list[list[int]], limit: int) -> None:
        self.length.reset()
        self._ratio, self._lookups = Ratio(), Account()
        if self.guesses is not None:
            self.guesses.reset()
        self._ends, self._lengths, self._last = [len(prompt) + limit for prompt in prompts], [], _Made()
        if self._lookup is not None:
            self._lookup.reset(prompts, limit)

    def measure(self) -> None:
        """Time passes of the copy, by which it is chosen how many guesses they judge."""
        if self.guesses is not None:
            self.guesses.costs = measured_costs(self.light, self.guesses.nodes)

    def keep_rows(self, rows: Sequence[int]) -> None:
        self._ends, self._lengths = of_rows(self._ends, rows), of_rows(self._lengths, rows) if self._lengths else []
        if self._lookup is not None:
            self._lookup.keep_rows(rows)

    def propose(self, context: Context) -> Draft:
        texts = context.tokens
        self._learn(texts)
        room = max(end - len(text) for end, text in zip(self._ends, texts, strict=True)) - 1
        chain, rate = (0, 1.0) if self.length.pauses() else self.length.choose(room)
        looks = context.sampling.greedy and not (self.length.costs is not None and self._lookups.pause())
        found = self._found(texts, rate) if looks else None
        if found is not None:
            draft = Draft.chains([path.tokens for path in found], context.root.device)
            expected = sum(sum(path.gains or []) for path in found) / len(found)
            self._last = _Made("lookup", draft.tokens.shape[1], expected=expected)
        elif chain:
            draft = self._drafted(context, chain, min(self.length.most, room))
            self._last = _Made("copy", draft.tokens.shape[1], draft.passes)
        else:
            draft = Draft.chain(context.root.new_empty(len(texts), 0))
            self._last = _Made()
        self._lengths = [len(text) for text in texts]
        self.rounds[self._last.source] += 1
        return draft

    def _learn(self, texts: Sequence[list[int]]) -> None:
        """What was kept of the last draft; rows that have ended do not count."""
        made, drafted = self._last, self._last.tokens
        grown = [len(text) - before - 1 for text, before in zip(texts, self._lengths, strict=False)]
        counted = [count for count in grown if count >= 0]
        if not drafted or not counted:
            return
        kept = sum(counted) / len(counted)
        if made.source == "copy":
            rejected = sum(count < drafted for count in counted) / len(counted)
            self.length.note_kept(drafted, kept, rejected)
            self.copied, self.kept, self.passes = self.copied + drafted, self.kept + kept, self.passes + made.passes
        else:
            self._ratio.note(kept, made.expected)
            if (costs := self.length.costs) is not None:
                self._lookups.book(kept - (costs.time(1 + drafted) - 1.0))

    def _found(self, texts: Sequence[list[int]], rate: float) -> list[Continuation] | None:
        """Paths that go to the target without the copy: those of which more is expected per time than of a chain.

        Without costs, those after ``alone`` tokens that match in every row.
        """
        if self._lookup is None:
            return None
        found, costs = [self._lookup.find(row, text) for row, text in enumerate(texts)], self.length.costs
        if costs is None:
            return None if any(path.match < self._alone for path in found) else found
        allowed, ratio = max(self._lookups.left, costs.time(2) - 1.0), self._ratio.value
        counts = [size([ratio * gain for gain in path.gains or []], costs, most=allowed) for path in found]
        cut = [_cut(path, count) for path, count in zip(found, counts, strict=True)]
        expected = ratio * sum(sum(path.gains or []) for path in cut) / len(cut)
        return cut if (1.0 + expected) / costs.time(1 + max(counts)) > rate else None

    def _drafted(self, context: Context, count: int, most: int) -> Draft:
        """``count`` tokens of the copy, or up to ``most`` where the last pass yields more."""
        cache = context.cache
        assert cache is not None, "the loop makes the cache before it asks for a draft"
        lengths, sampling = cache.lengths, context.sampling
        if self.light.rounds_fused and (sampling.greedy or sampling.keeps_all):
            draft = self._in_one_call(context, cache, count, most)
        else:
            draft = self._one_by_one(context, cache, count)
            self.length.note_drafted(draft.tokens.shape[1], draft.passes)
        cache.set_lengths(lengths)  # what was drafted is not committed
        return draft

    def _ends_of(self, rows: Sequence[int] | Tensor) -> Sequence[int]:
        """Tokens with which a draft ends: those that end a text that drafts alone."""
        return tuple(self.light.eos_ids) if len(rows) == 1 else ()

    def _in_one_call(self, context: Context, cache: Cache, count: int, most: int) -> Draft:
        """By the kernels: the copy judges guesses where a row is alone; at a temperature its tokens are drawn."""
        light, roots, sampling = self.light, context.root.tolist(), context.sampling
        guessed = None
        if self.guesses is not None and len(roots) == 1:
            guessed = GuessedRounds(self.guesses, context.tokens[0], count)
        most, drawing = count if guessed is None else most, None
        if not sampling.greedy:
            luck = torch.rand(most, len(roots), dtype=torch.float64, generator=context.rng)
            if self._probs is None or self._probs.shape[:2] != (self.length.most, len(roots)):
                self._probs = torch.empty(self.length.most, len(roots), light.vocab_size)
            drawing = Drawing(sampling.temperature, luck, self._probs)
        moves, ends = [True] * len(roots), self._ends_of(roots)
        ran = light.rounds(roots, cache, most, moves, ends, drawing=drawing, guessed=guessed)
        passes = len(ran.times)
        self.length.note_drafted(len(ran.tokens), passes if guessed is None else ran.spent)
        if drawing is None:
            chains = [list(row) for row in zip(*ran.tokens, strict=True)]
            return replace(Draft.chains(chains, context.root.device), passes=passes)
        probs = drawing.probs[: len(ran.tokens)].transpose(0, 1)
        return Draft.chain(torch.tensor(ran.tokens).T.contiguous(), probs, passes=passes)

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
        guesses: most nodes beside the root that a pass of the copy judges.
        table: what guesses are made from beside the text.

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
        guesses: int = 8,
        table: NgramTable | None = None,
    ) -> None:
        if min(gamma, alone) < 1:
            raise ValueError(
                f"staged needs gamma >= 1 and alone >= 1, got gamma={gamma}, alone={alone}. Set method.gamma=16 and "
                "method.alone=4 or so."
            )
        if guesses < 0:
            raise ValueError(f"guesses must be at least 0, got {guesses}. Set method.guesses=8 or so.")
        light = target.rounded(0, _SCREENED if sampling.greedy else _SCREENED_DRAWN)
        search = SuffixDrafter(max(gamma, 24), _FACTOR, 1, _MIN_PROB) if lookup else None
        guessing = Guesses(guesses, table) if lookup and guesses and light.rounds_fused else None
        drafter = StagedDrafter(light, gamma, search, alone, guessing)
        super().__init__(target, sampling, drafter, default_rule(sampling, "chain", drawn=True, block=block))
        self._chain_costs, drafter.length.costs = costs, Costs.given(costs)
        if drafter.length.costs is not None:
            drafter.measure()

    @property
    def costs_wanted(self) -> int:
        return 1 + self.drafter.judged if self._chain_costs == "auto" and self.drafter.length.costs is None else 0

    def use_costs(self, costs: Sequence[Sequence[int | float]]) -> None:
        self.drafter.length.costs = Costs.of(costs)
        self.drafter.measure()  # the copy's own, as of this moment

    def forget_costs(self) -> None:
        self.drafter.length.costs = Costs.given(self._chain_costs)
        if self.drafter.guesses is not None and self.drafter.length.costs is None:
            self.drafter.guesses.costs = None

    def memory(self) -> dict[str, int | None]:
        """Memory of the copy."""
        return {"copy": self.drafter.light.int4_bytes + self.drafter.light.output_bytes}

    def stats(self) -> dict[str, Any]:
        """Shares of the rounds by what drafted, and of the copy's tokens that were kept; tokens of its passes."""
        drafter, total = self.drafter, max(sum(self.drafter.rounds.values()), 1)
        shares = {f"rounds_by_{name}": round(count / total, 4) for name, count in drafter.rounds.items()}
        shares["kept_of_the_copy"] = round(drafter.kept / max(drafter.copied, 1), 4)
        return shares | {"tokens_per_pass_of_the_copy": round(drafter.copied / max(drafter.passes, 1), 2)}
