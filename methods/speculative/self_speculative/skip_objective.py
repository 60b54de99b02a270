"""The value of a skip set: measured costs, replayed acceptance, and the speed-up that follows from them.

The objective of ``skip_search.py``. Acceptance: the target continues every prompt greedily, the continuation is cut
into blocks of K tokens, and one pass of the thinner view goes over all blocks at once. In it a token sees the target's
own keys and values before its block and the view's inside it, as a draft would that began at the block. So each block
gives which of its K drafts would have been right, and how sure the drafter was, for any draft length up to K and any
threshold. Two approximations: real rounds begin where the last one ended, more often after a token that is hard to
predict, and blocks begin everywhere; and the length of a draft after its first wrong token is judged as if that token
had been right. For greedy decoding of one row (Leviathan et al. 2023, arXiv 2211.17192, theorem 3.8, with counted
acceptance in place of its geometric law):

    speed-up = (1 + mean(accepted)) * T(1) / mean(drafted * t_draft + T(drafted + 1))

with T(n) a round of the loop over n nodes and t_draft a draft step, both measured in the real loop.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import quantiles
from time import perf_counter
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from methods.drafting import Context, Draft, StatelessDrafter
from methods.engine.causal_lm import CausalLM
from methods.engine.kv_cache import Cache
from methods.engine.sampling import Sampling
from methods.speculative.loop import SpeculativeDecoder
from methods.speculative.self_speculative.decoder import SelfDrafter, SelfSpeculative, SharedTarget, SkipSet, Threshold
from methods.speculative.verification import default_rule

THRESHOLDS = (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
_TIMED_ROUNDS, _WARM_ROUNDS = 28, 4

_Kind = tuple[str, int]


# ------------------------------------------------------------------------------------------------ what a round costs


class RandomDrafter(StatelessDrafter):
    """Proposes the same number of random tokens each round, almost all of them wrong: a round of known size."""

    def __init__(self, nodes: int, vocab_size: int) -> None:
        self.nodes, self._vocab_size = nodes, vocab_size

    def propose(self, context: Context) -> Draft:
        """A chain of ``nodes`` tokens."""
        shape = (len(context.tokens), self.nodes)
        return Draft.chain(torch.randint(self._vocab_size, shape, generator=context.rng, device=context.root.device))


def padded_rounds(target: CausalLM, drafted: int) -> SpeculativeDecoder:
    """Greedy decoding with ``drafted`` useless tokens per round; none: plain autoregression."""
    sampling = Sampling()
    rule = default_rule(sampling, "chain", drawn=False)
    return SpeculativeDecoder(target, sampling, RandomDrafter(drafted, target.vocab_size), rule)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of rounds and draft steps of one model on one machine, greedy, one row.

    Attributes:
        nodes: sizes of the measured rounds, ascending from 1.
        full: seconds of a round over that many nodes.
        bare: the same with every sub-layer skipped: embedding, output matrix, rule and bookkeeping.
        draft: a draft step that skips nothing.
        attention, mlp: what a draft step saves per skipped sub-layer.
        layers: of the model.
    """

    nodes: tuple[int, ...]
    full: tuple[float, ...]
    bare: tuple[float, ...]
    draft: float
    attention: float
    mlp: float
    layers: int

    def draft_s(self, skips: SkipSet) -> float:
        """A draft step without these sub-layers."""
        return self.draft - len(skips.attention) * self.attention - len(skips.mlp) * self.mlp

    def rounds_s(self, common: int, most: int) -> Float[Tensor, "n"]:
        """Seconds of verifying 1 .. ``most`` nodes, where the first ``common`` layers run for one of them."""
        share = common / self.layers
        bare = [_between(self.nodes, self.bare, count) for count in range(1, most + 1)]
        full = [_between(self.nodes, self.full, count) for count in range(1, most + 1)]
        behind = self.full[0] - self.bare[0]
        return torch.tensor([b + share * behind + (1 - share) * (f - b) for b, f in zip(bare, full, strict=True)])

    @classmethod
    def measure(cls, target: CausalLM, prompt: Int[Tensor, "_"], gamma: int) -> Costs:
        """Time rounds and draft steps after a prompt, all kinds in turn, and take lower quartiles.

        Other load on a machine can only add to a time, so the lower quartile is nearer to the method's own.
        """
        every = range(target.n_layers)
        nodes = (*(n for n in (1, 2, 3, 5, 9, 17, 33) if n <= gamma), gamma + 1)
        bodies = {"full": target, "bare": target.skip(every, every)}
        views = {"draft": target, "attention": target.skip(every, ()), "mlp": target.skip((), every)}
        rounds = {(kind, n): padded_rounds(body, n - 1) for kind, body in bodies.items() for n in nodes}
        drafts = {(kind, gamma): _drafted_rounds(target, view, gamma) for kind, view in views.items()}
        taken = _in_turn({**rounds, **drafts}, prompt, (gamma + 1) * _TIMED_ROUNDS)
        full, bare = (tuple(_lower_quartile(taken[kind, n].round_s) for n in nodes) for kind in bodies)
        draft, *without = (_lower_quartile(taken[kind, gamma].draft_s) / gamma for kind in views)
        attention, mlp = (max(draft - other, 0.0) / target.n_layers for other in without)
        return cls(nodes, full, bare, draft, attention, mlp, target.n_layers)

    @classmethod
    def load(cls, file: Path) -> Costs | None:
        """Read what ``save`` wrote; None if there is no file."""
        if not file.is_file():
            return None
        stored: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        tables = {key: tuple(stored.pop(key)) for key in ("nodes", "full", "bare")}
        return cls(tables["nodes"], tables["full"], tables["bare"], **stored)

    def save(self, file: Path) -> None:
        """Write them: a resumed search must use the same costs."""
        file.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


