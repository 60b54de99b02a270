"""Decoding in which tokens exit the model early: the loop of ``calm``, ``static_depth`` and ``hash_ee``.

A step runs the layers in portions, up to the depths at which its policy decides. The state of a row that exits is
multiplied with the output matrix, and its token is drawn from the processed distribution. The prompt and the first
token take the whole model (hash tables may change that).

Later tokens attend to this one in every layer, so each skipped layer computes its keys and values from the state with
which the token exited (hidden-state propagation, Schuster et al. 2022, arXiv 2207.07061, sec. 3.3). Layers that no
later token can reach are left out.

Rows of a batch run in lockstep to the deepest exit. A row that has exited is frozen: it passes through the remaining
layers with its state, which is what propagation writes, and its text is the one it would have alone. Its layers are not
saved: ``Step.layers`` is what the batch ran, for every row. A row whose text has ended leaves the batch
(``methods.rows``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from methods.decoder import Decoder, Guarantee, Step
from methods.early_exit.exits import Reader
from methods.engine.causal_lm import CausalLM, Pass
from methods.engine.kv_cache import Cache
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import DecoderPass
from methods.rows import ComputedRows, of_rows


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
        exits: by depth, tokens that exited there; each row by itself, whatever the batch ran.
    """

    steps: int = 0
    rows: int = 0
    layers: int = 0
    fills: int = 0
    columns: int = 0
    maps: int = 0
    exits: Counter[int] = field(default_factory=Counter)

    def stats(self, target: CausalLM) -> dict[str, Any]:
        """Per step, as plain JSON values.

        ``layer_equivalents`` counts heads, maps and fills in layers of the target; ``cost_over_layers`` divides the
        cost of a step in them by what it would have cost had its layers and its output matrix shrunk alike.
        """
        if not self.steps:
            return {}
        heads, whole = self.columns / target.vocab_size, target.n_layers + head_share(target)
        equivalents = self.layers + heads * head_share(target) + self.fills * fill_share(target)
        equivalents += self.maps * map_share(target)
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
            "exits": {str(depth): count for depth, count in sorted(self.exits.items())},
        }


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
        nbytes: of its own weights.
    """

    guarantee: Guarantee
    deepest: int
    nbytes: int = 0

    def reset(self, limit: int) -> None:  # noqa: B027, most have nothing to reset
        """Start new prompts of at most ``limit`` tokens each."""

    @abstractmethod
    def stops(self, roots: Sequence[int]) -> Sequence[int]:
        """Depths at which to decide in this step, ascending; every row that is left exits at the last one.

        Args:
            roots: the tokens that the open rows read.
        """

    def decide(self, point: ExitPoint) -> ExitDecision:
        """Which rows exit here; not asked at the last stop."""
        raise NotImplementedError


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
    needs = "training"

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


class EarlyExitDecoder(ExitDecoder):
    """A target with an exit policy.

    Attributes:
        guarantee: what the policy promises.
    """

    def __init__(self, target: CausalLM, sampling: Sampling, policy: Policy, reader: Reader) -> None:
        self.target, self.sampling, self.reader = target, sampling, reader
        self.restart(policy)

    def restart(self, policy: Policy) -> None:
        """Decode by this policy from now on, and reset the counters."""
        self.policy, self.guarantee, self.counters = policy, policy.guarantee, DecodeStats()

    def memory(self) -> dict[str, int | None]:
        """Memory beside the target's."""
        return {"exits": self.reader.nbytes + self.policy.nbytes, "key_value_projections": self.target.fill_bytes}

    @torch.inference_mode()
    def decode(self, prompts: list[Int[Tensor, "_"]], limit: int, rng: Generator) -> Iterator[Step]:
        cache = self.target.new_cache(len(prompts), max(len(prompt) for prompt in prompts) + limit)
        self.policy.reset(limit)
        root = self.sampling.pick(self.read_prompts(prompts, cache), rng)
        roots, batch = root.tolist(), ComputedRows(len(prompts))
        first = [[token] for token in roots]
        batch.take((yield Step.undrafted(first, self._share(self.prompt_depth), rows=len(first))))
        done = [1] * len(prompts)
        while any(rows := batch.below(limit, done)):
            if (stay := batch.leave(self.target)) is not None:
                cache.select(stay)
                root, roots, done, rows = root[stay], of_rows(roots, stay), of_rows(done, stay), of_rows(rows, stay)
            logits, depth = self._forward(root, roots, cache, rows)
            new = self.sampling.pick(logits, rng)
            root = new if all(rows) else torch.where(torch.tensor(rows, device=new.device), new, root)
            roots = root.tolist()
            cache.advance([int(is_open) for is_open in rows])
            done = [count + is_open for count, is_open in zip(done, rows, strict=True)]
            new_tokens = [[token] if is_open else [] for token, is_open in zip(roots, rows, strict=True)]
            step = Step.undrafted(new_tokens, self._share(depth), rows=len(rows))
            batch.take((yield batch.step(step)))

    def read_prompts(self, prompts: Sequence[Int[Tensor, "_"]], cache: Cache) -> Float[Tensor, "B V"]:
        """Logits after the prompts; afterwards the cache holds them."""
        return self.target.prefill([prompt.to(self.target.device) for prompt in prompts], cache).logits[:, 0]

    @property
    def prompt_depth(self) -> int:
        """Layers that prompts are read by."""
        return self.target.n_layers

    def _share(self, depth: int) -> float:
        return depth / self.target.n_layers

    def _forward(
        self, root: Int[Tensor, "B"], roots: list[int], cache: Cache, rows: list[bool]
    ) -> tuple[Float[Tensor, "B V"], int]:
        target = self.target
        walk = Walk(target, target.begin(root[:, None], None, cache), rows)
        stops = self.policy.stops([token for token, is_open in zip(roots, rows, strict=True) if is_open])
        logits = None
        for depth in stops:
            walk.to(depth)
            ready = self.reader.read(depth, walk.state.hidden[:, 0])
            self.counters.maps += self.reader.maps(depth)
            if depth == stops[-1]:
                decision = ExitDecision([True] * len(rows))
            else:
                decision = self.policy.decide(ExitPoint(depth, walk.state.hidden[:, 0], ready, roots, walk.open))
                self.counters.columns += decision.columns
            alone = walk.waiting == 0  # no row exited before, so these logits are those of all rows
            self.counters.exits[depth] += walk.leave(decision.leaves, ready)
            if not walk.staying:
                logits = decision.logits if alone else None
                break
        self.counters.steps += 1
        self.counters.rows += len(rows)
        self.counters.layers += walk.depth
        above = range(walk.depth, self.policy.deepest)
        target.fill(walk.state, above)
        self.counters.fills += len(above)
        if logits is None:
            self.counters.columns += target.vocab_size
            logits = target.head(walk.ready)
        return logits, walk.depth


