"""One exit, and deep layers that catch up: the loop of ``free``.

A token whose shallow exit (after k layers) is confident defers the deep layers: its state after layer k waits. When a
token is not confident, or too many wait, the deep layers run over all waiting states in one pass (synchronised parallel
decoding, FREE, Bae et al. 2023, arXiv 2310.05424, sec. 4.2). Shallow and deep caches hold what the whole model would
have written for the same text.

That pass also gives what the whole model would have chosen in place of each shallow token, so the loop can

    all        keep the shallow tokens; they are committed at once
    rollback   keep the leading ones that the deep layers find likely enough, -log p(token) <= ``distance``
    verify     keep the leading ones that an exact rule keeps: lossless self-speculation

With the latter two, tokens are committed after they were judged. A round is one deep pass with all shallow passes
before it. Layers of a step are those of its pass, k / L or all; shallow passes whose tokens are judged later are
``draft_passes``. So layers run are the sum over steps of target_passes * layers * L + draft_passes * k.

Where a CPU's kernels run several greedy rounds in one call (``CausalLM.rounds``) and tokens are kept as they are, deep
passes are part of it.

Rows of a batch run in lockstep: the first one that is not confident sends all of them into the deep layers. For the
others this changes only when their waiting states catch up.
"""

from __future__ import annotations

import copy
from collections.abc import Generator as Steps
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from methods.decoder import Guarantee, RowChanges, Step
from methods.drafting import AcceptanceRule, Draft, Verification
from methods.early_exit.confidence import Opinion, Softmax, Vocabulary
from methods.early_exit.exits import Reader
from methods.early_exit.loop import DecodeStats, ExitDecoder
from methods.early_exit.threshold import FULL_MODEL
from methods.early_exit.verified import leading
from methods.engine.causal_lm import ROUNDS_TOGETHER, CausalLM
from methods.engine.fused_layers import ExitRule, Ran, Waiting
from methods.engine.kv_cache import Cache
from methods.engine.sampling import Sampling, argmax, draw, in_float
from methods.engine.stopwatch import Stopwatch
from methods.rows import ComputedRows, of_rows, one_each, steps_of

Accept = Literal["all", "rollback", "verify"]


@runtime_checkable
class AdaptiveThreshold(Protocol):
    """A threshold that learns where the exit and the whole model choose the same token."""

    def update(self, confidence: float, agreed: bool) -> None:
        """Take in one token."""
        ...

    def threshold(self) -> float:
        """The confidence above which a token counts as sure; 1: none does."""
        ...


@dataclass(frozen=True, slots=True)
class FixedThreshold:
    """A threshold that does not learn."""

    value: float

    def update(self, confidence: float, agreed: bool) -> None:
        """Does nothing."""

    def threshold(self) -> float:
        return self.value


@dataclass(frozen=True, slots=True)
class Rollback:
    """Keep a token while the deep layers find it likely: -log p(token) <= distance (BiLD, Kim et al. 2023)."""

    distance: float

    def fits(
        self, tokens: Int[Tensor, "B W"], logits: Float[Tensor, "B W V"], sampling: Sampling
    ) -> Bool[Tensor, "B W"]:
        """Which tokens meet the bound; p is at the sampling temperature (at 1 when greedy)."""
        exact = in_float(logits)
        log_probs = (exact / (sampling.temperature or 1.0)).log_softmax(-1)
        return -log_probs.gather(2, tokens[:, :, None])[:, :, 0] <= self.distance