@dataclass(slots=True)
class _Taken:
    round_s: list[float] = field(default_factory=list)
    draft_s: list[float] = field(default_factory=list)


def _drafted_rounds(target: CausalLM, view: CausalLM, gamma: int) -> SpeculativeDecoder:
    """Greedy decoding with drafts of ``gamma`` tokens by a view that need not be thinner."""
    shared = SharedTarget(target, 0)
    never = Threshold(1e-9, goal=None)  # is compared after every token, as a real one, and stops nothing
    drafter = SelfDrafter(shared, view, gamma, never)
    return SpeculativeDecoder(shared, Sampling(), drafter, default_rule(Sampling(), "chain", drawn=True))


def _in_turn(decoders: Mapping[_Kind, SpeculativeDecoder], prompt: Int[Tensor, "_"], limit: int) -> dict[_Kind, _Taken]:
    """Rounds of all decoders in turn, so that a drift of the machine falls on all alike; the first ones warm up."""
    device = prompt.device
    running = {kind: one.decode([prompt], limit, Generator(device).manual_seed(0)) for kind, one in decoders.items()}
    taken = {kind: _Taken() for kind in decoders}
    for number in range(_TIMED_ROUNDS):
        for kind, steps in running.items():
            begin = perf_counter()
            step = next(steps)
            if number >= _WARM_ROUNDS:
                taken[kind].round_s.append(perf_counter() - begin)
                taken[kind].draft_s.append((step.draft_ns or 0) / 1e9)
    return taken


def _lower_quartile(values: Sequence[float]) -> float:
    return quantiles(values, n=4)[0]


def _between(xs: Sequence[int], ys: Sequence[float], x: int) -> float:
    right = next(i for i, known in enumerate(xs) if known >= x)
    if xs[right] == x:
        return ys[right]
    share = (x - xs[right - 1]) / (xs[right] - xs[right - 1])
    return ys[right - 1] + share * (ys[right] - ys[right - 1])


# ------------------------------------------------------------------------------------------- what a draft gets right


