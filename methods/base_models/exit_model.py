"""Training of a causal model on, so that it can be left early: LayerSkip's recipe, as a small difference of weights.

The model learns from its own answers with layer dropout and a loss over its exits (Elhoushi et al. 2024, arXiv
2404.16710, sec. 4.1; ``methods.training.layer_losses``), which its own norm and output matrix read. Its weights stay;
what is trained and saved is a low-rank difference (``methods.engine.low_rank``), 2.6 MB of rank 8 for smollm2. A model
group names the model and the difference, and any method runs on it:

    python -m bench train method=exit_model model=smollm2
    python -m bench model=smollm2_layerskip method=calm method.head=lens

The card says how often each exit has the token of the last layer, on held-out answers, before and after, and what the
training did to the whole model: its loss, and the share of its former tokens that it keeps.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from methods.early_exit.exits import default_depths
from methods.engine.causal_lm import CausalLM
from methods.engine.low_rank import NAMES, LowRank
from methods.training.answers import HEADS_CORPUS, AnswerRecipe, own_answers
from methods.training.exit_quality import judge, quality, summary
from methods.training.features import Features
from methods.training.interface import Trainable, TrainingContext, require
from methods.training.layer_losses import Curriculum, LayerSkipLoss, collected, drop_rates, dropped
from methods.training.losses import CROSS_ENTROPY, cross_entropy, draft_loss_of_states
from methods.training.trainer import Epochs, Loss, Point, Trainer, TrainingConfig, autocast, discard
from methods.training.translation import Pair, batches

_JUDGED, _WATCHED = 2048, 512  # held-out places in the card, and of an evaluation
_MIXED = 32.0  # tokens by which the lengths of texts in a batch differ, about


@dataclass(frozen=True)
class ExitModelConfig(TrainingConfig):
    """How long and how fast to train on.

    Attributes:
        tokens: of a step, prompts and padding included; at least one text.
        steps, learning_rate, warmup, final, weight_decay, betas, clip, precision, evaluations, minutes: see
            ``TrainingConfig``.
    """

    batch_size: int = field(init=False, repr=False, default=1)  # ``tokens`` takes its place

    tokens: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        require("at least 1", tokens=self.tokens)


@dataclass(frozen=True)
class Texts:
    """Dialogues of a batch.

    Attributes:
        ids: padded at the end.
        places: where the next token is one of the answer.
        wanted: these tokens.
    """

    ids: Int[Tensor, "B T"]
    places: Bool[Tensor, "B T"]
    wanted: Int[Tensor, "n"]

    @classmethod
    def of(cls, found: Features, rows: Sequence[int], device: torch.device) -> Texts:
        """Some dialogues."""
        ids, prompts, lengths = found.texts(rows, device)
        place = torch.arange(ids.shape[1], device=device)
        first, last = (torch.tensor(numbers, device=device)[:, None] for numbers in (prompts, lengths))
        places = (place >= first - 1) & (place < last - 1)
        return cls(ids, places, ids.roll(-1, 1)[places])


@dataclass
class ExitModelTraining(Trainable):
    """Trains the difference.

    Args:
        rank: of the difference of each matrix.
        matrices: last parts of the names of the linear maps that are trained; None: all of the layers.
        dropout: probability that the last layer is dropped, p_max; 0.1 to 0.2 in the paper.
        scale: of the exits' weights, e_scale; 0.1 to 1 in the paper.
        curriculum, interval: which exits learn in a step, see ``LayerSkipLoss``. Each costs a product with the output
            matrix for every token.
        distillation: share of the last layer's own distribution in what an exit learns; the rest is the answer's token.
        answers: the model's answers to learn from.
        recipe: of the training.

    Raises:
        ValueError: a number out of range.
    """

    makes = "difference"
    description = "a causal model that can be left early, as a low-rank difference of its weights"
    duration = "days on CPU cores for smollm2, which train 270 tokens a second each"
    corpus = HEADS_CORPUS

    rank: int = 8
    matrices: Sequence[str] | None = None
    dropout: float = 0.1
    scale: float = 0.2
    curriculum: Curriculum = "rotational"
    interval: int = 8
    distillation: float = 0.0
    answers: AnswerRecipe = field(default_factory=AnswerRecipe)
    recipe: ExitModelConfig = field(default_factory=ExitModelConfig)

    def __post_init__(self) -> None:
        require("at least 1", rank=self.rank)
        require("from 0 to below 1", dropout=self.dropout)
        require("from 0 to 1", distillation=self.distillation)
        LayerSkipLoss(1, self.scale, self.curriculum, self.interval)

    @property
    def needs_answers(self) -> bool:
        """See ``Trainable``: the answers are the model's own."""
        return False

    def model_name(self, of: str) -> str:
        """``smollm2_layerskip``."""
        return f"{of}_layerskip"

    def fit(self, context: TrainingContext) -> dict[str, Any]:
        """See ``Trainable``."""
        target = context.target
        answers = own_answers(context, self.answers)
        found = Features(answers)
        network = copy.deepcopy(_of_transformers(target)).eval().requires_grad_(False)
        torch.manual_seed(context.seed)
        difference = LowRank.begin(network, self.rank, self.matrices)
        before = judged(target, network, found, self.recipe.tokens)
        trainer = Trainer(self.recipe, difference, context, answers.sha256)
        epochs = self._epochs(found, context.seed)
        watched = [Texts.of(found, rows, target.device) for rows in _portions(found, self.recipe.tokens, _WATCHED)]
        loss = self.loss(target, network, difference)

        def evaluate() -> Point:
            with difference.beside(network), autocast(self.recipe.precision, target.device):
                numbers = losses_by_depth(target, network, watched)
            point = {name: round(value, 4) for name, value in numbers.items()}
            return point, {f"held_out/{name}": value for name, value in numbers.items()}

        def batch(step: int) -> tuple[Texts, int]:
            return Texts.of(found, epochs.batch(step), target.device), step

        trainer.run(loss, batch, evaluate)
        difference.save(context.output, network)
        LowRank.load(context.output, network).add_to(network)
        after = judged(target, network, found, self.recipe.tokens)
        discard(context.output)
        shown = set(map(str, default_depths(target)))
        stages = {name: {d: q for d, q in by["exits"].items() if d in shown} for name, by in
                  (("before", before), ("after", after))}  # fmt: skip
        return {
            "answers": len(answers.rows),
            "answer_tokens": answers.tokens,
            "answers_sha256": answers.sha256,
            "epochs": epochs.count(trainer.step),
            "tokens_read": sum(len(_ids(found, row)) for step in range(trainer.step) for row in epochs.batch(step)),
            **trainer.facts,
            "maps": len(difference.maps),
            "difference_bytes": (context.output / NAMES[0]).stat().st_size,
            "before": before,
            "after": after,
            "summary": [*summary(stages), _whole(before, after)],
        }

    def loss(self, target: CausalLM, network: Any, difference: LowRank) -> Callable[[tuple[Texts, int], int], Loss]:
        """The mean of the losses of the exits that learn in a step; layers are dropped."""
        layers = network.model.layers
        weigher = LayerSkipLoss(len(layers), self.scale, self.curriculum, self.interval)
        rates = drop_rates(len(layers), self.dropout)
        output, bias = _output_matrix(target)

        def loss(batch: tuple[Texts, int], place: int) -> Loss:
            texts, step = batch
            with difference.beside(network), dropped(layers, rates), collected(layers) as states:
                network.model(texts.ids, use_cache=False)
            taught = self._taught(texts, network.model.norm(states[-1][texts.places]), output, bias)
            parts, total = {}, torch.zeros((), device=texts.ids.device)
            for depth, weight in weigher.weights(step, place / self.recipe.steps).items():
                ready = network.model.norm(states[depth - 1][texts.places])
                wanted = texts.wanted if depth == len(layers) else taught
                one = _cross_entropy(ready, output, bias, wanted)
                total = total + weight * one
                parts[f"loss_{depth}"] = one.detach()
            return total, {"loss_whole": parts[f"loss_{len(layers)}"], "tokens": len(texts.wanted)}

        return loss

    @torch.no_grad()
    def _taught(
        self, texts: Texts, last: Float[Tensor, "n D"], output: Float[Tensor, "V D"], bias: Float[Tensor, "V"] | None
    ) -> Int[Tensor, "n"] | Float[Tensor, "n V"]:
        """What the exits learn: the tokens, or their mixture with the last layer's distribution."""
        if not self.distillation:
            return texts.wanted
        mixture = F.linear(last, output, bias).float().softmax(-1).mul_(self.distillation)
        shares = mixture.new_full((len(mixture), 1), 1 - self.distillation)
        return mixture.scatter_add_(1, texts.wanted[:, None], shares)

    def _epochs(self, found: Features, seed: int) -> Epochs:
        train = list(found.train)
        texts: list[Pair] = [(_ids(found, row), []) for row in train]

        def make(epoch: int) -> list[list[int]]:
            rng = random.Random(f"{seed}-{epoch}")
            made = batches(texts, self.recipe.tokens, _MIXED, rng)
            rng.shuffle(made)
            return [[train[place] for place in batch] for batch in made]

        return Epochs(make)


