"""Self-speculative decoding: the target without some of its sub-layers drafts, the whole target verifies.

Draft & Verify, Zhang et al. 2023, arXiv 2309.08168. The set of skipped attention and feed-forward sub-layers is found
by Bayesian optimisation (``skip_search.py``), nothing is trained. Drafting ends when the probability of the drafter's
most likely token falls below a threshold, which follows the acceptance rate. Leaving out every layer from the E-th on
(``layer_exit``) is the drafter of LayerSkip, Elhoushi et al. 2024, arXiv 2404.16710, used there with models trained for
it. A skip set must be searched, named, or taken from the paper (``preset``):

    python -m bench train method=self_speculative model=smollm2

Published: 1.21x to 1.99x with LLaMA-2 13B and 70B on CNN/DailyMail and XSum, 1.35x to 1.46x with Code Llama 13B on
HumanEval. LayerSkip: 2.16x on CNN/DailyMail, 1.82x on HumanEval, with its own checkpoints.

One cache serves both roles: a draft step attends to the target's keys and values of the text so far, so there is no
second prefill and no extra memory. Layers before the first skipped sub-layer compute for a drafted token exactly what
verification would, so verification starts after them. That saves arithmetic, not reads of weights: those layers still
run once, for the last drafted token. A target with CUDA graphs verifies in whole passes, which are replayed.

Differences: q / p rejection at a temperature; threshold and acceptance rate restart with each prompt; a batch has one
threshold, and drafting ends when no row is confident.

Command: ``python -m bench method=self_speculative dataset=mtbench``
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from methods.drafting import Context, Draft
from methods.engine.causal_lm import CausalLM, Output
from methods.engine.checkpoint_files import MissingPart
from methods.engine.cuda_graphs import GraphedLM
from methods.engine.kv_cache import Cache
from methods.engine.sampling import Sampling
from methods.engine.token_tree import Nodes, Parents
from methods.rows import of_rows
from methods.speculative.draft_model import DraftModel
from methods.speculative.loop import SpeculativeDecoder
from methods.speculative.verification import default_rule

SKIP_SET = "skip_set.json"
_GAMMA, _CONFIDENCE = 12, 0.6  # of the paper's scripts


@dataclass(frozen=True, slots=True)
class SkipSet:
    """Sub-layers that a draft leaves out, and how to draft with them.

    Attributes:
        layers: of the model it was found for.
        attention, mlp: 0-based layers, ascending.
        gamma: most tokens per round that it was measured best with; None: not known.
        confidence: the same for the threshold.
    """

    layers: int
    attention: tuple[int, ...]
    mlp: tuple[int, ...]
    gamma: int | None = None
    confidence: float | None = None

    @property
    def common(self) -> int:
        """Layers before the first one with a skipped sub-layer, whose work draft and verification share."""
        return min((*self.attention, *self.mlp), default=self.layers)

    @property
    def size(self) -> int:
        """Skipped sub-layers."""
        return len(self.attention) + len(self.mlp)

    def save(self, folder: Path) -> None:
        """Write ``skip_set.json`` into a folder."""
        (folder / SKIP_SET).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> SkipSet:
        """Read a folder with ``skip_set.json``, or such a file.

        Raises:
            ValueError: it is missing, or holds something else.
        """
        file = path / SKIP_SET if path.is_dir() else path
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            attention, mlp = (_layers(int(i) for i in found.pop(key)) for key in ("attention", "mlp"))
            return cls(attention=attention, mlp=mlp, **found)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{file} cannot be read as a skip set ({error}); it must hold "
                '{"layers": 30, "attention": [..], "mlp": [..]}. Name another, or make one: '
                "python -m bench train method=self_speculative model=MODEL."
            ) from None


def _span(*parts: int | tuple[int, int]) -> tuple[int, ...]:
    runs = (part if isinstance(part, tuple) else (part, part) for part in parts)
    return tuple(layer for first, last in runs for layer in range(first, last + 1))


Preset = Literal["llama2_13b", "llama2_13b_chat", "codellama_13b", "llama2_70b"]

PRESETS: dict[str, SkipSet] = {
    "llama2_13b": SkipSet(
        40,
        attention=_span(3, 5, 6, 8, 10, 11, 14, 15, 18, (22, 31), (33, 37)),
        mlp=_span(6, (9, 11), 15, 24, 25, 27, 28, 35),
    ),
    "llama2_13b_chat": SkipSet(
        40,
        attention=_span((7, 11), 14, 15, 18, (22, 24), (26, 38)),
        mlp=_span(7, 10, 11, 14, 27, 30, 32, 33, 37, 38),
    ),
    "codellama_13b": SkipSet(
        40,
        attention=_span(5, 6, (9, 11), (14, 16), 21, 23, 24, (26, 32), (34, 37)),
        mlp=_span((10, 12), 14, 15, (25, 27), 30, (32, 34)),
    ),
    "llama2_70b": SkipSet(
        80,
        attention=_span(
            10, 11, 13, 14, 16, (18, 22), 25, (27, 31), 35, 41, 43, (45, 58), (60, 63), (65, 70), 74, 75, 78, 79
        ),
        mlp=_span(
            2,
            4,
            9,
            10,
            13,
            14,
            16,
            (20, 22),
            (24, 29),
            31,
            34,
            37,
            41,
            (47, 50),
            (53, 55),
            57,
            58,
            60,
            62,
            63,
            (66, 68),
            70,
            76,
        ),
    ),
}
"""Sets published with the paper, by the target they were found for."""


@dataclass(slots=True)
class Threshold:
    """The confidence below which drafting ends, adapted to the acceptance rate (sec. 3.4 of the paper).

    After a round with acceptance rate r, acceptance A and threshold t become
        A <- beta_rate * A + (1 - beta_rate) * r
        u  = t + step if A < goal;  t if the round drafted all it might;  t - step otherwise
        t <- beta_threshold * t + (1 - beta_threshold) * u
    A begins at 0 with each text. The constants and this start are those of the paper's code.

    Attributes:
        start: the threshold of the first round.
        goal: acceptance rate aimed at. With None, or a start at 0, the threshold does not change.
    """

    start: float
    goal: float | None = 0.9
    step: float = 0.01
    beta_rate: float = 0.5
    beta_threshold: float = 0.9
    value: float = 0.0
    rate: float = 0.0

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget every round."""
        self.value, self.rate = self.start, 0.0

    def update(self, accepted: int, drafted: int, full: bool) -> None:
        """Learn from a round.

        Args:
            accepted: drafted tokens that were kept, over all rows.
            drafted: drafted tokens, over all rows; a round without any teaches nothing.
            full: whether the round drafted as many tokens as it might.
        """
        if self.goal is None or not self.start or not drafted:
            return
        self.rate = self.beta_rate * self.rate + (1 - self.beta_rate) * accepted / drafted
        move = self.step if self.rate < self.goal else 0.0 if full else -self.step
        self.value = min(max(self.value + (1 - self.beta_threshold) * move, 0.0), 1.0)


