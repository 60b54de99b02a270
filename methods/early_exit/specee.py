"""SpecEE: an exit is asked about a few drafted tokens only (Xu et al. 2025, arXiv 2504.08850).

A speculator, the shipped heads of Medusa or the network of EAGLE, names k candidates for the next token. After some
layers, a small network per layer reads the logits of these candidates, their softmax over the k, and its change since
the exit asked before; above ``threshold`` the whole output matrix is multiplied, and the token leaves if its likeliest
token is a candidate. So a negative answer costs k rows of the output matrix instead of all, and a positive one is
checked before it counts. Skipped layers get keys and values of the state at the exit (``loop.py``). The predictors must
be trained, with the exits' maps where the model was not trained to exit:

    python -m bench train method=specee model=smollm2

Published, Llama 2 7B: 2.25x in the authors' cloud scenario, 2.43x on a PC.

Differences: the speculator reads the state that the output matrix reads at the exit; EAGLE-3 gets the state at the exit
for the layers that were skipped. All exits are asked, by default every fourth layer from the middle on; the published
code asks a fixed set of layers and those near the last five exits. Drafts are one level deep: exits in the verification
of a tree are not here.

Command: ``python -m bench method=specee method.threshold=0.9``
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from methods.decoder import Calibrated
from methods.drafting import Context, Drafter
from methods.early_exit.calibrator import GRID, RiskTarget
from methods.early_exit.exits import Exits, Head, find_reader, require_depths
from methods.early_exit.loop import EarlyExitDecoder, ExitDecision, ExitPoint, Policy, Walk, exact_if
from methods.early_exit.threshold import Threshold
from methods.engine.causal_lm import CausalLM, Output
from methods.engine.checkpoint_files import part_folder, read_part, require_shapes, write_part
from methods.engine.kv_cache import Cache
from methods.engine.sampling import Sampling, argmax, in_float
from methods.speculative.eagle.checkpoint import Part
from methods.speculative.eagle.decoder import Eagle
from methods.speculative.heads.medusa import Medusa

Speculator = Literal["medusa", "eagle"]

PREDICTORS = "predictors.safetensors", "predictors.json"
HEADS = "speculator"  # folder of its checkpoint, within that of the predictors
Layers = tuple[Float[Tensor, "F H"], Float[Tensor, "H"], Float[Tensor, "H"], Float[Tensor, ""]]


@dataclass(frozen=True)
class Predictors:
    """One small network per exit: sigmoid(w2 . ReLU(x W1 + b1) + b2).

    Attributes:
        speculator: whose candidates they were trained on.
        candidates: k; the features x are 3 k numbers.
        layers: by depth, W1, b1, w2 and b2.
    """

    speculator: Speculator
    candidates: int
    layers: dict[int, Layers]

    def __call__(self, depth: int, features: Float[Tensor, "B F"]) -> Float[Tensor, "B"]:
        """Probability that the exit has the whole model's token."""
        return torch.sigmoid(scores(features.float(), self.layers[depth]))

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for parts in self.layers.values() for part in parts)

    def save(self, folder: Path) -> None:
        """Write them into a folder, as ``load`` reads it."""
        names = ("w1", "b1", "w2", "b2")
        tensors = {
            f"{depth}.{name}": part
            for depth, parts in self.layers.items()
            for name, part in zip(names, parts, strict=True)
        }
        width = len(next(iter(self.layers.values()))[1])
        config = {"speculator": self.speculator, "candidates": self.candidates, "width": width}
        write_part(folder, tensors, config | {"depths": list(self.layers)}, torch.float32, PREDICTORS)

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> Predictors:
        """Read them onto a device.

        Raises:
            ValueError: files are missing or damaged.
        """
        (speculator, count, width, depths), tensors = read_part(folder, "specee", _announced, PREDICTORS)
        shapes: dict[str, tuple[int, ...]] = {}
        for depth in depths:
            shapes |= {f"{depth}.w1": (3 * count, width), f"{depth}.b1": (width,)}
            shapes |= {f"{depth}.w2": (width,), f"{depth}.b2": ()}
        require_shapes(folder, tensors, shapes)
        here = {key: tensor.to(device) for key, tensor in tensors.items()}
        layers = {d: (here[f"{d}.w1"], here[f"{d}.b1"], here[f"{d}.w2"], here[f"{d}.b2"]) for d in depths}
        return cls(speculator, count, layers)


def _announced(config: Mapping[str, Any]) -> tuple[Speculator, int, int, list[int]]:
    if config["speculator"] not in ("medusa", "eagle"):
        raise ValueError(f"unknown speculator {config['speculator']}")
    return config["speculator"], int(config["candidates"]), int(config["width"]), [int(d) for d in config["depths"]]