@dataclass(frozen=True, slots=True)
class Rounds:
    """What one view would have drafted from R places.

    Attributes:
        hits: whether the k-th token of the draft, all before it being right, is the target's.
        sure: the drafter's probability of it.
    """

    hits: Bool[Tensor, "R K"]
    sure: Float[Tensor, "R K"]

    def outcome(self, gamma: int, confidence: float) -> tuple[Int[Tensor, "R"], Int[Tensor, "R"]]:
        """Drafted and accepted tokens per round, for a draft length and a threshold."""
        unsure = self.sure[:, :gamma] < confidence
        drafted = (unsure.cumsum(1) - unsure.int() == 0).sum(1)  # a token that ends the draft is still in it
        right = self.hits[:, :gamma].cumprod(1).sum(1)
        return drafted, torch.minimum(drafted, right)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Prompts with the target's greedy continuation and everything a replay needs.

    Attributes:
        prompts: one row each.
        cache: keys and values of prompts and continuations by the whole target, and room for those of a view.
        lengths: of the prompts.
        inputs: [B, T] continuation, which is what a draft reads.
        wanted: [B, T] the target's token after each.
        slots: [B, T] where a view's keys and values go.
        mask: [B, 1, T * G, S] additive.
        near_mask: the same of layers with a sliding window; None if there are none.
        blocks: [B, T / K] blocks that lie before the end of the text.
        gamma: K, tokens per block.
    """

    prompts: list[Int[Tensor, "_"]]
    cache: Cache
    lengths: list[int]
    inputs: Int[Tensor, "B T"]
    wanted: Int[Tensor, "B T"]
    slots: Int[Tensor, "B T"]
    mask: Float[Tensor, "B 1 TG S"]
    near_mask: Float[Tensor, "B 1 TG S"] | None
    blocks: Bool[Tensor, "B n"]
    gamma: int

    @classmethod
    @torch.inference_mode()
    def make(cls, target: CausalLM, prompts: list[Int[Tensor, "_"]], blocks: int, gamma: int) -> Calibration:
        """Continue the prompts by ``blocks * gamma`` tokens.

        Raises:
            ValueError: all continuations end within the first block.
        """
        lengths, width = [len(prompt) for prompt in prompts], blocks * gamma
        own = max(lengths) + width  # first slot of a view
        cache = target.new_cache(len(prompts), own + width)
        texts = _continue(target, prompts, cache, width)
        inputs, wanted = texts[:, :-1], texts[:, 1:]
        inside = ~torch.isin(inputs, torch.tensor(target.eos_ids, dtype=torch.long, device=target.device))
        whole = inside.cumprod(1).view(len(prompts), blocks, gamma).all(2)
        if not bool(whole.any()):
            raise ValueError(
                f"Calibration answers must be longer than {gamma} tokens, got none that is. Use another corpus with "
                "longer answers, or a smaller train.gamma."
            )
        slots = torch.arange(own, own + width, device=target.device).expand_as(inputs)
        of_rows = torch.tensor(lengths, device=target.device)
        mask, near = _block_mask(of_rows, own, width, gamma), None
        if target.window is not None:
            near = _additive(mask & _near(of_rows, own, width, target.window), target)
        return cls(prompts, cache, lengths, inputs, wanted, slots, _additive(mask, target), near, whole, gamma)

    @torch.inference_mode()
    def replay(self, view: CausalLM) -> Rounds:
        """The drafts of this view of the target at every block, by one pass."""
        self.cache.set_lengths(self.lengths)
        state = view.begin(self.inputs, None, self.cache)  # positions are right; what it may see is laid out above
        state.fused, state.slots, state.mask, state.end = False, self.slots, self.mask, self.cache.capacity
        if state.near is not None:
            state.near.mask, state.near.start = self.near_mask, 0
        view.run(state, range(view.n_layers))
        hits, sure = [], []
        for hidden, wanted in zip(view.norm(state.hidden), self.wanted, strict=True):  # logits of one row at a time
            logits = view.head(hidden).float()
            best = logits.max(-1)
            hits.append(best.indices == wanted)
            sure.append((best.values - logits.logsumexp(-1)).exp())
        kept = self.blocks.flatten()
        return Rounds(*(torch.stack(rows).view(-1, self.gamma)[kept].cpu() for rows in (hits, sure)))


def _continue(target: CausalLM, prompts: list[Int[Tensor, "_"]], cache: Cache, count: int) -> Int[Tensor, "B n"]:
    """The target's next ``count + 1`` tokens; the cache then holds all but the last."""
    token = target.prefill(prompts, cache).logits[:, 0].argmax(-1)
    tokens = [token]
    for _ in range(count):
        token = target.forward(token[:, None], None, cache).logits[:, 0].argmax(-1)
        cache.advance([1] * len(prompts))
        tokens.append(token)
    return torch.stack(tokens, dim=1)