class SharedTarget(CausalLM):
    """A view of the target that verifies what a thinner view of it drafted in the same cache.

    The drafter leaves in ``known`` the output of the first ``common`` layers for the root and for every drafted token
    but the last, which no draft step has read. ``forward`` runs those layers for the last token alone and the others
    for all: the same sums as in a whole pass, and the same logits up to rounding.

    It also has the target's own kind: of an encoder-decoder it shares the decoder.

    Attributes:
        cache: the one of the current decode.
    """

    def __new__(cls, target: CausalLM, common: int) -> SharedTarget:
        kind = type(target)
        mixed = cls if issubclass(cls, kind) else type(f"Shared{kind.__name__}", (cls, kind), {})
        shared: SharedTarget = object.__new__(mixed)
        return shared

    def __init__(self, target: CausalLM, common: int) -> None:  # no weights are read: a view, as CausalLM.skip makes
        self.__dict__.update(target.__dict__)
        self.common = 0 if isinstance(target, GraphedLM) else common  # graphs are of whole passes
        self.known: list[Float[Tensor, "B 1 D"]] = []
        self.cache: Cache | None = None

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """As the target's; the drafter will write into it."""
        self.cache = super().new_cache(batch, capacity)
        return self.cache

    @torch.inference_mode()
    def forward(
        self,
        tokens: Nodes,
        parents: Parents,
        cache: Cache,
        *,
        levels: int | None = None,
        hidden_layers: Collection[int] = (),
    ) -> Output:
        """As the target's, from the layers after the known output."""
        if not self.known:
            return super().forward(tokens, parents, cache, levels=levels, hidden_layers=hidden_layers)
        assert parents is None and not hidden_layers, "the draft is a chain and reads nothing of the target"
        rest = self._through_common(tokens[:, len(self.known) :], cache)
        state = self.begin(tokens, None, cache)
        state.hidden = torch.cat([*self.known, rest], dim=1)
        self.known.clear()
        self.run(state, range(self.common, self.n_layers))
        hidden = self.norm(state.hidden)
        return Output(self.head(hidden), hidden)

    def _through_common(self, tokens: Int[Tensor, "B n"], cache: Cache) -> Float[Tensor, "B n D"]:
        """The common layers over tokens after the known ones."""
        lengths = cache.lengths
        cache.advance([len(self.known)] * len(lengths))
        state = self.begin(tokens, None, cache)
        self.run(state, range(self.common))
        cache.set_lengths(lengths)
        return state.hidden


