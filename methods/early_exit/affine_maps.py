"""Exits for a model that was not trained to exit: an affine map after each, in closed form.

A map takes the state after an exit, normed by the model's final norm, to the normed state after the whole model, which
the output matrix then multiplies. It is a ridge regression over the positions of the model's own answers (Belrose et
al. 2023, arXiv 2303.08112, train such maps by gradient descent on the KL divergence, ``distillation.py``; Yom Din et
al. 2023, arXiv 2303.09435, fit linear ones in closed form). The fit takes seconds besides the forward passes, and the
model does not change.

Measured on SmolLM2-135M, agreement with the whole model by lens and by map: 10 and 24 % at layer 15, 36 and 59 % at
layer 24, 60 and 81 % at layer 29 of 30. Gradient training adds 2 to 6 points; a model trained to exit closes the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from methods.early_exit.exits import Lens, Reader, default_depths, require_depths
from methods.early_exit.training_states import states_over_answers
from methods.engine.causal_lm import CausalLM
from methods.training import exit_quality
from methods.training.answers import AnswerRecipe
from methods.training.exit_quality import Seen
from methods.training.interface import TrainingContext

HELD_OUT = 4096  # places that exits are judged at, at most

Maps = dict[int, tuple[Float[Tensor, "D D"], Float[Tensor, "D"]]]


@dataclass(frozen=True)
class Places:
    """States of the target from which it chooses tokens of its answers.

    Attributes:
        exits: by depth, the raw state after it.
        final: after the whole model and its norm.
        tokens: what the model chose there.
    """

    exits: dict[int, Float[Tensor, "N D"]]
    final: Float[Tensor, "N D"]
    tokens: Int[Tensor, "N"]

    def __len__(self) -> int:
        return len(self.final)

    def first(self, count: int) -> Places:
        """The first ``count`` of them."""
        exits = {depth: states[:count] for depth, states in self.exits.items()}
        return Places(exits, self.final[:count], self.tokens[:count])


def chosen_depths(exits: Sequence[int] | None, target: CausalLM) -> tuple[int, ...]:
    """The depths asked for; None: every fourth from the middle of the model.

    Raises:
        ValueError: depths that the model does not have.
    """
    depths = default_depths(target) if exits is None else tuple(exits)
    require_depths(depths, target, Lens(target), "train.exits")
    return depths


def gather(context: TrainingContext, depths: Sequence[int], recipe: AnswerRecipe, tokens: int) -> tuple[Places, Places]:
    """States over the target's own answers: ``tokens`` to fit to, and an eighth as many of other dialogues."""
    held_out = min(HELD_OUT, -(-tokens // 8))
    parts = states_over_answers(context, [depth - 1 for depth in depths], recipe, tokens, held_out)
    train, judged = (
        Places({depth: part.hidden_layers[depth - 1] for depth in depths}, part.hidden, part.tokens) for part in parts
    )
    return train, judged


@torch.inference_mode()
def fit_maps(target: CausalLM, places: Places, ridge: float) -> Maps:
    """Weight and bias of the map at each exit: ridge regression with a free bias, in 64 bit."""
    return {depth: _fit(target, states, places.final, ridge) for depth, states in places.exits.items()}


def _fit(
    target: CausalLM, states: Float[Tensor, "N D"], final: Float[Tensor, "N D"], ridge: float
) -> tuple[Float[Tensor, "D D"], Float[Tensor, "D"]]:
    normed, wanted = target.norm(states).double(), final.double()
    middle, centre = normed.mean(0), wanted.mean(0)
    x, y = normed - middle, wanted - centre
    square = x.T @ x
    penalty = ridge * square.diagonal().mean() * torch.eye(len(square), dtype=square.dtype, device=square.device)
    weight = torch.linalg.solve(square + penalty, x.T @ y).T
    return weight, centre - weight @ middle


def judge(target: CausalLM, readers: Mapping[str, Reader], places: Places) -> dict[str, dict[int, Seen]]:
    reads = {name: reader.read for name, reader in readers.items()}
    return exit_quality.judge(target.head, reads, places.exits, places.final)


def compare(target: CausalLM, readers: Mapping[str, Reader], places: Places) -> dict[str, Any]:
    """Agreement of the exits with the whole model by each reader, such as before and after training, by depth."""
    return {
        name: {str(depth): exit_quality.quality(*seen) for depth, seen in by.items()}
        for name, by in judge(target, readers, places).items()
    }
