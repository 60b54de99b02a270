"""Decoding in which tokens exit the model early: the loop of ``calm``, ``static_depth`` and ``hash_ee``.

A step runs the layers in portions, up to the depths at which its policy decides. The state of a row that exits is
multiplied with the output matrix, and its token is drawn from the processed distribution. The prompt and the first
token take the whole model (hash tables may change that).

Later tokens attend to this one in every layer, so each skipped layer computes its keys and values from the state with
which the token exited (hidden-state propagation, Schuster et al. 2022, arXiv 2207.07061, sec. 3.3). Layers that no
later token can reach are left out. Instead, copies of the skipped layers that share the cache may run (``river.py``).

Rows of a batch go to the deepest exit together, and a row's text is the one it would have alone. Where a CPU's kernels
run the layers, they also judge the exits, so a step is one call, and a row is computed only as deep as it goes
(``CausalLM.run_to_exits``); of a small model several greedy steps are one call, as in the baseline. Where
all tokens take one depth, the call ends with their logits. Elsewhere a row that has exited is frozen: it passes
through the remaining layers with its state, which is what propagation writes, and its layers are not saved.
``Step.layers`` is the depth of the deepest row. A row whose text has ended leaves the batch (``methods.rows``). Methods
may also let the whole model judge the exits, or let rows wait at their exits for others (``rounds.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter_ns
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from methods.decoder import Decoder, Guarantee, PrefixCaching, Rounds, Step, common_prefix
from methods.early_exit.exits import Reader
from methods.engine.causal_lm import ROUNDS_TOGETHER, CausalLM, Pass
from methods.engine.fused_layers import Exited, ExitRule, Ran, Scored
from methods.engine.kv_cache import Cache
from methods.engine.linear import KernelLinear
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import DecoderPass
from methods.rows import ComputedRows, of_rows, one_each, steps_of


@dataclass(frozen=True, slots=True)
class FixedExit:
    """The exit that all tokens take, where the kernels read it in the pass that makes its states.

    Attributes:
        model: what runs the pass: the target, or a view of it that shares its cache.
        layers: of ``model`` that run, the first ones.
        depth: layers of the target among them.
        exit_map: of the normed states, before the output matrix.
    """

    model: CausalLM
    layers: int
    depth: int
    exit_map: KernelLinear | None = None


@dataclass(slots=True)
class DecodeStats:
    """Cost of the steps after the prompts since the decoder was made.

    Attributes:
        steps: number of steps.
        rows: rows they computed, over all steps.
        layers: layers run, each over all rows of a batch at once.
        fills: layers that only got keys and values.
        columns: columns of the output matrix that were multiplied, the token's own included.
        maps: maps of exits that were multiplied.
        copies: layers that cheaper copies ran in the place of skipped ones, in layers of the target by what they read.
        exits: by depth, tokens that exited there; each row by itself, whatever the batch ran.
        looks: decisions whether to exit.
        deciding_ns: time from the state at an exit to its decision: map, output matrix as far as it is asked,
            confidence. The logits of an exit that is taken give its token, too.
        spent_ns: time of the steps.
    """

    steps: int = 0
    rows: int = 0
    layers: int = 0
    fills: int = 0
    columns: int = 0
    maps: int = 0
    copies: float = 0.0
    exits: Counter[int] = field(default_factory=Counter)
    looks: int = 0
    deciding_ns: int = 0
    spent_ns: int = 0

    def stats(self, target: CausalLM) -> dict[str, Any]:
        """Per step, as plain JSON values.

        ``layer_equivalents`` counts heads, maps and fills in layers of the target; ``cost_over_layers`` divides the
        cost of a step in them by what it would have cost had its layers and its output matrix shrunk alike.
        ``confidence_share`` is that of the time, on a CPU alone: a clock of the host does not see a GPU.
        """
        if not self.steps:
            return {}
        heads, whole = self.columns / target.vocab_size, target.n_layers + head_share(target)
        equivalents = self.layers + heads * head_share(target) + self.fills * fill_share(target)
        equivalents += self.maps * map_share(target) + self.copies
        return {
            "steps": self.steps,
            "rows": self.rows,
            "tokens": sum(self.exits.values()),
            "layers_per_step": self.layers / self.steps,
            "heads_per_step": heads / self.steps,
            "fills_per_step": self.fills / self.steps,
            "maps_per_step": self.maps / self.steps,
            "layer_equivalents_per_step": equivalents / self.steps,
            "layer_equivalents_of_the_model": whole,
            "cost_over_layers": equivalents / whole / (self.layers / target.n_layers),
            **self._time_deciding(target),
            "exits": {str(depth): count for depth, count in sorted(self.exits.items())},
        }

    def _time_deciding(self, target: CausalLM) -> dict[str, float]:
        if not (self.spent_ns and target.device.type == "cpu"):
            return {}
        return {"looks_per_step": self.looks / self.steps, "confidence_share": self.deciding_ns / self.spent_ns}


@dataclass(frozen=True, slots=True)
class ExitDecision:
    """What a policy decides at a depth.

    Attributes:
        leaves: per row, whether it exits here; undefined for rows that have exited or are done.
        logits: [B, V] of this exit, if they had to be computed.
        columns: of the output matrix that were multiplied.
    """

    leaves: list[bool]
    logits: Float[Tensor, "B V"] | None = None
    columns: int = 0


@dataclass(frozen=True, slots=True)
class ExitPoint:
    """State of a step when a policy decides.

    Attributes:
        depth: layers that have run.
        hidden: [B, D] states after them.
        ready: [B, D] what the output matrix multiplies.
        roots: tokens that the rows read.
        open: per row, whether it has neither exited nor reached its limit; the others are not judged.
    """

    depth: int
    hidden: Float[Tensor, "B D"]
    ready: Float[Tensor, "B D"]
    roots: list[int]
    open: Sequence[bool]


class Policy(ABC):
    """Decides how deep each token goes.

    Attributes:
        guarantee: about the target's text.
        deepest: most layers that a token after the prompt can take; those above are never run.
        fixed: layers that every such token takes, without a decision; None: they differ.
        nbytes: of its own weights.
    """

    guarantee: Guarantee
    deepest: int
    fixed: int | None = None
    nbytes: int = 0

    def reset(self, limit: int) -> None:  # noqa: B027, most have nothing to reset
        """Start new prompts of at most ``limit`` tokens each."""

    def judged(self, asked: int, kept: int) -> None:  # noqa: B027, most do not count
        """Of the last ``asked`` tokens, with the model's own after them, the row that grew most kept ``kept``."""

    @abstractmethod
    def stops(self, roots: Sequence[int]) -> Sequence[int]:
        """Depths at which to decide in this step, ascending; every row that is left exits at the last one.

        Args:
            roots: the tokens that the open rows read.
        """

    def decide(self, point: ExitPoint) -> ExitDecision:
        """Which rows exit here; not asked at the last stop."""
        raise NotImplementedError

    def rule(self, roots: Sequence[int], places: Sequence[int]) -> ExitRule | None:
        """The decisions of a step as the kernels take them, without the maps; None: ``decide`` is asked.

        Args:
            roots: the tokens that all rows read.
            places: per row, tokens after the prompt so far.
        """
        return None

    def rule_of_rounds(self, places: Sequence[int], rounds: int) -> ExitRule | None:
        """The same of several steps in a row, whose tokens the kernels choose."""
        return None