@torch.no_grad()
def judged(target: CausalLM, network: Any, found: Features, tokens: int) -> dict[str, Any]:
    """How good a network is on held-out answers, without dropped layers.

    Args:
        target: the model it was made from, whose norm and output matrix it has.
        network: of transformers.
        found: the dialogues.
        tokens: of a pass, about.

    Returns:
        ``loss`` of the whole network; ``keeps``, the share of the answers' tokens that it chooses itself; and under
        ``exits`` what ``exit_quality.quality`` says of each depth.
    """
    parts = [Texts.of(found, rows, target.device) for rows in _portions(found, tokens, _JUDGED)]
    states: list[list[Tensor]] = []
    for texts in parts:
        with collected(network.model.layers) as seen:
            network.model(texts.ids, use_cache=False)
        states.append([state[texts.places] for state in seen])
    every = [torch.cat(layer)[:_JUDGED] for layer in zip(*states, strict=True)]
    final, wanted = target.norm(every[-1]), torch.cat([texts.wanted for texts in parts])[:_JUDGED]
    logits = target.head(final)
    exits = dict(enumerate(every[:-1], start=1))
    seen_by = judge(target.head, {"lens": lambda _, state: target.norm(state)}, exits, final)["lens"]
    return {
        "places": len(final),
        "loss": round(float(cross_entropy(logits, wanted)), 4),
        "keeps": round(float((logits.argmax(-1) == wanted).double().mean()), 4),
        "exits": {str(depth): quality(*of) for depth, of in seen_by.items()},
    }


