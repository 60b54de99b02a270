"""Training of ``specee``: maps of the exits as for ``calm``, then one small network per exit.

The model decodes prompts of the corpus to the end while the speculator names candidates; at every exit the features are
kept, with the label whether the exit has the model's token (Xu et al. 2025, arXiv 2504.08850). A predictor has two
layers and learns by the binary cross-entropy. There are some ten thousand places of a dozen numbers, so L-BFGS takes
seconds and needs no learning rate. Every eighth prompt is held out and judges the predictors.

    python -m bench train method=specee model=smollm2
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from methods.decoder import generate
from methods.early_exit.exit_training import ExitTraining
from methods.early_exit.exits import Exits, Lens, Translated
from methods.early_exit.loop import EarlyExitDecoder, ExitDecision, ExitPoint
from methods.early_exit.specee import HEADS, Candidates, Layers, Predictors, SpecEE, SpecEEPolicy, Speculator, scores
from methods.early_exit.threshold import Threshold
from methods.engine.causal_lm import CausalLM
from methods.engine.checkpoint_files import MissingPart
from methods.engine.kv_cache import Cache
from methods.engine.sampling import Sampling, argmax
from methods.training.exit_quality import quality, summary
from methods.training.interface import TrainingContext, require

_HELD_OUT = 8  # one of so many prompts judges
_STEPS, _DECAY = 200, 1e-4  # of L-BFGS, and of squared weights for features of variance 1


@dataclass(frozen=True)
class Asked:
    """What an exit was asked at N places.

    Attributes:
        features: see ``features_of``.
        right: whether its likeliest token is the model's.
    """

    features: Float[Tensor, "N F"]
    right: Bool[Tensor, "N"]


@dataclass
class SpecEETraining(ExitTraining):
    """Trains maps and predictors.

    Args:
        speculator: names the candidates: heads of ``medusa``, or the network of ``eagle``.
        heads: folder of its checkpoint for this model; it is copied into the one that is made. A training by command
            takes the one that the project has, if none is named.
        candidates: k of a step.
        width: of the predictors.
        places: at which the predictors learn, about.
        limit: most tokens decoded per prompt.
        batch: prompts decoded together.

    Raises:
        MissingPart: no heads are named.
        ValueError: a number out of range.
    """

    description = "exits, and networks that judge them by a few drafted tokens"
    duration = "as for method=calm, and two minutes on a CPU core for smollm2"

    speculator: Speculator = "medusa"
    heads: str | None = None
    candidates: int = 4
    width: int = 64
    places: int = 8192
    limit: int = 64
    batch: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = {"candidates": self.candidates, "width": self.width, "places": self.places}
        require("at least 1", **counts, limit=self.limit, batch=self.batch)

    def fit(self, context: TrainingContext) -> dict[str, Any]:
        """See ``Trainable``."""
        if self.heads is None:
            raise MissingPart(
                f"The training of specee needs the heads of method={self.speculator} for this model, got none. Train "
                f"them: python -m bench train method={self.speculator} model=MODEL; or set train.heads=FOLDER."
            )
        facts = super().fit(context)
        if (context.output / HEADS).exists():
            shutil.rmtree(context.output / HEADS)
        shutil.copytree(Path(self.heads).expanduser(), context.output / HEADS)
        learnt, held_out = self._asked(context, Exits.load(context.output, context.target))
        predictors = Predictors(
            self.speculator, self.candidates, {depth: _fit(found, self.width) for depth, found in learnt.items()}
        )
        predictors.save(context.output)
        judged = {
            str(depth): quality(found.right, predictors(depth, found.features)) for depth, found in held_out.items()
        }
        places = {"places": len(next(iter(learnt.values())).right)}
        return facts | places | {"predictors": judged, "summary": facts["summary"] + summary({"predictor": judged})[1:]}

    def _asked(self, context: TrainingContext, exits: Exits) -> tuple[dict[int, Asked], dict[int, Asked]]:
        """At every exit, places to learn from and places of other prompts."""
        recorder = _Recorder.make(context.target, exits, self.speculator, context.output / HEADS, self.candidates)
        prompts = [torch.tensor(example.prompt, device=context.target.device) for example in context.examples]
        short = [prompt for prompt in prompts if len(prompt) <= self.answers.longest_prompt]
        others = [prompt for place, prompt in enumerate(short) if place % _HELD_OUT]
        learnt = recorder.record(others, self.places, self.limit, self.batch, context)
        return learnt, recorder.record(short[::_HELD_OUT], self.places // _HELD_OUT, self.limit, self.batch, context)


class _Recording(SpecEEPolicy):
    """Asks every exit, lets no token leave, and keeps what the exits were asked.

    Attributes:
        step: by depth, features and likeliest tokens of the open rows, in the current step.
    """

    step: dict[int, tuple[Float[Tensor, "n F"], Int[Tensor, "n"]]]

    def stops(self, roots: Sequence[int]) -> Sequence[int]:
        self.step = {}
        return super().stops(roots)

    def decide(self, point: ExitPoint) -> ExitDecision:
        rows = torch.tensor(point.open, device=point.ready.device)
        likeliest = argmax(self.target.head(point.ready))
        self.step[point.depth] = self.features(point)[rows].float(), likeliest[rows]
        return ExitDecision([False] * len(point.open))


class _Recorder(SpecEE):
    """Decodes by the whole model and keeps what the predictors learn from."""

    policy: _Recording

    @classmethod
    def make(cls, target: CausalLM, exits: Exits, speculator: Speculator, folder: Path, count: int) -> _Recorder:
        """A recorder for exits without predictors."""
        made = object.__new__(cls)
        made._candidates = Candidates(target, speculator, folder, count)
        made.taps = made._candidates.hidden_layers
        nothing = Predictors(speculator, count, {})
        policy = _Recording(target, exits.depths, made._candidates, nothing, Threshold(0.5))
        reader = Translated(target, exits) if exits.translators else Lens(target)
        EarlyExitDecoder.__init__(made, target, Sampling(), policy, reader)
        return made

    def record(
        self, prompts: Sequence[Int[Tensor, "_"]], places: int, limit: int, batch: int, context: TrainingContext
    ) -> dict[int, Asked]:
        """Decode prompts until there are so many places, or no prompts."""
        self._found: dict[int, list[Asked]] = {}
        count = 0
        for start in range(0, len(prompts), batch):
            generate(self, prompts[start : start + batch], limit, self.target.eos_ids)
            count = sum(len(found.right) for found in next(iter(self._found.values()), []))
            context.report_progress("decoding with a speculator", min(count, places), places)
            if count >= places:
                break
        if not count:
            raise ValueError("The corpus must have prompts to learn from and others to judge by, got too few.")
        return {
            depth: Asked(torch.cat([part.features for part in parts]), torch.cat([part.right for part in parts]))
            for depth, parts in self._found.items()
        }

    def _forward(
        self,
        root: Int[Tensor, "B"],
        roots: list[int],
        cache: Cache,
        rows: list[bool],
        places: Sequence[int] = (),
        drafting: bool = False,
    ) -> tuple[Float[Tensor, "B V"] | None, list[int]]:
        logits, depths = super()._forward(root, roots, cache, rows, places, drafting)
        assert logits is not None, "no token leaves"
        final = argmax(logits)[torch.tensor(rows, device=logits.device)]
        for exit_depth, (features, likeliest) in self.policy.step.items():
            self._found.setdefault(exit_depth, []).append(Asked(features, likeliest == final))
        return logits, depths


def _fit(asked: Asked, width: int) -> Layers:
    """A predictor of an exit: the least binary cross-entropy, from weights of a fixed seed."""
    middle, scale = asked.features.mean(0), asked.features.std(0).clamp(min=1e-6)
    x, labels = (asked.features - middle) / scale, asked.right.float()
    random = Generator(x.device).manual_seed(0)
    size = x.shape[1]
    first = torch.randn(size, width, generator=random, device=x.device) * size**-0.5
    second = torch.randn(width, generator=random, device=x.device) * width**-0.5
    layers = (first, torch.zeros(width, device=x.device), second, torch.zeros((), device=x.device))
    for part in layers:
        part.requires_grad_()
    optimizer = torch.optim.LBFGS(layers, max_iter=_STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = F.binary_cross_entropy_with_logits(scores(x, layers), labels)
        value = value + _DECAY * (layers[0].square().sum() + layers[2].square().sum())
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(closure)
    plain = layers[0].detach() / scale[:, None]
    return plain, layers[1].detach() - middle @ plain, layers[2].detach(), layers[3].detach()