@dataclass(slots=True)
class Shallow:
    """What one shallow pass found.

    Attributes:
        root: [B] tokens it read.
        state: [B, 1, D] after layer k.
        token: [B] the exit's tokens; None where no exit is taken at all.
        best: [B] its likeliest tokens.
        probs: [B, V] what ``token`` was drawn from; None: it was not drawn, or no row is sure of it.
        confidence: per row; empty where no exit is taken at all.
        deep: [B, 1, D] after all layers, if the pass went on through them because no row was sure.
    """

    root: Int[Tensor, "B"]
    state: Float[Tensor, "B 1 D"]
    token: Int[Tensor, "B"] | None = None
    best: Int[Tensor, "B"] | None = None
    probs: Float[Tensor, "B V"] | None = None
    confidence: list[float] | None = None
    deep: Float[Tensor, "B 1 D"] | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of the loop, see ``methods.early_exit.free.Free``."""

    depth: int
    accept: Accept
    threshold: AdaptiveThreshold
    rule: AcceptanceRule
    distance: float = 2.0
    max_pending: int = 16
    vocabulary: Vocabulary = None
    remember: bool = False


class ShallowDeepDecoder(ExitDecoder):
    """A target with one shallow exit.

    Attributes:
        guarantee: EXACT where every token is judged by an exact rule, or none exits.
    """

    def __init__(
        self, target: CausalLM, sampling: Sampling, reader: Reader, options: Options, drawn: bool = True
    ) -> None:
        self.target, self.sampling, self.reader = target, sampling, reader
        self._draws = drawn and not sampling.greedy
        self.restart(options)

    def restart(self, options: Options) -> None:
        """Decode by these options from now on, and reset the counters."""
        self.options, self.counters = options, DecodeStats()
        self._learns = not isinstance(options.threshold, FixedThreshold)
        self._never = not self._learns and options.threshold.threshold() >= FULL_MODEL
        screens = not (self._never or self._learns)  # what learns sees the whole distribution
        self._softmax = Softmax(self.target, options.vocabulary if screens else None)
        exact = self._never or (options.accept == "verify" and options.rule.guarantee is Guarantee.EXACT)
        self.guarantee = Guarantee.EXACT if exact else Guarantee.RELAXED

    def stats(self) -> dict[str, Any]:
        """Cost of the steps so far, and from which exits tokens came."""
        found = super().stats()
        if self.options.accept != "all":
            found.pop("cost_over_layers", None)  # what was drafted is recorded by its own time
        return found

    def memory(self) -> dict[str, int | None]:
        """Memory beside the target's."""
        return {"exits": self.reader.nbytes + self._softmax.nbytes}

    @torch.inference_mode()
    def decode(self, prompts: list[Int[Tensor, "_"]], limit: int, rng: Generator) -> Iterator[Step]:
        longest = max(len(prompt) for prompt in prompts)
        cache = self.target.new_cache(len(prompts), longest + limit + self.options.max_pending + 1)
        rows = [prompt.to(self.target.device) for prompt in prompts]
        root = self.sampling.pick(self.target.prefill(rows, cache).logits[:, 0], rng)
        text = _Text(limit, [1] * len(rows), self._thresholds(len(rows)), Stopwatch(self.target.device))
        text.rows.take((yield Step.undrafted([[token] for token in root.tolist()], rows=len(rows))))
        while text.unfinished:
            if self._runs_together:
                yield from self._rounds_together(root.tolist(), text, cache)
                return
            if (stay := text.leave(self.target)) is not None:
                cache.select(stay)
                root = root[stay]
            root = yield from self._round(root, text, cache, rng)

    @property
    def _runs_together(self) -> bool:
        """Whether the kernels run several tokens in one call, their deep passes included."""
        plain = self.options.accept == "all" and self.sampling.greedy and not (self._learns or self._never)
        return plain and self.target.runs_rounds and self._fused()

    def _rounds_together(self, roots: list[int], text: _Text, cache: Cache) -> Steps[Step, RowChanges | None, None]:
        """All tokens after the first ones, ``roots``, to the end of the texts."""
        target, options, began = self.target, self.options, perf_counter_ns()
        sizes = target.hidden_size, target.dtype
        waiting = Waiting(options.depth, options.max_pending, len(roots), *sizes)
        while text.unfinished:
            if not waiting.count and (stay := text.leave(target)) is not None:
                cache.select(stay)
                roots = of_rows(roots, stay)
                waiting = Waiting(options.depth, options.max_pending, len(roots), *sizes)
            rows, most = text.open, min(ROUNDS_TOGETHER, text.room)
            rule = self._rule(text.least * most)
            ran = target.rounds(roots, cache, most, rows, target.eos_ids, rule=rule, waiting=waiting)
            cache.advance([len(ran.tokens) * is_open for is_open in rows])
            roots = ran.tokens[-1]
            self._count_rounds(ran, rows)
            text.commit([[0] * len(ran.tokens) * is_open for is_open in rows])
            self.counters.spent_ns += perf_counter_ns() - began
            shares = [1.0 if nodes else options.depth / target.n_layers for nodes in ran.nodes]
            for step in steps_of(ran, rows, shares, [nodes or 1 for nodes in ran.nodes]):
                text.rows.take((yield text.rows.step(step)))
            began = perf_counter_ns()

    def _count_rounds(self, ran: Ran, rows: Sequence[bool]) -> None:
        """Add the rounds of a call to the counters."""
        depth, whole, rounds = self.options.depth, self.target.n_layers, len(ran.tokens)
        deep = sum(nodes > 0 for nodes in ran.nodes)
        shallow = sum(left > 0 for depths in ran.depths for left in depths)
        self.counters.steps += rounds
        self.counters.rows += rounds * len(rows)
        self.counters.looks += rounds
        self.counters.layers += rounds * depth + deep * (whole - depth)
        self.counters.maps += rounds * self.reader.maps(depth)
        self.counters.columns += ran.columns + deep * self.target.vocab_size
        self.counters.deciding_ns += ran.deciding_ns
        self.counters.exits[depth] += shallow
        self.counters.exits[whole] += rounds * sum(rows) - shallow

    def _thresholds(self, rows: int) -> list[AdaptiveThreshold]:
        """One per row, independent of the others; a remembered one is common to all."""
        shared = self.options.threshold
        return [shared if self.options.remember else copy.deepcopy(shared) for _ in range(rows)]

    def _round(
        self, root: Int[Tensor, "B"], text: _Text, cache: Cache, rng: Generator
    ) -> Steps[Step, RowChanges | None, Tensor]:
        """Shallow passes until a row is not sure, then the deep layers over all of them; returns the next root."""
        options, base = self.options, cache.lengths
        before, began = text.done, perf_counter_ns()
        passes: list[Shallow] = []
        text.watch.start()
        while True:
            passes.append(self._shallow(root, text, cache, rng, alone=not passes and len(text.done) == 1))
            sure = text.sure(passes[-1].confidence)
            judged = options.accept != "all"
            room = min(options.max_pending, text.room - 1) if judged else options.max_pending
            if not all(sure) or len(passes) > room:
                break
            token = passes[-1].token
            assert token is not None
            if judged:
                text.watch.stop()
            else:
                step = text.rows.step(self._commit_shallow(one_each(token.tolist(), text.open), text))
                self.counters.spent_ns += perf_counter_ns() - began
                text.rows.take((yield step))
                began = perf_counter_ns()
                if not text.unfinished:
                    return root
            root = token
        cache.set_lengths(base)
        step, root = self._deep(passes, sure, text, cache, rng)
        cache.set_lengths([start + now - was for start, now, was in zip(base, text.done, before, strict=True)])
        self.counters.spent_ns += perf_counter_ns() - began
        text.rows.take((yield text.rows.step(step)))
        return root

    def _shallow(
        self, root: Int[Tensor, "B"], text: _Text, cache: Cache, rng: Generator, alone: bool = False
    ) -> Shallow:
        """One shallow pass.

        Args:
            alone: no token of the only row waits, so the pass may go on through the deep layers.
        """
        state, depth = self.target.begin(root[:, None], None, cache), self.options.depth
        self.counters.layers += depth
        if self._never:
            self.target.run(state, range(depth))
            cache.advance([1] * len(root))
            return Shallow(root, state.hidden)
        self.counters.maps += self.reader.maps(depth)
        deep = None
        if self._fused():
            hidden, opinion, deep = self._by_kernels(state, text, alone)
        else:
            hidden, opinion = self._by_parts(state, text)
        cache.advance([1] * len(root))
        self.counters.columns += opinion.columns
        assert opinion.confidence is not None
        found = Shallow(root, hidden, confidence=opinion.confidence.tolist(), deep=deep)
        if opinion.logits is None:  # no row is sure, and none takes a token from here
            found.best = found.token = torch.zeros_like(root)
            return found
        found.best = found.token = argmax(opinion.logits)
        if self._draws:
            found.probs = self.sampling.probs(opinion.logits)
            found.token = draw(found.probs, rng)
        return found

    def _fused(self) -> bool:
        """Whether the kernels judge the exit in the pass that makes its state."""
        kernels = self.target.exits_fused and self.reader.kernel_maps() is not None
        return kernels and self._softmax.rule((self.options.depth,)) is not None

    def _rule(self, thresholds: Sequence[float]) -> ExitRule:
        rule, maps = self._softmax.rule((self.options.depth,)), self.reader.kernel_maps()
        assert rule is not None and maps is not None
        return replace(rule, maps=maps, thresholds=thresholds, propagates=False)

    def _by_kernels(
        self, state: Any, text: _Text, alone: bool
    ) -> tuple[Float[Tensor, "B 1 D"], Opinion, Float[Tensor, "B 1 D"] | None]:
        """State and opinion at the exit; and the state after all layers, if the pass went on."""
        depth, rows = self.options.depth, len(text.done)
        # What learns wants to know what every exit would say, so the pass ends there.
        least, through = ([-1.0] * rows, False) if self._learns else (text.least, alone)
        deepest = self.target.n_layers if through else depth
        found = self.target.run_to_exits(state, deepest, self._rule(least), [True] * rows)
        self.counters.looks += 1
        self.counters.deciding_ns += found.deciding_ns
        deep = found.hidden if through and not found.depths[0] else None
        if not any(found.scored):
            return found.hidden, Opinion(torch.tensor(found.confidence), columns=found.columns), deep
        found.logits[[row for row, is_scored in enumerate(found.scored) if not is_scored]] = 0.0
        return found.hidden, Opinion(torch.tensor(found.confidence), found.logits, found.columns), deep

    def _by_parts(self, state: Any, text: _Text) -> tuple[Float[Tensor, "B 1 D"], Opinion]:
        self.target.run(state, range(self.options.depth))
        hidden, began = state.hidden[:, 0], perf_counter_ns()
        opinion = self._softmax(hidden, self.reader.read(self.options.depth, hidden), text.tempted)
        self.counters.looks += 1
        self.counters.deciding_ns += perf_counter_ns() - began
        return state.hidden, opinion

    def _commit_shallow(self, tokens: list[list[int]], text: _Text) -> Step:
        rows = text.open
        text.commit(tokens)
        self.counters.steps += 1
        self.counters.rows += len(rows)
        self.counters.exits[self.options.depth] += sum(rows)
        return Step.undrafted(tokens, self.options.depth / self.target.n_layers, rows=len(rows))

    def _deep(
        self, passes: list[Shallow], sure: list[bool], text: _Text, cache: Cache, rng: Generator
    ) -> tuple[Step, Int[Tensor, "B"]]:
        target, depth = self.target, self.options.depth
        if (hidden := passes[0].deep) is None:
            state = target.begin(torch.stack([p.root for p in passes], dim=1), None, cache)
            state.hidden = torch.cat([p.state for p in passes], dim=1)
            target.run(state, range(depth, target.n_layers))
            hidden = state.hidden
        self.counters.layers += target.n_layers - depth
        judged = self.options.accept != "all"
        asked = hidden if judged or self._learns else hidden[:, -1:]
        logits = target.head(target.norm(asked))
        self.counters.columns += target.vocab_size * asked.shape[1]
        verification = self._judge(passes, sure, logits, rng)
        rows = text.open
        kept, accepted = _read(passes, verification, rows)
        if self._learns:
            self._learn(passes, logits, [a + 1 if judged else len(passes) for a in accepted], text)
        text.commit(kept)
        self._count(kept, accepted, sure, judged)
        drafted = len(passes) - 1 if judged else 0
        nodes = [drafted * is_open for is_open in rows]
        step = Step(
            kept,
            drafted=nodes,
            accepted=accepted,
            layers=[1.0] * len(rows),
            depth=nodes,
            nodes=len(passes),
            rows=len(rows),
            draft_passes=drafted,
            draft_ns=(text.watch.ns() if drafted else 0) if judged else None,
        )
        return step, verification.bonus

    def _judge(
        self, passes: list[Shallow], sure: Sequence[bool], logits: Float[Tensor, "B W V"], rng: Generator
    ) -> Verification:
        """Which waiting tokens stay, and the token after them: for a row that was sure, possibly its shallow one."""
        options, last = self.options, passes[-1].token
        if last is None or options.accept == "verify":
            return options.rule(_draft(passes), logits, self.sampling, rng)
        certain = torch.tensor(sure, device=last.device)
        if options.accept == "all":
            bonus = torch.where(certain, last, self.sampling.pick(logits[:, -1], rng))
            empty = last.new_empty(len(last), 0)
            return Verification(empty, torch.zeros_like(last), bonus)
        tokens = torch.stack([p.token for p in passes if p.token is not None], dim=1)
        fits = Rollback(options.distance).fits(tokens, logits, self.sampling)
        own = self.sampling.pick(logits, rng)
        own[:, -1] = torch.where(certain & fits[:, -1], last, own[:, -1])
        return leading(fits[:, :-1], own)

    def _learn(self, passes: list[Shallow], logits: Float[Tensor, "B W V"], seen: list[int], text: _Text) -> None:
        """Report to the threshold, for each token on the path, whether the whole model would choose it too."""
        shallow = torch.stack([p.best for p in passes if p.best is not None], dim=1)
        agreed = (shallow == argmax(logits)).tolist()
        for row, is_open in enumerate(text.open):
            for place, found in enumerate(passes[: seen[row]] if is_open else []):
                assert found.confidence is not None
                text.thresholds[row].update(found.confidence[row], agreed[row][place])
        text.refresh()

    def _count(self, kept: list[list[int]], accepted: list[int], sure: list[bool], judged: bool) -> None:
        self.counters.steps += 1
        self.counters.rows += len(kept)
        rows = [row for row, new in enumerate(kept) if new]
        shallow = sum(accepted[row] for row in rows) if judged else sum(sure[row] for row in rows) * (not self._never)
        self.counters.exits[self.options.depth] += shallow
        self.counters.exits[self.target.n_layers] += sum(len(kept[row]) for row in rows) - shallow