def losses_by_depth(target: CausalLM, network: Any, watched: Sequence[Texts]) -> dict[str, float]:
    """Cross-entropy of the answers' tokens at every fourth depth from the middle on, and of the whole network."""
    depths = (*default_depths(target), target.n_layers)
    output, bias = _output_matrix(target)
    total, count = torch.zeros(len(depths), device=target.device), 0
    for texts in watched:
        with collected(network.model.layers) as states:
            network.model(texts.ids, use_cache=False)
        for number, depth in enumerate(depths):
            ready = network.model.norm(states[depth - 1][texts.places])
            total[number] += len(texts.wanted) * _cross_entropy(ready, output, bias, texts.wanted)
        count += len(texts.wanted)
    return {f"loss_{depth}": float(each) for depth, each in zip(depths, total / count, strict=True)}


def _cross_entropy(
    ready: Float[Tensor, "n D"],
    output: Float[Tensor, "V D"],
    bias: Float[Tensor, "V"] | None,
    wanted: Int[Tensor, "n"] | Float[Tensor, "n V"],
) -> Float[Tensor, ""]:
    """Of states before the output matrix, from tokens or from distributions."""
    if wanted.dim() == 1:
        return cross_entropy(F.linear(ready, output, bias), wanted)
    return draft_loss_of_states(CROSS_ENTROPY, [(ready, output)], bias, wanted)[0]


def _of_transformers(target: CausalLM) -> Any:
    if target.hf is None:
        raise ValueError(f"{target.name} must be loaded with the model of transformers beside it.")
    return target.hf


def _output_matrix(target: CausalLM) -> tuple[Float[Tensor, "V D"], Float[Tensor, "V"] | None]:
    return target.output_rows(torch.arange(target.vocab_size, device=target.device))


def _portions(found: Features, tokens: int, places: int) -> list[list[int]]:
    """Batches of held-out dialogues whose answers have so many tokens together, or all."""
    rows: list[int] = []
    count = 0
    for row in found.held_out:
        if count >= places:
            break
        rows.append(row)
        count += len(found.answers.rows[row].answer)
    return [[rows[place] for place in batch] for batch in batches([(_ids(found, row), []) for row in rows], tokens)]


def _ids(found: Features, row: int) -> list[int]:
    example = found.answers.rows[row]
    return [*example.prompt, *example.answer]


def _whole(before: dict[str, Any], after: dict[str, Any]) -> str:
    return (
        f"  whole model: loss {before['loss']:.4f} before, {after['loss']:.4f} after; it keeps "
        f"{after['keeps']:.1%} of its own tokens ({before['keeps']:.1%} before)"
    )