def exact_if(whole: bool) -> Guarantee:
    """EXACT if tokens take all layers, else RELAXED."""
    return Guarantee.EXACT if whole else Guarantee.RELAXED


class ExitDecoder(Decoder):
    """A target that tokens may leave early.

    Attributes:
        reader: of its exits.
        counters: cost of the steps so far.
    """

    guarantee = Guarantee.RELAXED
    family = "early_exit"
    trainable = True
    needs: ClassVar[Literal["nothing", "training"]] = "training"

    @classmethod
    def replays_passes(cls, settings: Mapping[str, Any]) -> bool:
        return False

    target: CausalLM
    reader: Reader
    counters: DecodeStats

    @classmethod
    def needs_checkpoint(cls, settings: Mapping[str, Any]) -> bool:
        """``head=lens`` reads none."""
        return super().needs_checkpoint(settings) and settings.get("head") != "lens"

    def stats(self) -> dict[str, Any]:
        """Cost of the steps so far, and where tokens exited."""
        return self.counters.stats(self.target)


class EarlyExitDecoder(ExitDecoder, PrefixCaching):
    """A target with an exit policy.

    Of a kept text only the prompt is used again, as the rest has states of layers that were skipped.

    Attributes:
        guarantee: what the policy promises.
        kept: tokens of the last prompt that were not read again.
        light: the target with cheaper copies of the layers that tokens skip; None: skipped layers are filled.
        taps: 0-based layers whose states ``note`` is given.
    """

    light: CausalLM | None = None
    taps: Collection[int] = ()

    def __init__(self, target: CausalLM, sampling: Sampling, policy: Policy, reader: Reader) -> None:
        self.target, self.sampling, self.reader = target, sampling, reader
        self.kept = 0
        self._last: tuple[list[int], Cache] | None = None
        self.restart(policy)

    def restart(self, policy: Policy) -> None:
        """Decode by this policy from now on, and reset the counters."""
        self.policy, self.counters, self.guarantee = policy, DecodeStats(), policy.guarantee

    def memory(self) -> dict[str, int | None]:
        """Memory beside the target's."""
        return {"exits": self.reader.nbytes + self.policy.nbytes, "key_value_projections": self.target.fill_bytes}

    @torch.inference_mode()
    def decode(self, prompts: list[Int[Tensor, "_"]], limit: int, rng: Generator) -> Iterator[Step]:
        target = self.target
        cache = target.new_cache(len(prompts), max(len(prompt) for prompt in prompts) + limit)
        self.policy.reset(limit)
        root = self.sampling.pick(self.read_prompts(prompts, cache), rng)
        roots, batch = root.tolist(), ComputedRows(len(prompts))
        first = [[token] for token in roots]
        batch.take((yield Step.undrafted(first, self.share(self.prompt_depth), rows=len(first), kept=self.kept)))
        done, fixed = [1] * len(prompts), self.fixed_exit()
        together = fixed.model if fixed is not None else target if self._rule_of_rounds([1], 1) is not None else None
        if self.sampling.greedy and together is not None and together.runs_rounds:
            yield from self._rounds_together(fixed, roots, batch, cache, limit)
            return
        while any(rows := batch.below(limit, done)):
            began = perf_counter_ns()
            if (stay := batch.leave(target)) is not None:
                cache.select(stay)
                root, roots, done, rows = root[stay], of_rows(roots, stay), of_rows(done, stay), of_rows(rows, stay)
                self.keep_rows(stay)
            if fixed is None:
                logits, depths = self._forward(root, roots, cache, rows, done)
                assert logits is not None, "a step that drafts nothing always ends"
                new = self.sampling.pick(logits, rng)
            else:
                made, depths = self._run_fixed(fixed, root, cache), [fixed.depth]
                self._count_step(fixed.depth, rows)
                new = made.best[:, 0] if self.sampling.greedy else self.sampling.pick(made.logits[:, 0], rng)
            root = new if all(rows) else torch.where(torch.tensor(rows, device=new.device), new, root)
            roots = root.tolist()
            cache.advance([int(is_open) for is_open in rows])
            done = [count + is_open for count, is_open in zip(done, rows, strict=True)]
            step = Step.undrafted(one_each(roots, rows), self.share(max(depths)), rows=len(rows))
            self.counters.spent_ns += perf_counter_ns() - began
            batch.take((yield batch.step(step)))

    def fixed_exit(self) -> FixedExit | None:
        """The exit that all tokens take; None: they differ, or the kernels cannot read it."""
        depth, maps = self.policy.fixed, self.reader.kernel_maps()
        if depth is None or maps is None or not self.target.ends_fused:
            return None
        return FixedExit(self.target, depth, depth, maps.get(depth))

    def _run_fixed(self, fixed: FixedExit, root: Int[Tensor, "B"], cache: Cache) -> Scored:
        model = fixed.model
        made = model.run_to_logits(model.begin(root[:, None], None, cache), fixed.layers, fixed.exit_map)
        self._count_fixed(fixed)
        return made

    def _count_fixed(self, fixed: FixedExit) -> None:
        """Add a pass of an exit that all tokens take to the counters."""
        self.counters.layers += fixed.depth
        self.counters.maps += self.reader.maps(fixed.depth)
        self.counters.columns += self.target.vocab_size

    def _count_step(self, depth: int, rows: Sequence[bool]) -> None:
        self.counters.steps += 1
        self.counters.rows += len(rows)
        self.counters.exits[depth] += sum(rows)

    def _rounds_together(
        self, fixed: FixedExit | None, roots: list[int], batch: ComputedRows, cache: Cache, limit: int
    ) -> Rounds:
        """All steps after the first tokens, ``roots``, to the end of the texts, several in a call.

        Args:
            fixed: the exit that all tokens take; None: the policy's rule decides.
        """
        target, done, deepest = self.target, [1] * len(roots), self.policy.deepest
        began = perf_counter_ns()
        while any(rows := batch.below(limit, done)):
            if (stay := batch.leave(target)) is not None:
                cache.select(stay)
                roots, done, rows = of_rows(roots, stay), of_rows(done, stay), of_rows(rows, stay)
            most = min(ROUNDS_TOGETHER, *(limit - count for count, is_open in zip(done, rows, strict=True) if is_open))
            rule = None if fixed is not None else self._rule_of_rounds(done, most)
            taken = fixed or FixedExit(target, deepest, deepest)
            ran = taken.model.rounds(roots, cache, most, rows, target.eos_ids, taken.layers, taken.exit_map, rule)
            cache.advance([len(ran.tokens) * is_open for is_open in rows])
            done = [count + len(ran.tokens) * is_open for count, is_open in zip(done, rows, strict=True)]
            roots = ran.tokens[-1]
            shares = self._count_rounds(ran, rule, rows, taken)
            self.counters.spent_ns += perf_counter_ns() - began
            for step in steps_of(ran, rows, shares):
                batch.take((yield batch.step(step)))
            began = perf_counter_ns()

    def _count_rounds(self, ran: Ran, rule: ExitRule | None, rows: Sequence[bool], taken: FixedExit) -> list[float]:
        """Add the rounds of a call to the counters; ``taken``: by all, without a rule. Returns ``share`` of each."""
        rounds = len(ran.tokens)
        if rule is None:
            for _ in range(rounds):
                self._count_fixed(taken)
                self._count_step(taken.depth, rows)
            return [self.share(taken.depth)] * rounds
        every = [self._layers_run(left, rows) for left in ran.depths]
        self._count_exits(every, rule)
        self.counters.columns += ran.columns
        self.counters.deciding_ns += ran.deciding_ns
        return [self.share(max(depths)) for depths in every]

    def _rule_of_rounds(self, places: Sequence[int], rounds: int) -> ExitRule | None:
        """See ``Policy.rule_of_rounds``; with the maps, and None where the kernels cannot judge the exits."""
        return self._with_maps(self.policy.rule_of_rounds(places, rounds)) if self.target.exits_fused else None

    def _with_maps(self, rule: ExitRule | None) -> ExitRule | None:
        """With the reader's maps; None: the kernels cannot multiply them."""
        if rule is None or (maps := self.reader.kernel_maps()) is None:
            return None
        return replace(rule, maps=maps) if maps else rule

    def _layers_run(self, left: Sequence[int], rows: Sequence[bool]) -> list[int]:
        """Per row, the layers that it ran, of those after which it left, 0 for none."""
        return [(depth or self.policy.deepest) if is_run else 0 for depth, is_run in zip(left, rows, strict=True)]

    def read_prompts(self, prompts: Sequence[Int[Tensor, "_"]], cache: Cache) -> Float[Tensor, "B V"]:
        """Logits after the prompts; afterwards the cache holds them."""
        last, self.kept = self._last if self.keeps_prefix and len(prompts) == 1 else None, 0
        if last is not None:
            self.kept = common_prefix(last[0], prompts[0].tolist())
            cache.continue_from(last[1], self.kept)
        read = [prompt.to(self.target.device) for prompt in prompts]
        logits = self.target.prefill(read, cache, kept=self.kept).logits[:, 0]
        self._last = (prompts[0].tolist(), cache) if self.keeps_prefix and len(prompts) == 1 else None
        return logits

    @property
    def prompt_depth(self) -> int:
        """Layers that prompts are read by."""
        return self.target.n_layers

    def share(self, depth: int) -> float:
        """Of the layers."""
        return depth / self.target.n_layers

    def draft(self, root: Int[Tensor, "B"], cache: Cache, rows: list[bool]) -> tuple[Float[Tensor, "B V"] | None, int]:
        """Logits of the exits after the roots, None where an open row does not exit early; and the layers that ran."""
        if (fixed := self.fixed_exit()) is not None and fixed.depth < self.target.n_layers:
            return self._run_fixed(fixed, root, cache).logits[:, 0], fixed.depth
        logits, depths = self._forward(root, root.tolist(), cache, rows, drafting=True)
        return logits, max(depths)

    def draft_chain(
        self, root: Int[Tensor, "B"], cache: Cache, rows: list[bool], most: int
    ) -> tuple[Int[Tensor, "n B"], int] | None:
        """Up to ``most`` likeliest tokens of an exit that all take, in one call, and the layers of each pass.

        The cache's lengths do not change; a text that is alone ends its draft. None: tokens come one by one, see
        ``draft``.
        """
        fixed, target = self.fixed_exit(), self.target
        if fixed is None or fixed.depth == target.n_layers or not fixed.model.rounds_fused:
            return None
        ends = target.eos_ids if len(rows) == 1 else ()
        ran = fixed.model.rounds(root.tolist(), cache, most, rows, ends, fixed.layers, fixed.exit_map)
        for _ in ran.tokens:
            self._count_fixed(fixed)
        return torch.tensor(ran.tokens, device=root.device), fixed.depth

    def _forward(
        self,
        root: Int[Tensor, "B"],
        roots: list[int],
        cache: Cache,
        rows: list[bool],
        places: Sequence[int] = (),
        drafting: bool = False,
    ) -> tuple[Float[Tensor, "B V"] | None, list[int]]:
        """One token per row.

        Args:
            places: tokens that each row has written, for the kernels; not read when ``drafting``.
            drafting: end where an open row does not exit early.

        Returns:
            Logits of all rows, None where drafting ended; and the layers that each row ran, 0: its text had ended.
        """
        target = self.target
        state = target.begin(root[:, None], None, cache)
        if not drafting and (rule := self.kernel_rule(roots, places)) is not None:
            return self._run_fused(state, rule, rows)
        stops = self.policy.stops([token for token, is_open in zip(roots, rows, strict=True) if is_open])
        walk = Walk(target, state, rows, self.light, self.taps)
        logits = None
        for depth in stops:
            if drafting and depth == target.n_layers:
                self._count(walk)
                return None, [walk.depth] * len(rows)
            walk.to(depth)
            began = perf_counter_ns()
            ready = self.reader.read(depth, walk.state.hidden[:, 0])
            self.counters.maps += self.reader.maps(depth)
            if depth == stops[-1]:
                decision = ExitDecision([True] * len(rows))
            else:
                decision = self.policy.decide(ExitPoint(depth, walk.state.hidden[:, 0], ready, roots, walk.open))
                self.counters.columns += decision.columns
                self.counters.looks += 1
                self.counters.deciding_ns += perf_counter_ns() - began
            alone = walk.waiting == 0  # no row exited before, so these logits are those of all rows
            walk.leave(decision.leaves, ready)
            if not walk.staying:
                logits = decision.logits if alone else None
                break
        self._count(walk)
        if not drafting:
            self.counters.steps += 1
            self.counters.rows += len(rows)
            self.counters.exits.update(depth for depth in walk.depths if depth)
        logits = self._finish(walk, logits)
        self.note(walk)
        return logits, [walk.depth] * len(rows)

    def note(self, walk: Walk) -> None:
        """Keep of a step what the next one needs; most need nothing."""

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order; what ``note`` kept is still of all."""

    def _count(self, walk: Walk) -> None:
        self.counters.layers += walk.depth

    def _finish(self, walk: Walk, logits: Float[Tensor, "B V"] | None) -> Float[Tensor, "B V"]:
        """Fill the caches of the skipped layers; logits of the exits, unless they are known."""
        above = range(walk.depth, self.policy.deepest)
        self.target.fill(walk.state, above)
        self.counters.fills += len(above)
        if logits is None:
            self.counters.columns += self.target.vocab_size
            logits = self.target.head(walk.ready)
        return logits

    def kernel_rule(self, roots: Sequence[int], places: Sequence[int]) -> ExitRule | None:
        """See ``Policy.rule``; with the maps, and None where the kernels cannot judge this target's exits."""
        return self._with_maps(self.policy.rule(roots, places)) if self.target.exits_fused else None

    def _run_fused(self, state: Any, rule: ExitRule, rows: list[bool]) -> tuple[Float[Tensor, "B V"], list[int]]:
        """The same by the kernels, which compute a row only as deep as it goes.

        Args:
            state: a pass of the target's own kind.
        """
        deepest = self.policy.deepest
        found = self.target.run_to_exits(state, deepest, rule, rows)
        depths = self._layers_run(found.depths, rows)
        self._count_exits([depths], rule)
        self.counters.columns += found.columns
        self.counters.deciding_ns += found.deciding_ns
        return self.logits_of(found, depths), depths

    def _count_exits(self, every: Sequence[Sequence[int]], rule: ExitRule) -> None:
        """Add passes of the kernels, whose rows ran to these depths, to the counters; but columns and decisions."""
        found = Counter(depth for depths in every for depth in depths)
        found.pop(0, None)
        self.counters.exits.update(found)
        self.counters.steps += len(every)
        self.counters.rows += sum(map(len, every))
        for longest, count in Counter(map(max, every)).items():
            self.counters.layers += count * longest
            self.counters.maps += count * sum(self.reader.maps(depth) for depth in rule.stops if depth <= longest)
            self.counters.fills += count * (self.policy.deepest - longest)
            self._count_looks(rule, 0, longest, count)

    def count_part(self, found: Exited, depths: Sequence[int], first: int, last: int, rule: ExitRule) -> None:
        """The same of a part of a pass, from ``first`` layers to ``last``, for some rows; 0 in ``depths``: not left."""
        leaves = any(depths)
        self.counters.steps += leaves
        self.counters.rows += sum(depth > 0 for depth in depths)
        self.counters.layers += last - first
        self.counters.maps += self.reader.maps(last) if last in rule.stops else 0
        self.counters.fills += (self.policy.deepest - last) * leaves
        self.counters.columns += found.columns
        self.counters.deciding_ns += found.deciding_ns
        self.counters.exits.update(depth for depth in depths if depth)
        self._count_looks(rule, first, last)

    def _count_looks(self, rule: ExitRule, first: int, last: int, passes: int = 1) -> None:
        """Those of the kernels after more than ``first`` layers, and up to ``last``; a table has decided before."""
        if rule.measure != "table":
            self.counters.looks += passes * sum(first < depth <= last for depth in rule.stops)

    def logits_of(self, found: Exited, depths: Sequence[int]) -> Float[Tensor, "B V"]:
        """Of the rows that left at ``depths`` (0: undefined); by the exit, where the kernels made none."""
        missing = [row for row, depth in enumerate(depths) if depth and not found.scored[row]]
        if not missing:
            return found.logits
        self.counters.columns += self.target.vocab_size
        hidden, taken = found.hidden[:, 0], {depths[row] for row in missing}
        if len(missing) == len(depths) and len(taken) == 1:
            return self.target.head(self.reader.read(depths[0], hidden))
        ready = torch.empty_like(hidden)
        for depth in taken:
            here = [row for row in missing if depths[row] == depth]
            ready[here] = self.reader.read(depth, hidden[here])
        own = self.target.head(ready[missing])
        if len(missing) == len(depths):
            return own
        logits = torch.zeros(len(depths), own.shape[1], device=own.device)
        scored = [row for row, is_scored in enumerate(found.scored) if is_scored]
        if scored:
            logits[scored] = found.logits[scored]
        logits[missing] = own.float()
        return logits