class SelfDrafter(DraftModel):
    """Drafts a chain with a thinner view of the target, on the target's own cache."""

    def __init__(self, target: SharedTarget, view: CausalLM, gamma: int, threshold: Threshold) -> None:
        super().__init__(view, target.vocab_size, gamma, threshold.start)
        self.target, self.threshold = target, threshold
        self._lengths: list[int] = []  # of the committed texts when the last draft was made
        self._drafted = 0

    def reset(self, prompts: list[list[int]], limit: int) -> None:
        """Does nothing: the cache is the target's."""
        self.threshold.reset()
        self.target.known.clear()
        self._lengths = []

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep the lengths that the acceptance is computed from; the loop drops rows from the cache."""
        if self._lengths:  # else there was no draft yet
            self._lengths = of_rows(self._lengths, rows)

    def propose(self, context: Context) -> Draft:
        cache = self._shared()
        self._learn([len(row) for row in context.tokens])
        lengths = cache.lengths
        draft = super().propose(context)
        cache.set_lengths(lengths)  # what was drafted is not committed
        self._drafted = draft.tokens.shape[1]
        return draft

    def _learn(self, lengths: list[int]) -> None:
        """Adapt the threshold to the acceptance of the last draft; rows at their limit do not count."""
        grown = [now - before for now, before in zip(lengths, self._lengths, strict=False) if now > before]
        self.threshold.update(sum(grown) - len(grown), self._drafted * len(grown), self._drafted == self.nodes)
        self.confidence, self._lengths = self.threshold.value, lengths

    def _catch_up(self, context: Context) -> Float[Tensor, "B V"]:
        return self._next(context.root)

    def _next(self, token: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        view, cache, common = self.model, self._shared(), self.target.common
        state = view.begin(token[:, None], None, cache)
        view.run(state, range(common))
        if common:
            self.target.known.append(state.hidden)
        view.run(state, range(common, view.n_layers))
        cache.advance([1] * len(token))
        return view.head(view.norm(state.hidden[:, 0]))

    def _shared(self) -> Cache:
        assert self.target.cache is not None, "the loop makes the cache before it asks for a draft"
        return self.target.cache


class SelfSpeculative(SpeculativeDecoder):
    """Self-speculative decoding with a chain of up to ``gamma`` tokens.

    The skipped sub-layers are given by one of ``skip_attention`` with ``skip_mlp``, ``preset``, ``layer_exit`` and
    ``checkpoint``; without any of them by the checkpoint prepared for this model.

    Args:
        gamma: most tokens drafted per round; None: as the skip set recommends, else 12.
        confidence: threshold on the drafter's most likely token at the start of a text, 0 never stops; None: as the
            skip set recommends, else 0.6.
        acceptance: acceptance rate that the threshold is adapted to; None: a constant threshold.
        skip_attention, skip_mlp: 0-based layers whose sub-layer the draft leaves out.
        preset: a set published with the paper.
        layer_exit: number of layers the draft runs, from the first on.
        checkpoint: folder or file of a skip set.

    Raises:
        ValueError: no skip set, several, or one that does not fit the model; an option out of range.
    """

    parallel = False  # the target continues from states of the draft
    trainable = True
    needs = "training"
    instead_of_checkpoint = ("skip_attention", "skip_mlp", "preset", "layer_exit")
    paper = "Zhang et al. 2023, arXiv 2309.08168; Elhoushi et al. 2024, arXiv 2404.16710"

    @classmethod
    def replays_passes(cls, settings: Mapping[str, Any]) -> bool:
        """A draft that ends at a layer is continued there by the verification."""
        return settings.get("layer_exit") is None

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        gamma: int | None = None,
        confidence: float | None = None,
        acceptance: float | None = 0.9,
        skip_attention: Collection[int] | None = None,
        skip_mlp: Collection[int] | None = None,
        preset: Preset | None = None,
        layer_exit: int | None = None,
        checkpoint: str | Path | None = None,
    ) -> None:
        named = _named(target, skip_attention, skip_mlp, preset, layer_exit, checkpoint)
        skips = _require_fit(_one_of(named), target)
        gamma = _first(gamma, skips.gamma, _GAMMA)
        confidence = _first(confidence, skips.confidence, _CONFIDENCE)
        _check_options(gamma, confidence, acceptance)
        self.skips = skips
        shared = SharedTarget(target, skips.common)
        view = target.skip(skips.attention, skips.mlp)
        drafter = SelfDrafter(shared, view, gamma, Threshold(confidence, acceptance))
        super().__init__(shared, sampling, drafter, default_rule(sampling, "chain", drawn=True))


def exit_set(layers: int, kept: int) -> SkipSet:
    """Everything from layer ``kept`` on: an early exit."""
    above = tuple(range(kept, layers))
    return SkipSet(layers, above, above)


def _named(
    target: CausalLM,
    skip_attention: Collection[int] | None,
    skip_mlp: Collection[int] | None,
    preset: str | None,
    layer_exit: int | None,
    checkpoint: str | Path | None,
) -> dict[str, SkipSet]:
    named = {}
    if skip_attention is not None or skip_mlp is not None:
        named["skip_attention/skip_mlp"] = SkipSet(target.n_layers, _layers(skip_attention), _layers(skip_mlp))
    if preset is not None:
        named["preset"] = _preset(preset)
    if layer_exit is not None:
        named["layer_exit"] = _exit(target, layer_exit)
    if checkpoint is not None:
        named["checkpoint"] = SkipSet.load(Path(checkpoint).expanduser())
    return named


def _layers(given: Iterable[int] | None) -> tuple[int, ...]:
    return tuple(sorted(set(given or ())))


def _preset(name: str) -> SkipSet:
    if name not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {name}. Choose one, or name the layers.")
    return PRESETS[name]


def _exit(target: CausalLM, kept: int) -> SkipSet:
    if not 1 <= kept < target.n_layers:
        raise ValueError(
            f"layer_exit must be from 1 to {target.n_layers - 1}, as {target.name} has {target.n_layers} layers, got "
            f"{kept}. Set method.layer_exit to one of these."
        )
    return exit_set(target.n_layers, kept)


def _one_of(named: dict[str, SkipSet]) -> SkipSet:
    if len(named) > 1:
        raise ValueError(
            f"There must be one source of skipped sub-layers, got {' and '.join(f'method.{name}' for name in named)} "
            "together. Leave the others null."
        )
    if named:
        return next(iter(named.values()))
    raise MissingPart(
        "self_speculative needs a skip set, and there is none for this model. Search for one with python -m "
        "bench train method=self_speculative model=MODEL, or name one: method.skip_attention=[..] "
        "method.skip_mlp=[..], method.preset=NAME, method.layer_exit=E or method.checkpoint=FOLDER."
    )


def _require_fit(skips: SkipSet, target: CausalLM) -> SkipSet:
    if skips.layers != target.n_layers:
        raise ValueError(
            f"The skip set must be of a model with {target.n_layers} layers, as {target.name}, got one of "
            f"{skips.layers} layers. Search for one: python -m bench train method=self_speculative model=MODEL."
        )
    if not skips.size:
        raise ValueError(
            "The skip set must have at least one sub-layer, got none; a draft would cost as much as the target. Name "
            "some (method.skip_attention=[..] method.skip_mlp=[..]), or use method=autoregressive."
        )
    return skips


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _check_options(gamma: int, confidence: float, acceptance: float | None) -> None:
    if gamma < 1 or not 0.0 <= confidence < 1.0 or not (acceptance is None or 0.0 < acceptance <= 1.0):
        raise ValueError(
            "self_speculative needs gamma >= 1, 0 <= confidence < 1 and 0 < acceptance <= 1 (or null), got "
            f"gamma={gamma}, confidence={confidence}, acceptance={acceptance}. For no draft at all use "
            "method=autoregressive."
        )