class Walk:
    """A pass over one token per row, whose rows stop at different depths.

    Attributes:
        state: the pass, as the target begins it; a stopped row keeps the state it exited with.
        depth: layers run so far.
        ready: [B, D] what the output matrix multiplies, for the rows that have exited.
        open: per row, whether it has not exited yet.
        waiting: rows that have exited.
    """

    ready: Float[Tensor, "B D"]

    def __init__(self, target: CausalLM, state: Pass | DecoderPass, rows: Sequence[bool]) -> None:
        self.target, self.depth = target, 0
        self.state: Any = state  # of the target's own kind
        self.open = list(rows)
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
            self.target.run(self.state, layers)
            return
        for layer in layers:
            before = self.state.hidden
            self.target.run(self.state, (layer,))
            self.state.hidden = torch.where(self._gone, before, self.state.hidden)

    def leave(self, leaves: Sequence[bool], ready: Float[Tensor, "B D"]) -> int:
        """Let rows exit here; returns how many."""
        new = [now and is_open for now, is_open in zip(leaves, self.open, strict=True)]
        count = sum(new)
        if not count:
            return 0
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
        return count


def head_share(target: CausalLM) -> float:
    """What the output matrix costs, in layers of the target, by the weights that are read."""
    return target.vocab_size * target.hidden_size * target.dtype.itemsize / _layer_bytes(target)


def fill_share(target: CausalLM) -> float:
    """What keys and values alone cost, in layers of the target."""
    rows = 2 * target.kv_heads * target.head_dim
    return rows * target.hidden_size * target.dtype.itemsize / _layer_bytes(target)


def map_share(target: CausalLM) -> float:
    """What the map of an exit costs, in layers of the target."""
    return target.hidden_size**2 * target.dtype.itemsize / _layer_bytes(target)


def _layer_bytes(target: CausalLM) -> float:
    """What a token reads in one layer, the mean of all; of an encoder-decoder, in one of the decoder.

    Of a mixture of experts, those that a token passes through.
    """
    every = range(target.n_layers)
    return float(target.pass_bytes(1) - target.skip(every, every).pass_bytes(1)) / target.n_layers