def scores(features: Float[Tensor, "*b F"], layers: Layers) -> Float[Tensor, "*b"]:
    """Log-odds of a predictor."""
    first, first_bias, second, second_bias = layers
    return torch.relu(features @ first + first_bias) @ second + second_bias


def features_of(
    logits: Float[Tensor, "B k"], before: Float[Tensor, "B k"] | None
) -> tuple[Float[Tensor, "B F"], Float[Tensor, "B k"]]:
    """Logits of the candidates, their softmax and its change (at the first exit: itself); and the softmax."""
    local = logits.softmax(-1)
    return torch.cat([logits, local, local if before is None else local - before], dim=-1), local


class Candidates:
    """The tokens that a speculator names, and their logits at an exit.

    Attributes:
        tokens: [B, k] of the current step.
        hidden_layers: of the target, whose states the speculator reads.
    """

    tokens: Int[Tensor, "B k"]

    def __init__(self, target: CausalLM, speculator: Speculator, folder: Path, count: int) -> None:
        self._drafter = _drafter(target, speculator, folder, count)
        self.hidden_layers: Sequence[int] = self._drafter.hidden_layers
        weight, bias = target.output_rows(torch.arange(target.vocab_size, device=target.device))
        self._weight, self._bias = weight, bias
        self._context: Context | None = None

    @property
    def nbytes(self) -> dict[str, int | None]:
        """Of the speculator, and of a copy of the output matrix by rows."""
        own: dict[str, int | None] = dict(getattr(self._drafter, "nbytes", {}))
        return own | {"output_rows": self._weight.numel() * self._weight.element_size()}

    def begin(self, prompts: Sequence[Int[Tensor, "_"]], limit: int, output: Output) -> None:
        """Start texts after their prompts, which ``output`` is of."""
        texts = [prompt.tolist() for prompt in prompts]
        self._drafter.reset(texts, limit)
        device = output.hidden.device
        root = torch.zeros(len(texts), dtype=torch.long, device=device)
        self._context = Context(texts, root, output, None, Sampling(), Generator(device))

    def name(self, root: Int[Tensor, "B"], roots: Sequence[int]) -> None:
        """Name tokens that may follow the roots."""
        context = self._context
        assert context is not None, "begin comes before name"
        for text, token in zip(context.tokens, roots, strict=True):
            text.append(token)
        context.root = root
        self.tokens = self._drafter.propose(context).tokens
        self._chosen = self._weight[self.tokens]
        self._chosen_bias = None if self._bias is None else in_float(self._bias[self.tokens])

    def note(self, walk: Walk, ready: Float[Tensor, "B D"]) -> None:
        """Keep the states of a step: what the output matrix read, and those of ``hidden_layers``."""
        assert self._context is not None, "begin comes before note"
        last = walk.state.hidden
        states = {layer: walk.seen.get(layer, last) for layer in self.hidden_layers}
        self._context.output = Output(last[..., :0], ready[:, None], states)
        self._context.path = torch.zeros(len(ready), 1, dtype=torch.long, device=ready.device)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order."""
        assert self._context is not None, "begin comes before keep_rows"
        self._context.keep_rows(rows)
        self._drafter.keep_rows(rows)

    def logits(self, ready: Float[Tensor, "B D"]) -> Float[Tensor, "B k"]:
        """Of the candidates, at an exit."""
        found = in_float((self._chosen @ ready[:, :, None])[..., 0])
        return found if self._chosen_bias is None else found + self._chosen_bias

    def have(self, tokens: Int[Tensor, "B"]) -> Bool[Tensor, "B"]:
        """Which tokens are among the candidates of their rows."""
        return (self.tokens == tokens[:, None]).any(1)


def _drafter(target: CausalLM, speculator: Speculator, folder: Path, count: int) -> Drafter:
    """A drafter whose first level are the candidates."""
    if speculator == "medusa":
        return Medusa(target, Sampling(), [[rank] for rank in range(count)], checkpoint=folder).drafter
    version = Part.load(folder, target).spec.version
    made: Literal[1, 3] = 3 if version == 3 else 1
    return Eagle(target, Sampling(), made, "static", shape=[[count]], checkpoint=folder).drafter


class SpecEEPolicy(Policy):
    """Leave where the predictor is sure and the likeliest token is a candidate."""

    def __init__(
        self,
        target: CausalLM,
        depths: Sequence[int],
        candidates: Candidates,
        predictors: Predictors,
        threshold: Threshold,
    ) -> None:
        self.target, self.candidates, self.predictors, self.threshold = target, candidates, predictors, threshold
        self.guarantee, self.deepest = exact_if(threshold.never), target.n_layers
        self.nbytes, self.limit = predictors.nbytes, 1
        self._stops = (target.n_layers,) if threshold.never else (*depths, target.n_layers)
        self._before: Tensor | None = None

    def reset(self, limit: int) -> None:
        self.limit = limit

    def stops(self, roots: Sequence[int]) -> Sequence[int]:
        self._before = None
        return self._stops

    def features(self, point: ExitPoint) -> Float[Tensor, "B F"]:
        """What the predictor of an exit reads; to be asked at every exit in turn."""
        found, self._before = features_of(self.candidates.logits(point.ready), self._before)
        return found

    def decide(self, point: ExitPoint) -> ExitDecision:
        """Costs one host read, and a second where the whole output matrix is asked."""
        sure = self.predictors(point.depth, self.features(point)) > self.threshold.value
        asked, count = sure.tolist(), self.predictors.candidates
        if not any(yes and is_open for yes, is_open in zip(asked, point.open, strict=True)):
            return ExitDecision([False] * len(asked), columns=count)
        logits = self.target.head(point.ready)
        leaves = sure & self.candidates.have(argmax(logits))
        return ExitDecision(leaves.tolist(), logits, count + logits.shape[1])


class SpecEE(EarlyExitDecoder, Calibrated):
    """Speculative early exiting.

    Args:
        threshold: probability of the predictor above which the whole output matrix is asked; 1 is the full model.
        exits: depths that are asked, in layers run; None: those that were trained.
        head: how exits are read: by trained maps, or by the model's own norm and output matrix (``lens``).
        calibration: a risk target for which the threshold is chosen; replaces ``threshold``.
        checkpoint: folder of trained predictors with their speculator; None: those prepared for this model.

    Raises:
        MissingPart: no predictors.
        ValueError: predictors of another model, or an option out of range.
    """

    model_kind = "causal"
    paper = "Xu et al. 2025, arXiv 2504.08850"
    checked_with = {"threshold": 0.5}

    policy: SpecEEPolicy

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        threshold: float = 0.9,
        exits: Sequence[int] | None = None,
        head: Head = "trained",
        calibration: RiskTarget | None = None,
        checkpoint: str | Path | None = None,
    ) -> None:
        folder = part_folder("specee", "predictors", checkpoint)
        trained = Exits.load(folder, target)
        reader = find_reader("specee", head, target, trained)
        self._depths = trained.depths if exits is None else tuple(exits)
        require_depths(self._depths, target, reader, "method.exits")
        self._predictors = Predictors.load(folder, target.device)
        if missing := [depth for depth in self._depths if depth not in self._predictors.layers]:
            raise ValueError(
                f"method.exits must be among the depths with a predictor, {list(self._predictors.layers)}, got "
                f"{missing[0]}. Choose among them, or train others: train.exits=[..] force=true."
            )
        kind, count = self._predictors.speculator, self._predictors.candidates
        self._candidates = Candidates(target, kind, folder / HEADS, count)
        self.taps = self._candidates.hidden_layers
        self.calibrator = None if calibration is None else calibration.over(GRID, sampling)
        super().__init__(target, sampling, self._policy(threshold, target), reader)

    @classmethod
    def needs_checkpoint(cls, settings: Mapping[str, Any]) -> bool:
        """The predictors are needed, whatever reads the exits."""
        return settings.get("checkpoint") is None

    def set_threshold(self, threshold: float) -> None:
        self.restart(self._policy(threshold, self.target))

    def _policy(self, threshold: float, target: CausalLM) -> SpecEEPolicy:
        return SpecEEPolicy(target, self._depths, self._candidates, self._predictors, Threshold(threshold))

    def memory(self) -> dict[str, int | None]:
        """Memory beside the target's."""
        return super().memory() | self._candidates.nbytes

    def read_prompts(self, prompts: Sequence[Int[Tensor, "_"]], cache: Cache) -> Float[Tensor, "B V"]:
        rows = [prompt.to(self.target.device) for prompt in prompts]
        output = self.target.prefill(rows, cache, hidden_layers=self.taps)
        self._candidates.begin(prompts, self.policy.limit, output)
        return output.logits[:, 0]

    def _forward(
        self,
        root: Int[Tensor, "B"],
        roots: list[int],
        cache: Cache,
        rows: list[bool],
        places: Sequence[int] = (),
        drafting: bool = False,
    ) -> tuple[Float[Tensor, "B V"] | None, list[int]]:
        if not self.policy.threshold.never:
            self._candidates.name(root, roots)
        return super()._forward(root, roots, cache, rows, places, drafting)

    def keep_rows(self, rows: Sequence[int]) -> None:
        self._candidates.keep_rows(rows)

    def note(self, walk: Walk) -> None:
        self._candidates.note(walk, walk.ready)