class Walk:
    """A pass over one token per row, whose rows stop at different depths.

    Args:
        light: runs the layers that are left for rows that have exited; None: they are frozen.
        taps: 0-based layers whose states are kept.

    Attributes:
        state: the pass, as the target begins it; a frozen row keeps the state it exited with.
        depth: layers run so far.
        ready: [B, D] what the output matrix multiplies, for the rows that have exited.
        open: per row, whether it has not exited yet.
        depths: per row, layers it ran before it exited; 0: it has not.
        waiting: rows that have exited.
        mixed: layers that ran twice, for rows that have exited and for others.
        seen: states after the layers of ``taps`` that have run.
    """

    ready: Float[Tensor, "B D"]

    def __init__(
        self,
        target: CausalLM,
        state: Pass | DecoderPass,
        rows: Sequence[bool],
        light: CausalLM | None = None,
        taps: Collection[int] = (),
    ) -> None:
        self.target, self.light, self.depth, self.mixed = target, light, 0, 0
        self._taps, self.seen = taps, dict[int, Float[Tensor, "B 1 D"]]()
        self.state: Any = state  # of the target's own kind
        self.open = list(rows)
        self.depths = [0] * len(self.open)
        self._gone: Tensor | None = None
        self.waiting = 0

    @property
    def staying(self) -> bool:
        """Some row has not exited yet."""
        return any(self.open)

    def to(self, depth: int) -> None:
        """Run the layers up to ``depth``."""
        layers = range(self.depth, depth)
        self.depth = depth
        if self._gone is None:
            self.seen |= self.target.run(self.state, layers, self._taps)
            return
        for layer in layers:
            before = self.state.hidden
            if self.light is not None:
                self._run_both(layer, self.light)
            else:
                self.target.run(self.state, (layer,))
                self.state.hidden = torch.where(self._gone, before, self.state.hidden)
            if layer in self._taps:
                self.seen[layer] = self.state.hidden

    def _run_both(self, layer: int, light: CausalLM) -> None:
        """Run a layer for the rows that are left, and its copy for the others; each row keeps its own results."""
        assert self._gone is not None
        state, before, gone = self.state, self.state.hidden, self._gone.flatten().nonzero()[:, 0]
        light.run(state, (layer,))
        copied, written = state.hidden, state.cache.newest(layer, gone)
        state.hidden = before
        self.target.run(state, (layer,))
        state.cache.put_newest(layer, gone, written)
        state.hidden = torch.where(self._gone, copied, state.hidden)
        self.mixed += 1

    def leave(self, leaves: Sequence[bool], ready: Float[Tensor, "B D"]) -> None:
        """Let rows exit here."""
        new = [now and is_open for now, is_open in zip(leaves, self.open, strict=True)]
        count = sum(new)
        if not count:
            return
        self.depths = [self.depth if now else depth for now, depth in zip(new, self.depths, strict=True)]
        self.open = [is_open and not now for now, is_open in zip(new, self.open, strict=True)]
        if self._gone is None:  # a row that stays overwrites this at its own exit
            self.ready = ready
            if self.staying:
                self._gone = torch.tensor(new, device=ready.device)[:, None, None]
        else:
            now = torch.tensor(new, device=ready.device)
            self.ready = torch.where(now[:, None], ready, self.ready)
            self._gone = self._gone | now[:, None, None]
        self.waiting += count


def head_share(target: CausalLM) -> float:
    """What the output matrix costs, in layers of the target, by the weights that are read."""
    return target.vocab_size * target.hidden_size * target.dtype.itemsize / layer_bytes(target)


def fill_share(target: CausalLM) -> float:
    """What keys and values alone cost, in layers of the target."""
    rows = 2 * target.kv_heads * target.head_dim
    return rows * target.hidden_size * target.dtype.itemsize / layer_bytes(target)


def map_share(target: CausalLM) -> float:
    """What the map of an exit costs, in layers of the target."""
    return target.hidden_size**2 * target.dtype.itemsize / layer_bytes(target)


def layer_bytes(target: CausalLM) -> float:
    """What a token reads in one layer, the mean of all; of an encoder-decoder, in one of the decoder.

    Of a mixture of experts, those that a token passes through.
    """
    every = range(target.n_layers)
    return float(target.pass_bytes(1) - target.skip(every, every).pass_bytes(1)) / target.n_layers