class _Text:
    def __init__(self, limit: int, done: list[int], thresholds: list[AdaptiveThreshold], watch: Stopwatch) -> None:
        self.limit, self.done, self.thresholds, self.watch = limit, done, thresholds, watch
        self.rows = ComputedRows(len(done))
        self._values = [0.0] * len(done)
        self.refresh()

    @property
    def open(self) -> list[bool]:
        return self.rows.below(self.limit, self.done)

    @property
    def unfinished(self) -> bool:
        return any(self.open)

    @property
    def room(self) -> int:
        """Most tokens a row still wants."""
        return self.limit - min(count for count, is_open in zip(self.done, self.open, strict=True) if is_open)

    def leave(self, target: CausalLM) -> list[int] | None:
        """Drop rows that have ended, see ``ComputedRows.leave``."""
        stay = self.rows.leave(target)
        if stay is not None:
            self.done, self._values = of_rows(self.done, stay), of_rows(self._values, stay)
            self.thresholds = of_rows(self.thresholds, stay)
        return stay

    def refresh(self) -> None:
        """Read the thresholds again."""
        self._values = [threshold.threshold() for threshold in self.thresholds]

    @property
    def least(self) -> list[float]:
        """Per row, the confidence above which it is sure; a row that needs no token is none."""
        return [value if is_open else 1.0 for value, is_open in zip(self._values, self.open, strict=True)]

    def tempted(self, confidence: Float[Tensor, "B"]) -> bool:
        """Whether a row below its limit would be sure."""
        pairs = zip(self.sure(confidence.tolist()), self.open, strict=True)
        return any(sure and is_open for sure, is_open in pairs)

    def sure(self, confidence: list[float] | None) -> list[bool]:
        """Per row; a row at its limit is always sure, since it needs no token."""
        if confidence is None:
            return [not is_open for is_open in self.open]
        pairs = zip(confidence, self._values, self.open, strict=True)
        return [value > threshold or not is_open for value, threshold, is_open in pairs]

    def commit(self, tokens: list[list[int]]) -> None:
        self.done = [count + len(new) for count, new in zip(self.done, tokens, strict=True)]


def _draft(passes: list[Shallow]) -> Draft:
    """All shallow tokens but the last one, which the deep layers have not passed."""
    waiting = passes[:-1]
    if not waiting:
        root = passes[0].root
        return Draft.chain(root.new_empty(len(root), 0))
    tokens = torch.stack([p.token for p in waiting if p.token is not None], dim=1)
    drawn = [p.probs for p in waiting if p.probs is not None]
    return Draft.chain(tokens, torch.stack(drawn, dim=1) if drawn else None, passes=len(waiting))


def _read(passes: list[Shallow], verification: Verification, rows: list[bool]) -> tuple[list[list[int]], list[int]]:
    waiting = [p.token for p in passes[:-1] if p.token is not None]
    report = torch.stack([verification.accepted, verification.bonus, *waiting], dim=1).tolist()
    kept = [[*row[2 : 2 + row[0]], row[1]] if is_open else [] for row, is_open in zip(report, rows, strict=True)]
    return kept, [row[0] * is_open for row, is_open in zip(report, rows, strict=True)]
