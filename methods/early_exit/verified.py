"""Exits that draft: the whole model judges the tokens that left early, so that its own text comes out.

A round drafts with the exits of a method until a token does not leave early, or ``most`` are drafted. One pass of the
whole model then reads the last committed token and the drafted ones, and a rule decides which of these stay; the token
after them is the model's own. That is self-speculation (Draft & Verify, Zhang et al. 2023, arXiv 2309.08168; LayerSkip,
Elhoushi et al. 2024, arXiv 2404.16710) with the exit decision as the end of a draft.

Drafting and verification share one cache. What a draft writes into it is overwritten by the pass that judges it, so no
state that was copied upwards, and no key of a cheaper layer, is left. A token that passes the last exit below the whole
model without leaving ends the draft there: its upper layers run in the pass that judges the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter_ns
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from methods.decoder import Guarantee, Step
from methods.drafting import ABSENT, AcceptanceRule, Draft, Verification
from methods.early_exit.loop import EarlyExitDecoder
from methods.engine.kv_cache import Cache
from methods.engine.sampling import Sampling, argmax, draw
from methods.engine.stopwatch import Stopwatch
from methods.rows import ComputedRows, of_rows

Judged = Literal["all", "verify"]


class Agreement:
    """Keep a drafted token while the target picks the same: exact for every draft."""

    guarantee: ClassVar[Guarantee] = Guarantee.EXACT

    def __call__(
        self, draft: Draft, logits: Float[Tensor, "B M V"], sampling: Sampling, rng: Generator
    ) -> Verification:
        wanted = sampling.pick(logits, rng)
        return leading(draft.tokens == wanted[:, :-1], wanted)

    def bonus(self, logits: Float[Tensor, "B V"], sampling: Sampling, rng: Generator) -> Int[Tensor, "B"]:
        return sampling.pick(logits, rng)


def leading(kept: Bool[Tensor, "B N"], wanted: Int[Tensor, "B M"]) -> Verification:
    """Keep the leading tokens that pass a test; ``wanted`` are the target's tokens in their places and after them."""
    accepted = kept.long().cumprod(1).sum(1)
    columns = torch.arange(kept.shape[1], device=kept.device)
    path = torch.where(columns < accepted[:, None], columns, ABSENT)
    return Verification(path, accepted, wanted.gather(1, accepted[:, None])[:, 0])


@dataclass(frozen=True, slots=True)
class Verify:
    """How drafts are made and judged.

    Attributes:
        rule: decides which drafted tokens stay.
        most: tokens of a draft.
        drawn: at a temperature, they are drawn from the distribution of their exit; else they are its likeliest.
    """

    rule: AcceptanceRule
    most: int
    drawn: bool


def verification(
    accept: Judged, rule: AcceptanceRule | None, max_pending: int, sampling: Sampling, calibrated: bool = False
) -> Verify | None:
    """What the options of a method ask for; None: what leaves early is committed as it is.

    Args:
        rule: None: a drafted token stays while the whole model picks it too.
        max_pending: tokens of a draft.
        calibrated: a threshold is to be chosen by the losses of texts.

    Raises:
        ValueError: an option out of range, or without use.
    """
    if max_pending < 1:
        raise ValueError(f"max_pending must be at least 1, got {max_pending}. Set method.max_pending.")
    if accept == "all":
        if rule is not None:
            raise ValueError(
                "method.rule must be null with accept=all, got a rule; only accept=verify uses one. Set "
                "method.accept=verify, or method.rule=null."
            )
        return None
    if calibrated:
        raise ValueError(
            "method.calibration.tolerance needs a method that may lose something, got accept=verify, which loses "
            "nothing. Set method.calibration.tolerance=null, or method.accept=all."
        )
    return Verify(rule or Agreement(), max_pending, rule is not None and not sampling.greedy)