def _block_mask(lengths: Int[Tensor, "B"], own: int, width: int, gamma: int) -> Bool[Tensor, "B T S"]:
    """Token i of a block from s on sees slots before ``length + s``, and the view's own slots s .. i."""
    place = torch.arange(width, device=lengths.device)
    block = place - place % gamma
    slot = torch.arange(own + width, device=lengths.device)
    text = slot < (lengths[:, None] + block)[:, :, None]
    drafted = (slot >= own + block[:, None]) & (slot <= own + place[:, None])
    return text | drafted


def _near(lengths: Int[Tensor, "B"], own: int, width: int, window: int) -> Bool[Tensor, "B T S"]:
    """Whether the token of a slot is at most ``window - 1`` positions before a token of the continuation."""
    slot = torch.arange(own + width, device=lengths.device)
    position = torch.where(slot < own, slot, lengths[:, None] + slot - own)
    place = lengths[:, None] + torch.arange(width, device=lengths.device)
    return place[:, :, None] - position[:, None] < window


def _additive(visible: Bool[Tensor, "B T S"], target: CausalLM) -> Float[Tensor, "B 1 TG S"]:
    mask = torch.zeros(visible.shape, dtype=target.dtype, device=target.device).masked_fill_(~visible, -torch.inf)
    return mask.repeat_interleave(target.heads // target.kv_heads, 1)[:, None]


# ------------------------------------------------------------------------------------------------------ the objective


@dataclass(frozen=True, slots=True)
class Trial:
    """A set that was tried.

    Attributes:
        speedup: of greedy decoding over autoregression, predicted or measured.
        gamma, confidence: the draft length and threshold it is predicted best with.
        tokens_per_round: committed tokens per pass of the target, drafts and bonus.
        rate: accepted over drafted tokens.
    """

    skips: SkipSet
    speedup: float
    gamma: int
    confidence: float
    tokens_per_round: float
    rate: float

    @property
    def best_set(self) -> SkipSet:
        """The set with its draft length and threshold."""
        return replace(self.skips, gamma=self.gamma, confidence=self.confidence)

    @property
    def key(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The skipped sub-layers."""
        return self.skips.attention, self.skips.mlp


def predict(rounds: Rounds, costs: Costs, skips: SkipSet, gamma: int, confidence: float) -> Trial:
    """The formula of this file's docstring."""
    drafted, accepted = rounds.outcome(gamma, confidence)
    verify_s = costs.rounds_s(skips.common, gamma + 1)[drafted]
    seconds = float((drafted * costs.draft_s(skips) + verify_s).mean())
    tokens = 1 + float(accepted.float().mean())
    rate = float(accepted.sum() / drafted.sum())
    return Trial(skips, tokens * costs.full[0] / seconds, gamma, confidence, tokens, rate)


def best_prediction(rounds: Rounds, costs: Costs, skips: SkipSet) -> Trial:
    """With the draft length and threshold that suit the set; of equals the shorter draft."""
    choices = ((gamma, bound) for gamma in range(1, rounds.hits.shape[1] + 1) for bound in THRESHOLDS)
    return max((predict(rounds, costs, skips, *choice) for choice in choices), key=lambda trial: trial.speedup)


def measured_speedup(target: CausalLM, skips: SkipSet, prompts: Sequence[Int[Tensor, "_"]], tokens: int) -> float:
    """Seconds of greedy autoregression over those of self-speculation, same prompts, prefill left out.

    The two take turns prompt by prompt. ``skips`` names draft length and threshold; the threshold stays.
    """
    method = SelfSpeculative(
        target, Sampling(), skips.gamma, skips.confidence, None, skip_attention=skips.attention, skip_mlp=skips.mlp
    )
    plain, drafted = padded_rounds(target, 0), 0.0
    base = 0.0
    for prompt in prompts:
        base += _seconds_per_token(plain, prompt, tokens)
        drafted += _seconds_per_token(method, prompt, tokens)
    return base / drafted


def _seconds_per_token(decoder: SpeculativeDecoder, prompt: Int[Tensor, "_"], tokens: int) -> float:
    steps = decoder.decode([prompt], tokens, Generator(prompt.device).manual_seed(0))
    next(steps)
    begin = perf_counter()
    done = sum(len(step.tokens[0]) for step in steps)
    return (perf_counter() - begin) / done