@torch.inference_mode()
def verified_rounds(
    decoder: EarlyExitDecoder, verify: Verify, prompts: list[Int[Tensor, "_"]], limit: int, rng: Generator
) -> Iterator[Step]:
    """Decode by drafts of the decoder's exits that its whole model judges; see ``Decoder.decode``."""
    target = decoder.target
    cache = target.new_cache(len(prompts), max(len(prompt) for prompt in prompts) + limit + verify.most + 1)
    decoder.policy.reset(limit)
    root = decoder.sampling.pick(decoder.read_prompts(prompts, cache), rng)
    batch, watch, done = ComputedRows(len(prompts)), Stopwatch(target.device), [1] * len(prompts)
    first = [[token] for token in root.tolist()]
    batch.take((yield Step.undrafted(first, rows=len(first), kept=decoder.kept)))
    while any(rows := batch.below(limit, done)):
        began = perf_counter_ns()
        if (stay := batch.leave(target)) is not None:
            cache.select(stay)
            root, done, rows = root[stay], of_rows(done, stay), of_rows(rows, stay)
        room = limit - min(count for count, is_open in zip(done, rows, strict=True) if is_open)
        watch.start()
        draft = _Exited.draft(decoder, root, cache, rows, min(verify.most, room - 1), rng, verify.drawn)
        watch.stop()
        nodes = torch.stack([root, *draft.tokens], dim=1)
        logits = target.forward(nodes, None, cache).logits
        found = verify.rule(draft.chain(root), logits, decoder.sampling, rng)
        report = torch.stack([found.accepted, found.bonus, *draft.tokens], dim=1).tolist()
        tokens = [[*row[2 : 2 + row[0]], row[1]] if is_open else [] for row, is_open in zip(report, rows, strict=True)]
        root = torch.where(torch.tensor(rows, device=root.device), found.bonus, root)
        cache.advance([len(new) for new in tokens])
        done = [count + len(new) for count, new in zip(done, tokens, strict=True)]
        decoder.policy.judged(draft.passes, max(map(len, tokens)))
        draft.count(decoder, tokens)
        decoder.counters.spent_ns += perf_counter_ns() - began
        batch.take((yield batch.step(draft.step(tokens, watch.ns()))))


class _Exited:
    """A draft: by position the tokens of all rows, the distributions they were drawn from, and the layers of the pass.

    Attributes:
        passes: begun, with one in which a row did not leave early.
    """

    def __init__(self) -> None:
        self.tokens: list[Int[Tensor, "B"]] = []
        self._probs: list[Float[Tensor, "B V"]] = []
        self._depths: list[int] = []
        self.passes = 0

    @classmethod
    def draft(
        cls,
        decoder: EarlyExitDecoder,
        root: Int[Tensor, "B"],
        cache: Cache,
        rows: list[bool],
        most: int,
        rng: Generator,
        drawn: bool,
    ) -> _Exited:
        """Up to ``most`` tokens; ends before one with which some open row does not leave early."""
        found, lengths = cls(), cache.lengths
        if most > 0 and not drawn and (made := decoder.draft_chain(root, cache, rows, most)) is not None:
            chain, depth = made
            found.tokens, found._depths, found.passes = list(chain), [depth] * len(chain), len(chain)
            return found
        while len(found.tokens) < most:
            found.passes += 1
            logits, depth = decoder.draft(root, cache, rows)
            if logits is None:
                break
            if drawn:
                found._probs.append(decoder.sampling.probs(logits))
                root = draw(found._probs[-1], rng)
            else:
                root = argmax(logits)
            found.tokens.append(root)
            found._depths.append(depth)
            cache.advance([1] * len(root))
        cache.set_lengths(lengths)
        return found

    def chain(self, root: Int[Tensor, "B"]) -> Draft:
        """For a rule."""
        tokens = torch.stack(self.tokens, dim=1) if self.tokens else root.new_empty(len(root), 0)
        return Draft.chain(tokens, torch.stack(self._probs, dim=1) if self._probs else None, passes=self.passes)

    def count(self, decoder: EarlyExitDecoder, tokens: list[list[int]]) -> None:
        """Add the round to the counters; a kept token counts at the depth that its pass ran to, whatever its row."""
        counters, target = decoder.counters, decoder.target
        counters.steps += 1
        counters.rows += len(tokens)
        counters.layers += target.n_layers
        counters.columns += target.vocab_size * (1 + len(self.tokens))
        for new in tokens:
            counters.exits.update(self._depths[: len(new) - 1] if new else ())
        counters.exits[target.n_layers] += sum(1 for new in tokens if new)

    def step(self, tokens: list[list[int]], draft_ns: int) -> Step:
        """The round that kept these tokens, the one after the draft included."""
        length = [len(self.tokens) * bool(new) for new in tokens]
        return Step(
            tokens,
            drafted=length,
            accepted=[max(len(new) - 1, 0) for new in tokens],
            layers=[1.0] * len(tokens),
            depth=length,
            nodes=1 + len(self.tokens),
            rows=len(tokens),
            draft_passes=self.passes,
            draft_ns=draft_ns if self.passes else 0,
        )
